// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that checkpoint_kill_test kills:
//
//   checkpoint_program <ranks> <folder> replaces|"new names"
//
// Resumes from the newest checkpoint in the folder, then trains and saves without
// end: to a new name after every step, and, if it replaces, over "current".
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/checkpoint_run.h"
#include "tests/support/forked_ranks.h"
#include "zero/checkpoint.h"
#include "zero/launch.h"

namespace {

// Later steps repeat the last state, so that the test knows all of them.
constexpr int kSteps = 40;

int train(const std::string& folder, bool replaces) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  zero::CheckpointRun run(zero::Training(), group, 1);
  if (const auto newest = zero::latest(folder)) run.optimizer->load_checkpoint(*newest);
  auto step = static_cast<int>(run.optimizer->stats().steps);
  for (int save = step;; ++save) {
    if (step < kSteps) run.train(step, step + 1), ++step;
    run.optimizer->save_checkpoint(folder + "/save-" + std::to_string(save),
                                   zero::SaveOptions().overwrite(replaces));
    if (replaces) {
      run.optimizer->save_checkpoint(folder + "/current", zero::SaveOptions().overwrite(true));
    }
    if (group.rank() == 0) {
      std::printf("saved %d\n", step);
      std::fflush(stdout);
      zero::keep_last(folder, 3);
    }
    run.optimizer->check_replicas();  // nobody saves while rank 0 removes
  }
}

int program(int argc, char** argv) {
  if (argc != 4) return 2;
  const bool replaces = std::string(argv[3]) == "replaces";
  return zero::launch_local(std::atoi(argv[1]), [&] { return train(argv[2], replaces); });
}

}  // namespace

int main(int argc, char** argv) { zero::run_with_forked_ranks(program, argc, argv); }
