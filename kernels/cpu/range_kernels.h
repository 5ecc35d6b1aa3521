// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the single-threaded CPU loops, one table of them per instruction set.
//
// A range is a contiguous piece that one thread works on. The loops are written
// once, in range_kernels_impl.h, and compiled by range_kernels_default.cc,
// range_kernels_avx2.cc and range_kernels_avx512.cc with the flags of their
// names and with -ffp-contract=off, so that all three give the same bits.
//
// This header and all that those files include hold no inline functions with
// external linkage: the linker could keep the AVX-512 copy of such a function
// for everybody, which then would crash on older processors.
#pragma once

#include <cstdint>

#include "kernels/detail/state_noise.h"
#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels {

enum class ElementType : int { kFloat = 0, kBFloat16 = 1, kHalf = 2 };

// sum_rows() for elements [0, numel) of the given pointers; rows are row_stride
// elements apart, or begin at element `begin` of rows[r] where that is given.
struct SumRowsRange {
  const void* const* rows;
  int64_t begin;
  const void* received;
  const void* own;
  float* shard;
  int64_t row_stride;
  int64_t numel;
  int64_t world_size;
  int64_t own_rank;
  ElementType type;
  float factor;
  bool accumulate;
};

// sum_block_int8() for elements [begin, end), whole blocks but for the last one. A row is row_bytes
// long, and its values begin at byte values_begin.
struct SumBlockInt8Range {
  const void* const* rows;
  const void* received;
  const void* own;
  float* shard;
  int64_t row_bytes;
  int64_t values_begin;
  int64_t begin;
  int64_t end;
  int64_t world_size;
  int64_t own_rank;
  float factor;
  bool accumulate;
};

struct RangeKernels {
  const char* name;
  void (*cast_copy)(const void* source, ElementType source_type, void* destination,
                    ElementType destination_type, int64_t numel, const void* addend);
  void (*round_to_bfloat16)(float* values, int64_t numel);
  void (*sum_rows)(const SumRowsRange& range);
  // A range of whole blocks, but for the last one.
  void (*encode_block_int8)(const void* source, ElementType source_type, int64_t numel,
                            float* scales, int8_t* values);
  void (*sum_block_int8)(const SumBlockInt8Range& range);
  // The sums add up in an order that depends on numel alone.
  double (*sum_of_squares)(const float* values, int64_t numel);
  double (*sum_of_abs)(const float* values, int64_t numel);
  // A range of whole blocks of kExactBlock, but for the last one, is added to [kExactNumel], whose
  // limbs grow by less than 2^32 for each block.
  void (*add_squares_exactly)(const float* values, int64_t numel, int64_t* sum);
  int64_t (*count_nonfinite)(const float* values, int64_t numel);
  int32_t (*max_abs_bits)(const float* values, int64_t numel);
  // Here `working` is null where nothing is to be written, never the master; it is not null where
  // the range has a remainder.
  void (*adam)(const AdamSegment& range, const AdamCoefficients& coefficients,
               float gradient_coefficient, ElementType working_type);
  void (*sgd)(const SgdSegment& range, const SgdCoefficients& coefficients,
              float gradient_coefficient, ElementType working_type);
  void (*lion)(const LionSegment& range, const LionCoefficients& coefficients,
               float gradient_coefficient, ElementType working_type);
  void (*ema)(const EmaSegment& range, float weight);
  // Elements [begin, end) of a whole segment whose state_type is not kFloat, and whose momentum is
  // not 0: whole blocks, but for the last one. `working` as above, and of the whole segment.
  void (*stored_adam)(const AdamSegment& segment, int64_t begin, int64_t end, const NoiseStep& step,
                      const AdamCoefficients& coefficients, float gradient_coefficient,
                      ElementType working_type);
  void (*stored_sgd)(const SgdSegment& segment, int64_t begin, int64_t end, const NoiseStep& step,
                     const SgdCoefficients& coefficients, float gradient_coefficient,
                     ElementType working_type);
  void (*stored_lion)(const LionSegment& segment, int64_t begin, int64_t end, const NoiseStep& step,
                      const LionCoefficients& coefficients, float gradient_coefficient,
                      ElementType working_type);
  // Elements [begin, end) of `values` and of an array of StateType::kInt8 for `numel`: whole
  // blocks, but for the last one.
  void (*decode_codes)(bool root, const void* array, int64_t numel, int64_t begin, int64_t end,
                       float* values);
  void (*encode_codes)(bool root, const float* values, int64_t numel, int64_t begin, int64_t end,
                       void* array);
  void (*join_halves)(const uint16_t* upper, const int16_t* lower, int64_t numel, float* master);
  void (*split_halves)(const float* master, int64_t numel, uint16_t* upper, int16_t* lower);
};

// Null where the file was compiled for another processor.
const RangeKernels* default_range_kernels();
const RangeKernels* avx2_range_kernels();
const RangeKernels* avx512_range_kernels();

}  // namespace zero::kernels
