// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// kill -9 at any moment of a save leaves the previous checkpoint or the new one,
// complete, and never a half one that loads.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "tests/checkpoint/saving_process.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;

// The state after every number of steps, computed once.
std::map<int64_t, Snapshot> expected_states() {
  std::map<int64_t, Snapshot> states;
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    for (int step = 0; step < 40; ++step) {
      run.train(step, step + 1);
      Snapshot state = run.snapshot();
      if (group.rank() == 0) states[step + 1] = std::move(state);
    }
  });
  return states;
}

// The number of steps in a checkpoint whose every bit is right; -1 otherwise.
int64_t loaded_steps(const std::string& folder, const std::map<int64_t, Snapshot>& expected) {
  int64_t steps = -1;
  run_ranks(1, [&](const Group& group) {
    CheckpointRun run(Training(), group, 5);
    run.optimizer->load_checkpoint(folder);
    const Snapshot state = run.snapshot();
    const int64_t number = run.optimizer->stats().steps;
    EXPECT_EQ(differing(state, expected.at(number)), 0) << folder << " at step " << number;
    steps = number;
  });
  return steps;
}

bool has_unfinished_save(const std::string& folder) {
  return std::ranges::any_of(fs::directory_iterator(folder), [](const fs::directory_entry& entry) {
    return entry.path().filename().string()[0] == '.';
  });
}

struct Kills {
  int lost = 0;        // checkpoints
  int unfinished = 0;  // saves
};

void kill_saves(const std::string& folder, int kills, unsigned seed,
                const std::map<int64_t, Snapshot>& expected, Kills& result) {
  fs::create_directories(folder);
  std::mt19937 random(seed);
  for (int i = 0; i < kills; ++i) {
    SavingProcess program("tests/checkpoint/checkpoint_program", kRanks, folder);
    const int first = program.next_save();
    ASSERT_GE(first, 0) << "the program ended by itself";
    if (i % 2 == 0) {
      // Up to a few saves later, at any place within one or between two.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 40000));
    } else {
      program.stop_when([&] { return has_unfinished_save(folder); });
    }
    const int last = program.kill_now(first);
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      result.unfinished += name[0] == '.' ? 1 : 0;
      // Whatever has a manifest has everything.
      if (name[0] == '.') continue;
      EXPECT_GE(loaded_steps(entry.path().string(), expected), 1) << name;
    }
    const auto newest = latest(folder);
    const bool kept = newest && loaded_steps(*newest, expected) >= last &&
                      loaded_steps(folder + "/current", expected) >= last;
    EXPECT_TRUE(kept) << "kill " << i << " after save " << last;
    result.lost += kept ? 0 : 1;
    if (last >= 30) fs::remove_all(folder), fs::create_directories(folder);
  }
}

// Two programs at once, since much of it is waiting.
TEST(KillTest, EveryKilledSaveLeavesALoadableCheckpoint) {
  const char* count = std::getenv("ZERO_KILLS");
  const int kills = count != nullptr ? std::atoi(count) : 12;
  const std::string parent = fresh_folder("kills");
  const auto expected = expected_states();
  Kills first, second;
  auto other = std::async(std::launch::async,
                          [&] { kill_saves(parent + "/first", kills / 2, 5, expected, first); });
  kill_saves(parent + "/second", kills - kills / 2, 6, expected, second);
  other.get();
  const int lost = first.lost + second.lost, unfinished = first.unfinished + second.unfinished;
  std::printf("kills: %d tried, %d of them within a save, %d checkpoints lost\n", kills, unfinished,
              lost);
  EXPECT_EQ(lost, 0);
  EXPECT_GT(unfinished, 0) << "no kill met a save";
}

}  // namespace
}  // namespace zero
