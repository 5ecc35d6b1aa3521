// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/promised_gradients.h"

#include <algorithm>

namespace zero {

bool PromisedGradients::any_sent(bool present) const {
  return std::ranges::any_of(slots_, [&](const Slot& s) {
    return s.sent && s.holds != Holds::kNothing && s.present == present;
  });
}

bool PromisedGradients::is_altered() const { return std::ranges::any_of(slots_, &Slot::altered); }

bool PromisedGradients::is_open() const { return std::ranges::any_of(slots_, &Slot::packed); }

bool PromisedGradients::has(int index) const {
  const Slot& slot = slots_[index];
  if (slot.holds == Holds::kNothing) return parameter(index).grad().defined();
  return slot.present && (slot.kept_apart || slot.holds == Holds::kGradient);
}

bool PromisedGradients::any() const {
  bool result = rounds_ > 0 || used_ || is_open();
  for (int i = 0; i < kUserParameters; ++i) result = result || has(i);
  return result;
}

bool PromisedGradients::is_local(int index) const {
  const Slot& slot = slots_[index];
  return slot.holds == Holds::kNothing || (slot.holds == Holds::kGradient && !slot.sent);
}

bool PromisedGradients::refuses_writes(int index) const {
  const Slot& slot = slots_[index];
  return slot.holds == Holds::kMarker && slot.present && !slot.altered &&
         parameter(index).numel() > 1;
}

int64_t PromisedGradients::rounds_dropped() const {
  return is_dropped() ? rounds_ + (is_open() ? 1 : 0) : dropped_;
}

int64_t PromisedGradients::rounds_when_complete() const {
  bool open = is_open(), late = false;
  for (int i = 0; i < kUserParameters; ++i) {
    if (has(i)) (slots_[i].packed ? late : open) = true;
  }
  return rounds_ + (open ? 1 : 0) + (late ? 1 : 0);
}

void PromisedGradients::reset(int index) {
  parameter(index).mutable_grad().reset();
  Slot& slot = slots_[index];
  if (slot.holds == Holds::kNothing) return;
  slot.altered = false;
  slot.present = false;
  if (is_local(index)) slot = {.packed = slot.packed};
}

void PromisedGradients::put(int index, const at::Tensor& gradient) {
  if (is_local(index)) {
    parameter(index).mutable_grad() = gradient;
  } else {
    slots_[index].present = slots_[index].altered = true;
  }
}

void PromisedGradients::change(int index, const std::function<void(at::Tensor&)>& change) {
  at::Tensor& grad = parameter(index).mutable_grad();
  if (!is_local(index)) {
    slots_[index].altered = slots_[index].altered || slots_[index].present;
  } else if (grad.defined()) {
    change(grad);
  }
}

void PromisedGradients::optimizer_backward(const std::vector<bool>& hits, bool no_sync) {
  if (!no_sync && is_open()) close_round();
  accumulate(hits, no_sync);
  if (!no_sync) close_round();
}

void PromisedGradients::loss_backward(const std::vector<bool>& hits, bool no_sync) {
  bool again = false, first = false;
  for (int i = 0; i < kUserParameters; ++i) {
    if (hits[i]) (slots_[i].packed ? again : first) = true;
  }
  if (!no_sync && again) {
    ambiguous_ = ambiguous_ || first;
    close_round();
  }
  accumulate(hits, no_sync);
}

void PromisedGradients::accumulate(const std::vector<bool>& hits, bool no_sync) {
  for (int i = 0; i < kUserParameters; ++i) {
    if (!hits[i]) continue;
    Slot& slot = slots_[i];
    used_ = true;
    slot.present = true;
    if (no_sync) {
      slot.holds = keeps_apart_ ? Holds::kMarker : Holds::kGradient;
      slot.kept_apart = keeps_apart_;
    } else {
      slot = {.holds = Holds::kMarker, .sent = true, .packed = true};
    }
  }
}

void PromisedGradients::close_round() {
  for (int i = 0; i < kUserParameters; ++i) {
    Slot& slot = slots_[i];
    // The second of a parameter in one round is sent in the next.
    if (has(i) && !slot.packed) slot = {.holds = Holds::kMarker, .sent = true};
    slot.packed = false;
  }
  ++rounds_;
}

void PromisedGradients::drop() {
  if (is_partial()) return;
  if (is_dropped()) {
    rounds_ = dropped_ = rounds_dropped();
    for (Slot& slot : slots_) slot.sent = slot.packed = false;
  }
  used_ = false;
  for (int i = 0; i < kUserParameters; ++i) {
    Slot& slot = slots_[i];
    if (slot.holds != Holds::kNothing && !slot.present) slot = {.packed = slot.packed};
    used_ = used_ || has_or_sent(i);
  }
}

void PromisedGradients::complete(int64_t rounds, int64_t dropped) {
  for (int i = 0; i < kUserParameters; ++i) {
    if (has(i)) {
      slots_[i] = {.holds = Holds::kMarker, .sent = true};
      used_ = true;
    }
    slots_[i].packed = false;
  }
  rounds_ = rounds;
  // The call worked, so ranks have dropped the same number, also where it was ambiguous here.
  dropped_ = dropped;
  ambiguous_ = false;
}

void PromisedGradients::clear() {
  for (const auto& p : replica_->managed()) p.tensor.mutable_grad().reset();
  *this = PromisedGradients(replica_, keeps_apart_);
}

}  // namespace zero
