// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The parts of a ZeroOptimizer, and the collective calls that use several of them. Internal.
//
//   construct.cc        the checks before construction
//   impl.cc             construction, and the agreement that begins every collective call
//   step.cc             clipping, steps, gathered tensors, repair
//   save.cc, load.cc    checkpoints
//   recover.cc          protected steps, and another group after a failure or with ranks that join
//   replan.cc           other parameters: freeze(), unfreeze(), add_param_group()
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/call_protocol.h"
#include "zero/agreement/communicators.h"
#include "zero/agreement/shard_domains.h"
#include "zero/base/serial_thread.h"
#include "zero/checkpoint/found_files.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/checkpoint/mesh_tensors.h"
#include "zero/checkpoint/reader.h"
#include "zero/checkpoint/run_identity.h"
#include "zero/checkpoint/shard_copies.h"
#include "zero/checkpoint/writer.h"
#include "zero/gradients/full_gradients.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/gradients/wire_format.h"
#include "zero/memory/working_arena.h"
#include "zero/norm/clipping.h"
#include "zero/recovery/protection.h"
#include "zero/recovery/roll_call.h"
#include "zero/training/backward.h"
#include "zero/training/broadcasts.h"
#include "zero/update/parameter_gathers.h"
#include "zero/update/shard_optimizer.h"
#include "zero/update/step_record.h"
#include "zero/zero_optimizer.h"

namespace zero {

struct ZeroOptimizer::Impl {
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  // Which frozen parameters construction sends. Where processes join, theirs are in no other
  // ZeroOptimizer yet, so that all are sent.
  enum class Frozen { kUnmanaged, kAll };

  // Collective. All that the constructor of ZeroOptimizer checks and makes. If it throws, `inner`
  // is still the caller's, unless memory ran out. Throws CommunicationError after a failure of the
  // communication, its base c10::DistBackendError after one of this rank alone, and another
  // c10::Error where all ranks refuse.
  static std::unique_ptr<Impl> make(torch::nn::Module& module,
                                    std::unique_ptr<torch::optim::Optimizer>& inner,
                                    const Group& group, const ZeroOptions& options, Frozen sent);

  // Collective. The same optimizer over `over` and `groups`, but for its numbers and state.
  std::unique_ptr<Impl> make_over(std::unique_ptr<torch::optim::Optimizer>& inner,
                                  const Group& over, const ParamGroups& groups, Frozen sent);

  // `comms` are connected. Takes `inner` when everything is sent.
  Impl(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
       ShardDomains domains, const ZeroOptions& options,
       std::shared_ptr<OptimizerCommunicators> comms, ParameterTable table, Frozen sent);
  ~Impl();

  // --- Agreement (impl.cc)
  // Collective: every collective call begins with it. Agrees on `call`; `check` may throw this
  // rank's problem. Completes all rounds that any rank needs, zero_grad() with zeros, so that
  // whatever the call sends is sent after all reductions on every rank.
  Agreement agree(Call call, const std::function<void()>& check = nullptr,
                  AgreedArguments arguments = {});
  void finish_previous_step();
  // The first problem of this rank that `call` must throw, or nothing.
  Problem first_problem(Call call, const std::function<void()>& check);
  // The deviation of this rank from the promise of static_graph, or nothing.
  std::string static_problem() const;
  // The reason why `call` cannot be captured in a CUDA graph, or nothing.
  std::string capture_problem(Call call) const;
  // The checks that every call with gradients makes.
  void verify_untouched() const;
  // The checks of calls that read or write parameters which may have been changed.
  void verify_shapes() const;
  void check_groups(const ParamGroups& groups) const;
  void check_no_gradients() const;
  // Runs what must not stop half-way. If it throws, this optimizer is closed.
  void run_or_close(const std::function<void()>& body);

