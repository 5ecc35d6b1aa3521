// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of meshes whose ranks hold different parameters: every mesh of a table saves, and
// every other one loads and trains on, with the same bits.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/mesh_run.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

std::vector<MeshShape> shapes() {
  const Layout per = Layout::kPerParameter, whole = Layout::kWholeParameters;
  return {
      {},
      {.parts = 2},
      {.parts = 4},
      {.parts = 3, .layout = per},
      {.data = 2, .layout = per},
      {.data = 3},
      {.data = 5, .layout = whole},
      {.copies = 2, .data = 2},
      {.experts = 2},
      {.data = 2, .experts = 2, .layout = per},
      {.experts = 4},
      {.copies = 2, .experts = 2},
      {.stages = 2},
      {.stages = 2, .cuts = {1}, .layout = per},
      {.stages = 2, .data = 2},
      {.stages = 3, .cuts = {1, 3}},
      {.stages = 4},
      {.stages = 2, .experts = 2},
      {.stages = 2, .copies = 2, .experts = 2, .cuts = {3}},
      {.data = 2, .parts = 2},
      {.experts = 2, .parts = 2, .layout = whole},
      {.stages = 2, .parts = 2, .bucket_bytes = 4000},
      {.stages = 2, .copies = 2, .parts = 2, .layout = per},
  };
}

// Every pair is for the long test.
bool all_pairs() { return std::getenv("ZERO_MESH_PAIRS") != nullptr; }

// All pairs that only change the degree of tensor parallelism; else each mesh saves for one other.
bool is_tested(const std::vector<MeshShape>& all, size_t from, size_t to) {
  const bool tensor_only = all[from].ranks() == all[from].parts && all[to].ranks() == all[to].parts;
  return from != to && (all_pairs() || tensor_only || to == (from + 7) % all.size());
}

struct Saved {
  WholeState before, after;  // at the save, and one step later
};

void save(const MeshShape& shape, const std::string& folder, bool async, Saved& saved) {
  run_ranks(shape.ranks(), [&](const Group& world) {
    MeshRun run(shape, world, 1.0);
    run.train(0, 3);
    std::unique_ptr<PendingCheckpoint> pending;
    if (async) {
      pending = run.optimizer->save_checkpoint_async(folder);
    } else {
      run.optimizer->save_checkpoint(folder);
    }
    run.add_to(saved.before);
    run.train(3, 4);
    if (pending) pending->finish();
    run.add_to(saved.after);
  });
  EXPECT_EQ(saved.before.conflicts(), 0) << shape.text();
  EXPECT_EQ(saved.after.conflicts(), 0) << shape.text();
  EXPECT_GT(WholeState::differing(saved.before, saved.after), 300) << shape.text();
}

// `converted`: what the load says of formats.
void expect_loads(const MeshShape& shape, const std::string& folder, const Saved& saved,
                  const std::string& pair, const std::vector<std::string>& converted = {}) {
  WholeState before, after;
  run_ranks(shape.ranks(), [&](const Group& world) {
    MeshRun run(shape, world, 3.0);
    const LoadReport report = run.optimizer->load_checkpoint(folder);
    // Of a stage without the large parameter it says nothing.
    if (!report.conversions.empty() || shape.stages == 1) {
      EXPECT_EQ(report.conversions, converted) << pair;
    }
    run.add_to(before);
    run.train(3, 4);
    run.add_to(after);
    run.optimizer->check_replicas();
  });
  EXPECT_EQ(WholeState::differing(saved.before, before), 0) << pair;
  if (!converted.empty()) return;
  EXPECT_EQ(WholeState::differing(saved.after, after), 0) << pair << ", one step later";
}

