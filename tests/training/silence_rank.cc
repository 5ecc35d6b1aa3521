// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/silence_rank.h"

#include <c10/util/Exception.h>

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

namespace zero {
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
  InitOptions init;
  init.timeout = death.timeout;
  // Ranks stand for machines here.
  init.shared_memory = false;
  if (const char* host = std::getenv("SILENCE_HOSTNAME")) init.hostname = host;
  death.at("start");
  std::optional<Group> group;
  guarded("init", [&] { group = init_process_group(init); });
  if (death.here && death.where == "connect") {
    const auto store = c10::make_intrusive<StoppingStore>(group->store(), death.count,
                                                          [&] { std::raise(death.signal); });
    group = Group(store, group->rank(), group->world_size(), group->name(),
                  default_backend_factory(at::kCPU, "127.0.0.1", true, false), at::kCPU,
                  group->timeout());
  }
  OddModel model{1};
  std::unique_ptr<ZeroOptimizer> optimizer;
  guarded("construction", [&] {
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kSgdMomentum, *model),
                                                *group, ZeroOptions().bucket_bytes(600));
  });
  for (int step = 0; step < 100000; ++step) {
    death.at("step", step);
    const auto seed = static_cast<uint64_t>(step);
    guarded("training", [&] {
      optimizer->backward(model->loss(random_tensor({3, 17}, seed), random_tensor({3, 11}, seed),
                                      OddModelImpl::kAll));
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

int silence_rank(int timeout_ms, int victim, const std::string& how, const std::string& where) {
  Death death;
  death.timeout = std::chrono::milliseconds(timeout_ms);
  death.here = std::atoi(std::getenv("RANK")) == victim;
  death.signal = how == "stop" ? SIGSTOP : SIGKILL;
  const size_t colon = where.find(':');
  death.where = where.substr(0, colon);
  if (colon != std::string::npos) death.count = std::atoi(where.c_str() + colon + 1);
  try {
    return train(death);
  } catch (const c10::Error&) {
    return 1;
  }
}

}  // namespace zero
