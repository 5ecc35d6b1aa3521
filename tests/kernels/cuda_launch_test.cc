// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// On how many blocks kernels run, and what a GPU that cannot run them is told. Emulated: a GPU does
// not say on how many blocks a kernel ran.
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <string>

#include "kernels/adam.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/exact_sum.h"
#include "kernels/norm.h"
#include "kernels/sum_rows.h"
#include "tests/kernels/cuda_buffers.h"
#include "tests/support/cuda_emulation/cuda_emulation.h"

namespace zero::kernels {
namespace {

class CudaLaunch : public ::testing::Test {
 protected:
  void SetUp() override { cuda_emulation::set_processors(132); }
  void TearDown() override { cuda_emulation::set_processors(2); }
};

// The blocks of the first launch that each kind of kernel makes for `numel` elements.
std::map<std::string, int64_t> blocks_of(int64_t numel) {
  Buffer values = ordinary(numel, c10::ScalarType::Float, 1);
  Buffer norm(kNormWorkspace * 8, 0);
  std::vector<Buffer> arrays(5, values);
  float* a[5];
  std::transform(arrays.begin(), arrays.end(), a, [](Buffer& one) { return one.as<float>(); });
  SumRowsArgs rows;
  rows.own = a[0];
  rows.world_size = 1;
  rows.numel = numel;
  rows.dtype = c10::ScalarType::Float;
  rows.shard = a[1];
  const AdamSegment segment{a[0], a[1], a[2], nullptr, a[3], nullptr, numel, 1, nullptr};
  const ConstSpan span{a[0], numel};
  double sums[2] = {};
  int64_t exact[kExactNumel] = {};
  int64_t bits = 0;
  const std::map<std::string, std::function<void()>> kernels = {
      {"adam", [&] { adam_step(segment, {}, nullptr, nullptr, c10::ScalarType::BFloat16, kCuda); }},
      {"cast",
       [&] {
         cast_copy(a[0], c10::ScalarType::Float, a[4], c10::ScalarType::Float, numel, nullptr,
                   kCuda);
       }},
      {"sum of rows", [&] { sum_rows(rows, kCuda); }},
      {"sum of squares", [&] { sum_of_squares(span, sums, norm.as<double>(), kCuda); }},
      {"exact sum", [&] { add_squares_exactly(span, exact, kCuda); }},
      {"max abs", [&] { max_abs_bits(span, &bits, kCuda); }},
  };
  std::map<std::string, int64_t> blocks;
  for (const auto& [name, run] : kernels) {
    cuda_emulation::take_grids();
    run();
    blocks[name] = cuda_emulation::take_grids().at(0);
  }
  return blocks;
}

TEST_F(CudaLaunch, ASmallShardIsSpreadOverManyBlocks) {
  for (const auto& [name, blocks] : blocks_of(32 << 10)) {
    EXPECT_EQ(blocks, 32) << name;
  }
}

TEST_F(CudaLaunch, ALargeShardTakesTheBlocksThatTheDeviceHolds) {
  for (const auto& [name, blocks] : blocks_of(132 * 8 * 1024 + 5)) {
    EXPECT_EQ(blocks, 132 * 8) << name;
  }
}

TEST_F(CudaLaunch, TilesAreAsLargeAsTheWantedNumberOfThemAllows) {
  cuda::Tiles<ConstSpan> table;
  table.count = 2;
  for (const auto& [numel, tile] : std::map<int64_t, int32_t>{
           {5, 1024}, {1055 * 1024, 1024}, {1056 * 1024, 2048}, {1056 * 4096, 8192}}) {
    table.segments[0].numel = numel;
    table.segments[1].numel = numel;
    EXPECT_EQ(cuda::cut(table, 1056), 2 * ((numel + tile - 1) / tile));
    EXPECT_EQ(table.tile, tile) << numel;
  }
}

TEST_F(CudaLaunch, NothingIsLaunchedForNoElements) {
  cuda_emulation::take_grids();
  cast_copy(nullptr, c10::ScalarType::Float, nullptr, c10::ScalarType::Half, 0, nullptr, kCuda);
  adam_step(AdamSegment{}, {}, nullptr, nullptr, c10::ScalarType::Float, kCuda);
  int64_t sum[kExactNumel] = {};
  add_squares_exactly(ConstSpan{}, sum, kCuda);
  EXPECT_TRUE(cuda_emulation::take_grids().empty());
}

std::string error_of(cudaError_t error, const std::function<void()>& launch) {
  cuda_emulation::fail_next_launch(error);
  try {
    launch();
  } catch (const c10::Error& thrown) {
    return thrown.what_without_backtrace();
  }
  return "nothing was thrown";
}

std::string error_of_next_launch(cudaError_t error) {
  Buffer values = ordinary(10, c10::ScalarType::Float, 1);
  int64_t bits = 0;
  return error_of(error, [&] { max_abs_bits(ConstSpan{values.as<float>(), 10}, &bits, kCuda); });
}

TEST_F(CudaLaunch, AGpuThatIsTooOldIsToldSo) {
  EXPECT_EQ(error_of_next_launch(cudaErrorNoKernelImageForDevice),
            "zero::kernels::max_abs_bits: CUDA error: the kernels are compiled for compute "
            "capability 8.0 (A100) and later, and the current GPU is older");
}

TEST_F(CudaLaunch, AnErrorIsThrownOnce) {
  EXPECT_EQ(error_of_next_launch(cudaErrorInvalidConfiguration),
            "zero::kernels::max_abs_bits: CUDA error: invalid configuration argument");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(error_of_next_launch(cudaSuccess), "nothing was thrown");
}

TEST_F(CudaLaunch, AnErrorOfAnExactSumIsThrown) {
  const float value = 1.0F;
  int64_t sum[kExactNumel] = {};
  double result = 0.0;
  EXPECT_EQ(error_of(cudaErrorInvalidConfiguration,
                     [&] {
                       add_squares_exactly(ConstSpan{&value, 1}, sum, kCuda);
                     }),
            "zero::kernels::add_squares_exactly: CUDA error: invalid configuration argument");
  EXPECT_EQ(
      error_of(cudaErrorInvalidConfiguration, [&] { value_of_exact_sum(sum, &result, kCuda); }),
      "zero::kernels::value_of_exact_sum: CUDA error: invalid configuration argument");
}

}  // namespace
}  // namespace zero::kernels
