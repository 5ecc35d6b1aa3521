// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The jobs that recovery_test starts:
//
//   recovery_program <ranks> <stage> <inner> <from> <to> <folder> <timeout ms> [/<n>] [+<n>[late]]
//   [<death>...]
//
// trains steps [from, to), protecting every third one; from 0, or from the checkpoint
// <folder>/step-<from>. A death is <rank>@<step><how>: "k" kills the rank before that step, "b" in
// the middle of its backward pass, "r" before its first recovery, "j" when it has just joined (at
// step 0), "s" stops it before that step until the others have ended. <rank>@<n>m kills the rank
// before the n-th message of its recoveries, and of joining: a value for the store, or an operation
// of a communicator; <rank>@<n>p stops it there for 1.5 s. Survivors recover. With /<n>, so many
// ranks are said to share a machine. With +<n>, so many of the dead are replaced, "late" by
// processes that wait until fewer ranks have made a step, and steps go on beyond <to> until there
// are <ranks> again. At the end the first rank writes <folder>/step-<steps> and all that training
// depends on, <folder>/state-<steps>.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/forked_ranks.h"
#include "zero/base/message_probe.h"
#include "zero/launch.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEvery = 3;
constexpr int kPauseMicroseconds = 1500000;
constexpr int kTries = 3;  // of recover(), which another death may disturb

struct Job {
  int ranks = 0;
  int ranks_per_machine = 0;  // 0: found
  int replacements = 0;
  bool late = false;
  int64_t stage = 2;
  zero::Inner inner = zero::Inner::kAdamW;
  int from = 0;
  int to = 0;
  std::string folder;
  std::chrono::milliseconds timeout{};
  std::vector<std::string> deaths;
};

void say(int rank, const std::string& text) {
  std::printf("rank %d %s\n", rank, text.c_str());
  std::fflush(stdout);
}

class Death {
 public:
  Death(const Job& job, int rank) : job_(job), rank_(rank) {}

  void at(int step, char how) const {
    const std::string own = std::to_string(rank_) + "@" + std::to_string(step) + how;
    for (const std::string& death : job_.deaths) {
      if (death != own) continue;
      how == 's' ? stop() : die();
    }
  }
  // Between the two, messages count.
  void begin_messages() const {
    const std::string own = std::to_string(rank_) + "@";
    for (const std::string& death : job_.deaths) {
      if (!death.starts_with(own) || (!death.ends_with('m') && !death.ends_with('p'))) continue;
      last = std::stoi(death.substr(own.size()));
      pauses = death.ends_with('p');
    }
    zero::message_probe = [](const std::string& what) {
      // How many beats there are is a matter of time.
      if (what.find("/beat/") != std::string::npos || ++messages != last) return;
      std::fprintf(stderr, "%s before message %d, %s\n", pauses ? "stopped" : "killed",
                   messages.load(), what.c_str());
      pauses ? pause() : die();
    };
  }
  static int end_messages() {
    zero::message_probe = nullptr;
    return messages;
  }
  // The others have ended their work.
  void wake_others() const {
    std::ifstream file(job_.folder + "/stopped");
    pid_t pid = 0;
    if (file >> pid) kill(pid, SIGCONT);
  }

 private:
  static void die() { kill(getpid(), SIGKILL); }
  // All threads of the process.
  static void pause() {
    const pid_t self = getpid();
    if (fork() == 0) {
      usleep(kPauseMicroseconds);
      kill(self, SIGCONT);
      _exit(0);
    }
    std::raise(SIGSTOP);
  }
  void stop() const {
    std::ofstream(job_.folder + "/stopped") << getpid() << std::flush;
    std::raise(SIGSTOP);
  }

  inline static std::atomic<int> messages = 0;
  inline static std::atomic<int> last = 0;
  inline static std::atomic<bool> pauses = false;
  const Job& job_;
  const int rank_;
};

zero::RecoveryReport recover(zero::ZeroOptimizer& optimizer, const std::string& folder, int rank) {
  for (int tries = 1;; ++tries) {
    try {
      return optimizer.recover(folder);
    } catch (const zero::CommunicationError& error) {
      if (tries == kTries) throw;
      say(rank, "failed again: " + std::string(error.what_without_backtrace()));
    }
  }
}

// How many ranks' memory this process has mapped, as it reads it.
int memories_of_others() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    count +=
        line.find("/memfd:zero") != std::string::npos && line.find(" r--s ") != std::string::npos;
  }
  return count;
}

