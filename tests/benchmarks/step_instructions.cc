// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that tests/benchmarks/step_instructions.sh runs under callgrind.
//
//   count_steps <world size> <stage> <contiguous|per_parameter> <parameters> <width> <steps>
//
// World size 0 is the same backward pass without an optimizer: what autograd costs by itself.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/simulated_steps.h"

// Valgrind's package brings this header; without it the program runs and counts nothing.
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#endif

namespace {

// Callgrind counts while this runs, on all threads: the optimizer's own worker belongs to a step.
template <class Job>
void count(Job& job, int steps) {
  for (int i = 0; i < 3; ++i) job.step();  // the first steps make buffers and state
  CALLGRIND_START_INSTRUMENTATION;
  for (int i = 0; i < steps; ++i) job.step();
  CALLGRIND_STOP_INSTRUMENTATION;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s W stage layout parameters width steps\n", argv[0]);
    return 2;
  }
  const zero::SimulatedOptions options{.world_size = std::atoi(argv[1]),
                                       .stage = std::atoi(argv[2]),
                                       .layout = std::strcmp(argv[3], "per_parameter") == 0
                                                     ? zero::Layout::kPerParameter
                                                     : zero::Layout::kContiguous,
                                       .parameters = std::atoi(argv[4]),
                                       .width = std::atoi(argv[5])};
  if (options.world_size == 0) {
    zero::PlainSteps job(options);
    count(job, std::atoi(argv[6]));
  } else {
    zero::SimulatedSteps job(options);
    count(job, std::atoi(argv[6]));
  }
  return 0;
}
