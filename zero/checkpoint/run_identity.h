// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which run a checkpoint is of, and its place in the order of saves.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "zero/checkpoint/format/manifest.h"

namespace zero {

// One for each optimizer; rank 0's is stored.
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

  // This run goes on from a checkpoint.
  void resume(const Manifest& manifest);

 private:
  std::string id_;
  int64_t last_ = 0;
  std::set<std::string> known_;  // folders that were looked into
};

}  // namespace zero
