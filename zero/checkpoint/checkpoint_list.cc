// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/checkpoint_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "zero/checkpoint/atomic_directory.h"
#include "zero/checkpoint/hashed_file.h"
#include "zero/checkpoint/manifest.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

bool is_candidate(const fs::path& path) {
  std::error_code error;
  if (fs::symlink_status(path, error).type() != fs::file_type::directory) return false;
  if (!fs::exists(path / kManifestName, error)) return false;
  const std::string name = path.filename().string();
  return name[0] != '.' || (is_hidden_by_crash(path.string()) && is_complete_checkpoint(path));
}

}  // namespace

std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent) {
  restore_all_replaced(parent, is_complete_checkpoint);
  std::vector<ListedCheckpoint> result;
  for (const std::string& name : names_in(parent)) {
    const fs::path path = fs::path(parent) / name;
    if (!is_candidate(path)) continue;
    try {
      const Manifest manifest = read_manifest(path.string());
      result.push_back(
          {path.string(), manifest.id, manifest.saved, manifest.steps + manifest.skipped_steps});
    } catch (const c10::Error&) {  // damaged, or a manifest of something else
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return std::tie(a.saved, a.steps, a.path) < std::tie(b.saved, b.steps, b.path);
  });
  return result;
}

}  // namespace zero
