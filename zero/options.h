// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The options of a ZeroOptimizer. All ranks must pass equal options; the constructor compares them.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "zero/process_group.h"

namespace zero {

class SkipRule;  // zero/skip_rule.h

// The placement of one parameter group inside ZeroOptimizer, for ZeroOptions::placement(): the
// ranks that hold different parts of a parameter's shards, and those that hold copies of them. The
// words are those of Placement in zero/grad_norm.h.
struct GroupPlacement {
  // The ranks that share masters, moments and gradient shards, and over which gradients are
  // reduced: the expert-data group for experts. Default: the optimizer's group.
  TORCH_ARG(std::optional<Group>, sharded_over) = std::nullopt;

  // Ranks that hold copies of this rank's shards: gradient shards are averaged over it after the
  // reduction, and nothing else is sent over it. Default: no copies.
  TORCH_ARG(std::optional<Group>, replicated_over) = std::nullopt;

  // The sum of gradients is divided by this. 0: by the number of ranks of sharded_over times those
  // of replicated_over, the mean, or by 1 with Reduction::kSum. An expert that sees the tokens of
  // several data ranks, whose losses are means of their own tokens, needs the number of all those
  // ranks here.
  TORCH_ARG(int64_t, averaged_over) = 0;

  // For the norm: how many ranks of the mesh hold the same gradients besides those of
  // replicated_over, for example the size of the tensor-parallel group for a layer norm.
  TORCH_ARG(int64_t, copies) = 1;

  // False where another pipeline stage counts these parameters in the norm.
  TORCH_ARG(bool, owner) = true;
};

// How tensor parallelism cuts tensors, for ZeroOptions::tensor_parts(). Rank i of `group` holds
// part i; parts follow each other in the whole and may have different sizes.
struct TensorParts {
  Group group;  // the ranks that hold the parts
  // Returns the dimension along which the parameter or buffer of this name is cut; nothing for one
  // that all ranks of `group` hold whole. Equal on all ranks that hold the name. Called by saves
  // and loads.
  std::function<std::optional<int64_t>(const std::string& name)> dimension;
  // Returns what a fused tensor has one behind the other along that dimension, by sizes in the
  // whole: {q, k, v} or {gate, up}. Each rank holds an equal share of each, one behind the other.
  // An empty list, or no function, means: not fused. For a tensor that is fused this is an error
  // that nothing detects: after a load with another number of parts, or in an export, its rows are
  // in the order q0 k0 v0 q1 k1 v1. Equal on all ranks that hold the name.
  std::function<std::vector<int64_t>(const std::string& name)> sections = nullptr;
};

// The gradient of a step, made of those that ranks computed.
enum class Reduction {
  // Their mean: for losses that are means over equal parts of a batch.
  kMean,
  // Their sum: for losses that are divided by the size of the whole batch, such as the tokens of
  // all ranks. docs/training.md has a loop for ranks with unequal batches. Norms, clips, p.grad()
  // and gradient() are those of the sum, and "averaged" in comments means summed.
  kSum,
};

// The dynamic loss scale of fp16. After a step with a non-finite gradient the scale shrinks; after
// growth_interval good steps in a row it grows.
// Source: Micikevicius et al., "Mixed Precision Training", 2018.
struct LossScalerOptions {
  TORCH_ARG(double, initial_scale) = 65536.0;  // in the first step
  TORCH_ARG(double, growth_factor) = 2.0;      // multiplies the scale where it grows
  TORCH_ARG(double, backoff_factor) = 0.5;     // multiplies the scale where it shrinks
  // Good steps in a row before the scale grows.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  // Bad steps before the scale shrinks; refilled when the scale grows.
  TORCH_ARG(int64_t, hysteresis) = 1;
  TORCH_ARG(double, min_scale) = 1.0;         // the scale never shrinks below it
  TORCH_ARG(double, max_scale) = 16777216.0;  // the scale never grows above it
};

// The exponential moving average of the parameters, of the masters in fp32. After step t that had a
// gradient on some rank and was not skipped
//
//   ema += (1 - d) * (master - ema)
//   d = decay, or with a warm-up min(decay, (1 + t) / (10 + t))
//
// so that the first, random values are soon forgotten. It begins as the masters are, and follows
// all parameters, used or not. Module buffers are not averaged.
// Source of the warm-up: `num_updates` of TensorFlow's ExponentialMovingAverage.
struct EmaOptions {
  TORCH_ARG(double, decay) = 0.999;  // from 0 on, below 1
  TORCH_ARG(bool, warm_up) = true;   // a smaller decay in the first steps
};

// The format in which a gradient is sent to the rank that owns its shard.
enum class GradientWire {
  // Numbers of ZeroOptions::reduce_dtype, or of each parameter's dtype.
  kDtype,
  // 8-bit integers with one fp32 scale for each 256 values of a parameter, counted from its first
  // element: 1.016 bytes a value, with parameters padded to whole blocks. A rank
  // quantises what it has accumulated locally, once each time that it is sent, and the sum over
  // ranks is made in fp32. With s = max|x| / 127 of its block, a value x is received as
  // s * round(x / s), which differs from x by at most max|x| / 254 apart from fp32 rounding. Zeros
  // stay zeros. The error of a mean over ranks is at most the mean of these bounds. A NaN or an
  // infinity makes its whole block NaN, so that the step is skipped, or, with
  // skip_nonfinite(false), those 256 values are lost. CPU only. See kernels/block_int8.h.
  kBlockInt8,
};

// The part of a working parameter that is sent to the ranks of other machines after a step.
enum class GatherWire {
  // The parameter.
  kWhole,
  // The changes of the step, without loss: the receiver has the same bits. An fp32 parameter takes
  // 0.6 to 0.75 of its bytes with learning rates of 1e-4 to 1e-3, a bf16 one 0.25 to 0.45, and none
  // takes more. Each rank encodes its shard and decodes the rows that it receives, at about 1 GB/s
  // a core. Messages of up to 4 buckets are in memory, with overlap_gather those of all buckets,
  // and where the inner optimizer is not fused a copy of the shard. Rows for ranks on the same
  // machine, rows of GPUs and rows of Layout::kPerParameter are sent whole. step() throws where a
  // row differs from its owner's before the step, because some ranks changed parameters.
  kChanges,
};

// The options of a ZeroOptimizer; all ranks give the same.
struct ZeroOptions {
  // ---- Memory and speed: values change by no more than rounding, and docs/bits.md says when ----

