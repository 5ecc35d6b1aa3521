// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/rendezvous/bounded_store.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "zero/base/detached_call.h"
#include "zero/base/error_text.h"
#include "zero/base/message_probe.h"
#include "zero/base/own_process.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kShortestLimit{100};
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{100};

// The first few, for errors.
std::string keys_text(const std::vector<std::string>& keys) {
  if (keys.empty()) return "no key";
  std::string text = "\"" + keys[0] + "\"";
  if (keys.size() > 1) text += c10::str(" and ", keys.size() - 1, " more keys");
  return text;
}

}  // namespace

struct BoundedStore::Server {
  std::string name;
  bool here = false;
  StorePtr store;  // without a prefix
  OwnProcess process;
  std::atomic<bool> gone = false;

  std::mutex mutex;
  // Calls that their callers left behind. While one hangs, it keeps the connection.
  std::vector<std::shared_future<void>> left_behind;

  // Returns whether one still hangs at `deadline`.
  bool hangs_until(std::chrono::steady_clock::time_point deadline) {
    std::vector<std::shared_future<void>> calls;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      std::erase_if(left_behind, [](const std::shared_future<void>& call) {
        return call.wait_for(milliseconds(0)) == std::future_status::ready;
      });
      calls = left_behind;
    }
    return std::ranges::any_of(calls, [&](const std::shared_future<void>& call) {
      return call.wait_until(deadline) != std::future_status::ready;
    });
  }
};

BoundedStore::BoundedStore(StorePtr store, milliseconds limit, const std::string& name,
                           bool served_here)
    : BoundedStore(std::move(store), std::make_shared<Server>(), limit, std::nullopt, nullptr) {
  server_->store = store_;
  server_->name = name;
  server_->here = served_here;
}

BoundedStore::BoundedStore(StorePtr store, std::shared_ptr<Server> server, milliseconds limit,
                           std::optional<Clock::time_point> deadline,
                           std::shared_ptr<StoreKeys> notes)
    : Store(limit),
      store_(std::move(store)),
      server_(std::move(server)),
      limit_(limit),
      deadline_(deadline),
      notes_(std::move(notes)) {}

c10::intrusive_ptr<BoundedStore> BoundedStore::of(StorePtr store, milliseconds limit) {
  if (auto* bounded = dynamic_cast<BoundedStore*>(store.get())) {
    return c10::intrusive_ptr<BoundedStore>::reclaim_copy(bounded);
  }
  return c10::make_intrusive<BoundedStore>(std::move(store), limit);
}

c10::intrusive_ptr<BoundedStore> BoundedStore::under(const std::string& prefix) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(new BoundedStore(
      c10::make_intrusive<c10d::PrefixStore>(prefix, store_), server_, limit_, deadline_, notes_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::without_prefix() const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(server_->store, server_, limit_, deadline_, nullptr));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::within(milliseconds limit) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, server_, limit, Clock::now() + limit, notes_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::noting(std::shared_ptr<StoreKeys> keys) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, server_, limit_, deadline_, std::move(keys)));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::each_within(milliseconds limit) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, server_, limit, std::nullopt, notes_));
}

bool BoundedStore::served_here() const { return server_->here; }
bool BoundedStore::is_gone() const { return server_->gone; }

BoundedStore::Clock::time_point BoundedStore::deadline_from_now() const {
  return deadline_.value_or(Clock::now() + limit_);
}

template <typename Call>
auto BoundedStore::ask(const std::string& what, Clock::time_point deadline, Call call) {
  const auto silent = [&](const char* since) {
    return c10::str(server_->name, " did not answer ", since, " (", what,
                    "): the process that serves it is stopped, or its machine is silent");
  };
  server_->process.check(server_->name);  // a child would write to the connection of its parent
  if (server_->hangs_until(deadline)) throw_communication_error(silent("to an earlier call"));
  // A store that is asked in the last moment may still answer.
  deadline = std::max(deadline, Clock::now() + kShortestLimit);
  auto ended = std::make_shared<std::promise<void>>();
  auto answer = start_detached([store = store_, ended, call = std::move(call)] {
    const auto at_end = c10::make_scope_exit([&] { ended->set_value(); });
    return call(*store);
  });
  if (answer.wait_until(deadline) != std::future_status::ready) {
    const std::lock_guard<std::mutex> lock(server_->mutex);
    server_->left_behind.push_back(ended->get_future().share());
    throw_communication_error(silent(c10::str("within ", limit_.count(), " ms").c_str()));
  }
  try {
    return answer.get();
  } catch (const c10::DistNetworkError& error) {
    server_->gone = true;
    throw_communication_error(c10::str(server_->name, " is gone (", what,
                                       "): the process that serves it has ended, or cannot be "
                                       "reached. ",
                                       error_line(error)));
  }
}