// Each tensor once, and together the elements of the whole model.
void expect_stored_once(const std::string& folder, const WholeState& state) {
  const Manifest manifest = read_manifest(folder);
  std::map<std::string, int64_t> stored;
  for (const ManifestTensors& entry : manifest.tensors) {
    for (const std::string& kind : entry.kinds) {
      if (kind != "master" && kind != "frozen" && kind != "buffer") continue;
      for (const ManifestPiece& piece : entry.pieces) {
        stored[entry.owner.substr(0, entry.owner.find('{'))] += piece.numel;
      }
    }
  }
  std::map<std::string, int64_t> expected;
  for (const auto& [key, tensor] : state.tensors()) {
    const size_t slash = key.find('/');
    const std::string kind = key.substr(0, slash);
    if (kind == "master" || kind == "whole") expected[key.substr(slash + 1)] = tensor.numel();
  }
  EXPECT_EQ(stored, expected) << folder;
}

TEST(MeshCheckpointTest, EveryMeshLoadsWhatEveryOtherSavedInEveryBit) {
  const std::string parent = fresh_folder("meshes");
  int pairs = 0;
  for (const bool adam : {false, true}) {
    std::vector<MeshShape> all = shapes();
    for (MeshShape& s : all) s.adam = adam;
    for (size_t from = 0; from < all.size(); ++from) {
      if (adam != (from % 2 == 0) && !all_pairs()) continue;
      const std::string folder = parent + "/" + std::to_string(from) + (adam ? "a" : "s");
      Saved saved;
      save(all[from], folder, /*async=*/from % 4 < 2, saved);
      expect_stored_once(folder, saved.before);
      for (size_t to = 0; to < all.size(); ++to) {
        if (!is_tested(all, from, to)) continue;
        expect_loads(all[to], folder, saved, all[from].text() + " -> " + all[to].text());
        ++pairs;
      }
    }
  }
  std::printf("%d pairs of meshes\n", pairs);
  EXPECT_GE(pairs, 30);
}

// Both formats take turns, and each mesh loads what the one before it saved.
TEST(MeshCheckpointTest, EveryMeshLoadsMomentsInFewerBytesInEveryBit) {
  const std::string parent = fresh_folder("meshes_moments");
  const std::vector<MeshShape> all = {{},
                                      {.parts = 2},
                                      {.data = 3},
                                      {.data = 5, .layout = Layout::kWholeParameters},
                                      {.copies = 2, .data = 2},
                                      {.data = 2, .experts = 2, .layout = Layout::kPerParameter},
                                      {.stages = 2, .data = 2}};
  for (size_t from = 0; from < all.size(); ++from) {
    const bool adam = from % 2 == 0;
    const Moments moments = adam ? Moments::kInt8 : Moments::kBFloat16;
    const auto with = [&](MeshShape shape, Moments own) {
      shape.adam = adam;
      shape.has_large = true;
      shape.bucket_bytes = 4000;
      shape.moments = own;
      return shape;
    };
    const std::string name = adam ? "int8" : "bfloat16";
    const std::string folder = parent + "/" + std::to_string(from);
    Saved saved;
    save(with(all[from], moments), folder, /*async=*/from % 4 < 2, saved);
    const MeshShape& to = all[(from + 1) % all.size()];
    const std::string pair = all[from].text() + " -> " + to.text() + " " + name;
    expect_loads(with(to, moments), folder, saved, pair);
    expect_loads(with(to, Moments::kFloat32), folder, saved, pair + " to fp32",
                 {"moments of 1 parameter: " + name + " in the checkpoint, float32 here"});
  }
}

// Those of an earlier library, or of a program that does not say what is fused.
TEST(MeshCheckpointTest, PartsThatDoNotSayThatTheyAreFusedLoadAsTheyWereSaved) {
  const std::string folder = fresh_folder("unsaid") + "/a";
  const MeshShape silent{.parts = 2, .says_sections = false};
  Saved saved;
  save(silent, folder, /*async=*/false, saved);
  expect_loads(silent, folder, saved, "without sections");
  run_ranks(2, [&](const Group& world) {
    MeshRun run({.parts = 2}, world, 3.0);
    const std::string error = error_of([&] { run.optimizer->load_checkpoint(folder); });
    EXPECT_NE(error.find("layer0_fused: sections [] in the checkpoint, [24, 12, 12] in the model"),
              std::string::npos)
        << error;
  });
}

