// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/recovery.h"

#include <c10/util/Exception.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/match/part_reader.h"
#include "zero/optimizer/included_states.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/optimizer/shard_file.h"
#include "zero/optimizer/staging.h"
#include "zero/skip_rule.h"

namespace zero {

struct Recovery::Lifeline {
  Lifeline(const Group& group, const torch::optim::Optimizer& inner)
      : first_group(group),
        roll(group.make_store("recovery"), group.rank(), group.world_size(), group.timeout(),
             group.joins(), group.joins() ? std::vector<int>() : group.global_ranks()) {
    for (const auto& g : inner.param_groups()) first_options.push_back(g.options().clone());
  }

  // The group of those present at a call of the roll. Collective over them.
  Group group_of(const RollCall::Present& present) const {
    // Whoever has been a rank of the job holds a protected step.
    std::vector<int> newcomers;
    for (size_t r = 0; r < present.texts.size(); ++r) {
      if (present.texts[r].empty()) newcomers.push_back(static_cast<int>(r));
    }
    return first_group.with_members(present.ranks, name_of(present), std::move(newcomers));
  }
  // It is part of the errors of its communicators, which number their ranks from 0.
  std::string name_of(const RollCall::Present& present) const;
  // add_param_group() has given some that construction did not know.
  void learn_groups(const ParamGroups& groups) {
    for (size_t g = first_options.size(); g < groups.size(); ++g) {
      first_options.push_back(groups[g].options().clone());
    }
  }

  const Group first_group;
  // The options that groups began with: equal on all ranks, as those of survivors need not be.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> first_options;
  const std::shared_ptr<Snapshots> snapshots = std::make_shared<Snapshots>();
  RollCall roll;
};

std::string Recovery::Lifeline::name_of(const RollCall::Present& present) const {
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
  const std::string name = "recovery " + std::to_string(roll.calls());
  return same ? name : name + " (numbered anew: RANK " + list + ")";
}

namespace {

// The state of the rule of ZeroOptions::skip_if() in a protected step.
const std::string kSkipRule = kStatePrefix + std::string("skip_if");

// The tensors of a protected step that overlap this rank's shard.
NeededTensors needed_by(const ShardOptimizer& shards, const ParameterTable& table) {
  NeededTensors needed;
  for (const SegmentTensors& s : shards.segments()) {
    const std::string& name = table.parameters()[s.segment.parameter].name;
    needed.add({name, {{name, s.segment.begin, s.segment.numel}}, name});
  }
  return needed;
}

std::string newest_text(const std::string& checkpoints) {
  if (checkpoints.empty()) return {};
  try {
    const std::optional<std::string> newest = latest(checkpoints);
    return newest ? ": the newest is " + *newest : "; there is none in " + checkpoints;
  } catch (const c10::Error& error) {
    return "; which is the newest is not known: " + error_text(error);
  }
}

CompleteSnapshot choose(const std::vector<std::string>& holdings, const std::string& checkpoints) {
  try {
    return newest_complete(holdings);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "recover(): ", error_text(error), "; start again from a checkpoint",
                newest_text(checkpoints));
  }
}

// A rank that died within resize_rows() leaves parameters of which no protected step knows the
// size.
void check_sizes(const Manifest& manifest, const ParameterTable& table, const std::string& call) {
  std::unordered_map<std::string, const ManifestParameter*> stored;
  for (const ManifestParameter& p : manifest.parameters) stored.emplace(p.name, &p);
  for (const Parameter& p : table.parameters()) {
    const auto found = stored.find(p.name);
    TORCH_CHECK(found == stored.end() || found->second->shape == p.sizes, call, ": parameter ",
                p.name, ": expected shape ", at::IntArrayRef(found->second->shape),
                ", as in the last protected step, got ", at::IntArrayRef(p.sizes),
                ": a rank ended within resize_rows(), which is final; start again from a "
                "checkpoint");
  }
}

// A rank that died within freeze() leaves frozen parameters with values of after the protected
// step.
void check_frozen(const Manifest& manifest, const ParameterTable& table, const std::string& call) {
  std::unordered_set<std::string> managed;
  for (const Parameter& p : table.parameters()) managed.insert(p.name);
  for (const ManifestParameter& p : manifest.parameters) {
    TORCH_CHECK(managed.count(p.name) != 0, call, ": parameter ", p.name,
                ": expected a managed one, as in the last protected step, got a frozen one: a rank "
                "ended within freeze(), which is final; start again from a checkpoint");
  }
}

// Collective. Sets everything from a protected step of the same model; parameters that were not
// managed then keep their values and have no state. `is_earlier`: not the present step.
void load_protected(Engine& engine, CheckpointReader& reader, Engine::ParamGroups& groups,
                    const std::string& call, bool is_earlier) {
  Staged staged;
  run_on_all_ranks(*engine.comms->control, call, [&] {
    check_sizes(reader.manifest(), engine.table, call);
    if (is_earlier) check_frozen(reader.manifest(), engine.table, call);
    const CheckpointDifferences differences =
        find_differences(reader.manifest(), engine.table, engine.shards.raw_inner());
    Staging staging(reader, engine.table, engine.shards, differences, /*mesh=*/nullptr);
    staging.drop_state();
    staging.read_segments(staged);
    staging.read_whole(staged, engine.table.buffers(), "buffer");
    if (engine.options.skip_if()) {
      engine.options.skip_if()->set_state(reader.read_bytes(kSkipRule, kSharedState));
    }
    staged.manifest = &reader.manifest();
    staged.restores_options = true;
    const auto stored = static_cast<int64_t>(staged.manifest->groups.size());
    for (int64_t g = 0; g < static_cast<int64_t>(groups.size()); ++g) {
      staged.groups_from.push_back(g < stored ? g : -1);
    }
  });
  commit(staged, engine, groups);
}

}  // namespace

