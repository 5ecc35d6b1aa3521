// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/checkpoint_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <tuple>

#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// The path under which the folder may be a checkpoint.
std::optional<std::string> listed_path(const fs::path& path) {
  std::error_code error;
  if (fs::symlink_status(path, error).type() != fs::file_type::directory) return std::nullopt;
  if (!fs::exists(path / kManifestName, error)) return std::nullopt;
  if (path.filename().string()[0] != '.') return path.string();
  const auto name = hidden_by_crash(path.string());
  if (!name || !is_complete_checkpoint(path.string())) return std::nullopt;
  return (path.parent_path() / *name).string();
}

}  // namespace

bool is_whole(const ListedCheckpoint& checkpoint) {
  return is_complete_checkpoint(present_path(checkpoint.path, is_complete_checkpoint));
}

std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent) {
  std::vector<ListedCheckpoint> result;
  for (const std::string& name : names_in(parent)) {
    const fs::path path = fs::path(parent) / name;
    const auto listed = listed_path(path);
    if (!listed) continue;
    try {
      const Manifest manifest = read_manifest(path.string());
      result.push_back(
          {*listed, manifest.id, manifest.saved, manifest.steps + manifest.skipped_steps});
    } catch (const c10::Error&) {  // damaged, or a manifest of something else
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return std::tie(a.saved, a.steps, a.path) < std::tie(b.saved, b.steps, b.path);
  });
  return result;
}

}  // namespace zero
