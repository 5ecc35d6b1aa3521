// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A failure of one disk is an error on all ranks, which leaves every disk as it was; and
// checkpoints that a crash leaves on some disks only.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/checkpoint/own_disks.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/note.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"

namespace {

std::mutex order_mutex;
std::vector<std::string> order;  // what has come to disk by fsync(), and "-> name" for each rename
std::string slow;                // a part of what comes to disk late

void add_to_order(const std::string& text) {
  const std::lock_guard<std::mutex> lock(order_mutex);
  order.push_back(text);
}

}  // namespace

// These take the place of the C library's in the whole program.
extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                         unsigned int flags) noexcept {
  add_to_order(std::string("-> ") + to);
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

extern "C" int fsync(int file) {
  std::error_code ignored;
  const std::string path =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string();
  if (!slow.empty() && path.find(slow) != std::string::npos) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const int result = static_cast<int>(syscall(SYS_fsync, file));
  add_to_order(path);
  return result;
}

namespace zero {
namespace {

namespace fs = std::filesystem;

const SaveOptions kOwnDisks = SaveOptions().shared_folder(false);
const SaveOptions kReplace = SaveOptions().shared_folder(false).overwrite(true);

Training small() {
  Training training;
  training.options.bucket_bytes(500);
  return training;
}

void save(const OwnDisks& disks, const std::string& name, int steps) {
  run_ranks(disks.ranks(), [&](const Group& group) {
    CheckpointRun run(small(), group, 1);
    run.train(0, steps);
    // At the end of each rank's file, and needed by no load of these tests.
    const Note state(std::string(100, 'x'));
    SaveOptions options = SaveOptions(kOwnDisks).include_per_rank("unused", state);
    run.optimizer->save_checkpoint(disks.of(group.rank()) + "/" + name, options);
  });
}

// On ranks that see `views`, the load throws on all of them with these words, and changes nothing.
void expect_refused(const OwnDisks& views, const std::string& name,
                    const std::vector<std::string>& words) {
  run_ranks(views.ranks(), [&](const Group& group) {
    CheckpointRun run(small(), group, 7);
    run.train(0, 1);
    const Snapshot before = run.snapshot();
    const std::string error =
        error_of([&] { run.optimizer->load_checkpoint(views.of(group.rank()) + "/" + name); });
    expect_words(error, {"rank " + std::to_string(group.rank()), "load_checkpoint"});
    expect_words(error, words);
    EXPECT_EQ(differing(before, run.snapshot()), 0);
    run.train(1, 2);  // the optimizer still works
  });
}

// Two ranks and three take turns over the places of a file.
TEST(OwnDisksDamageTest, ADamagedByteOnOneDiskChangesNothingOnAnyRank) {
  const std::string parent = fresh_folder("damage");
  const OwnDisks disks(parent, {0, 0, 1});
  save(disks, "step", 2);
  int turn = 0;
  for (const int number : disks.numbers()) {
    for (const auto& entry : fs::directory_iterator(disks.disk(number) + "/step")) {
      const auto size = static_cast<std::streamoff>(entry.file_size());
      ++turn;  // also over files
      for (const std::streamoff at : {std::streamoff{3}, size / 3, size / 2, size - 2}) {
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(at);
        const int byte = file.get();
        const auto put = [&](int value) {
          file.seekp(at);
          file.put(static_cast<char>(value));
          file.flush();
        };
        put(byte ^ 4);
        const std::vector<int> two{1, 0}, three{0, 1, OwnDisks::kNone};
        expect_refused(OwnDisks(parent, ++turn % 2 == 0 ? two : three), "step",
                       {entry.path().filename().string()});
        put(byte);
      }
    }
  }
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(small(), group, 7);
    EXPECT_NO_THROW(run.optimizer->load_checkpoint(disks.disk(group.rank()) + "/step"));
  });
}

TEST(OwnDisksDamageTest, AMissingOrTruncatedFileIsNamedOnAllRanks) {
  const std::string parent = fresh_folder("missing");
  const OwnDisks disks(parent, {0, 1, 1});
  save(disks, "step", 1);
  const std::string file = disks.disk(1) + "/step/rank-00002.safetensors";
  fs::rename(file, parent + "/aside");
  const OwnDisks views(parent, {1, 0, 0, 1});
  const std::vector<std::string> words = {"rank-00002.safetensors", "which rank 2 wrote to disk 1",
                                          "1 files are missing", "copy its files"};
  expect_refused(views, "step", words);
  fs::copy(parent + "/aside", file);
  fs::resize_file(file, fs::file_size(file) - 1);
  expect_refused(views, "step", {"rank-00002.safetensors", "truncated"});
  fs::remove(file);
  // One folder that all ranks see, without the other disk.
  expect_refused(OwnDisks(parent, {0, 0}), "step", {" wrote to disk 1", "copy those of all disks"});
}

TEST(OwnDisksDamageTest, ADiskWithAnotherCheckpointIsListedByRank) {
  const std::string parent = fresh_folder("stale");
  const OwnDisks disks(parent, {0, 1});
  save(disks, "step", 1);
  fs::copy(disks.disk(1) + "/step", parent + "/old");
  const std::string old_id = read_manifest(parent + "/old").id;
  fs::remove_all(disks.disk(0) + "/step");
  fs::remove_all(disks.disk(1) + "/step");
  save(disks, "step", 2);
  const std::string id = read_manifest(disks.disk(0) + "/step").id;
  fs::remove_all(disks.disk(1) + "/step");
  fs::rename(parent + "/old", disks.disk(1) + "/step");
  expect_refused(
      OwnDisks(parent, {0, 1, 0}), "step",
      {"the same checkpoint", "id " + id + " on ranks 0, 2", "id " + old_id + " on rank 1"});
}

TEST(OwnDisksDamageTest, ARankThatDiesMeanwhileEndsTheLoadOfAllOthers) {
  const std::string parent = fresh_folder("death");
  const OwnDisks disks(parent, {0, 1, 2});
  save(disks, "step", 1);
  for (const int calls : {1, 3, 5, 8}) {
    RunOptions options;
    options.timeout = std::chrono::seconds(3);
    options.network = std::make_shared<MemoryNetwork>();
    run_ranks(
        3,
        [&](const Group& group) {
          CheckpointRun run(small(), group, 7);
          run.optimizer->check_replicas();
          if (group.rank() == 1) options.network->kill_at(1, MemoryOp::kSend, calls);
          const std::string error = error_within(std::chrono::seconds(9), [&] {
            run.optimizer->load_checkpoint(disks.disk((group.rank() + 1) % 3) + "/step");
          });
          EXPECT_NE(error, "") << "rank " << group.rank();
          expect_words(error_of([&] { run.optimizer->check_replicas(); }), {"failed earlier"});
        },
        options);
  }
}

// A save with `options` throws these words on each rank, and leaves nothing hidden.
void expect_save_fails(const OwnDisks& disks, const std::string& name, const SaveOptions& options,
                       const std::vector<std::string>& words) {
  run_ranks(disks.ranks(), [&](const Group& group) {
    CheckpointRun run(small(), group, 1);
    run.train(0, 1);
    expect_words(error_of([&] {
                   run.optimizer->save_checkpoint(disks.of(group.rank()) + "/" + name, options);
                 }),
                 words);
    run.train(1, 2);
  });
  EXPECT_EQ(disks.hidden(), 0);
}

TEST(OwnDisksSaveErrorTest, ADiskThatCannotBeWrittenLeavesNothingOnTheOthers) {
  const std::string parent = fresh_folder("keeper");
  const OwnDisks disks(parent, {0, 1, 1, 2});
  std::ofstream(disks.disk(1)) << "a file where the folder of a disk should be";
  expect_save_fails(disks, "step", kOwnDisks, {"rank 1", "keeper/disk-1", "errno"});
  EXPECT_FALSE(fs::exists(disks.disk(0) + "/step") || fs::exists(disks.disk(2) + "/step"));
  // A folder of the user's is never replaced.
  fs::remove(disks.disk(1));
  fs::create_directories(disks.disk(2) + "/step");
  expect_save_fails(disks, "step", kReplace, {"rank 3", disks.disk(2) + "/step", "manifest.json"});
  EXPECT_FALSE(fs::exists(disks.disk(0) + "/step") || fs::exists(disks.disk(1) + "/step"));
}

// Hidden folders of a save that is under way.
std::vector<std::string> saving(const std::string& disk) {
  std::vector<std::string> found;
  for (const std::string& name : names_in(disk)) {
    if (name.ends_with(".saving")) found.push_back(disk + "/" + name);
  }
  return found;
}

TEST(OwnDisksSaveErrorTest, AManifestThatCannotBeWrittenOnOneDiskPublishesNone) {
  const std::string parent = fresh_folder("manifest");
  const OwnDisks disks(parent, {0, 1, 1});
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(small(), group, 1);
    run.train(0, 1);
    const std::string folder = disks.of(group.rank()) + "/step";
    auto pending = run.optimizer->save_checkpoint_async(folder, kOwnDisks);
    if (group.rank() == 2) {
      ASSERT_EQ(saving(disks.disk(1)).size(), 1U);
      fs::create_directories(saving(disks.disk(1))[0] + "/manifest.json");
    }
    run.optimizer->check_replicas();  // no rank goes on before
    expect_words(error_of([&] { pending->finish(); }), {"disk-1", "manifest.json", "errno"});
    pending.reset();
    run.optimizer->check_replicas();
    EXPECT_FALSE(fs::exists(folder));
    EXPECT_EQ(disks.hidden(), 0);
    run.optimizer->check_replicas();
    run.optimizer->save_checkpoint(folder, kOwnDisks);
    run.optimizer->load_checkpoint(folder);
  });
}