void Recovery::start(const ParamGroups& groups) {
  const Engine& engine = *engine_;
  failures_before_ = engine.group().failures();
  if (engine.options.protect() == 0) return;
  lifeline_ = std::make_shared<Lifeline>(engine.group(), engine.shards.raw_inner());
  run_.adopt(broadcast_text(*engine.comms->control, run_.id(), 0, "the run"));
  connect();
  protect_at_once(groups, "the constructor");
}

void Recovery::connect() {
  if (engine_->options.protect() == 0) return;
  protection_ =
      std::make_unique<Protection>(engine_->group(), lifeline_->snapshots, lifeline_->roll.calls(),
                                   [comms = engine_->comms] { return comms->failed(); });
}

bool Recovery::protects_next() const {
  return protection_ && (engine_->record.calls() + 1) % engine_->options.protect() == 0;
}

std::string Recovery::before_step() {
  if (!protects_next()) return {};
  finish();
  replaced_ = engine_->table.refresh_lists(engine_->module);
  return whole_text(engine_->table);
}

void Recovery::check_step() const {
  if (protects_next()) {
    TORCH_CHECK(replaced_.empty(), replaced_);
    engine_->table.verify_frozen_and_buffers();
  }
  if (!protection_ || engine_->record.calls() % engine_->options.protect() != 0) return;
  const std::vector<int> waiting = lifeline_->roll.waiting();
  if (waiting.empty()) return;
  throw_communication_error(
      c10::str("process ", waiting.front(),
               " waits to join the job: call recover() on all ranks, which takes it in and goes "
               "back to the last protected step"));
}

void Recovery::after_step(const ParamGroups& groups) {
  if (!protection_) return;
  const int64_t calls = engine_->record.calls();
  // A step without gradients counts nothing.
  if (calls != protected_calls_ && calls % engine_->options.protect() == 0) protect(groups);
}

