// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/split_master.h"

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"

namespace zero::kernels {

void join_halves(const void* upper, const int16_t* lower, int64_t numel, float* master,
                 Stream stream) {
  check_arrays("join_halves", numel, upper, lower, master);
  const auto* const uppers = static_cast<const uint16_t*>(upper);
  if (stream.cuda) {
    check_launch("join_halves", cuda::join_halves(uppers, lower, numel, master, stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(1, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    kernels.join_halves(uppers + begin, lower + begin, end - begin, master + begin);
  });
}

void split_halves(const float* master, int64_t numel, void* upper, int16_t* lower, Stream stream) {
  check_arrays("split_halves", numel, upper, lower, master);
  auto* const uppers = static_cast<uint16_t*>(upper);
  if (stream.cuda) {
    check_launch("split_halves", cuda::split_halves(master, numel, uppers, lower, stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(1, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    kernels.split_halves(master + begin, end - begin, uppers + begin, lower + begin);
  });
}

}  // namespace zero::kernels
