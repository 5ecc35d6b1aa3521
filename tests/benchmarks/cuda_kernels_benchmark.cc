// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How far each CUDA kernel is from the speed of device memory.
//
//   ./bazelw run --config=cuda //tests/benchmarks:cuda_kernels_benchmark
//   ... -- --benchmark_filter=adamw --benchmark_out=kernels.json --benchmark_out_format=json
//
// Every line times two things in turn with CUDA events, kernel, comparison, kernel, comparison,
// ..., and shows medians:
//   kernel_ms    one call
//   GBps         bytes that the algorithm must move / kernel_ms
//   other_GBps   the same of the comparison: a copy by the device, or, for norms, a kernel that
//                reads
//   ratio        GBps / other_GBps: 1 is as fast as the comparison
//   goal         the ratio that this line should reach, where there is one
// Without a GPU it says so and measures nothing.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/ema.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"
#include "kernels/stored_state.h"
#include "kernels/sum_rows.h"
#include "tests/benchmarks/device_read.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr int64_t kLargest = int64_t{1} << 27;  // elements: 512 MiB of fp32
constexpr int64_t kArrays = 7;
constexpr int kCalls = 25;
constexpr int kUncounted = 5;
constexpr double kGoal = 0.85;
const Stream kCuda{true, nullptr};

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "CUDA error: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

// A device may be faster with zeros, which it can compress and which switch no wires. As bf16 and
// as fp32, these are numbers in [0.5, 1).
std::vector<uint32_t> random_block() {
  std::vector<uint32_t> block(size_t{1} << 20);
  std::mt19937 random(1);
  for (uint32_t& word : block) {
    const uint32_t half = 0x3f00U | (random() & 0x7fU);
    word = half << 16 | (0x3f00U | (random() & 0x7fU));
  }
  return block;
}

// fp32 arrays of kLargest elements on the device, each 256-byte aligned.
float* array(int64_t index) {
  static char* const memory = [] {
    void* made = nullptr;
    const auto bytes = static_cast<size_t>(kLargest * 4 * kArrays);
    check(cudaMalloc(&made, bytes));
    const std::vector<uint32_t> block = random_block();
    for (size_t begin = 0; begin < bytes; begin += block.size() * 4) {
      check(cudaMemcpy(static_cast<char*>(made) + begin, block.data(), block.size() * 4,
                       cudaMemcpyHostToDevice));
    }
    return static_cast<char*>(made);
  }();
  return reinterpret_cast<float*>(memory + index * kLargest * 4);
}

struct Timer {
  Timer() {
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
  }
  double ms_of(const std::function<void()>& work) const {
    check(cudaEventRecord(begin, nullptr));
    work();
    check(cudaEventRecord(end, nullptr));
    check(cudaEventSynchronize(end));
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin, end));
    return ms;
  }
  cudaEvent_t begin{};
  cudaEvent_t end{};
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Work {
  double bytes;
  std::function<void()> run;
};

void compare(benchmark::State& state, const Work& kernel, const Work& other) {
  static const Timer timer;
  std::vector<double> kernel_ms;
  std::vector<double> other_ms;
  for (int i = 0; i < kUncounted; ++i) {
    kernel.run();
    other.run();
  }
  for (auto _ : state) {
    kernel_ms.push_back(timer.ms_of(kernel.run));
    other_ms.push_back(timer.ms_of(other.run));
    state.SetIterationTime(kernel_ms.back() * 1e-3);
  }
  const double mine = kernel.bytes / median(kernel_ms) * 1e-6;
  const double theirs = other.bytes / median(other_ms) * 1e-6;
  state.counters["kernel_ms"] = median(kernel_ms);
  state.counters["GBps"] = mine;
  state.counters["other_GBps"] = theirs;
  state.counters["ratio"] = mine / theirs;
}

// From the last array to the one before it, which no benchmark of a kernel uses.
Work copy(int64_t numel) {
  return {
      8.0 * static_cast<double>(numel), [numel] {
        check(cudaMemcpyAsync(array(kArrays - 2), array(kArrays - 1),
                              static_cast<size_t>(numel) * 4, cudaMemcpyDeviceToDevice, nullptr));
      }};
}

// range(0) is the number of elements, range(1) how many elements every array begins off its
// alignment.
int64_t numel_of(const benchmark::State& state) { return state.range(0) - state.range(1); }

