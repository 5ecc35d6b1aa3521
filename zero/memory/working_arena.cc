// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/working_arena.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>

#include "bookkeeping/layout.h"
#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

// Gives a parameter whose memory was replaced the order that its elements had at construction.
void restore_order(const Parameter& p) {
  if (is_in_order(p)) return;
  at::Tensor ordered = at::empty_strided(p.sizes, p.strides, p.tensor.detach().options());
  ordered.copy_(p.tensor.detach());
  at::Tensor(p.tensor).set_data(ordered);
}

bool is_inside(const at::Tensor& tensor, const std::vector<at::Tensor>& flat) {
  const std::less<const char*> before;
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  return std::any_of(flat.begin(), flat.end(), [&](const at::Tensor& whole) {
    if (!whole.defined()) return false;
    const auto* const begin = static_cast<const char*>(whole.const_data_ptr());
    return !before(data, begin) && before(data, begin + whole.nbytes());
  });
}

}  // namespace

void check_dense(const ParameterLayout& layout, const Parameter& p) {
  TORCH_CHECK(!layout.needs_dense_parameters() || p.tensor.is_non_overlapping_and_dense(),
              "parameter ", p.name, ": expected dense memory, got strides ", p.tensor.strides(),
              " for shape ", p.tensor.sizes(), "; use Layout::kContiguous or make it contiguous");
}

WorkingArena::WorkingArena(const Plan& plan, const ParameterTable& table, BufferPool& pool)
    : plan_(plan), table_(table), memory_(plan, pool) {
  memory_.allocate();
  attach();
}

void WorkingArena::verify_shapes() const {
  table_.verify_shapes();
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    check_dense(*plan_.arenas[plan_.parameter_arena[i]].layout, table_.parameters()[i]);
  }
  // Only managed ones: attach() restores the others' place.
  table_.check_overlaps([](const Parameter&) { return false; });
}

void WorkingArena::attach(bool keep_values) {
  struct Move {
    at::Tensor parameter;
    at::Tensor place;
    at::Tensor values;
  };
  std::vector<Move> moves;
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    const Parameter& p = table_.parameters()[i];
    check_dense(*plan_.arenas[plan_.parameter_arena[i]].layout, p);
    const at::Tensor place = memory_.place(static_cast<int64_t>(i), p.tensor.sizes(), p.strides);
    if (!place.defined()) {
      restore_order(p);
      continue;
    }
    const bool in_place = p.tensor.const_data_ptr() == place.const_data_ptr() && is_in_order(p);
    if (p.tensor.numel() > 0 && in_place) continue;
    // Two that were exchanged are in each other's place, and one may be transposed in its own.
    at::Tensor values = p.tensor.detach();
    if (keep_values && is_inside(values, memory_.flat())) values = values.clone();
    moves.push_back({p.tensor, place, values});
  }
  for (Move& move : moves) {
    if (keep_values) move.place.copy_(move.values);
    move.values.reset();
    move.parameter.set_data(move.place);
  }
}

bool WorkingArena::is_master(int64_t bucket) const {
  const Arena& arena = plan_.arena_of(plan_.buckets[bucket]);
  return arena.layout->is_master(arena);
}

void WorkingArena::publish(int64_t bucket, const Rows& rows, bool only_remembered) {
  memory_.publish(bucket, rows, [&](int64_t p) {
    const bool left_out = only_remembered && !table_.is_as_remembered(p);
    return left_out ? at::Tensor() : table_.parameters()[p].tensor;
  });
}

void WorkingArena::read_row(int64_t bucket, int64_t rank, const at::Tensor& row) const {
  row.zero_();
  for (const Segment& s : plan_.segments(bucket, rank)) {
    const at::Tensor& tensor = table_.parameters()[s.parameter].tensor;
    const auto* source =
        static_cast<const char*>(tensor.const_data_ptr()) + s.begin * tensor.element_size();
    kernels::cast_copy(source, tensor.scalar_type(), row.mutable_data_ptr<float>() + s.offset,
                       at::kFloat, s.numel, nullptr, current_stream(row.device()));
  }
}

std::vector<WorkingArena::Broadcast> WorkingArena::broadcasts() const {
  std::vector<Broadcast> result;
  for (size_t a = 0; a < plan_.arenas.size(); ++a) {
    if (!plan_.arenas[a].layout->in_place()) continue;
    result.push_back({memory_.flat()[a], plan_.arenas[a].domain});
  }
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    const Arena& arena = plan_.arenas[plan_.parameter_arena[i]];
    if (arena.layout->in_place()) continue;
    const at::Tensor& tensor = table_.parameters()[i].tensor;
    result.push_back(
        {tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset()), arena.domain});
  }
  return result;
}

}  // namespace zero
