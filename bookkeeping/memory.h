// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Bytes one rank holds, by kind. The formulas are those of Rajbhandari et al.,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
// with padding counted, and gradient shards in the dtype that MemoryOptions names.
#pragma once

#include <cstdint>
#include <functional>

#include "bookkeeping/plan.h"

namespace zero {

// How the inner optimizer's moments are stored: exp_avg and exp_avg_sq of Adam, the momentum of SGD
// and Muon, exp_avg of Lion. See ZeroOptions::moments.
enum class Moments {
  // 4 bytes an element.
  kFloat32,
  // 2 bytes an element.
  kBFloat16,
  // A byte an element and 4 bytes a block.
  kInt8,
};

// Elements that share a scale in kInt8, counted from the first one of a parameter.
inline constexpr int64_t kMomentBlock = 256;

// Returns how moments of a parameter of `numel` elements are stored where `asked` was asked for:
// those of norms and biases, with fewer than 4096 elements, in fp32. It does not depend on the
// number of ranks.
Moments moments_of_parameter(Moments asked, int64_t numel);
// Bytes of one moment of a segment of `numel` elements: 4 or 2 an element, or 1 and 4 for each
// block.
int64_t moment_bytes(Moments moments, int64_t numel);

// For MemoryOptions::state_bytes: two moments, as Adam has.
inline std::function<int64_t(int64_t numel, int64_t of_parameter)> adam_state_bytes(
    Moments moments) {
  return [moments](int64_t numel, int64_t of_parameter) {
    return 2 * moment_bytes(moments_of_parameter(moments, of_parameter), numel);
  };
}

// Bytes that one rank holds, by kind.
struct MemoryReport {
  int64_t working_parameters = 0;  // full, padding included
  // This rank's rows in fp32, or their lower halves with ZeroOptions::split_masters; 0 where the
  // working row is the master.
  int64_t master_parameters = 0;
  int64_t ema = 0;  // this rank's rows of the average in fp32, and masters that use_ema() set aside
  int64_t optimizer_state = 0;  // what the inner optimizer keeps for this rank's segments
  // This rank's rows, in ZeroOptions::gradient_shard_dtype; 0 with ZeroOptions::update_in_backward,
  // where those on their way are in buckets.
  int64_t gradient_shards = 0;
  // Stage 1: averaged gradients in full. Also unsent p.grad(), and the memory of local sums of
  // no_sync() that is held for those of the next step.
  int64_t full_gradients = 0;
  int64_t buckets = 0;       // send and receive buffers held now
  int64_t peak_buckets = 0;  // the most held at once since construction; not in total()
  // Gradients that wait for the rest of their bucket, or for the buckets before it; not in total().
  int64_t unsent_gradients = 0;
  int64_t protected_steps = 0;  // host memory for ZeroOptions::protect(); not in total()

  int64_t total() const {
    return working_parameters + master_parameters + ema + optimizer_state + gradient_shards +
           full_gradients + buckets;
  }
};

// What expected_memory() must know beside the plan.
struct MemoryOptions {
  int64_t stage = 2;  // ZeroOptions::stage()
  // Bytes that the inner optimizer keeps for a segment of `numel` elements, of a parameter of
  // `of_parameter`: adam_state_bytes(), or one moment_bytes() for SGD with momentum. None if not
  // given.
  std::function<int64_t(int64_t numel, int64_t of_parameter)> state_bytes = nullptr;
  bool ema = false;                                               // ZeroOptions::ema
  bool split_masters = false;                                     // ZeroOptions::split_masters
  c10::ScalarType gradient_shard_dtype = c10::ScalarType::Float;  // that of ZeroOptions
  bool update_in_backward = false;                                // ZeroOptions::update_in_backward
};

// Returns what a rank holds between steps by the plan alone; buckets are left at 0.
MemoryReport expected_memory(const Plan& plan, int64_t rank, const MemoryOptions& options);

}  // namespace zero