TEST(OwnDisksSaveErrorTest, ASecondSaveToADiskIsRefusedOnAllRanks) {
  const std::string parent = fresh_folder("second");
  const OwnDisks disks(parent, {0, 1});
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(small(), group, 1), other(small(), group, 2);
    const std::string folder = disks.of(group.rank()) + "/step";
    const auto pending = run.optimizer->save_checkpoint_async(folder, kOwnDisks);
    expect_words(error_of([&] { other.optimizer->save_checkpoint(folder, kOwnDisks); }),
                 {"no other save to this folder under way"});
    // On the disk of rank 1 alone.
    const std::string mixed = group.rank() == 0 ? disks.of(0) + "/free" : folder;
    expect_words(error_of([&] { other.optimizer->save_checkpoint(mixed, kOwnDisks); }),
                 {"rank 1", "no other save to this folder under way"});
    pending->finish();
    other.optimizer->save_checkpoint(folder, kReplace);
    other.optimizer->load_checkpoint(folder);
  });
  EXPECT_EQ(disks.hidden(), 0);
}

// Else a machine that ends could leave a new checkpoint on the others alone.
TEST(OwnDisksCrashTest, EveryDiskHasTheNamesOfItsFilesBeforeTheFirstFolderGetsIts) {
  const OwnDisks disks(fresh_folder("order"), {0, 1});
  slow = "disk-1/";
  save(disks, "step", 1);
  slow.clear();
  const auto named = std::find_if(order.begin(), order.end(), [](const std::string& text) {
    return text.starts_with("-> ") && text.ends_with("/step");
  });
  ASSERT_TRUE(named != order.end());
  for (const char* disk : {"/disk-0/", "/disk-1/"}) {
    auto at = order.begin();
    for (const char* end : {kManifestName, ".saving"}) {  // the folder behind the manifest in it
      at = std::find_if(at, named, [&](const std::string& text) {
        return text.find(disk) != std::string::npos && text.ends_with(end);
      });
    }
    EXPECT_TRUE(at != named) << disk;
  }
}

