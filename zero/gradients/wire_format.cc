// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/wire_format.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "zero/gradients/block_int8_wire.h"
#include "zero/gradients/elementwise_wire.h"
#include "zero/gradients/tree_wire.h"
#include "zero/options.h"

namespace zero {
namespace {

int64_t encoded_bytes(const BucketRows& rows, const WireFormat& wire) {
  if (rows.equal()) return rows.count() * wire.bytes(rows.equal_numel());
  int64_t bytes = 0;
  for (const int64_t r : rows.filled()) bytes += wire.bytes(rows.numel(r));
  return bytes;
}

}  // namespace

void check_wire_options(const ZeroOptions& options, c10::Device device) {
  if (options.gradient_wire() == GradientWire::kBlockInt8) {
    TORCH_CHECK(!options.reduce_dtype(),
                "gradient_wire: expected no reduce_dtype with kBlockInt8, which sends 8-bit "
                "integers and fp32 scales, got reduce_dtype ",
                *options.reduce_dtype(), "; leave one of them out");
    TORCH_CHECK(device.is_cpu(), "gradient_wire: expected parameters on cpu with kBlockInt8, got ",
                device, "; use reduce_dtype(torch::kBFloat16), or no option, on a GPU");
  }
  if (options.micro_batches() > 0) {
    TORCH_CHECK(!options.reduce_dtype() && options.gradient_wire() == GradientWire::kDtype,
                "micro_batches: expected no reduce_dtype and GradientWire::kDtype, since sums of "
                "micro-batches are sent as they are, got ",
                options.reduce_dtype() ? "reduce_dtype" : "kBlockInt8", "; leave one of them out");
  }
  if (const auto dtype = options.reduce_dtype()) {
    TORCH_CHECK(*dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf,
                "reduce_dtype: expected float, bfloat16 or half, got ", *dtype);
  }
}

std::string describe_wire_options(const ZeroOptions& options) {
  std::string text = options.fp32_machine_sums() ? "" : " fp32_machine_sums 0";
  if (options.gradient_wire() == GradientWire::kBlockInt8) text += " gradient_wire block_int8";
  if (options.gather_wire() == GatherWire::kChanges) text += " gather_wire changes";
  if (options.micro_batches() > 0)
    text += " micro_batches " + std::to_string(options.micro_batches());
  if (options.reduce_dtype()) text += c10::str(" reduce_dtype ", *options.reduce_dtype());
  return text;
}

WireFormats make_wire_formats(const Plan& plan, const ZeroOptions& options,
                              const WirePlace& place) {
  WireFormats wires;
  for (const Arena& arena : plan.arenas) {
    if (options.micro_batches() > 0) {
      const SumTree tree(options.micro_batches(), arena.world_size);
      wires.push_back(std::make_shared<TreeWire>(arena.dtype, tree, place));
    } else if (options.gradient_wire() == GradientWire::kBlockInt8) {
      wires.push_back(
          std::make_shared<BlockInt8Wire>(options.no_sync_fp32() ? at::kFloat : arena.dtype));
    } else {
      wires.push_back(std::make_shared<ElementwiseWire>(
          options.reduce_dtype().value_or(arena.dtype), options.fp32_machine_sums()));
    }
  }
  return wires;
}

int64_t buffer_bytes(const Plan& plan, const WireFormats& wires, size_t buffers) {
  std::vector<int64_t> encoded, packed;
  for (const Bucket& bucket : plan.buckets) {
    const WireFormat& wire = *wires[bucket.arena];
    encoded.push_back(encoded_bytes(bucket.rows, wire));
    if (wire.packs_in_place()) continue;
    packed.push_back(wire.matrices() * plan.bucket_numel(bucket) *
                     static_cast<int64_t>(c10::elementSize(wire.packed_dtype())));
  }
  // Those in use at one time are different buckets: at most the largest ones.
  return sum_of_largest(encoded, buffers) + sum_of_largest(packed, 2);
}

int64_t sum_of_largest(std::vector<int64_t> sizes, size_t count) {
  count = std::min(sizes.size(), count);
  const auto end = sizes.begin() + static_cast<int64_t>(count);
  std::partial_sort(sizes.begin(), end, sizes.end(), std::greater<>());
  return std::accumulate(sizes.begin(), end, int64_t{0});
}

}  // namespace zero
