// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints that two ranks wrote with earlier libraries still load. The files are in
// tests/checkpoint/golden_checkpoint and are never written again; write_golden_checkpoint.cc adds
// some for what is new in the format.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/checkpoint/golden_model.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Before manifests had optional fields.
constexpr char kGolden[] = "tests/checkpoint/golden_checkpoint/version-1";
// With the fields "run" and "saved", and the states of included objects.
constexpr char kGoldenStates[] = "tests/checkpoint/golden_checkpoint/version-1-states";
// Two parts of a tensor, along its columns.
constexpr char kGoldenParts[] = "tests/checkpoint/golden_checkpoint/version-2-parts";
// Two parts of a fused tensor, along its columns.
constexpr char kGoldenFused[] = "tests/checkpoint/golden_checkpoint/version-3-fused";
// With averages of the parameters.
constexpr char kGoldenAverage[] = "tests/checkpoint/golden_checkpoint/version-4-average";
// With hashes of blocks.
constexpr char kGoldenBlocks[] = "tests/checkpoint/golden_checkpoint/version-5";
// The runs of kGoldenStates and kGoldenBlocks.
constexpr char kGoldenRun[] = "4d2a109632a1e19a92d39249094d3018";
constexpr char kGoldenRunOfBlocks[] = "84e8be67ab3e43a3dc163fa46b186d8b";

// Plain torch over the whole run, on one rank.
GoldenModel trained(int steps) {
  GoldenModel model(0.5);
  const auto optimizer = golden_adamw(*model);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    model->loss(step).backward();
    optimizer->step();
  }
  return model;
}

void expect_near(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_LE((got - expected).abs().max().item<double>(), 1e-6) << got << expected;
}

// That `optimizer` has loaded the checkpoint, and goes on from there.
void expect_loaded(ZeroOptimizer& optimizer, GoldenModelImpl& model, const LoadReport& report) {
  const GoldenModel saved = trained(kGoldenSteps);
  const GoldenModel later = trained(kGoldenSteps + 4);
  EXPECT_EQ(report.metadata.at("epoch"), "3");
  EXPECT_EQ(report.world_size, 2);
  EXPECT_EQ(optimizer.stats().steps, kGoldenSteps);
  EXPECT_EQ(optimizer.loss_scale(), 1024);
  EXPECT_EQ(model.frozen[1].item<double>(), 0.5);
  EXPECT_EQ(model.counter.item<int64_t>(), 0);
  expect_near(model.weight.detach(), saved->weight.detach());
  expect_near(model.bias.detach(), saved->bias.detach());
  train_golden(optimizer, model, kGoldenSteps, kGoldenSteps + 4);
  expect_near(model.weight.detach(), later->weight.detach());
  expect_near(model.bias.detach(), later->bias.detach());
}

TEST(GoldenTest, VersionOneLoadsOnAnyNumberOfRanksAndGoesOn) {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      GoldenModel model(7);
      ZeroOptimizer optimizer(*model, golden_adamw(*model), group,
                              ZeroOptions().loss_scaler(LossScalerOptions()));
      const LoadReport report = optimizer.load_checkpoint(kGolden);
      EXPECT_EQ(report.run, "");
      expect_loaded(optimizer, *model, report);
    });
  }
}

// With a run and the states of included objects.
void expect_states_load(const std::string& folder, const std::string& run) {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      GoldenModel model(7);
      ZeroOptimizer optimizer(*model, golden_adamw(*model), group,
                              ZeroOptions().loss_scaler(LossScalerOptions()));
      Note shared("as before"), own("as before");
      const LoadReport report = optimizer.load_checkpoint(
          folder, LoadOptions().include("shared", shared).include_per_rank("own", own));
      EXPECT_EQ(report.run, run);
      EXPECT_EQ(shared.text, "of all ranks");
      EXPECT_EQ(own.text, group.rank() < 2 ? "of rank " + std::to_string(group.rank())
                                           : std::string("as before"));
      expect_loaded(optimizer, *model, report);
    });
  }
}