int train(const Job& job) {
  zero::InitOptions init;
  init.timeout = job.timeout;
  init.device = at::kCPU;
  if (job.ranks_per_machine > 0) {
    init.topology = zero::Topology::of_equal_machines(job.ranks, job.ranks_per_machine);
  }
  const zero::Group group = zero::init_process_group(init);
  // As a program with two optimizers may have it.
  const zero::Group second = zero::init_process_group(init);
  const int rank = group.rank();
  const Death death(job, rank);
  // As a program may have one, which does not learn of the deaths.
  std::unique_ptr<zero::Communicator> idle;
  if (!group.joins() && group.world_size() > 1) {
    idle = second.make_communicator("idle", zero::Purpose::kData);
  }
  const std::string fewer = job.folder + "/fewer";
  if (group.joins()) {
    while (job.late && access(fewer.c_str(), F_OK) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    death.begin_messages();
  }
  zero::Training training;
  training.inner = job.inner;
  training.max_norm = 0.7;
  training.options.stage(job.stage).bucket_bytes(900).protect(kEvery);
  zero::CheckpointRun run(training, group, static_cast<uint64_t>(1 + job.from + rank * job.from));
  if (job.from > 0) {
    run.optimizer->load_checkpoint(job.folder + "/step-" + std::to_string(job.from));
  }
  int step = job.from;
  const auto say_recovered = [&](int64_t from, Clock::duration took) {
    const zero::Group& now = run.optimizer->group();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
    say(rank, c10::str(now.name(), " at step ", step, " from step ", from, " as rank ", now.rank(),
                       " of ", now.world_size(), " in ", ms, " ms, ", Death::end_messages(),
                       " messages"));
  };
  const auto count_up = [&] {  // as run.train() does after step()
    at::NoGradGuard no_grad;
    if (step > 0) run.model->counter.add_(1);
  };
  if (group.joins()) {
    const zero::Stats stats = run.optimizer->stats();
    step = static_cast<int>(stats.steps + stats.skipped_steps);
    // Its options are those of construction, and run.train() counts from them.
    for (auto& g : run.optimizer->param_groups()) {
      for (int i = 0; i < step; ++i) g.options().set_lr(g.options().get_lr() * 0.95);
    }
    count_up();
    say_recovered(step, {});
    death.at(0, 'j');
  }
  const auto is_done = [&] {
    const bool whole = run.optimizer->group().world_size() == job.ranks;
    return step >= job.to && (whole || job.replacements == 0);
  };
  run.model->trunk->bias.register_hook([&](const at::Tensor&) { death.at(step, 'b'); });
  const auto save = [&] {
    run.optimizer->save_checkpoint(job.folder + "/step-" + std::to_string(step),
                                   zero::SaveOptions().overwrite(true));
    const zero::Snapshot snapshot = run.snapshot();
    if (run.optimizer->group().rank() != 0) return;
    zero::write_snapshot(snapshot, job.folder + "/state-" + std::to_string(step));
    death.wake_others();
  };
  while (true) {
    try {
      if (is_done()) {
        save();
        break;
      }
      // A process takes its time to start.
      if (step >= job.to) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      death.at(step, 'k');
      death.at(step, 's');
      run.train(step, step + 1);
      ++step;
      if (run.optimizer->group().world_size() < job.ranks) std::ofstream{fewer};
    } catch (const zero::CommunicationError& error) {
      say(rank, "failed: " + std::string(error.what_without_backtrace()));
      death.at(step, 'r');
      const auto start = Clock::now();
      death.begin_messages();
      const zero::RecoveryReport report = recover(*run.optimizer, job.folder, rank);
      const int from = std::exchange(step, static_cast<int>(report.steps));
      count_up();
      say_recovered(from, Clock::now() - start);
    }
  }
  say(rank, c10::str("done after step ", step));
  say(rank, c10::str("has mapped the memory of ", memories_of_others(), " others"));
  return 0;
}

int program(int argc, char** argv) {
  if (argc < 8) return 2;
  Job job;
  job.stage = std::atoi(argv[2]);
  job.inner = std::string(argv[3]) == "sgd" ? zero::Inner::kSgdMomentum : zero::Inner::kAdamW;
  job.from = std::atoi(argv[4]);
  job.to = std::atoi(argv[5]);
  job.folder = argv[6];
  job.timeout = std::chrono::milliseconds(std::atoi(argv[7]));
  job.ranks = std::atoi(argv[1]);
  job.deaths.assign(argv + 8, argv + argc);
  if (!job.deaths.empty() && job.deaths[0][0] == '/') {
    job.ranks_per_machine = std::stoi(job.deaths[0].substr(1));
    job.deaths.erase(job.deaths.begin());
  }
  if (!job.deaths.empty() && job.deaths[0][0] == '+') {
    job.replacements = std::stoi(job.deaths[0].substr(1));
    job.late = job.deaths[0].ends_with("late");
    job.deaths.erase(job.deaths.begin());
  }
  zero::LaunchOptions launch;
  launch.survivors_go_on = true;
  launch.replacements = job.replacements;
  return zero::launch_local(
      job.ranks,
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

}  // namespace

int main(int argc, char** argv) { zero::run_with_forked_ranks(program, argc, argv); }
