// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of an optimizer: what its ranks agree on, write and read. Internal.
//
//   save.cc   both kinds of saves
//   load.cc   loads, also of files that other ranks see
//   plain_state.cc   loads of the state of an unsharded torch optimizer over the same parameters
#pragma once

#include <torch/optim/optimizer.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/serial_thread.h"
#include "zero/checkpoint/folder.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/checkpoint/shard_copies.h"
#include "zero/checkpoint/writer.h"
#include "zero/checkpoint_options.h"
#include "zero/training/engine.h"

namespace zero {

// The file of frozen parameters, which is written once; see whole_file_name().
inline constexpr char kFrozenFile[] = "frozen";

class Checkpoints {
 public:
  using ParamGroups = Engine::ParamGroups;

  // Of the optimizer whose present engine is `engine`, which must outlive this.
  explicit Checkpoints(std::shared_ptr<Engine>& engine) : engine_(engine) {}

  // Each is collective, and does what ZeroOptimizer's member of that name does. `groups` have the
  // present options.
  void save(const std::string& folder, const SaveOptions& save, const ParamGroups& groups);
  std::unique_ptr<PendingCheckpoint> save_async(const std::string& folder, const SaveOptions& save,
                                                const ParamGroups& groups);
  LoadReport load(const std::string& folder, const LoadOptions& load, ParamGroups& groups);
  std::optional<std::string> latest(const std::string& parent);

  // Throws while an asynchronous save can be ended, which only the engine that began it can do.
  void check_none_pending() const;

  // Which run this rank's checkpoints are of.
  RunIdentity& run() { return run_; }

 private:
  // A save that has begun on all ranks.
  struct Save {
    std::shared_ptr<CheckpointWriter> writer;
    Manifest manifest;                   // without files
    std::vector<FileToSave> files = {};  // of this rank
    // Instead of those, for an asynchronous save, and what is still to be copied of the shard.
    std::deque<std::shared_ptr<MemoryFileWriter>> copied_files = {};
    std::shared_ptr<ShardCopies> copies = nullptr;
  };
  enum class SaveKind { kNow, kAsynchronous };
  // Collective.
  Save begin_save(const std::string& folder, const SaveOptions& save, SaveKind kind,
                  const ParamGroups& groups);
  // Makes the files of an asynchronous save in memory. Of the shard some is still to be copied.
  void copy_to_memory(FileToSave shard, std::vector<FileToSave> whole, Save& save);
  // Ends the saves that recover() has left without their engine.
  void abandon_lost_saves();
  // The save has ended on all ranks.
  void end_save(const CheckpointWriter& writer);

  // Runs `remove`, of a checkpoint that was replaced, on another thread with a low priority.
  void remove_beside_training(std::function<void()> remove);

  std::shared_ptr<Engine>& engine_;
  RunIdentity run_;
  WrittenOnce frozen_;
  KeptMemory memory_;  // of the copies of asynchronous saves
  // An asynchronous save as long as its PendingCheckpoint is there, and the engine that can end it.
  struct Pending {
    std::weak_ptr<const std::weak_ptr<Engine>> engine;
    std::weak_ptr<CheckpointWriter> writer;
  };
  std::map<std::string, Pending> pending_;  // by folder
  SerialThread removals_;                   // of the checkpoints that asynchronous saves replaced
};

// Collective. Sets the state of an unsharded torch optimizer over the same parameters, from memory
// or from a file, cut into this rank's segments. See ZeroOptimizer::load_plain_state().
void load_plain_state(Engine& engine, const torch::optim::Optimizer& plain);
void load_plain_state(Engine& engine, const std::string& path, const Engine::ParamGroups& groups);

}  // namespace zero
