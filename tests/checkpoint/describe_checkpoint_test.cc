// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// describe_checkpoint() says what was saved. The test uses public headers only.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/note.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/version.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

struct SmallModelImpl : torch::nn::Module {
  SmallModelImpl() {
    weight = register_parameter("weight", at::full({2, 3}, 0.5));
    bias = register_parameter("bias", at::full({5}, 0.5, at::kBFloat16));
    frozen = register_parameter("frozen", at::full({4}, 1, at::kHalf), /*requires_grad=*/false);
    counter = register_buffer("counter", at::full({}, 7, at::kLong));
  }
  at::Tensor weight, bias, frozen, counter;
};
TORCH_MODULE(SmallModel);

// The weight in group 0, the bias in group 1.
std::unique_ptr<torch::optim::AdamW> adamw(SmallModelImpl& model) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{model.weight},
                      std::make_unique<torch::optim::AdamWOptions>(0.25));
  groups.emplace_back(std::vector<at::Tensor>{model.bias},
                      std::make_unique<torch::optim::AdamWOptions>(0.125));
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1.0));
}

// A checkpoint of `world_size` ranks after two steps, with an object of all ranks and one per rank.
std::string saved_by(int world_size) {
  const std::string parent = ::testing::TempDir() + "/described-" + std::to_string(world_size);
  fs::remove_all(parent);
  run_ranks(world_size, [&](const Group& group) {
    SmallModel model;
    ZeroOptimizer optimizer(*model, adamw(*model), group,
                            ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(64)));
    for (int step = 0; step < 2; ++step) {
      optimizer.backward(model->weight.sum() + model->bias.sum());
      optimizer.step();
    }
    const Note note("abc"), own("rank " + std::to_string(group.rank()));
    optimizer.save_checkpoint(parent + "/a", SaveOptions()
                                                 .metadata({{"epoch", "3"}})
                                                 .include("note", note)
                                                 .include_per_rank("own", own));
  });
  return parent + "/a";
}

void expect_tensor(const CheckpointTensor& got, const std::string& name,
                   const std::vector<int64_t>& shape, c10::ScalarType dtype, int64_t group) {
  EXPECT_EQ(got.name, name);
  EXPECT_EQ(got.shape, shape);
  EXPECT_EQ(got.dtype, dtype);
  EXPECT_EQ(got.group, group);
}

double option(const CheckpointDescription& d, size_t group, const std::string& name) {
  for (const auto& [key, value] : d.groups.at(group)) {
    if (key == name) return value;
  }
  return -1;
}

TEST(DescribeCheckpointTest, SaysHowItWasSaved) {
  for (const int world_size : {1, 2, 3, 4}) {
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
    const std::string folder = saved_by(world_size);
    const CheckpointDescription d = describe_checkpoint(folder);
    EXPECT_EQ(d.version, 5);
    EXPECT_EQ(d.library_version, ZERO_VERSION_TEXT);
    EXPECT_FALSE(d.torch_version.empty());
    EXPECT_EQ(d.id.size(), 32u);
    EXPECT_EQ(d.run.size(), 32u);
    EXPECT_GE(d.saved, now);
    EXPECT_EQ(d.metadata, (std::map<std::string, std::string>{{"epoch", "3"}}));
    EXPECT_EQ(d.world_size, world_size);
    EXPECT_EQ(d.stage, 2);
    EXPECT_EQ(d.layout, "contiguous");
    EXPECT_GT(d.bucket_bytes, 0);
    EXPECT_EQ(d.steps, 2);
    EXPECT_EQ(d.skipped_steps, 0);
    EXPECT_EQ(d.loss_scale, 64);
    EXPECT_TRUE(d.dynamic_loss_scale);
  }
}

TEST(DescribeCheckpointTest, SaysWhatOfTheModelAndTheOptimizerItHolds) {
  const CheckpointDescription d = describe_checkpoint(saved_by(3));
  ASSERT_EQ(d.parameters.size(), 2u);
  expect_tensor(d.parameters[0], "weight", {2, 3}, at::kFloat, 0);
  expect_tensor(d.parameters[1], "bias", {5}, at::kBFloat16, 1);
  ASSERT_EQ(d.frozen.size(), 1u);
  expect_tensor(d.frozen[0], "frozen", {4}, at::kHalf, 0);
  ASSERT_EQ(d.buffers.size(), 1u);
  expect_tensor(d.buffers[0], "counter", {}, at::kLong, 0);
  EXPECT_EQ(d.optimizer, "AdamW");
  ASSERT_EQ(d.groups.size(), 2u);
  EXPECT_EQ(option(d, 0, "lr"), 0.25);
  EXPECT_EQ(option(d, 1, "lr"), 0.125);
}

