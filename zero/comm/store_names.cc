// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/store_names.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "zero/base/plain_text.h"
#include "zero/rendezvous/rendezvous.h"

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
  while (store.under(plain_text(name, "/", number + 1))->check({kLevels})) ++number;
  raise(name, number + 1);
  return number;
}

std::shared_ptr<const void> StoreNames::only_use(const std::string& name, const std::string& who) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<const void>& use = only_uses_[name];
  TORCH_CHECK(use.expired(), who,
              ": expected one of this name at a time, got another thread that connects one; make "
              "communicators, and construct optimizers, in one thread, in one order on all ranks");
  const auto only = std::make_shared<const char>();
  use = only;
  return only;
}

std::shared_ptr<StoreNames> StoreNames::subgroup(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<StoreNames>& names = subgroups_[name];
  if (!names) names = std::make_shared<StoreNames>();
  return names;
}

void StoreNames::add_recovery(const std::shared_ptr<StoreNames>& names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::ranges::find(recoveries_, names) == recoveries_.end()) recoveries_.push_back(names);
}

void StoreNames::add_keys(const std::string& name, std::shared_ptr<StoreKeys> keys,
                          std::weak_ptr<const void> user) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keys_.push_back({name, std::move(keys), std::move(user)});
}

void StoreNames::take_unused(const std::optional<std::string>& name, KeyLists& keys) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(keys_, [&](const KeysInUse& k) {
    const bool unused = (!name || k.name == *name) && k.user.expired();
    if (unused) keys.push_back(k.keys);
    return unused;
  });
  if (name) return;
  for (const auto& [key, names] : subgroups_) names->take_unused({}, keys);
}

void StoreNames::take_unused_of_recoveries(const StoreNames& now, KeyLists& keys) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& recovery : recoveries_) {
    if (recovery.get() != &now) recovery->take_unused({}, keys);
  }
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
    text += plain_text(used->second, " ", used->first, "\n");
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
