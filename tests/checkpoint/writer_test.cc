// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One save by all ranks without an optimizer: all of it appears, or none of it and an error on
// every rank.
#include "zero/checkpoint/writer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/checkpoint/shard_copies.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

using Body = std::function<void(Communicator& control, CheckpointWriter& writer)>;

// Calls `body` on each rank with a writer of its own.
void on_ranks(int world_size, const std::string& folder, const Body& body) {
  run_ranks(world_size, [&](const Group& group) {
    const auto control = group.make_communicator("control", Purpose::kControl);
    CheckpointWriter writer(*control, folder, /*overwrite=*/false);
    body(*control, writer);
  });
}

std::string empty_parent(const std::string& name) {
  const std::string parent = ::testing::TempDir() + "/" + name;
  fs::remove_all(parent);
  return parent;
}

// Two elements of the parameter "p" of each rank, and a step.
FileToSave file_of(int rank) {
  return {rank_file_name(rank),
          {{{"p", "master", 2 * rank, 2}, at::arange(2.0f) + 2.0f * rank},
           {{"p", "step", 2 * rank, 2}, at::full({1}, 3, at::kLong)}}};
}

Manifest manifest_for(int world_size) {
  Manifest m;
  m.world_size = world_size;
  m.steps = 3;
  m.parameters = {{"p", {2 * world_size}, {1}, at::kFloat, 0}};
  return m;
}

void save(int world_size, const std::string& folder) {
  on_ranks(world_size, folder, [&](Communicator& control, CheckpointWriter& writer) {
    writer.begin();
    writer.write_files({file_of(control.rank())});
    writer.finish(manifest_for(world_size));
  });
}

TEST(CheckpointWriterTest, FilesOfAllRanksAreOneCheckpoint) {
  for (const int world_size : {1, 2, 3, 4}) {
    const std::string parent = empty_parent("files");
    save(world_size, parent + "/a");
    verify_checkpoint(parent + "/a");
    CheckpointReader reader(parent + "/a");
    EXPECT_EQ(reader.manifest().id.size(), 32u);
    EXPECT_EQ(reader.manifest().steps, 3);
    ASSERT_EQ(reader.manifest().files.size(), static_cast<size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(reader.manifest().files[rank].name, rank_file_name(rank));
    }
    const ManifestParameter& p = reader.manifest().parameters[0];
    EXPECT_TRUE(
        reader.read_all("master", {{p.name, 0, numel(p)}}).equal(at::arange(2.0f * world_size)));
    int entries = 0;
    for (const auto& entry : fs::directory_iterator(parent)) entries += entry.exists() ? 1 : 0;
    EXPECT_EQ(entries, 1) << "nothing beside the checkpoint";
    entries = 0;
    for (const auto& entry : fs::directory_iterator(parent + "/a"))
      entries += entry.exists() ? 1 : 0;
    EXPECT_EQ(entries, world_size + 1) << "nothing but files and manifest";
  }
}

// Another thread asks for a pause again and again.
TEST(CheckpointWriterTest, APausedWriteGoesOnWhereItStopped) {
  const std::string folder = empty_parent("pause") + "/a";
  const at::Tensor value = at::arange(16 * 1000 * 1000, at::kFloat);
  on_ranks(1, folder, [&](Communicator&, CheckpointWriter& writer) {
    writer.begin();
    std::deque<std::shared_ptr<MemoryFileWriter>> files;
    for (const FileToSave& file :
         {FileToSave{"f", {{{"b", "buffer", 0, value.numel()}, value}}},
          FileToSave{"g", {{{"c", "buffer", 0, 2}, value.narrow(0, 0, 2)}}}}) {
      files.push_back(std::make_shared<MemoryFileWriter>(file, writer.id(), fresh_memory));
      files.back()->copy()->copy_all();
    }
    std::atomic<bool> pause = true, done = false;
    EXPECT_FALSE(writer.write_files(files, pause));
    std::thread asking([&] {
      while (!done) pause = true;
    });
    do {
      pause = false;
    } while (!writer.write_files(files, pause));
    done = true;
    asking.join();
    pause = false;
    EXPECT_TRUE(writer.write_files(files, pause)) << "all is written";
    Manifest m;
    m.buffers = {{"b", value.sizes().vec(), {}, at::kFloat, 0}, {"c", {2}, {}, at::kFloat, 0}};
    writer.finish(m);
  });
  verify_checkpoint(folder);
  CheckpointReader reader(folder);
  EXPECT_TRUE(
      reader.read_all("buffer", {{"b", 0, value.numel()}}, value.scalar_type()).equal(value));
}

TEST(CheckpointWriterTest, AnErrorBeforeTheFilesIsThrownByFinishOnAllRanks) {
  const std::string folder = empty_parent("prepare") + "/a";
  on_ranks(2, folder, [&](Communicator& control, CheckpointWriter& writer) {
    writer.begin();
    writer.prepare([&] { TORCH_CHECK(control.rank() != 1, "no copy"); });
    std::deque<std::shared_ptr<MemoryFileWriter>> files = {
        std::make_shared<MemoryFileWriter>(file_of(control.rank()), writer.id(), fresh_memory)};
    files[0]->copy()->copy_all();
    const std::weak_ptr<MemoryFileWriter> memory = files[0];
    EXPECT_TRUE(writer.write_files(files, /*pause=*/false));
    EXPECT_TRUE(memory.expired());
    expect_words(error_of([&] { writer.finish(manifest_for(2)); }), {"no copy"});
  });
  EXPECT_FALSE(fs::exists(folder));
}

// A file that one rank cannot write: its name is taken.
TEST(CheckpointWriterTest, AFileThatCannotBeWrittenIsAnErrorOnAllRanksAndNothingStays) {
  for (const int failing : {0, 1, 2}) {
    const std::string parent = empty_parent("failing");
    on_ranks(3, parent + "/a", [&](Communicator& control, CheckpointWriter& writer) {
      writer.begin();
      const FileToSave file = file_of(control.rank());
      if (control.rank() == failing) {
        writer.write_files({file, file});
      } else {
        writer.write_files({file});
      }
      expect_words(
          error_of([&] { writer.finish(manifest_for(3)); }),
          {rank_file_name(failing), "File exists",
           control.rank() == failing ? "failed" : "because of rank " + std::to_string(failing)});
    });
    EXPECT_TRUE(fs::is_empty(parent)) << failing;
  }
}

TEST(CheckpointWriterTest, WithoutFinishNothingStays) {
  const std::string parent = empty_parent("given-up");
  on_ranks(2, parent + "/a", [&](Communicator& control, CheckpointWriter& writer) {
    writer.begin();
    writer.write_files({file_of(control.rank())});
    control.all_gather_text("", "all have written");
  });
  EXPECT_TRUE(fs::is_empty(parent));
}

}  // namespace
}  // namespace zero
