// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A file that several checkpoints of a run have in common, since what is in it does not change:
// frozen parameters. It is written once, and each later checkpoint has a hard link to it, so that
// any of them may be removed.
#pragma once

#include <string>

#include "zero/checkpoint/format/stored_file.h"
#include "zero/checkpoint/writer.h"

namespace zero {

class WrittenOnce {
 public:
  // Returns whether the last checkpoint has a file of this name with the bytes of `file`, and the
  // checkpoint of `writer` has it now, too. Hashes `file`, in memory for its largest tensor. Never
  // throws: a file that cannot be linked is written.
  bool link(const FileToSave& file, CheckpointWriter& writer) noexcept;

  // The checkpoint of `writer` is at `folder`, with a file `name` that can be linked, or without.
  void keep(const std::string& folder, const std::string& name, const CheckpointWriter& writer);

 private:
  std::string path_;  // empty: there is none
  FileContent content_;
};

}  // namespace zero