// A save of which the folder of rank 1 cannot be renamed, as when the machine ends at that moment.
void save_partly(CheckpointRun& run, const Group& group, const std::string& folder) {
  auto pending = run.optimizer->save_checkpoint_async(folder, kOwnDisks);
  if (group.rank() == 1) fs::create_directories(folder + "/in the way");
  run.optimizer->check_replicas();
  expect_words(error_of([&] { pending->finish(); }),
               {"rank 1", "cannot rename", "save again with overwrite(true)"});
  pending.reset();
  if (group.rank() == 1) fs::remove_all(folder);
  run.optimizer->check_replicas();
}

TEST(OwnDisksCrashTest, ACheckpointOfSomeDisksIsPassedOverAndReplaced) {
  const std::string parent = fresh_folder("crash");
  const OwnDisks disks(parent, {0, 1});
  run_ranks(2, [&](const Group& group) {
    const std::string disk = disks.of(group.rank());
    CheckpointRun run(small(), group, 1);
    EXPECT_EQ(run.optimizer->latest_checkpoint(disk), std::nullopt);
    run.train(0, 1);
    run.optimizer->save_checkpoint(disk + "/step-1", kOwnDisks);
    const Snapshot saved = run.snapshot();
    run.train(1, 2);
    save_partly(run, group, disk + "/step-2");
    EXPECT_EQ(latest(disk), disk + (group.rank() == 0 ? "/step-2" : "/step-1"));

    CheckpointRun resumed(small(), group, 2);
    EXPECT_EQ(resumed.optimizer->latest_checkpoint(disk), disk + "/step-1");
    expect_words(error_of([&] { resumed.optimizer->load_checkpoint(disk + "/step-2"); }),
                 {"rank-00001.safetensors", "disk 1"});
    resumed.optimizer->load_checkpoint(*resumed.optimizer->latest_checkpoint(disk));
    EXPECT_EQ(differing(saved, resumed.snapshot()), 0);
    resumed.train(1, 2);
    expect_words(error_of([&] { resumed.optimizer->save_checkpoint(disk + "/step-2", kOwnDisks); }),
                 {"rank 0", "overwrite(true)", "other disks lack", "cut short"});
    resumed.optimizer->save_checkpoint(disk + "/step-2", kReplace);
    EXPECT_EQ(resumed.optimizer->latest_checkpoint(disk), disk + "/step-2");
    // Every rank removes; those of one disk may do so at the same time.
    keep_last(disk, 1);
    EXPECT_EQ(resumed.optimizer->latest_checkpoint(disk), disk + "/step-2");
    EXPECT_FALSE(fs::exists(disk + "/step-1"));
    resumed.optimizer->load_checkpoint(disk + "/step-2");
  });
  EXPECT_EQ(disks.hidden(), 0);
}

