// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The choice of an instruction set, and what a program without CUDA says.
#include "kernels/cpu/cpu_capability.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/cast.h"

namespace zero::kernels {
namespace {

TEST(CpuCapability, ThePlainLoopsAreAlwaysThere) {
  ASSERT_NE(range_kernels_for(CpuCapability::kDefault), nullptr);
  EXPECT_STREQ(range_kernels_for(CpuCapability::kDefault)->name, "default");
}

TEST(CpuCapability, TheBestThatTheProcessorHasIsChosen) {
  const RangeKernels* best = range_kernels_for(CpuCapability::kDefault);
  for (CpuCapability capability : {CpuCapability::kAvx2, CpuCapability::kAvx512}) {
    if (const RangeKernels* kernels = range_kernels_for(capability)) {
      best = kernels;
    }
  }
  EXPECT_STREQ(range_kernels().name, best->name);
}

TEST(CpuCapability, AnUnknownNameInTheEnvironmentIsAnError) {
  // In a process of its own, since the choice is made once.
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("ZERO_CPU_CAPABILITY", "mmx", 1);
        try {
          range_kernels();
        } catch (const c10::Error& error) {
          const bool says_so = std::string(error.what()).find("got 'mmx'") != std::string::npos;
          std::exit(says_so ? 42 : 1);
        }
        std::exit(2);
      },
      ::testing::ExitedWithCode(42), "");
}

#if !defined(ZERO_CUDA)
TEST(NoCuda, ACudaStreamIsAnErrorThatNamesTheBuildOption) {
  float x = 0.0F;
  float y = 0.0F;
  try {
    cast_copy(&x, c10::ScalarType::Float, &y, c10::ScalarType::Float, 1, nullptr,
              Stream{true, nullptr});
    FAIL() << "expected an exception";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("--config=cuda"), std::string::npos);
  }
}
#endif

}  // namespace
}  // namespace zero::kernels
