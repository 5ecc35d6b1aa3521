// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds which ranks see which files of a checkpoint, if ranks see different folders.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "zero/checkpoint/format/manifest.h"
#include "zero/communicator.h"

namespace zero {

// A checkpoint, and the ranks that see each of its files.
struct FoundFiles {
  Manifest manifest;  // equal on all ranks, except `disk`
  // For each file, the ranks that see it; at least one. Empty if each rank can read for itself: all
  // see the same files.
  std::vector<std::vector<int>> ranks;

  // The rank that reads a file for `rank`: `rank` itself if it sees the file, else one that does.
  // Ranks that do not see a file are spread over those that do.
  int reader(size_t file, int rank) const;
  // The rank that verifies what no rank needs of a file.
  int verifier(size_t file, int world_size) const;
};

// Collective. `folder` may differ between ranks. Throws c10::Error on all ranks if none sees a
// manifest, for one that cannot be read, for manifests of different checkpoints, and for a file
// that no rank sees, where ranks see different ones. `what` is for errors.
FoundFiles find_files(Communicator& control, const std::string& what, const std::string& folder);

// Collective. Returns this rank's path of the newest checkpoint that is whole: each of its files is
// seen by a rank that sees its manifest too. Nothing if there is none. `parent`, the folder of the
// checkpoints, may differ between ranks.
std::optional<std::string> newest_whole(Communicator& control, const std::string& what,
                                        const std::string& parent);

}  // namespace zero
