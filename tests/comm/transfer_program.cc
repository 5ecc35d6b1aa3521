// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that lost_rank_test starts: two processes exchange large rows, and rank 1 is killed,
// over sockets most likely while a part of a row has arrived. The other says what it sees, and how
// long it waited.
//
//   transfer_program sockets|shared <milliseconds that rank 1 lives>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/support/forked_ranks.h"
#include "zero/communicator.h"
#include "zero/launch.h"
#include "zero/process_group.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

int exchange_rows(bool shared, milliseconds life) {
  // The launcher ends the other at once; it shall speak first.
  std::signal(SIGTERM, SIG_IGN);
  const zero::Group group = zero::init_process_group(
      {.timeout = std::chrono::seconds(30), .device = at::kCPU, .shared_memory = shared});
  const auto data = group.make_communicator("data", zero::Purpose::kData);
  const at::Tensor rows = at::zeros({2, 16 << 20}), received = at::zeros({2, 16 << 20});
  std::thread killer;
  if (group.rank() == 1) {
    killer = std::thread([life] {
      std::this_thread::sleep_for(life);
      std::raise(SIGKILL);
    });
  }
  while (true) {
    const auto begin = Clock::now();
    try {
      data->exchange_rows(rows, received, "rows").wait();
    } catch (const c10::Error& error) {
      const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
      std::printf("survivor after %d ms: %s\n", static_cast<int>(waited.count()),
                  error.what_without_backtrace());
      return 1;
    }
  }
}

int program(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s sockets|shared milliseconds\n", argv[0]);
    return 2;
  }
  const bool shared = std::string(argv[1]) == "shared";
  return zero::launch_local(
      2, [&] { return exchange_rows(shared, milliseconds(std::atoi(argv[2]))); });
}

}  // namespace

int main(int argc, char** argv) { zero::run_with_forked_ranks(program, argc, argv); }
