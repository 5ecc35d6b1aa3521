// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Data-parallel training with the optimizer's state (stage 1) and the gradients
// (stage 2) split evenly over the ranks of a group. README.md has the loop.
//
// Working parameters are what the model computes with: full, on every rank, in their own dtype.
// Masters are their fp32 copies, sharded. docs/design.md has all words.
//
// Promises:
//   1. A gradient is the mean over ranks, or with Reduction::kSum the sum; a rank that did not use
//      a parameter counts as zero. Sums are fp32 in rank order, whatever dtype is sent; over
//      several machines, first within each.
//   2. A parameter dropped on every rank is skipped as torch skips an undefined gradient: no
//      decay, momentum or step count. Ranks may use different parameters and numbers of passes.
//   3. Stages 1 and 2 give bit-identical parameters on Gloo, run after run; without clipping, and
//      with GradientWire::kDtype, for every bucket size and layout too, except
//      Layout::kWholeParameters on several machines, where sums have another order. With
//      ZeroOptions::micro_batches they do so on every number of ranks too, clipped or not.
//   4. With one fp32 rank, unclipped, fused(false) and kDtype: the inner optimizer's own bits.
//   5. A non-finite gradient on any rank skips the step on all ranks.
//   6. The norm is that of the averaged, unscaled gradient before clipping. Clipping takes effect
//      inside step(): p.grad() and gradient() show unclipped values.
//   7. no_sync works in both stages and sends nothing.
//   8. Misuse throws c10::Error saying expected, got, remedy and rank, on this rank at once and on
//      all ranks at their next collective call, before anything else is sent. If another rank or a
//      connection is the cause, it is a zero::CommunicationError: see zero/errors.h.
//   9. param_groups() are the truth for options; step() hands them to the inner optimizer.
//
// Use from one thread at a time: calls of two threads at once throw, and end the optimizer on all
// ranks. Work is enqueued behind the stream that is current at the call. After a
// CommunicationError the optimizer refuses further use with that reason, until recover().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "zero/checkpoint_options.h"
#include "zero/communicator.h"
#include "zero/errors.h"
#include "zero/options.h"
#include "zero/process_group.h"
#include "zero/skip_rule.h"

namespace torch::nn {
class Module;
}

