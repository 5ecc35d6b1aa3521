// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Folders that appear complete or not at all, on file systems that cannot exchange
// folders or have no locks, with saves that overlap and saves that are killed.
//
// This file's own renameat2(), rename(), fsync(), open() and fcntl() take the place of the C
// library's in the whole program: they play such a file system, or end the process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/warnings.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace {

bool has_exchange = true;
bool has_noreplace = true;
bool has_locks = true;
bool opens_locks = true;  // of others
bool renames_folders = true;
bool dies_at_flags = false;
std::function<void()> before_rename;
std::function<void(const char* to, unsigned int flags)> before_flags;  // of renameat2()
std::string busy;                                                      // cannot be renamed
std::string broken;                                                    // cannot be brought to disk
int sync_error = 0;                                                    // of all else
std::vector<std::string> on_disk;                                      // by fsync()

}  // namespace

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                         unsigned int flags) noexcept {
  if (flags != 0 && dies_at_flags) _exit(9);
  if (before_flags) before_flags(to, flags);
  if ((!has_exchange && flags != 0) || (!has_noreplace && flags == RENAME_NOREPLACE)) {
    errno = EINVAL;
    return -1;
  }
  if (!renames_folders) {
    errno = ENOSYS;
    return -1;
  }
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  if (before_rename) before_rename();
  if (from == busy) {
    errno = EBUSY;
    return -1;
  }
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

extern "C" int fsync(int file) {
  std::error_code ignored;
  on_disk.push_back(
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string());
  if (on_disk.back() == broken || sync_error != 0) {
    errno = on_disk.back() == broken ? EIO : sync_error;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fsync, file));
}

extern "C" int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (!opens_locks && (flags & O_CREAT) == 0 && std::string(path).ends_with("/lock")) {
    errno = EACCES;
    return -1;
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

extern "C" int fcntl(int file, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  if (!has_locks && (command == F_GETLK || command == F_SETLK)) {
    errno = ENOLCK;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fcntl, file, command, argument));
}

namespace zero {
namespace {

namespace fs = std::filesystem;

class AtomicDirectoryTest : public ::testing::Test {
 protected:
  AtomicDirectoryTest() {
    fs::remove_all(parent_);
    fs::create_directories(parent_);
  }
  ~AtomicDirectoryTest() override {
    has_exchange = has_noreplace = has_locks = opens_locks = renames_folders = true;
    before_rename = nullptr;
    busy.clear();
    broken.clear();
    sync_error = 0;
    before_flags = nullptr;
  }

  int hidden() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(parent_)) {
      count += entry.path().filename().string()[0] == '.' ? 1 : 0;
    }
    return count;
  }

  const std::string parent_ = ::testing::TempDir() + "/atomic";
  const std::string target_ = parent_ + "/current";
};

// A checkpoint without tensors after `steps` steps.
void fill(const std::string& folder, int64_t steps) {
  Manifest m;
  m.id = "1";
  m.steps = steps;
  m.saved = steps;
  std::ofstream(folder + "/" + kManifestName) << manifest_text(m);
}

void save(const std::string& target, int64_t steps) {
  AtomicDirectory directory(target, /*overwrite=*/true, kManifestName);
  fill(directory.path(), steps);
  directory.publish();
}

int64_t steps_at(const std::string& folder) { return read_manifest(folder).steps; }

