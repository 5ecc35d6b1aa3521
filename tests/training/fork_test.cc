// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A forked child of a rank ends, whatever it does with the objects that its parent made, and the
// parent does not notice.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "tests/support/run_program.h"

namespace zero {
namespace {

// What `ranks` ranks print, which go through all scenes one after the other.
const std::string& output_of(int ranks) {
  static std::map<int, std::string> outputs;
  const auto [entry, is_new] = outputs.try_emplace(ranks);
  if (!is_new) return entry->second;
  const auto [code, output] =
      run_program("exec tests/training/fork_program " + std::to_string(ranks) + " " +
                  testing::TempDir() + "/fork-" + std::to_string(ranks));
  EXPECT_EQ(code, 0) << output;
  return entry->second = output;
}

void expect_to_go_on(const std::string& scene, int child_code) {
  for (const int ranks : {1, 3}) {
    const std::string& output = output_of(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string line = "rank " + std::to_string(rank) + " went on after " + scene +
                               "; its child ended with " + std::to_string(child_code) + "\n";
      EXPECT_NE(output.find(line), std::string::npos) << output;
    }
    const std::string folder = testing::TempDir() + "/fork-" + std::to_string(ranks) + "-" + scene;
    EXPECT_TRUE(std::filesystem::exists(folder + "/manifest.json")) << "the checkpoint is lost";
  }
}

TEST(Fork, AChildThatUnwindsThroughTheOptimizerEnds) { expect_to_go_on("unwind", 11); }

TEST(Fork, AChildThatCallsExitEnds) { expect_to_go_on("exit", 11); }

// 12: by the error of step().
TEST(Fork, AChildThatCallsStepEnds) { expect_to_go_on("step", 12); }

TEST(Fork, CollectiveCallsAreRefusedInAChild) {
  expect_to_go_on("refuse", 11);
  for (const int ranks : {1, 3}) {
    const std::string& output = output_of(ranks);
    size_t calls = 0;
    for (size_t at = 0; (at = output.find("child call", at)) != std::string::npos; ++at) {
      EXPECT_EQ(output.substr(at + 12, 8), " refused") << output;
      ++calls;
    }
    EXPECT_EQ(calls, static_cast<size_t>(10 * ranks));
  }
}

}  // namespace
}  // namespace zero