TEST(DescribeCheckpointTest, SaysHowMomentsAndMastersWereKept) {
  const std::string folder = ::testing::TempDir() + "/described-formats";
  fs::remove_all(folder);
  run_ranks(1, [&](const Group& group) {
    struct Model : torch::nn::Module {
      at::Tensor small = register_parameter("small", at::full({5}, 0.5, at::kBFloat16));
      at::Tensor large = register_parameter("large", at::full({64, 64}, 0.5, at::kBFloat16));
    } model;
    ZeroOptimizer(model, std::make_unique<torch::optim::AdamW>(model.parameters()), group,
                  ZeroOptions().moments(Moments::kInt8).split_masters(true))
        .save_checkpoint(folder);
  });
  const CheckpointDescription d = describe_checkpoint(folder);
  ASSERT_EQ(d.parameters.size(), 2u);
  EXPECT_EQ(d.parameters[0].moments, "");
  EXPECT_EQ(d.parameters[0].master, "split");
  EXPECT_EQ(d.parameters[1].moments, "int8");
  EXPECT_EQ(d.parameters[1].master, "split");
}

TEST(DescribeCheckpointTest, SaysWhatObjectsTheSaveIncluded) {
  for (const int world_size : {1, 2, 3}) {
    const CheckpointDescription d = describe_checkpoint(saved_by(world_size));
    ASSERT_EQ(d.states.size(), 2u);
    EXPECT_EQ(d.states[0].name, "note");
    EXPECT_EQ(d.states[0].bytes, 3);
    EXPECT_EQ(d.states[0].ranks, 0);
    EXPECT_EQ(d.states[1].name, "own");
    EXPECT_EQ(d.states[1].bytes, 6 * world_size);
    EXPECT_EQ(d.states[1].ranks, world_size);
  }
}

TEST(DescribeCheckpointTest, NamesEveryFileWithItsSize) {
  const std::string folder = saved_by(2);
  const CheckpointDescription d = describe_checkpoint(folder);
  std::vector<std::string> names;
  for (const CheckpointFile& file : d.files) {
    names.push_back(file.name);
    EXPECT_EQ(file.bytes, fs::file_size(folder + "/" + file.name)) << file.name;
    EXPECT_NE(file.xxh3, 0u);
    EXPECT_GT(file.tensors, 0);
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"buffers.safetensors", "frozen.safetensors",
                                             "rank-00000.safetensors", "rank-00001.safetensors"}));
}

TEST(DescribeCheckpointTest, ReadsACheckpointOfAnEarlierLibrary) {
  const CheckpointDescription d =
      describe_checkpoint("tests/checkpoint/golden_checkpoint/version-1");
  EXPECT_EQ(d.version, 1);
  EXPECT_EQ(d.id, "68777b4acccbf6adc063389ac1e48096");
  EXPECT_EQ(d.run, "");
  EXPECT_EQ(d.saved, 0);
  ASSERT_EQ(d.files.size(), 3u);
  EXPECT_EQ(d.files[0].name, "rank-00000.safetensors");
  EXPECT_EQ(d.files[0].bytes, 392u);
  EXPECT_EQ(d.files[0].xxh3, 0xa6c79b518a2a3c30u);
  EXPECT_EQ(d.files[0].tensors, 4);
}

TEST(DescribeCheckpointTest, NeedsTheManifestAlone) {
  const std::string folder = saved_by(2);
  fs::remove(folder + "/rank-00001.safetensors");
  EXPECT_EQ(describe_checkpoint(folder).world_size, 2);
  EXPECT_NE(error_of([&] { verify_checkpoint(folder); }), "");
  std::ofstream(folder + "/manifest.json", std::ios::app) << "x";
  expect_words(error_of([&] { describe_checkpoint(folder); }), {folder, "checksum"});
  fs::remove(folder + "/manifest.json");
  expect_words(error_of([&] { describe_checkpoint(folder); }), {folder, "cannot open"});
}

}  // namespace
}  // namespace zero
