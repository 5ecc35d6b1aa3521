// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/staging.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <map>
#include <numeric>

#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/whole_tensor.h"

namespace zero {
namespace {

// Where a segment waits for commit(): in the gradient shard, which holds nothing during a load, or
// where that is not fp32 on the host, or is not kept, in memory of its own.
at::Tensor master_buffer(const SegmentTensors& s) {
  const at::Tensor& gradient = s.gradient;
  const bool fits = gradient.defined() && gradient.is_cpu() && gradient.scalar_type() == at::kFloat;
  return fits ? elements_of(gradient, s.master) : at::empty({s.segment.numel}, at::kFloat);
}

// The next steps add to it. Of classes that are not torch's own, nothing is known.
void check_step(const std::string& owner, const std::string& kind, const at::Tensor& value) {
  if (kind != "step" || value.scalar_type() != at::kLong) return;
  const auto step = value.item<int64_t>();
  TORCH_CHECK(step >= 0 && step <= kCountLimit, "parameter ", owner, ": expected a step from 0 to ",
              kCountLimit, ", got ", step);
}

// Moves what was read to where it belongs.
void put(Staged& staged, ShardOptimizer& shards) {
  torch::optim::Optimizer& inner = shards.inner_with_counts();
  for (StagedSegment& s : staged.segments) {
    shards.masters().set(*s.target, s.master);
    if (s.target->ema.defined()) {
      const at::Tensor& average = s.ema.defined() ? s.ema : s.master;
      s.target->ema.copy_(in_shape_of(average, s.target->master));
    }
    if (s.has_state) set_state(inner, *s.target, std::move(s.state));
  }
  shards.adopt_inner_state();
  for (const auto& [to, from] : staged.whole) overwrite(to, from);
}

}  // namespace

void set_state(torch::optim::Optimizer& inner, const SegmentTensors& segment,
               std::unique_ptr<torch::optim::OptimizerParamState> state) {
  inner.state().erase(segment.master.unsafeGetTensorImpl());
  if (state) {
    inner.state()[segment.master.unsafeGetTensorImpl()] = std::move(state);
  } else {
    make_initial_state(inner, segment.group, segment.master);
  }
}

Staging::Staging(CheckpointReader& reader, const ParameterTable& table, ShardOptimizer& shards,
                 const CheckpointDifferences& differences, const MeshTensors* mesh)
    : reader_(reader), table_(table), shards_(shards), differences_(differences), mesh_(mesh) {
  for (const SegmentTensors& s : shards_.segments()) {
    const Parameter& p = table_.parameters()[s.segment.parameter];
    if (differences_.unusable.count(p.name) != 0) continue;
    wanted_.push_back(reader_.find(held_here(p, mesh_), s.segment.begin, s.segment.numel));
    targets_.push_back(&s);
  }
}

void Staging::add_to(NeededTensors& needed) const {
  for (const HeldRange& range : wanted_) needed.add(range);
  const auto add = [&](const std::vector<NamedTensor>& items) {
    for (const NamedTensor& item : items) {
      if (differences_.unusable.count(item.name) != 0) continue;
      needed.add(reader_.find(held_here(item, mesh_), 0, item.tensor.numel()));
    }
  };
  add(table_.unmanaged());
  add(table_.buffers());
}

void Staging::drop_state() {
  if (!differences_.same_optimizer) return;
  auto& state = shards_.inner_with_counts().state();
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (differences_.without_state.count(wanted_[i].name) != 0) continue;
    state.erase(targets_[i]->master.unsafeGetTensorImpl());
  }
}

void Staging::read_segments(Staged& staged) {
  std::vector<at::Tensor> masters;
  for (const SegmentTensors* s : targets_) {
    masters.push_back(master_buffer(*s));
    staged.segments.push_back({s, masters.back(), {}, nullptr, false});
  }
  std::vector<size_t> all(wanted_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  reader_.read("master", wanted_of(all), masters);
  read_ema(staged);
  if (differences_.same_optimizer) read_states(staged);
}

void Staging::read_ema(Staged& staged) {
  if (shards_.ema() == nullptr) return;
  std::vector<size_t> having;
  std::vector<at::Tensor> into;
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (reader_.kinds(wanted_[i]).count(kEmaKind) == 0) continue;
    having.push_back(i);
    into.push_back(at::empty({targets_[i]->segment.numel}, at::kFloat));
    staged.segments[i].ema = into.back();
  }
  reader_.read(kEmaKind, wanted_of(having), into);
}