void cast(benchmark::State& state, ScalarType from, ScalarType to) {
  const int64_t n = numel_of(state);
  const auto size = [](ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); };
  char* source = reinterpret_cast<char*>(array(0)) + state.range(1) * size(from);
  char* destination = reinterpret_cast<char*>(array(1)) + state.range(1) * size(to);
  compare(state,
          {static_cast<double>((size(from) + size(to)) * n),
           [=] { cast_copy(source, from, destination, to, n, nullptr, kCuda); }},
          copy(n));
}
void cast_fp32_to_fp32(benchmark::State& s) { cast(s, ScalarType::Float, ScalarType::Float); }
void cast_fp32_to_bf16(benchmark::State& s) { cast(s, ScalarType::Float, ScalarType::BFloat16); }
void cast_bf16_to_fp32(benchmark::State& s) { cast(s, ScalarType::BFloat16, ScalarType::Float); }

void sum_of_8_bf16_rows(benchmark::State& state) {
  const int64_t n = state.range(0);
  SumRowsArgs args;
  args.received = array(0);  // 8 rows of 2 bytes are four arrays of 4 when n is kLargest
  args.own = array(0);
  args.world_size = 8;
  args.numel = n;
  args.dtype = ScalarType::BFloat16;
  args.scale = 0.125F;
  args.shard = array(4);
  compare(state, {20.0 * static_cast<double>(n), [=] { sum_rows(args, kCuda); }}, copy(n));
}

Work read(int64_t numel) {
  return {4.0 * static_cast<double>(numel), [numel] {
            const char* error = device_read(array(0), numel, array(1));
            if (error != nullptr) {
              std::fprintf(stderr, "device_read: %s\n", error);
              std::exit(1);
            }
          }};
}

void sum_of_squares_vs_read(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const ConstSpan span{array(0) + state.range(1), n};
  auto* result = reinterpret_cast<double*>(array(1));
  compare(state,
          {4.0 * static_cast<double>(n), [=] { sum_of_squares(span, result, result + 2, kCuda); }},
          read(n));
  state.counters["goal"] = kGoal;
}

void max_abs_bits_vs_read(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const ConstSpan span{array(0) + state.range(1), n};
  auto* result = reinterpret_cast<int64_t*>(array(1));
  compare(state, {4.0 * static_cast<double>(n), [=] { max_abs_bits(span, result, kCuda); }},
          read(n));
  state.counters["goal"] = kGoal;
}

// [begin, begin + numel) of the arrays, with a bf16 working parameter.
AdamSegment adam_segment(int64_t begin, int64_t numel) {
  AdamSegment segment;
  segment.master = array(0) + begin;
  segment.exp_avg = array(1) + begin;
  segment.exp_avg_sq = array(2) + begin;
  segment.gradient = array(3) + begin;
  segment.working = reinterpret_cast<uint16_t*>(array(4)) + begin;
  segment.numel = numel;
  return segment;
}

