// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/full_gradients.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/comm/row_communicator.h"

namespace zero {

void FullGradients::gather(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  memory_.allocate();
  const size_t max_gathers = zero::max_gathers(plan_);
  const auto tensor_of = [&](int64_t p) { return used[p] != 0 ? average(p) : at::Tensor(); };
  std::deque<Pending> under_way;
  const auto count = static_cast<int64_t>(plan_.buckets.size());
  for (int64_t b = 0; b < count; ++b) {
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
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] == 0) continue;
    const auto parameter = static_cast<int64_t>(i);
    at::Tensor tensor = table_.parameters()[i].tensor;
    tensor.mutable_grad() = average(parameter);
    reducer.mark_averaged(parameter);
  }
}

void FullGradients::gather_rounds(int64_t rounds, GradientReducer& reducer,
                                  const std::vector<uint8_t>& used) {
  if (rounds <= std::max(gathered_rounds_, reducer.rounds_dropped())) return;
  gather(reducer, used);
  gathered_rounds_ = rounds;
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