void Staging::read_whole(Staged& staged, const std::vector<NamedTensor>& present,
                         const char* kind) {
  for (const NamedTensor& item : present) {
    if (differences_.unusable.count(item.name) != 0) continue;
    check_plain(item.tensor, item.name);  // replaced since construction, perhaps
    at::Tensor from = reader_.read_all(held_here(item, mesh_), kind).view(item.tensor.sizes());
    check_fits(item.tensor, from, item.name);
    staged.whole.emplace_back(item.tensor, std::move(from));
  }
}

std::vector<const HeldRange*> Staging::wanted_of(const Numbers& segments) const {
  std::vector<const HeldRange*> result;
  for (const size_t i : segments) result.push_back(&wanted_[i]);
  return result;
}

void Staging::read_states(Staged& staged) {
  // By kind, because a parameter that was never used has none.
  std::map<std::string, Numbers> segments_with;
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (differences_.without_state.count(wanted_[i].name) != 0) continue;
    for (const std::string& kind : reader_.kinds(wanted_[i])) {
      if (kind != "master" && kind != kEmaKind) segments_with[kind].push_back(i);
    }
  }
  states_.resize(wanted_.size());
  torch::optim::Optimizer& inner = shards_.inner_with_counts();
  for (const auto& [kind, segments] : segments_with) {
    if (is_value(kind)) {
      read_values(kind, segments);
    } else if (is_uncut(kind)) {
      read_uncut(kind, segments);
    } else {
      read_tensors(kind, segments);
    }
  }
  for (size_t i = 0; i < wanted_.size(); ++i) {
    StagedSegment& s = staged.segments[i];
    if (differences_.without_state.count(wanted_[i].name) != 0) continue;
    s.has_state = true;
    // Freed one after the other: some classes copy.
    const InnerState state = std::exchange(states_[i], {});
    if (state.tensors.empty() && state.uncut.empty() && state.values.empty()) continue;
    const SegmentTensors& target = *s.target;
    s.state = adapter_of(inner, target.group)
                  .make_state(inner, target.group, target.master, state, target.moments);
  }
}

void Staging::read_tensors(const std::string& kind, const Numbers& segments) {
  std::vector<at::Tensor> into;
  for (size_t i : segments) {
    into.push_back(at::empty({targets_[i]->segment.numel}, reader_.dtype(kind, wanted_[i])));
  }
  reader_.read(kind, wanted_of(segments), into);
  for (size_t n = 0; n < segments.size(); ++n) {
    const SegmentTensors& target = *targets_[segments[n]];
    // What is stored in fewer bytes waits for that in host memory.
    const bool narrow = target.moments != Moments::kFloat32;
    const at::Tensor read = narrow ? into[n] : into[n].to(target.master.device());
    states_[segments[n]].tensors.emplace_back(kind, in_shape_of(read, target.master));
  }
}

void Staging::read_uncut(const std::string& kind, const Numbers& segments) {
  for (const size_t i : segments) {
    const at::Device device = targets_[i]->master.device();
    const at::Tensor tensor = reader_.read_uncut(kind, wanted_[i]);
    states_[i].uncut.emplace_back(kind.substr(std::string(kUncutPrefix).size()), tensor.to(device));
  }
}

void Staging::read_values(const std::string& kind, const Numbers& segments) {
  const std::vector<at::Tensor> values = reader_.read_values(kind, wanted_of(segments));
  for (size_t n = 0; n < segments.size(); ++n) {
    if (!values[n].defined()) continue;
    check_step(wanted_[segments[n]].name, kind, values[n]);
    states_[segments[n]].values.emplace_back(kind, values[n]);
  }
}

void restore_options(const Staged& staged, Engine::ParamGroups& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t from = staged.groups_from[g];
    if (from < 0) continue;
    auto& options = groups[g].options();
    adapter_of(options).set_option_values(options, staged.manifest->groups[from]);
  }
}

void commit(Staged& staged, Engine& engine, Engine::ParamGroups& groups) {
  engine.comms->close_on_error([&] {
    engine.arena.attach(/*keep_values=*/false);
    put(staged, engine.shards);
    const Manifest& m = *staged.manifest;
    engine.record.restore({m.steps, m.skipped_steps, false},
                          {m.scale, m.good_steps, m.hysteresis_left, m.skipped_at_min},
                          m.dynamic_scale);
    if (staged.restores_options) restore_options(staged, groups);
    engine.clear_gradients();
    engine.write_working_parameters();
  });
}

}  // namespace zero
