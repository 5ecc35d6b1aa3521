// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The exact norm of a gradient whose parts lie on many ranks under any mix of tensor, expert,
// pipeline, sharded and replicated data parallelism, and clipping by it. Needs no ZeroOptimizer;
// inside one, use its clip_grad_norm_() and ZeroOptions::placement().
//
//   auto groups = zero::group_parameters_for_norm({
//       {attention->weight, zero::Placement().sharded_over({mesh.group({"tp"})})},
//       {norm->weight, zero::Placement().replicated_over({mesh.group({"tp"})})}});
//   for (...) {
//     loss.backward();  // and whatever averages gradients over data ranks
//     at::Tensor norm = zero::clip_grad_norm_(groups, 1.0, 2.0, mesh.group({"pp"}));
//     optimizer.step();
//   }
//
// With g the gradient of one whole model, every element once, whichever rank holds it:
//
//   norm = (sum over dense |g|^p + sum over experts |g|^p)^(1/p),  or max |g| for p = infinity
//
// Every rank adds up its own part; parts are summed over the groups that the parameter is sharded
// over and over nothing that it is replicated over, then over pipeline stages; the root is taken
// once, at the end. Sums are made in double whatever the gradients' dtype: 300 in fp16 and 1e19 in
// fp32 have finite norms, and how parameters are cut changes nothing but the last bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <optional>
#include <vector>

#include "zero/process_group.h"

namespace zero {

// Says which ranks hold parts or copies of one tensor that this rank holds: a parameter is sharded
// over the ranks that hold different parts of it, and replicated over those that hold copies.
// Pipeline stages hold different parameters; that is no part of a placement.
//
//   parameter                          placement
//   tensor-parallel matrix             sharded_over({mesh.group({"tp"})})
//   layer norm beside it               replicated_over({mesh.group({"tp"})})
//   shard of either over data ranks    sharded_over({mesh.group({"dp_shard", "tp"})}), or dp_shard
//   expert                             sharded_over({mesh.group({"ep"})}).expert(true)
//   embedding shared by two stages     owner(true) on one of them, owner(false) on the other
struct Placement {
  // Every rank of these groups holds a different part of the parameter. Best one group for all
  // dimensions together: several are reduced one after the other, with a message each.
  TORCH_ARG(std::vector<Group>, sharded_over);

  // Every rank of these groups holds the same values and the same gradient, which counts once.
  // Nothing is sent over them; they are checked not to overlap with sharded_over.
  TORCH_ARG(std::vector<Group>, replicated_over);

  // An expert's norm is added up apart from that of dense parameters.
  TORCH_ARG(bool, expert) = false;

  // False on all ranks but one pipeline stage's for a parameter that stages share: it is clipped
  // here and counted there.
  TORCH_ARG(bool, owner) = true;
};

// A parameter whose gradient counts in a norm, and the groups that hold parts or copies of it.
struct NormParameter {
  // Undefined: this rank has no part of such a parameter, but its peers may. See below.
  at::Tensor tensor;
  Placement placement;
};

// Parameters whose gradients are measured together.
struct GradNormGroup {
  std::vector<at::Tensor> parameters;  // may be empty
  std::vector<Group> sharded_over;     // in an order that all ranks agree on, without groups of 1
  bool expert = false;
  bool owner = true;  // false: clipped, but not counted
  at::Device device = at::kCPU;
  c10::ScalarType dtype = at::kFloat;  // of the gradients, or of the parameters without one
};

// Not collective. Groups parameters by the groups they are sharded over, kind, owner, device and
// gradient dtype. Call it once; gradients may come, go and change later.
//
// All ranks of a group must know that it is reduced over: a rank without a part of any parameter
// sharded over it, for example without experts, lists one with an undefined tensor. Groups are the
// same if their names and ranks are, and groups of one role need one name on all ranks: make each
// once, with zero::Mesh.
//
// Throws c10::Error for a parameter given twice, one that is not of a real floating dtype, and
// groups of one placement that share more ranks than this one: such a rank would count twice.
std::vector<GradNormGroup> group_parameters_for_norm(const std::vector<NormParameter>& parameters);

// Collective over every group that parameters are sharded over, and over `pipeline_group` where
// given (stages without parameters take part). Returns the `norm_type`-norm before clipping, 0-dim
// double, equal on every rank, on the device of the first group, or the CPU without any.
// A missing gradient counts as zeros, and nothing is allocated for it; without any on any rank the
// norm is 0. Ranks may differ in the dtypes of their gradients.
//
// `max_norm` given: gradients are multiplied in place by min(1, max_norm / (norm + 1e-6)), in fp32
// for 16-bit ones; their bits are untouched where that is 1. nullopt only measures. As in torch, a
// norm that is NaN makes every gradient NaN, and one that is infinite makes them 0, or NaN where
// they are infinite; look at the norm before stepping.
//
// Sends one message of 32 bytes per distinct set of groups (16 for infinity), one more per further
// group in a set of several, and one for the pipeline. Those of sharded parameters are under way
// while the rest is measured. Process groups are made by the first call and kept by the Group
// objects. The host never waits for a GPU, except at a Gloo group's messages.
//
// Throws c10::Error for max_norm <= 0 or NaN, norm_type <= 0 or NaN, and failed communication. A
// rank that does not call makes the others throw after their group's timeout.
at::Tensor clip_grad_norm_(const std::vector<GradNormGroup>& groups, std::optional<double> max_norm,
                           double norm_type = 2.0,
                           const std::optional<Group>& pipeline_group = std::nullopt);

}  // namespace zero
