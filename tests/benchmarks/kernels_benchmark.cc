// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How far each CPU kernel is from the speed of memory.
//
//   ./bazelw run -c opt //tests/benchmarks:kernels_benchmark
//   ZERO_CPU_CAPABILITY=avx2 ./bazelw run -c opt //tests/benchmarks:kernels_benchmark --
//   --benchmark_filter=adamw
//
// Every line times two things in turn, kernel, comparison, kernel, comparison,
// ..., so that a neighbour's load hits both, and shows medians:
//   kernel_ms, other_ms   one call each
//   kernel_GBps           bytes that the algorithm must move / kernel time; what
//                         the cache adds by fetching lines before they are written
//                         is not counted
//   ratio                 kernel_ms / other_ms: 1 is as fast as the comparison
//   best_ratio            the same of the fastest call of each: what is left when a
//                         busy machine takes the processor away in the middle of calls
// Comparisons named read, copy and move touch the same bytes with next to no
// arithmetic, on as many threads.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/from_blob.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/exact_sum.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"
#include "kernels/split_master.h"
#include "kernels/stored_state.h"
#include "kernels/sum_rows.h"
#include "kernels/sum_tree.h"

#if defined(__x86_64__) && !defined(__clang__)
#define ZERO_BENCHMARK_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO_BENCHMARK_CLONES
#endif

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr int64_t kLargest = 33554432;
constexpr int64_t kArrays = 6;

// Arrays of kLargest floats, 64-byte aligned, filled with ordinary values.
float* array(int64_t index) {
  static const std::vector<float*> arrays = [] {
    std::vector<float*> made;
    for (int64_t a = 0; a < kArrays; ++a) {
      auto* values = static_cast<float*>(std::aligned_alloc(64, kLargest * sizeof(float)));
      at::parallel_for(0, kLargest, 65536, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          values[i] = static_cast<float>((i * 2654435761U) & 0xffffU) * 1e-6F + 1e-3F;
        }
      });
      made.push_back(values);
    }
    return made;
  }();
  return arrays[index];
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void compare(benchmark::State& state, double bytes, const std::function<void()>& kernel,
             const std::function<void()>& other) {
  at::set_num_threads(static_cast<int>(state.range(1)));
  kernel();
  other();
  std::vector<double> kernel_seconds;
  std::vector<double> other_seconds;
  for (auto _ : state) {
    kernel_seconds.push_back(seconds_of(kernel));
    other_seconds.push_back(seconds_of(other));
  }
  const double mine = median(kernel_seconds);
  const double theirs = median(other_seconds);
  state.counters["kernel_ms"] = mine * 1e3;
  state.counters["other_ms"] = theirs * 1e3;
  state.counters["kernel_GBps"] = bytes / mine * 1e-9;
  state.counters["ratio"] = mine / theirs;
  state.counters["best_ratio"] = *std::min_element(kernel_seconds.begin(), kernel_seconds.end()) /
                                 *std::min_element(other_seconds.begin(), other_seconds.end());
}

template <class F>
void on_threads(int64_t numel, const F& f) {
  at::parallel_for(0, numel, 32768, f);
}

ZERO_BENCHMARK_CLONES uint32_t read_words(const uint32_t* words, int64_t numel) {
  uint32_t all = 0;
  for (int64_t i = 0; i < numel; ++i) {
    all |= words[i];
  }
  return all;
}

void read_floats(const float* values, int64_t numel) {
  on_threads(numel, [&](int64_t begin, int64_t end) {
    benchmark::DoNotOptimize(
        read_words(reinterpret_cast<const uint32_t*>(values) + begin, end - begin));
  });
}

// The traffic of one Adam update and a 16-bit working parameter.
ZERO_BENCHMARK_CLONES void move_adam(float* __restrict p, float* __restrict m, float* __restrict v,
                                     const float* __restrict g, uint16_t* __restrict w,
                                     int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    p[i] = p[i] + g[i];
    m[i] = m[i] + 1.0F;
    v[i] = v[i] + 1.0F;
    w[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, p[i]) >> 16);
  }
}

ZERO_BENCHMARK_CLONES void move_sgd(float* __restrict p, float* __restrict b,
                                    const float* __restrict g, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    p[i] = p[i] + g[i];
    b[i] = b[i] + 1.0F;
  }
}

template <class T>
ZERO_BENCHMARK_CLONES void move_rows(const T* __restrict a, const T* __restrict b,
                                     float* __restrict shard, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    shard[i] = static_cast<float>(a[i] + b[i]);
  }
}