template <typename Call>
auto BoundedStore::write(const std::string& what, const std::vector<std::string>& keys, Call call) {
  probe_message(what);
  for (size_t i = 0; notes_ && i < keys.size(); ++i) {
    notes_->withLock([&](auto& noted) { noted.emplace(std::pair(store_.get(), keys[i]), store_); });
  }
  return ask(what, deadline_from_now(), std::move(call));
}

StorePtr BoundedStore::clone() {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, server_, limit_, deadline_, notes_));
}

void BoundedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  write("set of \"" + key + "\"", {key}, [=](c10d::Store& store) { store.set(key, value); });
}

std::vector<uint8_t> BoundedStore::compareSet(const std::string& key,
                                              const std::vector<uint8_t>& expected,
                                              const std::vector<uint8_t>& desired) {
  return write("compare and set of \"" + key + "\"", {key},
               [=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
}

std::vector<uint8_t> BoundedStore::get(const std::string& key) {
  const auto deadline = deadline_from_now();
  wait_until({key}, deadline);
  return ask("get of \"" + key + "\"", deadline,
             [=](c10d::Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  const std::string what = "add to \"" + key + "\"";
  const auto call = [=](c10d::Store& store) { return store.add(key, value); };
  return value == 0 ? ask(what, deadline_from_now(), call) : write(what, {key}, call);
}

bool BoundedStore::deleteKey(const std::string& key) {
  return ask("removal of \"" + key + "\"", deadline_from_now(),
             [=](c10d::Store& store) { return store.deleteKey(key); });
}

void BoundedStore::remove(const std::vector<std::shared_ptr<StoreKeys>>& keys) {
  ask("removal of keys", deadline_from_now(), [keys](c10d::Store&) {
    for (const auto& some : keys) {
      const auto all = some->withLock([](const auto& noted) { return noted; });
      for (const auto& [key, store] : all) store->deleteKey(key.second);
    }
  });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
  return ask("check of " + keys_text(keys), deadline_from_now(),
             [=](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
  return ask("number of keys", deadline_from_now(),
             [](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const std::vector<std::string>& keys) {
  wait_until(keys, deadline_from_now());
}

void BoundedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  wait_until(keys, deadline_.value_or(Clock::now() + timeout));
}

void BoundedStore::wait_until(const std::vector<std::string>& keys, Clock::time_point deadline) {
  const auto start = Clock::now();
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const bool there = ask("check of " + keys_text(keys), deadline,
                           [=](c10d::Store& store) { return store.check(keys); });
    if (there) return;
    const auto now = Clock::now();
    if (now >= deadline) {
      throw_communication_error(
          c10::str("waited ", std::chrono::duration_cast<milliseconds>(now - start).count(),
                   " ms for ", keys_text(keys), " in ", server_->name));
    }
    std::this_thread::sleep_until(std::min(deadline, now + pause));
  }
}

void BoundedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  write("append to \"" + key + "\"", {key}, [=](c10d::Store& store) { store.append(key, value); });
}

std::vector<std::vector<uint8_t>> BoundedStore::multiGet(const std::vector<std::string>& keys) {
  const auto deadline = deadline_from_now();
  wait_until(keys, deadline);
  return ask("get of " + keys_text(keys), deadline,
             [=](c10d::Store& store) { return store.multiGet(keys); });
}

void BoundedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  write("set of " + keys_text(keys), keys,
        [=](c10d::Store& store) { store.multiSet(keys, values); });
}

bool BoundedStore::hasExtendedApi() const { return store_->hasExtendedApi(); }

}  // namespace zero
