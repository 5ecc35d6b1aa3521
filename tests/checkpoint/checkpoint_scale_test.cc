// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a checkpoint costs with many ranks and many parameters, in bytes: its manifest, and what
// ranks read that load it on another number of them.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/plan.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/peak_memory.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/match/part_reader.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr int64_t kParameters = 10'000;
constexpr int64_t kRanks = 1024;

// What each rank of a large job says of its file: 7 G parameters in the buckets of GPUs.
std::vector<FileContent> files_of_a_large_job(Manifest& m) {
  std::vector<ParameterInfo> parameters;
  for (int64_t p = 0; p < kParameters; ++p) {
    ParameterInfo& info = parameters.emplace_back();
    info.numel = p % 8 < 5 ? 1'150'000 : 4096;
    info.dtype = at::kBFloat16;
    const std::string layer = "model.layers." + std::to_string(p / 8);
    m.parameters.push_back(
        {layer + ".weight_" + std::to_string(p % 8), {info.numel}, {1}, info.dtype, 0});
  }
  PlanOptions options;
  options.on_gpu = true;
  const Plan plan = make_plan(parameters, {kRanks}, options);
  std::vector<FileContent> files;
  for (int64_t r = 0; r < kRanks; ++r) {
    std::vector<ManifestTensor> tensors;
    FileContent& file = files.emplace_back();
    file.about = {"rank-" + std::to_string(r) + ".safetensors", 1 << 20, ~uint64_t{0}, 1000};
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      for (const Segment& s : plan.segments(static_cast<int64_t>(b), r)) {
        const std::string& name = m.parameters[s.parameter].name;
        for (const char* kind : {"master", "exp_avg", "exp_avg_sq", "step"}) {
          tensors.push_back({name, kind, s.begin, s.numel});
        }
        file.values.push_back({name, "step", 17});
      }
    }
    file.tensors = tensors_by_name(tensors);
  }
  return files;
}

TEST(CheckpointScaleTest, TheManifestOfManyRanksIsSmallAndSoIsTheMemoryThatReadsIt) {
  Manifest m;
  m.id = "1";
  add_files(files_of_a_large_job(m), m);
  int64_t pieces = 0;
  for (const ManifestTensors& entry : m.tensors) {
    pieces += static_cast<int64_t>(entry.pieces.size());
  }
  const std::string text = manifest_text(m);
  m = {};
  const double growth = peak_growth(
      [&] { EXPECT_EQ(parse_manifest(text, "m").parameters.size(), size_t{kParameters}); });
  std::printf("%lld pieces of 4 tensors: a manifest of %.1f MB, %.0f MiB to read it\n",
              static_cast<long long>(pieces), static_cast<double>(text.size()) / 1e6, growth);
  EXPECT_GT(pieces, 50'000);
  EXPECT_LE(text.size(), size_t{10'000'000});
  EXPECT_LE(growth, 50);
}

// Of three million parameters, which are cut anywhere.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(double value) {
    for (const int64_t numel : {1'000'003, 70'001, 1'200'000, 5, 800'000}) {
      register_parameter("p" + std::to_string(numel), at::full({numel}, value, at::kFloat));
    }
  }
};

TEST(CheckpointScaleTest, RanksReadTheirShareWhoeverSaved) {
  const std::string parent = fresh_folder("shares");
  const auto optimizer_of = [](NetImpl& model, const Group& group) {
    return std::make_unique<ZeroOptimizer>(
        model, std::make_unique<torch::optim::AdamW>(model.parameters(), 1e-3), group);
  };
  for (const auto& [saved, loaded] :
       std::vector<std::pair<int, int>>{{1, 4}, {4, 1}, {4, 4}, {2, 3}, {4, 8}}) {
    const std::string folder = parent + "/" + std::to_string(saved) + "-" + std::to_string(loaded);
    run_ranks(saved, [&](const Group& group) {
      NetImpl model(0.5);
      const auto optimizer = optimizer_of(model, group);
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& p : model.parameters()) loss = loss + p.sum();
      optimizer->backward(loss);
      optimizer->step();
      optimizer->save_checkpoint(folder);
    });
    double bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      if (file.path().filename() != kManifestName) bytes += static_cast<double>(file.file_size());
    }
    std::vector<double> read(loaded);
    run_ranks(loaded, [&](const Group& group) {
      NetImpl model(7);
      const auto optimizer = optimizer_of(model, group);
      read[group.rank()] = static_cast<double>(optimizer->load_checkpoint(folder).bytes_read);
    });
    const double share = *std::max_element(read.begin(), read.end()) * loaded / bytes;
    const double all = std::accumulate(read.begin(), read.end(), 0.0) / bytes;
    std::printf("%d ranks to %d: at most %.3f of a share each, %.3f of the checkpoint\n", saved,
                loaded, share, all);
    EXPECT_LE(share, 1.15);
    EXPECT_LE(all, 1.2);
    EXPECT_GE(all, 1.0) << "every byte is verified";
  }
}

// Each row is a run of each part, and a run takes some 450 bytes.
TEST(CheckpointScaleTest, PartsOfManyRowsAreReadInBoundedMemory) {
  const std::string folder = ::testing::TempDir() + "/many_rows";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  constexpr int64_t kRows = int64_t{1} << 19;
  Manifest m;
  m.id = "1";
  for (const int64_t from : {0, 1}) {
    m.frozen.push_back({"w", {kRows, 1}, {}, at::kFloat, 0, {kRows, 2}, 1, from});
  }
  const at::Tensor whole = at::arange(2.0f * kRows).view({kRows, 2});
  const auto column = [&](int64_t c) { return whole.select(1, c).contiguous(); };
  const FileToSave file{"f",
                        {{{"w{1:0:1}", "frozen", 0, kRows}, column(0)},
                         {{"w{1:1:2}", "frozen", 0, kRows}, column(1)}}};
  add_files({write_file(file, folder + "/f", m.id)}, m);
  std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
  CheckpointReader reader(folder);
  PartReader parts(reader);
  at::Tensor read;
  const double grown = peak_growth([&] {
    read = parts.read_all({"w", {kRows, 2}, {}, at::kFloat, 0}, "frozen");
  });
  EXPECT_TRUE(read.equal(whole.view({-1})));
  EXPECT_LT(grown, 100);
}

}  // namespace
}  // namespace zero
