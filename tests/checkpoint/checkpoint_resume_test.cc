// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A run that processes stop and other processes take up is the run that never
// stopped, in every bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/checkpoint_run.h"

namespace zero {
namespace {

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int64_t differing_bits(const std::string& a, const std::string& b) {
  const auto length = std::max(a.size(), b.size());
  auto bits = static_cast<int64_t>(8 * (length - std::min(a.size(), b.size())));
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    bits += static_cast<int64_t>(std::bitset<8>(static_cast<unsigned char>(a[i] ^ b[i])).count());
  }
  return bits;
}

class ProcessTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ProcessTest, ::testing::Values("fp32", "bf16", "fp16", "own"),
                         [](const auto& info) { return std::string(info.param); });

// The first processes save after eleven steps, and go on.
TEST_P(ProcessTest, TwentyStepsEqualElevenAndNineOfNewProcessesInEveryBit) {
  const std::string kind = GetParam();
  const std::string folder = fresh_folder(kind);
  for (const char* from : {"0", "11"}) {
    const std::string command =
        "tests/checkpoint/checkpoint_resume_program 2 " + kind + " " + from + " 20 " + folder;
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
  const std::string expected = content(folder + "/state-20-0");
  const std::string resumed = content(folder + "/state-20-11");
  ASSERT_GT(expected.size(), 10000u);
  EXPECT_GT(differing_bits(expected, content(folder + "/state-11-0")), 10000)
      << "the steps after the save changed nothing";
  const int64_t bits = differing_bits(expected, resumed);
  std::printf("%s: %lld differing bits of %zu\n", kind.c_str(), static_cast<long long>(bits),
              8 * expected.size());
  EXPECT_EQ(bits, 0);
}

}  // namespace
}  // namespace zero
