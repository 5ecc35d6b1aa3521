// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// On how many blocks kernels run, and what a GPU that cannot run them is told. Emulated: a GPU does
// not say on how many blocks a kernel ran.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/ema.h"
#include "kernels/exact_sum.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"
#include "kernels/split_master.h"
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

// Calls of every kind of kernel, by name, for arrays of `numel` elements.
class Calls {
 public:
  explicit Calls(int64_t numel) : arrays_(6, ordinary(numel, c10::ScalarType::Float, 1)) {
    float* a[6];
    std::transform(arrays_.begin(), arrays_.end(), a, [](Buffer& one) { return one.as<float>(); });
    SumRowsArgs rows;
    rows.own = a[0];
    rows.world_size = 1;
    rows.numel = numel;
    rows.dtype = c10::ScalarType::Float;
    rows.shard = a[1];
    const AdamSegment adam{a[0], a[1], a[2], nullptr, a[3], nullptr, numel, 1, nullptr};
    const SgdSegment sgd{a[0], a[1], a[3], nullptr, numel, false, nullptr};
    const LionSegment lion{a[0], a[1], a[3], nullptr, numel};
    const ConstSpan span{a[0], numel};
    auto* const half = reinterpret_cast<int16_t*>(a[4]);
    constexpr auto kFloat = c10::ScalarType::Float, kBFloat16 = c10::ScalarType::BFloat16;
    by_name = {
        {"adam_step", [=] { adam_step(adam, {}, nullptr, nullptr, kBFloat16, kCuda); }},
        {"sgd_step", [=] { sgd_step(sgd, {.momentum = 0.9}, nullptr, nullptr, kFloat, kCuda); }},
        {"lion_step", [=] { lion_step(lion, {}, nullptr, nullptr, kFloat, kCuda); }},
        {"ema_step",
         [=] {
           ema_step(EmaSegment{a[1], a[0], numel}, 0.1F, nullptr, kCuda);
         }},
        {"cast_copy", [=] { cast_copy(a[0], kFloat, a[4], kFloat, numel, nullptr, kCuda); }},
        {"fill_zero", [=] { fill_zero(a[4], numel * 4, kCuda); }},
        {"join_halves", [=] { join_halves(a[0], half, numel, a[5], kCuda); }},
        {"split_halves", [=] { split_halves(a[0], numel, a[5], half, kCuda); }},
        {"sum_rows", [=] { sum_rows(rows, kCuda); }},
        {"sum_of_squares", [=, this] { sum_of_squares(span, sums_, norm_.as<double>(), kCuda); }},
        {"max_abs_bits", [=, this] { max_abs_bits(span, &bits_, kCuda); }},
        {"add_squares_exactly", [=, this] { add_squares_exactly(span, exact_, kCuda); }},
        {"value_of_exact_sum", [this] { value_of_exact_sum(exact_, sums_, kCuda); }},
    };
  }

  std::map<std::string, std::function<void()>> by_name;

 private:
  std::vector<Buffer> arrays_;
  Buffer norm_ = Buffer(kNormWorkspace * 8, 0);
  double sums_[2] = {};
  int64_t exact_[kExactNumel] = {};
  int64_t bits_ = 0;
};

// Of the first launch of each kind of kernel that spreads `numel` elements.
std::map<std::string, int64_t> blocks_of(int64_t numel) {
  const Calls calls(numel);
  std::map<std::string, int64_t> blocks;
  for (const auto& [name, run] : calls.by_name) {
    if (name == "fill_zero" || name == "value_of_exact_sum") continue;
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
  cuda_emulation::set_processors(10);
  for (const auto& [name, blocks] : blocks_of(10 * 8 * 1024 + 5)) {
    EXPECT_EQ(blocks, 10 * 8) << name;
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

TEST_F(CudaLaunch, OfADeviceThatIsBrokenEveryCallThrowsEachTime) {
  const Calls calls(10);
  cuda_emulation::break_device(cudaErrorIllegalAddress);
  for (const auto& [name, run] : calls.by_name) {
    for (int time = 0; time < 2; ++time) {
      EXPECT_THAT(error_of(cudaSuccess, run),
                  ::testing::HasSubstr("CUDA error: an illegal memory access was encountered"))
          << name;
    }
  }
  cuda_emulation::break_device(cudaSuccess);
  for (const auto& [name, run] : calls.by_name) {
    EXPECT_EQ(error_of(cudaSuccess, run), "nothing was thrown") << name;
  }
}

}  // namespace
}  // namespace zero::kernels
