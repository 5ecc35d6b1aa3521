// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// README.md's own code, compiled: a run that stops and goes on in new processes is the run that
// never stopped, in every bit, with dropout and a schedule.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lines of the C++ blocks of a section of README.md.
std::string code_of_section(const std::string& title) {
  std::istringstream readme(content("README.md"));
  std::string code;
  bool here = false, inside = false;
  for (std::string line; std::getline(readme, line);) {
    if (line.rfind("## ", 0) == 0) here = line == "## " + title;
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

class ReadmeTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Sections, ReadmeTest, ::testing::Values("Usage", "Checkpoints"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(ReadmeTest, EveryStatementIsOneOfTheProgramInTheSameOrder) {
  const std::vector<std::string> shown = statements(code_of_section(GetParam()));
  const std::vector<std::string> compiled = statements(content("tests/training/readme_program.cc"));
  ASSERT_GE(shown.size(), 5u);
  size_t next = 0;
  for (const std::string& statement : shown) {
    const size_t from = next;
    while (next < compiled.size() && compiled[next] != statement) ++next;
    EXPECT_LT(next, compiled.size()) << "README.md only: " << statement;
    next = next < compiled.size() ? next + 1 : from;
  }
}

class ReadmeRunTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ReadmeRunTest, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return "W" + std::to_string(info.param); });

TEST_P(ReadmeRunTest, ANewProcessGoesOnAsIfTheRunHadNotStopped) {
  const std::string ranks = std::to_string(GetParam());
  const auto run = [&](const std::string& name, int batches) {
    const std::string folder = ::testing::TempDir() + "/" + name + ranks;
    std::filesystem::create_directories(folder + "/run");
    const std::string command =
        "tests/training/readme_program " + ranks + " " + std::to_string(batches) + " " + folder;
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return folder;
  };
  const std::string whole = run("whole", 12);
  run("stopped", 8);  // saved after 6: what follows is lost
  const std::string resumed = run("stopped", 12);
  std::string former;
  for (int rank = 0; rank < GetParam(); ++rank) {
    const std::string last = "/state-" + std::to_string(rank) + "-12";
    const std::string expected = content(whole + last);
    ASSERT_GT(expected.size(), 2000u);
    EXPECT_TRUE(expected == content(resumed + last)) << "rank " << rank;
    EXPECT_FALSE(expected == former) << "equal random numbers on ranks";
    former = expected;
  }
  EXPECT_FALSE(content(whole + "/state-0-12") == content(resumed + "/state-0-8"));
}

}  // namespace
