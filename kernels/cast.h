// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Flat copies between fp32, bf16 and fp16: how gradients enter a bucket and
// parameters leave it.
//
// Supported types are c10::ScalarType::Float, BFloat16 and Half, in every
// combination; anything else throws c10::Error. Narrowing rounds to nearest,
// ties to even; what is too large becomes infinity, subnormal numbers are kept,
// NaN stays NaN (its payload is not specified on CUDA). Pointers need only the
// alignment of their element type.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// destination[i] = cast(source[i]), or with an addend
// destination[i] = cast(float(addend[i]) + float(source[i])): one rounding.
//   source       [numel] of source_dtype
//   destination  [numel] of destination_dtype; not overlapping `source`, except
//                that both may be the same address when the dtypes are equal
//   addend       null, or [numel] of destination_dtype, not overlapping `destination`
//                except that it may be the same address
// numel may be 0, and then the pointers are not looked at.
void cast_copy(const void* source, c10::ScalarType source_dtype, void* destination,
               c10::ScalarType destination_dtype, int64_t numel, const void* addend, Stream stream);

// cast_copy() of every span, as one parallel region on the CPU and one launch for each hundred-odd
// spans on CUDA. No destination may overlap another span's memory. Addends are looked at only
// `with_addends`, and then every span that is not empty needs one.
void cast_copy_spans(c10::ArrayRef<CopySpan> spans, c10::ScalarType source_dtype,
                     c10::ScalarType destination_dtype, bool with_addends, Stream stream);

// values[i] = float(bfloat16(values[i])), as by two cast_copy(), for memory of the host.
void round_to_bfloat16(float* values, int64_t numel);

// Sets `bytes` bytes to zero.
void fill_zero(void* destination, int64_t bytes, Stream stream);

}  // namespace zero::kernels
