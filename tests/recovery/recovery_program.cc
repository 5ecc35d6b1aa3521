// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The jobs that recovery_test starts:
//
//   recovery_program <ranks> <stage> <inner> <from> <to> <folder> <timeout ms> [<death>...]
//
// trains steps [from, to), protecting every third one; from 0, or from the checkpoint
// <folder>/step-<from>. A death is <rank>@<step><how>: "k" kills the rank before that step, "b" in
// the middle of its backward pass, "r" in its first recovery, "s" stops it before that step until
// the others have ended. Survivors recover. At the end the first of them writes
// <folder>/step-<to> and all that training depends on, <folder>/state-<to>.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "zero/launch.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEvery = 3;

struct Job {
  int64_t stage = 2;
  zero::Inner inner = zero::Inner::kAdamW;
  int from = 0;
  int to = 0;
  std::string folder;
  std::chrono::milliseconds timeout{};
  std::vector<std::string> deaths;
};

class Death {
 public:
  Death(const Job& job, int rank) : job_(job), rank_(rank) {}

  void at(int step, char how) const {
    const std::string own = std::to_string(rank_) + "@" + std::to_string(step) + how;
    for (const std::string& death : job_.deaths) {
      if (death == own && how != 's') std::raise(SIGKILL);
      if (death == own && how == 's') stop();
    }
  }
  // The others have ended their work.
  void wake_others() const {
    std::ifstream file(job_.folder + "/stopped");
    pid_t pid = 0;
    if (file >> pid) kill(pid, SIGCONT);
  }

 private:
  void stop() const {
    std::ofstream(job_.folder + "/stopped") << getpid() << std::flush;
    std::raise(SIGSTOP);
  }

  const Job& job_;
  const int rank_;
};

void say(int rank, const std::string& text) {
  std::printf("rank %d %s\n", rank, text.c_str());
  std::fflush(stdout);
}

int train(const Job& job) {
  zero::InitOptions init;
  init.timeout = job.timeout;
  init.device = at::kCPU;
  const zero::Group group = zero::init_process_group(init);
  const int rank = group.rank();
  zero::Training training;
  training.inner = job.inner;
  training.max_norm = 0.7;
  training.options.stage(job.stage).bucket_bytes(900).protect(kEvery);
  zero::CheckpointRun run(training, group, static_cast<uint64_t>(1 + job.from + rank * job.from));
  if (job.from > 0) {
    run.optimizer->load_checkpoint(job.folder + "/step-" + std::to_string(job.from));
  }
  const Death death(job, rank);
  int step = job.from;
  run.model->trunk->bias.register_hook([&](const at::Tensor&) { death.at(step, 'b'); });
  while (step < job.to) {
    try {
      death.at(step, 'k');
      death.at(step, 's');
      run.train(step, step + 1);
      ++step;
    } catch (const c10::Error& error) {
      say(rank, "failed: " + std::string(error.what_without_backtrace()));
      death.at(step, 'r');
      const auto start = Clock::now();
      const zero::RecoveryReport report = run.optimizer->recover(job.folder);
      const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
      // What run.train() does after step().
      at::NoGradGuard no_grad;
      if (report.steps > 0) run.model->counter.add_(1);
      say(rank, c10::str("recovered at step ", report.steps, " from step ", step, " as rank ",
                         run.optimizer->group().rank(), " of ", report.survivors.size(), " in ",
                         took.count(), " ms"));
      step = static_cast<int>(report.steps);
    }
  }
  run.optimizer->save_checkpoint(job.folder + "/step-" + std::to_string(job.to));
  const zero::Snapshot snapshot = run.snapshot();
  if (run.optimizer->group().rank() == 0) {
    zero::write_snapshot(snapshot, job.folder + "/state-" + std::to_string(job.to));
    death.wake_others();
  }
  say(rank, "done");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return 2;
  Job job;
  job.stage = std::atoi(argv[2]);
  job.inner = std::string(argv[3]) == "sgd" ? zero::Inner::kSgdMomentum : zero::Inner::kAdamW;
  job.from = std::atoi(argv[4]);
  job.to = std::atoi(argv[5]);
  job.folder = argv[6];
  job.timeout = std::chrono::milliseconds(std::atoi(argv[7]));
  job.deaths.assign(argv + 8, argv + argc);
  zero::LaunchOptions launch;
  launch.survivors_go_on = true;
  return zero::launch_local(
      std::atoi(argv[1]),
      [&] {
        try {
          return train(job);
        } catch (const c10::Error& error) {
          say(std::atoi(std::getenv("RANK")),
              "ended: " + std::string(error.what_without_backtrace()));
          return 1;
        }
      },
      launch);
}
