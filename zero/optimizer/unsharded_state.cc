// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state of an unsharded torch optimizer over the same parameters, cut into
// this rank's segments.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>
#include <vector>

#include "zero/inner/classes.h"
#include "zero/inner/state.h"
#include "zero/optimizer/impl.h"

namespace zero {
namespace {

// In the memory order of `p`, fp32 and flat.
at::Tensor in_memory_order(const at::Tensor& tensor, const Parameter& p) {
  const at::Tensor result =
      at::empty_strided(p.sizes, p.strides, p.tensor.options().dtype(at::kFloat));
  result.copy_(tensor);
  return result.as_strided({tensor.numel()}, {1});
}

std::unique_ptr<torch::optim::OptimizerParamState> cut(const torch::optim::Optimizer& plain,
                                                       const Parameter& p, const SegmentTensors& s,
                                                       torch::optim::Optimizer& inner) {
  auto state = read_inner_state(plain, s.group, p.tensor);
  if (!state) return nullptr;
  for (auto& [name, tensor] : state->tensors) {
    TORCH_CHECK(tensor.sizes() == p.tensor.sizes(), "parameter ", p.name, ": expected ", name,
                " of shape ", p.tensor.sizes(), ", got ", tensor.sizes());
    const at::Tensor elements =
        in_memory_order(tensor, p).narrow(0, s.segment.begin, s.segment.numel).clone();
    tensor = in_shape_of(elements, s.master);
  }
  for (auto& [name, tensor] : state->uncut) {
    tensor = tensor.to(p.tensor.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  return make_inner_state(inner, s.group, s.master, *state);
}

}  // namespace

void ZeroOptimizer::load_plain_state(const torch::optim::Optimizer& plain) {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] {
    ShardOptimizer& shards = impl_->shards;
    torch::optim::Optimizer& inner = shards.inner();
    std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states;
    const auto check = [&] {
      impl_->check_no_gradients();
      impl_->verify_untouched();
      TORCH_CHECK(is_known(inner), "load_plain_state: expected torch's ", known_classes(), ", got ",
                  optimizer_name(inner), "; for other classes use load_checkpoint()");
      TORCH_CHECK(optimizer_name(plain) == optimizer_name(inner),
                  "load_plain_state: expected state of ", optimizer_name(inner), ", got ",
                  optimizer_name(plain));
      for (const auto& item : plain.state()) {
        bool known = false;
        for (const Parameter& p : impl_->table.parameters()) {
          known = known || p.tensor.unsafeGetTensorImpl() == item.first;
        }
        // Adagrad's constructor makes state for these too.
        for (const NamedTensor& f : impl_->table.frozen()) {
          known = known || f.tensor.unsafeGetTensorImpl() == item.first;
        }
        TORCH_CHECK(known,
                    "load_plain_state: expected state of this optimizer's parameters, got "
                    "some of another tensor; make the plain optimizer over the same module");
      }
      for (const SegmentTensors& s : shards.segments()) {
        states.push_back(cut(plain, impl_->table.parameters()[s.segment.parameter], s, inner));
      }
    };
    impl_->agree(Call::kLoadCheckpoint, check, {"load_plain_state", {}});
    impl_->run_or_close([&] {
      for (size_t i = 0; i < states.size(); ++i) {
        auto& all = inner.state();
        void* key = shards.segments()[i].master.unsafeGetTensorImpl();
        if (states[i]) {
          all[key] = std::move(states[i]);
        } else {
          all.erase(key);
        }
      }
      shards.take_state();
    });
  });
}

}  // namespace zero
