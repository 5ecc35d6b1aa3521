// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/wire_format.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "zero/gradients/elementwise_wire.h"
#include "zero/options.h"

namespace zero {
namespace {

int64_t sum_of_largest(std::vector<int64_t> bytes, size_t count) {
  count = std::min(bytes.size(), count);
  const auto end = bytes.begin() + static_cast<int64_t>(count);
  std::partial_sort(bytes.begin(), end, bytes.end(), std::greater<>());
  return std::accumulate(bytes.begin(), end, int64_t{0});
}

}  // namespace

void check_wire_options(const ZeroOptions& options, c10::Device /*device*/) {
  if (const auto dtype = options.reduce_dtype()) {
    TORCH_CHECK(*dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf,
                "reduce_dtype: expected float, bfloat16 or half, got ", *dtype);
  }
}

std::string describe_wire_options(const ZeroOptions& options) {
  if (!options.reduce_dtype()) return {};
  return c10::str(" reduce_dtype ", *options.reduce_dtype());
}

WireFormats make_wire_formats(const Plan& plan, const ZeroOptions& options) {
  WireFormats wires;
  for (const Arena& arena : plan.arenas) {
    wires.push_back(
        std::make_shared<ElementwiseWire>(options.reduce_dtype().value_or(arena.dtype)));
  }
  return wires;
}

int64_t buffer_bytes(const Plan& plan, const WireFormats& wires, size_t buffers) {
  std::vector<int64_t> encoded;
  for (const Bucket& bucket : plan.buckets) {
    const int64_t row = wires[bucket.arena]->bytes(bucket.rows.equal_numel());
    encoded.push_back(plan.arena_of(bucket).world_size * row);
  }
  // Those in use at one time are different buckets: at most the largest ones.
  return sum_of_largest(encoded, buffers);
}

}  // namespace zero
