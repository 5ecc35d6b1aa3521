// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Several optimizers as one torch::optim::Optimizer, for a model whose parameters are not all
// trained by the same: matrices by Muon, everything else by AdamW.
//
//   std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
//   parts.push_back(std::make_unique<zero::Muon>(matrices, zero::MuonOptions(0.02)));
//   parts.push_back(std::make_unique<torch::optim::AdamW>(others, 3e-4));
//   auto inner = std::make_unique<zero::CombinedOptimizer>(std::move(parts));
//
// A ZeroOptimizer takes it as its inner optimizer, and it also works by itself. Its parameter
// groups are those of the parts, one part after the other, and its state is theirs: schedules and
// checkpoints see one optimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace zero {

// Several inner optimizers with groups of their own, which step as one.
class CombinedOptimizer : public torch::optim::Optimizer {
 public:
  // Takes the groups and the state of the parts over. Throws c10::Error without parts, for a null
  // one, for a CombinedOptimizer among them, and for a parameter that two parts have.
  explicit CombinedOptimizer(std::vector<std::unique_ptr<torch::optim::Optimizer>> parts);
  ~CombinedOptimizer() override;

  // The parts are made with all their groups: a group that is added later would belong to none.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group) = delete;

  // Runs step() of each part over its groups, with the options and parameters that
  // param_groups() has now. Parts leave out parameters without a gradient. Throws c10::Error, as
  // save() and load() do, if there are more or fewer groups than those of the parts.
  at::Tensor step(LossClosure closure = nullptr) override;
  // An archive "part0", "part1", ... for each part, as its own save() writes it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }
  // The part that updates parameter group `group`. Its own groups and state are not up to date.
  // Throws c10::Error as step() does.
  const torch::optim::Optimizer& part_of(int64_t group) const;

 private:
  void check_groups() const;

  struct Part {
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    size_t first_group = 0;
  };
  class Lent;

  std::vector<Part> parts_;
  size_t groups_ = 0;  // of all parts
};

}  // namespace zero
