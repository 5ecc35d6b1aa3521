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
  mutable std::mutex mutex_;
  std::string failure_;
  int under_way_ = 0;
};

// An operation under way: a list of transfers to wait for, and actions around them.
class Operation {
 public:
  Operation(std::shared_ptr<GroupHealth> health, std::string what);
  // Without wait(), data of a transfer may still arrive: the group counts as failed then.
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // A null `work` stands for something that is done already.
  void add_receive(int peer, c10::intrusive_ptr<c10d::Work> work);
  void add_send(int peer, c10::intrusive_ptr<c10d::Work> work);
  // `work` involves all ranks at once. `stream`: wait() must let the current stream wait, not the
  // host.
  void add_whole(c10::intrusive_ptr<c10d::Work> work, bool stream);
  // `action` runs first in wait(), and may start further transfers. If it throws, the operation
  // has failed.
  void on_wait(std::function<void()> action) { on_wait_ = std::move(action); }
  // `action` runs when everything has been received, before wait() waits for the sends. If it
  // throws, the operation has failed. It may add further sends and receives, and an on_received()
  // for them: wait() goes on with those, within the same time limit.
  void on_received(std::function<void()> action) { on_received_ = std::move(action); }
  // `action` runs after success, on the thread that waited, and lives until wait() returns.
  void on_success(std::function<void()> action) { on_success_ = std::move(action); }
  // Drops all transfers of an operation that could not be started.
  void cancel() {
    steps_.clear();
    on_wait_ = nullptr;
  }

  // Blocks until all transfers are complete. Throws when one is not within the group's timeout,
  // counted from here.
  void wait();

 private:
  enum class Kind { kReceive, kSend, kWhole, kStream };
  struct Step {
    Kind kind;
    int peer;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Failures;
  using Clock = std::chrono::steady_clock;

  void add(Kind kind, int peer, c10::intrusive_ptr<c10d::Work> work);
  // Waits for all receives, stage by stage; returns the sends.
  std::vector<Step> receive_all(Clock::time_point start, Failures& failures);
  void await(const Step& step, Clock::time_point start, Failures& failures);
  // For the line on stderr about a long wait.
  std::string slow_text() const;
  std::string describe(const Failures& failures, Clock::time_point start) const;

  const std::shared_ptr<GroupHealth> health_;
  const std::string what_;
  std::vector<Step> steps_;
  std::function<void()> on_wait_;
  std::function<void()> on_received_;
  std::function<void()> on_success_;
  std::atomic<int> awaited_{-1};  // The peer that wait() waits for.
};

}  // namespace zero
