// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints whose ranks see different folders: what loads, on which ranks, and what they send.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/checkpoint/own_disks.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/mesh_run.h"
#include "tests/support/note.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

const SaveOptions kOwnDisks = SaveOptions().shared_folder(false);

Training training_of(Inner inner) {
  Training training;
  training.inner = inner;
  training.options.bucket_bytes(500);
  return training;
}

// Three ranks save one state to a shared folder and to `disks`.
void save_both(const Training& training, const OwnDisks& disks, const std::string& shared) {
  run_ranks(disks.ranks(), [&](const Group& group) {
    CheckpointRun run(training, group, 1);
    run.train(0, 3);
    Note same, own;
    same.text = group.rank() == 0 ? "of all" : "not saved";
    own.text = std::string(40, static_cast<char>('a' + group.rank()));
    SaveOptions options = SaveOptions().metadata({{"epoch", "3"}});
    options.include("same", same).include_per_rank("own", own);
    run.optimizer->save_checkpoint(shared, options);
    options.shared_folder(false);
    run.optimizer->save_checkpoint(disks.of(group.rank()) + "/step", options);
  });
}

// All ways to give each rank one of the disks of `saved` or none.
std::vector<OwnDisks> assignments(const OwnDisks& saved, const std::string& parent, int ranks) {
  std::vector<int> choices(1, OwnDisks::kNone);
  for (const int disk : saved.numbers()) choices.push_back(disk);
  std::vector<std::vector<int>> all = {{}};
  for (int r = 0; r < ranks; ++r) {
    std::vector<std::vector<int>> longer;
    for (const auto& start : all) {
      for (const int disk : choices) {
        longer.push_back(start);
        longer.back().push_back(disk);
      }
    }
    all = std::move(longer);
  }
  std::vector<OwnDisks> result;
  for (const auto& of_rank : all) result.emplace_back(parent, of_rank);
  return result;
}

bool covers(const OwnDisks& some, const OwnDisks& all) {
  const std::set<int> have = some.numbers(), wanted = all.numbers();
  return std::includes(have.begin(), have.end(), wanted.begin(), wanted.end());
}

struct Loaded {
  Snapshot state;
  std::string same, own;
  LoadReport report;
};

Loaded load(CheckpointRun& run, const std::string& folder) {
  Loaded result;
  Note same, own;
  same.text = own.text = "before";
  result.report = run.optimizer->load_checkpoint(
      folder, LoadOptions().include("same", same).include_per_rank("own", own));
  result.state = run.snapshot();
  result.same = same.text;
  result.own = own.text;
  return result;
}

// Ranks load each assignment in turn, with a step between; four ranks every sixth one.
void expect_assignments_load(const Training& training, const OwnDisks& disks,
                             const std::string& parent, int world_size, int* tried) {
  const std::vector<OwnDisks> views = assignments(disks, parent, world_size);
  run_ranks(world_size, [&](const Group& group) {
    CheckpointRun run(training, group, 7);
    const Loaded expected = load(run, parent + "/shared");
    int refused = 0, loading = 0;
    for (const OwnDisks& view : views) {
      if (!covers(view, disks) && ++refused % 12 != 1) continue;  // some are enough
      if (covers(view, disks) && ++loading % 6 != 1 && world_size > 3) continue;
      run.train(5, 6);
      const std::string folder = view.of(group.rank()) + "/step";
      if (!covers(view, disks)) {
        const Snapshot before = run.snapshot();
        ASSERT_GT(differing(before, expected.state), 100);
        const std::string error = error_of([&] { run.optimizer->load_checkpoint(folder); });
        EXPECT_NE(error, "") << view.text();
        const bool some = view.numbers() != std::set<int>{OwnDisks::kNone};
        if (some) expect_words(error, {".safetensors", "to disk", "files"});
        EXPECT_EQ(differing(before, run.snapshot()), 0) << view.text();
        continue;
      }
      const Loaded loaded = load(run, folder);
      EXPECT_EQ(differing(expected.state, loaded.state), 0) << disks.text() << " " << view.text();
      EXPECT_EQ(loaded.same, expected.same);
      EXPECT_EQ(loaded.own, expected.own);
      EXPECT_EQ(loaded.report.metadata, expected.report.metadata);
      if (group.rank() == 0) ++*tried;
    }
  });
}

