// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The collective calls: what is agreed, sent and computed, in order.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <deque>
#include <sstream>
#include <utility>

#include "zero/inner/classes.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"
#include "zero/optimizer/impl.h"
#include "zero/update/replica_check.h"

namespace zero {
namespace {

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& list) {
  std::vector<at::Tensor> result;
  for (const NamedTensor& item : list) result.push_back(item.tensor);
  return result;
}

// What must be equal on all ranks before they are sent: a transport that is
// given different sizes aborts or hangs.
std::string shapes_of(const std::vector<NamedTensor>& list) {
  std::ostringstream text;
  for (const NamedTensor& item : list) {
    text << (item.tensor.is_same(list.front().tensor) ? "" : ", ") << item.name << " "
         << item.tensor.sizes() << " " << item.tensor.scalar_type();
  }
  return text.str();
}

}  // namespace

void ZeroOptimizer::Impl::gather_full_gradients(const Agreement& agreement) {
  const bool gather = options.stage() == 1 && options.stage1_full_gradients();
  if (gather && agreement.rounds > gathered_rounds) {
    full_gradients.gather(reducer, agreement.used);
    gathered_rounds = agreement.rounds;
  }
}

void ZeroOptimizer::Impl::measure(double norm_type, int64_t rounds) {
  if (is_measured(rounds) && measured_type == norm_type) return;
  const TraceRange range("norm");
  measured = shard_norm(shards.segments(), domains.norm_weights, norm_type, device, *links->norm);
  measured_type = norm_type;
  measured_rounds = rounds;
}

at::Tensor ZeroOptimizer::Impl::clipped_norm(double norm_type, int64_t rounds) {
  measure(norm_type, rounds);
  return measured->norm * coefficient;
}

void ZeroOptimizer::Impl::apply_clip(double max_norm, const at::Tensor& norm) {
  // A NaN stays a NaN. Never read here: the device knows it when the update runs.
  coefficient.mul_((max_norm / (norm + 1e-6)).clamp_max_(1.0));
}

void ZeroOptimizer::Impl::renew_clips(int64_t rounds) {
  if (clips.empty() || std::exchange(clipped_rounds, rounds) == rounds) return;
  coefficient.fill_(1.0);
  for (const Clip& c : clips) apply_clip(c.max_norm, clipped_norm(c.norm_type, rounds));
}

at::Tensor ZeroOptimizer::Impl::clip(std::optional<double> max_norm, double norm_type) {
  const auto check = [&] {
    TORCH_CHECK(!max_norm || *max_norm > 0, "max_norm: expected a number above 0, got ", *max_norm,
                "; pass nullopt to measure only");
    TORCH_CHECK(norm_type > 0, "norm_type: expected a number above 0 or infinity, got ", norm_type,
                "; 2 is the usual one");
    verify_untouched();
  };
  const TraceRange range("clip");
  // Arguments must agree, since the coefficient is computed on every rank.
  const Agreement agreement =
      agree(Call::kClipGradNorm, check,
            "max_norm " + (max_norm ? exact_text(*max_norm) : std::string("nullopt")) +
                ", norm_type " + exact_text(norm_type));
  gather_full_gradients(agreement);
  if (agreement.rounds == 0) {
    // After passes in which every rank dropped every layer there is nothing to clip, rightly.
    TORCH_CHECK(
        !max_norm || agreement.passes, "rank ", links->rank(),
        ": clip_grad_norm_(): expected gradients since the last step, got no backward pass "
        "on any rank, so nothing would be clipped; call it after the last backward() and before "
        "step()");
    return at::zeros({}, coefficient.options());
  }
  renew_clips(agreement.rounds);
  const at::Tensor norm = clipped_norm(norm_type, agreement.rounds);
  if (max_norm) {
    clips.push_back({*max_norm, norm_type});
    clipped_rounds = agreement.rounds;
    apply_clip(*max_norm, norm);
  }
  return norm;
}

void ZeroOptimizer::Impl::check_groups(const ParamGroups& groups) const {
  const auto& expected = group_members;
  for (size_t g = 0; g < std::max(groups.size(), expected.size()); ++g) {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
    TORCH_CHECK(
        g < expected.size() && g < groups.size() &&
            std::equal(groups[g].params().begin(), groups[g].params().end(), expected[g].begin(),
                       expected[g].end(), same),
        "parameter group ", g, ": expected the ", expected.size(), " groups of construction, got ",
        groups.size(), " of which this one was added, removed or changed afterwards (",
        g < groups.size() ? groups[g].params().size() : 0,
        " parameters); give all parameters to the inner optimizer and make a new optimizer");
  }
}

