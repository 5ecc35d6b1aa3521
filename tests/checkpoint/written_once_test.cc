// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// WrittenOnce of zero/checkpoint/writer.h: frozen parameters are written once in a run, and each
// checkpoint has them all the same.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/zero_optimizer.h"

namespace {
int error_of_links = 0;  // of a file system without them
}  // namespace

// In place of the C library's in the whole program.
extern "C" int link(const char* from, const char* to) noexcept {
  if (error_of_links != 0) {
    errno = error_of_links;
    return -1;
  }
  return static_cast<int>(syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace zero {
namespace {

namespace fs = std::filesystem;

struct AdapterImpl : torch::nn::Module {
  explicit AdapterImpl(double value) {
    frozen = register_parameter("frozen", at::full({1000}, value, at::kFloat), false);
    adapter = register_parameter("adapter", at::full({6}, value, at::kFloat));
    other = register_parameter("other", at::full({2}, value, at::kFloat));
    counter = register_buffer("counter", at::full({1}, value, at::kFloat));
  }
  at::Tensor frozen, adapter, other, counter;
};

class AdapterRun {
 public:
  explicit AdapterRun(const Group& group, double value = 0.5)
      : model(value),
        optimizer(model, std::make_unique<torch::optim::SGD>(model.parameters(), 0.1), group) {}

  void step() {
    optimizer.backward((model.adapter * model.frozen.narrow(0, 0, 6)).sum() + model.other.sum());
    optimizer.step();
    const at::NoGradGuard guard;
    model.counter.add_(1);
  }
  void save(const std::string& folder, bool async, const SaveOptions& options = {}) {
    if (async) {
      optimizer.save_checkpoint_async(folder, options)->finish();
    } else {
      optimizer.save_checkpoint(folder, options);
    }
  }

  AdapterImpl model;
  ZeroOptimizer optimizer;
};

std::string frozen_in(const std::string& folder) { return folder + "/frozen.safetensors"; }

ino_t inode(const std::string& folder) {
  struct stat status {};
  EXPECT_EQ(stat(frozen_in(folder).c_str(), &status), 0) << folder;
  return status.st_ino;
}

// That the checkpoint is whole by itself, and has these values.
void expect_loads(const std::string& folder, const Group& group, const AdapterRun& saved) {
  if (group.rank() == 0) {
    EXPECT_EQ(error_of([&] { verify_checkpoint(folder); }), "");
  }
  AdapterRun loaded(group, 7);
  loaded.optimizer.load_checkpoint(folder);
  EXPECT_TRUE(at::equal(loaded.model.frozen, saved.model.frozen)) << folder;
  EXPECT_TRUE(at::equal(loaded.model.adapter, saved.model.adapter)) << folder;
}

// Both ways to save take turns over numbers of ranks, the other way round in every second case.
void on_ranks(
    int turn,
    const std::function<void(const Group&, const std::string& parent, bool async)>& body) {
  for (const int world_size : {1, 2, 3}) {
    const bool async = (world_size + turn) % 2 == 0;
    const std::string parent = fresh_folder("once");
    run_ranks(world_size, [&](const Group& group) { body(group, parent, async); });
  }
}

TEST(WrittenOnceTest, FrozenParametersAreWrittenOnceAndEachCheckpointHasThem) {
  on_ranks(0, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun run(group);
    for (int i = 0; i < 3; ++i) {
      run.step();
      run.save(parent + "/" + std::to_string(i), async);
    }
    EXPECT_EQ(inode(parent + "/0"), inode(parent + "/1"));
    EXPECT_EQ(inode(parent + "/1"), inode(parent + "/2"));
    // The first one may go, whose file it was.
    run.optimizer.latest_checkpoint(parent);  // all ranks have looked
    if (group.rank() == 0) {
      EXPECT_EQ(keep_last(parent, 1).size(), 2u);
    }
    run.optimizer.latest_checkpoint(parent);
    expect_loads(parent + "/2", group, run);
  });
}

TEST(WrittenOnceTest, ARunThatGoesOnFromACheckpointHasItsFile) {
  on_ranks(1, [](const Group& group, const std::string& parent, bool async) {
    {
      AdapterRun run(group);
      run.save(parent + "/0", async);
      run.save(parent + "/1", async);  // the file is of checkpoint 0
    }
    for (int i = 1; i < 3; ++i) {
      AdapterRun run(group, 7);
      run.optimizer.load_checkpoint(parent + "/" + std::to_string(i));
      run.step();
      run.save(parent + "/" + std::to_string(i + 1), async);
      expect_loads(parent + "/" + std::to_string(i + 1), group, run);
    }
    EXPECT_EQ(inode(parent + "/0"), inode(parent + "/3"));
    AdapterRun run(group, 7);
    run.optimizer.load_checkpoint(parent + "/3");
    run.model.frozen.data().narrow(0, 999, 1).fill_(3);
    run.save(parent + "/4", async);
    EXPECT_NE(inode(parent + "/4"), inode(parent + "/3"));
    expect_loads(parent + "/4", group, run);
  });
}

TEST(WrittenOnceTest, TheFileOfALoadedCheckpointIsFoundFromAnotherWorkingFolder) {
  on_ranks(0, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun(group).save(parent + "/0", async);
    AdapterRun run(group, 7);
    const fs::path before = fs::current_path();
    // All ranks have one working folder, as threads of this process.
    const auto change = [&](const fs::path& folder) {
      run.optimizer.latest_checkpoint(parent);
      if (group.rank() == 0) fs::current_path(folder);
      run.optimizer.latest_checkpoint(parent);
    };
    change(parent);
    run.optimizer.load_checkpoint("0");
    change(before);
    run.save(parent + "/1", async);
    EXPECT_EQ(inode(parent + "/0"), inode(parent + "/1"));
  });
}

TEST(WrittenOnceTest, WhatHasChangedIsWritten) {
  on_ranks(1, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun run(group);
    run.step();
    run.save(parent + "/0", async);
    run.model.frozen.data().narrow(0, 999, 1).fill_(3);  // which no version counter shows
    run.save(parent + "/1", async);
    EXPECT_NE(inode(parent + "/0"), inode(parent + "/1"));
    expect_loads(parent + "/1", group, run);
    run.save(parent + "/2", async);
    EXPECT_EQ(inode(parent + "/1"), inode(parent + "/2"));
  });
}

TEST(WrittenOnceTest, WhereTheLastOneCannotBeLinkedItIsWritten) {
  on_ranks(0, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun run(group);
    run.step();
    run.save(parent + "/0", async);
    const ino_t first = inode(parent + "/0");
    run.optimizer.latest_checkpoint(parent);
    if (group.rank() == 0) fs::rename(parent + "/0", parent + "/elsewhere");
    run.save(parent + "/1", async);
    EXPECT_NE(inode(parent + "/1"), first);
    if (group.rank() == 0) {  // of another size
      std::ofstream(frozen_in(parent + "/1"), std::ios::app) << "x";
    }
    run.save(parent + "/2", async);
    EXPECT_NE(inode(parent + "/2"), inode(parent + "/1"));
    run.optimizer.latest_checkpoint(parent);
    if (group.rank() == 0) error_of_links = EPERM;
    run.save(parent + "/3", async);
    if (group.rank() == 0) error_of_links = 0;
    EXPECT_NE(inode(parent + "/3"), inode(parent + "/2"));
    expect_loads(parent + "/3", group, run);
  });
}