TEST(OwnDisksTest, EveryAssignmentOfFoldersToRanksLoadsTheBitsOfASharedSave) {
  int tried = 0;
  for (const std::vector<int>& of_rank : {std::vector<int>{0, 0, 1}, {0, 1, 2}, {0, 0, 0}}) {
    const std::string parent = fresh_folder("assignments");
    const OwnDisks disks(parent, of_rank);
    const Training training = training_of(of_rank[1] == 0 ? Inner::kAdamW : Inner::kSgdMomentum);
    save_both(training, disks, parent + "/shared");
    EXPECT_EQ(disks.hidden(), 0);
    for (int world_size = 1; world_size <= 4; ++world_size) {
      expect_assignments_load(training, disks, parent, world_size, &tried);
    }
  }
  // There are, of two disks, 2, 12 and 50 assignments, of three 6 and 60, of one 1, 3, 7 and 15.
  EXPECT_EQ(tried, (2 + 12 + 9) + (6 + 10) + (1 + 3 + 7 + 3));
}

TEST(OwnDisksTest, OneDiskIsCompleteByItselfAndAMergedFolderIsTheWholeCheckpoint) {
  const Training training = training_of(Inner::kAdamW);
  const std::string parent = fresh_folder("merged");
  const OwnDisks disks(parent, {0, 1, 0});
  save_both(training, disks, parent + "/shared");
  for (const int disk : disks.numbers()) {
    const std::string folder = disks.disk(disk) + "/step";
    EXPECT_TRUE(is_complete_checkpoint(folder));
    EXPECT_EQ(latest(disks.disk(disk)), folder);
    const CheckpointDescription about = describe_checkpoint(folder);
    EXPECT_EQ(about.disk, disk);
    ASSERT_EQ(about.files.size(), 5U);
    for (const CheckpointFile& file : about.files) {
      const bool second = file.name == "rank-00001.safetensors";
      EXPECT_EQ(file.disk, second ? 1 : 0) << file.name;
      EXPECT_EQ(fs::exists(folder + "/" + file.name), file.disk == disk) << file.name;
    }
    EXPECT_NO_THROW(verify_checkpoint(folder, /*one_disk=*/true));
    const std::vector<std::string> words = {
        disk == 0 ? "that rank 1 wrote to disk 1" : "that rank 0 wrote to disk 0",
        "copy those of all disks into one folder"};
    expect_words(error_of([&] { verify_checkpoint(folder); }), words);
    // Of disk 0, the file of the first tensor in the model's order.
    expect_words(error_of([&] { export_model(folder, parent + "/model"); }),
                 {disk == 0 ? words[0] : "wrote to disk 0", words[1]});
    fs::copy(folder, parent + "/part-" + std::to_string(disk));
    fs::remove(parent + "/part-" + std::to_string(disk) +
               (disk == 0 ? "/rank-00002.safetensors" : "/rank-00001.safetensors"));
    EXPECT_FALSE(is_complete_checkpoint(parent + "/part-" + std::to_string(disk)));
  }
  merge_disks(disks, "step", parent + "/all");
  EXPECT_NO_THROW(verify_checkpoint(parent + "/all"));
  EXPECT_NO_THROW(export_model(parent + "/all", parent + "/model"));
  for (int world_size = 1; world_size <= 4; ++world_size) {
    run_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(training, group, 7);
      const Loaded expected = load(run, parent + "/shared");
      run.train(5, 6);
      EXPECT_EQ(differing(expected.state, load(run, parent + "/all").state), 0);
      run.train(5, 6);
      // Some ranks see all files, the others one disk.
      const std::string folder = group.rank() % 2 == 0 ? parent + "/all" : disks.of(1) + "/step";
      EXPECT_EQ(differing(expected.state, load(run, folder).state), 0);
    });
  }
}

TEST(OwnDisksSaveTest, ARunGoesOnAndKeepsItsIdentity) {
  const std::string parent = fresh_folder("resume");
  const OwnDisks disks(parent, {0, 1});
  const Training training = training_of(Inner::kAdamW);
  run_ranks(2, [&](const Group& group) {
    CheckpointRun whole(training, group, 1), first(training, group, 1), second(training, group, 2);
    whole.train(0, 6);
    first.train(0, 3);
    const std::string folder = disks.of(group.rank()) + "/step";
    // What it saves is what was there at the call.
    const auto pending = first.optimizer->save_checkpoint_async(folder, kOwnDisks);
    first.train(3, 4);
    pending->finish();
    const LoadReport report = second.optimizer->load_checkpoint(folder);
    EXPECT_EQ(report.run, describe_checkpoint(folder).run);
    // Each rank sees its shard, and rank 0 alone the frozen parameters and the buffers.
    EXPECT_LT(report.bytes_received, group.rank() == 0 ? 1U : 5000U);
    second.train(3, 6);
    EXPECT_EQ(differing(whole.snapshot(), second.snapshot()), 0);
  });
}

