// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Everything that can go wrong goes wrong in stage(), which changes nothing. Once
// all ranks have staged, commit() only moves memory.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/part_reader.h"
#include "zero/checkpoint/reader.h"
#include "zero/inner/classes.h"
#include "zero/inner/state.h"
#include "zero/optimizer/impl.h"
#include "zero/optimizer/included_states.h"

namespace zero {
namespace {

// One segment as it will be, in host memory until its state is made.
struct StagedSegment {
  const SegmentTensors* target = nullptr;
  at::Tensor master;
  std::unique_ptr<torch::optim::OptimizerParamState> state;
  bool has_state = false;  // whether `state`, which may be none, replaces the present one
};

struct Staged {
  Manifest manifest;
  std::vector<StagedSegment> segments;
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;  // to, from
  StatesToSet states;
  bool same_run = false;
  bool restores_options = false;
  std::vector<int64_t> groups_from;  // see CheckpointDifferences
  LoadReport report;
};

// The next steps add to it. Of classes that are not torch's own, nothing is known.
void check_step(const std::string& owner, const std::string& kind, const at::Tensor& value) {
  if (kind != "step" || value.scalar_type() != at::kLong) return;
  const auto step = value.item<int64_t>();
  TORCH_CHECK(step >= 0 && step <= kCountLimit, "parameter ", owner, ": expected a step from 0 to ",
              kCountLimit, ", got ", step);
}

// torch compares options with those of the last step, and NaN equals nothing.
void check_options(const Manifest& manifest, const std::string& folder) {
  for (size_t g = 0; g < manifest.groups.size(); ++g) {
    for (const auto& [name, value] : manifest.groups[g]) {
      TORCH_CHECK(!std::isnan(value) && (name != "lr" || std::isfinite(value)), folder,
                  ": parameter group ", g, ": expected a number as ", name, ", got ", value,
                  "; restore_options(false) keeps the present options");
    }
  }
}

class Staging {
 public:
  // `mesh` is what all ranks hold; null where each holds the same.
  Staging(CheckpointReader& reader, const ParameterTable& table, ShardOptimizer& shards,
          const CheckpointDifferences& differences, const MeshTensors* mesh)
      : reader_(reader), table_(table), shards_(shards), differences_(differences), mesh_(mesh) {}

  void read_segments(Staged& staged) {
    for (const SegmentTensors& s : shards_.segments()) {
      const Parameter& p = table_.parameters()[s.segment.parameter];
      if (differences_.unusable.count(p.name) != 0) continue;
      const ManifestParameter own =
          mesh_ ? mesh_->own(p.name)
                : ManifestParameter{p.name, p.sizes, p.strides, p.tensor.scalar_type(), p.group};
      wanted_.push_back(reader_.find(own, s.segment.begin, s.segment.numel));
      staged.segments.push_back({&s, buffer(s.segment.numel, at::kFloat), nullptr, false});
    }
    std::vector<at::Tensor> masters;
    for (const StagedSegment& s : staged.segments) masters.push_back(s.master);
    std::vector<size_t> all(wanted_.size());
    std::iota(all.begin(), all.end(), size_t{0});
    reader_.read("master", wanted_of(all), masters);
    if (differences_.same_optimizer) read_states(staged);
  }

  void read_whole(Staged& staged, const std::vector<NamedTensor>& present, const char* kind) {
    for (const NamedTensor& item : present) {
      if (differences_.unusable.count(item.name) != 0) continue;
      const at::Tensor& tensor = item.tensor;
      const ManifestParameter own =
          mesh_ ? mesh_->own(item.name)
                : ManifestParameter{item.name, tensor.sizes().vec(), {}, tensor.scalar_type(), 0};
      staged.whole.emplace_back(tensor, reader_.read_whole(own, kind));
    }
  }

