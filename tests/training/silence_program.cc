// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One rank of the jobs that silence_test starts: it trains, and one of the ranks is stopped or
// killed on the way. The others say what they see and how long that took.
//
//   silence_program <timeout ms> <victim> stop|kill <where>
//
// <where> is "start", "meeting:<n>" or "connect:<n>" (after the n-th access to the store, of the
// group's first communicator for "connect") or "step:<n>".
#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "tests/support/stopping_store.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Death {
  std::chrono::milliseconds timeout{};
  bool here = false;
  int signal = 0;
  std::string where;
  int count = 0;

  void at(const std::string& place, int number = 0) const {
    if (here && where == place && number == count) std::raise(signal);
  }
};

// Prints "failed in <what> after <ms> ms: <error>" when body() throws.
void guarded(const std::string& what, const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
  } catch (const c10::Error& error) {
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    std::printf("failed in %s after %d ms: %s\n", what.c_str(), static_cast<int>(took.count()),
                error.what_without_backtrace());
    std::fflush(stdout);
    throw;
  }
}

int train(const Death& death) {
  zero::InitOptions init;
  init.timeout = death.timeout;
  // Ranks stand for machines here.
  init.shared_memory = false;
  if (const char* host = std::getenv("SILENCE_HOSTNAME")) init.hostname = host;
  death.at("start");
  std::optional<zero::Group> group;
  guarded("init", [&] { group = zero::init_process_group(init); });
  if (death.here && death.where == "connect") {
    const auto store = c10::make_intrusive<zero::StoppingStore>(group->store(), death.count,
                                                                [&] { std::raise(death.signal); });
    group = zero::Group(store, group->rank(), group->world_size(), group->name(),
                        zero::default_backend_factory(at::kCPU, "127.0.0.1", true, false), at::kCPU,
                        group->timeout());
  }
  zero::OddModel model{1};
  std::unique_ptr<zero::ZeroOptimizer> optimizer;
  guarded("construction", [&] {
    optimizer = std::make_unique<zero::ZeroOptimizer>(
        *model, zero::make_inner(zero::Inner::kSgdMomentum, *model), *group,
        zero::ZeroOptions().bucket_bytes(600));
  });
  for (int step = 0; step < 100000; ++step) {
    death.at("step", step);
    const auto seed = static_cast<uint64_t>(step);
    guarded("training", [&] {
      optimizer->backward(model->loss(zero::random_tensor({3, 17}, seed),
                                      zero::random_tensor({3, 11}, seed),
                                      zero::OddModelImpl::kAll));
      optimizer->step();
    });
    if (step == 5) {
      std::printf("trains\n");
      std::fflush(stdout);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s timeout_ms victim stop|kill where\n", argv[0]);
    return 2;
  }
  Death death;
  death.timeout = std::chrono::milliseconds(std::atoi(argv[1]));
  death.here = std::string(std::getenv("RANK")) == argv[2];
  death.signal = std::string(argv[3]) == "stop" ? SIGSTOP : SIGKILL;
  const std::string where = argv[4];
  const size_t colon = where.find(':');
  death.where = where.substr(0, colon);
  if (colon != std::string::npos) death.count = std::atoi(where.c_str() + colon + 1);
  try {
    return train(death);
  } catch (const c10::Error&) {
    return 1;
  }
}
