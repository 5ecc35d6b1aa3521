// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/operation.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/own_thread_wait.h"
#include "zero/base/slow_wait.h"
#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A backend's own collective may take this much longer than the timeout it was given, so that its
// message, which knows more, is the first.
constexpr milliseconds kBackendSlack{500};

// All ranks see the end of a connection within this time, mostly.
constexpr milliseconds kSeenByAll{20};

// A tag is the number of the operation, that of its part, and a counter, from the highest bits on.
// After kNumbers operations numbers begin again: so many are never under way.
constexpr int kNumbers = 1 << 15;
constexpr int kParts = 4;  // with the whole, which is part 0
constexpr int kTagsOfPart = 1 << 13;

// "also lost rank 2, rank 5"
std::string also_lost(const std::set<int>& ranks) {
  constexpr size_t kRanksNamed = 8;
  std::string text = "also lost ";
  size_t named = 0;
  for (const int rank : ranks) {
    if (named == kRanksNamed) return c10::str(text, " and ", ranks.size() - named, " more");
    text += c10::str(named++ == 0 ? "rank " : ", rank ", rank);
  }
  return text;
}

// The first line of what a transport threw, without the C++ backtrace.
std::string reason_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error_line(error);
  } catch (...) {
    return "unknown exception";
  }
}

bool out_of_memory(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return is_out_of_memory(error);
  } catch (...) {
    return false;
  }
}

}  // namespace

// The failures of one operation.
struct Operation::Failures {
  bool own = false;       // An action failed here for a reason of its own.
  std::string broken;     // The reason, if a transfer broke before the time was up.
  int broken_peer = -1;   // Whose connection that was.
  std::set<int> ended;    // Whose connections have ended by now.
  std::vector<int> late;  // Peers whose data, or whose readiness for ours, did not come.
  bool sends_only = true;
  bool any() const { return !broken.empty() || !late.empty(); }
};

Operation::Operation(std::shared_ptr<GroupHealth> health, std::string what, int64_t number)
    : health_(std::move(health)), what_(std::move(what)), number_(number) {
  health_->operation_begins();
}

std::shared_ptr<Operation> Operation::part() {
  TORCH_INTERNAL_ASSERT(part_ == 0 && parts_ < kParts - 1, "parts of ", what_);
  auto part = make_owned<Operation>(health_, what_, number_);
  part->part_ = ++parts_;
  return part;
}

void Operation::wait_by(std::function<void(Clock::time_point)> wait) {
  wait_by_parts_ = std::move(wait);
}

void Operation::wait_for_thread(const std::future<void>& future,
                                const std::atomic<int64_t>& progress) const {
  if (future.wait_for(milliseconds(0)) == std::future_status::ready) return;
  OwnThreadWait wait(
      c10::str("rank ", health_->rank(), " of ", health_->world_size(), " in group \"",
               health_->name(), "\" waits for its thread that starts ", what_),
      health_->timeout());
  while (future.wait_for(OwnThreadWait::kLook) != std::future_status::ready) wait.look(progress);
}

int Operation::take_tags(int count) {
  const int first = next_tag_;
  next_tag_ += count;
  TORCH_INTERNAL_ASSERT(next_tag_ <= kTagsOfPart, what_, " takes ", next_tag_, " tags");
  const auto number = static_cast<int>(number_ % kNumbers);
  return (number * kParts + part_) * kTagsOfPart + first;
}

void Operation::cancel() {
  transfers_.clear();
  before_receiving_.clear();
}

void Operation::fail_to_start(const std::exception_ptr& reason) {
  cancel();
  std::string message = c10::str(what_, ": could not start: ", reason_of(reason));
  // The reason names the first rank that could not be reached. It may be one that has closed its
  // connections since it lost another one.
  const std::set<int> ended = ended_peers();
  if (ended.size() > 1) message += "; " + also_lost(ended);
  message += health_->where();
  health_->fail(message);
  TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory(reason), message);
  throw_communication_error(message);
}

