// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The gradients of this rank that are not in a bucket: in p.grad(), or apart in fp32.
//
// p.grad() of a parameter holds one of these:
//   nothing
//   a gradient that was accumulated and not sent: of no_sync(), late in its pass, or put by hand
//   a marker, while the gradient is in a bucket, sent, or apart in fp32
//   in stage 1, the averaged gradient of the last reduction, to be read only
//
// The last two are placeholders: clear_placeholder() takes them out before autograd accumulates.
//
// A marker shows two things that torch would do in silence. Where it is missing, zero_grad() of the
// module was to drop what was sent; where it was changed or replaced, a gradient was to take the
// place of what was sent. All elements of a marker are one NaN, so that code which takes it for a
// gradient, clips it for example, notices.
//
// Note [memory of local sums]: malloc gives the memory of a sum back to the system when it is freed
// behind a pass, and the next step maps it anew, a page fault for each 4 KiB. So the sum of a step
// is freed while the first pass of the next one runs: as soon as the gradient before it is made, so
// that the next gradient is made in its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "zero/memory/parameter_table.h"

namespace zero {

// Returns whether the memory of `sum` is its own, and of a size that the system would map anew.
bool is_worth_recycling(const at::Tensor& sum);

// Behind the name of a parameter, where an average in p.grad() has changed.
inline constexpr const char* kChangedAverage =
    ": expected the averaged gradient in p.grad() to be only read, got a change, which would have "
    "no effect: step() uses the gradient shards. Clip with clip_grad_value_() or clip_grad_norm_() "
    "of the ZeroOptimizer, change gradients with register_hook(), or call zero_grad() on all ranks";

class LocalGradients {
 public:
  // `fp32`: 16-bit gradients under no_sync add up apart, in fp32. `table` must outlive this.
  LocalGradients(const ParameterTable& table, bool fp32);
  ~LocalGradients();
  LocalGradients(const LocalGradients&) = delete;
  LocalGradients& operator=(const LocalGradients&) = delete;

  // Returns whether there is a gradient that was not sent.
  bool has(int64_t parameter) const;
  // Returns whether p.grad() has a gradient that no pass has left there.
  bool is_by_hand(int64_t parameter) const {
    return states_[parameter].holds == Holds::kNothingOfOurs && grad(parameter).defined();
  }
  // Returns whether a part of the gradient was sent since end_step().
  bool is_sent(int64_t parameter) const { return states_[parameter].sent; }
  // Returns whether p.grad() holds a marker.
  bool is_marked(int64_t parameter) const {
    return states_[parameter].holds == Holds::kMarker && grad(parameter).defined();
  }
  // Takes a placeholder out of p.grad(), before a gradient is accumulated there. Throws c10::Error
  // when it was changed.
  void clear_placeholder(int64_t parameter);
  // Autograd has accumulated p.grad(), which stays on this rank for now: with `fp32` adds it up
  // apart. Throws c10::Error when it cannot be sent.
  void accumulate_locally(int64_t parameter);
  // Autograd has accumulated p.grad(), which is sent in this round or the next. Throws as
  // accumulate_locally() does.
  void note_accumulated(int64_t parameter);
  // Returns all that there is for the parameter, in its memory order; nothing is left. Throws as
  // accumulate_locally() does.
  at::Tensor take_sum(int64_t parameter);
  // What take_sum() returned is in a bucket.
  void mark_sent(int64_t parameter);
  // The tensor to which `gradient` can be added while both are rounded to `dtype` once; undefined
  // if there is none, so that `gradient` can be taken as it is. Nothing if it cannot be done.
  std::optional<at::Tensor> sum_to_add(int64_t parameter, const at::Tensor& gradient,
                                       c10::ScalarType dtype) const;

  // p.grad() was replaced by an average.
  void mark_average(int64_t parameter) { remember_grad(parameter, Holds::kAverage); }

  // Returns whether p.grad() was reset from outside, which drops its gradient.
  bool was_reset(int64_t parameter) const;
  // Returns whether it was for the first parameter of which a gradient was sent. Those that were
  // sent are dropped together, so one of them shows it.
  bool sent_were_reset() const { return first_sent_ >= 0 && was_reset(first_sent_); }
  // Drops gradients that were reset. Returns whether all that were sent are among them. Throws
  // c10::Error, and drops nothing, when only some of those are.
  bool drop_resets();
  // Throws c10::Error when p.grad() holds what cannot be sent, or was changed although its gradient
  // is sent or averaged.
  void verify() const;
  // Forgets that gradients were sent or averaged: the step is over.
  void end_step();
  // Drops all gradients.
  void drop_all();
  // Frees what Note [memory of local sums] holds.
  void free_recycled() { recycled_sums_.clear(); }
  // Without markers and averages, and with what Note [memory of local sums] holds.
  int64_t bytes() const;

 private:
  // What p.grad() was last seen to hold. Nothing of ours: it is empty or was put there by hand.
  enum class Holds : uint8_t { kNothingOfOurs, kGradient, kMarker, kAverage };
  struct State {
    Holds holds = Holds::kNothingOfOurs;
    bool sent = false;
    bool kept = false;             // under no_sync, since it was released
    const void* tensor = nullptr;  // what remember_grad() saw in p.grad(), and its version
    int64_t version = 0;
    at::Tensor marker;
    at::Tensor fp32;  // the sum of earlier gradients; mostly undefined
  };

  const at::Tensor& grad(int64_t parameter) const;
  void make_markers();
  void put_marker(int64_t parameter);
  void remember_grad(int64_t parameter, Holds holds);
  bool holds_gradient(int64_t parameter) const;
  void check_unchanged(int64_t parameter) const;

  const ParameterTable& table_;
  const bool fp32_;
  int32_t first_sent_ = -1;               // since end_step()
  std::vector<State> states_;             // per parameter
  std::deque<at::Tensor> recycled_sums_;  // sums of the last step, in the order of their release
  bool released_ = false;                 // take_sum() was called since end_step()
};

}  // namespace zero
