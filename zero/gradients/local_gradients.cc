// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/local_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DynamicCast.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "kernels/cast.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/guarded_memory.h"

namespace zero {
namespace {

void check_gradient(const at::Tensor& gradient, const Parameter& p) {
  TORCH_CHECK(gradient.layout() == at::kStrided, "gradient of ", p.name,
              ": expected a dense tensor, got layout ", gradient.layout(),
              "; build the layer with sparse=false");
  TORCH_CHECK(gradient.device() == p.tensor.device(), "gradient of ", p.name, ": expected device ",
              p.tensor.device(), ", got ", gradient.device(), "; keep them together");
  // Not the parameter's shape of today: a bucket has room for that of construction.
  TORCH_CHECK(gradient.sizes() == p.sizes, "gradient of ", p.name, ": expected shape ",
              at::IntArrayRef(p.sizes), " as at construction, got ", gradient.sizes(),
              "; give the parameter back its shape, or make a new optimizer");
  TORCH_CHECK(!gradient.is_complex(), "gradient of ", p.name, ": expected a real dtype, got ",
              gradient.scalar_type(),
              "; do not replace the parameter's storage by complex numbers");
}

// Bytes of the sums that are held. glibc's malloc takes larger ones from the system each time
// (DEFAULT_MMAP_THRESHOLD_MAX), and smaller ones cost few page faults.
constexpr int64_t kLargestInHeap = 32 << 20;
constexpr int64_t kSmallestHeld = 64 << 10;

bool is_known(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Returns whether `gradient` is one flat stretch in the memory order of its parameter, and that
// memory holds its values: not those of a lazy negation, nor those of zeros without memory.
bool is_in_parameter_order(const at::Tensor& gradient, const Parameter& p) {
  return is_known(gradient.scalar_type()) && !gradient.is_neg() && !gradient._is_zerotensor() &&
         (gradient.strides() == at::IntArrayRef(p.strides) || gradient.numel() <= 1);
}

at::Tensor in_parameter_order(const at::Tensor& gradient, const Parameter& p) {
  if (is_in_parameter_order(gradient, p)) return gradient;
  const auto dtype = gradient.scalar_type();
  at::Tensor copy = at::empty_strided(
      p.tensor.sizes(), p.strides, gradient.options().dtype(is_known(dtype) ? dtype : at::kFloat));
  return copy.copy_(gradient);
}

// One that autograd made under InferenceMode has none.
int64_t version_of(const at::Tensor& gradient) {
  return gradient.is_inference() ? 0 : static_cast<int64_t>(gradient._version());
}

// By their bits: fill_() of a NaN raises FE_INVALID, which ends programs with traps.
const at::Tensor& fill_with_nan(const at::Tensor& tensor) {
  const c10::ScalarType type = tensor.scalar_type();
  const bool is_float = type == at::kFloat;
  const int64_t bits = is_float ? 0x7fc00000 : type == at::kBFloat16 ? 0x7fc0 : 0x7e00;
  tensor.view(is_float ? at::kInt : at::kShort).fill_(bits);
  return tensor;
}

at::Tensor not_a_number(at::IntArrayRef sizes, const Parameter& p) {
  return fill_with_nan(at::empty(sizes, p.tensor.options().requires_grad(false)));
}

// With a version of its own, and no view: torch's zero_grad() cannot detach a view in place.
at::Tensor marker_of(const at::Tensor& number, const Parameter& p) {
  return number.expand(p.sizes).variable_data();
}

// Returns whether a marker is as it was made. Its number and strides are compared, too: writes
// through p.grad().data() and set_data() raise no version. On a GPU the number is not read, since
// the host would have to wait for it.
bool is_as_made(const at::Tensor& marker) {
  if (marker._version() != 0) return false;
  if (marker.numel() == 0) return true;
  if (marker.numel() > 1 && marker.is_non_overlapping_and_dense()) return false;
  if (!marker.is_cpu()) return true;
  return std::isnan(c10::fetch_and_cast<float>(marker.scalar_type(), marker.const_data_ptr()));
}

// sum = gradient, or sum += gradient.
void add(const at::Tensor& gradient, bool first, const at::Tensor& sum) {
  kernels::cast_copy(gradient.const_data_ptr(), gradient.scalar_type(), sum.mutable_data_ptr(),
                     at::kFloat, sum.numel(), first ? nullptr : sum.const_data_ptr(),
                     current_stream(sum.device()));
}

}  // namespace

LocalGradients::LocalGradients(const ParameterTable& table, bool fp32)
    : table_(table), fp32_(fp32), states_(table.parameters().size()) {
  make_markers();
}

LocalGradients::~LocalGradients() {
  try {
    end_step();
  } catch (...) {  // A parameter that lost its autograd state has no gradient either.
  }
}

// Each marker has a number of its own, which zero_grad(false) of a module fills.
void LocalGradients::make_markers() {
  int64_t largest = 0;  // bytes of a parameter
  for (const Parameter& p : table_.parameters()) {
    largest = std::max(largest, static_cast<int64_t>(p.tensor.nbytes()));
  }
  std::map<c10::ScalarType, at::Tensor> numbers;
  for (int64_t i = 0; i < std::ssize(states_); ++i) {
    const Parameter& p = table_.parameters()[i];
    at::Tensor& all = numbers[p.tensor.scalar_type()];
    if (!all.defined() && p.tensor.is_cpu()) {
      // Code that takes a marker's pointer for that of a gradient ends at the guard.
      const auto bytes = static_cast<int64_t>(states_.size() * p.tensor.element_size());
      all = guarded_memory(bytes, largest).view(p.tensor.scalar_type());
      fill_with_nan(all);
    } else if (!all.defined()) {
      all = not_a_number({std::ssize(states_)}, p);
    }
    states_[i].marker = marker_of(all.select(0, i), p);
  }
}

const at::Tensor& LocalGradients::grad(int64_t parameter) const {
  // at::Tensor's own asks first whether the tensor is a leaf, which costs ten times as much.
  return std::as_const(*table_.parameters()[parameter].tensor.unsafeGetTensorImpl()).grad();
}

// Identity and version tell later whether somebody put another tensor there or changed this one.
void LocalGradients::remember_grad(int64_t parameter, Holds holds) {
  State& state = states_[parameter];
  const at::Tensor& gradient = grad(parameter);
  state.holds = holds;
  state.tensor = gradient.unsafeGetTensorImpl();
  state.version = version_of(gradient);
}

void LocalGradients::put_marker(int64_t parameter) {
  const Parameter& p = table_.parameters()[parameter];
  at::Tensor& marker = states_[parameter].marker;
  if (!is_as_made(marker)) marker = marker_of(not_a_number({}, p), p);
  p.tensor.mutable_grad() = marker;
  remember_grad(parameter, Holds::kMarker);
}

bool LocalGradients::holds_gradient(int64_t parameter) const {
  const Holds holds = states_[parameter].holds;
  return (holds == Holds::kNothingOfOurs || holds == Holds::kGradient) && grad(parameter).defined();
}

bool LocalGradients::has(int64_t parameter) const {
  if (was_reset(parameter)) return false;
  return states_[parameter].fp32.defined() || holds_gradient(parameter);
}

void LocalGradients::check_unchanged(int64_t parameter) const {
  const State& state = states_[parameter];
  const Parameter& p = table_.parameters()[parameter];
  const at::Tensor& gradient = grad(parameter);
  // As long as nothing was sent, a gradient may be changed as in torch.
  if (state.holds == Holds::kNothingOfOurs || !gradient.defined()) return;
  if (state.holds == Holds::kGradient && !state.sent) return;
  const bool same = state.tensor == gradient.unsafeGetTensorImpl() &&
                    (state.holds == Holds::kMarker ? is_as_made(gradient)
                                                   : state.version == version_of(gradient));
  TORCH_CHECK(same || state.holds != Holds::kAverage, "parameter ", p.name, kChangedAverage);
  TORCH_CHECK(
      same, "parameter ", p.name,
      ": expected p.grad() as the backward pass left it, since its gradient is on its way, "
      "got another value, which would be added to that gradient and not replace it. Put "
      "gradients there before the backward pass, change them with register_hook(), clip "
      "with clip_grad_value_() or clip_grad_norm_() of the ZeroOptimizer, or call zero_grad() "
      "on all ranks");
}

void LocalGradients::clear_placeholder(int64_t parameter) {
  check_unchanged(parameter);
  State& state = states_[parameter];
  if (state.holds != Holds::kMarker && state.holds != Holds::kAverage) return;
  table_.parameters()[parameter].tensor.mutable_grad().reset();
  state.holds = Holds::kNothingOfOurs;
}

void LocalGradients::accumulate_locally(int64_t parameter) {
  State& state = states_[parameter];
  const Parameter& p = table_.parameters()[parameter];
  const bool apart = fp32_ && p.tensor.scalar_type() != at::kFloat;
  const bool first = apart ? !state.fp32.defined() : state.holds != Holds::kGradient;
  note_accumulated(parameter);
  state.kept = true;
  if (first && !recycled_sums_.empty()) recycled_sums_.pop_front();
  if (!apart) return;
  const at::Tensor gradient = in_parameter_order(grad(parameter), p);
  if (first) {
    state.fp32 = at::empty_strided(p.tensor.sizes(), p.strides,
                                   p.tensor.options().dtype(at::kFloat).requires_grad(false));
  }
  add(gradient, first, state.fp32);
  put_marker(parameter);
}

void LocalGradients::note_accumulated(int64_t parameter) {
  check_gradient(grad(parameter), table_.parameters()[parameter]);
  remember_grad(parameter, Holds::kGradient);
}

bool is_worth_recycling(const at::Tensor& sum) {
  const auto bytes = static_cast<int64_t>(sum.nbytes());
  return sum.is_cpu() && bytes >= kSmallestHeld && bytes <= kLargestInHeap &&
         static_cast<int64_t>(sum.storage().nbytes()) == bytes;
}

at::Tensor LocalGradients::take_sum(int64_t parameter) {
  check_unchanged(parameter);
  const Parameter& p = table_.parameters()[parameter];
  State& state = states_[parameter];
  // The first of a step is not held: in its memory the next step's first gradient is made.
  const bool first = !std::exchange(released_, true);
  if (first) recycled_sums_.clear();
  at::Tensor gradient;
  if (holds_gradient(parameter)) {
    check_gradient(grad(parameter), p);
    gradient = in_parameter_order(grad(parameter), p);
  }
  // Under no_sync_fp32 the local sum is elsewhere, and what p.grad() has came after it.
  if (state.fp32.defined()) {
    if (gradient.defined()) add(gradient, /*first=*/false, state.fp32);
    gradient = std::exchange(state.fp32, at::Tensor());
  }
  const bool kept = std::exchange(state.kept, false);
  if (kept && !first && gradient.defined() && is_worth_recycling(gradient)) {
    recycled_sums_.push_back(gradient.detach());  // without the graph of create_graph
  }
  p.tensor.mutable_grad().reset();
  state.holds = Holds::kNothingOfOurs;
  return gradient;
}

void LocalGradients::mark_sent(int64_t parameter) {
  states_[parameter].sent = true;
  if (first_sent_ < 0) first_sent_ = static_cast<int32_t>(parameter);
  put_marker(parameter);
}

std::optional<at::Tensor> LocalGradients::sum_to_add(int64_t parameter, const at::Tensor& gradient,
                                                     c10::ScalarType dtype) const {
  const Parameter& p = table_.parameters()[parameter];
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.device() == p.tensor.device() &&
           tensor.sizes() == p.sizes && is_in_parameter_order(tensor, p);
  };
  const at::Tensor& sum = states_[parameter].fp32;
  const at::Tensor kept = holds_gradient(parameter) ? grad(parameter) : at::Tensor();
  if ((kept.defined() && sum.defined()) || !fits(gradient)) return std::nullopt;
  const at::Tensor& addend = sum.defined() ? sum : kept;
  // Accumulated apart, the sum would be rounded to its own dtype before it is to the bucket's.
  if (addend.defined() && (!fits(addend) || addend.scalar_type() != dtype)) return std::nullopt;
  return addend;
}

bool LocalGradients::was_reset(int64_t parameter) const {
  return states_[parameter].holds != Holds::kNothingOfOurs && !grad(parameter).defined();
}

// zero_grad() of a module resets p.grad() without a word. 1. Count the parameters whose gradients
// were sent, and those of them that were reset. 2. All or none: sums over ranks cannot lose a part.
// 3. Forget what was reset, sent or not.
bool LocalGradients::drop_resets() {
  int64_t sent = 0, reset = 0, last_reset = 0;
  for (int64_t p = 0; p < std::ssize(states_); ++p) {
    if (!states_[p].sent || states_[p].holds == Holds::kNothingOfOurs) continue;
    ++sent;
    if (!was_reset(p)) continue;
    ++reset;
    last_reset = p;
  }
  TORCH_CHECK(reset == 0 || reset == sent, "parameter ", table_.parameters()[last_reset].name,
              ": expected the gradients of the ", sent,
              " parameters that were sent to be kept or dropped together, got ", reset,
              " that were reset by zero_grad() of a module or of a base class, or by hand. Call "
              "zero_grad() of the ZeroOptimizer on all ranks, which drops all, or give the modules "
              "an optimizer each");
  if (reset > 0) first_sent_ = -1;  // all of them: nothing counts as sent any more
  for (int64_t p = 0; p < std::ssize(states_); ++p) {
    State& state = states_[p];
    if (reset > 0) state.sent = false;
    if (!was_reset(p)) continue;
    state.holds = Holds::kNothingOfOurs;
    state.kept = false;
    state.fp32 = at::Tensor();
  }
  return reset > 0;
}

void LocalGradients::verify() const {
  for (int64_t p = 0; p < std::ssize(states_); ++p) {
    check_unchanged(p);
    if (holds_gradient(p)) check_gradient(grad(p), table_.parameters()[p]);
  }
}

void LocalGradients::end_step() {
  for (size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    const at::Tensor& tensor = table_.parameters()[i].tensor;
    const bool ours = state.holds == Holds::kMarker || state.holds == Holds::kAverage;
    // Another optimizer may have the parameter by now.
    if (ours && tensor.grad().defined() && tensor.grad().unsafeGetTensorImpl() == state.tensor) {
      tensor.mutable_grad().reset();
    }
    state.holds = Holds::kNothingOfOurs;
    state.sent = false;
  }
  first_sent_ = -1;
  released_ = false;
}

void LocalGradients::drop_all() {
  for (size_t i = 0; i < states_.size(); ++i) {
    table_.parameters()[i].tensor.mutable_grad().reset();
    states_[i].fp32 = at::Tensor();
    states_[i].kept = false;
  }
  end_step();
}

int64_t LocalGradients::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& sum : recycled_sums_) bytes += static_cast<int64_t>(sum.nbytes());
  for (int64_t p = 0; p < std::ssize(states_); ++p) {
    if (holds_gradient(p)) bytes += static_cast<int64_t>(grad(p).nbytes());
    if (states_[p].fp32.defined()) bytes += static_cast<int64_t>(states_[p].fp32.nbytes());
  }
  return bytes;
}

}  // namespace zero