namespace zero {

// Tensors with the names that ranks and checkpoints know them by, as module.named_parameters()
// returns them.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

// The counters of one rank. steps and skipped_steps are those of the whole run: checkpoints and
// recover() keep them. All others begin at 0 at construction, recover() and a change of parameters,
// but resize_rows() keeps bytes.
struct Stats {
  Traffic data;               // gradients, parameters and norms
  Traffic control;            // control messages
  int64_t steps = 0;          // step() calls that updated parameters
  int64_t skipped_steps = 0;  // step() calls skipped for non-finite gradients or by skip_if()
  int64_t rounds = 0;         // reductions of all buckets
  Traffic copies;             // of ZeroOptions::protect()
};

// How ZeroOptimizer::resize_rows() changes one parameter.
struct ResizedRows {
  at::Tensor parameter;
  // int64, 1-D, on any device. For each row of the new parameter, the present row whose state it
  // goes on with, or -1: none, so that its moments or momentum are 0 and a sum of Adagrad is its
  // initial value. A row may be named often.
  at::Tensor rows;
  // The new values, of any floating-point dtype, in the new shape: one row for each of `rows`.
  // Undefined: those of the present rows; then `rows` may not have -1.
  at::Tensor values = {};
};

// The result of ZeroOptimizer::recover(): the step that it went back to, and the ranks.
struct RecoveryReport {
  int64_t steps = 0;  // step() calls made at the protected step, skipped ones included
  // By new rank: the rank in the first group, or the number of a process that joined since.
  std::vector<int> members;
};

// An optimizer that wraps another one, and runs it on this rank's shard of the parameters only.
class ZeroOptimizer final : public torch::optim::Optimizer {
 public:
  // Collective: all ranks of `group` call it with equal models, options and optimizers. Rank 0's
  // parameters and buffers are sent to the others. The parameters of `inner` that require gradients
  // become managed; `inner`'s parameters are replaced by this rank's fp32 master segments (without
  // memory where ZeroOptions::split_masters keeps halves): whole parameters, in their shapes, in
  // groups with Layout::kWholeParameters, else 1-D pieces.
  //
  // Working parameters must be dense leaves in float, bfloat16 or half, on group.device() if that
  // is a GPU, and belong to `module`, which must outlive the optimizer. Layout::kContiguous
  // re-points them at views of a flat arena; sizes and dense strides are kept. Throws c10::Error on
  // every rank when any rank finds its arguments unusable (other parameters, one given twice, two
  // over one memory, a tensor over memory that is left, buffers that are not strided, state in
  // `inner`, a class that does not suit its layout) or when ranks differ, naming what differs.
  // `module` may register more later: saves, loads, refresh_master_parameters(),
  // broadcast_buffers() and changes of parameters find it there, but throw for a tensor in the
  // place of another.
  //
  // With group.joins(), waits until the ranks of a job call recover() and takes over their state:
  // see docs/recovery.md. param_groups() alone has the options of `inner`; call
  // LrSchedule::set_step() before the first step(). Throws when the job ends or takes too long.
  ZeroOptimizer(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> inner,
                Group group, ZeroOptions options = {});
  // Collective. The same for tensors of no module: `parameters`, of which `inner` may have some or
  // all, and `buffers`, which rank 0 sends and saves as those of a module. A dot in a name
  // separates modules, so that a module with the same names can load what this optimizer saves. The
  // tensors are kept. Throws c10::Error, on this rank alone, for a name that is empty or given
  // twice, be it to a parameter and a buffer, and for an undefined tensor.
  ZeroOptimizer(const NamedTensors& parameters, std::unique_ptr<torch::optim::Optimizer> inner,
                Group group, ZeroOptions options = {},
                const NamedTensors& buffers = NamedTensors());
  // Removes the hooks. Not collective; never throws.
  ~ZeroOptimizer() override;

  // ---- Training ----

  // Runs backward from a `loss` of one element (times loss_scale()) and closes the round: complete
  // buckets were sent meanwhile, the rest is sent now with zeros for missing gradients. Blocks for
  // other ranks at most 20 ms for each bucket that is reduced meanwhile, which bounds memory when
  // the network is slower than the backward pass. Calls add up. The gradients that a parameter's
  // hooks return are sent; those of torch::autograd::grad() are not. Until step(), p.grad() of what
  // was sent is NaN and may not be changed. A loss without a graph has the gradient zero, as where
  // this rank drops all layers; under a NoGradGuard or InferenceMode it throws. The loss may reach
  // parameters of other optimizers with the same loss scale; those with another one throw, on all
  // ranks. Throws what the backward pass throws; then every step() of each optimizer that it has
  // reached throws until zero_grad(), or for ever with update_in_backward.
  void backward(const at::Tensor& loss);
  // The same from several outputs. `output_gradients` as in torch::autograd::backward, which this
  // multiplies by loss_scale(); empty for outputs of one element. Those that have the scale in them
  // already, as what the next pipeline stage sends, must be divided by it before, in fp32.
  void backward(const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& output_gradients, bool retain_graph = false);
  // With ZeroOptions::micro_batches(M): the numbers of this rank, about M/W that follow each other.
  // The k-th backward() since the last step() is the pass of the k-th of them; fewer or more than
  // all of them throw. A micro-batch that drops all layers still needs its backward(), with a
  // loss without a graph. zero_grad() of the module is noticed where a pass made a gradient.
  // Throws c10::Error without that option.
  //
  //   for (const int64_t number : optimizer.micro_batches()) {
  //     torch::manual_seed(seed_of(step, number));  // for dropout
  //     optimizer.backward(loss(model, micro_batch(step, number)));
  //   }
  c10::integer_range<int64_t> micro_batches() const;

