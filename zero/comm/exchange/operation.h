// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One operation of a Communicator: its waits and its errors.
// Private to zero/comm; starts nothing itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/comm/exchange/group_health.h"

namespace zero {

// An operation under way: a list of transfers to wait for, and actions around them. wait() goes
// through these stages, and runs the actions of one kind in the order in which they were added:
//
//   before_receiving()  starts transfers
//   the receives
//   after_receiving()   computes with what has come; all begins again if it adds transfers, actions
//   the sends
//   at_end()            after success
class Operation {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // `number` is that of the operation in its communicator, the same on all ranks.
  Operation(std::shared_ptr<GroupHealth> health, std::string what, int64_t number = 0);
  // Without wait(), data of a transfer may still arrive: the group counts as failed then.
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Makes an operation for a part of this one, which has its name, its number and tags of its own.
  // An operation has at most two parts.
  std::shared_ptr<Operation> part();
  // For one of parts: `wait(start)` takes the place of everything that wait() does. Its errors are
  // final.
  using Clock = std::chrono::steady_clock;
  void wait_by(std::function<void(Clock::time_point start)> wait);

  // Waits until a thread that works for this operation has set `future`. `progress` changes
  // whenever that thread gets on. Throws c10::Error when it stands still.
  void wait_for_thread(const std::future<void>& future, const std::atomic<int64_t>& progress) const;

  // Returns the first of `count` tags that are the same on all ranks and that no other operation
  // under way has. They are below 2^30, as zero/comm/backends/shared_rows.h asks.
  int take_tags(int count = 1);

  // Drops all transfers of an operation that could not be started.
  void cancel();
  // The same: the group has failed, since one of them threw `reason` when it was to
  // start. Throws CommunicationError, or c10::Error where memory is full.
  [[noreturn]] void fail_to_start(const std::exception_ptr& reason);

  // A null `work` stands for something that is done already.
  void add_receive(int peer, WorkPtr work) { add(Kind::kReceive, peer, std::move(work)); }
  void add_send(int peer, WorkPtr work) { add(Kind::kSend, peer, std::move(work)); }
  // `work` involves all ranks at once. `stream`: wait() must let the current stream wait, not the
  // host.
  void add_whole(WorkPtr work, bool stream) {
    add(stream ? Kind::kStream : Kind::kWhole, -1, std::move(work));
  }
  // If `action` throws, the operation has failed; what is no CommunicationError is this rank's own
  // error, and wait() throws c10::Error.
  void before_receiving(std::function<void()> action) {
    before_receiving_.push_back(std::move(action));
  }
  // The same. All that it adds has the same time limit.
  void after_receiving(std::function<void()> action) {
    after_receiving_.push_back(std::move(action));
  }
  // `action` runs on the thread that waited, and lives until wait() returns: it keeps alive what
  // was sent.
  void at_end(std::function<void()> action) { at_end_.push_back(std::move(action)); }

  // Blocks until all transfers are complete. Throws CommunicationError when one is not within the
  // group's timeout, counted from `start`.
  void wait(Clock::time_point start = Clock::now());
  // Blocks until everything has been received and the actions for it have run; wait() is still to
  // follow, for the sends.
  void receive(Clock::time_point start = Clock::now());

 private:
  enum class Kind { kReceive, kSend, kWhole, kStream };
  struct Transfer {
    Kind kind;
    int peer;
    WorkPtr work;
  };
  struct Failures;
  using Actions = std::vector<std::function<void()>>;

  // Takes all actions; an error of one is a failure of the operation.
  static void run(Actions& actions, Failures& failures);
  void add(Kind kind, int peer, WorkPtr work);
  // Waits for all receives, stage by stage; leaves the sends in transfers_.
  void receive_all(Clock::time_point start, Failures& failures);
  std::set<int> ended_peers() const;
  // Throws if there are failures, which are the group's then.
  void check(Failures& failures, Clock::time_point start);
  void wait_for_transfer(const Transfer& transfer, Clock::time_point start, Failures& failures);
  // For the line on stderr about a long wait.
  std::string slow_text() const;
  std::string describe(const Failures& failures, Clock::time_point start) const;

  const std::shared_ptr<GroupHealth> health_;
  const std::string what_;
  const int64_t number_;
  // Of the thread that began it: a tensor that was made in that mode can be written to only in it.
  const bool inference_mode_ = c10::InferenceMode::is_enabled();
  std::vector<Transfer> transfers_;
  Actions before_receiving_;
  Actions after_receiving_;
  Actions at_end_;
  std::function<void(Clock::time_point)> wait_by_parts_;
  int parts_ = 0;
  int part_ = 0;                  // 0: the whole
  int next_tag_ = 0;              // within this part
  std::atomic<int> awaited_{-1};  // The peer that wait() waits for.
};

}  // namespace zero
