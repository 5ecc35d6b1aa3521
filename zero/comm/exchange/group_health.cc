// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/group_health.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/slow_wait.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A wait that is so much over its limit is ended from outside.
constexpr milliseconds kOverLimit{500};
// A lost wake-up costs so much.
constexpr std::chrono::seconds kWakeUpSlack{1};

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

// The lock is not held while the action runs, which may wait. `acting_` is what replace() waits
// for.
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

// The first failure, in this order:
//   1. remember it, so that no operation begins any more and none reports another one;
//   2. announce it: the others look for the reason when their connections end;
//   3. end the waits of this rank, whichever thread is in them;
//   4. end the connections, so that the waits of the other ranks end.
void GroupHealth::fail(const std::string& message) noexcept {
  if (!in_own_process()) return;
  // 1
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = message;
    if (failures_) ++*failures_;
  }
  // 2
  run(announce_, message);
  // 3
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Wait& wait : waits_) end_wait(*wait.work);
  }
  // 4
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
  const SlowWait notice([this] {
    return c10::str("rank ", rank_, " of ", world_size_, " in group \"", name_,
                    "\" waits for its thread that reports a failure");
  });
  while (!idle_.wait_for(lock, kWakeUpSlack, idle)) {
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
  // 1. Be seen by fail() and look_at_waits(). A failure before that would not end this wait.
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_.empty()) return false;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto entry = waits_.insert(waits_.end(), {&work, peer, deadline});
  lock.unlock();
  // 2. Wait without the lock.
  std::exception_ptr error;
  bool complete = false;
  try {
    complete = work.wait(limit);
  } catch (...) {
    error = std::current_exception();
  }
  // 3. `work` may end with the caller from here on.
  lock.lock();
  waits_.erase(entry);
  if (error) std::rethrow_exception(error);
  return complete;
}

// A wait that is complete may be seen once more before its thread wakes up, so one look is not
// enough.
void GroupHealth::look_at_waits() noexcept {
  // 1. Which connections are waited for?
  std::set<int> peers, ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Wait& wait : waits_) peers.insert(wait.peer);
  }
  // 2. Ask for each of them once, without the lock: the answer takes that of the exchange.
  for (const int peer : peers) {
    if (run(has_ended_, peer)) ended.insert(peer);
  }
  // 3. End the waits that are still there.
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto late = std::chrono::steady_clock::now() - kOverLimit;
  for (Wait& wait : waits_) {
    const bool again = ended.contains(wait.peer) && std::exchange(wait.ended, true);
    if (again || wait.deadline < late) end_wait(*wait.work);
  }
}

std::set<int> GroupHealth::ended_peers() noexcept {
  std::set<int> ended;
  for (int peer = 0; peer < world_size_ && first_failure().empty(); ++peer) {
    if (peer != rank_ && run(has_ended_, peer)) ended.insert(peer);
  }
  return first_failure().empty() ? ended : std::set<int>();
}

std::string GroupHealth::first_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace zero