void adamw_to_bf16(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment segment = adam_segment(state.range(1), n);
  compare(state,
          {30.0 * static_cast<double>(n),
           [=] { adam_step(segment, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

// As many segments as a model has parameters, each of which begins on 64 bytes of bf16, as in a
// bucket: launches, tables and bisection.
void adamw_to_bf16_of_1000_segments(benchmark::State& state) {
  const int64_t piece = state.range(0) / 1000 / 32 * 32;
  std::vector<AdamSegment> segments;
  for (int64_t i = 0; i < 1000; ++i) {
    segments.push_back(adam_segment(i * piece + state.range(1), piece - state.range(1)));
  }
  const int64_t n = 1000 * (piece - state.range(1));
  compare(state,
          {30.0 * static_cast<double>(n),
           [&] { adam_step(segments, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
}

void sgd_momentum_to_bf16(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment s = adam_segment(state.range(1), n);
  const SgdSegment segment{s.master, s.exp_avg, s.gradient, s.working, n, false, nullptr};
  compare(state,
          {22.0 * static_cast<double>(n),
           [=] {
             sgd_step(segment, {.momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16, kCuda);
           }},
          copy(n));
  state.counters["goal"] = kGoal;
}

void lion_to_bf16(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment s = adam_segment(state.range(1), n);
  const LionSegment segment{s.master, s.exp_avg, s.gradient, s.working, n};
  compare(state,
          {22.0 * static_cast<double>(n),
           [=] { lion_step(segment, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

// The bytes of the state of numel elements, read and written once.
double state_traffic(StateType type, int64_t numel) {
  return 2.0 * static_cast<double>(state_bytes(type, numel));
}

// State arrays of zeros, which the first updates fill.
AdamSegment stored_segment(StateType type, int64_t begin, int64_t numel) {
  AdamSegment segment = adam_segment(begin, numel);
  segment.state_type = type;
  for (void* array : {segment.exp_avg, segment.exp_avg_sq}) {
    fill_zero(array, state_bytes(type, numel), kCuda);
  }
  return segment;
}

template <StateType kType>
void adamw_to_bf16_of_stored_state(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment segment = stored_segment(kType, state.range(1), n);
  compare(state,
          {14.0 * static_cast<double>(n) + 2 * state_traffic(kType, n),
           [=] { adam_step(segment, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

void sgd_momentum_to_bf16_of_int8_state(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment s = stored_segment(StateType::kInt8, state.range(1), n);
  const SgdSegment segment{s.master, s.exp_avg, s.gradient,       s.working, n,
                           false,    nullptr,   StateType::kInt8, 0,         0};
  compare(state,
          {14.0 * static_cast<double>(n) + state_traffic(StateType::kInt8, n),
           [=] {
             sgd_step(segment, {.momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16, kCuda);
           }},
          copy(n));
  state.counters["goal"] = kGoal;
}

void lion_to_bf16_of_int8_state(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const AdamSegment s = stored_segment(StateType::kInt8, state.range(1), n);
  const LionSegment segment{s.master, s.exp_avg, s.gradient, s.working, n, StateType::kInt8, 0, 0};
  compare(state,
          {14.0 * static_cast<double>(n) + state_traffic(StateType::kInt8, n),
           [=] { lion_step(segment, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

// Its working values are array 0, and the lower halves of masters follow them there.
template <StateType kType>
void adamw_of_split_masters(benchmark::State& state) {
  const int64_t n = numel_of(state);
  AdamSegment segment = kType == StateType::kFloat ? adam_segment(state.range(1), n)
                                                   : stored_segment(kType, state.range(1), n);
  segment.master = nullptr;
  segment.working = reinterpret_cast<uint16_t*>(array(0)) + state.range(1);
  segment.remainder = reinterpret_cast<int16_t*>(array(0)) + kLargest + state.range(1);
  compare(state,
          {12.0 * static_cast<double>(n) + 2 * state_traffic(kType, n),
           [=] { adam_step(segment, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

void ema(benchmark::State& state) {
  const int64_t n = numel_of(state);
  const EmaSegment segment{array(0) + state.range(1), array(1) + state.range(1), n};
  compare(state,
          {12.0 * static_cast<double>(n), [=] { ema_step(segment, 0.001F, nullptr, kCuda); }},
          copy(n));
  state.counters["goal"] = kGoal;
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"numel", "off"})
      ->ArgsProduct({{int64_t{1} << 15, int64_t{1} << 20, int64_t{1} << 24, kLargest}, {0, 1}})
      ->Iterations(kCalls)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK(cast_fp32_to_fp32)->Apply(sizes);
BENCHMARK(cast_fp32_to_bf16)->Apply(sizes);
BENCHMARK(cast_bf16_to_fp32)->Apply(sizes);
BENCHMARK(sum_of_8_bf16_rows)
    ->ArgName("numel")
    ->Arg(1 << 20)
    ->Arg(1 << 24)
    ->Arg(kLargest)
    ->Iterations(kCalls)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(sum_of_squares_vs_read)->Apply(sizes);
BENCHMARK(max_abs_bits_vs_read)->Apply(sizes);
BENCHMARK(adamw_to_bf16)->Apply(sizes);
BENCHMARK(adamw_to_bf16_of_1000_segments)->Apply(sizes);
BENCHMARK(sgd_momentum_to_bf16)->Apply(sizes);
BENCHMARK(lion_to_bf16)->Apply(sizes);
BENCHMARK_TEMPLATE(adamw_to_bf16_of_stored_state, StateType::kBFloat16)->Apply(sizes);
BENCHMARK_TEMPLATE(adamw_to_bf16_of_stored_state, StateType::kInt8)->Apply(sizes);
BENCHMARK_TEMPLATE(adamw_of_split_masters, StateType::kFloat)->Apply(sizes);
BENCHMARK_TEMPLATE(adamw_of_split_masters, StateType::kInt8)->Apply(sizes);
BENCHMARK(sgd_momentum_to_bf16_of_int8_state)->Apply(sizes);
BENCHMARK(lion_to_bf16_of_int8_state)->Apply(sizes);
BENCHMARK(ema)->Apply(sizes);

}  // namespace
}  // namespace zero::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("nothing is measured: no CUDA device: %s\n", cudaGetErrorString(error));
    return 0;
  }
  cudaDeviceProp properties{};
  zero::kernels::check(cudaGetDeviceProperties(&properties, 0));
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