// Only one of the two is cut through what is fused.
TEST(MeshCheckpointTest, FusedPartsLoadAsPartsAlongTheOtherDimension) {
  const std::string parent = fresh_folder("swapped");
  const MeshShape fused{.parts = 2}, swapped{.parts = 2, .swaps_cuts = true};
  for (const MeshShape& from : {fused, swapped}) {
    const std::string folder = parent + "/" + (from.swaps_cuts ? "swapped" : "fused");
    Saved saved;
    save(from, folder, /*async=*/false, saved);
    expect_loads(from.swaps_cuts ? fused : swapped, folder, saved, folder);
  }
}

TEST(MeshCheckpointTest, AnExportPutsPartsTogether) {
  const std::string parent = fresh_folder("export");
  const MeshShape parts{.parts = 3};
  Saved saved;
  save(parts, parent + "/a", /*async=*/false, saved);
  export_model(parent + "/a", parent + "/master.safetensors");
  export_model(parent + "/a", parent + "/average.safetensors", ExportOptions().ema(true));
  const auto expect_file = [&](const std::string& of_parameters) {
    run_ranks(1, [&](const Group& world) {
      MeshRun run({}, world, 3.0);
      load_weights(run.module, parent + "/" + of_parameters + ".safetensors");
      for (const auto& item : run.module.named_parameters()) {
        const std::string kind = item.value().requires_grad() ? of_parameters + "/" : "whole/";
        EXPECT_TRUE(at::equal(item.value().detach().contiguous().view({-1}).to(at::kDouble),
                              saved.before.tensors().at(kind + item.key())))
            << item.key();
      }
    });
  };
  expect_file("master");
  expect_file("average");
  for (const CheckpointTensor& t : describe_checkpoint(parent + "/a").parameters) {
    const bool weight = t.name.find("weight") != std::string::npos;
    const bool cut = weight || t.name.find("fused") != std::string::npos ||
                     t.name.find("short") != std::string::npos;
    EXPECT_EQ(t.parts, cut ? 3 : 1) << t.name;
    if (weight) {
      EXPECT_EQ(t.shape, (std::vector<int64_t>{8, 12}));
    }
  }
}

// A rank reads what it holds, and the index of each file that it opens.
TEST(MeshCheckpointTest, AStageReadsItsOwnParameters) {
  const std::string folder = fresh_folder("reads") + "/a";
  const MeshShape stages{.stages = 4};
  Saved saved;
  save(stages, folder, /*async=*/false, saved);
  const Manifest manifest = read_manifest(folder);
  std::vector<uint64_t> read(4);
  run_ranks(4, [&](const Group& world) {
    MeshRun run(stages, world, 3.0);
    read[world.rank()] = run.optimizer->load_checkpoint(folder).bytes_read;
  });
  std::vector<uint64_t> data(manifest.files.size());
  for (const ManifestTensors& entry : manifest.tensors) {
    for (const std::string& kind : entry.kinds) {
      for (const ManifestPiece& piece : entry.pieces) {
        data[piece.file] += is_value(kind) ? 8 : 4 * piece.numel;
      }
    }
  }
  // Stages 1 and 2 hold nothing that other ranks store but the "common" tensors of rank 0, of 72
  // bytes each.
  for (const int rank : {1, 2}) {
    uint64_t own = 0;
    uint64_t indices = 0;
    for (size_t f = 0; f < manifest.files.size(); ++f) {
      const ManifestFile& file = manifest.files[f];
      indices += file.bytes - data[f];
      if (file.name.find("0000" + std::to_string(rank)) != std::string::npos) own += data[f];
    }
    EXPECT_LE(read[rank], own + indices + 144) << rank;
    EXPECT_GT(read[rank], own) << rank;
  }
}

}  // namespace
}  // namespace zero
