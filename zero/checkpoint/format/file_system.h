// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a file system promises to a save: a trial of each system call by which a checkpoint gets
// its name. docs/checkpoints.md has a table of what is known.
#pragma once

#include <optional>
#include <string>

namespace zero {

struct FileSystem {
  std::string type;     // "ext4", "fuse.gcsfuse"; a number where the system has no name for it
  std::string refusal;  // why a folder with a file in it cannot be renamed; empty if it can
  bool keeps_existing = true;  // a rename never replaces a folder with a file in it
  bool exchanges = true;       // RENAME_EXCHANGE
  bool locks = true;           // POSIX record locks, at least between processes of one machine
  bool syncs_folders = true;   // fsync() of a folder
  bool copies = false;         // a known object store: a rename copies one object after the other
};

// Tries all of it in hidden folders of the names `from` and `to`, which are gone afterwards.
// Returns nothing where they cannot be made, or where another process has removed them: the save
// itself finds out why.
std::optional<FileSystem> try_file_system(const std::string& from, const std::string& to);

// Throws if no save can work on this file system.
void check_file_system(const FileSystem& found, const std::string& parent);

// What is promised less than on a local disk, as sentences for a warning; empty if nothing is.
std::string weaker_promises(const FileSystem& found);

}  // namespace zero
