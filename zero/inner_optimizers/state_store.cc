// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/state_store.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include "kernels/stored_state.h"

namespace zero {
namespace {

static_assert(kMomentBlock == kernels::kStateBlock, "blocks of a plan are those of kernels");
static_assert(kMomentBlock == kernels::kInt8Block, "and those of gradients that are sent");
static_assert(kMomentBlock % kernels::kExactBlock == 0, "and those of norms over micro-batches");

at::TensorOptions stored_options(const at::Tensor& segment, Moments moments) {
  const c10::ScalarType type = moments == Moments::kFloat32    ? at::kFloat
                               : moments == Moments::kBFloat16 ? at::kBFloat16
                                                               : at::kByte;
  return segment.options().dtype(type).requires_grad(false);
}

}  // namespace

at::Tensor zero_state(const at::Tensor& segment, Moments moments) {
  return empty_state(segment, moments).zero_();
}

at::Tensor empty_state(const at::Tensor& segment, Moments moments) {
  const auto options = stored_options(segment, moments);
  if (moments != Moments::kInt8) {
    return at::empty_like(segment, options, at::MemoryFormat::Preserve);
  }
  return at::empty({moment_bytes(moments, segment.numel())}, options);
}

kernels::StateType state_type(const at::Tensor& stored) {
  const c10::ScalarType type = stored.scalar_type();
  if (type == at::kFloat) return kernels::StateType::kFloat;
  if (type == at::kBFloat16) return kernels::StateType::kBFloat16;
  TORCH_CHECK(type == at::kByte, "state: expected a tensor of Float, BFloat16 or Byte, got ", type);
  return kernels::StateType::kInt8;
}

at::Tensor state_elements(const at::Tensor& stored, StateRole role, const at::Tensor& segment) {
  if (stored.scalar_type() != at::kByte) return stored.to(at::kFloat);
  const int64_t numel = segment.numel();
  TORCH_CHECK(stored.numel() == moment_bytes(Moments::kInt8, numel), "state: expected ",
              moment_bytes(Moments::kInt8, numel), " bytes for ", numel, " elements, got ",
              stored.numel());
  const at::Tensor bytes = stored.to(at::kCPU);
  at::Tensor elements = at::empty({numel}, at::TensorOptions().dtype(at::kFloat));
  kernels::decode_state(kernels::StateType::kInt8, role == StateRole::kSecondMoment,
                        bytes.const_data_ptr(), numel, elements.mutable_data_ptr<float>());
  return elements.as_strided(segment.sizes(), segment.strides());
}

at::Tensor stored_state(const at::Tensor& elements, StateRole role, Moments moments,
                        const at::Tensor& segment) {
  TORCH_CHECK(elements.scalar_type() == at::kFloat, "state: expected elements of Float, got ",
              elements.scalar_type());
  if (moments != Moments::kInt8) {
    return elements.to(segment.device(), stored_options(segment, moments).dtype().toScalarType());
  }
  // In the order of the memory, which is dense.
  const at::Tensor values = elements.detach().to(at::kCPU);
  at::Tensor bytes =
      at::empty({moment_bytes(moments, segment.numel())}, at::TensorOptions().dtype(at::kByte));
  kernels::encode_state(kernels::StateType::kInt8, role == StateRole::kSecondMoment,
                        values.const_data_ptr<float>(), segment.numel(), bytes.mutable_data_ptr());
  return bytes.to(segment.device());
}

}  // namespace zero
