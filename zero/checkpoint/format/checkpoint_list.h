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

// Whether the files of its disk are there, with the sizes that the manifest says. Looks at each
// file, so callers ask from the newest on. Never throws.
bool is_whole(const ListedCheckpoint& checkpoint);

// The checkpoints in `parent`, the newest last: in the order in which they were saved. Before them,
// by steps, those whose manifest does not say when it was saved: of earlier versions of this
// library. Equals are ordered by path.
//
// Links are not followed: a link is another name of a checkpoint, and no checkpoint.
// Folders without a valid manifest and hidden ones are passed over, and files are not looked at.
std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent);

}  // namespace zero
