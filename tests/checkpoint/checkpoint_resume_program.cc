// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What checkpoint_resume_test starts as processes of their own:
//   checkpoint_resume_program <ranks> <kind> <from> <to> <folder>
//
// Trains steps [from, to), from the checkpoint that another process left in <folder> unless <from>
// is 0, and saves one after step 11, where it passes it. Writes all that training depends on to
// <folder>/state-<step>-<from> at the save and at the end.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/checkpoint_run.h"
#include "tests/support/end_at_once.h"
#include "zero/checkpoint.h"
#include "zero/launch.h"

namespace {

constexpr int kSave = 11;

zero::Training training(const std::string& kind) {
  using Use = zero::OddModelImpl::Use;
  zero::Training t;
  t.max_norm = 0.7;
  t.options.bucket_bytes(900);
  // A layer is dropped by all ranks in some steps, and by rank 1 alone in others.
  t.use = [](int rank, int step, int) {
    if (step % 3 == 1) return static_cast<unsigned>(Use::kLeft | Use::kTrunk);
    return step % 3 == 2 && rank == 1 ? static_cast<unsigned>(Use::kAll & ~Use::kRight)
                                      : static_cast<unsigned>(Use::kAll);
  };
  if (kind == "bf16") t.dtype = at::kBFloat16;
  if (kind == "fp16") {
    t.dtype = at::kHalf;
    // Grows and overflows within the run, on both sides of the save.
    t.options.loss_scaler(
        zero::LossScalerOptions().initial_scale(8192).growth_interval(2).growth_factor(64));
  }
  if (kind == "own") {
    t.inner = zero::Inner::kOwn;
    t.options.elementwise(true);
  }
  return t;
}

int train(const std::string& kind, int from, int to, const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  // Another model on resume, frozen parameters included: nothing is right by chance.
  const auto seed = static_cast<uint64_t>(1 + from + group.rank() * from);
  zero::CheckpointRun run(training(kind), group, seed);
  if (from > 0) run.optimizer->load_checkpoint(folder + "/step-" + std::to_string(from));
  const auto train_to = [&](int begin, int end) {
    run.train(begin, end);
    const zero::Snapshot snapshot = run.snapshot();
    if (group.rank() != 0) return;
    std::printf("%s: steps %d to %d, %g of them skipped\n", kind.c_str(), from, end,
                snapshot.at("steps/skipped").item<double>());
    zero::write_snapshot(snapshot,
                         folder + "/state-" + std::to_string(end) + "-" + std::to_string(from));
  };
  if (from < kSave) {
    train_to(from, kSave);
    run.optimizer->save_checkpoint(folder + "/step-" + std::to_string(kSave));
  }
  train_to(std::max(from, kSave), to);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  zero::end_at_once(zero::launch_local(std::atoi(argv[1]), [&] {
    return train(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), argv[5]);
  }));
}
