// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/ema.h"

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"

namespace zero::kernels {

void ema_step(c10::ArrayRef<EmaSegment> segments, float weight, const float* device_weight,
              Stream stream) {
  for (const EmaSegment& s : segments) check_arrays("ema_step", s.numel, s.average, s.values);
  const auto count = static_cast<int64_t>(segments.size());
  if (stream.cuda) {
    check_launch("ema_step",
                 cuda::ema_step(segments.data(), count, weight, device_weight, stream.handle));
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