template <class S, class D>
ZERO_BENCHMARK_CLONES void move_cast(const S* __restrict source, D* __restrict destination,
                                     int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    destination[i] = static_cast<D>(source[i]);
  }
}

void sum_of_squares_vs_read(benchmark::State& state) {
  const int64_t n = state.range(0);
  const ConstSpan span{array(0), n};
  double result[2] = {};
  compare(
      state, 4.0 * n, [&] { sum_of_squares(span, result, nullptr, Stream{}); },
      [&] { read_floats(array(0), n); });
}

void exact_sum_vs_sum_of_squares(benchmark::State& state) {
  const int64_t n = state.range(0);
  const ConstSpan span{array(0), n};
  int64_t sum[kExactNumel] = {};
  double result[2] = {};
  compare(
      state, 4.0 * n, [&] { add_squares_exactly(span, sum, Stream{}); },
      [&] { sum_of_squares(span, result, nullptr, Stream{}); });
}

void max_abs_bits_vs_read(benchmark::State& state) {
  const int64_t n = state.range(0);
  const ConstSpan span{array(0), n};
  int64_t result = 0;
  compare(
      state, 4.0 * n, [&] { max_abs_bits(span, &result, Stream{}); },
      [&] { read_floats(array(0), n); });
}

void cast_float_to_float_vs_copy(benchmark::State& state) {
  const int64_t n = state.range(0);
  compare(
      state, 8.0 * n,
      [&] {
        cast_copy(array(0), ScalarType::Float, array(1), ScalarType::Float, n, nullptr, Stream{});
      },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          std::memcpy(array(1) + begin, array(0) + begin, (end - begin) * sizeof(float));
        });
      });
}

template <ScalarType kType>
void cast_float_to_16_bits_vs_move(benchmark::State& state) {
  const int64_t n = state.range(0);
  auto* narrow = reinterpret_cast<uint16_t*>(array(1));
  compare(
      state, 6.0 * n,
      [&] { cast_copy(array(0), ScalarType::Float, narrow, kType, n, nullptr, Stream{}); },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          move_cast(reinterpret_cast<uint32_t*>(array(0)) + begin, narrow + begin, end - begin);
        });
      });
}

template <ScalarType kType>
void cast_16_bits_to_float_vs_move(benchmark::State& state) {
  const int64_t n = state.range(0);
  auto* narrow = reinterpret_cast<uint16_t*>(array(1));
  compare(
      state, 6.0 * n,
      [&] { cast_copy(narrow, kType, array(2), ScalarType::Float, n, nullptr, Stream{}); },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          move_cast(narrow + begin, reinterpret_cast<uint32_t*>(array(2)) + begin, end - begin);
        });
      });
}

template <ScalarType kType, class T>
void sum_two_rows_vs_move(benchmark::State& state) {
  const int64_t n = state.range(0);
  SumRowsArgs args;
  args.received = array(0);  // row 1 is the own one, so this is row 0
  args.own = array(1);
  args.world_size = 2;
  args.own_rank = 1;
  args.numel = n;
  args.dtype = kType;
  args.scale = 0.5F;
  args.shard = array(2);
  compare(
      state, (2.0 * sizeof(T) + 4.0) * n, [&] { sum_rows(args, Stream{}); },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          move_rows(reinterpret_cast<T*>(array(0)) + begin, reinterpret_cast<T*>(array(1)) + begin,
                    array(2) + begin, end - begin);
        });
      });
}

// Four rows over a tree, and in their order.
void sum_tree_vs_sum_rows(benchmark::State& state) {
  const int64_t n = state.range(0);
  const std::vector<const void*> rows = {array(0), array(1), array(2), array(3)};
  const std::vector<RowAddition> additions = {{0, 1, 0}, {2, 3, 1}, {0, 2, 0}};
  SumTreeArgs tree;
  tree.rows = rows;
  tree.additions = additions;
  tree.places = 2;
  tree.numel = n;
  tree.scale = 0.25F;
  tree.shard = array(4);
  SumRowsArgs serial;
  serial.rows = rows.data();
  serial.world_size = 4;
  serial.numel = n;
  serial.scale = 0.25F;
  serial.shard = array(4);
  compare(
      state, 20.0 * static_cast<double>(n), [&] { sum_tree(tree, Stream{}); },
      [&] { sum_rows(serial, Stream{}); });
}

AdamSegment adam_segment(int64_t n, void* working) {
  AdamSegment segment;
  segment.master = array(0);
  segment.exp_avg = array(1);
  segment.exp_avg_sq = array(2);
  segment.gradient = array(3);
  segment.working = working;
  segment.numel = n;
  segment.step = 100;
  return segment;
}

