// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which ranks see which files of a checkpoint, where ranks may see different folders.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "zero/checkpoint/manifest.h"
#include "zero/communicator.h"

namespace zero {

struct FoundFiles {
  Manifest manifest;                    // equal on all ranks, but for `disk`
  std::vector<std::vector<int>> ranks;  // for each file, those that see it; at least one

  // The rank that reads a file for `rank`: itself where it sees it. The others are spread over the
  // ranks that do.
  int reader(size_t file, int rank) const;
  // The rank that verifies all of a file.
  int verifier(size_t file) const;
};

// Collective. `folder` may differ between ranks. Returns nothing where all ranks see the same files
// of one checkpoint, or none of them sees a manifest: then each reads for itself. Throws c10::Error
// on all ranks for a manifest that cannot be read, for those of different checkpoints, and for a
// file that no rank sees. `what` is for errors.
std::optional<FoundFiles> find_files(Communicator& control, const std::string& what,
                                     const std::string& folder);

// Collective. Of the checkpoints in the folders `parent` of all ranks, which may differ, the newest
// of which each file is seen by a rank that has its manifest: its path for this rank.
std::optional<std::string> newest_whole(Communicator& control, const std::string& what,
                                        const std::string& parent);

}  // namespace zero