TEST(GoldenTest, VersionOneWithARunAndStatesLoadsOnAnyNumberOfRanksAndGoesOn) {
  expect_states_load(kGoldenStates, kGoldenRun);
}

TEST(GoldenTest, VersionFiveLoadsOnAnyNumberOfRanksAndGoesOn) {
  expect_states_load(kGoldenBlocks, kGoldenRunOfBlocks);
  EXPECT_EQ(describe_checkpoint(kGoldenBlocks).version, 5);
}

// As on a new machine with a disk of its own: another rank sends it what it needs.
TEST(GoldenTest, ARankThatSeesNothingOfAnyVersionLoadsItToo) {
  for (const std::string folder : {kGolden, kGoldenStates, kGoldenAverage, kGoldenBlocks}) {
    for (const int world_size : {2, 3}) {
      run_ranks(world_size, [&](const Group& group) {
        GoldenModel model(7);
        ZeroOptimizer optimizer(*model, golden_adamw(*model), group,
                                ZeroOptions().loss_scaler(LossScalerOptions()));
        const LoadReport report =
            optimizer.load_checkpoint(group.rank() == 1 ? "tests/nothing" : folder);
        if (folder != kGoldenAverage) return expect_loaded(optimizer, *model, report);
        // Without a scale and metadata.
        train_golden(optimizer, *model, kGoldenSteps, kGoldenSteps + 4);
        expect_near(model->weight.detach(), trained(kGoldenSteps + 4)->weight.detach());
        EXPECT_EQ(model->frozen[1].item<double>(), 0.5);
      });
    }
  }
}

TEST(GoldenTest, VersionTwoLoadsWithAnyNumberOfPartsAndGoesOn) {
  const auto whole = [](int steps) {
    GoldenPart model(0.5, 0, 3);
    run_ranks(1, [&](const Group& group) {
      const auto optimizer = golden_parts(*model, group);
      train_golden_parts(*optimizer, *model, 0, steps);
    });
    return model;
  };
  const GoldenPart saved = whole(kGoldenSteps), later = whole(kGoldenSteps + 2);
  // By rank: the first column that it holds, and of the last one the end.
  for (const std::vector<int64_t>& columns :
       {std::vector<int64_t>{0, 3}, std::vector<int64_t>{0, 2, 3}, std::vector<int64_t>{0, 1, 3},
        std::vector<int64_t>{0, 1, 2, 3}}) {
    run_ranks(static_cast<int>(columns.size()) - 1, [&](const Group& group) {
      const int64_t from = columns[group.rank()], to = columns[group.rank() + 1];
      GoldenPart model(7, from, to);
      const auto optimizer = golden_parts(*model, group);
      // Two and one column, as they were saved: rank 1 sees nothing.
      const bool sees = columns[1] != 2 || group.rank() == 0;
      optimizer->load_checkpoint(sees ? kGoldenParts : "tests/nothing");
      EXPECT_EQ(model->frozen.sum().item<double>(), 0.5 * static_cast<double>(to - from));
      const auto expect = [&](const GoldenPart& other) {
        expect_near(model->weight.detach(), other->weight.detach().slice(1, from, to));
        expect_near(model->bias.detach(), other->bias.detach());
      };
      expect(saved);
      train_golden_parts(*optimizer, *model, kGoldenSteps, kGoldenSteps + 2);
      expect(later);
    });
  }
  EXPECT_EQ(describe_checkpoint(kGoldenParts).version, 2);
  verify_checkpoint(kGoldenParts);
}

