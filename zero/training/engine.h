// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One iteration of training: the parts that a step uses, and the collective calls of a step. It
// knows neither checkpoints nor recovery. Internal.
//
//   construct.cc   what construction checks on each rank, what ranks agree on, what it sends
//   engine.cc      how the parts are put together, and the agreement that begins each call
//   step.cc        gradients, clipping, the step
//   repair.h       collective calls outside of a step
//
// A call throws on all ranks or on none, and after most errors the next call works. The exceptions
// go through OptimizerCommunicators::close_on_error(), as the update of shards does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/agreement/call_protocol.h"
#include "zero/agreement/communicators.h"
#include "zero/agreement/shard_domains.h"
#include "zero/gradients/full_gradients.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/memory/bucket_reader.h"
#include "zero/memory/working_arena.h"
#include "zero/norm/clipping.h"
#include "zero/training/backward.h"
#include "zero/training/early_updates.h"
#include "zero/update/parameter_gathers.h"
#include "zero/update/shard_optimizer.h"
#include "zero/update/step_record.h"

namespace zero {

// The parts of one optimizer over one group. Recovery and changes of its parameters make it anew.
struct Engine {
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  // Which frozen parameters construction sends, beside those that are managed. In a recovery it
  // sends all: a process that joins has none from another ZeroOptimizer yet. kNone: no buffers
  // either.
  enum class Frozen { kNone, kUnmanaged, kAll };

  // Collective. All that the constructor of ZeroOptimizer checks and makes. If it throws, `inner`
  // is still the caller's, unless memory ran out. Throws CommunicationError after a failure of the
  // communication, its base c10::DistBackendError after one of this rank alone, and another
  // c10::Error where all ranks refuse. `trained` as in ParameterTable.
  static std::unique_ptr<Engine> make(
      torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
      const Group& group, const ZeroOptions& options, Frozen sent,
      const std::function<bool(const at::Tensor&)>& trained = nullptr);
  // Collective. The same over `over` and `groups`, with the inner optimizer that release()
  // returned, of parameters that are managed now or `added`. Numbers and state are not taken over.
  std::unique_ptr<Engine> make_again(std::unique_ptr<torch::optim::Optimizer>& inner,
                                     const Group& over, const ParamGroups& groups, Frozen sent,
                                     const std::vector<at::Tensor>& added = {}) const;
  // Collective. The same over the ranks and communicators of this one, which must only be destroyed
  // then. Sends the managed parameters. If it throws, the communicators are closed.
  std::unique_ptr<Engine> make_over_same_ranks(std::unique_ptr<torch::optim::Optimizer>& inner,
                                               const ParamGroups& groups) const;

  // `comms` are connected. Takes `inner` when everything is sent.
  Engine(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
         ShardDomains domains, const ZeroOptions& options,
         std::shared_ptr<OptimizerCommunicators> comms, ParameterTable table, Frozen sent);
  // Waits for readers of buckets and for gathers, since the module may outlive this.
  ~Engine();

  // Waits for readers of buckets, and ends the use of hooks and of memory that another engine makes
  // anew: masters, state, gradients, and the arena, which lives until its parameters have moved.
  // Returns the inner optimizer. Nothing but the destructor may then be called.
  std::unique_ptr<torch::optim::Optimizer> release();

  // --- Agreement (engine.cc)

  // Collective: every collective call begins with it. Agrees on `call`; `check` may throw this
  // rank's problem. Completes all rounds that any rank needs, zero_grad() with zeros, so that
  // whatever the call sends is sent after all reductions on every rank.
  Agreement agree(Call call, const std::function<void()>& check = nullptr,
                  AgreedArguments arguments = {});
  // Throws unless nothing is left of a step.
  void check_no_gradients() const;
  // Returns why `call` cannot be captured in a CUDA graph, or nothing. Asked in a capture alone.
  std::string capture_problem(Call call) const;

  // --- The calls of a step (step.cc)

  // Each of them is collective, and does what ZeroOptimizer's member of that name does.
  void reduce_gradients();
  at::Tensor clip(std::optional<double> max_norm, double norm_type);
  void clip_value(double value);
  // `also` is one more check, which may throw this rank's problem, `argument` what ranks must have
  // alike too.
  void step(const ParamGroups& groups, const std::function<void()>& also = nullptr,
            const std::string& argument = {});
  void zero_grad(bool set_to_none);

  // --- Parts of the calls above

  // Does not throw where a thread that reads stands still: it keeps the memory.
  void await_readers();
  // Stage 1: brings p.grad() up to the agreed rounds.
  void gather_full_gradients(const Agreement& agreement);
  // Collective. Returns whether the step is skipped. Where the host does not wait for the answer,
  // it is no, and `on_device` is a 0-dim double, not 0 for yes, or undefined.
  bool decide_skip(int64_t rounds, at::Tensor& on_device);
  void update(const Agreement& agreement, const at::Tensor& skipped);
  // Collective. Whether any rank's rule skips the step: 0-dim double beside the gradients, not 0
  // for yes; undefined without a rule.
  at::Tensor ask_rule(int64_t rounds);
  // Updates this rank's shard and starts the gathers of the parameters.
  void update_buckets();
  // Brings the working parameters up to date with masters that changed, or makes them the averages.
  void write_working_parameters(bool averages = false);
  // `end_of_step`: what scale_loss() has multiplied before may not run backward any more.
  void clear_gradients(bool end_of_step = true);

  const Group& group() const { return domains.home; }

  // Made in this order. The initializer of `shards` communicates: it sends rank 0's values into
  // `arena`, from which it makes the masters.
  torch::nn::Module& module;
  const ShardDomains domains;
  const ZeroOptions options;
  // Of the constructor too, while it runs, and of the next engine over the same ranks.
  const std::shared_ptr<OptimizerCommunicators> comms;
  ParameterTable table;
  const Plan plan;
  const WireFormats wires;
  CallProtocol protocol;
  BufferPool pool;
  WorkingArena arena;
  GradientReducer reducer;
  FullGradients full_gradients;
  ShardOptimizer shards;
  Clipping clipping;
  ParameterGathers gathers;
  StepRecord record;
  BucketReaders readers;
  EarlyUpdates early;
  BackwardPasses passes;
};

}  // namespace zero
