// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Writes a checkpoint for tests/checkpoint/golden_checkpoint: write_golden_checkpoint <folder>
// [parts|fused|average]
//
// To be run once for each version of the format, and once where a version gets new optional fields,
// from the library that first writes them; `version-1-states`, `version-5` and, with `parts`,
// `fused` and `average`, `version-2-parts`, `version-3-fused` and `version-4-average` are from this
// program. No test runs it, and a folder that is there is never written again: it stands for what
// users have.
#include <cstdio>
#include <string>

#include "tests/checkpoint/golden_model.h"
#include "zero/launch.h"

namespace {

int save(const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  zero::GoldenModel model(0.5);
  zero::ZeroOptimizer optimizer(
      *model, zero::golden_adamw(*model), group,
      zero::ZeroOptions().loss_scaler(zero::LossScalerOptions().initial_scale(1024)));
  zero::train_golden(optimizer, *model, 0, zero::kGoldenSteps);
  const zero::Note shared("of all ranks");
  const zero::Note own("of rank " + std::to_string(group.rank()));
  optimizer.save_checkpoint(folder, zero::SaveOptions()
                                        .metadata({{"epoch", "3"}})
                                        .include("shared", shared)
                                        .include_per_rank("own", own));
  return 0;
}

int save_parts(const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  const int64_t rank = group.rank();
  zero::GoldenPart model(0.5, 2 * rank, 2 + rank);
  const auto optimizer = zero::golden_parts(*model, group);
  zero::train_golden_parts(*optimizer, *model, 0, zero::kGoldenSteps);
  optimizer->save_checkpoint(folder);
  return 0;
}

int save_fused(const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  zero::GoldenFused model(0.5, group.rank(), group.world_size());
  const auto optimizer = zero::golden_fused(*model, group);
  zero::train_golden_fused(*optimizer, *model, 0, zero::kGoldenSteps);
  optimizer->save_checkpoint(folder);
  return 0;
}

int save_average(const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  zero::GoldenModel model(0.5);
  zero::ZeroOptimizer optimizer(*model, zero::golden_adamw(*model), group, zero::golden_average());
  zero::train_golden(optimizer, *model, 0, zero::kGoldenSteps);
  optimizer.save_checkpoint(folder);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc == 3 ? argv[2] : "";
  const bool known = kind == "parts" || kind == "fused" || kind == "average";
  if (argc < 2 || argc > 3 || (argc == 3 && !known)) {
    std::fprintf(stderr, "usage: write_golden_checkpoint <folder> [parts|fused|average]\n");
    return 2;
  }
  if (kind == "average") return zero::launch_local(2, [&] { return save_average(argv[1]); });
  if (kind == "fused") return zero::launch_local(2, [&] { return save_fused(argv[1]); });
  if (kind == "parts") return zero::launch_local(2, [&] { return save_parts(argv[1]); });
  return zero::launch_local(2, [&] { return save(argv[1]); });
}