  // 1: every rank can hold the averaged gradients in full. 2: only its shard of them. Masters are
  // sharded in both.
  TORCH_ARG(int64_t, stage) = 2;

  // Gradients are sent in buckets of about this many bytes. Larger buckets use the network better;
  // smaller ones start earlier and keep less in flight. Default: default_bucket_bytes() of
  // bookkeeping/plan.h.
  TORCH_ARG(std::optional<int64_t>, bucket_bytes) = std::nullopt;

  // kContiguous makes working parameters views of one flat arena, so that the gather writes them in
  // place. kPerParameter leaves the model's storage alone and pays a copy and an fp32 master for
  // it. kWholeParameters gives each parameter one owner, so that any optimizer may look at it as a
  // whole; parameter groups of zero::Muon, zero::Lamb and zero::Adafactor have it and no other.
  TORCH_ARG(Layout, layout) = Layout::kContiguous;

  // kWholeParameters: the cost of a step of a parameter of these sizes, 0 or more, in any unit;
  // owners are chosen so that both elements and costs are even. It must be equal on all ranks.
  // Default: newton_schulz_cost() of bookkeeping/whole_parameters.h for a matrix that Muon trains,
  // else the elements.
  TORCH_ARG(std::function<int64_t(c10::IntArrayRef sizes)>, owner_cost) = nullptr;

  // Update with the fused kernels when the inner optimizer is exactly torch's AdamW, Adam or SGD,
  // or zero::Lion. False always calls the inner optimizer's own step(), which rounds in a different
  // order; Lion's has the same bits.
  TORCH_ARG(bool, fused) = true;

  // step() returns while updated parameters are still being sent, which goes on during the next
  // forward pass. Call wait_for(module) before a module computes, and before you read or change its
  // parameters; everything else of ZeroOptimizer waits by itself.
  TORCH_ARG(bool, overlap_gather) = false;

  // How updated parameters are sent to other machines. kChanges pays where a rank's share of the
  // link is below about 2 Gbit/s.
  TORCH_ARG(GatherWire, gather_wire) = GatherWire::kWhole;

  // Promises that every rank uses every parameter in every step and makes the same calls with the
  // same options. The first step is agreed as always; from then on reduce_gradients(), norms, clips
  // and step() send no control messages, and each rank compares itself with its own first step
  // only. A rank that violates the promise throws; the others time out. The host does not wait for
  // a skipped step either: see step_skipped().
  //
  // On a GPU over NCCL, with a fused optimizer and a constant loss scale, an iteration from
  // backward() to step() can then be captured in a CUDA graph after at least one that was not.
  // Replays take learning rates from refresh_learning_rates(), all other options from the capture.
  // The caller orders the capture and each replay behind earlier work of the optimizer, copies of
  // save_checkpoint_async() included, and captures again after calls that replace parameters or
  // state, such as load_checkpoint(). Refused with overlap_gather, and with several ranks without
  // NCCL.
  TORCH_ARG(bool, static_graph) = false;

