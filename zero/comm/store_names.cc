// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/store_names.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>

#include "zero/rendezvous/meeting.h"

namespace zero {
namespace {

constexpr const char* kStoresMade = "stores made";

}  // namespace

int StoreNames::next(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_[name]++;
}

int StoreNames::next_communicator(const BoundedStore& store, const std::string& name) {
  int number = next(name);
  while (store.under(c10::str(name, "/", number + 1))->check({kLevels})) ++number;
  raise(name, number + 1);
  return number;
}

std::shared_ptr<StoreNames> StoreNames::subgroup(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<StoreNames>& names = subgroups_[name];
  if (!names) names = std::make_shared<StoreNames>();
  return names;
}

void StoreNames::publish_uses(c10d::Store& store) {
  for (std::string own = uses_text(); !own.empty(); own = uses_text()) {
    const std::string held = claim(store, kStoresMade, own);
    adopt(held);
    const std::string largest = uses_text();
    if (largest == held || store.compareSet(kStoresMade, held, largest) == largest) return;
  }
}

void StoreNames::adopt_uses(c10d::Store& store) {
  if (store.check({kStoresMade})) adopt(store.get_to_str(kStoresMade));
}

void StoreNames::raise(const std::string& name, int uses) {
  const std::lock_guard<std::mutex> lock(mutex_);
  used_[name] = std::max(used_[name], uses);
}

std::string StoreNames::uses_text() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (auto used = used_.lower_bound(kStore);
       used != used_.end() && used->first.starts_with(kStore); ++used) {
    text += c10::str(used->second, " ", used->first, "\n");
  }
  return text;
}

void StoreNames::adopt(const std::string& uses) {
  std::istringstream lines(uses);
  std::string name;
  for (int number = 0; lines >> number && lines.get() == ' ' && std::getline(lines, name);) {
    raise(name, number);
  }
}

}  // namespace zero