  // Returns loss * loss_scale(), for callers of loss.backward(). A round then stays open until a
  // parameter gets its next gradient or until step(). With a loss scale other than 1, gradients
  // that arrive outside of backward() throw unless this was called since the last step. Other
  // optimizers that the loss reaches cannot tell such a pass from any of torch: with a loss scale
  // of 1 they take its scaled gradients as they are, in silence.
  at::Tensor scale_loss(const at::Tensor& loss) const;

  // While the guard lives, backward passes accumulate into p.grad() and send nothing; the next pass
  // without it, or step(), sends the sum. Stage 2 then holds full gradients meanwhile. `enabled`
  // false: an inert guard. Not collective. Throws when nested; collective calls throw while a guard
  // lives.
  class NoSync {
   public:
    NoSync(NoSync&& other) noexcept;
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync();

   private:
    friend class ZeroOptimizer;
    explicit NoSync(std::shared_ptr<bool> active) : active_(std::move(active)) {}
    std::shared_ptr<bool> active_;
  };
  [[nodiscard]] NoSync no_sync(bool enabled = true);

  // Collective. Returns the norm of the averaged gradient over all parameters, before clipping:
  // 0-dim fp64, equal on every rank. step() then multiplies gradients by
  // min(1, max_norm / (norm + 1e-6)). `norm_type` is any p > 0 or infinity; nullopt only measures.
  // A second call sees the clipped norm. Gradients put into an empty p.grad() by hand after it are
  // clipped with the rest. A clip by a norm of NaN or infinity makes step() skip, unless
  // skip_nonfinite(false). Throws for
  // max_norm or norm_type <= 0 or NaN, and for a max_norm where no rank has had a backward pass, or
  // gradients that were set by hand, since step().
  at::Tensor clip_grad_norm_(std::optional<double> max_norm, double norm_type = 2.0);
  at::Tensor grad_norm(double norm_type = 2.0) { return clip_grad_norm_(std::nullopt, norm_type); }

  // Collective. step() then clamps each element of the averaged, unscaled gradient to
  // [-clip_value, clip_value] as torch::nn::utils::clip_grad_value_ does. With clip_grad_norm_()
  // the order of the calls is that of torch: each sees what those before it clipped. Infinities
  // skip the step as ever; with skip_nonfinite(false) they become the limits. In stage 2 it sends
  // its control message and what is left of the reductions, in stage 1 also the averages, as
  // reduce_gradients() does. Throws for a value <= 0 or NaN, for values that differ between ranks,
  // and where clip_grad_norm_() throws for want of gradients.
  void clip_grad_value_(double clip_value);

  // Collective. Updates this rank's masters, then brings every working parameter up to date on
  // every rank. Gradients are consumed. Without a gradient on any rank since the last step it does
  // nothing, and after backward passes it warns of that once. Throws when ranks have different
  // options, a learning rate for example, for a NaN among them and for what the constructor of the
  // inner optimizer, if it is one of this library, refuses (of a class of your own for the learning
  // rate alone); after max_skipped_in_a_row() skipped steps, and after ten steps in a row whose
  // passes gave no parameter a gradient on any rank.
  // Returns the closure's loss, else an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Blocks until the last step has updated the parameters of `module` and its children on this
  // rank. Does nothing without ZeroOptions::overlap_gather. Call it before a module computes, and
  // before you read or change its parameters, in any order, any number of times. Without this call,
  // backward() throws for a graph that used old parameters, if no other call has waited between, or
  // if the graph has saved one; and the next collective call throws if parameters were loaded or
  // edited. Not collective. Throws CommunicationError when communication
  // failed.
  void wait_for(const torch::nn::Module& module);
  // The same for one parameter.
  void wait_for(const at::Tensor& parameter);

  // For replays of a CUDA graph with step() in it, which read learning rates on the device: sends
  // those of param_groups() there, behind what the current stream has to do, so that the replays
  // after it use them. Each step() that is not captured does it too. All other options of a replay
  // are those of the capture. Not collective, but ranks must have the same rates; the host does not
  // wait. Sends nothing unless ZeroOptions::static_graph is set and all groups have fused kernels.
  // Throws in a capture, and for groups that step() refuses.
  void refresh_learning_rates();