// A process that runs `body` and is then gone, and its exit status: -1 where it was killed.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : id_(fork()) {
    if (id_ != 0) return;
    body();
    _exit(0);
  }
  pid_t id() const { return id_; }
  int wait() {
    int status = 0;
    waitpid(id_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  const pid_t id_;
};

// One side tells the other that it may go on.
class Signal {
 public:
  Signal() { EXPECT_EQ(pipe(ends_), 0); }
  ~Signal() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void give() { EXPECT_EQ(write(ends_[1], "x", 1), 1); }
  void await() {
    char byte = 0;
    EXPECT_EQ(read(ends_[0], &byte, 1), 1);
  }

 private:
  int ends_[2] = {};
};

TEST_F(AtomicDirectoryTest, OneOfSeveralProcessesMakesTheFolderOfAnId) {
  for (const bool locks : {true, false}) {
    has_locks = locks;
    for (int round = 0; round < 20; ++round) {
      const std::string id = random_id();
      std::vector<std::unique_ptr<Child>> children;
      for (int i = 0; i < 4; ++i) {
        children.push_back(std::make_unique<Child>([&] {
          const auto* directory = new AtomicDirectory(target_, false, kManifestName, id);
          _exit(directory->made() ? 1 : 0);  // the folder stays
        }));
      }
      int made = 0;
      for (const auto& child : children) made += child->wait();
      EXPECT_EQ(made, 1);
      EXPECT_TRUE(fs::is_directory(saving_path(target_, id)));
      const AtomicDirectory later(target_, false, kManifestName, id);
      EXPECT_FALSE(later.made());
    }
    // The next save finds them all dead, and removes them.
    AtomicDirectory next(target_, false, kManifestName);
    EXPECT_TRUE(next.made());
    EXPECT_EQ(hidden(), 1);
  }
  has_locks = true;
}

TEST_F(AtomicDirectoryTest, ATargetIsExchangedAndKeptWithoutOverwrite) {
  for (int64_t steps = 1; steps < 4; ++steps) {
    save(target_, steps);
    EXPECT_EQ(steps_at(target_), steps);
    EXPECT_EQ(hidden(), 0);
  }
  EXPECT_NE(error_of([&] { AtomicDirectory(target_, /*overwrite=*/false, kManifestName); }), "");
  EXPECT_EQ(steps_at(target_), 3);
}

TEST_F(AtomicDirectoryTest, ALinkThatIsReplacedLeavesNothing) {
  const std::string linked = parent_ + "/linked";
  save(linked, 1);
  fs::create_symlink("linked", target_);
  save(target_, 2);
  EXPECT_EQ(steps_at(target_), 2);
  EXPECT_EQ(steps_at(linked), 1);
  EXPECT_EQ(names_in(parent_).size(), 2U);
}

// "..": of the folder to which a link leads, as for every call of the system.
TEST_F(AtomicDirectoryTest, APathBehindALinkIsTheOneThatTheSystemFinds) {
  fs::create_directories(parent_ + "/other/deep");
  fs::create_directory_symlink("other/deep", parent_ + "/link");
  const std::string target = parent_ + "/link/../current";
  {
    AtomicDirectory directory(target, /*overwrite=*/false, kManifestName);
    EXPECT_EQ(hidden(), 0);
    fill(directory.path(), 1);
    on_disk.clear();
    directory.publish();
  }
  EXPECT_EQ(steps_at(parent_ + "/other/current"), 1);
  const std::string other = fs::canonical(parent_ + "/other").string();
  EXPECT_NE(std::find(on_disk.begin(), on_disk.end(), other), on_disk.end());
  EXPECT_EQ(names_in(parent_ + "/other").size(), 2U);
  save(parent_ + "/new/../next", 2);  // missing parents are made
  EXPECT_EQ(steps_at(parent_ + "/next"), 2);
  EXPECT_EQ(hidden(), 0);
}

// Where two folders cannot be exchanged, a checkpoint is replaced by no save, and new ones appear.
TEST_F(AtomicDirectoryTest, WithoutExchangeATargetIsKeptAndTheSaveRefusedBeforeAnythingIsWritten) {
  const std::string parent = parent_ + "/no_exchange", target = parent + "/current";
  has_exchange = false;
  save(target, 1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_words(error_of([&] { save(target, 2); }),
                 {target, "exchange two folders", "overwrite(true)", "new name"});
    EXPECT_EQ(steps_at(target), 1);
    EXPECT_EQ(names_in(parent), std::vector<std::string>{"current"});
  }
  save(parent + "/next", 2);
  EXPECT_EQ(latest(parent), parent + "/next");
}

TEST_F(AtomicDirectoryTest, AnExchangeNeedsNoOtherFlag) {
  const std::string target = parent_ + "/no_noreplace/current";
  has_noreplace = false;
  save(target, 1);
  save(target, 2);
  EXPECT_EQ(steps_at(target), 2);
}

TEST_F(AtomicDirectoryTest, ATargetThatAppearsWhereNoneCanBeExchangedIsKept) {
  AtomicDirectory directory(target_, /*overwrite=*/true, kManifestName);
  fill(directory.path(), 2);
  fs::create_directories(target_);
  fill(target_, 1);
  has_exchange = false;
  expect_words(error_of([&] { directory.publish(); }), {target_, "exchange two folders"});
  EXPECT_EQ(steps_at(target_), 1);
}

// Dies before the n-th rename of a save.
void die_at_rename(const std::string& target, int number) {
  Child child([&] {
    const auto count = [&number] {
      if (--number == 0) _exit(9);
    };
    before_rename = count;
    before_flags = [&](const char*, unsigned int) { count(); };
    save(target, 2);
  });
  child.wait();
}

TEST_F(AtomicDirectoryTest, AKillAtAnyRenameLosesNothing) {
  for (int number = 1; number < 6; ++number) {
    save(target_, 1);
    die_at_rename(target_, number);
    EXPECT_EQ(latest(parent_), target_) << number;
    EXPECT_EQ(steps_at(target_), number <= 2 ? 1 : 2) << number;
    // What was replaced must not come back after the target was removed on purpose.
    save(parent_ + "/newer", 9);
    EXPECT_EQ(keep_last(parent_, 1), std::vector<std::string>{target_});
    EXPECT_EQ(latest(parent_), parent_ + "/newer") << number;
    EXPECT_FALSE(fs::exists(target_));
    EXPECT_EQ(hidden(), 0) << number;
    fs::remove_all(parent_ + "/newer");
  }
}

TEST_F(AtomicDirectoryTest, AFileThatAppearsAtTheTargetIsKept) {
  for (const bool exchange : {true, false}) {
    has_exchange = exchange;
    const auto publish = [&] {
      AtomicDirectory directory(target_, /*overwrite=*/false, kManifestName);
      fill(directory.path(), 1);
      if (exchange) std::ofstream(target_) << "another program's";
      directory.publish();
    };
    before_rename = [&] { std::ofstream(target_) << "another program's"; };
    expect_words(error_of(publish), {"cannot rename", target_});
    before_rename = nullptr;
    EXPECT_TRUE(fs::is_regular_file(target_));
    EXPECT_EQ(hidden(), 0);
    fs::remove(target_);
  }
}

TEST_F(AtomicDirectoryTest, ASecondSaveInThisProcessIsRefused) {
  save(target_, 1);
  {
    AtomicDirectory first(target_, true, kManifestName);
    for (const std::string& same :
         {target_, parent_ + "/./current/", parent_ + "/../atomic/current"}) {
      expect_words(
          error_of([&] { AtomicDirectory(same, true, kManifestName); }),
          {"under way", "by this process", fs::path(first.path()).filename().string(), "finish()"});
    }
    AtomicDirectory other(parent_ + "/other", true, kManifestName);
    EXPECT_TRUE(keep_last(parent_, 1).empty());
    fill(first.path(), 2);
    first.publish();
  }
  EXPECT_EQ(steps_at(target_), 2);
  save(target_, 3);
  EXPECT_EQ(hidden(), 0);
}

TEST_F(AtomicDirectoryTest, ASaveOfALivingProcessIsRefusedAndOneOfADeadProcessReplaced) {
  save(target_, 1);
  Signal begun;
  Child child([&] {
    setpgid(0, 0);
    AtomicDirectory directory(target_, true, kManifestName);
    // A data loader, for example: it outlives its parent and must not keep the lock.
    Child loader([&] { pause(); });
    begun.give();
    pause();
  });
  begun.await();
  expect_words(error_of([&] { save(target_, 2); }),
               {"under way", "by process " + std::to_string(child.id())});
  keep_last(parent_, 1);
  EXPECT_EQ(hidden(), 1) << "keep_last() removed what a living process writes";
  kill(child.id(), SIGKILL);
  EXPECT_EQ(child.wait(), -1);
  save(target_, 2);
  EXPECT_EQ(steps_at(target_), 2);
  EXPECT_EQ(hidden(), 0);
  EXPECT_EQ(kill(-child.id(), SIGKILL), 0) << "the data loader was to live on";
}

// Without locks the first save cannot be seen to live. It must not publish the second's files.
TEST_F(AtomicDirectoryTest, WithoutLocksTheSaveThatLostItsFolderIsRefused) {
  has_locks = false;
  save(target_, 1);
  Signal begun, go_on;
  Child child([&] {
    AtomicDirectory directory(target_, true, kManifestName);
    begun.give();
    go_on.await();
    const std::string error = error_of([&] { directory.publish(); });
    _exit(error.find("save again") != std::string::npos ? 7 : 1);
  });
  begun.await();
  AtomicDirectory second(target_, true, kManifestName);
  go_on.give();
  EXPECT_EQ(child.wait(), 7);
  EXPECT_EQ(steps_at(target_), 1) << "the old one stays until the second is complete";
  fill(second.path(), 2);
  second.publish();
  EXPECT_EQ(steps_at(target_), 2);
  EXPECT_EQ(hidden(), 0);
}

TEST_F(AtomicDirectoryTest, WhatWasReplacedMayBeRemovedLaterByWhoeverHasTheTask) {
  save(target_, 1);
  std::vector<std::function<void()>> tasks;
  for (int64_t steps = 2; steps <= 4; ++steps) {
    AtomicDirectory directory(target_, true, kManifestName);
    fill(directory.path(), steps);
    directory.publish([&](std::function<void()> task) { tasks.push_back(std::move(task)); });
    EXPECT_EQ(steps_at(target_), steps);
    EXPECT_EQ(hidden(), steps - 1) << "only a task removes it, and not the next save";
  }
  for (const auto& task : tasks) task();
  EXPECT_EQ(steps_at(target_), 4);
  EXPECT_EQ(hidden(), 0);
}

// As after a crash before the task.
TEST_F(AtomicDirectoryTest, WhatATaskDidNotRemoveTheNextSaveRemoves) {
  save(target_, 1);
  {
    AtomicDirectory directory(target_, true, kManifestName);
    fill(directory.path(), 2);
    directory.publish([](const std::function<void()>&) {});
  }
  EXPECT_EQ(hidden(), 1);
  save(target_, 3);
  EXPECT_EQ(hidden(), 0);
  EXPECT_EQ(steps_at(target_), 3);
}

TEST_F(AtomicDirectoryTest, AForkedChildRemovesNothing) {
  AtomicDirectory directory(target_, true, kManifestName);
  fill(directory.path(), 1);
  Child child([&] { directory.~AtomicDirectory(); });
  EXPECT_EQ(child.wait(), 0);
  directory.publish();
  EXPECT_EQ(steps_at(target_), 1);
}

// In the folder `run` a save of step-4 that was killed takes space, which that of step-5 needs.
TEST_F(AtomicDirectoryTest, ASaveRemovesWhatAKilledOneToAnotherTargetLeft) {
  const auto die = [&](bool locks) {
    Child child([&] {
      has_locks = locks;
      const auto* directory = new AtomicDirectory(parent_ + "/step-4", false, kManifestName);
      std::ofstream(directory->path() + "/rank-00000.safetensors") << "x";
      _exit(0);
    });
    child.wait();
  };
  die(true);
  fs::create_directories(parent_ + "/.0123456789abcdef.removed/rest");
  EXPECT_EQ(hidden(), 2);
  {
    const AtomicDirectory next(parent_ + "/step-5", false, kManifestName);
    EXPECT_EQ(hidden(), 1);
  }
  // Nothing says that it is dead.
  die(true);
  has_locks = false;
  const AtomicDirectory next(parent_ + "/step-5", false, kManifestName);
  EXPECT_EQ(hidden(), 2);
}

TEST_F(AtomicDirectoryTest, ASaveLeavesALivingOneToAnotherTargetAlone) {
  Signal begun, go_on;
  Child child([&] {
    AtomicDirectory directory(parent_ + "/step-4", false, kManifestName);
    fill(directory.path(), 4);
    // Others try until the last moment before it has its name.
    has_exchange = false;
    before_rename = [&] {
      begun.give();
      go_on.await();
      before_rename = nullptr;
    };
    directory.publish();
  });
  begun.await();
  save(parent_ + "/step-5", 5);
  keep_last(parent_, 2);
  go_on.give();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(steps_at(parent_ + "/step-4"), 4);
  EXPECT_FALSE(fs::exists(parent_ + "/step-4/lock"));
}

// Of another user, whose hidden folder is not for others.
TEST_F(AtomicDirectoryTest, ALockThatCannotBeOpenedIsNotThatOfADeadSave) {
  Signal begun, go_on;
  Child child([&] {
    AtomicDirectory directory(parent_ + "/step-4", false, kManifestName);
    fill(directory.path(), 4);
    begun.give();
    go_on.await();
    directory.publish();
  });
  begun.await();
  opens_locks = false;
  keep_last(parent_, 2);
  go_on.give();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(steps_at(parent_ + "/step-4"), 4);
}

// How a group shares a folder.
TEST_F(AtomicDirectoryTest, WhatIsSavedHasTheRightsThatTheProcessGives) {
  const mode_t before = umask(002);
  {
    AtomicDirectory directory(target_, false, kManifestName);
    FileWriter(directory.path() + "/file");
    directory.publish();
  }
  umask(before);
  const auto rights = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 07777;
  };
  EXPECT_EQ(rights(target_), 0775u);
  EXPECT_EQ(rights(target_ + "/file"), 0664u);
}

