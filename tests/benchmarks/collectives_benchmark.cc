// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What one collective costs over Gloo on 127.0.0.1, by bytes and ranks. Ranks are threads of this
// process, so that nothing but the transport is between them; on fewer cores than ranks they share.
//
//   ./bazelw run //tests/benchmarks:collectives_benchmark
//
// The time is rank 0's, of the median of 31 calls one after another. GBps counts what one rank
// sends: (W - 1) / W of the bucket.
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

constexpr int kCalls = 31;

using Call = std::function<Pending(Communicator&, const at::Tensor& rows, const at::Tensor& other)>;

double median_seconds(int world_size, int64_t bytes, const Call& call) {
  std::vector<double> seconds;
  run_ranks(world_size,
            [&](const Group& group) {
              const auto communicator = group.make_communicator("benchmark", Purpose::kData);
              const at::Tensor rows = at::ones({world_size, bytes / world_size / 4}, at::kFloat);
              const at::Tensor other = at::ones_like(rows);
              for (int i = -3; i < kCalls; ++i) {
                const auto start = std::chrono::steady_clock::now();
                call(*communicator, rows, other).wait();
                const std::chrono::duration<double> taken =
                    std::chrono::steady_clock::now() - start;
                if (group.rank() == 0 && i >= 0) seconds.push_back(taken.count());
              }
            },
            {Transport::kGloo});
  std::nth_element(seconds.begin(), seconds.begin() + kCalls / 2, seconds.end());
  return seconds[kCalls / 2];
}

void measure(benchmark::State& state, const Call& call) {
  const int64_t bytes = state.range(0);
  const auto world_size = static_cast<int>(state.range(1));
  double seconds = 0;
  for (auto _ : state) {
    seconds = median_seconds(world_size, bytes, call);
    state.SetIterationTime(seconds);
  }
  state.counters["GBps"] =
      static_cast<double>(bytes) * (world_size - 1) / world_size / seconds * 1e-9;
}

void exchange_rows(benchmark::State& state) {
  measure(state, [](Communicator& c, const at::Tensor& rows, const at::Tensor& other) {
    return c.exchange_rows(rows, other, "benchmark");
  });
}

void gather_rows(benchmark::State& state) {
  measure(state, [](Communicator& c, const at::Tensor& rows, const at::Tensor&) {
    return c.gather_rows(rows, "benchmark");
  });
}

// What the norm costs: two doubles, whatever the size of the model.
void all_reduce_sum(benchmark::State& state) {
  measure(state, [](Communicator& c, const at::Tensor&, const at::Tensor&) {
    return c.all_reduce_sum(at::ones({2}, at::kDouble), "benchmark");
  });
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"bytes", "W"})
      ->ArgsProduct({{65536, 1 << 20, 4 << 20, 64 << 20}, {2, 4, 8}})
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

BENCHMARK(exchange_rows)->Apply(sizes);
BENCHMARK(gather_rows)->Apply(sizes);
BENCHMARK(all_reduce_sum)
    ->ArgNames({"bytes", "W"})
    ->ArgsProduct({{64}, {2, 4, 8}})
    ->Iterations(1)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace zero

BENCHMARK_MAIN();