constexpr AdamOptions kAdam{.lr = 1e-6, .weight_decay = 0.01};

void adamw_to_bf16_vs_move(benchmark::State& state) {
  const int64_t n = state.range(0);
  const AdamSegment segment = adam_segment(n, array(4));
  const float coefficient = 0.999F;
  const double nonfinite = 0.0;
  compare(
      state, 30.0 * n,
      [&] { adam_step(segment, kAdam, &coefficient, &nonfinite, ScalarType::BFloat16, Stream{}); },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          move_adam(array(0) + begin, array(1) + begin, array(2) + begin, array(3) + begin,
                    reinterpret_cast<uint16_t*>(array(4)) + begin, end - begin);
        });
      });
}

// What a trainer does without this kernel: one pass for unscaling and clipping together (two are
// common), torch's fused AdamW, one pass for the cast.
void adamw_to_bf16_vs_separate_passes(benchmark::State& state) {
  const int64_t n = state.range(0);
  const AdamSegment segment = adam_segment(n, array(4));
  const float coefficient = 0.999999F;
  const double nonfinite = 0.0;
  at::Tensor p = at::from_blob(array(0), {n}), m = at::from_blob(array(1), {n});
  at::Tensor v = at::from_blob(array(2), {n}), g = at::from_blob(array(3), {n});
  at::Tensor w = at::from_blob(array(4), {n}, at::TensorOptions().dtype(ScalarType::BFloat16));
  float step = 100.0F;
  at::Tensor steps = at::from_blob(&step, {});
  compare(
      state, 30.0 * n,
      [&] { adam_step(segment, kAdam, &coefficient, &nonfinite, ScalarType::BFloat16, Stream{}); },
      [&] {
        g.mul_(coefficient);
        at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {steps}, kAdam.lr, kAdam.beta1, kAdam.beta2,
                          kAdam.weight_decay, kAdam.eps, /*amsgrad=*/false, /*maximize=*/false);
        w.copy_(p);
      });
}

void adamw_fp32_vs_torch_fused(benchmark::State& state) {
  const int64_t n = state.range(0);
  const AdamSegment segment = adam_segment(n, nullptr);
  at::Tensor p = at::from_blob(array(0), {n}), m = at::from_blob(array(1), {n});
  at::Tensor v = at::from_blob(array(2), {n}), g = at::from_blob(array(3), {n});
  float step = 100.0F;
  at::Tensor steps = at::from_blob(&step, {});
  compare(
      state, 28.0 * n,
      [&] { adam_step(segment, kAdam, nullptr, nullptr, ScalarType::Float, Stream{}); },
      [&] {
        at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {steps}, kAdam.lr, kAdam.beta1, kAdam.beta2,
                          kAdam.weight_decay, kAdam.eps, /*amsgrad=*/false, /*maximize=*/false);
      });
}

// Memory of its own for a state array, with the values of array `index`.
void* stored_array(StateType type, bool root, int64_t index, int64_t n) {
  static std::vector<std::vector<float>> arrays(kArrays);
  std::vector<float>& memory = arrays[static_cast<size_t>(index)];
  memory.assign(static_cast<size_t>(state_bytes(type, n) / 4 + 1), 0.0F);
  encode_state(type, root, array(index), n, memory.data());
  return memory.data();
}

// The update with stored state against the same one with fp32 state.
template <StateType kType>
void adamw_to_bf16_vs_fp32_state(benchmark::State& state) {
  const int64_t n = state.range(0);
  const AdamSegment plain = adam_segment(n, array(4));
  AdamSegment stored = plain;
  stored.state_type = kType;
  stored.exp_avg = stored_array(kType, false, 1, n);
  stored.exp_avg_sq = stored_array(kType, true, 2, n);
  const float coefficient = 0.999F;
  const auto run = [&](const AdamSegment& segment) {
    adam_step(segment, kAdam, &coefficient, nullptr, ScalarType::BFloat16, Stream{});
  };
  compare(
      state, (kType == StateType::kInt8 ? 18.0 : 22.0) * n, [&] { run(stored); },
      [&] { run(plain); });
}

