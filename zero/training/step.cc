// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The collective calls of a step: what is agreed, sent and computed, in order.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/layout.h"
#include "zero/base/error_text.h"
#include "zero/comm/row_communicator.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"
#include "zero/skip_rule.h"
#include "zero/training/engine.h"

namespace zero {
namespace {

// Returns whether there are gradients that `call`, which `clips`, can clip. Throws where no rank
// ran a backward pass.
bool can_clip(const Engine& engine, Call call, const Agreement& agreement, bool clips) {
  if (agreement.rounds != engine.reducer.rounds_dropped()) return true;
  // After passes in which every rank dropped every layer there is nothing to clip, rightly.
  TORCH_CHECK(!clips || agreement.passes, "rank ", engine.comms->rank(), ": ", call_name(call),
              ": expected gradients since the last step, got no backward pass on any rank, so "
              "nothing would be clipped; call it after the last backward() and before step()");
  return false;
}

// Gives all working parameters a gradient that nothing computes with, until the end. A class around
// another optimizer has them in that one still, and would make NaN of the markers that they have.
class NoGradients {
 public:
  explicit NoGradients(const ParameterTable& table)
      : table_(table), gradients_(table.parameters().size(), at::empty({1}, at::kMeta)) {
    swap();
  }
  ~NoGradients() { swap(); }
  NoGradients(const NoGradients&) = delete;
  NoGradients& operator=(const NoGradients&) = delete;

 private:
  void swap() {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      std::swap(table_.parameters()[i].tensor.mutable_grad(), gradients_[i]);
    }
  }

  const ParameterTable& table_;
  std::vector<at::Tensor> gradients_;
};

void step_inner(const ParameterTable& table, ShardOptimizer& shards) {
  try {
    const NoGradients hidden(table);
    // A program that left autocast on has set the dtypes of its model's operators, not of a step's.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    shards.update_inner();
  } catch (const c10::Error& error) {
    const std::string text = error_text(error);
    TORCH_CHECK(text.find("meta") == std::string::npos,
                "inner optimizer: expected step() to read the gradients of its param_groups() "
                "alone, got ",
                optimizer_name(shards.raw_inner()),
                ", which has other parameters too; a class around another optimizer cannot be "
                "wrapped: ",
                text);
    throw;
  }
}

}  // namespace

void Engine::reduce_gradients() {
  const Agreement agreement = agree(Call::kReduceGradients, [&] { table.verify_unchanged(); });
  comms->close_on_error([&] { gather_full_gradients(agreement); });
  full_gradients.show();
}

void Engine::gather_full_gradients(const Agreement& agreement) {
  // With update_in_backward no call may read averaged gradients.
  if (options.update_in_backward()) return;
  if (options.stage() == 1) full_gradients.gather_rounds(agreement.rounds, reducer, agreement.used);
}

at::Tensor Engine::clip(std::optional<double> max_norm, double norm_type) {
  const auto check = [&] {
    TORCH_CHECK(!max_norm || *max_norm > 0, "max_norm: expected a number above 0, got ", *max_norm,
                "; pass nullopt to measure only");
    TORCH_CHECK(norm_type > 0, "norm_type: expected a number above 0 or infinity, got ", norm_type,
                "; 2 is the usual one");
    TORCH_CHECK(
        options.micro_batches() == 0 || norm_type == 2 || std::isinf(norm_type),
        "norm_type: expected 2 or infinity with micro_batches, since others are added up in "
        "an order that depends on the number of ranks, got ",
        norm_type);
    table.verify_unchanged();
  };
  const TraceRange range("clip");
  // Arguments must agree, since the coefficient is computed on every rank.
  const Agreement agreement =
      agree(Call::kClipGradNorm, check,
            {"max_norm " + (max_norm ? exact_text(*max_norm) : std::string("nullopt")) +
                 ", norm_type " + exact_text(norm_type),
             {}});
  const bool clips = can_clip(*this, Call::kClipGradNorm, agreement, max_norm.has_value());
  at::Tensor norm;
  comms->close_on_error([&] {
    gather_full_gradients(agreement);
    if (!clips) {
      norm = at::zeros({}, clipping.coefficient().options());
      return;
    }
    clipping.replay_clips(agreement.rounds);
    norm = clipping.norm(norm_type, agreement.rounds);
    if (max_norm) clipping.clip(*max_norm, norm_type, norm, agreement.rounds);
  });
  return norm;
}

