// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/ema.h"

#include <c10/util/Exception.h>

#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<EmaSegment> segments) {
  for (const EmaSegment& segment : segments) {
    TORCH_CHECK(segment.numel >= 0, "zero::kernels::ema_step: numel must be >= 0, got ",
                segment.numel);
    TORCH_CHECK(segment.numel == 0 || (segment.average != nullptr && segment.values != nullptr),
                "zero::kernels::ema_step: null pointer for ", segment.numel, " elements");
  }
}

}  // namespace

void ema_step(c10::ArrayRef<EmaSegment> segments, float weight, const float* device_weight,
              Stream stream) {
  check_segments(segments);
  const auto count = static_cast<int64_t>(segments.size());
  if (stream.cuda) {
    const char* error =
        cuda::ema_step(segments.data(), count, weight, device_weight, stream.handle);
    TORCH_CHECK(error == nullptr, "zero::kernels::ema_step: CUDA error: ", error);
    return;
  }
  if (device_weight != nullptr) weight = *device_weight;
  if (weight == 0.0F) return;
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(count, [&](int64_t i) { return segments[i].numel; });
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t) {
    const EmaSegment& s = segments[i];
    kernels.ema({s.average + begin, s.values + begin, end - begin}, weight);
  });
}

}  // namespace zero::kernels
