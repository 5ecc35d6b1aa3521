// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One operation of a Communicator: its waits and its errors.
// Private to zero/comm/communicator.cc and the exchanges beside it; starts nothing itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/base/own_process.h"

namespace zero {

// The first line of what a transport threw, without the C++ backtrace.
std::string reason_of(const std::exception_ptr& thrown);

// Knows whether a group still works. Shared by a Communicator and its operations,
// which may be waited for on other threads. Thread safety: every member.
class GroupHealth {
 public:
  GroupHealth(int rank, int world_size, std::string name, std::chrono::milliseconds timeout);
  // `action` runs at the first failure, with its message; it must not throw. To be set before the
  // first operation.
  using FailureAction = std::function<void(const std::string& message)>;
  void on_first_failure(FailureAction action) { on_failure_ = std::move(action); }
  // `has_ended` says whether the connection to a rank is known to have ended. It must not wait or
  // throw. To be set before the first operation.
  void ask_for_ended(std::function<bool(int rank)> has_ended) { has_ended_ = std::move(has_ended); }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // " (this is rank 1 of 4 in group ...)": every message has it.
  std::string where() const;
  // Throws in a forked child, and when the group has failed.
  void check(const std::string& what) const;
  void check_process(const std::string& what) const {
    if (!process_.here()) process_.check(what + where());
  }
  bool in_own_process() const { return process_.here(); }
  // Remembers `message` if it is the first, since later ones follow from it. Does nothing in a
  // forked child, whose group is its parent's.
  void fail(const std::string& message) noexcept;
  // Empty while all is well.
  std::string first_failure() const;

  // Waits for `work`, a transfer to or from `peer`. A failure of the group ends it, on whichever
  // thread, and so does the end of its connection, within about three seconds. For neither can one
  // rely on a transport: Gloo does not end the wait for a message of which a part has moved. Throws
  // what the transport throws; returns false when the wait was ended.
  bool wait(c10d::Work& work, int peer, std::chrono::milliseconds limit);
  // For a thread that looks after long waits: ends those whose connections have ended.
  void look_at_waits() noexcept;

  void operation_begins();
  void operation_ends();
  int operations_under_way() const;

 private:
  const int rank_;
  const int world_size_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  const OwnProcess process_;
  FailureAction on_failure_;
  std::function<bool(int)> has_ended_;
  mutable std::mutex mutex_;
  std::string failure_;
  int under_way_ = 0;
  struct Wait {
    c10d::Work* work;
    int peer;
    bool ended = false;  // at the last look
  };
  std::list<Wait> waits_;
};

// An operation under way: a list of transfers to wait for, and actions around them. Actions of one
// kind run in the order in which they were added.
class Operation {
 public:
  // `number` is that of the operation in its communicator, the same on all ranks.
  Operation(std::shared_ptr<GroupHealth> health, std::string what, int64_t number = 0);
  // Without wait(), data of a transfer may still arrive: the group counts as failed then.
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Makes an operation for a part of this one, which has its name, its number and tags of its own.
  // An operation has at most two parts.
  std::shared_ptr<Operation> part();
  // `wait_for_parts(start)` takes the place of everything that wait() does. Its errors are final.
  using Clock = std::chrono::steady_clock;
  void consists_of(std::function<void(Clock::time_point start)> wait_for_parts);

  // Returns the first of `count` tags that are the same on all ranks and that no other operation
  // under way has. They are below 2^30, as zero/comm/backends/shared_rows.h asks.
  int take_tags(int count = 1);

  // Drops all transfers of an operation that could not be started.
  void cancel();
  // The same: the group has failed, since one of them threw `reason` when it was to
  // start. Throws c10::Error.
  [[noreturn]] void fail_to_start(const std::exception_ptr& reason);

  // A null `work` stands for something that is done already.
  void add_receive(int peer, c10::intrusive_ptr<c10d::Work> work);
  void add_send(int peer, c10::intrusive_ptr<c10d::Work> work);
  // `work` involves all ranks at once. `stream`: wait() must let the current stream wait, not the
  // host.
  void add_whole(c10::intrusive_ptr<c10d::Work> work, bool stream);
  // `action` runs first in wait(), and may start further transfers. If it throws, the operation
  // has failed.
  void on_wait(std::function<void()> action) { on_wait_.push_back(std::move(action)); }
  // `action` runs when everything has been received, before wait() waits for the sends. If it
  // throws, the operation has failed. It may add further sends and receives, and actions for
  // them: wait() goes on with those, within the same time limit.
  void on_received(std::function<void()> action) { on_received_.push_back(std::move(action)); }
  // `action` runs after success, on the thread that waited, and lives until wait() returns.
  void on_success(std::function<void()> action) { on_success_.push_back(std::move(action)); }

  // Blocks until all transfers are complete. Throws when one is not within the group's timeout,
  // counted from `start`.
  void wait(Clock::time_point start = Clock::now());
  // Blocks until everything has been received and the actions for it have run; wait() is still to
  // follow, for the sends.
  void receive(Clock::time_point start = Clock::now());

 private:
  enum class Kind { kReceive, kSend, kWhole, kStream };
  struct Step {
    Kind kind;
    int peer;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Failures;
  using Actions = std::vector<std::function<void()>>;

  // Takes all actions; an error of one is a failure of the operation.
  static void run(Actions& actions, Failures& failures);
  void add(Kind kind, int peer, c10::intrusive_ptr<c10d::Work> work);
  // Waits for all receives, stage by stage; leaves the sends in steps_.
  void receive_all(Clock::time_point start, Failures& failures);
  // Throws if there are failures, which are the group's then.
  void check(const Failures& failures, Clock::time_point start);
  void await(const Step& step, Clock::time_point start, Failures& failures);
  // For the line on stderr about a long wait.
  std::string slow_text() const;
  std::string describe(const Failures& failures, Clock::time_point start) const;

  const std::shared_ptr<GroupHealth> health_;
  const std::string what_;
  const int64_t number_;
  std::vector<Step> steps_;
  Actions on_wait_;
  Actions on_received_;
  Actions on_success_;
  std::function<void(Clock::time_point)> wait_for_parts_;
  int parts_ = 0;
  int part_ = 0;                  // 0: the whole
  int next_tag_ = 0;              // within this part
  std::atomic<int> awaited_{-1};  // The peer that wait() waits for.
};

}  // namespace zero
