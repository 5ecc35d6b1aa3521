// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which checkpoints of a folder are found and kept: links, several runs, and saves that overlap.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/note.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

using Paths = std::vector<std::string>;

TEST(LinkTest, ALinkToACheckpointNeitherCountsNorIsFollowed) {
  for (int64_t count : {1, 2, 3}) {
    const std::string parent = fresh_folder("comms");
    run_ranks(2, [&](const Group& group) {
      CheckpointRun run(Training(), group, 1);
      for (int step = 1; step < 4; ++step) {
        run.train(step - 1, step);
        run.optimizer->save_checkpoint(parent + "/ckpt-" + std::to_string(step));
      }
    });
    fs::create_directory_symlink("ckpt-3", parent + "/latest");
    EXPECT_EQ(latest(parent), parent + "/ckpt-3");
    EXPECT_EQ(keep_last(parent, count).size(), static_cast<size_t>(3 - count));
    EXPECT_EQ(latest(parent), parent + "/ckpt-3");
    verify_checkpoint(parent + "/ckpt-3");
    EXPECT_TRUE(fs::is_symlink(parent + "/latest"));
    // Given by name, the link and a link to the parent are ways to the checkpoint like any other.
    fs::remove(parent + "-link");
    fs::create_directory_symlink(parent, parent + "-link");
    EXPECT_EQ(latest(parent + "-link"), parent + "-link/ckpt-3");
    run_ranks(3, [&](const Group& group) {
      CheckpointRun run(Training(), group, 9);
      run.optimizer->load_checkpoint(parent + "/latest");
      EXPECT_EQ(run.optimizer->stats().steps, 3);
      run.optimizer->load_checkpoint(*latest(parent + "-link"));
    });
  }
}

// The two calls of README's checkpoint section, and what they leave.
void save_and_thin_out(CheckpointRun& run, const Group& group, const std::string& parent,
                       const std::string& name) {
  run.optimizer->save_checkpoint(parent + "/" + name, SaveOptions().metadata({{"epoch", "3"}}));
  if (group.rank() == 0) {
    keep_last(parent, 2);
    EXPECT_EQ(latest(parent), parent + "/" + name);
    verify_checkpoint(parent + "/" + name);
  }
  run.optimizer->check_replicas();  // no rank saves while rank 0 removes
}

TEST(RunTest, ANewRunInAnOlderRunsFolderKeepsWhatItSavesAndIsTheNewest) {
  for (int world_size : {1, 2, 3}) {
    const std::string parent = fresh_folder("runs");
    run_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(Training(), group, 1);
      for (int step = 0; step < 6; ++step) {
        run.train(step, step + 1);
        save_and_thin_out(run, group, parent, "old-" + std::to_string(step));
      }
    });
    run_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(Training(), group, 2);
      for (int step = 0; step < 3; ++step) {
        run.train(step, step + 1);
        save_and_thin_out(run, group, parent, "new-" + std::to_string(step));
        if (step == 0) {
          EXPECT_TRUE(fs::exists(parent + "/old-5"));
        }
      }
      run.optimizer->load_checkpoint(*latest(parent));
      EXPECT_EQ(run.optimizer->stats().steps, 3);
    });
    EXPECT_FALSE(fs::exists(parent + "/old-5"));
    EXPECT_TRUE(fs::exists(parent + "/new-1") && fs::exists(parent + "/new-2"));
  }
}

