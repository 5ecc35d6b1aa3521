// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a long run meets: nothing that a process holds grows with the steps, and signals that
// interrupt every system call change no bit. ZERO_SOAK_STEPS sets the number of steps.
#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/lr_schedule.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

int64_t entries(const char* folder) {
  const auto list = std::filesystem::directory_iterator(folder);
  return std::distance(std::filesystem::begin(list), std::filesystem::end(list));
}

// What this process holds: memory in KiB that no file backs, and counts.
struct Held {
  int64_t memory = 0;
  int64_t descriptors = 0;
  int64_t threads = 0;
  int64_t maps = 0;
};

Held held_now() {
  malloc_trim(0);
  Held held;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssAnon:") status >> held.memory;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++held.maps;
  held.descriptors = entries("/proc/self/fd");
  held.threads = entries("/proc/self/task");
  return held;
}

// Layers that ranks drop in turn.
unsigned use_at(int64_t step, int rank) {
  return static_cast<unsigned>((step + rank) % 4 == 3 ? step % 16 : int64_t{OddModelImpl::kAll});
}

// One rank's run with what a long one does: clipping, a schedule, dropped layers, and saves to
// `folder`, of which every second one goes on during later steps. Calls `at_rest(step)` when no
// save is under way. Returns the parameters.
std::vector<at::Tensor> run(const Group& group, int64_t steps, int64_t save_every,
                            const std::string& folder,
                            const std::function<void(int64_t)>& at_rest) {
  OddModel model(1);
  ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                          ZeroOptions().stage(1).bucket_bytes(1500).overlap_gather(true));
  LrSchedule schedule(optimizer, linear_warmup(10, cosine_decay(steps)));
  std::unique_ptr<PendingCheckpoint> pending;
  for (int64_t step = 0; step < steps; ++step) {
    const auto seed = static_cast<uint64_t>(step * 10 + group.rank());
    optimizer.wait_for(*model);
    optimizer.backward(model->loss(random_tensor({3, 17}, seed), random_tensor({3, 11}, seed + 5),
                                   use_at(step, group.rank())));
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    schedule.step();
    const int64_t since = step % save_every;
    const std::string name = folder + "/step-" + std::to_string(step);
    if (since == 3 && step / save_every % 2 == 0) {
      optimizer.save_checkpoint(name, SaveOptions().include("schedule", schedule));
    } else if (since == 3) {
      pending = optimizer.save_checkpoint_async(name);
    } else if (since == 6) {
      if (pending) std::exchange(pending, nullptr)->finish();
      if (group.rank() == 0) keep_last(folder, 2);
      at_rest(step);
    }
  }
  if (pending) pending->finish();
  optimizer.check_replicas();
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model->parameters()) result.push_back(p.detach().clone());
  return result;
}

std::string fresh(const std::string& name) {
  std::string folder = ::testing::TempDir() + "/endurance-" + name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

TEST(EnduranceTest, NothingGrowsWithTheSteps) {
  const char* given = std::getenv("ZERO_SOAK_STEPS");
  const int64_t steps = given == nullptr ? 400 : std::atoll(given);
  const std::string folder = fresh("soak");
  std::vector<Held> seen;
  run_ranks(3,
            [&](const Group& group) {
              run(group, steps, steps / 20, folder, [&](int64_t) {
                if (group.rank() == 0) seen.push_back(held_now());
              });
            },
            {.transport = kRealTransport});
  ASSERT_EQ(seen.size(), 20U);
  // Buffers and arenas of the allocator are there after a quarter.
  const auto least = [&](int64_t Held::*what, size_t from, size_t to) {
    int64_t result = seen[from].*what;
    for (size_t i = from; i < to; ++i) result = std::min(result, seen[i].*what);
    return result;
  };
  const auto growth = [&](int64_t Held::*what) { return least(what, 15, 20) - least(what, 5, 10); };
  EXPECT_LE(growth(&Held::descriptors), 0);
  EXPECT_LE(growth(&Held::threads), 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which keep what is freed
  EXPECT_LE(growth(&Held::memory), 2048) << "KiB";
  EXPECT_LE(growth(&Held::maps), 4);
#endif
}

std::atomic<int64_t> alarms{0};

// Interrupts this process every 2 ms, as profilers and timers of others do: system calls end early
// with EINTR, since they are not restarted.
class Alarms {
 public:
  Alarms() {
    struct sigaction action = {};
    action.sa_handler = [](int) { alarms.fetch_add(1, std::memory_order_relaxed); };
    sigaction(SIGALRM, &action, &before_);
    every(2000);
  }
  ~Alarms() {
    every(0);
    sigaction(SIGALRM, &before_, nullptr);
  }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;

 private:
  static void every(int microseconds) {
    itimerval timer = {};
    timer.it_interval.tv_usec = timer.it_value.tv_usec = microseconds;
    setitimer(ITIMER_REAL, &timer, nullptr);
  }
  struct sigaction before_ = {};
};

TEST(EnduranceTest, SignalsThatInterruptSystemCallsChangeNoBit) {
  const auto train = [](const std::string& name) {
    const std::string folder = fresh(name);
    std::vector<at::Tensor> result;
    run_ranks(3,
              [&](const Group& group) {
                const auto parameters = run(group, 60, 10, folder, [](int64_t) {});
                if (group.rank() == 0) result = parameters;
              },
              {.transport = kRealTransport});
    EXPECT_EQ(entries(folder.c_str()), 2);
    const auto newest = latest(folder);
    EXPECT_TRUE(newest.has_value());
    if (newest) verify_checkpoint(*newest);
    return result;
  };
  const auto expected = train("quiet");
  std::vector<at::Tensor> interrupted;
  {
    const Alarms interrupts;
    interrupted = train("alarmed");
  }
  EXPECT_GT(alarms.load(), 20);
  ASSERT_EQ(interrupted.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(interrupted[i].equal(expected[i])) << i;
}

}  // namespace
}  // namespace zero
