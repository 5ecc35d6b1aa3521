// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which seeds a test of random programs runs, and what it prints when one of them ends the process.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace zero {

// The seeds that ZERO_FUZZ_SEED (one), or ZERO_FUZZ_FIRST and ZERO_FUZZ_COUNT, ask for.
struct Seeds {
  uint64_t first = 1;
  uint64_t count = 0;
};
Seeds chosen_seeds(Seeds otherwise);

// The program that is printed if this process is aborted, or stuck for longer than `limit`; `text`
// must live until the next call. nullptr: none.
void print_if_aborted(const std::string* text, std::chrono::seconds limit = {});

}  // namespace zero