TEST_F(AtomicDirectoryTest, ARemovalThatFailsDoesNotStopTheOthers) {
  for (int64_t steps = 1; steps <= 3; ++steps) save(parent_ + "/" + std::to_string(steps), steps);
  busy = parent_ + "/1";
  EXPECT_EQ(keep_last(parent_, 1), std::vector<std::string>{parent_ + "/2"});
  EXPECT_EQ(steps_at(parent_ + "/1"), 1);
  busy.clear();
  EXPECT_EQ(keep_last(parent_, 1), std::vector<std::string>{parent_ + "/1"});
  EXPECT_EQ(hidden(), 0);
}

TEST_F(AtomicDirectoryTest, ANameThatCannotBeBroughtToDiskIsAnErrorThatSaysWhatIsThere) {
  save(target_, 1);
  AtomicDirectory directory(target_, true, kManifestName);
  fill(directory.path(), 2);
  broken = fs::canonical(parent_).string();
  expect_words(error_of([&] { directory.publish(); }),
               {"Input/output error", "there and complete", "crash of the machine"});
  EXPECT_EQ(steps_at(target_), 2);
}

TEST_F(AtomicDirectoryTest, ParentsThatAreMadeAreOnDiskUnderTheirNames) {
  on_disk.clear();
  save(parent_ + "/a/b/current", 1);
  for (const std::string& folder : {parent_, parent_ + "/a", parent_ + "/a/b"}) {
    const std::string real = fs::canonical(folder).string();
    EXPECT_NE(std::find(on_disk.begin(), on_disk.end(), real), on_disk.end()) << real;
  }
}

