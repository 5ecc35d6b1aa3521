// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The promises of a file system to a save, found by a trial of each system call by which a
// checkpoint gets its name. docs/checkpoints.md has a table of what is known.
#pragma once

#include <fcntl.h>

#include <optional>
#include <string>

namespace zero {

// The file that a save locks in its hidden folder, with the slash in front.
inline constexpr char kLock[] = "/lock";

// A write lock on all of a file, for fcntl().
struct flock lock_of_whole_file();

// Returns whether a file, a folder or a link, be it to nothing, has this path.
bool exists(const std::string& path);

// Returns whether a system call has answered that the file system lacks it, or its flags.
bool unsupported(int error);
// Renames a file or a folder to a path where nothing is: 0, or errno. Where the system call has no
// flags (NFS, some FUSE mounts), a file gets the new name beside the old one first. Without links
// that is looked at before, and what appears in the last moment may be replaced.
int rename_to_free_name(const std::string& from, const std::string& to);

struct FileSystem {
  std::string type;  // "ext4", "fuse.gcsfuse"; a number where the system has no name for it
  // Why no save can work: the call that fails, and its error; empty if saves work.
  std::string refusal;
  bool keeps_existing = true;  // a rename never replaces a folder with a file in it
  bool exchanges = true;       // RENAME_EXCHANGE
  bool locks = true;           // POSIX record locks, at least between processes of one machine
  bool syncs_folders = true;   // fsync() of a folder; without it, it answers EINVAL
  bool copies = false;         // a known object store: a rename copies one object after the other
};

// Tries all of it in hidden folders of the names `from` and `to`, which are gone afterwards.
// Returns nothing where the folders cannot be made, where another process has removed them, or
// where memory or space is short: the save itself finds out why, and the next one tries again.
std::optional<FileSystem> try_file_system(const std::string& from, const std::string& to);

// Returns the sentences of a warning about promises that are weaker than those of a local disk;
// empty if none is.
std::string weaker_promises(const FileSystem& found);

}  // namespace zero