// As where a job that was taken for dead goes on: its file has the same size.
TEST(WrittenOnceTest, AFileThatAnotherSaveHasPutThereIsNotLinked) {
  on_ranks(1, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun run(group), other(group);
    run.step();
    run.save(parent + "/a", async);
    other.step();
    other.save(parent + "/a", async, SaveOptions().overwrite(true));
    const ino_t others = inode(parent + "/a");
    run.save(parent + "/a", async, SaveOptions().overwrite(true));
    EXPECT_NE(inode(parent + "/a"), others);
    expect_loads(parent + "/a", group, run);
  });
}

TEST(WrittenOnceTest, ASaveThatBeginsBesideAnotherLinksWhatIsThere) {
  on_ranks(0, [](const Group& group, const std::string& parent, bool) {
    AdapterRun run(group);
    run.step();
    run.save(parent + "/0", false);
    const auto first = run.optimizer.save_checkpoint_async(parent + "/1");
    run.step();
    const auto second = run.optimizer.save_checkpoint_async(parent + "/2");
    first->finish();
    second->finish();
    EXPECT_EQ(inode(parent + "/0"), inode(parent + "/1"));
    EXPECT_EQ(inode(parent + "/0"), inode(parent + "/2"));
    // Another list of frozen parameters is another file.
    run.optimizer.freeze({run.model.adapter});
    run.save(parent + "/3", false);
    EXPECT_NE(inode(parent + "/3"), inode(parent + "/2"));
    run.optimizer.unfreeze({run.model.adapter});
    run.save(parent + "/4", false);
    expect_loads(parent + "/4", group, run);
  });
}

TEST(WrittenOnceTest, ACheckpointInThePlaceOfTheLastOneHasItsFile) {
  on_ranks(1, [](const Group& group, const std::string& parent, bool async) {
    AdapterRun run(group);
    run.step();
    run.save(parent + "/a", async);
    const ino_t first = inode(parent + "/a");
    run.step();
    run.save(parent + "/a", async, SaveOptions().overwrite(true));
    EXPECT_EQ(inode(parent + "/a"), first);
    expect_loads(parent + "/a", group, run);
    run.step();
    run.save(parent + "/a", async, SaveOptions().overwrite(true).shared_folder(false));
    EXPECT_EQ(inode(parent + "/a"), first);
    expect_loads(parent + "/a", group, run);
  });
}

}  // namespace
}  // namespace zero