TEST_F(AtomicDirectoryTest, WeakerPromisesOfAFileSystemAreOneWarningForADevice) {
  Warnings warnings;
  save(parent_ + "/local/a", 1);
  EXPECT_TRUE(warnings.texts.empty());
  has_exchange = has_locks = false;
  sync_error = EINVAL;
  save(parent_ + "/nfs/a", 1);
  save(parent_ + "/nfs/b", 1);
  ASSERT_EQ(warnings.texts.size(), 1u);
  expect_words(warnings.texts[0],
               {"/nfs is on", "no record locks", "exchanged", "brought to disk"});
  save(parent_ + "/other/a", 1);
  EXPECT_EQ(warnings.texts.size(), 1u);
}

TEST_F(AtomicDirectoryTest, AFileSystemThatCannotBringFoldersToDiskIsRefused) {
  const std::string folder = parent_ + "/unsynced";
  fs::create_directories(folder);
  sync_error = EIO;
  expect_words(error_of([&] { save(folder + "/a", 1); }),
               {"/unsynced: expected", "fsync of a folder", "Input/output error"});
  EXPECT_TRUE(fs::is_empty(folder));
  sync_error = 0;
  save(folder + "/a", 1);
}

// Another process removes both folders of a trial, or the second one, before any of its renames.
TEST_F(AtomicDirectoryTest, ATrialWhoseFoldersAreRemovedRefusesAndWarnsOfNothing) {
  Warnings warnings;
  for (const bool both : {false, true}) {
    int left = -1, calls = 0;
    for (; left < 0; ++calls) {
      const std::string folder =
          parent_ + "/trials" + std::to_string(calls) + (both ? "both" : "one");
      left = calls;
      before_flags = [&](const char* to, unsigned int) {
        if (left-- != 0) return;
        for (const std::string& name : names_in(folder)) {
          const bool second = fs::path(to).filename() == name;
          if (name.rfind("..trial.", 0) == 0 && (both || second)) {
            fs::remove_all(folder + "/" + name);
          }
        }
      };
      save(folder + "/a", 1);
      before_flags = nullptr;
      save(folder + "/b", 1);  // tries again
      EXPECT_EQ(names_in(folder).size(), 2u);
    }
    EXPECT_GE(calls, 6) << "five renames, and a round without a removal";
  }
  EXPECT_TRUE(warnings.texts.empty()) << warnings.texts.front();
}

