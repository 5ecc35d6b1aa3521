// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints in a folder, and the place of a save in their order.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/manifest.h"

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
// Folders without a valid manifest and hidden ones are passed over, and files are not looked at.
// `to_load`: a manifest that was read and is not valid is a warning, and one that cannot be read,
// or is of a later version, an error: it may be the newest.
std::vector<ListedCheckpoint> list_checkpoints(const std::string& parent, bool to_load = false);

// Which run a checkpoint is of, and its place in the order of saves.
// One for each optimizer; rank 0's is stored. Where another may become rank 0, all adopt its id.
class RunIdentity {
 public:
  // A new run.
  RunIdentity();

  // 32 random hexadecimal digits; kept when the run goes on from a checkpoint.
  const std::string& id() const { return id_; }

  // The place of a save into `parent` that begins now: microseconds since 1970 by this
  // machine's clock, but always more than every save of this run had before, those it
  // was resumed from included, and more than what is in `parent` at its first save there. So a
  // clock that was set back, or that differs between machines, changes no order.
  int64_t next_save(const std::string& parent);

  // The id of rank 0.
  void adopt(std::string id) { id_ = std::move(id); }
  // This run goes on from a checkpoint.
  void resume(const Manifest& manifest);

 private:
  std::string id_;
  int64_t last_ = 0;
  std::set<std::string> known_;  // folders that were looked into
};

}  // namespace zero
