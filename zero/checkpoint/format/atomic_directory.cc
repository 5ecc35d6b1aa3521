// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/atomic_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/checkpoint/format/file_system.h"
#include "zero/checkpoint/format/hashed_file.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr char kSaving[] = ".saving";
constexpr char kRemoved[] = ".removed";
// A trial of the file system has this name in place of a checkpoint's. The dot keeps it apart from
// names of users.
constexpr char kTrial[] = ".trial";
// Digits by which a name is known to be this library's.
constexpr size_t kTagDigits = kHashDigits;
constexpr char kNoExchange[] =
    ": expected a file system that can exchange two folders, since overwrite(true) shall replace "
    "what is there in one system call, got one that cannot (NFS, for example); save under a new "
    "name, and remove the old checkpoint afterwards, as keep_last() does";
// Of a removal that others take part in.
constexpr int kAttempts = 100;

// Makes a folder and the missing ones above it, each on disk under its name.
void make_folders(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return;
  make_folders(parent_of(path));
  if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
    throw_errno("cannot make the folder " + path, errno);
  }
  sync_folder(parent_of(path));
}

// Without "/" and "/." at the end, to which nothing can be renamed. The rest stays as it is, since
// ".." behind a link leads to another place than its text says.
std::string without_end(const std::string& path) {
  fs::path result(path);
  while (result.has_parent_path() && result.has_relative_path() &&
         (!result.has_filename() || result.filename() == ".")) {
    result = result.parent_path();
  }
  return result.string();
}

std::string name_of(const std::string& path) {
  return fs::path(without_end(path)).filename().string();
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

// Others may be removing it, too. A removal that fails is a warning: nobody waits for its space.
void remove_tree(const std::string& path) {
  std::error_code error;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    fs::remove_all(path, error);
    if (!error || !exists(path)) return;
    if (error != std::errc::no_such_file_or_directory && error != std::errc::directory_not_empty) {
      break;
    }
  }
  TORCH_WARN("cannot remove ", path, ": ", error.message());
}

// The beginning of the names of what this process removes.
const std::string& removal_tag() {
  static const auto* tag = new std::string(random_id().substr(0, kTagDigits / 2));
  return *tag;
}

// A free name beside `path` for what is being removed.
std::string removed_path(const std::string& path) {
  return parent_of(path) + "/." + removal_tag() + random_id().substr(0, kTagDigits / 2) + kRemoved;
}

// The rest of a hidden folder's name that ends with `suffix`: the target's name, with or without a
// tag, or a tag alone.
std::optional<std::string> hidden_target(const std::string& name, const std::string& suffix) {
  const bool fits = name.starts_with('.') && name.ends_with(suffix);
  if (!fits || name.size() <= suffix.size() + 1) return std::nullopt;
  return name.substr(1, name.size() - 1 - suffix.size());
}

// Whether this process or another one has renamed a folder of this name to remove it.
bool is_removed(const std::string& name) {
  const auto tag = hidden_target(name, kRemoved);
  return tag && is_hash_text(*tag);
}

// The target's name in that of a hidden folder which a save fills.
std::optional<std::string> saving_target(const std::string& name) {
  const auto found = hidden_target(name, kSaving);
  if (!found || found->size() < kTagDigits + 2) return std::nullopt;
  const size_t dot = found->size() - kTagDigits - 1;
  if ((*found)[dot] != '.' || !is_hash_text(found->substr(dot + 1))) return std::nullopt;
  return found->substr(0, dot);
}

