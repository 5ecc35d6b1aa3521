// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/atomic_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "zero/checkpoint/hashed_file.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr char kSaving[] = ".saving";
constexpr char kReplaced[] = ".replaced";
constexpr char kRemoved[] = ".removed";
constexpr char kLock[] = "/lock";
constexpr size_t kTagDigits = 16;
// A reader may put a replaced folder back between the two renames of replace().
constexpr int kAttempts = 100;

// Without a slash at the end, which would hide the last name.
fs::path plain(const std::string& path) {
  fs::path result = fs::path(path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

// Without "/" and "/." at the end, to which nothing can be renamed.
std::string without_end(const std::string& path) {
  fs::path result(path);
  while (result.has_parent_path() && result.has_relative_path() &&
         (!result.has_filename() || result.filename() == ".")) {
    result = result.parent_path();
  }
  return result.string();
}

std::string name_of(const std::string& path) { return plain(path).filename().string(); }

std::string hidden(const std::string& target, const std::string& suffix) {
  return parent_of(target) + "/." + name_of(target) + suffix;
}

bool exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool unsupported(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

// Others may be removing it, too.
void remove_tree(const std::string& path) {
  std::error_code error;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    fs::remove_all(path, error);
    if (!error || !exists(path)) return;
    if (error != std::errc::no_such_file_or_directory && error != std::errc::directory_not_empty) {
      break;
    }
  }
  throw_errno("cannot remove " + path, error.value());
}

// A free name beside `path` for what is being removed.
std::string removed_path(const std::string& path) {
  return parent_of(path) + "/." + random_id().substr(0, kTagDigits) + std::string(kRemoved);
}

// Out of the way in one step, so that nothing is published or restored by halves.
void remove_renamed(const std::string& path) {
  const std::string aside = removed_path(path);
  if (rename(path.c_str(), aside.c_str()) != 0) {
    if (errno == ENOENT) return;
    throw_errno("cannot remove " + path, errno);
  }
  remove_tree(aside);
}

// The target's name in a hidden one that ends with `suffix`, with or without a tag.
std::optional<std::string> hidden_target(const std::string& name, const std::string& suffix) {
  const bool fits = name.size() > suffix.size() + 1 && name[0] == '.' &&
                    name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
  if (!fits) return std::nullopt;
  return name.substr(1, name.size() - 1 - suffix.size());
}

// Removes what was renamed to be removed, also by a process that has died since.
void remove_what_is_renamed(const std::string& parent) noexcept {
  try {
    for (const std::string& name : names_in(parent)) {
      const std::string path = parent + "/" + name;
      if (hidden_target(name, kRemoved) && is_folder(path)) remove_tree(path);
    }
  } catch (const std::exception&) {  // the next save tries again
  }
}

bool is_saving_of(const std::string& name, const std::string& target_name) {
  const auto found = hidden_target(name, kSaving);
  if (!found) return false;
  if (*found == target_name) return true;  // as earlier versions named it
  const size_t tag = target_name.size() + 1;
  return found->size() == tag + kTagDigits && found->compare(0, tag, target_name + ".") == 0 &&
         found->find_first_not_of("0123456789abcdef", tag) == std::string::npos;
}

// The names of the hidden folders that this process fills. Never destroyed: a save may
// be a static object.
struct OwnSaves {
  std::mutex mutex;
  std::multiset<std::string> names;  // one save has folders of one name on several disks
};
OwnSaves& own_saves() {
  static auto* saves = new OwnSaves;
  return *saves;
}

// Who fills a hidden folder: nothing for a dead one. The caller holds own_saves().mutex.
std::optional<std::string> owner_of(const std::string& path) {
  // Not opened where it is this process's own: closing a file drops its record locks.
  if (own_saves().names.count(name_of(path)) != 0) return "by this process";
  const std::string lock_path = path + kLock;
  const int file = open(lock_path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (file < 0) return std::nullopt;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  const bool held = fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  close(file);
  if (!held) return std::nullopt;
  return lock.l_pid > 0 ? "by process " + std::to_string(lock.l_pid) : "by another process";
}

}  // namespace

std::string random_id() {
  std::random_device device;
  const auto number = [&] { return (uint64_t{device()} << 32) ^ device(); };
  return hash_text(number()) + hash_text(number());
}

std::string parent_of(const std::string& target) {
  const std::string parent = plain(target).parent_path().string();
  return parent.empty() ? "." : parent;
}

std::vector<std::string> names_in(const std::string& parent) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator next(parent, error), end;
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && next != end; next.increment(error)) {
    names.push_back(next->path().filename().string());
  }
  if (error) throw_errno("cannot list " + parent, error.value());
  return names;
}

std::string saving_path(const std::string& target) { return hidden(target, kSaving); }
std::string saving_path(const std::string& target, const std::string& id) {
  return hidden(target, c10::str(".", id.substr(0, kTagDigits), kSaving));
}
std::string replaced_path(const std::string& target) { return hidden(target, kReplaced); }

AtomicDirectory::AtomicDirectory(std::string target, bool overwrite, const char* required,
                                 std::string id)
    : target_(without_end(target)),
      id_(std::move(id)),
      path_(saving_path(target_, id_)),
      overwrite_(overwrite),
      process_(getpid()) {
  check_path(target_);
  TORCH_CHECK(!name_of(target_).empty() && name_of(target_) != "..",
              "expected the path of a new folder, got \"", target_, "\"");
  if (exists(target_)) {
    TORCH_CHECK(overwrite, target_,
                ": expected a path where nothing is, got one that exists; choose another or "
                "set overwrite(true)");
    TORCH_CHECK(exists(target_ + "/" + required), target_,
                ": expected a checkpoint to overwrite, got something without a ", required,
                "; remove it yourself or choose another path");
  }
  std::error_code error;
  fs::create_directories(parent_of(target_), error);
  if (error) throw_errno("cannot make the folder " + parent_of(target_), error.value());
  make();
}

