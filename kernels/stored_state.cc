// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/stored_state.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernels/cast.h"
#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/stream.h"

namespace zero::kernels {
namespace {

static_assert(BlockMap::kBlock % kStateBlock == 0, "threads share no block");

// The dtype of a state array that has one value for each element.
c10::ScalarType dtype_of(StateType type) {
  return type == StateType::kFloat ? c10::ScalarType::Float : c10::ScalarType::BFloat16;
}

}  // namespace

int64_t state_bytes(StateType type, int64_t numel) {
  switch (type) {
    case StateType::kFloat:
      return 4 * numel;
    case StateType::kBFloat16:
      return 2 * numel;
    case StateType::kInt8:
      return 4 * ((numel + kStateBlock - 1) / kStateBlock) + numel;
  }
  TORCH_CHECK(false, "zero::kernels::state_bytes: no state type has the number ",
              static_cast<int>(type));
}

void decode_state(StateType type, bool root, const void* stored, int64_t numel, float* values) {
  check_arrays("decode_state", numel, stored, values);
  if (type != StateType::kInt8) {
    cast_copy(stored, dtype_of(type), values, c10::ScalarType::Float, numel, nullptr, Stream{});
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(1, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    kernels.decode_codes(root, stored, numel, begin, end, values);
  });
}

void encode_state(StateType type, bool root, const float* values, int64_t numel, void* stored) {
  check_arrays("encode_state", numel, stored, values);
  if (type != StateType::kInt8) {
    cast_copy(values, c10::ScalarType::Float, stored, dtype_of(type), numel, nullptr, Stream{});
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(1, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    kernels.encode_codes(root, values, numel, begin, end, stored);
  });
}

}  // namespace zero::kernels
