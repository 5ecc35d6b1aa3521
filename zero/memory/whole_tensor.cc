// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/whole_tensor.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace zero {
namespace {

// `tensor` with one of each group of elements that share memory in the expanded `like`.
at::Tensor without_repeats(at::Tensor tensor, const at::Tensor& like) {
  for (int64_t d = 0; d < like.dim(); ++d) {
    if (like.stride(d) == 0 && like.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

}  // namespace

void check_plain(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(tensor.layout() == at::kStrided, name,
              ": expected a dense (strided) tensor, got layout ", tensor.layout(),
              "; register the result of to_dense()");
  TORCH_CHECK(!tensor.is_quantized(), name, ": expected a tensor that is not quantized, got ",
              tensor.scalar_type(), "; register its int_repr(), or that of dequantize()");
  TORCH_CHECK(!tensor.is_meta(), name,
              ": expected a tensor with memory, got one on the meta device; give it values first");
  TORCH_CHECK(!tensor._is_zerotensor(), name,
              ": expected values in memory, got immutable zeros of autograd; register its clone()");
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), name,
              ": expected values in memory, got a lazy ", tensor.is_conj() ? "conj()" : "imag()",
              " of them; register the result of resolve_conj().resolve_neg()");
}

void check_fits(const at::Tensor& to, const at::Tensor& from, const std::string& name) {
  const at::Tensor once = without_repeats(from, to);
  if (once.numel() == from.numel()) return;
  const at::Tensor repeated = once.expand_as(from).contiguous();
  TORCH_CHECK(std::memcmp(repeated.const_data_ptr(), from.const_data_ptr(), from.nbytes()) == 0,
              name,
              ": expected equal values where the tensor is expanded, got different ones; "
              "register its clone()");
}

void overwrite(const at::Tensor& to, const at::Tensor& from) {
  // Tensors made under InferenceMode can be written to only there.
  const c10::InferenceMode mode(to.is_inference());
  const at::NoGradGuard no_grad;
  without_repeats(to.detach(), to).copy_(without_repeats(from, to));
}

}  // namespace zero
