// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Brings the parts of a snapshot to the ranks that need them.
#pragma once

#include <functional>
#include <memory>

#include "zero/checkpoint/format/reader.h"
#include "zero/process_group.h"
#include "zero/recovery/snapshots.h"

namespace zero {

// Collective over `control` and `group`, whose ranks are those that gave their snapshots_text().
// Returns a reader of the snapshot that `which` names, with the tensors for which needed(tensor) is
// true on this rank. Those of files that this rank does not hold are sent by the servers of the
// files: see exchange_files().
std::unique_ptr<CheckpointReader> gather_snapshot(
    Communicator& control, const Group& group, const Snapshots& snapshots,
    const CompleteSnapshot& which, const std::function<bool(const ManifestTensor&)>& needed);

}  // namespace zero