TEST(RunTest, AResumedRunKeepsItsIdentityAndAnotherHasAnother) {
  const std::string parent = fresh_folder("identity");
  const auto run_of = [&](const std::string& name) {
    return read_manifest(parent + "/" + name).run;
  };
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 1);
    run.optimizer->save_checkpoint(parent + "/a");
    run.optimizer->save_checkpoint(parent + "/b");
  });
  EXPECT_EQ(run_of("a").size(), 32u);
  EXPECT_EQ(run_of("a"), run_of("b"));
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(Training(), group, 2);
    run.optimizer->save_checkpoint(parent + "/other");
    const LoadReport report = run.optimizer->load_checkpoint(parent + "/a");
    EXPECT_EQ(report.run, run_of("a"));
    run.train(1, 2);
    const Note note("x");
    run.optimizer->save_checkpoint(parent + "/c", SaveOptions().include("note", note));
    // A load that leaves an included object out is reported, and continues the run all the same.
    CheckpointRun without(Training(), group, 3);
    EXPECT_EQ(without.optimizer->load_checkpoint(parent + "/c").differences.size(), 1u);
    without.optimizer->save_checkpoint(parent + "/d");
    Training sgd;
    sgd.inner = Inner::kSgd;
    CheckpointRun partial(sgd, group, 2);
    partial.optimizer->load_checkpoint(parent + "/a", LoadOptions().strict(false));
    partial.optimizer->save_checkpoint(parent + "/partial");
  });
  EXPECT_EQ(run_of("c"), run_of("a"));
  EXPECT_EQ(run_of("d"), run_of("a"));
  EXPECT_NE(run_of("other"), run_of("a"));
  EXPECT_NE(run_of("partial"), run_of("a")) << "a partial load begins a run of its own";
  EXPECT_EQ(latest(parent), parent + "/partial");
}

TEST(RunTest, ACheckpointWithAFileThatWasCutShortIsPassedOver) {
  const std::string parent = fresh_folder("torn");
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(parent + "/a");
    run.optimizer->save_checkpoint(parent + "/b");
    const std::string file = parent + "/b/rank-00001.safetensors";
    if (group.rank() == 0) fs::resize_file(file, fs::file_size(file) - 1);
    run.optimizer->check_replicas();
    EXPECT_EQ(run.optimizer->latest_checkpoint(parent), parent + "/a");
  });
  EXPECT_EQ(latest(parent), parent + "/a");
}

TEST(UnfinishedTest, ASecondSaveToTheSameFolderIsRefusedOnAllRanks) {
  for (int world_size : {1, 2, 3}) {
    const std::string parent = fresh_folder("unfinished");
    const std::string folder = parent + "/current";
    const auto overwrite = SaveOptions().overwrite(true);
    run_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(Training(), group, 1), other(Training(), group, 2);
      run.optimizer->save_checkpoint(folder);
      run.train(0, 1);
      const Snapshot saved = run.snapshot();
      auto first = run.optimizer->save_checkpoint_async(folder, overwrite);
      run.train(1, 2);
      const std::vector<std::string> words = {"rank " + std::to_string(group.rank()), folder,
                                              "under way"};
      expect_words(error_of([&] { run.optimizer->save_checkpoint_async(folder, overwrite); }),
                   words);
      expect_words(error_of([&] { run.optimizer->save_checkpoint(folder, overwrite); }), words);
      expect_words(error_of([&] { other.optimizer->save_checkpoint(folder, overwrite); }), words);
      if (group.rank() == 0) keep_last(parent, 1);
      run.optimizer->check_replicas();
      auto elsewhere = run.optimizer->save_checkpoint_async(parent + "/elsewhere");
      first->finish();
      elsewhere->finish();
      other.optimizer->load_checkpoint(folder);
      EXPECT_EQ(differing(saved, other.snapshot()), 0);
      // One that is given up does not stand in the way.
      run.optimizer->save_checkpoint_async(folder, overwrite).reset();
      run.optimizer->check_replicas();
      run.optimizer->save_checkpoint(folder, overwrite);
    });
    verify_checkpoint(folder);
    verify_checkpoint(parent + "/elsewhere");
    EXPECT_EQ(latest(parent), folder);
  }
}

// What another process does that takes the save for dead.
TEST(UnfinishedTest, ASaveWhoseFolderWasRemovedFailsOnAllRanksAndTheOldOneStays) {
  const std::string parent = fresh_folder("removed");
  const std::string folder = parent + "/current";
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(folder);
    run.train(0, 1);
    auto pending = run.optimizer->save_checkpoint_async(folder, SaveOptions().overwrite(true));
    run.optimizer->check_replicas();
    if (group.rank() == 0) {
      for (const auto& entry : fs::directory_iterator(parent)) {
        if (entry.path().filename().string()[0] != '.') continue;
        fs::rename(entry.path(), parent + "/aside");  // its threads may still write
        break;
      }
    }
    expect_words(error_of([&] { pending->finish(); }), {"current", "keep_last()"});
    run.optimizer->load_checkpoint(folder);
    EXPECT_EQ(run.optimizer->stats().steps, 0);
  });
}

}  // namespace
}  // namespace zero
