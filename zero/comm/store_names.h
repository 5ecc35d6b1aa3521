// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How often this process has used each name of a group in its store. A use is numbered, so that two
// of one name never meet there, and the first one of a rank meets the first one of another.
//
// A rank removes the keys that it has set for a communicator when two things hold. Its own
// communicator is gone, and all ranks have come to a later call of the same name, or to a call of
// the group of a later recovery. All ranks make their calls in the same order, so no rank is still
// in the earlier call and reads its keys. Keys of a call that failed stay: ranks that come late
// read reasons there, and find the calls that they have missed.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "zero/rendezvous/bounded_store.h"

namespace zero {

// Copies of a group share one. Thread safety: every member.
class StoreNames {
 public:
  // Returns how often `name` was used before.
  int next(const std::string& name);
  // The same for a communicator, which has `store` under "<name>/<number>". Where the others have
  // begun a later one, since a call of theirs failed that this rank did not make, it is theirs.
  int next_communicator(const BoundedStore& store, const std::string& name);
  // Throws c10::Error, which begins with `who`, where what another call returned for `name` is
  // still there: of two communicators at once, ranks could not tell which one meets which.
  [[nodiscard]] std::shared_ptr<const void> only_use(const std::string& name,
                                                     const std::string& who);
  // Returns the names of a subgroup.
  std::shared_ptr<StoreNames> subgroup(const std::string& name);

  // `names` are those of a subgroup that a recovery made, which takes the place of earlier ones.
  void add_recovery(const std::shared_ptr<StoreNames>& names);

  // `keys` were set for a use of `name`, and may be asked for as long as `user` is there.
  void add_keys(const std::string& name, std::shared_ptr<StoreKeys> keys,
                std::weak_ptr<const void> user);
  // Moves the keys of former uses of `name` whose user is gone to the end of `keys`; without a name
  // those of all names, and of subgroups.
  using KeyLists = std::vector<std::shared_ptr<StoreKeys>>;
  void take_unused(const std::optional<std::string>& name, KeyLists& keys);
  // The same, without a name, of all groups of recoveries but `now`.
  void take_unused_of_recoveries(const StoreNames& now, KeyLists& keys);

  // A call that failed on one rank alone may have left it behind the others, or ahead of them, in
  // the stores that it made. Each rank publishes its uses of them in the store of a communicator
  // before it connects, and adopts the largest when it has.
  void publish_uses(c10d::Store& store);
  void adopt_uses(c10d::Store& store);

  // The name of a store that is made.
  static std::string name_of_store(const std::string& name) { return kStore + name; }
  // The first rank that makes a communicator sets this key.
  static constexpr const char* kLevels = "levels";

 private:
  static constexpr const char* kStore = "store/";
  // Counts as if `name` had been used at least so often.
  void raise(const std::string& name, int uses);
  // A line for each store: its uses and its name.
  std::string uses_text();
  void adopt(const std::string& uses);

  struct KeysInUse {
    std::string name;
    std::shared_ptr<StoreKeys> keys;
    std::weak_ptr<const void> user;
  };
  std::mutex mutex_;
  std::map<std::string, int> used_;
  std::map<std::string, std::weak_ptr<const void>> only_uses_;
  std::map<std::string, std::shared_ptr<StoreNames>> subgroups_;
  std::vector<std::shared_ptr<StoreNames>> recoveries_;  // of the subgroups
  std::vector<KeysInUse> keys_;
};

}  // namespace zero