 private:
  static at::Tensor buffer(int64_t numel, c10::ScalarType dtype) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype));
  }

  std::vector<const HeldRange*> wanted_of(const std::vector<size_t>& segments) const {
    std::vector<const HeldRange*> result;
    for (const size_t i : segments) result.push_back(&wanted_[i]);
    return result;
  }

  void read_states(Staged& staged) {
    // By kind, because a parameter that was never used has none.
    std::map<std::string, std::vector<size_t>> segments_with;
    for (size_t i = 0; i < wanted_.size(); ++i) {
      for (const std::string& kind : reader_.kinds(wanted_[i].name)) {
        if (kind != "master") segments_with[kind].push_back(i);
      }
    }
    std::vector<InnerState> states(wanted_.size());
    torch::optim::Optimizer& inner = shards_.inner();
    for (const auto& [kind, segments] : segments_with) {
      if (is_value(kind)) {
        read_values(kind, segments, states);
      } else if (is_uncut(kind)) {
        read_uncut(staged, kind, segments, states);
      } else {
        read_tensors(staged, kind, segments, states);
      }
    }
    for (size_t i = 0; i < wanted_.size(); ++i) {
      StagedSegment& s = staged.segments[i];
      if (differences_.without_state.count(wanted_[i].name) != 0) continue;
      s.has_state = true;
      // Freed one after the other: some classes copy.
      const InnerState state = std::exchange(states[i], {});
      if (state.tensors.empty() && state.uncut.empty() && state.values.empty()) continue;
      s.state = make_inner_state(inner, s.target->group, s.target->master, state);
    }
  }

  void read_tensors(const Staged& staged, const std::string& kind,
                    const std::vector<size_t>& segments, std::vector<InnerState>& states) {
    std::vector<at::Tensor> into;
    for (size_t i : segments) {
      into.push_back(
          buffer(staged.segments[i].target->segment.numel, reader_.dtype(wanted_[i].name, kind)));
    }
    reader_.read(kind, wanted_of(segments), into);
    for (size_t n = 0; n < segments.size(); ++n) {
      const at::Tensor& master = staged.segments[segments[n]].target->master;
      states[segments[n]].tensors.emplace_back(kind,
                                               in_shape_of(into[n].to(master.device()), master));
    }
  }

  void read_uncut(const Staged& staged, const std::string& kind,
                  const std::vector<size_t>& segments, std::vector<InnerState>& states) {
    for (const size_t i : segments) {
      const at::Device device = staged.segments[i].target->master.device();
      const at::Tensor tensor = reader_.read_uncut(kind, wanted_[i]);
      states[i].uncut.emplace_back(kind.substr(std::string(kUncutPrefix).size()),
                                   tensor.to(device));
    }
  }

  void read_values(const std::string& kind, const std::vector<size_t>& segments,
                   std::vector<InnerState>& states) {
    const std::vector<at::Tensor> values = reader_.read_values(kind, wanted_of(segments));
    for (size_t n = 0; n < segments.size(); ++n) {
      if (!values[n].defined()) continue;
      check_step(wanted_[segments[n]].name, kind, values[n]);
      states[segments[n]].values.emplace_back(kind, values[n]);
    }
  }

  PartReader reader_;
  const ParameterTable& table_;
  ShardOptimizer& shards_;
  const CheckpointDifferences& differences_;
  const MeshTensors* const mesh_;
  std::vector<HeldRange> wanted_;  // per staged segment
};

Staged stage(const std::string& folder, const LoadOptions& load, const ParameterTable& table,
             ShardOptimizer& shards, const Communicator& ranks, const MeshTensors* mesh) {
  CheckpointReader reader(folder);
  CheckpointDifferences differences =
      find_differences(reader.manifest(), table, shards.inner(), mesh);
  if (differences.same_optimizer) {
    find_missing_state(reader.manifest(), table, shards.inner(), differences);
    if (load.restore_options()) {
      find_unknown_options(reader.manifest(), shards.inner(), differences);
    }
  }
  if (load.restore_options()) check_options(reader.manifest(), folder);
  const std::vector<std::string> notes =
      compare_states(reader, load, ranks.world_size(), differences);
  if (load.strict()) throw_differences(differences, folder);
  Staged staged;
  staged.same_run = differences.lines.empty();
  // Those of a group that holds other parameters here are not meant for them.
  staged.restores_options = load.restore_options() && differences.same_groups;
  staged.groups_from = differences.groups_from;
  differences.lines.insert(differences.lines.end(), notes.begin(), notes.end());
  Staging staging(reader, table, shards, differences, mesh);
  staging.read_segments(staged);
  staging.read_whole(staged, table.frozen(), "frozen");
  staging.read_whole(staged, table.buffers(), "buffer");
  staged.states = read_states(reader, load, ranks.rank());
  // Together the ranks read every byte of every file, needed or not.
  for (size_t f = 0; f < reader.manifest().files.size(); ++f) {
    const auto reads_it = static_cast<int>(f % static_cast<size_t>(ranks.world_size()));
    if (reads_it == ranks.rank()) reader.verify_file(f);
  }
  staged.manifest = reader.manifest();
  staged.report.metadata = staged.manifest.metadata;
  staged.report.world_size = staged.manifest.world_size;
  staged.report.run = staged.manifest.run;
  staged.report.differences = std::move(differences.lines);
  staged.report.bytes_read = reader.bytes_read();
  return staged;
}

// Moves what was read to where it belongs. Nothing here can fail.
void commit(Staged& staged, ShardOptimizer& shards) {
  torch::optim::Optimizer& inner = shards.inner();
  for (StagedSegment& s : staged.segments) {
    s.target->master.copy_(in_shape_of(s.master, s.target->master));
    if (!s.has_state) continue;
    if (s.state) {
      inner.state()[s.target->master.unsafeGetTensorImpl()] = std::move(s.state);
    } else {
      inner.state().erase(s.target->master.unsafeGetTensorImpl());
    }
  }
  shards.take_state();
  for (auto& [to, from] : staged.whole) to.copy_(from);
}

