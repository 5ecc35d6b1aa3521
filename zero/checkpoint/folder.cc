// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include "zero/checkpoint.h"
#include "zero/checkpoint/atomic_directory.h"
#include "zero/checkpoint/checkpoint_list.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/reader.h"

namespace zero {

std::optional<std::string> latest(const std::string& parent) {
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent);
  if (found.empty()) return std::nullopt;
  return found.back().path;
}

std::vector<std::string> keep_last(const std::string& parent, int64_t count) {
  TORCH_CHECK(count >= 1, "keep_last: expected a count of at least 1, got ", count);
  // First, because this gives checkpoints that a crash has hidden their names back.
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent);
  remove_left_overs(parent, kManifestName);
  std::vector<std::string> removed;
  for (size_t i = 0; i + static_cast<size_t>(count) < found.size(); ++i) {
    remove_directory(found[i].path);
    removed.push_back(found[i].path);
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

}  // namespace zero
