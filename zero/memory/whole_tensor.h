// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes of tensors that the optimizer sends, saves and loads as a whole: frozen
// parameters and buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace zero {

// Throws c10::Error unless `tensor` has plain memory: strided, neither quantized nor immutable
// zeros nor lazily conjugated or negated. `name` begins with the kind of tensor. An expanded tensor
// is plain.
void check_plain(const at::Tensor& tensor, const std::string& name);

// Throws c10::Error where `to` is expanded and `from`, contiguous and of its shape, has different
// values for one element.
void check_fits(const at::Tensor& to, const at::Tensor& from, const std::string& name);

// Copies `from` into the memory of `to`, of the same shape. Raises the version of `to`, which may
// be expanded or made under c10::InferenceMode.
void overwrite(const at::Tensor& to, const at::Tensor& from);

}  // namespace zero