// The update with a split master against the same one with fp32 masters and moments.
template <StateType kType>
void adamw_of_split_masters_vs_fp32(benchmark::State& state) {
  const int64_t n = state.range(0);
  const AdamSegment plain = adam_segment(n, array(4));
  AdamSegment split = plain;
  if (kType != StateType::kFloat) {
    split.state_type = kType;
    split.exp_avg = stored_array(kType, false, 1, n);
    split.exp_avg_sq = stored_array(kType, true, 2, n);
  }
  split.master = nullptr;
  split.working = array(5);
  split.remainder = reinterpret_cast<int16_t*>(array(5)) + kLargest;
  split_halves(array(0), n, split.working, split.remainder, Stream{});
  const float coefficient = 0.999F;
  const auto run = [&](const AdamSegment& segment) {
    adam_step(segment, kAdam, &coefficient, nullptr, ScalarType::BFloat16, Stream{});
  };
  compare(
      state,
      (kType == StateType::kInt8    ? 16.0
       : kType == StateType::kFloat ? 28.0
                                    : 20.0) *
          n,
      [&] { run(split); }, [&] { run(plain); });
}

template <class Segment, class Update>
void int8_state_vs_fp32_state(benchmark::State& state, void* Segment::*average,
                              const Update& update) {
  const int64_t n = state.range(0);
  Segment plain;
  plain.master = array(0);
  plain.*average = array(1);
  plain.gradient = array(3);
  plain.working = array(4);
  plain.numel = n;
  Segment stored = plain;
  stored.state_type = StateType::kInt8;
  stored.*average = stored_array(StateType::kInt8, false, 1, n);
  compare(
      state, 16.0 * n, [&] { update(stored); }, [&] { update(plain); });
}

void sgd_int8_state_vs_fp32_state(benchmark::State& state) {
  int8_state_vs_fp32_state(state, &SgdSegment::momentum, [](const SgdSegment& segment) {
    sgd_step(segment, {.lr = 1e-6, .momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16,
             Stream{});
  });
}

void lion_int8_state_vs_fp32_state(benchmark::State& state) {
  int8_state_vs_fp32_state(state, &LionSegment::exp_avg, [](const LionSegment& segment) {
    lion_step(segment, {.lr = 1e-6}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
  });
}

void sgd_momentum_vs_move(benchmark::State& state) {
  const int64_t n = state.range(0);
  SgdSegment segment;
  segment.master = array(0);
  segment.momentum = array(1);
  segment.gradient = array(3);
  segment.numel = n;
  const SgdOptions options{.lr = 1e-6, .momentum = 0.9};
  compare(
      state, 20.0 * n,
      [&] { sgd_step(segment, options, nullptr, nullptr, ScalarType::Float, Stream{}); },
      [&] {
        on_threads(n, [&](int64_t begin, int64_t end) {
          move_sgd(array(0) + begin, array(1) + begin, array(3) + begin, end - begin);
        });
      });
}

void sizes_and_threads(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"numel", "threads"})
      ->ArgsProduct({{8388608, kLargest}, {1, 2}})
      ->Iterations(31)
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK(sum_of_squares_vs_read)->Apply(sizes_and_threads);
BENCHMARK(exact_sum_vs_sum_of_squares)->Apply(sizes_and_threads);
BENCHMARK(max_abs_bits_vs_read)->Apply(sizes_and_threads);
BENCHMARK(cast_float_to_float_vs_copy)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(cast_float_to_16_bits_vs_move, ScalarType::BFloat16)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(cast_float_to_16_bits_vs_move, ScalarType::Half)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(cast_16_bits_to_float_vs_move, ScalarType::BFloat16)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(cast_16_bits_to_float_vs_move, ScalarType::Half)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(sum_two_rows_vs_move, ScalarType::Float, float)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(sum_two_rows_vs_move, ScalarType::BFloat16, uint16_t)->Apply(sizes_and_threads);
BENCHMARK(sum_tree_vs_sum_rows)->Apply(sizes_and_threads);
BENCHMARK(adamw_to_bf16_vs_move)->Apply(sizes_and_threads);
BENCHMARK(adamw_to_bf16_vs_separate_passes)->Apply(sizes_and_threads);
BENCHMARK(adamw_fp32_vs_torch_fused)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(adamw_to_bf16_vs_fp32_state, StateType::kBFloat16)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(adamw_to_bf16_vs_fp32_state, StateType::kInt8)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(adamw_of_split_masters_vs_fp32, StateType::kFloat)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(adamw_of_split_masters_vs_fp32, StateType::kBFloat16)->Apply(sizes_and_threads);
BENCHMARK_TEMPLATE(adamw_of_split_masters_vs_fp32, StateType::kInt8)->Apply(sizes_and_threads);
BENCHMARK(sgd_int8_state_vs_fp32_state)->Apply(sizes_and_threads);
BENCHMARK(lion_int8_state_vs_fp32_state)->Apply(sizes_and_threads);
BENCHMARK(sgd_momentum_vs_move)->Apply(sizes_and_threads);

}  // namespace
}  // namespace zero::kernels

BENCHMARK_MAIN();
