// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that fork_test starts: every rank forks in the middle of training, once in each
// scene, and the child ends in the way that the scene names. The parent goes on.
//
//   fork_program <ranks> <folder for checkpoints, to which the scene is added>

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/support/training.h"
#include "zero/checkpoint_options.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

using Clock = std::chrono::steady_clock;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// Destroyed by exit() and by the end of main().
std::unique_ptr<zero::ZeroOptimizer> global_optimizer;

struct Run {
  Run(const zero::Group& group_in, const std::string& folder)
      : group(group_in), text(group.make_communicator("text", zero::Purpose::kData)) {
    optimizer =
        std::make_unique<zero::ZeroOptimizer>(*model, zero::make_inner(zero::Inner::kAdamW, *model),
                                              group, zero::ZeroOptions().bucket_bytes(600));
    train(3);
    text->all_gather_text("", "before");
    pending = optimizer->save_checkpoint_async(folder, zero::SaveOptions().overwrite(true));
    backward();  // whose reductions are under way at the fork
  }
  void backward() {
    const auto seed = static_cast<uint64_t>(step++);
    optimizer->backward(model->loss(zero::random_tensor({3, 17}, seed),
                                    zero::random_tensor({3, 11}, seed), zero::OddModelImpl::kAll));
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      backward();
      optimizer->step();
    }
  }
  // What the parent does after the fork: all that the child may have broken.
  void go_on() {
    optimizer->step();
    pending->finish();
    train(3);
    optimizer->check_replicas();
    text->all_gather_text("", "after");
    group.make_communicator("new", zero::Purpose::kControl)->all_gather_text("", "new");
  }

  int step = 0;
  const zero::Group group;
  const std::unique_ptr<zero::Communicator> text;
  zero::OddModel model{1};
  std::unique_ptr<zero::ZeroOptimizer> optimizer;
  std::unique_ptr<zero::PendingCheckpoint> pending;
};

// Every call that would send throws, and says where it is.
void expect_refusals(Run& run) {
  const at::Tensor p = run.model->scale;
  const std::function<void()> calls[] = {
      [&] { run.optimizer->step(); },
      [&] { run.backward(); },
      [&] { run.optimizer->zero_grad(); },
      [&] { run.optimizer->clip_grad_norm_(1.0); },
      [&] { run.optimizer->master(p); },
      [&] { run.pending->finish(); },
      [&] { run.text->all_gather_text("", "text"); },
      [&] {
        run.text->gather_rows(at::zeros({run.group.world_size(), 1}), "rows").wait();
      },
      [&] { run.group.make_communicator("more", zero::Purpose::kControl); },
      [&] { run.group.shared_communicator("more", zero::Purpose::kControl); },
  };
  for (const auto& call : calls) {
    std::string text;
    try {
      call();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    const bool alone = run.group.world_size() == 1 && text.empty();  // nothing to send
    const bool clear = text.find("forked child") != std::string::npos;
    say("child call " + std::to_string(&call - calls) +
        (clear || alone ? " refused" : ": " + text));
  }
}

// Ends by itself or by an exception that unwinds through the optimizer.
void be_child(const std::string& scene, std::unique_ptr<Run>& run) {
  if (scene == "refuse") expect_refusals(*run);
  if (scene == "exit") {
    global_optimizer = std::move(run->optimizer);
    std::exit(11);
  }
  if (scene == "step") run->optimizer->step();
  throw std::runtime_error("the child unwinds");
}

// The exit code of the child; -1 when it hangs.
int code_of(pid_t child) {
  int status = 0;
  for (const auto end = Clock::now() + std::chrono::seconds(15); Clock::now() < end;) {
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

int body(const std::string& folder) {
  zero::InitOptions options;
  options.timeout = std::chrono::seconds(20);
  const zero::Group group = zero::init_process_group(options);
  for (const std::string scene : {"unwind", "exit", "step", "refuse"}) {
    auto run = std::make_unique<Run>(group, folder + "-" + scene);
    const pid_t child = fork();
    if (child == 0) be_child(scene, run);
    const int code = code_of(child);
    run->go_on();
    say("rank " + std::to_string(group.rank()) + " went on after " + scene +
        "; its child ended with " + std::to_string(code));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string folder = argv[2];
  return zero::launch_local(std::atoi(argv[1]), [&] {
    const pid_t before = getpid();
    try {
      return body(folder);
    } catch (const std::exception& error) {
      if (getpid() == before) throw;
      return std::string(error.what()) == "the child unwinds" ? 11 : 12;
    }
  });
}
