// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/atomic_directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "zero/checked_file.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// Without a slash at the end, which would hide the last name.
fs::path plain(const std::string& path) {
  fs::path result = fs::path(path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

std::string parent_of(const std::string& path) {
  const std::string parent = plain(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

std::string hidden(const std::string& target, const char* suffix) {
  return parent_of(target) + "/." + plain(target).filename().string() + suffix;
}

bool exists(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw_errno("cannot remove " + path, error.value());
}

}  // namespace

std::string saving_path(const std::string& target) { return hidden(target, ".saving"); }
std::string replaced_path(const std::string& target) { return hidden(target, ".replaced"); }

AtomicDirectory::AtomicDirectory(std::string target, bool overwrite, const char* required)
    : target_(std::move(target)), path_(saving_path(target_)), overwrite_(overwrite) {
  TORCH_CHECK(!plain(target_).filename().empty() && plain(target_).filename() != "..",
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
  remove_tree(path_);
  if (mkdir(path_.c_str(), 0755) != 0) throw_errno("cannot make the folder " + path_, errno);
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!published_) fs::remove_all(path_, ignored);
}

void AtomicDirectory::publish() {
  sync_folder(path_);
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) != 0) {
    const bool unsupported = errno == EINVAL || errno == ENOSYS;
    if (unsupported && !exists(target_)) {
      if (rename(path_.c_str(), target_.c_str()) != 0) {
        throw_errno("cannot rename " + path_ + " to " + target_, errno);
      }
    } else if (overwrite_ && (unsupported || errno == EEXIST)) {
      replace();
    } else {
      throw_errno("cannot rename " + path_ + " to " + target_, errno);
    }
  }
  published_ = true;
  sync_folder(parent_of(target_));
  std::error_code ignored;  // what was replaced is of no use to anyone
  fs::remove_all(path_, ignored);
  fs::remove_all(replaced_path(target_), ignored);
}

void AtomicDirectory::replace() {
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) {
    throw_errno("cannot exchange " + path_ + " and " + target_, errno);
  }
  const std::string aside = replaced_path(target_);
  remove_tree(aside);
  if (rename(target_.c_str(), aside.c_str()) != 0) {
    throw_errno("cannot rename " + target_ + " to " + aside, errno);
  }
  if (rename(path_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    rename(aside.c_str(), target_.c_str());
    throw_errno("cannot rename " + path_ + " to " + target_, error);
  }
}

void remove_directory(const std::string& path) {
  const std::string aside = replaced_path(path);
  remove_tree(aside);
  if (rename(path.c_str(), aside.c_str()) != 0) {
    if (errno == ENOENT) return;
    throw_errno("cannot remove " + path, errno);
  }
  remove_tree(aside);
}

}  // namespace zero
