// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The random programs of call_sequence_test on a device with streams, one for each rank: every
// order of calls gives what plain torch gives, without a race, a deadlock or a kernel on the wrong
// device. ZERO_FUZZ_SEED, ZERO_FUZZ_FIRST and ZERO_FUZZ_COUNT are as there.
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>
#include <string>

#include "tests/support/cases_at_once.h"
#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/fuzz_seeds.h"
#include "tests/training/run_sequence.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// Every kParts-th seed.
class DeviceSequenceTest : public ::testing::TestWithParam<uint64_t> {};
constexpr uint64_t kParts = 4;
INSTANTIATE_TEST_SUITE_P(Part, DeviceSequenceTest, ::testing::Range<uint64_t>(0, kParts));

TEST_P(DeviceSequenceTest, EqualsPlainTorch) {
  const Seeds seeds = chosen_seeds({200001, 60});
  const fs::path folder = fs::path(::testing::TempDir()) / "device_sequence_test";
  EmulatedDevice::set_patience(kSequenceTimeout);
  std::string failed;
  for (uint64_t i = GetParam(); i < seeds.count; i += kParts) {
    const uint64_t seed = seeds.first + i;
    const CallSequence sequence = draw_sequence(seed);
    // Rows of 8 bits are for host memory.
    if (sequence.options.gradient_wire() != GradientWire::kDtype) continue;
    const std::string text = describe(sequence);
    if (seeds.count == 1) std::cout << text << std::flush;
    print_if_aborted(&text, kSequenceLimit);
    fs::create_directories(folder);
    DeviceRunOptions options;
    options.ranks_per_machine = sequence.ranks_per_machine;
    options.over_host = seed % 3 == 0;
    options.timeout = kSequenceTimeout;
    std::string error;
    try {
      run_device_ranks(
          sequence.world_size,
          [&](const Group& group) { run_sequence(sequence, group, folder.string()); }, options);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    fs::remove_all(folder);
    print_if_aborted(nullptr);
    if (error.empty() && !HasFailure()) continue;
    failed += " " + std::to_string(seed);
    ADD_FAILURE() << error << "\nin " << text << "rerun with ZERO_FUZZ_SEED=" << seed;
    break;
  }
  EXPECT_EQ(failed, "");
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