void restore_options(const Staged& staged, std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t from = staged.groups_from[g];
    if (from >= 0) set_option_values(groups[g].options(), staged.manifest.groups[from]);
  }
}

// The text that ranks exchange once they have staged: the id of the checkpoint and what all of them
// must agree to.
std::string staged_text(const Staged& staged) {
  return staged.manifest.id + (staged.same_run ? "=" : "!") + (staged.restores_options ? "=" : "!");
}

void take_agreement(const std::vector<std::string>& texts, const std::string& what,
                    Staged& staged) {
  for (size_t r = 0; r < texts.size(); ++r) {
    const size_t end = texts[r].size() - 2;
    const std::string id = texts[r].substr(0, end);
    TORCH_CHECK(id == texts[0].substr(0, texts[0].size() - 2), what,
                ": expected the same checkpoint on all ranks, got ",
                texts[0].substr(0, texts[0].size() - 2), " on rank 0 and ", id, " on rank ", r,
                "; load from a folder that all ranks share");
    staged.same_run = staged.same_run && texts[r][end] == '=';
    staged.restores_options = staged.restores_options && texts[r][end + 1] == '=';
  }
}

// Makes what was read the present state. Collective; only a failed communication throws.
template <typename Impl>
void apply(Impl& impl, Staged& staged, std::vector<torch::optim::OptimizerParamGroup>& groups) {
  impl.arena.attach(/*keep_values=*/false);
  commit(staged, impl.shards);
  const Manifest& m = staged.manifest;
  impl.record.restore({m.steps, m.skipped_steps, false},
                      {m.scale, m.good_steps, m.hysteresis_left, m.skipped_at_min},
                      m.dynamic_scale);
  if (staged.restores_options) restore_options(staged, groups);
  impl.forget_gradients();
  impl.write_working_parameters();
}

// Warns of differences that a strict load allows and that a resumed run may not intend.
void warn_of(const std::vector<std::string>& differences, const std::string& folder) {
  if (differences.empty()) return;
  std::string text;
  for (const std::string& line : differences) text += "\n  " + line;
  TORCH_WARN("load_checkpoint(", folder, "):", text);
}

}  // namespace

LoadReport ZeroOptimizer::Impl::load_checkpoint(const std::string& folder, const LoadOptions& load,
                                                ParamGroups& groups) {
  const auto check = [&] {
    check_can_be_stored(groups);
    verify_shapes();
  };
  agree(Call::kLoadCheckpoint, check,
        {folder + (load.strict() ? ", strict" : "") +
             (load.restore_options() ? ", restore options" : "") + included_text(load),
         {}});
  const std::string what = "load_checkpoint(" + folder + ")";
  const auto mesh = merge_tensors(what, groups);
  Staged staged;
  StateChange states(groups);
  const auto texts = run_on_all_ranks(*comms->control, what, [&] {
    staged = stage(folder, load, table, shards, *comms->control, mesh.get());
    // On copies, because a class of the user's may refuse its options.
    ParamGroups tried = groups;
    if (staged.restores_options) restore_options(staged, tried);
    states.set(staged.states);
    return staged_text(staged);
  });
  take_agreement(texts, "rank " + std::to_string(comms->rank()) + ": " + what, staged);

  states.keep();
  apply(*this, staged, groups);
  if (staged.same_run) run.resume(staged.manifest);
  if (protection) protect_at_once(groups, "load_checkpoint(" + folder + ")");
  if (load.strict() && comms->control->rank() == 0) warn_of(staged.report.differences, folder);
  return std::move(staged.report);
}

void ZeroOptimizer::Impl::load_protected(CheckpointReader& reader, ParamGroups& groups,
                                         const std::string& call) {
  Staged staged;
  run_on_all_ranks(*comms->control, call, [&]() -> std::string {
    const CheckpointDifferences differences =
        find_differences(reader.manifest(), table, shards.inner());
    Staging staging(reader, table, shards, differences, /*mesh=*/nullptr);
    staging.read_segments(staged);
    staging.read_whole(staged, table.buffers(), "buffer");
    staged.manifest = reader.manifest();
    staged.restores_options = true;
    const auto stored = static_cast<int64_t>(staged.manifest.groups.size());
    for (int64_t g = 0; g < static_cast<int64_t>(groups.size()); ++g) {
      staged.groups_from.push_back(g < stored ? g : -1);
    }
    return {};
  });
  apply(*this, staged, groups);
  run.resume(staged.manifest);
}

LoadReport ZeroOptimizer::load_checkpoint(const std::string& folder, const LoadOptions& options) {
  at::NoGradGuard no_grad;
  LoadReport report;
  impl_->protocol.fail_stop(
      [&] { report = impl_->load_checkpoint(folder, options, param_groups_); });
  return report;
}

}  // namespace zero