void Engine::clip_value(double value) {
  const auto check = [&] {
    TORCH_CHECK(value > 0, "clip_value: expected a number above 0, got ", value);
    table.verify_unchanged();
  };
  const Agreement agreement =
      agree(Call::kClipGradValue, check, {"clip_value " + exact_text(value), {}});
  const bool clips = can_clip(*this, Call::kClipGradValue, agreement, /*clips=*/true);
  comms->close_on_error([&] {
    gather_full_gradients(agreement);
    if (!clips) return;
    clipping.replay_clips(agreement.rounds);
    clipping.clip_value(value, agreement.rounds);
  });
}

void Engine::step(const ParamGroups& groups, const std::function<void()>& also,
                  const std::string& argument) {
  // Why options could not be described; check() has a better text where it finds the same.
  std::string options_problem;
  const auto check = [&] {
    shards.groups().check(groups);
    TORCH_CHECK(options_problem.empty(), options_problem);
    shards.groups().push(groups);
    shards.groups().check_captured_rates(groups);
    table.verify_unchanged();
    table.verify_in_module(module);
    if (also) also();
  };
  // A schedule that differs between ranks would give each shard a different learning rate.
  std::vector<std::string> by_domain(domains.list.size());
  try {
    for (size_t g = 0; g < groups.size() && g < domains.of_group.size(); ++g) {
      std::string& text = by_domain[domains.of_group[g]];
      text += (text.empty() ? "options " : "; ") + step_options_text(groups[g].options());
    }
  } catch (...) {  // whatever an object of the user throws
    options_problem = text_of_caught();
  }
  const Agreement agreement = agree(Call::kStep, check, {argument, std::move(by_domain)});
  const TraceRange range("step");
  passes.check_by_hand();
  if (agreement.rounds == reducer.rounds_dropped()) {
    record.add_nothing();
    clear_gradients();
    return;
  }
  passes.check_used(agreement, domains.uniform);
  if (options.static_graph()) protocol.expect_rounds(agreement.rounds);
  if (is_capturing(protocol.device())) {
    readers.expect_replays();
    RowCommunicator(*comms->control).watch_peers();
  }
  at::Tensor skipped;
  bool updates = false;
  // Nobody can read p.grad() behind this call: stage 1 gathers no averages for it.
  comms->close_on_error([&] { updates = !decide_skip(agreement.rounds, skipped); });
  if (updates) update(agreement, skipped);
  clear_gradients();
  // Elsewhere ranks would not all have the same order.
  if (domains.uniform) reducer.expect_unused(agreement.used);
  record.finish_step();
}

bool Engine::decide_skip(int64_t rounds, at::Tensor& on_device) {
  at::Tensor nonfinite;
  clipping.replay_clips(rounds);
  const at::Tensor by_rule = ask_rule(rounds);
  if (options.skip_nonfinite()) nonfinite = clipping.nonfinite(rounds);
  if (shards.deferred()) {
    // A skipped step sends rows that did not change: rarer than waiting for the device would be.
    record.add(nonfinite, by_rule);
    on_device = nonfinite.defined() && by_rule.defined() ? nonfinite + by_rule
                : nonfinite.defined()                    ? nonfinite
                                                         : by_rule;
    return false;
  }
  const auto is_set = [](const at::Tensor& flag) {
    return flag.defined() && flag.item<double>() != 0;
  };
  const bool bad = is_set(nonfinite);
  const bool by_rule_alone = !bad && is_set(by_rule);
  record.add(bad, by_rule_alone);
  return bad || by_rule_alone;
}

