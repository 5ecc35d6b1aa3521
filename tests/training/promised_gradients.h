// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The gradients of one net on one rank as the documents promise them: what p.grad() holds, what was
// sent, and how many rounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "tests/training/user_sequence.h"

namespace zero {

class PromisedGradients {
 public:
  enum class Holds { kNothing, kGradient, kMarker, kAverage };
  // Of one parameter.
  struct Slot {
    Holds holds = Holds::kNothing;  // a gradient by hand is kNothing too
    bool present = true;            // of what it holds: p.grad() was not reset
    bool altered = false;           // replaced or changed since
    bool sent = false;
    bool kept_apart = false;  // with no_sync_fp32, a part was not sent
    bool packed = false;      // in the open round
  };

  // Of a replica in plain torch, whose p.grad() is the sum since the last step. no_sync keeps
  // gradients apart from p.grad() if said so.
  PromisedGradients(UserModel replica, bool keeps_apart)
      : replica_(std::move(replica)), keeps_apart_(keeps_apart) {}

  const Slot& slot(int index) const { return slots_[index]; }
  // All that were sent have left p.grad(), or some of them.
  bool is_dropped() const { return any_sent(/*present=*/false) && !any_sent(/*present=*/true); }
  bool is_partial() const { return any_sent(/*present=*/false) && any_sent(/*present=*/true); }
  bool is_altered() const;
  // A round has gradients and is not closed yet.
  bool is_open() const;
  // Which round a gradient is in depends on the order in which a graph gave them.
  bool is_ambiguous() const { return ambiguous_; }
  // There is one that was not sent.
  bool has(int index) const;
  bool has_or_sent(int index) const { return slots_[index].sent || has(index); }
  bool any() const;
  // p.grad() is what autograd or the user put there.
  bool is_local(int index) const;
  // Torch itself refuses to write to p.grad(), whose elements share one memory.
  bool refuses_writes(int index) const;
  int64_t rounds() const { return rounds_; }
  int64_t rounds_dropped() const;
  int64_t rounds_when_complete() const;

  // What users do.
  void reset(int index);
  void put(int index, const at::Tensor& gradient);
  void change(int index, const std::function<void(at::Tensor&)>& change);

  // What passes do that reach these parameters. Gradients are in the replica already.
  void optimizer_backward(const std::vector<bool>& hits, bool no_sync);
  void loss_backward(const std::vector<bool>& hits, bool no_sync);

  // What calls do.
  void drop();
  void complete(int64_t rounds, int64_t dropped);
  void average(int index) {
    slots_[index] = {.holds = Holds::kAverage, .sent = slots_[index].sent};
  }
  void clear();

 private:
  bool any_sent(bool present) const;
  at::Tensor parameter(int index) const { return replica_->managed()[index].tensor; }
  void accumulate(const std::vector<bool>& hits, bool no_sync);
  void close_round();

  UserModel replica_;
  bool keeps_apart_;
  std::array<Slot, kUserParameters> slots_;
  int64_t rounds_ = 0;
  int64_t dropped_ = 0;
  bool used_ = false;
  bool ambiguous_ = false;
};

}  // namespace zero
