// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that call_sequence_test starts: random programs of calls on ranks that are processes,
// over sockets and through shared memory.
//
//   call_sequence_program <ranks> <first seed> <number of seeds> <folder>
//
// Of these seeds it runs those whose sequences have that many ranks. The numbers of rank 0 have
// separators, as in the locales of some users.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <locale>
#include <string>

#include "tests/support/forked_ranks.h"
#include "tests/support/fuzz_seeds.h"
#include "tests/support/run_ranks.h"
#include "tests/training/run_sequence.h"
#include "zero/launch.h"

namespace zero {
namespace {

// Behind each digit.
struct Separators : std::numpunct<char> {
  char do_thousands_sep() const override { return '\''; }
  std::string do_grouping() const override { return "\1"; }
};

int run(int ranks, const Seeds& seeds, const std::string& folder) {
  const char* const rank = std::getenv("RANK");  // none where one process is all
  if (rank != nullptr && rank == std::string("0")) {
    std::locale::global(std::locale(std::locale::classic(), new Separators));
  }
  InitOptions init;
  init.timeout = kSequenceTimeout;
  const Group job = init_process_group(init);
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const CallSequence sequence = draw_sequence(seed);
    if (sequence.world_size != ranks) continue;
    const std::string text = describe(sequence);
    print_if_aborted(&text, kSequenceLimit);
    const bool shared = sequence.wire == Wire::kShared || sequence.wire == Wire::kNative;
    const Group group(
        job.store(), job.rank(), ranks, "sequence " + std::to_string(seed), gloo_factory(shared),
        at::kCPU, kSequenceTimeout,
        Topology::of_equal_machines(
            ranks, sequence.ranks_per_machine > 0 ? sequence.ranks_per_machine : ranks));
    const std::filesystem::path own = std::filesystem::path(folder) / std::to_string(seed);
    std::filesystem::create_directories(own);
    try {
      run_sequence(sequence, group, own.string());
    } catch (const c10::Error& error) {
      print_if_aborted(nullptr);
      std::fprintf(stderr, "%s\nin %srerun with ZERO_FUZZ_SEED=%llu\n",
                   error.what_without_backtrace(), text.c_str(),
                   static_cast<unsigned long long>(seed));
      return 1;
    }
    print_if_aborted(nullptr);
    std::error_code ignored;  // another rank removes it too
    std::filesystem::remove_all(own, ignored);
  }
  return 0;
}

int program(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s ranks first count folder\n", argv[0]);
    return 2;
  }
  const int ranks = std::atoi(argv[1]);
  const Seeds seeds = {std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10)};
  return launch_local(ranks, [&] { return run(ranks, seeds, argv[4]); });
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { zero::run_with_forked_ranks(zero::program, argc, argv); }
