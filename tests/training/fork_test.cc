// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A forked child of a rank ends, whatever it does with the objects that its parent made, and the
// parent does not notice.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace zero {
namespace {

// What the ranks print.
std::string run(int ranks, const std::string& scene, int& code) {
  const std::string folder = testing::TempDir() + "/fork-" + scene + std::to_string(ranks);
  const std::string command = "exec tests/training/fork_program " + std::to_string(ranks) + " " +
                              scene + " " + folder + " 2>&1";
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), count);
  }
  code = WEXITSTATUS(pclose(pipe));
  EXPECT_TRUE(std::filesystem::exists(folder + "/manifest.json")) << "the checkpoint is lost";
  return output;
}

void expect_to_go_on(const std::string& scene, int child_code, const std::vector<int>& numbers) {
  for (const int ranks : numbers) {
    int code = -1;
    const std::string output = run(ranks, scene, code);
    EXPECT_EQ(code, 0) << output;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string line = "rank " + std::to_string(rank) + " went on; its child ended with " +
                               std::to_string(child_code) + "\n";
      EXPECT_NE(output.find(line), std::string::npos) << output;
    }
    EXPECT_EQ(output.find("child call") != std::string::npos, scene == "refuse");
    for (size_t at = 0; (at = output.find("child call", at)) != std::string::npos; ++at) {
      EXPECT_EQ(output.substr(at + 12, 8), " refused") << output;
    }
  }
}

TEST(Fork, AChildThatUnwindsThroughTheOptimizerEnds) { expect_to_go_on("unwind", 11, {1, 3}); }

TEST(Fork, AChildThatCallsExitEnds) { expect_to_go_on("exit", 11, {1, 2}); }

// 12: by the error of step().
TEST(Fork, AChildThatCallsStepEnds) { expect_to_go_on("step", 12, {1, 3}); }

TEST(Fork, CollectiveCallsAreRefusedInAChild) { expect_to_go_on("refuse", 11, {1, 2}); }

}  // namespace
}  // namespace zero