// The name of a trial is no user's target.
TEST_F(AtomicDirectoryTest, ATargetCalledTrialIsSavedBesideATrialOfAnotherProcess) {
  const std::string folder = parent_ + "/busy";
  Signal begun, go_on;
  Child child([&] {
    before_flags = [&](const char*, unsigned int flags) {
      if (flags == 0) return;
      before_flags = nullptr;
      begun.give();
      go_on.await();
    };
    save(folder + "/a", 1);
    _exit(0);
  });
  begun.await();
  EXPECT_FALSE(fs::is_empty(folder));
  save(folder + "/trial", 2);
  go_on.give();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(names_in(folder).size(), 2u);
}

TEST_F(AtomicDirectoryTest, ATrialThatWasKilledWithoutALockIsRemovedByTheNextSave) {
  const std::string left = parent_ + "/left/..trial.0123456789abcdef.saving";
  fs::create_directories(left);
  std::ofstream(left + "/other") << "";
  save(parent_ + "/left/a", 1);
  EXPECT_EQ(names_in(parent_ + "/left"), std::vector<std::string>{"a"});
}

TEST_F(AtomicDirectoryTest, AFileSystemThatCannotRenameFoldersIsRefusedBeforeAnythingIsWritten) {
  const std::string bucket = parent_ + "/bucket";
  renames_folders = false;
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_words(error_of([&] { save(bucket + "/a", 1); }),
                 {"/bucket: expected", "renames folders", "of type", "Function not implemented",
                  "local disk"});
    EXPECT_TRUE(fs::is_empty(bucket)) << "the trial leaves nothing";
  }
  renames_folders = true;
  save(bucket + "/a", 1);
  EXPECT_EQ(steps_at(bucket + "/a"), 1);
}

