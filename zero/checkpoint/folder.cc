// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/folder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <map>
#include <system_error>
#include <tuple>

#include "zero/base/error_text.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/reader.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// Throws where that cannot be seen.
bool may_be_checkpoint(const fs::path& path) {
  const std::string name = path.filename().string();
  // Hidden, or what a file system has for itself: only root may look into it.
  if (name[0] == '.' || name == "lost+found") return false;
  std::error_code error;
  const auto is_a = [&](fs::file_type type, const fs::path& of, const fs::file_status& status) {
    if (error && !is_not_there(error)) throw_errno("cannot look at " + of.string(), error.value());
    return status.type() == type;
  };
  const fs::path manifest = path / kManifestName;
  return is_a(fs::file_type::directory, path, fs::symlink_status(path, error)) &&
         is_a(fs::file_type::regular, manifest, fs::status(manifest, error));
}

}  // namespace

std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent, bool to_load) {
  std::vector<ListedCheckpoint> result;
  for (const std::string& name : names_in(parent)) {
    const fs::path path = fs::path(parent) / name;
    try {
      if (!may_be_checkpoint(path)) continue;
      const Manifest manifest = read_manifest_without_tensors(path.string());
      result.push_back(
          {path.string(), manifest.id, manifest.saved, manifest.steps + manifest.skipped_steps});
    } catch (const DamagedManifest& error) {  // or one of something else
      if (to_load) TORCH_WARN("passed over a checkpoint: ", error_text(error));
    } catch (const c10::Error&) {
      // Unless it was removed meanwhile.
      if (to_load && may_be_checkpoint(path)) throw;
    }
  }
  std::ranges::sort(result, {},
                    [](const ListedCheckpoint& c) { return std::tie(c.saved, c.steps, c.path); });
  return result;
}

std::optional<std::string> latest(const std::string& parent) {
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent, /*to_load=*/true);
  // This looks at each file, so the newest is the first.
  for (auto c = found.rbegin(); c != found.rend(); ++c) {
    try {
      if (has_files(c->path, read_manifest_without_tensors(c->path))) return c->path;
    } catch (const c10::Error&) {
      if (may_be_checkpoint(c->path)) throw;
    }
  }
  return std::nullopt;
}

std::vector<std::string> keep_last(const std::string& parent, int64_t count) {
  TORCH_CHECK(count >= 1, "keep_last: expected a count of at least 1, got ", count);
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent);
  remove_left_overs(parent);
  size_t first = found.size();  // of the newest ones, of which `count` are whole
  for (; first > 0 && count > 0; --first) count -= is_complete_checkpoint(found[first - 1].path);
  std::vector<std::string> removed;
  for (size_t i = 0; i < first; ++i) {
    if (remove_directory(found[i].path)) removed.push_back(found[i].path);
  }
  return removed;
}

void verify_checkpoint(const std::string& folder, bool one_disk) {
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    if (!one_disk || manifest.files[f].disk == manifest.disk) reader.verify_file(f);
  }
}

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
  static_cast<CheckpointFacts&>(d) = m;
  d.loss_scale = m.scale;
  d.dynamic_loss_scale = m.dynamic_scale;
  d.ema = has_ema(m);
  d.parameters = tensors_of(m.parameters);
  d.frozen = tensors_of(m.frozen);
  d.buffers = tensors_of(m.buffers);
  d.states = states_of(m.tensors);
  d.files = files_of(m);
  return d;
}

RunIdentity::RunIdentity() : id_(random_id()) {}

int64_t RunIdentity::next_save(const std::string& parent) {
  if (known_.insert(parent).second) {
    try {
      const auto found = list_checkpoints(parent);
      if (!found.empty()) last_ = std::max(last_, found.back().saved);
    } catch (const c10::Error&) {  // not listable; a save into it may still be possible
    }
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  last_ += last_ < std::numeric_limits<int64_t>::max() ? 1 : 0;
  last_ =
      std::max<int64_t>(last_, std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  return last_;
}

void RunIdentity::resume(const Manifest& manifest) {
  if (!manifest.run.empty()) id_ = manifest.run;
  last_ = std::max(last_, manifest.saved);
}

}  // namespace zero