void ZeroOptimizer::Impl::step(const ParamGroups& groups) {
  const auto check = [&] {
    check_groups(groups);
    shards.push_options(groups);
    verify_untouched();
    table.verify_registered(module);
  };
  // A schedule that differs between ranks would tear the model apart shard by shard.
  std::vector<std::string> by_domain(domains.list.size());
  for (size_t g = 0; g < groups.size() && g < domains.of_group.size(); ++g) {
    std::string& text = by_domain[domains.of_group[g]];
    text += (text.empty() ? "options " : "; ") + options_text(groups[g].options());
  }
  const Agreement agreement = agree(Call::kStep, check, {}, std::move(by_domain));
  const TraceRange range("step");
  if (agreement.rounds == 0) {
    counts.add_nothing();
    finish_step();
    return;
  }
  if (options.static_graph()) static_rounds = agreement.rounds;
  gather_full_gradients(agreement);
  update(agreement);
  finish_step();
  // Elsewhere ranks would not all have the same order.
  if (domains.uniform) reducer.expect_unused(agreement.used);
  settled = !scaler.dynamic();
  if (!settled) counts.fetch();
  if (!shards.deferred()) settle();
  ++calls_of_step;
  watch_skips();
  const int64_t every = options.check_replicas_every();
  if (every > 0 && calls_of_step % every == 0) check_replicas_now();
}

void ZeroOptimizer::Impl::settle() {
  if (std::exchange(settled, true)) return;
  scaler.update(counts.fetched().skipped);
  reducer.set_scale(1.0 / scaler.scale());
}

void ZeroOptimizer::Impl::watch_skips() {
  // A dynamic scale has a limit of its own.
  if (scaler.dynamic() || !options.skip_nonfinite()) return;
  if (!shards.deferred()) {
    const StepCounts::Values values = counts.read();
    skip_watch.see(values.steps, values.skipped_steps);
    return;
  }
  // What was copied kSampled steps ago has long arrived, so nothing waits; and all ranks read the
  // counts of the same step.
  constexpr int64_t kSampled = 16;
  if (calls_of_step % kSampled != 0 || is_capturing(device)) return;
  if (std::exchange(skips_fetched, true)) {
    const StepCounts::Values values = counts.fetched();
    skip_watch.see(values.steps, values.skipped_steps);
  }
  counts.fetch();
}

void ZeroOptimizer::Impl::update(const Agreement& agreement) {
  at::Tensor nonfinite;
  renew_clips(agreement.rounds);
  if (options.skip_nonfinite()) {
    if (!is_measured(agreement.rounds)) measure(2.0, agreement.rounds);
    nonfinite = measured->nonfinite;
  }
  if (shards.deferred()) {
    // A skipped step sends rows that did not change: rarer than waiting for the device would be.
    counts.add(nonfinite);
  } else {
    const bool skipped = nonfinite.defined() && nonfinite.item<double>() != 0;
    counts.add(skipped);
    if (skipped) return;
    nonfinite = at::Tensor();
  }
  start_gathers([&](const ShardOptimizer::RowWritten& written) {
    shards.update(agreement.used, coefficient, nonfinite, written);
  });
  if (!options.overlap_gather()) finish_gathers();
  for (size_t i = 0; i < agreement.used.size(); ++i) {
    // A graph that saved the old values must notice, as with any in-place update.
    if (agreement.used[i] != 0) torch::autograd::impl::bump_version(table.parameters()[i].tensor);
  }
  table.remember();
}

void ZeroOptimizer::Impl::start_gathers(
    const std::function<void(const ShardOptimizer::RowWritten&)>& write) {
  // Each bucket of Layout::kPerParameter has a buffer of its own until its gather is done: without
  // a limit, all of them together would be another copy of the model.
  constexpr size_t kBuffers = 4;
  std::deque<int64_t> buffered;
  try {
    write([&](int64_t bucket, const at::Tensor& rows) {
      if (options.layout() == Layout::kPerParameter) {
        if (buffered.size() == kBuffers) {
          finish_gather(buffered.front());
          buffered.pop_front();
        }
        buffered.push_back(bucket);
      }
      Communicator& ranks = *links->domains[plan.arena_of(plan.buckets[bucket]).domain].data;
      gathers[bucket] = {rows,
                         ranks.gather_rows(rows, "parameter bucket " + std::to_string(bucket))};
    });
  } catch (const std::exception& error) {
    // The others wait for rows that will not come, and some shards are updated
    // while others are not: no way back.
    if (!links->failed().empty()) throw;
    const std::string text = "the update of this rank's shard failed: " + error_text(error);
    links->abort(text);
    TORCH_CHECK(false, text);
  }
}

void ZeroOptimizer::Impl::finish_gather(int64_t bucket) {
  Gather gather = std::exchange(gathers[bucket], {});
  if (!gather.rows.defined()) return;
  const TraceRange range("gather", bucket);
  gather.pending.wait();
  arena.publish(bucket, gather.rows);
}

