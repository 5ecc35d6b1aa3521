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
#include <optional>
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

// The letters of a death.
constexpr char kBeforeStep = 'k', kInBackward = 'b', kInRecovery = 'r', kJoined = 'j';
constexpr char kStopped = 's', kAtMessage = 'm', kPausedAtMessage = 'p';

struct Death {
  int rank = 0;
  int number = 0;  // of a step or a message
  char how = 0;
};

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
  std::vector<Death> deaths;
};

void say(int rank, const std::string& text) {
  std::printf("rank %d %s\n", rank, text.c_str());
  std::fflush(stdout);
}

// The deaths of this rank.
class Deaths {
 public:
  Deaths(const Job& job, int rank) : job_(job), rank_(rank) {}

  void at(int step, char how) const {
    for (const Death& death : job_.deaths) {
      if (death.rank != rank_ || death.number != step || death.how != how) continue;
      how == kStopped ? stop() : die();
    }
  }
  // Between the two, messages count.
  void begin_messages() const {
    for (const Death& death : job_.deaths) {
      if (death.rank != rank_ || (death.how != kAtMessage && death.how != kPausedAtMessage))
        continue;
      last = death.number;
      pauses = death.how == kPausedAtMessage;
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

zero::InitOptions init_options(const Job& job) {
  zero::InitOptions init;
  init.timeout = job.timeout;
  init.device = at::kCPU;
  if (job.ranks_per_machine > 0) {
    init.topology = zero::Topology::of_equal_machines(job.ranks, job.ranks_per_machine);
  }
  return init;
}

// A rank of the job, from its start or from when it joins.
class Rank {
 public:
  explicit Rank(const Job& job) : job_(job) {
    // As a program may have one, which does not learn of the deaths.
    if (!group_.joins() && group_.world_size() > 1) {
      idle_ = second_.make_communicator("idle", zero::Purpose::kData);
    }
    if (group_.joins()) {
      while (job.late && access(fewer_.c_str(), F_OK) != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      deaths_.begin_messages();
    }
    zero::Training training;
    training.inner = job.inner;
    training.max_norm = 0.7;
    training.options.stage(job.stage).bucket_bytes(900).protect(kEvery);
    run_.emplace(training, group_, static_cast<uint64_t>(1 + job.from + rank_ * job.from));
    if (job.from > 0) {
      run_->optimizer->load_checkpoint(job.folder + "/step-" + std::to_string(job.from));
    }
    if (group_.joins()) take_over_steps();
    run_->model->trunk->bias.register_hook(
        [this](const at::Tensor&) { deaths_.at(step_, kInBackward); });
  }

  void train() {
    while (true) {
      try {
        while (!is_done()) make_step();
        save();
        break;
      } catch (const zero::CommunicationError& error) {
        recover_from(error);
      }
    }
    say(rank_, c10::str("done after step ", step_));
    say(rank_, c10::str("has mapped the memory of ", memories_of_others(), " others"));
  }

 private:
  // Those that the others have made, of which this rank's optimizer has the state.
  void take_over_steps() {
    const zero::Stats stats = run_->optimizer->stats();
    step_ = static_cast<int>(stats.steps + stats.skipped_steps);
    // Its options are those of construction, and CheckpointRun::train() counts from them.
    for (auto& g : run_->optimizer->param_groups()) {
      for (int i = 0; i < step_; ++i) g.options().set_lr(g.options().get_lr() * 0.95);
    }
    count_up();
    say_recovered(step_, {});
    deaths_.at(0, kJoined);
  }

  bool is_done() const {
    const bool whole = run_->optimizer->group().world_size() == job_.ranks;
    return step_ >= job_.to && (whole || job_.replacements == 0);
  }

  void make_step() {
    // A process takes its time to start.
    if (step_ >= job_.to) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    deaths_.at(step_, kBeforeStep);
    deaths_.at(step_, kStopped);
    run_->train(step_, step_ + 1);
    ++step_;
    if (run_->optimizer->group().world_size() < job_.ranks) std::ofstream{fewer_};
  }

  void save() {
    run_->optimizer->save_checkpoint(job_.folder + "/step-" + std::to_string(step_),
                                     zero::SaveOptions().overwrite(true));
    const zero::Snapshot snapshot = run_->snapshot();
    if (run_->optimizer->group().rank() != 0) return;
    zero::write_snapshot(snapshot, job_.folder + "/state-" + std::to_string(step_));
    deaths_.wake_others();
  }

  void recover_from(const zero::CommunicationError& error) {
    say(rank_, "failed: " + std::string(error.what_without_backtrace()));
    deaths_.at(step_, kInRecovery);
    const auto start = Clock::now();
    deaths_.begin_messages();
    const zero::RecoveryReport report = recover(*run_->optimizer, job_.folder, rank_);
    const int from = std::exchange(step_, static_cast<int>(report.steps));
    count_up();
    say_recovered(from, Clock::now() - start);
  }

  // As CheckpointRun::train() does after step().
  void count_up() {
    at::NoGradGuard no_grad;
    if (step_ > 0) run_->model->counter.add_(1);
  }

  void say_recovered(int64_t from, Clock::duration took) const {
    const zero::Group& now = run_->optimizer->group();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
    say(rank_, c10::str(now.name(), " at step ", step_, " from step ", from, " as rank ",
                        now.rank(), " of ", now.world_size(), " in ", ms, " ms, ",
                        Deaths::end_messages(), " messages"));
  }

  const Job& job_;
  const std::string fewer_ = job_.folder + "/fewer";  // is there once fewer ranks made a step
  const zero::Group group_ = zero::init_process_group(init_options(job_));
  // As a program with two optimizers may have it.
  const zero::Group second_ = zero::init_process_group(init_options(job_));
  const int rank_ = group_.rank();
  const Deaths deaths_{job_, rank_};
  std::unique_ptr<zero::Communicator> idle_;
  std::optional<zero::CheckpointRun> run_;
  int step_ = job_.from;
};

Job job_of(int argc, char** argv) {
  Job job;
  job.ranks = std::atoi(argv[1]);
  job.stage = std::atoi(argv[2]);
  job.inner = std::string(argv[3]) == "sgd" ? zero::Inner::kSgdMomentum : zero::Inner::kAdamW;
  job.from = std::atoi(argv[4]);
  job.to = std::atoi(argv[5]);
  job.folder = argv[6];
  job.timeout = std::chrono::milliseconds(std::atoi(argv[7]));
  for (int i = 8; i < argc; ++i) {
    const std::string argument = argv[i];
    Death death;
    if (argument[0] == '/') {
      job.ranks_per_machine = std::stoi(argument.substr(1));
    } else if (argument[0] == '+') {
      job.replacements = std::stoi(argument.substr(1));
      job.late = argument.ends_with("late");
    } else if (std::sscanf(argv[i], "%d@%d%c", &death.rank, &death.number, &death.how) == 3) {
      job.deaths.push_back(death);
    }
  }
  return job;
}

int program(int argc, char** argv) {
  if (argc < 8) return 2;
  const Job job = job_of(argc, argv);
  zero::LaunchOptions launch;
  launch.survivors_go_on = true;
  launch.replacements = job.replacements;
  return zero::launch_local(
      job.ranks,
      [&] {
        try {
          Rank(job).train();
          return 0;
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
