// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Every order of calls that ranks may make gives what plain torch gives: seeded random programs of
// backward passes and collective calls, on ranks that are threads and on ranks that are processes.
//
//   ZERO_FUZZ_SEED=<seed>                     one sequence, printed
//   ZERO_FUZZ_FIRST=<seed> ZERO_FUZZ_COUNT=n  others than the default, or more
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <set>
#include <string>

#include "tests/support/fuzz_seeds.h"
#include "tests/support/run_ranks.h"
#include "tests/training/run_sequence.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

#if defined(__SANITIZE_THREAD__)
constexpr bool kOverGloo = false;
constexpr uint64_t kOnThreads = 60;
#else
constexpr bool kOverGloo = true;
constexpr uint64_t kOnThreads = 200;
#endif
constexpr uint64_t kOnProcesses = 40;

// Empty, or what went wrong.
std::string run_on_threads(const CallSequence& sequence, const std::string& folder) {
  try {
    run_ranks(
        sequence.world_size, [&](const Group& group) { run_sequence(sequence, group, folder); },
        on(sequence.wire, kSequenceTimeout, sequence.ranks_per_machine));
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

TEST(CallSequenceTest, OnThreadsEqualsPlainTorch) {
  const Seeds seeds = chosen_seeds({1, kOnThreads});
  const fs::path folder = fs::path(::testing::TempDir()) / "call_sequence_test";
  std::string failed;
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const CallSequence sequence = draw_sequence(seed);
    if (!kOverGloo && sequence.wire == Wire::kGloo) continue;
    const std::string text = describe(sequence);
    if (seeds.count == 1) std::cout << text << std::flush;
    print_if_aborted(&text, kSequenceLimit);
    fs::create_directories(folder);
    const std::string error = run_on_threads(sequence, folder.string());
    fs::remove_all(folder);
    print_if_aborted(nullptr);
    if (error.empty()) continue;
    failed += " " + std::to_string(seed);
    ADD_FAILURE() << error << "\nin " << text << "rerun with ZERO_FUZZ_SEED=" << seed;
  }
  EXPECT_EQ(failed, "");
}

// Each run of the program takes the seeds whose world size it has.
TEST(CallSequenceTest, OnProcessesEqualsPlainTorch) {
  if (!kOverGloo) GTEST_SKIP() << "ThreadSanitizer does not see what orders Gloo's threads";
  const Seeds seeds = chosen_seeds({100001, kOnProcesses});
  std::set<int> sizes;
  for (uint64_t i = 0; i < seeds.count; ++i) {
    sizes.insert(draw_sequence(seeds.first + i).world_size);
  }
  for (const int ranks : sizes) {
    const std::string command = "exec tests/training/call_sequence_program " +
                                std::to_string(ranks) + " " + std::to_string(seeds.first) + " " +
                                std::to_string(seeds.count) + " " + ::testing::TempDir() + " 2>&1";
    FILE* const pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    char buffer[4096];
    while (const size_t count = fread(buffer, 1, sizeof(buffer), pipe))
      output.append(buffer, count);
    EXPECT_EQ(pclose(pipe), 0) << output;
  }
}

}  // namespace
}  // namespace zero
