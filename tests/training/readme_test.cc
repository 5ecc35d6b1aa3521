// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The documents' own code, compiled and run: the loop of README.md trains, the optimizer of
// docs/parallelism.md is made, and a run that stops and goes on in new processes is the run that
// never stopped, in every bit, with dropout and a schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/files.h"

namespace {

using zero::content;

struct Section {
  const char* name;  // of the test
  const char* file;
  const char* title;
  const char* program = "tests/training/readme_program.cc";
};

// The lines of the C++ blocks of a section.
std::string code_of(const Section& section) {
  std::istringstream document(content(section.file));
  std::string code;
  bool here = false, inside = false;
  for (std::string line; std::getline(document, line);) {
    if (line.rfind("## ", 0) == 0) here = line == std::string("## ") + section.title;
    if (!here) continue;
    if (line.rfind("```", 0) == 0) {
      inside = line == "```cpp";
    } else if (inside) {
      code += line + "\n";
    }
  }
  return code;
}

// Statements without spaces and comments, each up to its ; { or }; directives as they are.
std::vector<std::string> statements(const std::string& code) {
  std::vector<std::string> result(1);
  std::istringstream lines(code);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("#", 0) == 0) {
      result.insert(result.end() - 1, line);
      continue;
    }
    line = line.substr(0, line.find("//"));
    for (const char c : line) {
      if (c != ' ') result.back() += c;
      if (c == ';' || c == '{' || c == '}') result.emplace_back();
    }
  }
  result.pop_back();
  return result;
}

class ReadmeTest : public ::testing::TestWithParam<Section> {};
INSTANTIATE_TEST_SUITE_P(
    Sections, ReadmeTest,
    ::testing::Values(
        Section{"Loop", "README.md", "How"}, Section{"WholeLoop", "docs/training.md", "The loop"},
        Section{"Groups", "docs/training.md", "Inner optimizers and parameter groups"},
        Section{"Validation", "docs/training.md", "Validation"},
        Section{"Whole", "docs/training.md", "Optimizers of whole parameters"},
        Section{"Data", "docs/training.md", "Data, losses, buffers and seeds"},
        Section{"SameBits", "docs/training.md", "The same bits on any number of ranks"},
        Section{"Unequal", "docs/training.md", "Unequal batches"},
        Section{"Autocast", "docs/training.md", "Autocast"},
        Section{"Freezing", "docs/training.md", "Freezing and adding parameters"},
        Section{"Rows", "docs/training.md", "Rows that come and go"},
        Section{"Mesh", "docs/parallelism.md", "A mesh and placements"},
        Section{"Checkpoints", "docs/checkpoints.md", "Saving and resuming"},
        Section{"FromLibtorch", "docs/from_libtorch.md", "The program",
                "tests/training/from_libtorch_program.cc"},
        Section{"PartOfABatch", "docs/from_libtorch.md", "A part of each batch",
                "tests/training/from_libtorch_program.cc"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(ReadmeTest, EveryStatementIsOneOfTheProgramInTheSameOrder) {
  const std::vector<std::string> shown = statements(code_of(GetParam()));
  const std::vector<std::string> compiled = statements(content(GetParam().program));
  ASSERT_GE(shown.size(), 4u);
  size_t next = 0;
  for (const std::string& statement : shown) {
    const size_t from = next;
    while (next < compiled.size() && compiled[next] != statement) ++next;
    EXPECT_LT(next, compiled.size()) << GetParam().file << " only: " << statement;
    next = next < compiled.size() ? next + 1 : from;
  }
}

// Runs readme_program in a folder of its own, which it returns.
std::string run_program(const std::string& name, int ranks, const std::string& what) {
  const std::string folder = ::testing::TempDir() + "/" + name + std::to_string(ranks);
  std::filesystem::create_directories(folder + "/run");
  const std::string command =
      "tests/training/readme_program " + std::to_string(ranks) + " " + what + " " + folder;
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return folder;
}

constexpr int kRanks = 3;

TEST(ReadmeRunTest, ANewProcessGoesOnAsIfTheRunHadNotStopped) {
  const auto run = [](const std::string& name, int batches) {
    return run_program(name, kRanks, std::to_string(batches));
  };
  const std::string whole = run("whole", 12);
  run("stopped", 8);  // saved after 6: what follows is lost
  const std::string resumed = run("stopped", 12);
  std::string former;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string last = "/state-" + std::to_string(rank) + "-12";
    const std::string expected = content(whole + last);
    ASSERT_GT(expected.size(), 2000u);
    EXPECT_TRUE(expected == content(resumed + last)) << "rank " << rank;
    EXPECT_FALSE(expected == former) << "equal random numbers on ranks";
    former = expected;
  }
  EXPECT_FALSE(content(whole + "/state-0-12") == content(resumed + "/state-0-8"));
}

TEST(ReadmeRunTest, TheLoopOfTheReadmeLeavesEqualParametersOnAllRanks) {
  const std::string folder = run_program("loop", kRanks, "loop");
  const std::string expected = content(folder + "/loop-0");
  ASSERT_GT(expected.size(), 2000u);
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_TRUE(expected == content(folder + "/loop-" + std::to_string(rank))) << "rank " << rank;
  }
}

TEST(ReadmeRunTest, TheOptimizerOfMuonLeavesEqualParametersOnAllRanks) {
  const std::string folder = run_program("muon", kRanks, "muon");
  const std::string expected = content(folder + "/loop-0");
  ASSERT_GT(expected.size(), 2000u);
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_TRUE(expected == content(folder + "/loop-" + std::to_string(rank))) << "rank " << rank;
  }
}

