// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What the optimizer itself costs the host in a step, when communication is free: one rank of a
// simulated job (tests/support/simulated_steps.h). tests/benchmarks/step_instructions.sh counts the
// same in instructions, which a busy machine does not change.
//
//   ./bazelw run //tests/benchmarks:step_benchmark -- --benchmark_filter=step
//
// plain_backward is autograd without an optimizer, the part of every line that is not ours;
// per_parameter, processor time, includes it.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include "tests/support/simulated_steps.h"

namespace zero {
namespace {

void per_parameter(benchmark::State& state, int64_t parameters) {
  state.counters["per_parameter"] = benchmark::Counter(
      static_cast<double>(parameters),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void step(benchmark::State& state) {
  at::set_num_threads(1);
  SimulatedSteps job({.world_size = static_cast<int>(state.range(0)),
                      .stage = state.range(2),
                      .layout = state.range(1) == 0 ? Layout::kContiguous : Layout::kPerParameter});
  for (int i = 0; i < 3; ++i) job.step();
  for (auto _ : state) job.step();
  per_parameter(state, 200);
}

void plain_backward(benchmark::State& state) {
  at::set_num_threads(1);
  PlainSteps job({.parameters = state.range(0), .width = state.range(1)});
  for (auto _ : state) job.step();
  per_parameter(state, state.range(0));
}

// The same with 25 million elements to copy into buckets: what packing adds to a backward pass
// that leaves nothing else to do.
void backward_and_pack(benchmark::State& state) {
  at::set_num_threads(1);
  SimulatedSteps job({.parameters = state.range(0), .width = state.range(1)});
  for (int i = 0; i < 3; ++i) job.step();
  for (auto _ : state) {
    job.backward();
    state.PauseTiming();
    job.update();
    state.ResumeTiming();
  }
  per_parameter(state, state.range(0));
  state.SetBytesProcessed(state.iterations() * state.range(0) / 2 * state.range(1) *
                          (state.range(1) + 1) * 4);
}

BENCHMARK(step)
    ->ArgNames({"W", "per_parameter", "stage"})
    ->ArgsProduct({{8, 64, 1024, 16384}, {0, 1}, {1, 2}})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(plain_backward)
    ->ArgNames({"parameters", "width"})
    ->Args({200, 16})
    ->Args({48, 1024})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(backward_and_pack)
    ->ArgNames({"parameters", "width"})
    ->Args({200, 16})
    ->Args({48, 1024})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace zero

BENCHMARK_MAIN();