Operation::~Operation() {
  health_->operation_ends();
  const bool in_transfer =
      std::any_of(transfers_.begin(), transfers_.end(), [](const Transfer& transfer) {
        return transfer.kind == Kind::kReceive || transfer.kind == Kind::kSend;
      });
  if (in_transfer) {
    health_->fail(c10::str(what_, ": dropped without being waited for", health_->where()));
  }
}

void Operation::add(Kind kind, int peer, WorkPtr work) {
  if (work) transfers_.push_back({kind, peer, std::move(work)});
}

void Operation::wait(Clock::time_point start) {
  health_->check_process(what_);
  // 1. Of two levels, each part waits for itself.
  if (const auto wait = std::exchange(wait_by_parts_, nullptr)) {
    wait(start);
    return;
  }
  // 2. What sends nothing succeeds in a failed group, too.
  if (transfers_.empty() && after_receiving_.empty() && at_end_.empty()) return;
  health_->check(what_);
  const c10::InferenceMode mode(inference_mode_);
  const at::NoGradGuard no_grad;
  const SlowWait notice([this] { return slow_text(); },
                        [health = health_] { health->look_at_waits(); });
  // 3. Receive. A missing receive says more than a send that was not taken: then no send is waited
  //    for.
  Failures failures;
  receive_all(start, failures);
  // 4. Wait until the peers have taken what was sent.
  const std::vector<Transfer> sends = std::exchange(transfers_, {});
  if (!failures.any()) {
    for (const Transfer& transfer : sends) wait_for_transfer(transfer, start, failures);
  }
  // 5. A failure is the group's.
  check(failures, start);
  // 6. Kept to the end: actions keep alive what was sent.
  Actions actions = std::exchange(at_end_, {});
  for (const auto& action : actions) action();
}

void Operation::receive(Clock::time_point start) {
  health_->check(what_);
  const c10::InferenceMode mode(inference_mode_);
  const at::NoGradGuard no_grad;
  const SlowWait notice([this] { return slow_text(); },
                        [health = health_] { health->look_at_waits(); });
  Failures failures;
  receive_all(start, failures);
  if (failures.any()) transfers_.clear();
  check(failures, start);
}

void Operation::check(Failures& failures, Clock::time_point start) {
  if (!failures.any()) return;
  if (!failures.broken.empty()) failures.ended = ended_peers();
  const std::string message = describe(failures, start);
  health_->fail(message);
  const std::string first = health_->first_failure();
  throw_error(!failures.own,
              first == message ? message : message + "\nThe group failed before: " + first);
}

// All ranks lose a rank that ends at one time, and each then closes its connections to the others.
// So this rank gives the others time to see for themselves which one it was, and itself to see all
// that have ended.
std::set<int> Operation::ended_peers() const {
  if (health_->ended_peers().empty()) return {};
  std::this_thread::sleep_for(kSeenByAll);
  return health_->ended_peers();
}

void Operation::run(Actions& actions, Failures& failures) {
  for (const auto& action : std::exchange(actions, {})) {
    if (failures.any()) return;
    try {
      action();
    } catch (const CommunicationError&) {
      failures.broken = reason_of(std::current_exception());
    } catch (...) {
      failures.broken = reason_of(std::current_exception());
      failures.own = true;
    }
  }
}

// Works in stages, since what was received may have to be sent on: in a tree, say, or in the next
// step of a doubling. Each stage
//   1. starts what is to start in wait();
//   2. waits for its receives, in the order in which they were added, and puts its sends aside: a
//      peer may take them when it has received itself;
//   3. runs the actions for what was received. These may add transfers and actions, for the next
//      stage.
// After a failure the remaining receives get 1 ms each, to say which other ranks are late.
void Operation::receive_all(Clock::time_point start, Failures& failures) {
  std::vector<Transfer> sends;
  while (true) {
    // 1
    run(before_receiving_, failures);
    // 2
    const std::vector<Transfer> transfers = std::exchange(transfers_, {});
    bool received = false;
    for (const Transfer& transfer : transfers) {
      if (transfer.kind == Kind::kSend) {
        sends.push_back(transfer);
      } else {
        wait_for_transfer(transfer, start, failures);
        received = true;
      }
    }
    if (!received && after_receiving_.empty()) break;
    // 3
    run(after_receiving_, failures);
  }
  transfers_ = std::move(sends);
}