void ZeroOptimizer::Impl::finish_gathers() {
  for (size_t b = 0; b < gathers.size(); ++b) finish_gather(static_cast<int64_t>(b));
}

void ZeroOptimizer::Impl::wait_for(const torch::nn::Module& used) {
  for (const int64_t parameter : table.managed_by(used)) {
    for (const int64_t b : plan.parameter_buckets[parameter]) finish_gather(b);
  }
}

void ZeroOptimizer::Impl::finish_step() {
  for (size_t i = 0; i < table.parameters().size(); ++i) {
    reducer.set_average_aside(static_cast<int64_t>(i));
  }
  reducer.consume();
  gathered_rounds = 0;
  measured.reset();
  if (!clips.empty()) coefficient.fill_(1.0);
  clips.clear();
  scaled = false;
}

void ZeroOptimizer::Impl::zero_grad() {
  const bool local_only = reducer.rounds_needed() == 0 && !reducer.any_used() && clips.empty() &&
                          broken_backward.empty() && problem.empty() && !refused;
  if (!local_only) {
    agree(Call::kZeroGrad);
    broken_backward.clear();
  }
  finish_step();
  for (const Parameter& p : table.parameters()) p.tensor.mutable_grad().reset();
}

at::Tensor ZeroOptimizer::Impl::gather_parameter(const at::Tensor& parameter, bool gradient) {
  const int64_t index = table.find(parameter);
  const auto check = [&] {
    table.index_of(parameter);
    verify_untouched();
  };
  std::vector<std::string> by_domain(domains.list.size());
  if (index >= 0) by_domain[domain_of[index]] = "parameter " + table.parameters()[index].name;
  const Agreement agreement =
      agree(gradient ? Call::kGradient : Call::kMaster, check, {}, std::move(by_domain));
  if (gradient) {
    gather_full_gradients(agreement);
    if (agreement.used[index] == 0) return {};
  }
  const Parameter& p = table.parameters()[index];
  at::Tensor result = at::empty_strided(p.tensor.sizes(), p.strides,
                                        p.tensor.options().dtype(at::kFloat).requires_grad(false));
  for (int64_t b : plan.parameter_buckets[index]) {
    const Bucket& bucket = plan.buckets[b];
    Communicator& ranks = *links->domains[domain_of[index]].data;
    at::Tensor rows = pool.take(plan.bucket_numel(bucket), at::kFloat)
                          .view({ranks.world_size(), bucket.row_numel});
    rows.select(0, ranks.rank()).copy_(gradient ? reducer.shard(b) : shards.master_row(b));
    ranks.gather_rows(rows, std::string(gradient ? "gradient" : "master") + " of " + p.name).wait();
    std::vector<at::Tensor> tensors(bucket.slots.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (bucket.slots[i].parameter == index) tensors[i] = result;
    }
    copy_out_of_bucket(plan, bucket, rows, tensors);
    pool.give(rows);
  }
  return result;
}

void ZeroOptimizer::Impl::check_replicas_now() {
  finish_gathers();  // of this very step, with overlap_gather
  if (domains.uniform) {
    check_working_parameters(table, shards, links->rank(), *links->control,
                             [](int64_t) { return true; });
    return;
  }
  links->check_each_domain([&](int64_t domain, Communicator& ranks) {
    check_working_parameters(table, shards, ranks.rank(), ranks,
                             [&](int64_t p) { return domain_of[p] == domain; });
  });
}

void ZeroOptimizer::Impl::refresh_masters() {
  agree(
      Call::kRefreshMasters, [&] { verify_shapes(); }, {}, at_home(shapes_of(table.frozen())));
  at::NoGradGuard no_grad;
  arena.attach();
  broadcast_parameters();
  broadcast_from_first(tensors_of(table.frozen()), links->home, "frozen parameters");
  shards.read_masters();
  table.remember();
}

void ZeroOptimizer::Impl::refresh_working() {
  agree(Call::kRefreshWorking, [&] { verify_shapes(); });
  // An fp32 arena is its masters' home: values from elsewhere must not get in.
  arena.attach(/*keep_values=*/false);
  start_gathers([&](const ShardOptimizer::RowWritten& written) { shards.write_working(written); });
  finish_gathers();
  for (const Parameter& p : table.parameters()) torch::autograd::impl::bump_version(p.tensor);
  table.remember();
}

void ZeroOptimizer::Impl::broadcast_buffers() {
  agree(Call::kBroadcastBuffers, nullptr, {}, at_home(shapes_of(table.buffers())));
  broadcast_from_first(tensors_of(table.buffers()), links->home, "buffers");
}

}  // namespace zero
