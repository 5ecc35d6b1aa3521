// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/shard_file.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/layout.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/version.h"

namespace zero {

FileToSave shard_file(const Engine& engine) {
  FileToSave file{rank_file_name(engine.comms->rank()), {}};
  const torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  for (const SegmentTensors& s : engine.shards.segments()) {
    const auto& replicas =
        engine.domains.list[engine.protocol.domain_of(s.segment.parameter)].replicas;
    if (replicas && replicas->rank() != 0) continue;
    const std::string& owner = engine.table.parameters()[s.segment.parameter].name;
    const auto put = [&](const std::string& kind, int64_t numel, at::Tensor tensor) {
      file.tensors.push_back(
          {{owner, kind, s.segment.begin, numel}, std::move(tensor), s.segment.bucket});
    };
    put("master", s.segment.numel, elements_of(engine.shards.masters().values(s), s.master));
    if (s.ema.defined()) put(kEmaKind, s.segment.numel, elements_of(s.ema, s.master));
    const auto state = read_inner_state(inner, s.group, s.master);
    if (!state) continue;
    const auto put_state = [&](const std::string& kind, int64_t numel, const at::Tensor& tensor) {
      TORCH_CHECK(safetensors_knows(tensor.scalar_type()), "checkpoint: parameter ", owner,
                  ": expected state ", kind, " of a dtype that safetensors has, got ",
                  tensor.scalar_type());
      put(kind, numel, tensor);
    };
    for (const auto& [kind, tensor] : state->tensors) {
      put_state(kind, s.segment.numel, elements_of(tensor, s.master));
    }
    for (const auto& [kind, tensor] : state->uncut) {
      put_state(kUncutPrefix + kind, tensor.numel(), tensor);
    }
    for (const auto& [kind, tensor] : state->values) put_state(kind, s.segment.numel, tensor);
  }
  return file;
}

Manifest make_manifest(const Engine& engine, const Engine::ParamGroups& groups,
                       const MeshTensors* mesh) {
  Manifest m;
  m.library_version = ZERO_VERSION_TEXT;
  m.torch_version = TORCH_VERSION;
  m.world_size = engine.comms->control->world_size();
  m.stage = engine.options.stage();
  m.layout = layout_names(engine.plan);
  m.bucket_bytes = engine.options.bucket_bytes().value_or(
      default_bucket_bytes(engine.domains.home.world_size(), !engine.protocol.device().is_cpu()));
  m.plan_fingerprint = engine.plan.fingerprint();
  m.optimizer = optimizer_name(engine.shards.raw_inner());
  const StepCounts::Values made = engine.record.counts();
  m.steps = made.steps;
  m.skipped_steps = made.skipped_steps;
  const LossScaler::State state = engine.record.scaler().state();
  m.dynamic_scale = engine.record.scaler().dynamic();
  m.scale = state.scale;
  m.good_steps = state.good_steps;
  m.hysteresis_left = std::min(state.hysteresis_left, kCountLimit);  // no run uses that many up
  m.skipped_at_min = state.skipped_at_min;
  if (mesh != nullptr) {
    m.holders = mesh->sets();
    m.groups = mesh->groups();
    m.parameters = mesh->parameters();
    m.frozen = mesh->frozen();
    m.buffers = mesh->buffers();
    return m;
  }
  for (const auto& g : groups)
    m.groups.push_back(adapter_of(g.options()).option_values(g.options()));
  m.parameters = managed_parameters(engine.table, engine.options);
  for (const auto& item : engine.table.unmanaged()) m.frozen.push_back(described(item));
  for (const auto& item : engine.table.buffers()) m.buffers.push_back(described(item));
  return m;
}

}  // namespace zero
