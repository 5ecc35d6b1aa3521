// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/version.h"

#include <gtest/gtest.h>
#include <torch/version.h>

#include <regex>
#include <string>

namespace zero {
namespace {

TEST(Version, OneLineNamesVersionLibtorchCompilerDevicesAndTransports) {
  const std::string line = version_string();
  const std::regex form(
      "zero ([0-9.]+), libtorch ([0-9.]+), (g\\+\\+|clang) [0-9]+\\.[0-9]+\\.[0-9]+, "
      "devices: cpu( cuda)?, transports: gloo shared-memory( nccl)?");
  std::smatch parts;
  ASSERT_TRUE(std::regex_match(line, parts, form)) << line;
  EXPECT_EQ(parts[1], ZERO_VERSION_TEXT);
  EXPECT_EQ(parts[2], TORCH_VERSION);
  EXPECT_EQ(parts[4].matched, parts[5].matched) << "CUDA comes with NCCL: " << line;
}

}  // namespace
}  // namespace zero
