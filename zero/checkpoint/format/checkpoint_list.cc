// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/checkpoint_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

bool may_be_checkpoint(const fs::path& path) {
  std::error_code error;
  return path.filename().string()[0] != '.' &&
         fs::symlink_status(path, error).type() == fs::file_type::directory &&
         fs::exists(path / kManifestName, error);
}

}  // namespace

bool is_whole(const ListedCheckpoint& checkpoint) {
  return is_complete_checkpoint(checkpoint.path);
}

std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent) {
  std::vector<ListedCheckpoint> result;
  for (const std::string& name : names_in(parent)) {
    const fs::path path = fs::path(parent) / name;
    if (!may_be_checkpoint(path)) continue;
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
