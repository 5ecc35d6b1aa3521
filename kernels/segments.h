// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The flat pieces of memory that kernels are called with, many at a time. Plain
// structs without torch types, so that device code can include them too.
//
// The Stream of a call decides whether its pointers are host or device memory. Pointers need only
// the alignment of their element type, a state array of kInt8 that of a float, and numel may be 0,
// in which case none of them is looked at.
#pragma once

#include <cstdint>

namespace zero::kernels {

// Values that share a scale in block_int8.h.
inline constexpr int64_t kInt8Block = 256;

// Elements of a state array that share a scale in StateType::kInt8, and a key of the noise.
inline constexpr int64_t kStateBlock = 256;

// Elements whose squares add_squares_exactly() adds up in double, counted from the first one of a
// span.
inline constexpr int64_t kExactBlock = 256;

// Limbs of 32 bits in a sum of exact_sum.h, and how many numbers it has in all: the limbs, then how
// many values are infinite, then how many are NaN.
inline constexpr int64_t kExactLimbs = 19;
inline constexpr int64_t kExactNumel = kExactLimbs + 2;

// How the state arrays of a segment are stored; stored_state.h has the formulas. An update computes
// in fp32 whatever the type is, and rounds the new state by the noise of detail/state_noise.h.
enum class StateType : int {
  kFloat = 0,     // n fp32
  kBFloat16 = 1,  // n bf16
  kInt8 = 2,      // ceil(n / kStateBlock) fp32 scales, then n codes of one byte
};

// Doubles of workspace that the sums of norm.h need on a device.
inline constexpr int64_t kNormWorkspace = 8192;

// One copy of cast_copy_spans(); the call gives the dtypes, and says whether there are addends.
struct CopySpan {
  const void* source = nullptr;
  void* destination = nullptr;
  int64_t numel = 0;
  const void* addend = nullptr;
};

// fp32 values [numel] that are only read.
struct ConstSpan {
  const float* data = nullptr;
  int64_t numel = 0;
};

// A run of elements that share options and step count, for adam_step(). All arrays are [numel], and
// those of void* are stored as state_type says; p, m, v and max_v name them in the formula of
// adam.h. No two arrays overlap, except that `working` may be `master`.
//
// With a `remainder` the master is split: p is the fp32 number whose upper half is in `working`, in
// bf16, and whose lower half is here; split_master.h has the formula. The update of p is that of an
// fp32 master, in every bit but the payload of a NaN, and both halves are updated. `master` is then
// null; a call throws c10::Error where it is not, and for a remainder without a `working` array of
// BFloat16.
struct AdamSegment {
  float* master = nullptr;          // p, updated
  void* exp_avg = nullptr;          // m, updated
  void* exp_avg_sq = nullptr;       // v, updated
  float* max_exp_avg_sq = nullptr;  // max_v, updated; used with amsgrad alone; always fp32
  const float* gradient = nullptr;  // unchanged
  // In the call's working_dtype: receives the new master value, rounded to nearest
  // even, or its upper half where the master is split. Null, or equal to `master`: nothing is
  // written.
  void* working = nullptr;
  int64_t numel = 0;
  // k: how many updates this segment has had, this one included, so >= 1.
  int64_t step = 1;
  // [1]; where not null, k is read from here instead: memory of the stream's kind.
  const float* device_step = nullptr;
  StateType state_type = StateType::kFloat;  // of exp_avg and exp_avg_sq
  // For the noise, with another type than kFloat: the number of the parameter, and the first
  // element of the segment in it, a multiple of kStateBlock.
  int64_t parameter = 0;
  int64_t element = 0;
  // [numel], where the master is split, and else null: lower halves, updated.
  int16_t* remainder = nullptr;
};

// A run of elements that share options, for sgd_step(). All arrays are [numel], and `momentum` is
// stored as state_type says; p and b name them in the formula of sgd.h. No two arrays overlap,
// except that `working` may be `master`.
struct SgdSegment {
  float* master = nullptr;          // p, updated
  void* momentum = nullptr;         // b, updated; may be null when momentum is 0
  const float* gradient = nullptr;  // unchanged
  void* working = nullptr;          // as in AdamSegment
  int64_t numel = 0;
  // True: `momentum` holds nothing yet; it is assigned and not read.
  bool first_step = false;
  // [1]: how many updates this segment has had, this one included; where not null, the first step
  // is the one where it is 1.
  const float* device_step = nullptr;
  StateType state_type = StateType::kFloat;  // of momentum
  int64_t parameter = 0;                     // as in AdamSegment
  int64_t element = 0;                       // as in AdamSegment
  int16_t* remainder = nullptr;              // as in AdamSegment
};

// A run of elements that share options, for lion_step(). All arrays are [numel], and exp_avg is
// stored as state_type says; p and m name them in the formula of lion.h. No two arrays overlap,
// except that `working` may be `master`.
struct LionSegment {
  float* master = nullptr;          // p, updated
  void* exp_avg = nullptr;          // m, updated
  const float* gradient = nullptr;  // unchanged
  void* working = nullptr;          // as in AdamSegment
  int64_t numel = 0;
  StateType state_type = StateType::kFloat;  // of exp_avg
  int64_t parameter = 0;                     // as in AdamSegment
  int64_t element = 0;                       // as in AdamSegment
  int16_t* remainder = nullptr;              // as in AdamSegment
};

// A run of elements for ema_step(). The arrays are [numel] and do not overlap.
struct EmaSegment {
  float* average = nullptr;       // updated
  const float* values = nullptr;  // unchanged
  int64_t numel = 0;
};

}  // namespace zero::kernels
