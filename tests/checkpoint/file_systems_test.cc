// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Saves, overwrites, keep_last(), kills and loads on the file systems that this machine can mount,
// for this test alone, and on those that a FUSE server of the test plays. What cannot be mounted is
// skipped and says why. ZERO_FOLDERS=/mnt/nfs/test:/lustre/test tries folders of yours, too, each
// in a new folder zero-test-XXXXXX, which is removed.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "tests/checkpoint/fuse_folder.h"
#include "tests/checkpoint/saving_process.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/own_mounts.h"
#include "tests/support/run_program.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/file_system.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;

FileSystem tried(const std::string& folder) {
  const auto found = try_file_system(folder + "/.try-a", folder + "/.try-b");
  TORCH_CHECK(found, "expected a file system that can be tried at ", folder);
  return *found;
}

bool writes_directly(const std::string& folder) {
  const std::string path = folder + "/direct";
  alignas(4096) static char block[4096];
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_DIRECT | O_CLOEXEC, 0644);
  const bool result = file >= 0 && write(file, block, sizeof(block)) == sizeof(block);
  if (file >= 0) close(file);
  fs::remove(path);
  return result;
}

// What docs/checkpoints.md has in its table.
void print_row(const std::string& name, const std::string& folder) {
  const FileSystem f = tried(folder);
  const auto text = [](bool yes) { return yes ? "yes" : "no"; };
  std::printf(
      "%s (%s): renames folders %s, keeps existing %s, exchanges %s, locks %s, "
      "fsync of folders %s, O_DIRECT %s\n",
      name.c_str(), f.type.c_str(), text(f.refusal.empty()), text(f.keeps_existing),
      text(f.exchanges), text(f.locks), text(f.syncs_folders), text(writes_directly(folder)));
}

// Everything that makes, replaces and removes checkpoints.
void save_and_load(const std::string& parent, bool exchanges) {
  const std::string newest = parent + (exchanges ? "/b" : "/c");
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1), other(Training(), group, 5);
    const auto overwrite = SaveOptions().overwrite(true);
    run.optimizer->save_checkpoint(parent + "/a");
    run.train(0, 1);
    run.optimizer->save_checkpoint(parent + "/b");
    run.train(1, 2);
    const auto replace = [&] { run.optimizer->save_checkpoint(parent + "/b", overwrite); };
    if (exchanges) {
      replace();
    } else {
      expect_words(error_of(replace), {parent + "/b", "exchange two folders", "new name"});
    }
    run.train(2, 3);
    run.optimizer->save_checkpoint_async(newest, overwrite)->finish();
    if (group.rank() == 0) {
      EXPECT_EQ(keep_last(parent, 1).size(), exchanges ? 1u : 2u);
    }
    run.optimizer->check_replicas();
    other.optimizer->load_checkpoint(*other.optimizer->latest_checkpoint(parent));
    EXPECT_EQ(differing(run.snapshot(), other.snapshot()), 0);
  });
  keep_last(parent, 1);
  verify_checkpoint(newest);
  const std::string model = parent + ".safetensors";
  EXPECT_EQ(export_model(newest, model), model);
  EXPECT_ANY_THROW(export_model(newest, model));
  for (const auto& entry : fs::directory_iterator(parent)) {
    EXPECT_EQ(entry.path(), newest) << "left over";
  }
}

void kill_and_load(const std::string& parent, bool exchanges) {
  for (const int saves : {1, 3}) {
    SavingProcess program("tests/checkpoint/checkpoint_program", kRanks, parent, exchanges);
    int last = -1;
    for (int i = 0; i < saves; ++i) last = program.next_save();
    ASSERT_GE(last, 0) << "the program ended by itself";
    last = program.kill_now(last);
    const auto newest = latest(parent);
    ASSERT_TRUE(newest);
    verify_checkpoint(*newest);
    EXPECT_GE(describe_checkpoint(*newest).steps, last);
  }
}

// A mounted file system and what is needed for it, or why there is none.
struct Mounted {
  std::string problem;
  std::unique_ptr<FuseFolder> fuse;
};

std::string run_or_why(const std::string& command) {
  const ProgramEnd end = run_program("PATH=$PATH:/usr/sbin:/sbin; " + command);
  return end.exit_status == 0 ? "" : command + ": " + end.output;
}

Mounted mount_image(const std::string& path, const std::string& make, const char* size) {
  const std::string image = path + ".image";
  fs::remove(image);
  return {run_or_why("truncate -s " + std::string(size) + " " + image + " && " + make + " " +
                     image + " && mount -o loop " + image + " " + path),
          nullptr};
}

Mounted mount_overlay(const std::string& path) {
  // Over a file system of its own, since this machine's folders may be on an overlay. The option is
  // what an overlay in a user namespace needs to rename folders.
  std::string problem = run_or_why("mount -t tmpfs layers " + path + " && cd " + path +
                                   " && mkdir lower upper work all");
  if (!problem.empty()) return {problem, nullptr};
  // It is where this overlay notes that a folder was renamed. Before Linux 6.6 tmpfs has none.
  if (setxattr((path + "/upper").c_str(), "user.x", "1", 1, 0) != 0) {
    return {"no user xattrs on tmpfs: " + std::generic_category().message(errno), nullptr};
  }
  return {run_or_why("cd " + path +
                     " && mount -t overlay all"
                     " -o userxattr,lowerdir=lower,upperdir=upper,workdir=work all"),
          nullptr};
}

Mounted mount_fuse(const std::string& path, const FuseLimits& limits,
                   const std::string& source = "memory") {
  Mounted result;
  result.fuse = std::make_unique<FuseFolder>(path, limits, source);
  result.problem = result.fuse->problem();
  return result;
}

