// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/unsharded_state.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/state.h"

namespace zero {
namespace {

// In the memory order of `p`, fp32 and flat.
at::Tensor in_memory_order(const at::Tensor& tensor, const Parameter& p) {
  const at::Tensor result =
      at::empty_strided(p.sizes, p.strides, p.tensor.options().dtype(at::kFloat));
  result.copy_(tensor);
  return result.as_strided({tensor.numel()}, {1});
}

// Cuts the state of one parameter after the other. A parameter has a segment in each of its
// buckets, one after the other, and its whole state is brought into memory order once for all.
class StateCutter {
 public:
  StateCutter(const torch::optim::Optimizer& plain, torch::optim::Optimizer& inner)
      : plain_(plain), inner_(inner) {}

  std::unique_ptr<torch::optim::OptimizerParamState> cut(const Parameter& p,
                                                         const SegmentTensors& s) {
    auto state = read_inner_state(plain_, s.group, p.tensor);
    if (!state) return nullptr;
    if (std::exchange(last_, &p) != &p) in_order_.clear();
    for (auto& [name, tensor] : state->tensors) {
      TORCH_CHECK(tensor.sizes() == p.tensor.sizes(), "parameter ", p.name, ": expected ", name,
                  " of shape ", p.tensor.sizes(), ", got ", tensor.sizes());
      at::Tensor& whole = in_order_[name];
      if (!whole.defined()) whole = in_memory_order(tensor, p);
      tensor = in_shape_of(whole.narrow(0, s.segment.begin, s.segment.numel).clone(), s.master);
    }
    for (auto& [name, tensor] : state->uncut) {
      tensor = tensor.to(p.tensor.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    }
    return make_inner_state(inner_, s.group, s.master, *state);
  }

 private:
  const torch::optim::Optimizer& plain_;
  torch::optim::Optimizer& inner_;
  const Parameter* last_ = nullptr;
  std::map<std::string, at::Tensor> in_order_;  // of last_, by name
};

// Throws unless all of its state is of tensors that `table` knows.
void check_known(const torch::optim::Optimizer& plain, const ParameterTable& table) {
  std::unordered_set<const void*> known;
  for (const Parameter& p : table.parameters()) known.insert(p.tensor.unsafeGetTensorImpl());
  // Adagrad's constructor makes state for these too.
  for (const NamedTensor& f : table.frozen()) known.insert(f.tensor.unsafeGetTensorImpl());
  for (const auto& item : plain.state()) {
    TORCH_CHECK(known.count(item.first) != 0,
                "load_plain_state: expected state of this optimizer's parameters, got "
                "some of another tensor; make the plain optimizer over the same module");
  }
}

}  // namespace

void load_plain_state(Engine& engine, const torch::optim::Optimizer& plain) {
  ShardOptimizer& shards = engine.shards;
  torch::optim::Optimizer& inner = shards.inner();
  std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states;
  const auto check = [&] {
    engine.check_no_gradients();
    engine.table.verify();
    TORCH_CHECK(is_known(inner), "load_plain_state: expected torch's ", known_classes(), ", got ",
                optimizer_name(inner), "; for other classes use load_checkpoint()");
    TORCH_CHECK(optimizer_name(plain) == optimizer_name(inner),
                "load_plain_state: expected state of ", optimizer_name(inner), ", got ",
                optimizer_name(plain));
    check_known(plain, engine.table);
    StateCutter cutter(plain, inner);
    for (const SegmentTensors& s : shards.segments()) {
      states.push_back(cutter.cut(engine.table.parameters()[s.segment.parameter], s));
    }
  };
  engine.agree(Call::kLoadCheckpoint, check, {"load_plain_state", {}});
  engine.run_or_close([&] {
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
}

}  // namespace zero