  // Forgets the gradients accumulated since the last step, and resets p.grad() whatever
  // `set_to_none` is. Collective when there are any and after a call that threw, otherwise local
  // and free; when only some ranks have any, the next collective call throws on all ranks and
  // nothing is lost. Call it to drop gradients that must not count; step() consumes all others.
  // zero_grad() of the module does the same if all ranks call it and it resets all parameters that
  // have gradients; otherwise the next collective call or backward pass throws. Only this
  // zero_grad() undoes a clip.
  void zero_grad(bool set_to_none = true);

  // ---- Reading ----

  // Collective. Completes the reduction of all gradients since the last step. In stage 1, p.grad()
  // then holds this parameter's averaged gradient in the parameter's dtype, until the next backward
  // pass, step() or zero_grad(). It may be read only: a change has no effect, and the next
  // collective call throws, except on a GPU for one through p.grad().data(), as of torch's clips.
  // gradient(), norms and clips show the averages too, but notice no change through p.grad().data()
  // on any device. step() completes the reduction too, but shows no p.grad().
  void reduce_gradients();
  // Collective. The averaged, unclipped gradient of a managed parameter since the last step, or its
  // master: full, fp32, in the parameter's shape, a copy. gradient() is undefined when no rank used
  // the parameter, and in stage 1 gathers the averages of all parameters first. Allowed at any
  // time, also between backward passes.
  at::Tensor gradient(const at::Tensor& parameter);
  at::Tensor master(const at::Tensor& parameter);
  // Returns whether the last step() was skipped, for non-finite gradients or by skip_if(). On a
  // GPU, and with static_graph, this, stats() and inner() wait for the device, since step() does
  // not.
  bool step_skipped() const;
  // The factor that backward() puts on the loss. On a GPU a dynamic scale makes the next backward()
  // wait until the last step is done, though not for the forward pass enqueued since.
  double loss_scale() const;

  // With ZeroOptions::ema. While the guard lives, the working parameters of all ranks hold their
  // average, for validation; at its end they get back what the masters say, every bit of before,
  // also after an exception. Collective, and so is the end: each of the two sends the parameters
  // once, and raises their versions, so that a graph of before cannot run backward. While it lives,
  // backward passes and all other collective calls throw c10::Error, and edits of parameters are
  // lost at its end. If working parameters are the masters (fp32) or their upper halves
  // (split_masters), the guard needs memory for one more copy of this rank's masters. Throws
  // c10::Error on all ranks without that option, for gradients since the last step, inside no_sync
  // and for a second guard. The optimizer must outlive the guard. end() ends it early and throws
  // what the destructor cannot: that waits for the other ranks up to the timeout, and where it
  // fails it closes the communication, as a rank that fails does; recover() goes on from there.
  class EmaGuard {
   public:
    EmaGuard(EmaGuard&& other) noexcept = default;
    EmaGuard& operator=(EmaGuard&&) = delete;
    ~EmaGuard();
    void end();

   private:
    friend class ZeroOptimizer;
    struct Use;
    explicit EmaGuard(std::shared_ptr<Use> use) : use_(std::move(use)) {}
    std::shared_ptr<Use> use_;
  };
  [[nodiscard]] EmaGuard use_ema();

  // ---- Other parameters ----

