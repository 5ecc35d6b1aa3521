// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <algorithm>

#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/checkpoint_list.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"

namespace zero {

std::optional<std::string> latest(const std::string& parent) {
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent);
  const auto newest = std::find_if(found.rbegin(), found.rend(), is_whole);
  if (newest == found.rend()) return std::nullopt;
  return newest->path;
}

std::vector<std::string> keep_last(const std::string& parent, int64_t count) {
  TORCH_CHECK(count >= 1, "keep_last: expected a count of at least 1, got ", count);
  const std::vector<ListedCheckpoint> found = list_checkpoints(parent);
  remove_left_overs(parent);
  size_t first = found.size();  // of the newest ones, of which `count` are whole
  for (; first > 0 && count > 0; --first) count -= is_whole(found[first - 1]) ? 1 : 0;
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

}  // namespace zero