  // ---- Numerics ----

  // Whether a gradient is the mean or the sum of those of all ranks. kSum is refused with
  // GroupPlacement::averaged_over.
  TORCH_ARG(Reduction, reduction) = Reduction::kMean;

  // The dtype in which gradients are sent. Default: each parameter's own. The sum over ranks is
  // made in fp32 either way.
  TORCH_ARG(std::optional<c10::ScalarType>, reduce_dtype) = std::nullopt;

  // The format in which gradients are sent. kBlockInt8 is refused with reduce_dtype: it has no
  // dtype to choose.
  TORCH_ARG(GradientWire, gradient_wire) = GradientWire::kDtype;

  // Ranks on several machines exchange gradients in two levels where each machine has the same
  // number of ranks, one after the other (Group::topology()): a machine adds up its own gradients
  // first, in rank order, and the sums of the machines are added up in the order of machines.
  // False: every rank exchanges with every other, sums are in rank order, and bits depend on the
  // number of ranks alone. Over NCCL, which else adds fp32 gradients up in its own order, this
  // takes an all-to-all and memory for W rows of a bucket; sums of a norm stay NCCL's.
  TORCH_ARG(bool, two_level) = true;

  // In two levels with 16-bit gradients, a machine sends its sums to others in fp32. False: in the
  // dtype of the gradients, which is half the bytes, and rounds each sum once more. kBlockInt8
  // always encodes these sums once more.
  TORCH_ARG(bool, fp32_machine_sums) = true;

  // Under no_sync, keep the local sum of 16-bit gradients in fp32 (4 bytes per
  // element instead of 2) and round once when it is sent.
  TORCH_ARG(bool, no_sync_fp32) = false;

  // M > 0: a step has M micro-batches over all ranks, numbered from 0, and parameters, moments and
  // norms have the same bits on every number of ranks from 1 to M, on every layout of machines, and
  // after a load or recover() on another number. Each rank runs backward(loss) once for each number
  // of ZeroOptimizer::micro_batches(), in that order; the program computes on a micro-batch what
  // depends on its number alone, its examples and random numbers. The gradient is the sum over a
  // binary tree on the numbers, in fp32, divided by M, or not with Reduction::kSum:
  //
  //   sum(b, n) = sum(b, n/2) + sum(b + n/2, n/2)     n a power of 2, b a multiple of n
  //   sum(b, 1) = the gradient of micro-batch b       numbers from M on are left out
  //
  // A rank adds up the subtrees that it has whole and sends each: docs/exchanges.md has their
  // number. The sums are sent in fp32, unless M = W. The norm is added up exactly from squares of
  // blocks of 256 elements (kernels/exact_sum.h). There are as many messages as without. A
  // parameter, and with kPerParameter each rank's row of it, is filled up to a multiple of 256
  // elements, or to the next power of 2 where the parameter is smaller.
  //
  // Refused with meshes and placements, reduce_dtype, kBlockInt8, no_sync(), passes that are not of
  // backward(), a parameter's second gradient in one micro-batch, norms other than 2 and infinity,
  // collective calls between the micro-batches of a step, zero_grad() of the module where some
  // ranks have done all of theirs and others have not, and for groups that are stepped in pieces by
  // their own step(), whose bits depend on where a piece begins; with kWholeParameters they may.
  TORCH_ARG(int64_t, micro_batches) = 0;

  // Skip the step on all ranks when any gradient is NaN or infinite anywhere.
  TORCH_ARG(bool, skip_nonfinite) = true;

  // Leaves out steps whose gradient norm looks wrong, on all ranks or on none: see
  // zero/skip_rule.h. Each optimizer needs a rule of its own. A step sends 8 bytes more, and where
  // nothing else measures the 2-norm it passes over the gradient shard once more.
  TORCH_ARG(std::shared_ptr<SkipRule>, skip_if) = nullptr;

  // step() throws on all ranks when more steps than this were skipped in a row for non-finite
  // gradients under a loss scale that is constant or at its minimum; 0: never. Under a constant
  // scale the first skipped step warns. Where step() does not wait for the device (on a GPU, and
  // with static_graph), the error comes later: with a dynamic scale from the next backward(), with
  // a constant one from a step() up to 48 steps later.
  TORCH_ARG(int64_t, max_skipped_in_a_row) = 50;

