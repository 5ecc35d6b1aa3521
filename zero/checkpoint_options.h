// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The options of save_checkpoint() and load_checkpoint(), and what a load
// says it found.
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zero/stateful.h"

namespace zero {

// An object that a save or a load includes.
template <typename Object>
struct IncludedState {
  std::string name;
  Object* object = nullptr;
  bool per_rank = false;
};

// What ZeroOptimizer::save_checkpoint() writes beside the optimizer, and to which kind of folder.
struct SaveOptions {
  // Replace a checkpoint that is there, atomically. False refuses.
  TORCH_ARG(bool, overwrite) = false;

  // False: ranks need not see one folder, as when each machine writes to a disk of its own, and
  // each rank may give a path of its own. The ranks that see one folder at their paths share a
  // disk, which the save finds by looking. Each disk gets the files of its ranks and a manifest. A
  // missing mount is then no error: the path is on another disk, and the save goes there. True: a
  // folder that not all ranks see is an error. Equal on all ranks.
  TORCH_ARG(bool, shared_folder) = true;

  using Metadata = std::map<std::string, std::string>;
  // The user's own text, given back by load_checkpoint(): the name of the run, the
  // epoch. UTF-8, at most 100,000 entries; rank 0's counts.
  TORCH_ARG(Metadata, metadata);

 public:
  // Saves the state of `object` too, under a name of its own; the names are equal on all
  // ranks. include(): of an object that is equal on all ranks, such as a schedule; rank
  // 0's counts. include_per_rank(): that of every rank, such as zero::RandomState. The
  // state is read while save_checkpoint() or save_checkpoint_async() runs.
  SaveOptions& include(const std::string& name, const Stateful& object);
  SaveOptions& include_per_rank(const std::string& name, const Stateful& object);
  const std::vector<IncludedState<const Stateful>>& states() const { return states_; }

 private:
  std::vector<IncludedState<const Stateful>> states_;
};

// Ranks need not see one folder, and each may give a path of its own: the files that a rank does
// not see are read by one that does, which sends the tensors that overlap the shard. A rank that
// sees no manifest takes that of another. A rank needs memory for what it receives.
struct LoadOptions {
  // False loads the parameters whose name, shape and memory order match and
  // leaves the others as they are; LoadReport says which. State is loaded where
  // the optimizer's class matches and nothing that it needs is missing. What is saved
  // afterwards is of a run of its own.
  TORCH_ARG(bool, strict) = true;

  // Set param_groups()' options to the saved ones, learning rate included, as
  // torch does in Python. False keeps the present ones, and so does a load whose groups
  // hold other parameters than the saved ones (with strict false).
  TORCH_ARG(bool, restore_options) = true;

 public:
  // Sets the state of `object` to the one that was saved under `name` in the same way. When
  // any object on any rank throws, the load throws on all ranks and every object has its
  // former state again. On another number of ranks than the one that saved, ranks without a
  // state of their own leave the object as it is, and differences says so.
  LoadOptions& include(const std::string& name, Stateful& object);
  LoadOptions& include_per_rank(const std::string& name, Stateful& object);
  const std::vector<IncludedState<Stateful>>& states() const { return states_; }

 private:
  std::vector<IncludedState<Stateful>> states_;
};

// What ZeroOptimizer::load_checkpoint() has found.
struct LoadReport {
  std::map<std::string, std::string> metadata;  // as given to save_checkpoint()
  int64_t world_size = 0;                       // that saved it
  std::string run;  // the run's random id, which a run that goes on keeps; may be empty
  // The differences found. After a strict load only: states that the checkpoint holds and the load
  // did not include, and states per rank of another number of ranks. Rank 0 warns of these.
  std::vector<std::string> differences;
  uint64_t bytes_read = 0;  // by this rank, its part of verifying files included
  // From other ranks, of files that this one does not see. They count as read, too.
  uint64_t bytes_received = 0;
};

}  // namespace zero
