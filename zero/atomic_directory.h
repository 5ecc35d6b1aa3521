// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A folder that appears under its name complete or not at all: it is filled
// beside its place, under a hidden name, and renamed.
//
// A process that dies meanwhile leaves the hidden folder behind, which the next
// save to that place removes. Sends nothing; one process owns it.
#pragma once

#include <string>

namespace zero {

// "/a/b/.c.saving", for the target "/a/b/c".
std::string saving_path(const std::string& target);
// "/a/b/.c.replaced": where a replaced folder waits for its removal.
std::string replaced_path(const std::string& target);

class AtomicDirectory {
 public:
  // Makes the hidden folder, removing what a dead process left. Missing parents
  // are made too. Throws when `target` exists and may not be replaced: without
  // `overwrite`, or if it does not hold a file `required` (a checkpoint's
  // manifest), since it may be somebody's folder.
  AtomicDirectory(std::string target, bool overwrite, const char* required);
  // Removes the hidden folder unless it was published.
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  const std::string& path() const { return path_; }

  // Waits until the folder's names are on disk, and gives it its name. An
  // existing target is exchanged in one system call and then removed. Where a file
  // system cannot do that (NFS), it is first renamed to replaced_path(): a crash
  // between the two renames leaves it there, complete.
  void publish();

 private:
  void replace();

  const std::string target_;
  const std::string path_;
  const bool overwrite_;
  bool published_ = false;
};

// Removes a folder so that it never is there by halves under its own name.
void remove_directory(const std::string& path);

}  // namespace zero
