// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/full_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/any.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/comm/row_communicator.h"
#include "zero/gradients/local_gradients.h"

namespace zero {
namespace {

constexpr int64_t kPiece = int64_t{1} << 16;  // elements that are compared at once

// Bytes, since a gradient may have a NaN. Nor does a NaN show a write: torch's clip_grad_norm_(),
// where it only measures, multiplies by one, and by NaN where the norm is not finite.
bool are_as_shown(const at::Tensor& now, const at::Tensor& right) {
  if (std::memcmp(now.const_data_ptr(), right.const_data_ptr(), right.nbytes()) == 0) return true;
  return !now.ne(right).logical_and_(now.eq(now)).any().item<bool>();
}

}  // namespace

void FullGradients::gather(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  memory_.allocate();
  const size_t max_gathers = zero::max_gathers(plan_);
  const auto tensor_of = [&](int64_t p) { return used[p] != 0 ? average(p) : at::Tensor(); };
  std::deque<Pending> under_way;
  for (int64_t b = 0; b < std::ssize(plan_.buckets); ++b) {
    if (under_way.size() == max_gathers) {
      under_way.front().wait();
      under_way.pop_front();
    }
    const Rows rows = memory_.rows(b);
    Communicator& group = *comms_[plan_.domain_of(b)].data;
    const at::Tensor own = rows.row(group.rank());
    convert(reducer.shard(b), own);
    Pending gather =
        RowCommunicator(group).gather_rows(rows, "averaged gradient bucket " + std::to_string(b));
    under_way.emplace_back([&, b, rows, gather = std::move(gather)]() mutable {
      gather.wait();
      memory_.publish(b, rows, tensor_of);
    });
  }
  for (Pending& gather : under_way) gather.wait();
  for (int64_t p = 0; p < std::ssize(used); ++p) {
    if (used[p] == 0) continue;
    table_.parameters()[p].tensor.mutable_grad() = average(p);
    reducer.mark_averaged(p);
  }
}

void FullGradients::gather_rounds(int64_t rounds, GradientReducer& reducer,
                                  const std::vector<uint8_t>& used) {
  if (rounds <= std::max(gathered_rounds_, reducer.rounds_dropped())) return;
  gather(reducer, used);
  gathered_rounds_ = rounds;
}

void FullGradients::verify(const GradientReducer& reducer) const {
  const at::Device device = table_.parameters().front().tensor.device();
  if (shown_rounds_ == 0 || shown_rounds_ != reducer.rounds_needed() || !device.is_cpu()) return;
  at::Tensor buffer;  // of parameters of one dtype
  for (int64_t b = 0; b < std::ssize(plan_.buckets); ++b) {
    if (buffer.defined() && plan_.arena_of(plan_.buckets[b]).dtype != buffer.scalar_type()) {
      buffer.reset();
    }
    for (const Segment& s : plan_.segments(b, comms_[plan_.domain_of(b)].data->rank())) {
      const Parameter& p = table_.parameters()[s.parameter];
      const at::Tensor& gradient = p.tensor.grad();
      if (!gradient.defined()) continue;
      const at::Tensor shown =
          gradient.as_strided({s.numel}, {1}, gradient.storage_offset() + s.begin);
      const at::Tensor shard = reducer.shard(b).narrow(0, s.offset, s.numel);
      for (int64_t begin = 0; begin < s.numel; begin += kPiece) {
        const int64_t numel = std::min(kPiece, s.numel - begin);
        const at::Tensor now = shown.narrow(0, begin, numel);
        at::Tensor right = shard.narrow(0, begin, numel);
        if (right.scalar_type() != now.scalar_type()) {
          if (!buffer.defined()) buffer = at::empty({kPiece}, now.options());
          const at::Tensor rounded = buffer.narrow(0, 0, numel);
          convert(right, rounded);
          right = rounded;
        }
        TORCH_CHECK(are_as_shown(now, right), "parameter ", p.name, kChangedAverage);
      }
    }
  }
}

at::Tensor FullGradients::average(int64_t parameter) {
  const Parameter& p = table_.parameters()[parameter];
  const at::Tensor place = memory_.place(parameter, p.tensor.sizes(), p.strides);
  // No view, since torch's zero_grad() cannot detach one in place, and with a version of its own,
  // which shows the one that was changed.
  if (place.defined()) return place.variable_data();
  single_.resize(table_.parameters().size());
  at::Tensor& single = single_[parameter];
  if (!single.defined()) {
    single =
        at::empty_strided(p.tensor.sizes(), p.strides, p.tensor.options().requires_grad(false));
  }
  return single;
}

int64_t FullGradients::bytes() const {
  int64_t bytes = memory_.bytes();
  for (const at::Tensor& single : single_) {
    if (single.defined()) bytes += static_cast<int64_t>(single.nbytes());
  }
  return bytes;
}

}  // namespace zero
