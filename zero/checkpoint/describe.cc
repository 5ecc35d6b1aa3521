// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"

namespace zero {
namespace {

std::vector<CheckpointTensor> tensors_of(const std::vector<ManifestParameter>& list) {
  std::vector<CheckpointTensor> result;
  std::map<std::string, size_t> known;
  for (const ManifestParameter& p : list) {
    const auto [at, added] = known.emplace(p.name, result.size());
    if (added) {
      result.push_back({p.name, whole_shape(p), p.dtype, p.group, 1, p.moments, p.master});
    } else {
      ++result[at->second].parts;
    }
  }
  return result;
}

std::vector<CheckpointState> states_of(const std::vector<ManifestTensors>& tensors) {
  std::map<std::string, CheckpointState> states;
  for (const ManifestTensors& entry : tensors) {
    if (entry.owner.empty() || entry.owner[0] != kStatePrefix) continue;
    CheckpointState& state = states[entry.owner];
    state.name = entry.owner.substr(1);
    for (const std::string& kind : entry.kinds) {
      for (const ManifestPiece& piece : entry.pieces) {
        TORCH_CHECK(!__builtin_add_overflow(state.bytes, piece.numel, &state.bytes), "state ",
                    state.name, ": expected bytes that fit 63 bits, got more");
        state.ranks += kind == kSharedState ? 0 : 1;
      }
    }
  }
  std::vector<CheckpointState> result;
  for (auto& [owner, state] : states) result.push_back(std::move(state));
  return result;
}

std::vector<CheckpointFile> files_of(const Manifest& m) {
  std::vector<CheckpointFile> result;
  for (const ManifestFile& file : m.files) {
    result.push_back({file.name, file.bytes, file.hash, 0, file.disk});
  }
  for (const ManifestTensors& entry : m.tensors) {
    for (const ManifestPiece& piece : entry.pieces) {
      result[piece.file].tensors += static_cast<int64_t>(entry.kinds.size());
    }
  }
  return result;
}

}  // namespace

CheckpointDescription describe_checkpoint(const std::string& folder) {
  const CheckpointReader reader(folder);
  const Manifest& m = reader.manifest();
  CheckpointDescription d;
  d.version = m.version;
  d.library_version = m.library_version;
  d.torch_version = m.torch_version;
  d.id = m.id;
  d.run = m.run;
  d.saved = m.saved;
  d.metadata = m.metadata;
  d.world_size = m.world_size;
  d.stage = m.stage;
  d.layout = m.layout;
  d.bucket_bytes = m.bucket_bytes;
  d.steps = m.steps;
  d.skipped_steps = m.skipped_steps;
  d.loss_scale = m.scale;
  d.dynamic_loss_scale = m.dynamic_scale;
  d.optimizer = m.optimizer;
  d.groups = m.groups;
  d.ema = has_ema(m);
  d.parameters = tensors_of(m.parameters);
  d.frozen = tensors_of(m.frozen);
  d.buffers = tensors_of(m.buffers);
  d.states = states_of(m.tensors);
  d.files = files_of(m);
  d.disk = m.disk;
  return d;
}

}  // namespace zero