  // --- Collective calls (step.cc)
  void reduce_gradients();
  at::Tensor clip(std::optional<double> max_norm, double norm_type);
  void clip_value(double value);
  // Returns whether there are gradients that `call`, which `clips`, can clip. Throws where no rank
  // ran a backward pass.
  bool can_clip(Call call, const Agreement& agreement, bool clips) const;
  void step(const ParamGroups& groups);
  void zero_grad();
  at::Tensor gather_parameter(const at::Tensor& parameter, bool gradient);
  void check_replicas();
  void refresh_masters();
  void refresh_working();
  void broadcast_buffers();

  // Their steps.
  // Stage 1: brings p.grad() up to the agreed rounds.
  void gather_full_gradients(const Agreement& agreement);
  void update(const Agreement& agreement);
  // Updates this rank's shard and starts the gathers of the parameters.
  void update_buckets();
  // Blocks while an asynchronous save or a protected step still copies buckets from `bucket` on.
  void wait_for_readers(int64_t bucket);
  // Runs what changes this rank's rows and sends them. If it throws here alone, shards are updated
  // on some ranks only: this optimizer is closed.
  void run_update(const std::function<void()>& body);
  void compare_replicas();
  // Brings the working parameters up to date with masters that changed.
  void write_working_parameters();
  void forget_gradients();

  // --- Checkpoints (save.cc, load.cc)
  struct Save {
    std::shared_ptr<CheckpointWriter> writer;
    Manifest manifest;                   // without files
    std::vector<FileToSave> files = {};  // of this rank
    // Instead of those, for an asynchronous save, and what is still to be copied of the shard.
    std::deque<std::shared_ptr<MemoryFileWriter>> copied_files = {};
    std::shared_ptr<ShardCopies> copies = nullptr;
  };
  void check_can_be_stored(const ParamGroups& groups) const;
  // Collective, where ranks hold different parameters. Returns what all of them hold, and null
  // where every rank holds the same.
  std::unique_ptr<MeshTensors> merge_tensors(const std::string& what, const ParamGroups& groups);
  // Leaves to this rank's files what it stores, under the names of its parts. `bucket_of` is that
  // of `own`.
  void drop_what_others_store(const MeshTensors& mesh, FileToSave& own, FileToSave& whole,
                              std::vector<int64_t>& bucket_of) const;
  Manifest make_manifest(const SaveOptions& save, const ParamGroups& groups,
                         const MeshTensors* mesh) const;
  Save begin_save(const std::string& folder, const SaveOptions& save, bool copy,
                  const ParamGroups& groups);
  // This rank's file, with views of the shard. bucket_of[i] is the bucket of tensor i, or
  // ShardCopies::kOfNone where it is to be copied at once.
  FileToSave shard_file(std::vector<int64_t>& bucket_of) const;
  LoadReport load_checkpoint(const std::string& folder, const LoadOptions& load,
                             ParamGroups& groups);
  // Collective. A reader of a checkpoint of which ranks see different files, with what this rank
  // needs of the others; `received` is their bytes. Throws on all ranks where load_checkpoint()
  // would without reading.
  std::unique_ptr<CheckpointReader> receive_files(const std::string& folder,
                                                  const FoundFiles& found, const LoadOptions& load,
                                                  const MeshTensors* mesh, const std::string& call,
                                                  uint64_t& received);
  // Sets everything from a protected step of the same model; parameters that were not managed then
  // keep their values and have no state. Collective.
  void load_protected(CheckpointReader& reader, ParamGroups& groups, const std::string& call);