void AtomicDirectory::make() {
  const std::lock_guard<std::mutex> guard(own_saves().mutex);
  for (const std::string& name : names_in(parent_of(target_))) {
    if (!is_saving_of(name, name_of(target_))) continue;
    const std::string other = parent_of(target_) + "/" + name;
    if (other == path_ || !is_folder(other)) continue;
    const auto owner = owner_of(other);
    TORCH_CHECK(!owner, target_, ": expected no other save to this folder under way, got one ",
                owner.value_or(""), " in ", other,
                "; finish() it first or save to another folder; if the machine of that process is "
                "gone for good, remove ",
                other);
    remove_renamed(other);
  }
  if (mkdir(path_.c_str(), 0755) != 0) {
    if (errno == EEXIST) return;
    throw_errno("cannot make the folder " + path_, errno);
  }
  made_ = true;
  const std::string lock_path = path_ + kLock;
  lock_ = open(lock_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (lock_ < 0) {
    const int error = errno;
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    throw_errno("cannot create " + lock_path, error);
  }
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  fcntl(lock_, F_SETLK, &lock);  // without success where the file system has no locks
  own_saves().names.insert(name_of(path_));
}

void AtomicDirectory::unlock() {
  unlink((path_ + kLock).c_str());
  if (lock_ >= 0) close(lock_);
  lock_ = -1;
}

AtomicDirectory::~AtomicDirectory() {
  if (!made_) return;
  if (getpid() != process_) {  // a forked child's copy; its parent goes on
    if (lock_ >= 0) close(lock_);
    return;
  }
  if (!published_) {
    unlock();  // first, since NFS keeps the name of an open file
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::lock_guard<std::mutex> guard(own_saves().mutex);
  std::multiset<std::string>& names = own_saves().names;
  names.erase(names.find(name_of(path_)));
}

void AtomicDirectory::check_present() const {
  TORCH_CHECK(is_folder(path_), target_, ": expected the folder of this save at ", path_,
              ", got none; another save to the same folder or keep_last() in another process has "
              "removed it, on a file system without locks; save again");
}

void AtomicDirectory::publish(const RunTask& remove) {
  check_present();
  unlock();
  sync_folder(path_);
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) != 0) {
    const int error = errno;
    if (unsupported(error) && !exists(target_)) {
      if (rename(path_.c_str(), target_.c_str()) != 0) {
        throw_errno("cannot rename " + path_ + " to " + target_, errno);
      }
    } else if (overwrite_ && (unsupported(error) || error == EEXIST)) {
      replace();
    } else {
      throw_errno("cannot rename " + path_ + " to " + target_, error);
    }
  }
  published_ = true;
  sync_folder(parent_of(target_));
  // The save has succeeded. What cannot be renamed, the next one removes.
  for (const std::string& replaced : {path_, replaced_path(target_)}) {
    if (is_folder(replaced)) rename(replaced.c_str(), removed_path(target_).c_str());
  }
  remove([parent = parent_of(target_)] { remove_what_is_renamed(parent); });
}

void AtomicDirectory::replace() {
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return;
  if (!unsupported(errno)) throw_errno("cannot exchange " + path_ + " and " + target_, errno);
  const std::string aside = replaced_path(target_);
  for (int attempt = 1;; ++attempt) {
    // The folder that waits there is older than the one at the target.
    if (exists(target_) && exists(aside)) remove_renamed(aside);
    if (rename(target_.c_str(), aside.c_str()) != 0 && errno != ENOENT) {
      throw_errno("cannot rename " + target_ + " to " + aside, errno);
    }
    if (rename(path_.c_str(), target_.c_str()) == 0) return;
    const int error = errno;
    if ((error == EEXIST || error == ENOTEMPTY) && attempt < kAttempts) continue;
    rename(aside.c_str(), target_.c_str());
    throw_errno("cannot rename " + path_ + " to " + target_, error);
  }
}

void restore_replaced(const std::string& target, const IsComplete& is_complete) {
  const std::string aside = replaced_path(target);
  if (exists(target) || !is_folder(aside) || !is_complete(aside)) return;
  // One of several processes succeeds. A folder with something in it is never renamed over.
  if (rename(aside.c_str(), target.c_str()) == 0) sync_folder(parent_of(target));
}

void restore_all_replaced(const std::string& parent, const IsComplete& is_complete) {
  for (const std::string& name : names_in(parent)) {
    const auto target = hidden_target(name, kReplaced);
    if (target) restore_replaced(parent + "/" + *target, is_complete);
  }
}

bool is_hidden_by_crash(const std::string& path) {
  const auto target = hidden_target(name_of(path), kReplaced);
  return target && !exists(parent_of(path) + "/" + *target);
}

void remove_left_overs(const std::string& parent, const char* required) {
  const std::lock_guard<std::mutex> guard(own_saves().mutex);
  for (const std::string& name : names_in(parent)) {
    const std::string path = parent + "/" + name;
    if (!is_folder(path)) continue;
    const bool needed = is_hidden_by_crash(path) && exists(path + "/" + required);
    const bool is_left_over = (hidden_target(name, kSaving) && !owner_of(path)) ||
                              (hidden_target(name, kReplaced) && !needed) ||
                              hidden_target(name, kRemoved);
    if (is_left_over) remove_renamed(path);
  }
}

void remove_directory(const std::string& path) { remove_renamed(path); }

}  // namespace zero
