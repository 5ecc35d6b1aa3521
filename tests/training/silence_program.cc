// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A rank that silence_test starts on another machine:
//
//   silence_program <timeout ms> <victim> stop|kill <where>
#include <cstdio>
#include <cstdlib>

#include "tests/training/silence_rank.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s timeout_ms victim stop|kill where\n", argv[0]);
    return 2;
  }
  return zero::silence_rank(std::atoi(argv[1]), std::atoi(argv[2]), argv[3], argv[4]);
}
