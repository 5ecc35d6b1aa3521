// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/state_store.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/round.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

namespace zero {
namespace {

// The largest int8 that has a negative.
constexpr double kSteps = 127.0;

at::TensorOptions stored_options(const at::Tensor& segment, const StateFormat& format) {
  return segment.options()
      .dtype(format.block == 1 ? format.element : at::kByte)
      .requires_grad(false);
}

}  // namespace

void StateFormat::check_block_element(c10::ScalarType type) const {
  TORCH_CHECK(block > 1 && element == at::kChar && type == element,
              "state: expected blocks of Char, got blocks of ", block, " of ", element, " read as ",
              type);
}

int64_t StateFormat::scale_bytes(int64_t numel) const {
  return block == 1 ? 0 : blocks(numel) * static_cast<int64_t>(sizeof(float));
}

int64_t StateFormat::bytes(int64_t numel) const {
  return scale_bytes(numel) + numel * static_cast<int64_t>(c10::elementSize(element));
}

at::Tensor StateFormat::zeros(const at::Tensor& segment) const {
  const auto options = stored_options(segment, *this);
  if (block == 1) return at::zeros_like(segment, options, at::MemoryFormat::Preserve);
  return at::zeros({bytes(segment.numel())}, options);
}

at::Tensor StateFormat::empty(const at::Tensor& segment) const {
  const auto options = stored_options(segment, *this);
  if (block == 1) return at::empty_like(segment, options, at::MemoryFormat::Preserve);
  return at::empty({bytes(segment.numel())}, options);
}

float* StateFormat::scales(const at::Tensor& stored) const {
  if (block == 1) return nullptr;
  return reinterpret_cast<float*>(stored.mutable_data_ptr<uint8_t>());
}

c10::ScalarType StateFormat::exchange_type() const { return block == 1 ? element : at::kFloat; }

bool StateFormat::accepts(c10::ScalarType type) const {
  return type == exchange_type() || type == at::kFloat;
}

at::Tensor StateFormat::to_elements(const at::Tensor& stored, int64_t numel) const {
  if (block == 1) return stored;
  check_block_element(element);
  TORCH_CHECK(stored.numel() == bytes(numel), "state: expected ", bytes(numel), " bytes for ",
              numel, " elements, got ", stored.numel());
  const int64_t split = scale_bytes(numel);
  const at::Tensor largest = stored.narrow(0, 0, split)
                                 .view(at::kFloat)
                                 .unsqueeze(1)
                                 .expand({blocks(numel), block})
                                 .reshape({-1})
                                 .narrow(0, 0, numel);
  const at::Tensor q = stored.narrow(0, split, numel).view(element).to(at::kFloat);
  // The largest value of a block is exact, so that encoding again finds the same one.
  return at::where(q.abs() == kSteps, q.sign() * largest, q * (largest / kSteps));
}

at::Tensor StateFormat::from_elements(const at::Tensor& elements) const {
  TORCH_CHECK(accepts(elements.scalar_type()), "state: expected elements of ", exchange_type(),
              ", got ", elements.scalar_type());
  if (block == 1) return elements.to(element);
  check_block_element(element);
  const int64_t numel = elements.numel();
  at::Tensor rows = at::zeros({blocks(numel) * block}, elements.options());
  rows.narrow(0, 0, numel).copy_(elements);
  rows = rows.view({blocks(numel), block});
  const at::Tensor largest = rows.abs().amax({1}, /*keepdim=*/true);
  const at::Tensor step = largest / kSteps;
  // A block of zeros has no step.
  const at::Tensor q = at::where(step > 0, (rows / step).round(), 0.0).reshape({-1});
  const at::Tensor stored = empty(elements);
  const int64_t split = scale_bytes(numel);
  stored.narrow(0, 0, split).view(at::kFloat).copy_(largest.reshape({-1}));
  stored.narrow(0, split, numel).view(element).copy_(q.narrow(0, 0, numel));
  return stored;
}

}  // namespace zero
