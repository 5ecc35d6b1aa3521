// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The parts of a ZeroOptimizer and the state machine between them. Internal:
// included by zero_optimizer*.cc and by the checkpoint.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/agreement/communicators.h"
#include "zero/agreement/control_channel.h"
#include "zero/agreement/shard_domains.h"
#include "zero/base/error_text.h"
#include "zero/base/own_process.h"
#include "zero/checkpoint/run_identity.h"
#include "zero/checkpoint/writer.h"
#include "zero/gradients/full_gradients.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/memory/working_arena.h"
#include "zero/norm/shard_norm.h"
#include "zero/update/loss_scaler.h"
#include "zero/update/shard_optimizer.h"
#include "zero/update/skip_watch.h"
#include "zero/update/step_counts.h"
#include "zero/zero_optimizer.h"

namespace zero {

struct ZeroOptimizer::Impl {
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // `links` are connected.
  Impl(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> inner, Domains domains,
       const ZeroOptions& options, std::shared_ptr<OptimizerLinks> links, ParameterTable table);
  ~Impl();

  // --- Errors. A problem is misuse on this rank: thrown at once by report(),
  // and told to all ranks by the next agreement. A failure is a broken
  // transport: final.
  [[noreturn]] void report(const std::string& problem);
  void check_usable() const;
  // Runs `body`; a c10::Error that leaves a communicator failed makes this
  // optimizer refuse further use.
  void guarded(const std::function<void()>& body);
  // Collective: every collective call begins with it. Agrees on `call`; `check` may throw this
  // rank's problem. `arguments` must be equal on all ranks, and `by_domain[d]` on those that hold
  // the parameters of domain d. Completes all rounds that any rank needs, zero_grad() with zeros,
  // so that whatever the call sends comes after all reductions on every rank.
  Agreement agree(Call call, const std::function<void()>& check = nullptr,
                  const std::string& arguments = {}, std::vector<std::string> by_domain = {});
  // Collective. What agree() does before it completes rounds.
  Agreement exchange_calls(Call call, const std::string& problem, const std::string& arguments,
                           std::vector<std::string> by_domain);
  // `text` for the domains over whose ranks `home` sends.
  std::vector<std::string> at_home(const std::string& text) const;
  // With static_graph, of the calls of a training step: this rank's deviation from what was
  // promised, or nothing.
  std::string static_problem() const;
  // What is said of a step() of the inner optimizer that the user made.
  static constexpr char kInnerStep[] =
      "step() of the inner optimizer: expected step() of the ZeroOptimizer, which is what updates "
      "parameters, got a call through a pointer that was kept; nothing was updated";
  // Of gradients of a loss that was not multiplied by the loss scale, or nothing.
  std::string unscaled_problem() const;
  // Why this call cannot be captured in a CUDA graph, or nothing.
  std::string capture_problem(Call call) const;
  // The checks that every call with gradients makes.
  void verify_untouched() const;
  // The checks of calls that read or write parameters which may have been changed.
  void verify_shapes() const;

  // --- Backward (zero_optimizer_backward.cc)
  void install_hooks();
  void remove_hooks() noexcept;
  // True: the gradient is on its way, and is not to be accumulated.
  bool before_accumulation(int64_t parameter, const at::Tensor& gradient);
  void after_accumulation(int64_t parameter);
  // Whether a gradient may come at present; and why not. Asked for each gradient.
  bool takes_gradients() const { return clips.empty() && (scaled || scaler.scale() == 1.0); }
  std::string untimely_gradient() const;
  // Runs `gradient`, which hands one to the reducer; an error is told to all ranks.
  void accept(const std::function<void()>& gradient);
  void run_backward(const std::function<void()>& backward);

