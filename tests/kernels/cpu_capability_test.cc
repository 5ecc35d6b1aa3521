// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The choice of an instruction set, and what a program without CUDA says.
#include "kernels/cpu/cpu_capability.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "kernels/cast.h"

namespace zero::kernels {
namespace {

TEST(CpuCapability, ThePlainLoopsAreAlwaysThere) {
  EXPECT_NE(range_kernels_for(CpuCapability::kDefault), nullptr);
}

// The loops that a process with this environment uses, or the error. The choice is made once, so
// each is made in a process of its own.
std::string chosen_with(const char* variable) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    variable == nullptr ? unsetenv("ZERO_CPU_CAPABILITY")
                        : setenv("ZERO_CPU_CAPABILITY", variable, 1);
    std::string text;
    try {
      text = range_kernels().name;
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text(4096, '\0');
  text.resize(std::max<ssize_t>(read(ends[0], text.data(), text.size()), 0));
  close(ends[0]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  return text;
}

TEST(CpuCapability, TheBestThatTheProcessorHasIsChosen) {
  std::string best = "default";
  for (CpuCapability capability : {CpuCapability::kAvx2, CpuCapability::kAvx512}) {
    if (range_kernels_for(capability) != nullptr) best = name_of(capability);
  }
  EXPECT_EQ(chosen_with(nullptr), best);
  EXPECT_EQ(chosen_with(""), best);
}

TEST(CpuCapability, EveryNameInTheEnvironmentIsUsedOrAnErrorWhereTheProcessorLacksIt) {
  const std::string best = chosen_with(nullptr);
  for (const std::string name : {"default", "avx2", "avx512", "sve", "mmx", "AVX2", "avx2 "}) {
    bool supported = false;
    for (CpuCapability capability : kCpuCapabilities) {
      supported |= name == name_of(capability) && range_kernels_for(capability) != nullptr;
    }
    const std::string chosen = chosen_with(name.c_str());
    if (supported) {
      EXPECT_EQ(chosen, name);
    } else {
      EXPECT_NE(chosen.find("must be default, avx2 or avx512"), std::string::npos) << chosen;
      EXPECT_NE(chosen.find("got '" + name + "'"), std::string::npos) << chosen;
      EXPECT_NE(chosen.find("the best that is supported is '" + best + "'"), std::string::npos)
          << chosen;
    }
  }
}

TEST(CpuCapability, EveryTableHasTheNameOfItsInstructionSet) {
  for (CpuCapability capability : kCpuCapabilities) {
    const RangeKernels* const kernels = range_kernels_for(capability);
    if (kernels == nullptr) continue;
    EXPECT_STREQ(kernels->name, name_of(capability));
  }
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