struct Kind {
  std::string name;
  std::function<Mounted(const std::string& path)> mount;
  const char* folder = "";  // in what is mounted
  FuseLimits limits = {};
  std::string users = {};  // a folder of the user's, where nothing is mounted
};

std::vector<Kind> kinds() {
  const auto fuse = [](const std::string& name, const FuseLimits& limits) {
    return Kind{name, [=](const std::string& path) { return mount_fuse(path, limits); }, "", limits,
                ""};
  };
  FuseLimits as_nfs, least;
  as_nfs.rename_flags = false;
  least.rename_flags = least.locks = least.syncs_folders = false;
  // Before this process has namespaces of its own.
  std::vector<Kind> result;
  const char* folders = std::getenv("ZERO_FOLDERS");
  std::istringstream users(folders != nullptr ? folders : "");
  for (std::string folder; std::getline(users, folder, ':');) {
    if (folder.empty()) continue;
    result.push_back({"own_" + std::to_string(result.size()), nullptr, "", {}, folder});
  }
  const std::vector<Kind> mounts = {
      {"tmpfs",
       [](const std::string& path) {
         return Mounted{run_or_why("mount -t tmpfs memory " + path), nullptr};
       }},
      {"overlayfs", mount_overlay, "/all"},
      {"ext4", [](const std::string& path) { return mount_image(path, "mkfs.ext4 -q", "64M"); }},
      {"xfs", [](const std::string& path) { return mount_image(path, "mkfs.xfs -q", "320M"); }},
      fuse("fuse", {}),
      fuse("fuse_without_rename_flags", as_nfs),
      fuse("fuse_without_flags_locks_and_fsync", least),
  };
  result.insert(result.end(), mounts.begin(), mounts.end());
  return result;
}

bool may_mount() {
  static const bool own = own_mounts();
  return own;
}

class FileSystemsTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Of, FileSystemsTest, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

// Nothing in it is the user's.
class NewFolder {
 public:
  explicit NewFolder(const std::string& parent) : path_(parent + "/zero-test-XXXXXX") {
    TORCH_CHECK(mkdtemp(path_.data()) != nullptr, "cannot make ", path_, ": ",
                std::generic_category().message(errno));
  }
  ~NewFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST_P(FileSystemsTest, CheckpointsAreSavedReplacedKeptAndLoaded) {
  const Kind& kind = GetParam();
  if (!kind.users.empty()) {
    const NewFolder folder(kind.users);
    print_row(kind.users, folder.path());
    const bool exchanges = tried(folder.path()).exchanges;
    save_and_load(folder.path() + "/saves", exchanges);
    kill_and_load(folder.path() + "/kills", exchanges);
    return;
  }
  const std::string place = fresh_folder("mount_" + kind.name);
  if (!may_mount()) GTEST_SKIP() << "no mount namespace of its own";
  const Mounted mounted = kind.mount(place);
  if (!mounted.problem.empty()) GTEST_SKIP() << kind.name << ": " << mounted.problem;
  const std::string folder = place + kind.folder;
  const std::string problem = why_no_file(folder);
  if (!problem.empty()) GTEST_SKIP() << kind.name << ": " << problem;
  print_row(kind.name, folder);
  const FileSystem found = tried(folder);
  EXPECT_TRUE(found.refusal.empty() && found.keeps_existing && !found.copies);
  EXPECT_EQ(found.exchanges, kind.limits.rename_flags);
  EXPECT_EQ(found.locks, kind.limits.locks);
  EXPECT_EQ(found.syncs_folders, kind.limits.syncs_folders);
  save_and_load(folder + "/saves", found.exchanges);
  kill_and_load(folder + "/kills", found.exchanges);
  umount2(place.c_str(), MNT_DETACH);
  fs::remove(place + ".image");
}

TEST(ObjectStoreTest, ABucketThatRenamesNoFoldersIsRefusedOnAllRanksAndStaysEmpty) {
  const std::string place = fresh_folder("mount_bucket");
  if (!may_mount()) GTEST_SKIP() << "no mount namespace of its own";
  FuseLimits limits;
  limits.renames_folders = false;
  const Mounted mounted = mount_fuse(place, limits);
  if (!mounted.problem.empty()) GTEST_SKIP() << mounted.problem;
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    expect_words(error_of([&] { run.optimizer->save_checkpoint(place + "/a"); }),
                 {"rank " + std::to_string(group.rank()), place, "renames folders", "type fuse",
                  "local disk"});
  });
  EXPECT_TRUE(fs::is_empty(place));
}

// As a bucket leaves it whose rename copies one object after the other.
TEST(ObjectStoreTest, ARenameThatStopsHalfwayLeavesThePreviousCheckpointTheLatest) {
  const std::string place = fresh_folder("mount_copies");
  if (!may_mount()) GTEST_SKIP() << "no mount namespace of its own";
  const Mounted mounted = mount_fuse(place, {}, "s3fs");
  if (!mounted.problem.empty()) GTEST_SKIP() << mounted.problem;
  expect_words(weaker_promises(tried(place)), {"copies one object after the other"});
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(place + "/a");
    run.train(0, 1);
    if (group.rank() == 0) mounted.fuse->limits().stops_in_rename = true;
    expect_words(error_of([&] { run.optimizer->save_checkpoint(place + "/b"); }),
                 {"cannot rename", place + "/b"});
    if (group.rank() == 0) mounted.fuse->limits().stops_in_rename = false;
    EXPECT_TRUE(fs::exists(place + "/b"));
    EXPECT_EQ(run.optimizer->latest_checkpoint(place), place + "/a");
    run.optimizer->save_checkpoint(place + "/c");
  });
  keep_last(place, 1);
  EXPECT_EQ(latest(place), place + "/c");
  verify_checkpoint(place + "/c");
}

}  // namespace
}  // namespace zero
