// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Whether a group of ranks still works, and the waits that end when it does not.
// Private to zero/comm.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "zero/base/own_process.h"

namespace zero {

// Knows whether a group still works. Shared by a Communicator and its operations,
// which may be waited for on other threads. Thread safety: every member.
class GroupHealth {
 public:
  GroupHealth(int rank, int world_size, std::string name, std::chrono::milliseconds timeout);
  // Both run at the first failure and must not throw: `announce`, with its message, before this
  // rank's waits end, and `hang_up` after that. A former one does not run any more when the call
  // returns.
  using FailureAction = std::function<void(const std::string& message)>;
  void on_first_failure(FailureAction announce);
  void hang_up_with(std::function<void()> hang_up);
  // `has_ended` says whether the connection to a rank is known to have ended. It must not wait or
  // throw. A former one does not run any more when the call returns.
  void ask_for_ended(std::function<bool(int rank)> has_ended);
  // The first failure adds 1 there. To be set before the first operation.
  void count_failure_in(std::shared_ptr<std::atomic<int64_t>> failures);
  // None of the three runs any more when this returns: for the end of what they use.
  void forget_actions();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // " (this is rank 1 of 4 in group ...)": every message has it.
  std::string where() const;
  // Throws in a forked child, and CommunicationError when the group has failed.
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
  // For a thread that looks after long waits: ends those whose connections have ended, and those
  // that are over their limit, as where a transport measures it by a clock that was set back.
  void look_at_waits() noexcept;

  // Returns the ranks to which the connections are known to have ended; none once the group has
  // failed, which ends them itself.
  std::set<int> ended_peers() noexcept;

  void operation_begins() { ++under_way_; }
  void operation_ends() { --under_way_; }
  int operations_under_way() const { return under_way_; }

 private:
  const int rank_;
  const int world_size_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  const OwnProcess process_;

  // Calls body(), with the lock, once no other thread runs an action. What body() replaces runs no
  // more then.
  void replace(const std::function<void()>& body);
  // Runs action(), if there is one, without the lock; replace() waits for it.
  template <typename Action, typename... Arguments>
  auto run(const Action& action, const Arguments&... arguments);

  FailureAction announce_;
  std::function<void()> hang_up_;
  std::function<bool(int)> has_ended_;
  std::shared_ptr<std::atomic<int64_t>> failures_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::list<std::thread::id> acting_;  // threads that run an action
  std::string failure_;
  std::atomic<int> under_way_ = 0;
  struct Wait {
    c10d::Work* work;
    int peer;
    std::chrono::steady_clock::time_point deadline;
    bool ended = false;  // at the last look
  };
  std::list<Wait> waits_;
};

}  // namespace zero