  // Default: dynamic when a working parameter is fp16, else none (a constant 1); none with
  // skip_nonfinite(false) either, since a scale that cannot see overflows would only grow.
  TORCH_ARG(std::optional<LossScalerOptions>, loss_scaler) = std::nullopt;

  // The format of the moments of AdamW, Adam, SGD, zero::Lion and zero::Muon: exp_avg, exp_avg_sq
  // and the momentum. kBFloat16 takes 2 bytes for each in place of 4, and kInt8 1.016: 8-bit codes
  // with one fp32 scale for each 256 elements of a parameter. Parameters with fewer than 4096
  // elements keep fp32. Sums are made in fp32, and what a step stores is rounded up or down at
  // random, so that slow moments move as fast as in fp32. The random numbers depend on the step,
  // the element, and the parameter's name: bits do not depend on the number of ranks, buckets or
  // layouts, nor on what else a pipeline stage holds.
  //
  //   kInt8    a code q stands for (q / 127)^2 of the largest magnitude in its block, so that a
  //            value near the largest is off by at most 1.6 % and one of a hundredth of it by 16 %;
  //            exp_avg_sq is stored by its root, with (q / 255)^2
  //   both     max_exp_avg_sq of amsgrad stays fp32. Checkpoints have all moments in fp32, so that
  //            a run can go on in another format; saves and loads hold them in host memory,
  //            4/W bytes a moment, and save_checkpoint_async() returns when kInt8 is decoded. A
  //            NaN that a step lets through, with skip_nonfinite(false), takes its block with it.
  //
  // Refused for groups of other classes, and with fused(false) but for zero::Muon's. See
  // kernels/stored_state.h for formulas.
  TORCH_ARG(Moments, moments) = Moments::kFloat32;

  // Keeps masters of bf16 parameters in 2 bytes in place of 4, without loss: the working value is
  // the upper half of the fp32 master, rounded to nearest, and the shard has the lower half. Ties
  // are rounded away from zero and not to even, which differs for one master in 131,072; everything
  // else has the bits of a run with fp32 masters. Values that a program writes into the working
  // parameters change the upper halves, and with refresh_master_parameters() the masters are what
  // was written. inner() has no masters to read: see ZeroOptimizer::master(). With `ema` each step
  // joins the masters of one bucket after the other once more. Saves hold 4/W bytes a parameter
  // meanwhile. Exports, and loads without this option, round ties to even.
  //
  // Refused with fp16 parameters, with Layout::kPerParameter, and for groups without a fused
  // kernel. fp32 parameters are their masters, as always.
  TORCH_ARG(bool, split_masters) = false;

  // The dtype of gradient shards between a reduction and step(): kFloat, 4/W bytes a parameter, or
  // kBFloat16, 2/W. The sum over the ranks of a shard is made in fp32 and then rounded to nearest
  // even, and so is that over its replicas. Each further round of a step rounds once more: a pass
  // without no_sync(), or a second gradient of a parameter in one pass. Norms, clips and updates
  // read the rounded values, in fp32. If one rank sends one bf16 gradient a step, no bit differs
  // from kFloat. A reduction and an update need memory for one row of a bucket in fp32; parameter
  // groups without a fused kernel need that of their whole shards during step().
  TORCH_ARG(c10::ScalarType, gradient_shard_dtype) = at::kFloat;

  // Updates this rank's row of a bucket as soon as it is reduced, on the thread that runs the
  // backward pass, in place of in step(), and keeps no gradient shards: 4/W bytes a parameter less.
  // Parameters, moments and the EMA have the bits of a run without, and the loop stays backward()
  // and step(), which sends the new values. What it costs:
  //
  //   - The shards of buckets on their way, of 8 MiB of packed buckets and two more, and of more on
  //     a slow network, are in `buckets` of MemoryReport. A shard stays until step() where this
  //     rank has no gradient of a parameter in its row: only step() knows whether another rank has
  //     one.
  //   - From backward() to step() parameters are neither old nor new. A graph that needs the old
  //     value of one whose gradient is complete throws, as after any in-place update. Nothing sees
  //     it where a part that is recomputed reads the weight without a gradient.
  //   - Options of param_groups() count as they are when a pass sends its first bucket. step()
  //     throws where they have changed since.
  //   - The first bucket of a step waits until a save or a protected step has copied the shard.
  //   - On a GPU an update is enqueued behind what the pass had to do when the bucket was packed.
  //     Code that reads a weight on another stream, and has no gradient for it, must be waited for.
  //   - What is updated stays so. A backward pass that throws, on any rank, is a failure of all
  //     ranks: go on from a checkpoint with a new optimizer, or by recover() with `protect`.
  //
  // A step has one pass of backward(), and one gradient of each parameter in it, so that no_sync(),
  // a second pass, other passes (loss.backward(), or that of another optimizer that reaches these
  // parameters, as of a GAN's generator), a weight that a checkpointed part shares, and all
  // collective calls but step() between backward() and step() are refused. So are, since they need
  // the whole gradient before the update: skip_nonfinite(true), the default, loss_scaler, skip_if,
  // reduce_gradients(), clips, norms and gradient(); stage 1 gathers no averaged gradients. Refused
  // as well: micro_batches, GatherWire::kChanges, replicated_over, groups without a fused kernel,
  // and a capture in a CUDA graph.
  TORCH_ARG(bool, update_in_backward) = false;