TEST(OwnDisksCrashTest, TheNewestIsFoundByRanksThatSeeNoFolderOrAnotherOne) {
  const std::string parent = fresh_folder("newest");
  const OwnDisks disks(parent, {0, 1, 1});
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(small(), group, 1);
    const std::string disk = disks.of(group.rank());
    for (const int step : {9, 10, 8}) {  // the last one saved counts, not the last by name
      run.train(step, step + 1);
      run.optimizer->save_checkpoint(disk + "/" + std::to_string(step), kOwnDisks);
    }
    EXPECT_EQ(run.optimizer->latest_checkpoint(disk), disk + "/8");
  });
  for (const auto& of_rank : {std::vector<int>{1, OwnDisks::kNone, 0, 1}, {1, 0}}) {
    const OwnDisks views(parent, of_rank);
    run_ranks(views.ranks(), [&](const Group& group) {
      CheckpointRun run(small(), group, 1);
      const std::string disk = views.of(group.rank());
      EXPECT_EQ(run.optimizer->latest_checkpoint(disk), disk + "/8");
      run.optimizer->load_checkpoint(disk + "/8");
    });
  }
  // Without the files of one disk there is no newest one that can be loaded.
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(small(), group, 1);
    EXPECT_EQ(run.optimizer->latest_checkpoint(disks.disk(1)), std::nullopt);
  });
}

TEST(OwnDisksKeepTest, CallsForOneFolderMayOverlap) {
  const std::string parent = fresh_folder("keep");
  for (int round = 0; round < 8; ++round) {
    for (int i = 1; i <= 10; ++i) {
      Manifest m;
      m.id = "1";
      m.saved = round * 100 + i;
      const std::string folder = parent + "/" + std::to_string(m.saved);
      fs::create_directories(folder);
      for (int f = 0; f < 20; ++f) std::ofstream(folder + "/" + std::to_string(f)) << "x";
      std::ofstream(folder + "/" + kManifestName) << manifest_text(m);
    }
    std::vector<std::thread> ranks;
    std::vector<std::string> errors(4);
    for (size_t r = 0; r < errors.size(); ++r) {
      ranks.emplace_back([&, r] { errors[r] = error_of([&] { keep_last(parent, 2); }); });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    EXPECT_EQ(latest(parent), parent + "/" + std::to_string(round * 100 + 10));
    EXPECT_EQ(names_in(parent).size(), 2U);
  }
}

}  // namespace
}  // namespace zero