void Operation::wait_for_transfer(const Transfer& transfer, Clock::time_point start,
                                  Failures& failures) {
  // 1. What time is left? All transfers of an operation share one limit.
  const Clock::time_point deadline = start + health_->timeout();
  const bool first = !failures.any();
  awaited_ = transfer.peer;
  auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  if (!first || left < milliseconds(1)) left = milliseconds(1);
  if (transfer.kind == Kind::kWhole) left += kBackendSlack;
  // 2. Wait.
  const bool of_a_peer = transfer.kind == Kind::kReceive || transfer.kind == Kind::kSend;
  std::string reason;
  try {
    // A stream cannot be waited for with a limit without spinning on the host.
    if (of_a_peer                        ? health_->wait(*transfer.work, transfer.peer, left)
        : transfer.kind == Kind::kStream ? transfer.work->wait()
                                         : transfer.work->wait(left)) {
      return;
    }
    reason = health_->first_failure().empty() ? "its connection has ended" : "aborted";
  } catch (...) {
    reason = reason_of(std::current_exception());
  }
  // 3. The first one that ends before the time is up is the reason. All others are late.
  if (first && (!of_a_peer || Clock::now() < deadline)) {
    failures.broken = reason;
    failures.broken_peer = transfer.peer;
  } else if (transfer.peer != failures.broken_peer &&
             std::find(failures.late.begin(), failures.late.end(), transfer.peer) ==
                 failures.late.end()) {
    failures.late.push_back(transfer.peer);
    if (transfer.kind == Kind::kReceive) failures.sends_only = false;
  }
}

std::string Operation::slow_text() const {
  const int peer = awaited_;
  return c10::str("rank ", health_->rank(), " of ", health_->world_size(), " waits for ",
                  peer < 0 ? std::string("the other ranks") : c10::str("rank ", peer), ": ", what_,
                  " in group \"", health_->name(), "\" (up to ", duration_text(health_->timeout()),
                  ")");
}

std::string Operation::describe(const Failures& failures, Clock::time_point start) const {
  const auto elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start).count();
  std::ostringstream text;
  text << what_ << ": ";
  if (!failures.broken.empty()) {
    if (failures.broken_peer >= 0) text << "lost rank " << failures.broken_peer << ": ";
    text << failures.broken << " (after " << elapsed << " ms of at most "
         << health_->timeout().count() << " ms)";
  }
  // That rank may have closed its connections since it lost another one: name it, too.
  std::set<int> others = failures.ended;
  others.erase(failures.broken_peer);
  if (!others.empty()) text << "; " << also_lost(others);
  std::vector<int> late = failures.late;
  std::erase_if(late, [&](int peer) { return failures.ended.contains(peer); });
  std::ranges::sort(late);
  if (!late.empty()) {
    const char* verb = failures.sends_only ? " did not take its data" : " did not send";
    text << (failures.broken.empty() ? "" : "; ") << ranks_text(late) << verb;
    // When a connection broke, the others were given no more time.
    if (failures.broken.empty()) {
      text << " within " << health_->timeout().count() << " ms";
    } else {
      text << " so far";
    }
  }
  text << health_->where() << ". ";
  if (failures.broken.empty()) {
    text << "It may be stuck, have ended, or have skipped this call: see its output. If it is only "
            "slow, raise the group's timeout";
  } else {
    text << "The rank that failed first has the reason in its output";
  }
  return text.str();
}

}  // namespace zero