void Recovery::finish() {
  if (!protection_) return;
  const Problem problem = protection_->finish();
  if (problem.empty()) return;
  engine_->comms->abort(problem.text);
  throw_error(problem.of_communication, problem.text);
}

std::pair<FileToSave, Manifest> Recovery::protected_shard(const ParamGroups& groups) const {
  const Engine& engine = *engine_;
  FileToSave file = shard_file(engine);
  if (engine.comms->rank() == 0) {
    for (const NamedTensor& b : engine.table.buffers()) {
      file.tensors.push_back({{b.name, "buffer", 0, b.tensor.numel()}, b.tensor});
    }
    if (engine.options.skip_if()) {
      file.tensors.push_back(state_to_save(kSkipRule, kSharedState, *engine.options.skip_if()));
    }
  }
  Manifest manifest = make_manifest(engine, groups, /*mesh=*/nullptr);
  manifest.frozen.clear();  // what no step changes is on every rank
  manifest.run = run_.id();
  return {std::move(file), std::move(manifest)};
}

void Recovery::protect(const ParamGroups& groups) {
  engine_->record.follow_loss_scale();
  std::shared_ptr<ShardCopies> copies;
  // The shard has the state of a rule of the user's, and its copy needs memory.
  engine_->comms->close_on_error([&] {
    auto [file, manifest] = protected_shard(groups);
    copies = protection_->begin(std::move(manifest), std::move(file));
  });
  if (copies) engine_->readers.add(std::move(copies));
  protected_calls_ = engine_->record.calls();
}

void Recovery::protect_at_once(const ParamGroups& groups, const std::string& call) {
  if (!protection_) return;
  protect(groups);
  // What the call has changed cannot be taken back, and no step after it could be protected.
  engine_->comms->close_on_error([&] {
    run_on_all_ranks(*engine_->comms->control, call, [&] {
      const Problem problem = protection_->finish();
      if (!problem.empty()) throw_error(problem.of_communication, problem.text);
    });
  });
  protection_->keep_newest();
}

