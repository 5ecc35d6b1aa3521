// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/file_system.h"

#include <c10/util/Exception.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "zero/base/plain_text.h"

namespace zero {
namespace {

constexpr char kOther[] = "/other";

// Their mounts show a bucket. Rclone, gcsfuse and s3fs rename a folder object by object.
constexpr const char* kObjectStores[] = {"s3fs",   "gcsfuse",       "goofys",  "blobfuse",
                                         "rclone", "mountpoint-s3", "geesefs", "ossfs"};

// Says nothing about the file system: another process has removed the folders, or a resource is
// short.
bool says_nothing(int error) {
  return error == ENOENT || error == ESTALE || error == EINTR || error == EAGAIN ||
         error == ENOMEM || error == ENOSPC || error == EDQUOT;
}

// 0, or errno.
int rename_with(const std::string& from, const std::string& to, unsigned int flags) {
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

int new_file(const std::string& path) {
  return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

// 0, or errno.
int lock(int file) {
  struct flock whole = lock_of_whole_file();
  return fcntl(file, F_SETLK, &whole) == 0 ? 0 : errno;
}

// 0, or the errno of the call at which sync_folder() fails or, for EINVAL, passes over.
int sync(const std::string& folder) {
  const int file = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return errno;
  const int error = fsync(file) == 0 ? 0 : errno;
  close(file);
  return error;
}

std::string refused(const char* call, int error) {
  return c10::str(call, ": ", std::generic_category().message(error));
}

// Sets the type of the mount, and whether it is a known object store.
void read_mount(const std::string& folder, FileSystem& found) {
  struct stat status {};
  struct statfs numbers {};
  if (stat(folder.c_str(), &status) != 0 || statfs(folder.c_str(), &numbers) != 0) return;
  found.type = plain_text("0x", std::hex, static_cast<unsigned long>(numbers.f_type));
  const std::string device = plain_text(major(status.st_dev), ":", minor(status.st_dev));
  // "<id> <parent> <device> <root> <place> <options> ... - <type> <source> <options>"
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word >> word >> word;
    if (word != device) continue;
    while (words >> word && word != "-") {
    }
    std::string source;
    words >> found.type >> source;
    found.copies =
        std::any_of(std::begin(kObjectStores), std::end(kObjectStores), [&](const char* name) {
          return found.type.rfind("fuse", 0) == 0 &&
                 (found.type + " " + source).find(name) != std::string::npos;
        });
  }
}

// The two folders of a trial, and the file that it locks.
class Trial {
 public:
  Trial(const std::string& from, const std::string& to) : folders_{from, to} {}
  ~Trial() {
    if (lock_ >= 0) close(lock_);  // first, since NFS keeps the name of an open file
    for (const std::string& folder : folders_) {
      for (const char* name : {kLock, kOther}) unlink((folder + name).c_str());
      rmdir(folder.c_str());
    }
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  std::optional<FileSystem> run() {
    const auto& [from, to] = folders_;
    if (mkdir(from.c_str(), 0777) != 0) return {};
    FileSystem found;
    read_mount(from, found);

    // 1. A rename of a folder: first without a file, which some buckets keep for ever.
    int error = rename_with(from, to, 0);
    if (error == 0) {
      if ((lock_ = new_file(to + kLock)) < 0) return {};
      // 2. A lock, and the names on disk.
      const int locked = lock(lock_), synced = sync(to);
      if (says_nothing(locked) || says_nothing(synced)) return {};
      found.locks = locked == 0;
      found.syncs_folders = synced == 0;
      if (synced != 0 && synced != EINVAL) {
        found.refusal = refused("fsync of a folder", synced);
        return found;
      }
      // As a save does: with a file that is open in it.
      error = rename_with(to, from, RENAME_NOREPLACE);
      if (says_nothing(error)) return {};
      found.keeps_existing = error == 0;
      if (error != 0) error = rename_with(to, from, 0);
      if (error == 0 && gone()) return {};
      if (error == 0 && (exists(to) || !exists(from + kLock))) error = EIO;
    }
    if (says_nothing(error)) return {};
    if (error != 0) {
      found.refusal = refused("rename", error);
      return found;
    }

    // 3. A rename over a folder with a file in it.
    const unsigned int flags = found.keeps_existing ? RENAME_NOREPLACE : 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (!make_other()) return {};
      const int kept = rename_with(from, to, flags);
      if (says_nothing(kept)) return {};
      found.keeps_existing = kept != 0;
      if (kept != 0) break;
      // Either `to` was replaced or another process had removed it: the second time says.
      if (rename_with(to, from, 0) != 0) return {};
      if (attempt == 1 && !make_other()) return {};
    }

    // 4. The exchange.
    const int exchanged = rename_with(from, to, RENAME_EXCHANGE);
    if (says_nothing(exchanged) || (exchanged == 0 && !exists(to))) return {};
    found.exchanges = exchanged == 0 && exists(to + kLock);
    return found;
  }

 private:
  // Another process has removed both.
  bool gone() const { return !exists(folders_[0]) && !exists(folders_[1]); }

  bool make_other() const {
    const std::string& to = folders_[1];
    const int other = mkdir(to.c_str(), 0777) == 0 ? new_file(to + kOther) : -1;
    if (other >= 0) close(other);
    return other >= 0;
  }

  const std::string folders_[2];
  int lock_ = -1;
};

}  // namespace

struct flock lock_of_whole_file() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

bool exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool unsupported(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

int rename_to_free_name(const std::string& from, const std::string& to) {
  const int error = rename_with(from, to, RENAME_NOREPLACE);
  if (!unsupported(error)) return error;
  if (link(from.c_str(), to.c_str()) == 0) {  // never of a folder
    unlink(from.c_str());
    return 0;
  }
  if (exists(to)) return EEXIST;
  return rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

std::optional<FileSystem> try_file_system(const std::string& from, const std::string& to) {
  return Trial(from, to).run();
}

std::string weaker_promises(const FileSystem& found) {
  const std::pair<bool, const char*> promises[] = {
      {!found.copies,
       "A rename copies one object after the other, so a checkpoint can appear by halves, which "
       "latest() passes over: keep_last(2) or more."},
      {found.locks,
       "There are no record locks, so a save or keep_last() of another process can remove what a "
       "save is writing, and that save fails: let one job at a time use the folder."},
      {found.exchanges,
       "Two folders cannot be exchanged, so overwrite(true) replaces no checkpoint: save under new "
       "names."},
      {found.keeps_existing,
       "A rename replaces what is there, so two saves to one path at once leave one of the two."},
      {found.syncs_folders,
       "Names cannot be brought to disk, so a crash of the machine may lose the newest "
       "checkpoints."}};
  std::string text;
  for (const auto& [holds, otherwise] : promises) {
    if (!holds) text.append(text.empty() ? "" : " ").append(otherwise);
  }
  return text;
}

}  // namespace zero