  // Collective. `parameters` leave the optimizer: they require no gradient any more and keep their
  // values; their masters and state are dropped. All others keep masters, state and counts bit by
  // bit. As at construction, rank 0's parameters and buffers are sent; plan(), group() and
  // references to them are new. Throws c10::Error on all ranks, with all as it was: gradients
  // since the last step, ranks that name different parameters, one of another optimizer or given
  // more often than it has names, none that stays, a mesh. A death meanwhile is final, also with
  // protect(). Needs host memory for a copy of the shard and one of its masters, or for a copy and
  // a second arena, where that is more than the masters, state and gradient shards, which are freed
  // first. Throws too while a PendingCheckpoint can be finished.
  void freeze(const std::vector<at::Tensor>& parameters);
  // Collective. The reverse: `parameters` of the module, old or new, join a group without state.
  // Default: the group that freeze() took each from, or in which it was frozen at construction;
  // else group 0. A process that has joined since freeze() does not know that group: name it then.
  // Refuses what the class of the group does, a bias for Muon for example.
  void unfreeze(const std::vector<at::Tensor>& parameters,
                std::optional<size_t> param_group = std::nullopt);
  // Collective. The same, with a new parameter group. Without options it has the inner optimizer's
  // defaults; a CombinedOptimizer is refused. An LrSchedule of one factor goes on with the group.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Collective. Rows of parameters go and others come, where a row is what one index of the first
  // dimension selects; it must be contiguous in memory. Each `parameter` stays the tensor that it
  // is, registered where it is, with other memory and another size(0). Its rows have masters and
  // state of the rows that they go on with, and the counts of updates of the parameter stay. A
  // master whose working value is still its rounding keeps its bits, others are set from `values`.
  // Rank 0's values are sent. Shards are balanced anew over the connections that are there;
  // references to plan(), group(), options() and inner() end. Sends the managed parameters, and
  // masters and state once. Throws c10::Error on all ranks, with all as it was: gradients since the
  // last step, ranks whose `rows` differ, one parameter twice, no row at all, state that is not
  // elementwise (Adafactor's factors), what the class of the group refuses, a mesh. A death
  // meanwhile is final, also with protect(): recover() throws then if shapes have changed. So is a
  // rank without memory for the copy of the new state that protect() makes. Needs memory for the
  // shard twice, and for two more copies of the working parameters. Throws too while a
  // PendingCheckpoint can be finished.
  void resize_rows(const std::vector<ResizedRows>& changes);

  // ---- Checkpoints ----

  // Collective. Writes a folder that all ranks see, or see SaveOptions::shared_folder: masters,
  // state of the inner optimizer, step counts, loss scale, options; rank 0's buffers and the
  // parameters that no ZeroOptimizer manages; objects that SaveOptions include. It appears complete
  // or not at all. Any number of ranks can load it, and any mesh with the same names. Needs memory
  // for one tensor more; the slowest rank must be done within the group's timeout. Throws
  // c10::Error on all ranks, leaving what was at `folder`: gradients since the last step, an
  // existing `folder` without overwrite(true), an unfinished save to `folder`, a folder that not
  // all ranks see, errors of a disk, state that cannot be cut for other numbers of ranks, one name
  // for several tensors, a tensor that was put in the place of another.
  void save_checkpoint(const std::string& folder, const SaveOptions& options = {});
  // Collective. The same, but returns at once; steps may follow. A thread copies this rank's shard
  // in host memory, in the order in which a step changes it, and a step that is ahead copies the
  // rest; so parameters may be changed by hand only after the next step(). From a GPU, a separate
  // stream copies the shard, and the stream that steps waits for it. The call blocks until the
  // device has done the last step, and until buffers are copied and frozen parameters copied or
  // hashed; the first one also locks host memory.
  // Ends with PendingCheckpoint::finish().
  std::unique_ptr<PendingCheckpoint> save_checkpoint_async(const std::string& folder,
                                                           const SaveOptions& options = {});
  // Collective. Loads what any number of ranks saved, with any mesh, stage, layout and bucket size.
  // Each rank reads the ranges that overlap its shard, and its part of what no rank needs, so that
  // together they verify every byte. If a rank does not see a file, one that does sends what the
  // rank needs of it, so `folder` may differ between ranks.
  // Working parameters are set from the masters. The run that saved it goes on: the next save has
  // its id. Throws c10::Error on all ranks, and then nothing has changed: gradients since the last
  // step, damage, another model (see LoadOptions::strict), numbers that no optimizer can go on
  // with, an included object that refuses its state, a file that no rank sees, manifests of
  // different checkpoints. With protect() a rank without memory for the copy of the new state is a
  // failure of all.
  LoadReport load_checkpoint(const std::string& folder, const LoadOptions& options = {});
  // Collective. The newest checkpoint, in the order of zero::latest(), in the folders `parent` of
  // all ranks, which may differ, of which each file is seen by some rank. Returns its path for this
  // rank, whether it is there or not.
  std::optional<std::string> latest_checkpoint(const std::string& parent);
  // Collective. Takes over the state, but no options, of an unsharded optimizer of the same class
  // over the same module's parameters, loaded on every rank, to go on with a run of plain torch.
  void load_plain_state(const torch::optim::Optimizer& plain);
  // Collective. Takes over the state in the file `path`, or in the files of an index, on every
  // rank. export_optimizer_state() writes such files, and so may Python programs. Each rank reads
  // the state of the parameters of which it has a segment, and needs memory for that of one and for
  // its own state twice. State is found by the names of parameters, whatever the number of ranks
  // and the mesh; a parameter without any begins anew. Throws c10::Error on all ranks, and nothing
  // has changed: gradients since the last step, state of another class or of a parameter that is
  // not here, other shapes, state that is missing beside other state of its parameter, a file that
  // is not what the format says.
  void load_plain_state(const std::string& path);

