// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/combined_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <string>
#include <unordered_set>
#include <utility>

#include "zero/inner_optimizers/own_class.h"

namespace zero {
namespace {

std::unique_ptr<torch::optim::OptimizerOptions> defaults_of(
    const std::vector<std::unique_ptr<torch::optim::Optimizer>>& parts) {
  TORCH_CHECK(!parts.empty(), "CombinedOptimizer: expected at least one optimizer, got none");
  for (size_t i = 0; i < parts.size(); ++i) {
    TORCH_CHECK(parts[i] != nullptr, "CombinedOptimizer: expected an optimizer as part ", i,
                ", got a null pointer");
    TORCH_CHECK(dynamic_cast<const CombinedOptimizer*>(parts[i].get()) == nullptr,
                "CombinedOptimizer: expected optimizers that are not combined, got one as part ", i,
                "; give its parts instead");
  }
  return parts.front()->defaults().clone();
}

}  // namespace

// The groups and the state of one part, in that part until the end.
class CombinedOptimizer::Lent {
 public:
  Lent(torch::optim::Optimizer& from, const Part& part)
      : from_(from), to_(*part.optimizer), first_(part.first_group) {
    auto& groups = to_.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      auto& group = from_.param_groups()[first_ + g];
      groups[g].params() = group.params();
      groups[g].set_options(group.options().clone());
      for (const at::Tensor& p : group.params()) move_state(p, from_, to_);
    }
  }
  ~Lent() {
    for (auto& group : to_.param_groups()) {
      for (const at::Tensor& p : group.params()) move_state(p, to_, from_);
      group.params().clear();
    }
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  // What load() changed, but for the state.
  void take_options() {
    auto& groups = to_.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      from_.param_groups()[first_ + g].set_options(groups[g].options().clone());
    }
  }

 private:
  static void move_state(const at::Tensor& p, torch::optim::Optimizer& from,
                         torch::optim::Optimizer& to) {
    const auto found = from.state().find(p.unsafeGetTensorImpl());
    if (found == from.state().end()) return;
    to.state()[p.unsafeGetTensorImpl()] = std::move(found->second);
    from.state().erase(found);
  }

  torch::optim::Optimizer& from_;
  torch::optim::Optimizer& to_;
  const size_t first_;
};

CombinedOptimizer::CombinedOptimizer(std::vector<std::unique_ptr<torch::optim::Optimizer>> parts)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), defaults_of(parts)) {
  std::unordered_set<const void*> known;
  for (auto& optimizer : parts) {
    std::unordered_set<const void*> own;
    const size_t first = param_groups_.size();
    for (auto& group : optimizer->param_groups()) {
      for (const at::Tensor& p : group.params()) own.insert(p.unsafeGetTensorImpl());
      // Not add_param_group(), which in libtorch 2.13 gives all groups the class of the defaults.
      param_groups_.emplace_back(group.params(), group.options().clone());
      group.params().clear();
    }
    for (const void* p : own) {
      TORCH_CHECK(known.insert(p).second,
                  "CombinedOptimizer: expected each parameter in one part, "
                  "got one in part ",
                  parts_.size(), " and in an earlier one");
    }
    for (auto& item : optimizer->state()) state_[item.first] = std::move(item.second);
    optimizer->state().clear();
    parts_.push_back({std::move(optimizer), first});
  }
  groups_ = param_groups_.size();
}

CombinedOptimizer::~CombinedOptimizer() = default;

const torch::optim::Optimizer& CombinedOptimizer::part_of(int64_t group) const {
  check_groups();
  size_t part = parts_.size() - 1;
  while (static_cast<int64_t>(parts_[part].first_group) > group) --part;
  return *parts_[part].optimizer;
}

void CombinedOptimizer::check_groups() const {
  TORCH_CHECK(param_groups_.size() == groups_, "CombinedOptimizer: expected the ", groups_,
              " parameter groups of its parts, got ", param_groups_.size(),
              ": no part steps a group that was added; make the parts with all their groups");
}

at::Tensor CombinedOptimizer::step(LossClosure closure) {
  check_groups();
  at::NoGradGuard no_grad;
  const at::Tensor loss = loss_of(closure);
  for (const Part& part : parts_) {
    const Lent lent(*this, part);
    part.optimizer->step();
  }
  return loss;
}

void CombinedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  check_groups();
  for (size_t i = 0; i < parts_.size(); ++i) {
    // It has the same groups and state again when this returns.
    const Lent lent(const_cast<CombinedOptimizer&>(*this), parts_[i]);
    torch::serialize::OutputArchive own(archive.compilation_unit());
    parts_[i].optimizer->save(own);
    archive.write("part" + std::to_string(i), own);
  }
}

void CombinedOptimizer::load(torch::serialize::InputArchive& archive) {
  check_groups();
  for (size_t i = 0; i < parts_.size(); ++i) {
    Lent lent(*this, parts_[i]);
    torch::serialize::InputArchive own;
    archive.read("part" + std::to_string(i), own);
    parts_[i].optimizer->load(own);
    lent.take_options();
  }
}

}  // namespace zero