TEST_F(AtomicDirectoryTest, ATrialThatWasKilledIsRemovedByTheNextSave) {
  const std::string target = parent_ + "/killed/a";
  Child child([&] {
    dies_at_flags = true;
    save(target, 1);
  });
  EXPECT_EQ(child.wait(), 9);
  EXPECT_FALSE(fs::is_empty(parent_ + "/killed"));
  save(target, 1);
  EXPECT_EQ(names_in(parent_ + "/killed"), std::vector<std::string>{"a"});
}

TEST_F(AtomicDirectoryTest, HiddenFoldersWithoutATagOfThisLibraryAreKept) {
  for (const char* name : {".backup.saving", ".current.saving", ".photos.removed", ".0123.removed",
                           ".thesis.replaced", ".current.replaced", ".x.0123456789abcdeX.saving"}) {
    fs::create_directories(parent_ + "/" + name);
    std::ofstream(parent_ + "/" + name + "/file") << "a user's";
  }
  save(target_, 1);
  save(target_, 2);
  keep_last(parent_, 1);
  EXPECT_EQ(hidden(), 7);
}

TEST_F(AtomicDirectoryTest, FoldersOfTheUsersAreKept) {
  fs::create_directories(parent_ + "/real");
  fill(parent_ + "/real", 1);
  fs::create_directory_symlink("real", parent_ + "/.a.saving");
  fs::create_directory_symlink("real", parent_ + "/.b.replaced");
  std::ofstream(parent_ + "/.c.saving") << "a file";
  EXPECT_TRUE(keep_last(parent_, 1).empty());
  EXPECT_EQ(hidden(), 3);
  EXPECT_EQ(steps_at(parent_ + "/real"), 1);
}

TEST_F(AtomicDirectoryTest, APathWithANulIsRefused) {
  const std::string path = parent_ + std::string("/a\0b", 4);
  const std::vector<std::string> words = {"without a NUL", "/a\\x00b"};
  expect_words(error_of([&] { AtomicDirectory(path, true, kManifestName); }), words);
  expect_words(error_of([&] { verify_checkpoint(path); }), words);
}

}  // namespace
}  // namespace zero
