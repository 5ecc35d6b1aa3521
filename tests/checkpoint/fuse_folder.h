// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A FUSE file system in memory with the limits of others, served by a process of its own.
#pragma once

#include <sys/types.h>

#include <string>

namespace zero {

// What a mounted folder can do; changes take effect at once.
struct FuseLimits {
  bool renames_folders = true;  // not so in a bucket of mountpoint-s3, or of gcsfuse by default
  bool rename_flags = true;     // RENAME_NOREPLACE and RENAME_EXCHANGE; NFS has neither
  bool locks = true;            // Lustre mounted without flock has none; set before mounting
  bool syncs_folders = true;
  // A rename of a folder moves half of its files and fails, as copies of objects can.
  bool stops_in_rename = false;
};

class FuseFolder {
 public:
  // Mounts `source`, a name, at `path` in this process's mount namespace.
  FuseFolder(const std::string& path, const FuseLimits& limits,
             const std::string& source = "memory");
  ~FuseFolder();
  FuseFolder(const FuseFolder&) = delete;
  FuseFolder& operator=(const FuseFolder&) = delete;

  // Why it could not be mounted; empty if it is.
  const std::string& problem() const { return problem_; }
  FuseLimits& limits() { return *limits_; }

 private:
  const std::string path_;
  std::string problem_;
  FuseLimits* limits_ = nullptr;  // shared with the serving process
  pid_t server_ = 0;
};

}  // namespace zero
