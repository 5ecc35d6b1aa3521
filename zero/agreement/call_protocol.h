// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The protocol of collective calls on one rank: whether a call is allowed, how all ranks agree on
// it, and how an error of one rank reaches the others.
//
// Every collective call of an engine runs in run_call(), and has two parts:
//
//   Engine::agree()   until the ranks have agreed, an error is thrown on all of them, and nothing
//                     was sent
//   what it sends     in OptimizerCommunicators::close_on_error() where others wait for it, since
//                     an error of this rank alone would leave them waiting
//
// run_on_all_ranks() is for work between messages that may fail on one rank, such as reading files:
// then all throw, and all can go on.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/agreement/communicators.h"
#include "zero/agreement/control_channel.h"
#include "zero/agreement/shard_domains.h"
#include "zero/base/own_process.h"

namespace zero {

// Arguments of a call that ranks must give alike.
struct AgreedArguments {
  // Adds to those of all ranks.
  void add(const std::string& text) { on_all_ranks += (on_all_ranks.empty() ? "" : ", ") + text; }

  std::string on_all_ranks;
  // By domain, those that concern its parameters: equal on the ranks that hold them. May be empty.
  std::vector<std::string> by_domain;
};

class CallProtocol {
 public:
  // `domain_of` is per parameter; `device` is that of all parameters. References must outlive this.
  CallProtocol(const ShardDomains& domains, std::vector<int64_t> domain_of,
               OptimizerCommunicators& comms, c10::Device device)
      : domains_(domains), domain_of_(std::move(domain_of)), comms_(comms), device_(device) {}

  bool in_own_process() const { return process_.here(); }
  // Throws after a failure and in a forked child. Called for each gradient.
  void check_usable() const;
  // Throws `problem`, and leaves it for all ranks to throw in the next collective call. Throws as
  // check_usable() does, where that throws.
  [[noreturn]] void throw_misuse(const std::string& problem);
  // Runs `body` with the parameters' device as the current one, as kernels ask for, and outside of
  // InferenceMode, since what is made in it outlives the call. An error that leaves a communicator
  // broken makes it a failure, and so does a lack of memory. CommunicationError stays one.
  // A call while another thread makes one is refused.
  void run_call(const std::function<void()>& body);
  // Returns whether another thread is in run_call().
  bool is_called_elsewhere() const;
  // The calls of two threads have no order that ranks share: a failure of all ranks. Throws.
  [[noreturn]] void refuse_second_thread();
  bool has_failed() const { return !failure_.empty(); }
  // Returns whether the last error was a CommunicationError, as where a process waits to join, and
  // no step() has worked since.
  bool asks_for_recovery() const { return asks_for_recovery_; }

  // Gradients are incomplete for `reason` until forget_broken_backward().
  void break_backward(const std::string& reason);
  // What cannot be taken back went wrong on this rank: a failure of all ranks for `reason`.
  void fail_on_all_ranks(const std::string& reason);
  // recover() takes the optimizer apart: a failure, of all ranks too, until it has made another.
  void fail_for_recovery(const std::string& reason);
  bool is_backward_broken() const { return !broken_backward_.empty(); }
  void forget_broken_backward() { broken_backward_.clear(); }
  // Returns whether the next zero_grad() must be collective for an error.
  bool next_zero_grad_is_collective() const {
    return !broken_backward_.empty() || !misuse_.empty() || refused_;
  }

  // The flag that a guard of no_sync() holds.
  const std::shared_ptr<bool>& no_sync() const { return no_sync_; }
  bool in_no_sync() const { return *no_sync_; }
  // While the working parameters hold their average, all calls but the one that takes it back are
  // refused.
  void set_ema_in_use(bool in_use) { ema_in_use_ = in_use; }
  bool ema_in_use() const { return ema_in_use_; }

  // The problem that `call` must throw for what happened before it, or nothing. Forgets misuse.
  std::string take_problem(Call call);
  // Collective: Engine::agree() prepares it, and ControlChannel::agree() sends what is the same for
  // all domains. Throws on all ranks when any rank has a `problem` or different arguments; else
  // returns what all ranks agreed on. With a promise of static_graph the ranks do not send: see
  // expect_rounds().
  Agreement agree_on_call(Call call, const Problem& problem, AgreedArguments arguments,
                          Agreement own);

  // With static_graph: each later step has `rounds` rounds and uses every parameter, so that calls
  // of a step need no message.
  void expect_rounds(int64_t rounds) { expected_rounds_ = rounds; }
  int64_t expected_rounds() const { return expected_rounds_; }

  // `text` for the domain whose ranks receive what is sent over the home group.
  AgreedArguments at_home(const std::string& text) const;
  int rank() const { return comms_.rank(); }
  c10::Device device() const { return device_; }
  int64_t domain_of(int64_t parameter) const { return domain_of_[parameter]; }

 private:
  const OwnProcess process_;
  const ShardDomains& domains_;
  const std::vector<int64_t> domain_of_;
  OptimizerCommunicators& comms_;
  const c10::Device device_;
  std::atomic<std::thread::id> caller_ = {};  // the thread in run_call()

  // The states of docs/errors.md that lead to an error; empty: this rank is not in it.
  //
  //   state             entered by                            left by
  //   misuse            throw_misuse()                        the next call, which all ranks throw
  //   broken backward   break_backward(); all calls throw     zero_grad() on all ranks
  //   refused           agree_on_call() that throws           agree_on_call() that does not
  //   failure           a broken communicator or a lack of    nothing: recover() makes another
  //                     memory in run_call(), fail_...()     engine
  //
  // While a guard of use_ema() lives, all calls but its end are problems too.
  std::string misuse_;
  std::string broken_backward_;
  bool refused_ = false;
  std::string failure_;
  bool asks_for_recovery_ = false;
  const std::shared_ptr<bool> no_sync_ = std::make_shared<bool>(false);
  bool ema_in_use_ = false;
  int64_t expected_rounds_ = 0;  // 0: not promised, or the first step is not over
};

// The problem of what trains while the working parameters hold their average.
extern const char* const kEmaInUseProblem;

// Returns whether a call belongs to a training step, which static_graph makes alike.
bool is_of_a_step(Call call);

}  // namespace zero