// Folders of the same save under other paths: ranks need not give equal texts.
TEST(OwnDisksLoadTest, RanksMayGiveDifferentPathsOfOneFolder) {
  const std::string parent = fresh_folder("paths");
  const Training training = training_of(Inner::kAdamW);
  fs::create_directory_symlink(parent, parent + "-link");
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(training, group, 1), other(training, group, 2);
    run.train(0, 2);
    run.optimizer->save_checkpoint(parent + "/a");
    const std::string base = group.rank() == 1 ? parent + "-link" : parent;
    const LoadReport report = other.optimizer->load_checkpoint(base + "/a");
    EXPECT_EQ(report.bytes_received, 0U);
    EXPECT_EQ(differing(run.snapshot(), other.snapshot()), 0);
    // A save refuses them: it is to be the same folder.
    run.optimizer->save_checkpoint(base + "/b", SaveOptions().shared_folder(false));
    EXPECT_EQ(describe_checkpoint(base + "/b").disk, 0);
    expect_words(error_of([&] { run.optimizer->save_checkpoint(base + "/c"); }), {"rank", "/c"});
  });
  fs::remove(parent + "-link");
}

int64_t bytes_on_disk(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    bytes += static_cast<int64_t>(entry.file_size());
  }
  return bytes;
}

TEST(OwnDisksLoadTest, ARankReceivesWhatItNeedsAndNoMore) {
  const std::string parent = fresh_folder("bytes");
  const OwnDisks disks(parent, {0, 1, 2, 3});
  Training training;
  training.width = 400;  // so that shards are much larger than headers
  for (const int turned : {0, 1, 2, 3}) {
    RunOptions options;
    options.network = std::make_shared<MemoryNetwork>();
    run_ranks(
        4,
        [&](const Group& group) {
          CheckpointRun run(training, group, 1);
          run.train(0, 1);
          const std::string own = disks.of(group.rank()) + "/step-" + std::to_string(turned);
          run.optimizer->save_checkpoint(own, kOwnDisks);
          const auto sent = [&] {
            return options.network->counts(group.rank()).bytes_of(MemoryOp::kSend);
          };
          const int64_t before = sent();
          const LoadReport report = run.optimizer->load_checkpoint(
              disks.of((group.rank() + turned) % 4) + "/step-" + std::to_string(turned));
          const int64_t shard = bytes_on_disk(own);
          if (turned == 0) {
            EXPECT_LT(report.bytes_received, 2000U) << "the header and the buffers of rank 0";
          } else {
            EXPECT_GT(report.bytes_received, shard / 2);
          }
          EXPECT_LT(report.bytes_received, static_cast<uint64_t>(shard + 20000));
          EXPECT_LT(sent() - before, shard + 50000);
        },
        options);
  }
}

TEST(OwnDisksLoadTest, EveryMeshLoadsFromTheDisksOfAnother) {
  const std::vector<MeshShape> shapes = {
      {.data = 2, .layout = Layout::kPerParameter},
      {.experts = 2},
      {.stages = 2, .data = 2},
      {.parts = 3},
      {.data = 2, .parts = 2},
  };
  const std::string parent = fresh_folder("mesh");
  for (size_t from = 0; from < shapes.size(); ++from) {
    const auto folder = [&](int rank) {
      return parent + "/" + std::to_string(from) + "-disk-" + std::to_string(rank / 2);
    };
    WholeState saved;
    run_ranks(shapes[from].ranks(), [&](const Group& world) {
      MeshRun run(shapes[from], world, 1.0);
      run.train(0, 3);
      run.optimizer->save_checkpoint(folder(world.rank()) + "/step", kOwnDisks);
      run.add_to(saved);
    });
    const int disks = (shapes[from].ranks() + 1) / 2;
    for (size_t to = 0; to < shapes.size(); ++to) {
      if (shapes[to].ranks() < disks) continue;
      WholeState loaded;
      run_ranks(shapes[to].ranks(), [&](const Group& world) {
        MeshRun run(shapes[to], world, 3.0);
        run.optimizer->load_checkpoint(folder((world.rank() + 1) % disks * 2) + "/step");
        run.add_to(loaded);
      });
      EXPECT_EQ(WholeState::differing(saved, loaded), 0)
          << shapes[from].text() << " to " << shapes[to].text();
    }
  }
}

// All ranks go through their pairs in one order, each as soon as both of its ranks are there.
TEST(FilePairsTest, NoRankWaitsInAChainOfAllOthers) {
  for (int world_size = 2; world_size <= 16; ++world_size) {
    for (int distance = 1; distance < world_size; ++distance) {
      std::vector<FilePair> pairs;
      for (int r = 0; r < world_size; ++r) pairs.emplace_back(r, (r + distance) % world_size);
      sort_pairs(pairs, world_size);
      std::vector<int> done(static_cast<size_t>(world_size), 0);
      int last = 0;
      for (const auto& [server, client] : pairs) {
        const int turn = std::max(done[server], done[client]) + 1;
        done[server] = done[client] = turn;
        last = std::max(last, turn);
      }
      EXPECT_LE(last, 4) << world_size << " ranks, distance " << distance;
    }
  }
}

}  // namespace
}  // namespace zero