RollCall::Present Recovery::leave_group() {
  Engine& engine = *engine_;
  // The failure may be that of a communicator of the caller's own: the others must notice too.
  engine.protocol.fail_for_recovery("rank " + std::to_string(engine.comms->rank()) +
                                    " called recover()");
  engine.passes.remove_hooks();
  protection_.reset();
  try {
    engine.gathers.finish();  // rows under way must not arrive in parameters that are set anew
  } catch (const std::exception&) {  // they will not
  }
  const auto can_restore = [](const std::vector<std::string>& holdings) {
    try {
      newest_complete(holdings);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  };
  return lifeline_->roll.call(snapshots_text(*lifeline_->snapshots), can_restore);
}

std::unique_ptr<Engine> Recovery::make_again(const Group& over) {
  Engine& engine = *engine_;
  const auto& members = engine.shards.groups().members();
  ParamGroups groups;
  for (size_t g = 0; g < members.size(); ++g) {
    // The options of the protected step are set when it is loaded.
    groups.emplace_back(members[g], lifeline_->first_options[g]->clone());
  }
  // The failure may have left a pass of another optimizer, for which they were switched off.
  for (const Parameter& p : engine.table.parameters()) p.tensor.requires_grad_(true);
  std::unique_ptr<torch::optim::Optimizer> inner = engine.release();
  try {
    return engine.make_again(inner, over, groups, Engine::Frozen::kAll);
  } catch (...) {
    if (inner) engine.shards.give_back_inner(std::move(inner));
    throw;
  }
}

int64_t Recovery::restore(const Snapshots& from, const CompleteSnapshot& step, ParamGroups& groups,
                          const std::string& call) {
  Engine& engine = *engine_;
  failures_before_ = engine.group().failures();
  try {
    if (lifeline_) lifeline_->learn_groups(groups);
    connect();
    const NeededTensors needed = needed_by(engine.shards, engine.table);
    const auto reader = gather_snapshot(
        *engine.comms->control, engine.group(), from, step, [&](const ManifestTensor& t) {
          return t.kind == "buffer" || t.kind == kSharedState || needed.contains(t);
        });
    // Else it is the present step, of before a change of parameters.
    const bool is_earlier = lifeline_ && &from == lifeline_->snapshots.get();
    load_protected(engine, *reader, groups, call, is_earlier);
    run_.resume(reader->manifest());
    protect_at_once(groups, call);
    return reader->manifest().steps + reader->manifest().skipped_steps;
  } catch (const std::exception& error) {
    engine.comms->abort(error_text(error));  // nothing may train on with half of a step
    throw;
  }
}

void Recovery::join(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
                    const Group& group, const ZeroOptions& options, const ParamGroups& groups) {
  const std::string who = "process " + std::to_string(group.rank()) + ", which joins a job: ";
  TORCH_CHECK(
      options.protect() > 0, who,
      "expected ZeroOptions::protect(n), got 0; the ranks of the job take a process in at a "
      "protected step");
  TORCH_CHECK(inner != nullptr, who, "inner optimizer: expected one, got a null pointer");
  lifeline_ = std::make_shared<Lifeline>(group, *inner);
  const RollCall::Present present = lifeline_->roll.join(snapshots_text(*lifeline_->snapshots));
  const CompleteSnapshot step = choose(present.texts, /*checkpoints=*/{});
  engine_ =
      Engine::make(module, inner, lifeline_->group_of(present), options, Engine::Frozen::kAll);
  // The caller's keep the options of construction, which a schedule starts from.
  ParamGroups restored = groups;
  engine_->protocol.run_call(
      [&] { restore(*lifeline_->snapshots, step, restored, "the constructor"); });
}

RecoveryReport Recovery::recover(const std::string& checkpoints, ParamGroups& groups) {
  const std::shared_ptr<Lifeline> lifeline = lifeline_;
  TORCH_CHECK(lifeline != nullptr, "rank ", engine_->comms->rank(),
              ": recover(): expected ZeroOptions::protect(n), got 0; no other rank has a copy of "
              "what a dead one held");
  TORCH_CHECK(
      engine_->group().failures() > failures_before_ || engine_->protocol.asks_for_recovery() ||
          !lifeline->roll.waiting().empty() || lifeline->roll.expects_newcomers() ||
          (engine_->options.update_in_backward() && engine_->reducer.has_packed()),
      "rank ", lifeline->first_group.global_rank(),
      ": recover(): expected a rank that ended or does not answer, a connection that failed, or a "
      "process that waits to join, got none of them: this optimizer and the communicators of its "
      "group work. What is no zero::CommunicationError would be thrown again after going back");
  while (true) {
    RollCall::Present present;
    try {
      present = leave_group();
    } catch (const c10::Error& error) {
      // A store that is late may answer the next call.
      throw_error(is_of_communication(error), c10::str("rank ", lifeline->first_group.global_rank(),
                                                       ": recover(): ", error_text(error)));
    }
    const CompleteSnapshot step = choose(present.texts, checkpoints);
    try {
      engine_ = make_again(lifeline->group_of(present));
      RecoveryReport report;
      report.members = present.ranks;
      engine_->protocol.run_call(
          [&] { report.steps = restore(*lifeline->snapshots, step, groups, "recover()"); });
      return report;
    } catch (const c10::Error& error) {
      // One that died meanwhile is on no further list.
      if (lifeline->roll.lost_one_of(present.ranks)) continue;
      // Nor is one too many, whose constructor has thrown it too: the next call goes on without it.
      const int64_t most = engine_->options.micro_batches();
      const bool all_refuse = dynamic_cast<const c10::DistBackendError*>(&error) == nullptr;
      if (!all_refuse || most == 0 || std::ssize(present.ranks) <= most) throw;
      throw_communication_error(error_text(error));
    }
  }
}

}  // namespace zero