TEST(ReadmeRunTest, EveryExampleIsSeenAndTheShownLossIsTheMean) {
  const std::string folder = run_program("data", kRanks, "data");
  std::map<std::pair<int, int>, int> seen;  // epoch and example
  std::vector<double> means, shown;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::istringstream examples(content(folder + "/seen-" + std::to_string(rank)));
    for (int epoch = 0, example = 0; examples >> epoch >> example;) ++seen[{epoch, example}];
    std::istringstream losses(content(folder + "/shown-" + std::to_string(rank)));
    std::vector<double> of_this_rank;
    size_t step = 0;
    for (double own = 0, mean = 0; losses >> own >> mean; ++step) {
      means.resize(std::max(means.size(), step + 1));
      means[step] += own / kRanks;
      of_this_rank.push_back(mean);
    }
    if (rank == 0) shown = of_this_rank;
    EXPECT_EQ(of_this_rank, shown) << "rank " << rank;
  }
  EXPECT_EQ(seen.size(), 2u * 23u);
  ASSERT_EQ(shown.size(), means.size());
  ASSERT_GE(shown.size(), 4u);
  for (size_t step = 0; step < shown.size(); ++step) EXPECT_NEAR(shown[step], means[step], 1e-4);
}

std::vector<float> floats(const std::string& path) {
  const std::string bytes = content(path);
  std::vector<float> result(bytes.size() / sizeof(float));
  std::memcpy(result.data(), bytes.data(), result.size() * sizeof(float));
  return result;
}

TEST(ReadmeRunTest, UnequalBatchesTrainAsOneProcessWithAllTokens) {
  const std::string alone = run_program("tokens_alone", 1, "tokens");
  const std::string folder = run_program("tokens", kRanks, "tokens");
  const std::vector<float> begin = floats(alone + "/begin-0"), expected = floats(alone + "/loop-0");
  ASSERT_GT(expected.size(), 500u);
  double most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(expected[i]) - begin[i]));
  }
  EXPECT_GT(most, 0.02);  // it trains
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<float> got = floats(folder + "/loop-" + std::to_string(rank));
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-6) << i;
  }
}

TEST(ReadmeRunTest, MicroBatchesTrainTheBitsOfOneRank) {
  const std::string expected = content(run_program("bits_alone", 1, "bits") + "/loop-0");
  ASSERT_GT(expected.size(), 2000u);
  const std::string folder = run_program("bits", kRanks, "bits");
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(expected == content(folder + "/loop-" + std::to_string(rank))) << "rank " << rank;
  }
}

TEST(ReadmeRunTest, OnlyMatricesDecay) { run_program("groups", 2, "groups"); }

TEST(ReadmeFromLibtorchTest, TheProgramTrainsAndSavesItsModel) {
  const std::string folder = ::testing::TempDir() + "/from_libtorch";
  std::filesystem::create_directories(folder);
  const std::string command =
      "program=$PWD/tests/training/from_libtorch_program; cd " + folder + " && $program";
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_GT(content(folder + "/model.pt").size(), 70 * sizeof(float));
}

TEST(ReadmeMeshTest, TheOptimizerOfTheMeshIsMadeAndSteps) { run_program("mesh", 8, "mesh"); }

TEST(ReadmeFreezingTest, AFrozenParameterStaysAndAnAddedOneIsTrained) {
  run_program("freeze", 2, "freeze");
}

TEST(ReadmeRowsTest, RowsThatAreHardlySeenGoAndOthersCome) { run_program("rows", 2, "rows"); }

TEST(ReadmeAutocastTest, EachPassComputesWithTheParametersOfTheLastStep) {
  run_program("autocast", 2, "autocast");
}

}  // namespace

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
