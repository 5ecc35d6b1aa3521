// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The states of the objects that SaveOptions and LoadOptions include. Each is a tensor of bytes in
// the file of the rank whose state it is, so that the manifest stays small with any number of
// ranks.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/match/part_reader.h"
#include "zero/checkpoint/writer.h"
#include "zero/checkpoint_options.h"

namespace zero {

// Returns the tensor of bytes that holds the state of `object`.
TensorToSave state_to_save(const std::string& owner, const std::string& kind,
                           const Stateful& object);

// Returns the tensors for the file of rank `rank`. Throws what the objects throw.
std::vector<TensorToSave> states_to_save(const SaveOptions& save, int rank);

// The included names, for comparing ranks.
template <typename Options>
std::string included_text(const Options& options) {
  std::string text;
  for (const auto& state : options.states()) {
    text += (state.per_rank ? ", state per rank " : ", state ") + state.name;
  }
  return text;
}

// Adds to `differences` the states that `load` includes and the checkpoint does not hold, and to
// its notes, before the others, what is no hindrance: states that `load` leaves out, and states per
// rank of another number of ranks than `world_size`.
void compare_states(const CheckpointReader& reader, const LoadOptions& load, int world_size,
                    CheckpointDifferences& differences);

// Adds the tensors that read_states() reads, if they are stored.
void add_states_to(NeededTensors& needed, const LoadOptions& load, int rank);

// Objects with the state that rank `rank` gives them.
using StatesToSet = std::vector<std::pair<Stateful*, std::string>>;
StatesToSet read_states(CheckpointReader& reader, const LoadOptions& load, int rank);

// Sets states; unless keep() is called, the objects get their former states back, and `groups`
// the options that objects such as schedules have set.
class StateChange {
 public:
  explicit StateChange(std::vector<torch::optim::OptimizerParamGroup>& groups) : groups_(groups) {}
  ~StateChange();
  StateChange(const StateChange&) = delete;
  StateChange& operator=(const StateChange&) = delete;

  // Once. Throws what the objects throw.
  void set(const StatesToSet& states);
  void keep() { former_.clear(); }

 private:
  std::vector<torch::optim::OptimizerParamGroup>& groups_;
  std::vector<std::vector<std::pair<std::string, double>>> former_options_;  // by group
  StatesToSet former_;
};

}  // namespace zero