  // Keeps an average of the parameters, split over ranks as the masters are: 4/W bytes a parameter
  // and a pass over the shard in each step. See ZeroOptimizer::use_ema(). Checkpoints have it, and
  // export_model() can write it. It begins again as the masters are where a checkpoint without one
  // is loaded, and where refresh_master_parameters() comes before the first step. t of EmaOptions
  // is that of the checkpoint then, so a long run has no warm-up.
  TORCH_ARG(std::optional<EmaOptions>, ema) = std::nullopt;

  // ---- Parallelism beyond one data-parallel group ----

  // The ranks that train one model together, whatever they hold of it: calls, skipped steps, loss
  // scale and clip norm are agreed over it, and "every rank" in comments means these. Default: the
  // optimizer's group. All groups below are parts of it. If ranks hold different parameters
  // (experts, stages), those that share shards of one group must have equally shaped parameters in
  // all groups.
  TORCH_ARG(std::optional<Group>, mesh_group) = std::nullopt;

  // The ranks that hold a parameter group of the inner optimizer; see GroupPlacement. Default:
  // all ranks of the optimizer's group, in one copy.
 public:
  ZeroOptions& placement(int64_t parameter_group, GroupPlacement placement) {
    placements_.insert_or_assign(parameter_group, std::move(placement));
    return *this;
  }
  const std::map<int64_t, GroupPlacement>& placements() const { return placements_; }

  // The layout of one parameter group of the inner optimizer.
  ZeroOptions& layout(int64_t parameter_group, Layout layout) {
    layouts_.insert_or_assign(parameter_group, layout);
    return *this;
  }
  const std::map<int64_t, Layout>& layouts() const { return layouts_; }

  // The moments of one parameter group of the inner optimizer.
  ZeroOptions& moments(int64_t parameter_group, Moments moments) {
    group_moments_.insert_or_assign(parameter_group, moments);
    return *this;
  }
  const std::map<int64_t, Moments>& group_moments() const { return group_moments_; }

  // Which tensors are parts of larger ones, so that a checkpoint can be loaded with another degree
  // of tensor parallelism. Nothing but checkpoints asks for it.
  ZeroOptions& tensor_parts(TensorParts parts) {
    tensor_parts_ = std::move(parts);
    return *this;
  }
  const std::optional<TensorParts>& tensor_parts() const { return tensor_parts_; }

 private:
  std::map<int64_t, GroupPlacement> placements_;
  std::map<int64_t, Layout> layouts_;
  std::map<int64_t, Moments> group_moments_;
  std::optional<TensorParts> tensor_parts_;

  // ---- Safety ----

  // Promises that an inner optimizer of a class that this library does not know treats every
  // element by itself, so that it may be given flat pieces of parameters, and that its step() finds
  // them in param_groups() each time, which one around another optimizer does not, and updates them
  // in place: step() throws where it puts other memory into them, and warns once where ten calls
  // have changed none. For checkpoints its state's class must override serialize():
  // docs/checkpoints.md says how its tensors are cut. Ranks compare all its options at
  // construction, and before each step the learning rate alone: get_lr(), or without one what
  // serialize() writes as "lr".
  TORCH_ARG(bool, elementwise) = false;

  // Keeps this rank's shard of every n-th step (masters, optimizer state, counters, options; rank
  // 0's module buffers; the state of skip_if()) also in the memory of another rank, on another
  // machine where there is one, so that ZeroOptimizer::recover() can go on after a rank has died;
  // 0: never. It is copied and sent in the background, with a checksum, and replaces the one before
  // only when it is whole on all ranks; a protected step waits until the last one is. The
  // constructor and load_checkpoint() protect their state before they return; what
  // load_plain_state() and refresh_master_parameters() change is protected with the next protected
  // step. Each one sends the bytes S of this rank's shard, and the host keeps 4 S; docs/recovery.md
  // has all costs. Plain data parallelism only, and not with static_graph.
  TORCH_ARG(int64_t, protect) = 0;
};

}  // namespace zero