// Removes what was renamed to be removed. What cannot be removed, the next save tries again.
void remove_what_is_renamed(const std::string& parent, bool by_others_alone = false) noexcept {
  try {
    std::vector<std::string> paths;
    for (const std::string& name : names_in(parent)) {
      const std::string path = parent + "/" + name;
      const bool own = name.compare(1, removal_tag().size(), removal_tag()) == 0;
      if (is_removed(name) && is_folder(path) && !(own && by_others_alone)) paths.push_back(path);
    }
    if (paths.empty()) return;
    sync_folder(parent);  // see remove_directory()
    for (const std::string& path : paths) remove_tree(path);
  } catch (const std::exception& error) {
    TORCH_WARN(error_text(error));
  }
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

// Who fills a hidden folder: nothing for a dead one, and `unsure` for one that may be dead: it has
// no lock, or the file system none. `unopened` in place of `unsure` if there is a lock that cannot
// be opened, as that of another user. The caller holds own_saves().mutex.
std::optional<std::string> owner_of(const std::string& path,
                                    const std::optional<std::string>& unsure,
                                    const std::optional<std::string>& unopened) {
  // Not opened where it is this process's own: closing a file drops its record locks.
  if (own_saves().names.count(name_of(path)) != 0) return "by this process";
  const std::string lock_path = path + kLock;
  const int file = open(lock_path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (file < 0) return errno == ENOENT || errno == ELOOP ? unsure : unopened;
  struct flock lock = lock_of_whole_file();
  const bool known = fcntl(file, F_GETLK, &lock) == 0;
  close(file);
  if (!known) return unsure;
  if (lock.l_type == F_UNLCK) return std::nullopt;
  return lock.l_pid > 0 ? "by process " + std::to_string(lock.l_pid) : "by another process";
}

// Throws if no save can work in `parent`. Returns whether two folders can be exchanged there, or
// true if that is not known. Tries each folder once, and warns of weaker promises once for each
// device, since jobs save to a new folder each time. The caller holds own_saves().mutex: another
// thread would close the file that the trial locks.
bool try_once(const std::string& parent) {
  static auto* tried = new std::map<std::tuple<std::string, dev_t, ino_t>, bool>;
  static auto* warned = new std::set<std::pair<dev_t, std::string>>;
  struct stat status {};
  std::error_code ignored;
  if (stat(parent.c_str(), &status) != 0) return true;
  const auto key =
      std::make_tuple(fs::canonical(parent, ignored).string(), status.st_dev, status.st_ino);
  if (const auto known = tried->find(key); known != tried->end()) return known->second;
  const std::string trial = parent + "/" + kTrial;
  const auto found =
      try_file_system(saving_path(trial, random_id()), saving_path(trial, random_id()));
  if (!found) return true;
  TORCH_CHECK(found->refusal.empty(), parent,
              ": expected a file system that renames folders and brings them to disk, which is how "
              "a checkpoint appears complete or not at all, got one of type ",
              found->type, " that refuses it (", found->refusal,
              "); save to a local disk, NFS or Lustre and copy the finished checkpoint to where it "
              "shall be kept");
  const std::string weaker = weaker_promises(*found);
  if (!weaker.empty() && warned->emplace(status.st_dev, weaker).second) {
    TORCH_WARN(parent, " is on a file system of type ", found->type,
               ", where checkpoints are less safe than on a local disk. ", weaker);
  }
  return tried->emplace(key, found->exchanges).first->second;
}

}  // namespace

std::string random_id() {
  std::random_device device;
  const auto number = [&] { return (uint64_t{device()} << 32) ^ device(); };
  return hash_text(number()) + hash_text(number());
}

std::string parent_of(const std::string& target) {
  const std::string parent = fs::path(without_end(target)).parent_path().string();
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

std::string saving_path(const std::string& target, const std::string& id) {
  return parent_of(target) + "/." + name_of(target) + "." + id.substr(0, kTagDigits) + kSaving;
}

AtomicDirectory::AtomicDirectory(std::string target, bool overwrite, const char* required,
                                 std::string id)
    : target_(without_end(target)),
      id_(std::move(id)),
      path_(saving_path(target_, id_)),
      required_(required),
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
  make_folders(parent_of(target_));
  make();
}

void AtomicDirectory::make() {
  const std::lock_guard<std::mutex> guard(own_saves().mutex);
  const std::string parent = parent_of(target_);
  // What was killed must not take the space of this save. Of another target, a save that may be
  // alive is left alone; a trial is not, since it bears that its folders are removed.
  for (const std::string& name : names_in(parent)) {
    const auto target = saving_target(name);
    const std::string other = parent + "/" + name;
    if (!target || other == path_ || !is_folder(other)) continue;
    const bool same = *target == name_of(target_);
    const bool remove_unsure = same || *target == kTrial;
    const auto unsure = remove_unsure ? std::nullopt : std::optional<std::string>("perhaps");
    const auto owner = owner_of(other, unsure, unsure);
    TORCH_CHECK(!same || !owner, target_,
                ": expected no other save to this folder under way, got one ", owner.value_or(""),
                " in ", other,
                "; finish() it first or save to another folder; if the machine of that process is "
                "gone for good, remove ",
                other);
    if (!owner) remove_directory(other);
  }
  remove_what_is_renamed(parent, /*by_others_alone=*/true);
  const bool exchanges = try_once(parent);
  TORCH_CHECK(exchanges || !exists(target_), target_, kNoExchange);
  if (mkdir(path_.c_str(), 0777) != 0) {
    if (errno == EEXIST) return;
    throw_errno("cannot make the folder " + path_, errno);
  }
  made_ = true;
  const std::string lock_path = path_ + kLock;
  lock_ = open(lock_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (lock_ < 0) {
    const int error = errno;
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    throw_errno("cannot create " + lock_path, error);
  }
  struct flock lock = lock_of_whole_file();
  fcntl(lock_, F_SETLK, &lock);  // without success where the file system has no locks
  own_saves().names.insert(name_of(path_));
}

void AtomicDirectory::unlock(const std::string& path) {
  unlink((path + kLock).c_str());
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
    unlock(path_);  // first, since NFS keeps the name of an open file
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
  sync_folder(path_);
  give_name();
  published_ = true;
  // Only now, since others remove a hidden folder without a lock that is held.
  unlock(target_);
  try {
    sync_folder(parent_of(target_));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, target_, ": expected its name to be on disk, got ", error_text(error),
                "; what was saved is there and complete, but a crash of the machine can lose it; "
                "save again to another disk");
  }
  // The save has succeeded. What cannot be renamed, the next one removes.
  if (is_folder(path_) && exists(path_ + "/" + required_)) {
    rename(path_.c_str(), removed_path(target_).c_str());
  } else if (std::error_code ignored; fs::is_symlink(path_, ignored)) {
    unlink(path_.c_str());  // the target was one, to a checkpoint that stays
  }
  remove([parent = parent_of(target_)] { remove_what_is_renamed(parent); });
}

// A target that is there is exchanged in one call, so that it is at no moment away.
void AtomicDirectory::give_name() {
  int error = rename_to_free_name(path_, target_);
  if (error == EEXIST && overwrite_) {
    if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return;
    error = errno;
  }
  if (error == 0) return;
  TORCH_CHECK(!overwrite_ || !unsupported(error) || !exists(target_), target_, kNoExchange);
  throw_errno("cannot rename " + path_ + " to " + target_, error);
}

void remove_left_overs(const std::string& parent) {
  const std::lock_guard<std::mutex> guard(own_saves().mutex);
  for (const std::string& name : names_in(parent)) {
    const std::string path = parent + "/" + name;
    if (!is_folder(path)) continue;
    const bool dead = saving_target(name) && !owner_of(path, std::nullopt, "perhaps");
    if (dead || is_removed(name)) remove_directory(path);
  }
}

bool remove_directory(const std::string& path) {
  const std::string parent = parent_of(path), aside = removed_path(path);
  try {
    // A save that was killed may not have waited until what replaces this folder is on disk.
    if (exists(path)) sync_folder(parent);
    if (rename(path.c_str(), aside.c_str()) != 0) {
      if (errno == ENOENT) return true;
      throw_errno("cannot remove " + path, errno);
    }
    sync_folder(parent);  // a crash leaves no half of it under its name
    remove_tree(aside);
  } catch (const c10::Error& error) {
    TORCH_WARN(error_text(error));
  }
  return !exists(path);
}

}  // namespace zero
