// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A load in two parts. Staging reads what a rank needs of a checkpoint beside the present state,
// which it does not change: masters into the gradient shard, which is free during a load, and the
// rest into memory of its own. There everything goes wrong that can. Once all ranks have staged,
// commit() only moves memory, into tensors that staging has checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/match/mesh_tensors.h"
#include "zero/checkpoint/match/part_reader.h"
#include "zero/checkpoint_options.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/parameter_table.h"
#include "zero/optimizer/included_states.h"
#include "zero/training/engine.h"
#include "zero/update/shard_optimizer.h"

namespace zero {

// One segment as it will be, in host memory until its state is made.
struct StagedSegment {
  const SegmentTensors* target = nullptr;
  at::Tensor master;
  at::Tensor ema;  // undefined where the average begins as the master
  std::unique_ptr<torch::optim::OptimizerParamState> state;
  bool has_state = false;  // whether `state`, which may be none, replaces the present one
};

struct Staged {
  const Manifest* manifest = nullptr;  // of the reader, which outlives this
  std::vector<StagedSegment> segments;
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;  // to, from
  StatesToSet states;
  bool same_run = false;
  bool restores_options = false;
  std::vector<int64_t> groups_from;  // see CheckpointDifferences
  LoadReport report;
};

class Staging {
 public:
  // `mesh` is what all ranks hold; null where each holds the same. Throws where the checkpoint does
  // not have each element of this rank's segments once.
  Staging(CheckpointReader& reader, const ParameterTable& table, ShardOptimizer& shards,
          const CheckpointDifferences& differences, const MeshTensors* mesh);

  // Adds what the members below read of the whole model.
  void add_to(NeededTensors& needed) const;

  // Drops the present state of what read_segments() reads the state of, for those who do not go on
  // with it if that fails: it halves the memory.
  void drop_state();
  void read_segments(Staged& staged);
  void read_whole(Staged& staged, const std::vector<NamedTensor>& present, const char* kind);

 private:
  using Numbers = std::vector<size_t>;  // of targets_
  std::vector<const HeldRange*> wanted_of(const Numbers& segments) const;
  void read_ema(Staged& staged);
  void read_states(Staged& staged);
  // Into states_.
  void read_tensors(const std::string& kind, const Numbers& segments);
  void read_uncut(const std::string& kind, const Numbers& segments);
  void read_values(const std::string& kind, const Numbers& segments);

  PartReader reader_;
  const ParameterTable& table_;
  ShardOptimizer& shards_;
  const CheckpointDifferences& differences_;
  const MeshTensors* const mesh_;
  std::vector<const SegmentTensors*> targets_;
  std::vector<HeldRange> wanted_;   // per target
  std::vector<InnerState> states_;  // the same, until each has become one of the optimizer
};

// Replaces the inner optimizer's state of a segment; null: by that of one that no step has used.
// `inner`: as ShardOptimizer::inner() has given it once, since each call brings back the device's.
void set_state(torch::optim::Optimizer& inner, const SegmentTensors& segment,
               std::unique_ptr<torch::optim::OptimizerParamState> state);
// Sets the options of `groups` to those that were read.
void restore_options(const Staged& staged, Engine::ParamGroups& groups);
// Makes what was read the present state. Collective. Only lack of memory and failed communication
// throw, and then the optimizer is closed.
void commit(Staged& staged, Engine& engine, Engine::ParamGroups& groups);

}  // namespace zero
