// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Protected steps, and how the survivors of a failure become a group of their own.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/base/normal_tensors.h"
#include "zero/checkpoint.h"
#include "zero/inner/classes.h"
#include "zero/optimizer/impl.h"
#include "zero/recovery/gather_generation.h"
#include "zero/recovery/roll_call.h"

namespace zero {

struct ZeroOptimizer::Impl::Lifeline {
  Lifeline(const Group& group, const torch::optim::Optimizer& inner)
      : first_group(group),
        roll(group.make_store("recovery"), group.rank(), group.world_size(), group.timeout(),
             group.joins(), group.joins() ? std::vector<int>() : group.global_ranks()) {
    for (const auto& g : inner.param_groups()) first_options.push_back(g.options().clone());
  }

  // The group of those present at a call of the roll. Collective over them.
  Group group_of(const RollCall::Present& present) const {
    return first_group.with_members(present.ranks, name_of(present));
  }
  // It is part of the errors of its communicators, which number their ranks from 0.
  std::string name_of(const RollCall::Present& present) const;

  const Group first_group;
  // The options of construction: equal on all ranks, as those of survivors need not be.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> first_options;
  const std::shared_ptr<Generations> generations = std::make_shared<Generations>();
  RollCall roll;
};

std::string ZeroOptimizer::Impl::Lifeline::name_of(const RollCall::Present& present) const {
  constexpr size_t kNamed = 8;
  const std::vector<int>& numbers = first_group.global_ranks();
  bool same = true;
  std::string list;
  for (size_t r = 0; r < present.ranks.size(); ++r) {
    const auto n = static_cast<size_t>(present.ranks[r]);
    const int number = n < numbers.size() ? numbers[n] : present.ranks[r];
    same = same && number == static_cast<int>(r);
    if (r < kNamed) list += (r == 0 ? "" : ", ") + std::to_string(number);
  }
  if (present.ranks.size() > kNamed) {
    list += c10::str(" and ", present.ranks.size() - kNamed, " more");
  }
  const std::string name = c10::str("recovery ", roll.calls());
  return same ? name : name + " (numbered anew: RANK " + list + ")";
}

void ZeroOptimizer::Impl::start_protection(std::shared_ptr<Lifeline> former) {
  if (options.protect() == 0) return;
  lifeline = std::move(former);
  if (!lifeline) lifeline = std::make_shared<Lifeline>(group, shards.inner());
  protection = std::make_unique<Protection>(group, lifeline->generations, lifeline->roll.calls());
}

void ZeroOptimizer::Impl::finish_protection() {
  const std::string problem = protection->finish();
  if (!problem.empty()) comms->abort(problem);
}

std::pair<FileToSave, Manifest> ZeroOptimizer::Impl::protected_shard(
    const ParamGroups& groups, std::vector<int64_t>& bucket_of) const {
  FileToSave file = shard_file(bucket_of);
  if (comms->rank() == 0) {
    for (const NamedTensor& b : table.buffers()) {
      file.tensors.push_back({{b.name, b.name, "buffer", 0, b.tensor.numel(), 0}, b.tensor});
    }
  }
  bucket_of.resize(file.tensors.size(), ShardCopies::kOfNone);
  Manifest manifest = make_manifest({}, groups, /*mesh=*/nullptr);
  manifest.frozen.clear();  // what no step changes is on every rank
  manifest.run = run.id();
  return {std::move(file), std::move(manifest)};
}

void ZeroOptimizer::Impl::protect(const ParamGroups& groups) {
  record.follow_loss_scale();
  std::vector<int64_t> bucket_of;
  auto [file, manifest] = protected_shard(groups, bucket_of);
  protection->begin(std::move(manifest), std::move(file), bucket_of);
}

void ZeroOptimizer::Impl::protect_at_once(const ParamGroups& groups, const std::string& call) {
  protect(groups);
  run_on_all_ranks(*comms->control, call, [&]() -> std::string {
    const std::string problem = protection->finish();
    if (!problem.empty()) throw_error(protection->connection_failed(), problem);
    return {};
  });
  protection->keep_newest();
}

namespace {

// Which tensors of a protected step a rank needs: those that overlap its shard, and buffers.
std::function<bool(const ManifestTensor&)> needed_by(const ShardOptimizer& shards,
                                                     const ParameterTable& table) {
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> ranges;
  for (const SegmentTensors& s : shards.segments()) {
    ranges[table.parameters()[s.segment.parameter].name].emplace_back(
        s.segment.begin, s.segment.begin + s.segment.numel);
  }
  return [ranges = std::move(ranges)](const ManifestTensor& t) {
    if (t.kind == "buffer") return true;
    const auto found = ranges.find(t.owner);
    if (found == ranges.end()) return false;
    for (const auto& [begin, end] : found->second) {
      if (is_uncut(t.kind) || (t.begin < end && begin < t.begin + t.numel)) return true;
    }
    return false;
  };
}

Restorable choose(const std::vector<std::string>& holdings, const std::string& checkpoints) {
  try {
    return newest_restorable(holdings);
  } catch (const c10::Error& error) {
    std::string advice = "; start again from a checkpoint";
    if (!checkpoints.empty()) {
      const std::optional<std::string> newest = latest(checkpoints);
      advice += newest ? ": the newest is " + *newest : "; there is none in " + checkpoints;
    }
    TORCH_CHECK(false, "recover(): ", error_text(error), advice);
  }
}

}  // namespace

RollCall::Present ZeroOptimizer::Impl::leave_group() {
  // The failure may be that of a communicator of the caller's own: the others must notice too.
  comms->abort("rank " + std::to_string(comms->rank()) + " called recover()");
  passes.remove_hooks();
  protection.reset();
  try {
    gathers.finish();  // rows under way must not arrive in parameters that are set anew
  } catch (const std::exception&) {  // they will not
  }
  const auto can_restore = [](const std::vector<std::string>& holdings) {
    try {
      newest_restorable(holdings);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  };
  return lifeline->roll.call(holdings_text(*lifeline->generations), can_restore);
}

void ZeroOptimizer::Impl::throw_if_others_join() const {
  const std::vector<int> waiting = lifeline->roll.waiting();
  if (waiting.empty()) return;
  throw_communication_error(
      c10::str("process ", waiting.front(),
               " waits to join the job: call recover() on all ranks, which takes it in and goes "
               "back to the last protected step"));
}

std::unique_ptr<torch::optim::Optimizer> ZeroOptimizer::Impl::release() {
  protection.reset();
  passes.remove_hooks();
  std::unique_ptr<torch::optim::Optimizer> inner = shards.release_inner();
  reducer.release_shards();
  full_gradients.release();
  arena.release();
  return inner;
}

std::unique_ptr<ZeroOptimizer::Impl> ZeroOptimizer::Impl::make_again(const Group& over) {
  ParamGroups groups;
  for (size_t g = 0; g < group_members.size(); ++g) {
    // The options of the protected step are set when it is loaded.
    groups.emplace_back(group_members[g], lifeline->first_options[g]->clone());
  }
  std::unique_ptr<torch::optim::Optimizer> inner = release();
  std::unique_ptr<Impl> made;
  try {
    made = make_over(inner, over, groups, Frozen::kAll);
  } catch (...) {
    if (inner) shards.give_back_inner(std::move(inner));
    throw;
  }
  made->lifeline = lifeline;
  return made;
}

int64_t ZeroOptimizer::Impl::restore(const Generations& from, const Restorable& step,
                                     ParamGroups& groups, const std::string& call) {
  try {
    start_protection(lifeline);
    const auto reader =
        gather_generation(*comms->control, group, from, step, needed_by(shards, table));
    load_protected(*reader, groups, call);
    if (protection) protect_at_once(groups, call);
    return reader->manifest().steps + reader->manifest().skipped_steps;
  } catch (const std::exception& error) {
    comms->abort(error_text(error));  // nothing may train on with half of a step
    throw;
  }
}

std::unique_ptr<ZeroOptimizer::Impl> ZeroOptimizer::Impl::join(
    torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner, const Group& group,
    const ZeroOptions& options, const ParamGroups& groups) {
  const std::string who = "process " + std::to_string(group.rank()) + ", which joins a job: ";
  TORCH_CHECK(
      options.protect() > 0, who,
      "expected ZeroOptions::protect(n), got 0; the ranks of the job take a process in at a "
      "protected step");
  TORCH_CHECK(inner != nullptr, who, "inner optimizer: expected one, got a null pointer");
  const auto lifeline = std::make_shared<Lifeline>(group, *inner);
  const RollCall::Present present = lifeline->roll.join(holdings_text(*lifeline->generations));
  const Restorable step = choose(present.texts, /*checkpoints=*/{});
  std::unique_ptr<Impl> made =
      make(module, inner, lifeline->group_of(present), options, Frozen::kAll);
  made->lifeline = lifeline;
  for (const auto& g : groups) made->group_members.push_back(g.params());
  // The caller's keep the options of construction, which a schedule starts from.
  ParamGroups restored = groups;
  made->protocol.fail_stop(
      [&] { made->restore(*lifeline->generations, step, restored, "the constructor"); });
  return made;
}

RecoveryReport ZeroOptimizer::recover(const std::string& checkpoints) {
  const NormalTensors normal;
  const at::NoGradGuard no_grad;
  const std::shared_ptr<Impl::Lifeline> lifeline = impl_->lifeline;
  TORCH_CHECK(lifeline != nullptr, "rank ", impl_->comms->rank(),
              ": recover(): expected ZeroOptions::protect(n), got 0; no other rank has a copy of "
              "what a dead one held");
  TORCH_CHECK(
      impl_->group.failures() > impl_->failures_before || impl_->protocol.asks_for_recovery() ||
          !lifeline->roll.waiting().empty(),
      "rank ", lifeline->first_group.global_rank(),
      ": recover(): expected a rank that ended or does not answer, a connection that failed, or a "
      "process that waits to join, got none of them: this optimizer and the communicators of its "
      "group work. What is no zero::CommunicationError would be thrown again after going back");
  while (true) {
    RollCall::Present present;
    try {
      present = impl_->leave_group();
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "rank ", lifeline->first_group.global_rank(),
                  ": recover(): ", error_text(error));
    }
    const Restorable step = choose(present.texts, checkpoints);
    try {
      impl_ = impl_->make_again(lifeline->group_of(present));
      RecoveryReport report;
      report.members = present.ranks;
      impl_->protocol.fail_stop([&] {
        report.steps = impl_->restore(*lifeline->generations, step, param_groups_, "recover()");
      });
      return report;
    } catch (const c10::Error&) {
      // One that died meanwhile is on no further list.
      if (!lifeline->roll.lost_one_of(present.ranks)) throw;
    }
  }
}

}  // namespace zero
