// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The emulation runs correct kernels and shows what is wrong with others.
#include "tests/support/cuda_emulation/cuda_emulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "tests/support/cuda_emulation/cuda_runtime.h"

namespace cuda_emulation {
namespace {

constexpr unsigned kThreads = 64;
constexpr Order kOrders[] = {Order::kForward, Order::kBackward, Order::kShuffled};

template <class... Parameters, class... Arguments>
cudaError_t launch_on(unsigned grid, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kThreads);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

class CudaEmulation : public ::testing::Test {
 protected:
  // ThreadSanitizer sees no order of memory in a process that was forked from one with threads.
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { set_order(Order::kForward); }
};

__global__ void count_kernel(int* counts) { ++counts[blockIdx.x * blockDim.x + threadIdx.x]; }

TEST_F(CudaEmulation, EveryThreadOfEveryBlockRunsOnceInEachOrder) {
  for (Order order : kOrders) {
    set_order(order);
    std::vector<int> counts(5 * kThreads);
    ASSERT_EQ(launch_on(5, count_kernel, counts.data()), cudaSuccess);
    EXPECT_EQ(counts, std::vector<int>(5 * kThreads, 1));
  }
}

__global__ void order_kernel(unsigned* order, std::atomic<unsigned>* count) {
  order[count->fetch_add(1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

TEST_F(CudaEmulation, TheOrderIsTheOneAskedFor) {
  const auto order_in = [](Order order) {
    set_order(order);
    std::vector<unsigned> seen(2 * kThreads);
    std::atomic<unsigned> count{0};
    launch_on(2, order_kernel, seen.data(), &count);
    return seen;
  };
  std::vector<unsigned> all(2 * kThreads);
  std::iota(all.begin(), all.end(), 0U);
  EXPECT_EQ(order_in(Order::kForward), all);
  const std::vector<unsigned> shuffled = order_in(Order::kShuffled);
  EXPECT_NE(shuffled, all);
  EXPECT_TRUE(std::is_permutation(shuffled.begin(), shuffled.end(), all.begin()));
  std::reverse(all.begin(), all.end());
  EXPECT_EQ(order_in(Order::kBackward), all);
}

// Every thread reads what its neighbour on either side wrote.
template <bool kBarrier>
__global__ void neighbours_kernel(int base, int* sums) {
  __shared__ int written[kThreads];
  written[threadIdx.x] = base + static_cast<int>(threadIdx.x);
  if (kBarrier) __syncthreads();
  sums[threadIdx.x] =
      written[(threadIdx.x + 1) % kThreads] + written[(threadIdx.x + kThreads - 1) % kThreads];
}

// Whether they read what was written in this launch, whose values are those of no launch before.
template <bool kBarrier>
bool neighbours_are_seen(Order order) {
  static int base = 0;
  base += 1000;
  std::vector<int> expected;
  for (unsigned i = 0; i < kThreads; ++i) {
    expected.push_back(2 * base + static_cast<int>((i + 1) % kThreads + (i + 63) % kThreads));
  }
  set_order(order);
  std::vector<int> sums(kThreads);
  launch_on(1, neighbours_kernel<kBarrier>, base, sums.data());
  return sums == expected;
}

TEST_F(CudaEmulation, ABarrierMakesMemoryVisibleInEachOrder) {
  for (Order order : kOrders) {
    EXPECT_TRUE(neighbours_are_seen<true>(order));
  }
}

// All threads but the first write between two barriers.
__global__ void writers_kernel(int* sums) {
  __shared__ int written;
  __syncthreads();
  if (threadIdx.x != 0) written = 1;
  __syncthreads();
  sums[threadIdx.x] = written;
}

#ifdef __SANITIZE_THREAD__
TEST_F(CudaEmulation, ThreadSanitizerReportsAWriteByManyThreads) {
  int sums[kThreads];
  EXPECT_DEATH(launch_on(1, writers_kernel, &sums[0]), "data race");
}
TEST_F(CudaEmulation, ThreadSanitizerReportsAMissingBarrier) {
  EXPECT_DEATH(neighbours_are_seen<false>(Order::kForward), "data race");
}
#else
TEST_F(CudaEmulation, AWriteOfOneValueByManyThreadsShowsInNoResult) {
  int sums[kThreads];
  launch_on(1, writers_kernel, &sums[0]);
  EXPECT_EQ(std::count(sums, sums + kThreads, 1), kThreads);
}
TEST_F(CudaEmulation, AMissingBarrierShowsInTheResults) {
  for (Order order : kOrders) {
    EXPECT_FALSE(neighbours_are_seen<false>(order));
  }
}
#endif

__global__ void warp_kernel(double* sums, int* largest) {
  double sum = threadIdx.x;
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(0xffffffffU, sum, distance);
  }
  const int maximum = __reduce_max_sync(0xffffffffU, static_cast<int>(threadIdx.x) * -1);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    largest[threadIdx.x / 32] = maximum;
  }
}

TEST_F(CudaEmulation, WarpFunctionsExchangeTheValuesOfAWarp) {
  for (Order order : kOrders) {
    set_order(order);
    double sums[2] = {};
    int largest[2] = {};
    launch_on(1, warp_kernel, sums, largest);
    EXPECT_EQ(sums[0], 31 * 32 / 2);
    EXPECT_EQ(sums[1], 31 * 32 / 2 + 32 * 32);
    EXPECT_EQ(largest[0], 0);
    EXPECT_EQ(largest[1], -32);
  }
}

__global__ void early_end_kernel() {
  if (threadIdx.x != 3) __syncthreads();
}
__global__ void branches_kernel() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void mixed_kernel() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __reduce_max_sync(0xffffffffU, 1);
  }
}
__global__ void partial_mask_kernel() { __reduce_max_sync(0xffffU, 1); }

TEST_F(CudaEmulation, ABarrierThatNotAllThreadsReachEndsTheProcess) {
  EXPECT_DEATH(launch_on(1, early_end_kernel), "end without the __syncthreads");
  EXPECT_DEATH(launch_on(1, branches_kernel), "different calls of __syncthreads");
  EXPECT_DEATH(launch_on(1, mixed_kernel), "in different places");
  EXPECT_DEATH(launch_on(1, partial_mask_kernel), "mask");
}

struct Large {
  char bytes[4090];
};
__global__ void large_kernel(Large, double) {}

TEST_F(CudaEmulation, ParametersOfMoreThan4096BytesEndTheProcess) {
  EXPECT_DEATH(launch_on(1, large_kernel, Large{}, 1.0), "4096 bytes");
}

TEST_F(CudaEmulation, AGridWithoutBlocksIsAnErrorThatTheNextCallReports) {
  int counts[kThreads] = {};
  EXPECT_EQ(launch_on(0, count_kernel, counts), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace cuda_emulation
