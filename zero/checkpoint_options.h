// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What save_checkpoint() and load_checkpoint() of a ZeroOptimizer are given and give back: options,
// objects whose state is saved too, a save that goes on while training does, and what a load found.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zero {

// An object whose state is saved with a checkpoint. zero::LrSchedule and zero::RandomState are such
// objects, and a sampler or a data loader of your own can be one:
//
//   class Batches : public zero::Stateful {
//    public:
//     std::string state() const override { return std::to_string(next_); }
//     void set_state(const std::string& state) override { next_ = std::stoll(state); }
//     ...
//   };
//   optimizer.save_checkpoint(folder, SaveOptions().include("batches", batches));
//   optimizer.load_checkpoint(folder, LoadOptions().include("batches", batches));
class Stateful {
 public:
  virtual ~Stateful() = default;

  // Everything that the object needs to go on, in any bytes. Called by the thread that saves; it
  // must not communicate with other ranks.
  virtual std::string state() const = 0;

  // Takes over what state() returned, perhaps in another process. Throws where it cannot. A load
  // that fails on any rank calls this again with the former state(), so an object that throws
  // halfway needs no way back of its own. It must not communicate with other ranks.
  virtual void set_state(const std::string& state) = 0;
};

// The state of random number generators, saved with a checkpoint: dropout goes on with the numbers
// that it would have drawn.
//
//   RandomState random(group.device());
//   optimizer.save_checkpoint(folder, SaveOptions().include_per_rank("random", random));
//   optimizer.load_checkpoint(folder, LoadOptions().include_per_rank("random", random));
//
// Ranks should draw different numbers: torch::manual_seed(seed + group.rank()).
class RandomState final : public Stateful {
 public:
  // torch's default generator of the CPU and, where `device` is a GPU, that of the GPU.
  explicit RandomState(at::Device device);
  // Generators of your own.
  explicit RandomState(std::vector<at::Generator> generators);

  // About 5 kB for a generator of the CPU.
  std::string state() const override;
  // Throws c10::Error for the state of other kinds of generators.
  void set_state(const std::string& state) override;

 private:
  std::vector<at::Generator> generators_;
};

// An object that a save or a load includes.
template <typename Object>
struct IncludedState {
  std::string name;
  Object* object = nullptr;
  bool per_rank = false;
};

// Options of ZeroOptimizer::save_checkpoint(): what it writes beside the optimizer, and to which
// kind of folder.
struct SaveOptions {
  // Replace a checkpoint that is there, in one system call. False refuses, and so does a file
  // system without that call, which exchanges two folders (NFS): save under new names there.
  TORCH_ARG(bool, overwrite) = false;

  // False: ranks may give paths on different disks, and a missing mount is no error; see
  // docs/checkpoints.md. True: a folder that not all ranks see is an error. Equal on all ranks.
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

// A save of ZeroOptimizer::save_checkpoint_async(), which goes on while training does:
//
//   auto save = optimizer.save_checkpoint_async("run/step-100");
//   ...                                  // steps as usual, on all ranks
//   save->finish();                      // at the same place on all ranks
class PendingCheckpoint {
 public:
  // Stops the thread, or leaves it behind when it stands still in a call of the disk. Without
  // finish() no checkpoint appears. As long as rank 0's object lives and was not finished (without
  // a shared folder: that of any rank), no other save to the folder can begin, but after recover(),
  // with which the save is lost: finish() throws then.
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  // Collective, once, while the optimizer lives. Writes what the thread has not written yet of this
  // rank's files, waits for all ranks, and gives the checkpoint its name. Throws what
  // save_checkpoint() would throw, and, which is final, when the thread does not return from a call
  // of the disk within the group's timeout and 5 s. A call that is refused before it writes, as
  // between the micro-batches of a step, does not count.
  void finish();

 private:
  friend struct BackgroundSave;  // zero/checkpoint/writer.h: what makes one
  struct State;
  explicit PendingCheckpoint(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State> state_;
};

// Ranks need not see one folder, and each may give a path of its own: the files that a rank does
// not see are read by one that does, which sends the tensors that overlap the shard. A rank that
// sees no manifest takes that of another. A rank needs memory for what it receives.
struct LoadOptions {
  // False loads the parameters whose name, kind (trained or frozen), shape and memory order match
  // and leaves the others as they are; LoadReport says which. State is loaded where the optimizer's
  // class matches and nothing that it needs is missing. Later saves belong to a new run.
  TORCH_ARG(bool, strict) = true;

  // Set param_groups()' options to the saved ones, learning rate included, as
  // torch does in Python. False keeps the present ones. With strict false, so does a load whose
  // parameters were saved in other groups or with another class of optimizer, and a group of which
  // no parameter can be loaded.
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

// The result of ZeroOptimizer::load_checkpoint().
struct LoadReport {
  std::map<std::string, std::string> metadata;  // as given to save_checkpoint()
  int64_t world_size = 0;                       // that saved it
  std::string run;  // the run's random id, which a run that goes on keeps; may be empty
  // The differences found. After a strict load only: states that the checkpoint holds and the load
  // did not include, and states per rank of another number of ranks. Rank 0 warns of these.
  std::vector<std::string> differences;
  // The formats of ZeroOptions::moments and split_masters that the run that saved and this one do
  // not share, such as "moments of 12 parameters: float32 in the checkpoint, int8 here", by this
  // rank's parameters. A checkpoint has all of them in fp32. Moments in fewer bytes are rounded to
  // nearest; masters lose nothing. Checkpoints of earlier commits say float32.
  std::vector<std::string> conversions;
  uint64_t bytes_read = 0;  // by this rank, its part of verifying files included
  // From other ranks, of files that this one does not see. They count as read, too.
  uint64_t bytes_received = 0;
};

}  // namespace zero
