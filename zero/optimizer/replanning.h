// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The same optimizer over other parameters, or over the same ones with other rows. Internal.
//
//   replanning.cc     other parameters: this rank's shard is copied, everything is made anew as by
//                     the constructor, and the copies are loaded as a protected step would be
//   row_resizing.cc   other rows: masters and state move from the shards of before to those of now
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/recovery.h"
#include "zero/recovery/snapshots.h"
#include "zero/training/engine.h"
#include "zero/zero_optimizer.h"

namespace zero {

class Replanning {
 public:
  using ParamGroups = Engine::ParamGroups;

  // Of the optimizer whose present engine is `engine`. All must outlive this.
  Replanning(std::shared_ptr<Engine>& engine, Recovery& recovery, const Checkpoints& checkpoints)
      : engine_(engine), recovery_(recovery), checkpoints_(checkpoints) {}

  // Each is collective, and does what ZeroOptimizer's member of that name does to `groups`, those
  // that users see. Throws on all ranks with everything as it was.
  void freeze(const std::vector<at::Tensor>& parameters, ParamGroups& groups);
  void unfreeze(const std::vector<at::Tensor>& parameters, std::optional<size_t> param_group,
                ParamGroups& groups);
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group, ParamGroups& groups);
  void resize_rows(const std::vector<ResizedRows>& changes, ParamGroups& groups);

 private:
  struct Change;
  // Collective. Makes the change, in the order of the members below.
  void make(ParamGroups& groups, Change change);
  void agree_on(Change& change, const ParamGroups& groups);
  // Collective. The protected step of now, of which each rank has its own file.
  std::shared_ptr<Snapshots> copy_shard(const ParamGroups& groups, const std::string& call);
  // Collective. With the changed groups; with `groups` if a rank finds those unusable, which sets
  // `refusal`. Nothing but the destructor of the present engine may then be called.
  std::unique_ptr<Engine> make_changed(const Change& change, const ParamGroups& groups,
                                       std::exception_ptr& refusal);

  std::shared_ptr<Engine>& engine_;
  Recovery& recovery_;
  const Checkpoints& checkpoints_;
  std::map<std::string, size_t> left_groups_;  // of parameters that freeze() took out, by name
};

}  // namespace zero
