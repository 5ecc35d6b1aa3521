// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/error_text.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

namespace zero {
namespace {

bool lacks_memory(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return is_out_of_memory(error);
  }
  ADD_FAILURE() << "expected an error";
  return false;
}

constexpr int64_t kMoreThanThereIs = int64_t{1} << 60;

void allocate_too_much() { at::empty({kMoreThanThereIs}, at::kByte); }

TEST(ErrorTextTest, EachErrorOfAFullMemoryIsKnown) {
  EXPECT_TRUE(lacks_memory([] { throw std::bad_alloc(); }));
  EXPECT_TRUE(lacks_memory([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "of a GPU"); }));
  EXPECT_TRUE(lacks_memory(allocate_too_much)) << "of libtorch's allocator of a CPU";
}

TEST(ErrorTextTest, WhatAnotherRankSaysOfItsMemoryIsNoLackOfMemoryHere) {
  std::string text;
  try {
    allocate_too_much();
  } catch (const std::exception& error) {
    text = error_line(error);
  }
  ASSERT_NE(text.find("can't allocate memory"), std::string::npos) << text;
  EXPECT_FALSE(lacks_memory([&] { TORCH_CHECK(false, "Rank 1 gave up: ", text); }));
  EXPECT_FALSE(lacks_memory([&] { throw_communication_error("lost rank 1: " + text); }));
}

// As C10D_NCCL_CHECK of NCCLUtils.hpp puts it together.
TEST(ErrorLineTest, HasTheReasonOfNccl) {
  const std::string general =
      "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for "
      "details), NCCL version 2.28.9";
  const std::string reason =
      "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No "
      "space left on device (28)";
  const std::string text = general + "\nncclSystemError: System call failed. \nLast error:\n";
  const auto line_of = [](const std::string& whole) {
    return error_line(std::runtime_error(whole));
  };
  EXPECT_EQ(line_of(text + reason), general + ": " + reason);
  EXPECT_EQ(line_of(text + reason + "\nmore"), general + ": " + reason);
  EXPECT_EQ(line_of(text), general);
  EXPECT_EQ(line_of(general + "\nncclInternalError: Internal check failed."), general);
}

TEST(ErrorTextTest, WhateverAHandlerHasCaughtHasAText) {
  const auto text = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (...) {
      return text_of_caught();
    }
    return {};
  };
  EXPECT_EQ(text([] { TORCH_CHECK(false, "an error of ours"); }), "an error of ours");
  EXPECT_EQ(text([] { throw std::runtime_error("of the standard library"); }),
            "of the standard library");
  EXPECT_EQ(text([] { throw 1; }), kNoStdException);
}

}  // namespace
}  // namespace zero