TEST(GoldenTest, VersionThreeLoadsInOnePartAndInTwoAndGoesOn) {
  // One rank that trains from the start.
  const auto whole = [](int steps) {
    GoldenFused model(0.5, 0, 1);
    run_ranks(1, [&](const Group& group) {
      train_golden_fused(*golden_fused(*model, group), *model, 0, steps);
    });
    return model;
  };
  const GoldenFused saved = whole(kGoldenSteps), later = whole(kGoldenSteps + 2);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](const Group& group) {
      GoldenFused model(7, group.rank(), ranks);
      const auto optimizer = golden_fused(*model, group);
      optimizer->load_checkpoint(group.rank() == 1 ? "tests/nothing" : kGoldenFused);
      const auto expect = [&](const GoldenFused& other) {
        expect_near(model->weight.detach(), other->weight.detach().index_select(1, model->columns));
      };
      expect(saved);
      train_golden_fused(*optimizer, *model, kGoldenSteps, kGoldenSteps + 2);
      expect(later);
    });
  }
  EXPECT_EQ(describe_checkpoint(kGoldenFused).version, 3);
  verify_checkpoint(kGoldenFused);
}

TEST(GoldenTest, VersionFourLoadsWithItsAverageAndGoesOn) {
  // Of the weight, after so many steps.
  const auto average = [](int steps) {
    at::Tensor result = at::full({2, 3}, 0.5);
    for (int n = 1; n <= steps; ++n) {
      const double decay = std::min(0.75, (1.0 + n) / (10.0 + n));
      result = result * decay + trained(n)->weight.detach() * (1 - decay);
    }
    return result;
  };
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](const Group& group) {
      GoldenModel model(7);
      ZeroOptimizer optimizer(*model, golden_adamw(*model), group, golden_average());
      EXPECT_TRUE(optimizer.load_checkpoint(kGoldenAverage).differences.empty());
      for (const int steps : {kGoldenSteps, kGoldenSteps + 4}) {
        {
          const auto guard = optimizer.use_ema();
          expect_near(model->weight.detach(), average(steps));
        }
        expect_near(model->weight.detach(), trained(steps)->weight.detach());
        if (steps == kGoldenSteps) train_golden(optimizer, *model, steps, steps + 4);
      }
    });
  }
  EXPECT_EQ(describe_checkpoint(kGoldenAverage).version, 4);
  EXPECT_TRUE(describe_checkpoint(kGoldenAverage).ema);
  verify_checkpoint(kGoldenAverage);
}

TEST(GoldenTest, VersionsOneAndFiveAreVerifiedFoundDescribedAndExported) {
  EXPECT_EQ(latest("tests/checkpoint/golden_checkpoint"), kGoldenBlocks);
  for (const std::string folder : {kGolden, kGoldenStates, kGoldenBlocks}) {
    verify_checkpoint(folder);
    EXPECT_EQ(describe_checkpoint(folder).states.size(), folder == kGolden ? 0u : 2u);
    const std::string model = ::testing::TempDir() + "/golden.safetensors";
    std::filesystem::remove(model);
    export_model(folder, model);
    GoldenModel filled(7);
    load_weights(*filled, model);
    expect_near(filled->weight.detach(), trained(kGoldenSteps)->weight.detach());
  }
}

void flip(const std::filesystem::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 4));
}

// The last version whose files have one hash, and one of each tensor.
TEST(GoldenTest, NoFlippedByteOfVersionFourIsAccepted) {
  namespace fs = std::filesystem;
  const std::string folder = ::testing::TempDir() + "/flipped";
  fs::copy(kGoldenAverage, folder);
  const auto masters = [&] {
    CheckpointReader reader(folder);
    const ManifestParameter& weight = reader.manifest().parameters[0];
    return reader.read_all("master", {{stored_name(weight), 0, numel(weight)}});
  };
  const at::Tensor expected = masters();
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() == kManifestName) continue;
    fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    const auto size = static_cast<std::streamoff>(entry.file_size());
    for (std::streamoff at = 0; at < size; at += 3) {
      flip(entry.path(), at);
      EXPECT_NE(error_of([&] { verify_checkpoint(folder); }), "") << entry.path() << " " << at;
      at::Tensor read = expected;  // unless it throws
      error_of([&] { read = masters(); });
      EXPECT_TRUE(read.equal(expected)) << entry.path() << " " << at;
      flip(entry.path(), at);
    }
  }
}

}  // namespace
}  // namespace zero
