// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of meshes whose ranks hold different parameters: every mesh of a table saves, and
// every other one loads and trains on, with the same bits.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/mesh_run.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint/manifest.h"
#include "zero/pending_checkpoint.h"

namespace zero {
namespace {

const RunOptions kMemory{Transport::kMemory};

MeshShape shape(int stages, int copies, int data, int experts, Layout layout = Layout::kContiguous,
                std::vector<int> cuts = {}) {
  MeshShape s;
  s.stages = stages;
  s.copies = copies;
  s.data = data;
  s.experts = experts;
  s.layout = layout;
  s.cuts = std::move(cuts);
  return s;
}

std::vector<MeshShape> shapes() {
  return {
      shape(1, 1, 1, 1),
      shape(1, 1, 2, 1, Layout::kPerParameter),
      shape(1, 1, 3, 1),
      shape(1, 1, 5, 1, Layout::kWholeParameters),
      shape(1, 2, 2, 1),
      shape(1, 1, 1, 2),
      shape(1, 1, 2, 2, Layout::kPerParameter),
      shape(1, 1, 1, 4),
      shape(1, 2, 1, 2),
      shape(2, 1, 1, 1),
      shape(2, 1, 1, 1, Layout::kPerParameter, {1}),
      shape(2, 1, 2, 1),
      shape(3, 1, 1, 1, Layout::kContiguous, {1, 3}),
      shape(4, 1, 1, 1),
      shape(2, 1, 1, 2),
      shape(2, 2, 1, 2, Layout::kContiguous, {3}),
  };
}

struct Saved {
  WholeState before, after;  // at the save, and one step later
};

void save(const MeshShape& shape, const std::string& folder, bool async, Saved& saved) {
  run_ranks(
      shape.ranks(),
      [&](const Group& world) {
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
      },
      kMemory);
  EXPECT_EQ(saved.before.conflicts(), 0) << shape.text();
  EXPECT_EQ(saved.after.conflicts(), 0) << shape.text();
  EXPECT_GT(WholeState::differing(saved.before, saved.after), 300) << shape.text();
}

void expect_loads(const MeshShape& shape, const std::string& folder, const Saved& saved,
                  const std::string& pair) {
  WholeState before, after;
  run_ranks(
      shape.ranks(),
      [&](const Group& world) {
        MeshRun run(shape, world, 3.0);
        run.optimizer->load_checkpoint(folder);
        run.add_to(before);
        run.train(3, 4);
        run.add_to(after);
        run.optimizer->check_replicas();
      },
      kMemory);
  EXPECT_EQ(WholeState::differing(saved.before, before), 0) << pair;
  EXPECT_EQ(WholeState::differing(saved.after, after), 0) << pair << ", one step later";
}

// Each tensor once, and together the elements of the whole model.
void expect_stored_once(const std::string& folder, const WholeState& state) {
  const Manifest manifest = read_manifest(folder);
  std::map<std::string, int64_t> stored;
  for (const ManifestFile& file : manifest.files) {
    for (const ManifestTensor& t : file.tensors) {
      if (t.kind == "master" || t.kind == "frozen" || t.kind == "buffer") {
        stored[t.owner] += t.numel;
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
      const std::string folder = parent + "/" + std::to_string(from) + (adam ? "a" : "s");
      Saved saved;
      save(all[from], folder, /*async=*/from % 2 == 1, saved);
      expect_stored_once(folder, saved.before);
      for (size_t to = 0; to < all.size(); ++to) {
        if (from == to || (from + to) % 4 != (adam ? 0 : 2)) continue;
        expect_loads(all[to], folder, saved, all[from].text() + " -> " + all[to].text());
        ++pairs;
      }
    }
  }
  std::printf("%d pairs of meshes\n", pairs);
  EXPECT_GE(pairs, 30);
}

// A rank reads what it holds, and its part of all files to verify them.
TEST(MeshCheckpointTest, AStageReadsItsOwnParameters) {
  const std::string folder = fresh_folder("reads") + "/a";
  const MeshShape stages = shape(4, 1, 1, 1);
  Saved saved;
  save(stages, folder, /*async=*/false, saved);
  const Manifest manifest = read_manifest(folder);
  std::vector<uint64_t> read(4);
  run_ranks(
      4,
      [&](const Group& world) {
        MeshRun run(stages, world, 3.0);
        read[world.rank()] = run.optimizer->load_checkpoint(folder).bytes_read;
      },
      kMemory);
  // Stages 1 and 2 hold nothing that other ranks store but the "common" tensors of rank 0, of 12
  // bytes each. Headers are read once by each rank that opens the file.
  for (const int rank : {1, 2}) {
    uint64_t most = 0;
    uint64_t headers = 0;
    for (size_t f = 0; f < manifest.files.size(); ++f) {
      const ManifestFile& file = manifest.files[f];
      uint64_t data = 0;
      for (const ManifestTensor& t : file.tensors) data += t.kind == "step" ? 8 : 4 * t.numel;
      headers += file.bytes - data;
      const bool own = file.name.find("0000" + std::to_string(rank)) != std::string::npos;
      const bool verifies = f % 4 == static_cast<size_t>(rank);
      most += (own ? data : 0) + (verifies ? file.bytes : 0);
    }
    EXPECT_LE(read[rank], most + headers + 24) << rank;
    EXPECT_GT(read[rank], most / 2) << rank;
  }
}

}  // namespace
}  // namespace zero