  // --- Collective calls (zero_optimizer_calls.cc)
  // Stage 1: brings p.grad() up to `rounds`.
  void gather_full_gradients(const Agreement& agreement);
  // The norm of the gradient reduced in `rounds`, which all ranks have agreed on: so all of them
  // send, or none does.
  void measure(double norm_type, int64_t rounds);
  bool is_measured(int64_t rounds) const { return measured && measured_rounds == rounds; }
  // The same after the clips so far.
  at::Tensor clipped_norm(double norm_type, int64_t rounds);
  void apply_clip(double max_norm, const at::Tensor& norm);
  // Computes the coefficient again where gradients were added after the last clip.
  void renew_clips(int64_t rounds);
  void watch_skips();
  at::Tensor clip(std::optional<double> max_norm, double norm_type);
  void step(const ParamGroups& groups);
  void update(const Agreement& agreement);
  // Lets the loss scale follow the last step; waits until the device has done that step, though not
  // for what was enqueued since.
  void settle();
  void finish_step();
  void zero_grad();
  at::Tensor gather_parameter(const at::Tensor& parameter, bool gradient);
  // Starts a gather of every bucket that `write` reports. Whoever reads parameters finishes them.
  void start_gathers(const std::function<void(const ShardOptimizer::RowWritten&)>& write);
  void finish_gather(int64_t bucket);
  void finish_gathers();
  void wait_for(const torch::nn::Module& used);
  void broadcast_from_first(const std::vector<at::Tensor>& tensors, const DomainLinks& domain,
                            const char* what);
  void broadcast_parameters();
  void check_replicas_now();
  void refresh_masters();
  void refresh_working();
  void broadcast_buffers();
  void check_groups(const ParamGroups& groups) const;

  // --- Checkpoints (checkpoint_save.cc, checkpoint_load.cc)
  struct Save {
    std::shared_ptr<CheckpointWriter> writer;
    std::vector<FileToSave> files;  // of this rank; copies of its tensors if asked for
    Manifest manifest;              // without files
  };
  void check_no_gradients() const;
  void check_can_be_stored(const ParamGroups& groups) const;
  Manifest make_manifest(const SaveOptions& save, const ParamGroups& groups) const;
  Save begin_save(const std::string& folder, const SaveOptions& save, bool copy,
                  const ParamGroups& groups);
  LoadReport load_checkpoint(const std::string& folder, const LoadOptions& load,
                             ParamGroups& groups);

  const OwnProcess process;
  torch::nn::Module& module;
  const Domains domains;
  const Group group;  // of construction: the home domain's
  const ZeroOptions options;
  const std::shared_ptr<OptimizerLinks> links;  // of the constructor too, while it runs
  ParameterTable table;
  const at::Device device;
  const std::vector<int64_t> domain_of;  // per parameter
  const Plan plan;
  BufferPool pool;
  WorkingArena arena;
  GradientReducer reducer;
  FullGradients full_gradients;
  ShardOptimizer shards;
  LossScaler scaler;
  StepCounts counts;
  RunIdentity run;  // of checkpoints
  struct Gather {
    at::Tensor rows;  // undefined: none under way
    Pending pending;
  };
  std::vector<Gather> gathers;                                        // per bucket
  std::vector<std::vector<at::Tensor>> group_members;                 // as at construction
  std::vector<const torch::autograd::FunctionPreHook*> before_hooks;  // per parameter

  std::shared_ptr<bool> no_sync_active = std::make_shared<bool>(false);
  std::string problem;          // seen outside a collective call, not yet told
  std::string broken_backward;  // until zero_grad()
  bool refused = false;         // the last call, on all ranks
  std::string failure;          // final

  struct Clip {
    double max_norm;
    double norm_type;
  };
  std::vector<Clip> clips;            // since the last step
  int64_t clipped_rounds = 0;         // of the gradient that they saw
  const at::Tensor coefficient;       // of `clips`: 0-dim double beside the gradients
  std::optional<ShardNorm> measured;  // of the reduced gradient
  double measured_type = 0.0;
  int64_t measured_rounds = 0;
  bool scaled = false;  // backward() or scale_loss() was called since the last step
  SkipWatch skip_watch;
  bool skips_fetched = false;   // with deferred updates: a copy of the counts is under way
  int64_t gathered_rounds = 0;  // stage 1: rounds that p.grad() contains
  bool settled = true;          // the loss scale knows the last step
  int64_t calls_of_step = 0;    // with gradients
  int64_t static_rounds = 0;    // with static_graph: of the first step, 0 before it
};

}  // namespace zero
