// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/cast.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {
namespace {

void check_spans(c10::ArrayRef<CopySpan> spans, bool with_addends) {
  for (const CopySpan& span : spans) {
    check_arrays("cast_copy", span.numel, span.source, span.destination);
    TORCH_CHECK(span.numel == 0 || !with_addends || span.addend != nullptr,
                "zero::kernels::cast_copy_spans: no addend for ", span.numel, " elements");
  }
}

}  // namespace

void cast_copy_spans(c10::ArrayRef<CopySpan> spans, c10::ScalarType source_dtype,
                     c10::ScalarType destination_dtype, bool with_addends, Stream stream) {
  const ElementType from = element_type(source_dtype, "cast_copy", "source_dtype");
  const ElementType to = element_type(destination_dtype, "cast_copy", "destination_dtype");
  check_spans(spans, with_addends);
  if (stream.cuda) {
    check_launch("cast_copy",
                 cuda::cast_copy_spans(spans.data(), static_cast<int64_t>(spans.size()), from, to,
                                       with_addends, stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(static_cast<int64_t>(spans.size()), [&](int64_t i) { return spans[i].numel; });
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t) {
    const CopySpan& span = spans[i];
    const auto* addend = static_cast<const char*>(span.addend);
    kernels.cast_copy(static_cast<const char*>(span.source) + begin * element_size(from), from,
                      static_cast<char*>(span.destination) + begin * element_size(to), to,
                      end - begin, with_addends ? addend + begin * element_size(to) : nullptr);
  });
}

void cast_copy(const void* source, c10::ScalarType source_dtype, void* destination,
               c10::ScalarType destination_dtype, int64_t numel, const void* addend,
               Stream stream) {
  cast_copy_spans(CopySpan{source, destination, numel, addend}, source_dtype, destination_dtype,
                  addend != nullptr, stream);
}

void round_to_bfloat16(float* values, int64_t numel) {
  check_arrays("round_to_bfloat16", numel, values);
  const RangeKernels& kernels = range_kernels();
  // A small matrix of Muon is rounded in less time than a map of blocks takes.
  if (numel <= BlockMap::kBlock) {
    kernels.round_to_bfloat16(values, numel);
    return;
  }
  const BlockMap map(1, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    kernels.round_to_bfloat16(values + begin, end - begin);
  });
}

void fill_zero(void* destination, int64_t bytes, Stream stream) {
  TORCH_CHECK(bytes >= 0, "zero::kernels::fill_zero: bytes must be >= 0, got ", bytes);
  if (bytes == 0) return;
  if (stream.cuda) {
    check_launch("fill_zero", cuda::fill_zero(destination, bytes, stream.handle));
    return;
  }
  const BlockMap map(1, [&](int64_t) { return bytes; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    std::memset(static_cast<char*>(destination) + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace zero::kernels
