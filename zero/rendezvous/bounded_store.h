// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A key-value store whose calls all end in time.
//
// The calls of c10d's TCPStore block for ever when the process that serves it is stopped or its
// machine is silent. Here each call runs on a thread of its own, and its caller leaves it behind at
// the time limit. A call that was left behind keeps the connection: later ones wait for it within
// their own limits.
#pragma once

#include <c10/util/Synchronized.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zero {

// The keys that were set through some stores. By address: an intrusive_ptr in a pair is compared as
// a bool.
using StoreKeys = c10::Synchronized<
    std::map<std::pair<c10d::Store*, std::string>, c10::intrusive_ptr<c10d::Store>>>;

// Throws CommunicationError where the store is silent or gone, and where a key does not come.
// Thread safety: every member, if `store` is thread-safe as TCPStore and HashStore are.
class BoundedStore final : public c10d::Store {
 public:
  // `limit` bounds each call, up to 100 ms. `name` is the subject of errors, for example "the store
  // of rank 0 at host:29500". `served_here`: others lose the store when this process ends.
  BoundedStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit,
               const std::string& name = "the store", bool served_here = false);

  // `store` itself if it is bounded already.
  static c10::intrusive_ptr<BoundedStore> of(c10::intrusive_ptr<c10d::Store> store,
                                             std::chrono::milliseconds limit);
  // The same store, all keys under `prefix`.
  c10::intrusive_ptr<BoundedStore> under(const std::string& prefix) const;
  // The same store with the keys of all others that it has, within the same limits.
  c10::intrusive_ptr<BoundedStore> without_prefix() const;
  // The same store for calls that end within `limit` from now, all together. wait() and get() wait
  // that long for a key, whatever time their caller asks for.
  c10::intrusive_ptr<BoundedStore> within(std::chrono::milliseconds limit) const;
  // The same store, which adds to `keys` those that are set through it, or through one that is made
  // of it by the functions above and below, but for without_prefix().
  c10::intrusive_ptr<BoundedStore> noting(std::shared_ptr<StoreKeys> keys) const;
  // The same store with `limit` for each call, whatever bounded this one: for an owner that keeps
  // it.
  c10::intrusive_ptr<BoundedStore> each_within(std::chrono::milliseconds limit) const;

  bool served_here() const;
  // Whether a call found the connection closed. No later call succeeds then.
  bool is_gone() const;

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  // Waits for the key.
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  // In one call. Those that are not there do no harm.
  void remove(const std::vector<std::shared_ptr<StoreKeys>>& keys);
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  // Asks again and again, at growing intervals of at most 100 ms: a call that waits in the server
  // would keep this connection from the other threads.
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  // Waits for the keys.
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Server;  // Shared by all copies of one store.

  BoundedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Server> server,
               std::chrono::milliseconds limit, std::optional<Clock::time_point> deadline,
               std::shared_ptr<StoreKeys> notes);
  Clock::time_point deadline_from_now() const;
  void wait_until(const std::vector<std::string>& keys, Clock::time_point deadline);
  // call(store) on a thread of its own. `what` names it in errors.
  template <typename Call>
  auto ask(const std::string& what, Clock::time_point deadline, Call call);
  // The same for a call that changes the values of `keys`.
  template <typename Call>
  auto write(const std::string& what, const std::vector<std::string>& keys, Call call);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Server> server_;
  const std::chrono::milliseconds limit_;
  const std::optional<Clock::time_point> deadline_;
  const std::shared_ptr<StoreKeys> notes_;  // see noting(); null without it
};

}  // namespace zero
