// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How often this process has used each name of a group in its store. A use is numbered, so that two
// of one name never meet there, and the first one of a rank meets the first one of another.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>

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
  // Returns the names of a subgroup.
  std::shared_ptr<StoreNames> subgroup(const std::string& name);

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

  std::mutex mutex_;
  std::map<std::string, int> used_;
  std::map<std::string, std::shared_ptr<StoreNames>> subgroups_;
};

}  // namespace zero