void Engine::update(const Agreement& agreement, const at::Tensor& skipped) {
  comms->close_on_error(
      [&] {
        if (!shards.is_updating()) {
          shards.begin_update({clipping.bound(), clipping.coefficient()}, skipped, record.steps());
        }
        shards.mark_used(agreement.used);
        update_buckets();
      },
      kFailedUpdate);
  readers.forget();
  if (!options.overlap_gather()) gathers.finish();
  for (size_t i = 0; i < agreement.used.size(); ++i) {
    // A graph that saved the old values must notice, as with any in-place update.
    if (agreement.used[i] != 0) torch::autograd::impl::bump_version(table.parameters()[i].tensor);
  }
  table.remember();
  if (options.overlap_gather()) gathers.change_versions_at_end(agreement.used);
}

at::Tensor Engine::ask_rule(int64_t rounds) {
  if (!options.skip_if()) return {};
  const at::Tensor norm = clipping.unclipped_norm(rounds);
  const at::Tensor answer = options.skip_if()->leaves_out(norm.clone());
  TORCH_CHECK(answer.defined() && answer.dim() == 0 && answer.device() == norm.device(),
              "skip_if: expected a 0-dim answer on ", norm.device(), ", got ",
              answer.defined() ? c10::str("shape ", answer.sizes(), " on ", answer.device())
                               : std::string("an undefined one"));
  const at::Tensor flag = answer.ne(0).to(at::kDouble).reshape({1});
  comms->norm->all_reduce_sum(flag, "answers of skip_if").wait();
  return flag.select(0, 0);
}

void Engine::update_buckets() {
  gathers.begin();
  std::vector<int64_t> of_inner;
  // Backwards: the next forward pass needs first what backward came to last.
  for (int64_t b = std::ssize(plan.buckets) - 1; b >= 0; --b) {
    if (!shards.is_fused(b)) {
      of_inner.push_back(b);
      continue;
    }
    if (reducer.is_updated(b)) {
      gathers.start(b, shards.updated_rows(b));
      continue;
    }
    readers.wait(b);
    gathers.keep(b);
    gathers.start(b, shards.update(b));
    shards.update_ema(b);
  }
  if (of_inner.empty()) return;
  // The gathers of the others are under way while the inner optimizer steps.
  readers.wait(0);
  for (const int64_t b : of_inner) gathers.keep(b);
  step_inner(table, shards);
  for (const int64_t b : of_inner) {
    gathers.start(b, shards.update(b));
    shards.update_ema(b);
  }
}

void Engine::write_working_parameters(bool averages) {
  comms->close_on_error(
      [&] {
        gathers.begin();
        for (int64_t b = 0; b < std::ssize(plan.buckets); ++b) {
          gathers.start(b, averages ? shards.write_ema(b) : shards.write_working(b));
        }
      },
      kFailedUpdate);
  gathers.finish();
  for (const Parameter& p : table.parameters()) torch::autograd::impl::bump_version(p.tensor);
  table.remember();
}

void Engine::clear_gradients(bool end_of_step) {
  reducer.consume();
  full_gradients.forget_rounds();
  clipping.reset();
  passes.clear(end_of_step);
  shards.end_update();
}

void Engine::zero_grad(bool set_to_none) {
  const MicroBatchSums* const micro_batches = reducer.micro_batches();
  const bool local_only = reducer.rounds_needed() == 0 && !reducer.any_used() &&
                          !clipping.has_clips() && !protocol.next_zero_grad_is_collective() &&
                          (micro_batches == nullptr || !micro_batches->is_begun());
  if (!local_only) {
    agree(Call::kZeroGrad);
    protocol.forget_broken_backward();
  }
  clear_gradients(/*end_of_step=*/false);
  // Else torch keeps the memory of a gradient, to which a program may be bound once.
  if (set_to_none) passes.forget_by_hand();
  for (const Parameter& p : table.parameters()) p.tensor.mutable_grad().reset();
}

}  // namespace zero
