// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the .cu files in programs built without CUDA. The functions are weak, so that tests
// can link others in their place.
#include <c10/util/Exception.h>

#include "kernels/cuda/cuda_kernels.h"

namespace zero::kernels::cuda {
namespace {

[[noreturn]] void fail(const char* function) {
  TORCH_CHECK(false, "zero::kernels::", function,
              " was called for CUDA memory, but this program was built without CUDA kernels. "
              "Build it with --config=cuda (Bazel) or -DZERO_CUDA=ON (CMake).");
}

}  // namespace

[[gnu::weak]] const char* cast_copy_spans(const CopySpan*, int64_t, ElementType, ElementType, bool,
                                          void*) {
  fail("cast_copy");
}
[[gnu::weak]] const char* fill_zero(void*, int64_t, void*) { fail("fill_zero"); }
[[gnu::weak]] const char* join_halves(const uint16_t*, const int16_t*, int64_t, float*, void*) {
  fail("join_halves");
}
[[gnu::weak]] const char* split_halves(const float*, int64_t, uint16_t*, int16_t*, void*) {
  fail("split_halves");
}
[[gnu::weak]] const char* sum_rows(const SumRowsRange&, void*) { fail("sum_rows"); }
[[gnu::weak]] const char* sum_of_abs_powers(const ConstSpan*, int64_t, double, double*, double*,
                                            int64_t, void*) {
  fail("sum_of_abs_powers");
}
[[gnu::weak]] const char* max_abs_bits(const ConstSpan*, int64_t, int64_t*, void*) {
  fail("max_abs_bits");
}
[[gnu::weak]] const char* add_squares_exactly(const ConstSpan*, int64_t, int64_t*, void*) {
  fail("add_squares_exactly");
}
[[gnu::weak]] const char* value_of_exact_sum(const int64_t*, double*, void*) {
  fail("value_of_exact_sum");
}
[[gnu::weak]] const char* adam_step(const AdamSegment*, int64_t, const AdamCoefficients&,
                                    const AdamPowers&, const DeviceRate&, const float*,
                                    const double*, const NoiseStep&, ElementType, void*) {
  fail("adam_step");
}
[[gnu::weak]] const char* sgd_step(const SgdSegment*, int64_t, const SgdCoefficients&,
                                   const double*, const float*, const double*, const NoiseStep&,
                                   ElementType, void*) {
  fail("sgd_step");
}
[[gnu::weak]] const char* lion_step(const LionSegment*, int64_t, const LionCoefficients&,
                                    const DeviceRate&, const float*, const double*,
                                    const NoiseStep&, ElementType, void*) {
  fail("lion_step");
}
[[gnu::weak]] const char* ema_step(const EmaSegment*, int64_t, float, const float*, void*) {
  fail("ema_step");
}

}  // namespace zero::kernels::cuda
