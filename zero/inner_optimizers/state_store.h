// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The memory of one state tensor of a segment: its allocation, its bytes, the pointers that
// kernels get and the form in which checkpoints cut it for other numbers of ranks. Only this file
// and the kernels depend on the element type of a state.
//
// It is in this room because the state is in the inner optimizer's state(), where torch's classes
// look for it: each state tensor is one at::Tensor, whatever its format.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace zero {

// How the elements of a state tensor are stored. With block 1 the tensor is [numel] of `element`.
//
// With a longer block the elements are int8, and each run of `block` elements, counted from the
// segment's first, has the largest absolute value of the run beside it in fp32. An element q
// stands for q / 127 of that value, so the error is at most 1 / 254 of it (1 / 127 where that
// value is subnormal). The tensor is then of bytes: first the largest values, then the elements.
struct StateFormat {
  c10::ScalarType element = c10::ScalarType::Float;
  int64_t block = 1;

  int64_t bytes(int64_t numel) const;

  // State on the device of `segment`: in its shape and memory order with block 1, else 1-D.
  at::Tensor zeros(const at::Tensor& segment) const;
  at::Tensor empty(const at::Tensor& segment) const;

  // The elements, for kernels. T is the C++ type of `element`; throws c10::Error for another.
  template <typename T>
  T* values(const at::Tensor& stored, int64_t numel) const {
    if (block == 1) return stored.mutable_data_ptr<T>();
    check_block_element(c10::CppTypeToScalarType<T>::value);
    return reinterpret_cast<T*>(stored.mutable_data_ptr<uint8_t>() + scale_bytes(numel));
  }
  // The largest absolute value of each block, one fp32 each; null with block 1.
  float* scales(const at::Tensor& stored) const;

  // The form that can be cut between any two elements: [numel] of exchange_type(). With block 1
  // it is `stored` itself, else a copy.
  at::Tensor to_elements(const at::Tensor& stored, int64_t numel) const;
  c10::ScalarType exchange_type() const;
  // The inverse, which may take over `elements`. It restores every bit of a whole tensor; of a part
  // it rounds again the blocks that the cut changes.
  at::Tensor from_elements(const at::Tensor& elements) const;
  // The types that from_elements() takes: exchange_type() and, to be rounded, fp32.
  bool accepts(c10::ScalarType type) const;

 private:
  int64_t blocks(int64_t numel) const { return (numel + block - 1) / block; }
  int64_t scale_bytes(int64_t numel) const;
  void check_block_element(c10::ScalarType type) const;
};

}  // namespace zero