  // ---- Recovery ----

  // With ZeroOptions::protect(n): after a call threw CommunicationError, because a rank died or
  // does not answer or a process waits to join, the ranks call this and go on from the last
  // protected step, without files: with new numbers, group() and plan(), and the bits of a
  // checkpoint of that step. Gradients are dropped. The caller sets back all else that a loop has,
  // such as its place in the data: see docs/recovery.md.
  //
  // Collective over the ranks that are left and those that join: one that computes is waited for,
  // one that is dead or stopped is left behind after a second, for good, and its call throws. The
  // store must survive, as with LaunchOptions::survivors_go_on. Throws c10::Error when it ended,
  // when a shard and its copy are both lost (naming the newest checkpoint in `checkpoints`, if
  // given), and at once when no communicator of group() has failed and no process waits. Throws
  // CommunicationError when another rank dies meanwhile, after which it may be called again. Frees
  // masters, state and gradient shards first, and the arena when its parameters have moved.
  RecoveryReport recover(const std::string& checkpoints = {});

  // ---- Repair ----

  // Collective. Takes over working parameters that were loaded, moved to other storage or edited:
  // sends rank 0's values, also of frozen ones, to all ranks, and sets the masters from them.
  // Parameters of another ZeroOptimizer are not sent.
  void refresh_master_parameters();
  // Collective. The reverse: sets working parameters from the masters. It cannot take back edits of
  // parameters that are masters, fp32 in place, or that are halves of them.
  void refresh_working_parameters();
  // Collective. Sends rank 0's module buffers to all ranks.
  void broadcast_buffers();
  // Collective. Compares hashes of working parameters over all ranks, and each rank's masters, if
  // they are not split, with its part of them. Throws on every rank, naming the first parameter
  // that differs and the ranks.
  void check_replicas();

  // ---- Observing ----

  MemoryReport memory() const;  // bytes this rank holds now, by kind
  Stats stats() const;
  const Plan& plan() const;
  const Group& group() const;
  const ZeroOptions& options() const;
  // The wrapped optimizer over master segments, for its state(). Options are in param_groups().
  const torch::optim::Optimizer& inner() const;
  // Refused by the compiler, since it would be empty: inner().state() has this rank's pieces, to
  // read, in the format of ZeroOptions::moments; resize_rows() and load_plain_state() change it.
  void state() = delete;

  // Refused: torch archives hold one rank's segments by address and accept flipped bits.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  ZeroOptimizer(std::shared_ptr<torch::nn::Module> module,
                std::unique_ptr<torch::optim::Optimizer> inner, Group group, ZeroOptions options);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero
