// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/group_health.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <set>
#include <utility>

#include "zero/base/error_text.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// After this time past its limit a wait is ended from outside.
constexpr milliseconds kLate{500};
constexpr std::chrono::seconds kLook{1};  // A lost wake-up costs so much.

void end_wait(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (...) {  // Not every transport can; then its own end of the group does it.
  }
}

}  // namespace

GroupHealth::GroupHealth(int rank, int world_size, std::string name, milliseconds timeout)
    : rank_(rank), world_size_(world_size), name_(std::move(name)), timeout_(timeout) {
  TORCH_CHECK(timeout_.count() > 0, "communicator: expected a timeout above 0 ms, got ",
              timeout_.count(), " ms; nothing may wait without a limit", where());
}

std::string GroupHealth::where() const {
  return c10::str(" (this is rank ", rank_, " of ", world_size_, " in group \"", name_, "\")");
}

void GroupHealth::check(const std::string& what) const {
  check_process(what);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) return;
  throw_communication_error(what + ": refused, because the group failed before: " + failure_);
}

template <typename Action, typename... Arguments>
auto GroupHealth::run(const Action& action, const Arguments&... arguments) {
  using Result = decltype(action(arguments...));
  std::unique_lock<std::mutex> lock(mutex_);
  if (!action) return Result();
  const auto entry = acting_.insert(acting_.end(), std::this_thread::get_id());
  lock.unlock();
  const auto at_end = c10::make_scope_exit([&] {
    lock.lock();
    acting_.erase(entry);
    idle_.notify_all();
  });
  return action(arguments...);
}

void GroupHealth::fail(const std::string& message) noexcept {
  if (!in_own_process()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = message;
    if (failures_) ++*failures_;
  }
  run(announce_, message);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Wait& wait : waits_) end_wait(*wait.work);
  }
  run(hang_up_);
}

void GroupHealth::replace(const std::function<void()>& body) {
  if (!in_own_process()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  // An action that replaces one cannot wait for itself.
  const auto idle = [this] {
    return std::ranges::all_of(acting_,
                               [](std::thread::id id) { return id == std::this_thread::get_id(); });
  };
  while (!idle_.wait_for(lock, kLook, idle)) {
  }
  body();
}

void GroupHealth::on_first_failure(FailureAction announce) {
  replace([&] { announce_.swap(announce); });
}

void GroupHealth::hang_up_with(std::function<void()> hang_up) {
  replace([&] { hang_up_.swap(hang_up); });
}

void GroupHealth::ask_for_ended(std::function<bool(int)> has_ended) {
  replace([&] { has_ended_.swap(has_ended); });
}

void GroupHealth::count_failure_in(std::shared_ptr<std::atomic<int64_t>> failures) {
  const std::lock_guard<std::mutex> lock(mutex_);
  failures_ = std::move(failures);
}

void GroupHealth::forget_actions() {
  on_first_failure(nullptr);
  hang_up_with(nullptr);
  ask_for_ended(nullptr);
}

bool GroupHealth::wait(c10d::Work& work, int peer, milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_.empty()) return false;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto entry = waits_.insert(waits_.end(), {&work, peer, deadline});
  lock.unlock();
  std::exception_ptr error;
  bool complete = false;
  try {
    complete = work.wait(limit);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  waits_.erase(entry);
  if (error) std::rethrow_exception(error);
  return complete;
}

// A wait that is complete may be seen once more before its thread wakes up, so one look is not
// enough.
void GroupHealth::look_at_waits() noexcept {
  std::set<int> peers, ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Wait& wait : waits_) peers.insert(wait.peer);
  }
  for (const int peer : peers) {
    if (run(has_ended_, peer)) ended.insert(peer);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto late = std::chrono::steady_clock::now() - kLate;
  for (Wait& wait : waits_) {
    const bool again = ended.contains(wait.peer) && std::exchange(wait.ended, true);
    if (again || wait.deadline < late) end_wait(*wait.work);
  }
}

std::string GroupHealth::first_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void GroupHealth::operation_begins() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++under_way_;
}

void GroupHealth::operation_ends() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --under_way_;
}

int GroupHealth::operations_under_way() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return under_way_;
}

}  // namespace zero
