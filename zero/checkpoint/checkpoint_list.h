// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints in a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero {

struct ListedCheckpoint {
  std::string path;
  std::string id;
  int64_t saved = 0;  // see RunIdentity; 0 where the manifest does not say
  int64_t steps = 0;  // skipped ones included
};

// The checkpoints in `parent`, the newest last: in the order in which they were saved. Before them,
// by steps, those whose manifest does not say when it was saved: of earlier versions of this
// library. Equals are ordered by path.
//
// Links are not followed: a link is another name of a checkpoint, and no checkpoint.
// Folders without a valid manifest are passed over. A checkpoint that a crash left at
// replaced_path() gets its name back, or is listed under the hidden one where it may not be
// renamed.
std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent);

}  // namespace zero
