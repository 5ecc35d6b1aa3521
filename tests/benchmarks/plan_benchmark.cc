// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How long planning takes: once at construction for make_plan and fingerprint,
// for every bucket of a rank for segments.
//
//   ./bazelw run //tests/benchmarks:plan_benchmark
#include <benchmark/benchmark.h>

#include <vector>

#include "bookkeeping/plan.h"

namespace zero {
namespace {

// Blocks of a transformer: matrices and vectors, about 2 billion elements in 1000 parameters.
std::vector<ParameterInfo> transformer(int64_t parameters) {
  const int64_t width = 1600;
  const int64_t sizes[] = {3 * width * width, 3 * width, width * width,     width,
                           4 * width * width, 4 * width, 4 * width * width, width};
  std::vector<ParameterInfo> result;
  for (int64_t i = 0; i < parameters; ++i) {
    result.push_back({sizes[i % 8], c10::ScalarType::BFloat16, 0});
  }
  return result;
}

// 126 layers of Llama 3 405B with embedding and head, as many parameters as `experts` make of it.
std::vector<ParameterInfo> llama_405b(int64_t experts) {
  const int64_t width = 16384, inner = 53248 / experts;
  std::vector<ParameterInfo> result = {{128256 * width, c10::ScalarType::BFloat16, 0}};
  for (int64_t layer = 0; layer < 126; ++layer) {
    for (const int64_t rows :
         {width, int64_t{1024}, int64_t{1024}, width, int64_t{1}, int64_t{1}}) {
      result.push_back({rows * width, c10::ScalarType::BFloat16, 0});
    }
    for (int64_t i = 0; i < 3 * experts; ++i) {
      result.push_back({inner * width, c10::ScalarType::BFloat16, 0});
    }
  }
  result.push_back({128256 * width, c10::ScalarType::BFloat16, 0});
  return result;
}

PlanOptions options_of(const benchmark::State& state) {
  const Layout layouts[] = {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters};
  return {layouts[state.range(2)], int64_t{4} << 20, /*on_gpu=*/false, 8};
}

void plan_construction(benchmark::State& state) {
  const std::vector<ParameterInfo> parameters = transformer(state.range(0));
  const std::vector<int64_t> world_sizes = {state.range(1)};
  const PlanOptions options = options_of(state);
  size_t buckets = 0;
  for (auto _ : state) {
    const Plan plan = make_plan(parameters, world_sizes, options);
    buckets = plan.buckets.size();
    benchmark::DoNotOptimize(buckets);
  }
  state.counters["buckets"] = static_cast<double>(buckets);
}

void plan_fingerprint(benchmark::State& state) {
  const Plan plan = make_plan(transformer(state.range(0)), {state.range(1)}, options_of(state));
  for (auto _ : state) benchmark::DoNotOptimize(plan.fingerprint());
}

// The default buckets and machines of 8 ranks.
void plan_of_whole_llama_405b(benchmark::State& state) {
  const std::vector<ParameterInfo> parameters = llama_405b(state.range(0));
  size_t buckets = 0;
  for (auto _ : state) {
    const Plan plan = make_plan(parameters, {state.range(1)},
                                {Layout::kWholeParameters, std::nullopt, /*on_gpu=*/false, 8});
    benchmark::DoNotOptimize(plan.fingerprint());
    buckets = plan.buckets.size();
  }
  state.counters["parameters"] = static_cast<double>(parameters.size());
  state.counters["buckets"] = static_cast<double>(buckets);
}

void segments_of_one_rank(benchmark::State& state) {
  const Plan plan = make_plan(transformer(state.range(0)), {state.range(1)}, options_of(state));
  for (auto _ : state) {
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      benchmark::DoNotOptimize(plan.segments(static_cast<int64_t>(b), state.range(1) / 2));
    }
  }
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"parameters", "W", "layout"})
      ->ArgsProduct({{200, 1000}, {8, 16384}, {0, 1, 2}})
      ->Unit(benchmark::kMicrosecond);
}

BENCHMARK(plan_construction)->Apply(sizes);
BENCHMARK(plan_fingerprint)->Apply(sizes);
BENCHMARK(segments_of_one_rank)->Apply(sizes);
BENCHMARK(plan_of_whole_llama_405b)
    ->ArgNames({"experts", "W"})
    ->ArgsProduct({{1, 128}, {8, 16384}})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace zero

BENCHMARK_MAIN();