  // --- Recovery (recover.cc)
  struct Lifeline;  // what outlives a group
  // Collective, if steps are protected: connects to other ranks, of a first group without `former`.
  void start_protection(std::shared_ptr<Lifeline> former);
  // The content of a protected step: this rank's file, and the manifest without files.
  std::pair<FileToSave, Manifest> protected_shard(const ParamGroups& groups,
                                                  std::vector<int64_t>& bucket_of) const;
  // Before an agreement after which protect() follows.
  void finish_protection();
  void protect(const ParamGroups& groups);
  // Collective. The same, and returns when all ranks have it whole. `call` is for errors.
  void protect_at_once(const ParamGroups& groups, const std::string& call);
  // Ends this group here. The survivors, with what each of them holds. Collective over them.
  RollCall::Present leave_group();
  // Throws if a process waits to join.
  void throw_if_others_join() const;
  // Ends the use of hooks and of memory that another Impl makes anew: masters, state, gradients,
  // and the arena, which lives until its parameters have moved. Returns the inner optimizer.
  std::unique_ptr<torch::optim::Optimizer> release();
  // Collective. The same over another group, with the inner optimizer, which is back here if it
  // throws.
  std::unique_ptr<Impl> make_again(const Group& over);
  // Collective over those that recover, on a process that joins them: what the constructor of
  // ZeroOptimizer makes then.
  static std::unique_ptr<Impl> join(torch::nn::Module& module,
                                    std::unique_ptr<torch::optim::Optimizer>& inner,
                                    const Group& group, const ZeroOptions& options,
                                    const ParamGroups& groups);
  // Collective. Everything as at the protected step, which is protected here, if steps are; its
  // step() calls. `call` is for errors.
  int64_t restore(const Generations& from, const Restorable& step, ParamGroups& groups,
                  const std::string& call);

  // --- Other parameters (replan.cc)
  struct Change;
  // Collective. Makes `change`, or throws on all ranks with everything as it was.
  static void replan(std::unique_ptr<Impl>& impl, ParamGroups& groups, Change change);
  void agree_on(Change& change, const ParamGroups& groups);
  // The group of a parameter that enters: the one which freeze() took it from or in which it was
  // frozen at construction, else the first.
  size_t former_group(const at::Tensor& parameter, const std::string& name,
                      const ParamGroups& groups) const;
  // Collective. The protected step of now, of which each rank has its own file.
  std::shared_ptr<Generations> copy_shard(const ParamGroups& groups, const std::string& call);
  // Collective. With the changed groups; with `groups` if a rank finds those unusable, which sets
  // `refusal`. Nothing but the destructor of this may then be called.
  std::unique_ptr<Impl> make_changed(const Change& change, const ParamGroups& groups,
                                     std::exception_ptr& refusal);

  torch::nn::Module& module;
  const ShardDomains domains;
  const Group group;  // of construction: the home domain's
  const int64_t failures_before = group.failures();
  const ZeroOptions options;
  const std::shared_ptr<OptimizerCommunicators> comms;  // of the constructor too, while it runs
  ParameterTable table;
  const at::Device device;
  const std::vector<int64_t> domain_of;  // per parameter
  const Plan plan;
  CallProtocol protocol;
  const WireFormats wires;  // per arena of `plan`
  BufferPool pool;
  WorkingArena arena;
  Broadcasts broadcasts;
  GradientReducer reducer;
  FullGradients full_gradients;
  ShardOptimizer shards;
  Clipping clipping;
  ParameterGathers gathers;
  StepRecord record;
  RunIdentity run;                      // of checkpoints
  std::shared_ptr<ShardCopies> copies;  // of the last asynchronous save, or null
  KeptMemory memory_of_copies;          // of those
  SerialThread removals;                // of the checkpoints that asynchronous saves replaced
  std::shared_ptr<Lifeline> lifeline;   // null unless steps are protected
  std::unique_ptr<Protection> protection;
  BackwardPasses passes;

  std::vector<std::vector<at::Tensor>> group_members;  // as at construction
  std::map<std::string, size_t> left_groups;           // of parameters that freeze() took out
  int64_t gathered_rounds = 0;                         // stage 1: rounds that p.grad() contains
  // Ends with this object, for what may outlive it.
  const std::shared_ptr<const bool> lives = std::make_shared<const bool>(true);

 private:
  // Sends rank 0's values to all ranks, and then makes the masters from them.
  ShardOptimizer make_shards(std::unique_ptr<torch::optim::Optimizer>& inner, Frozen sent);
};

}  // namespace zero
