// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Saves and loads that cannot succeed fail on every rank, say why, and leave
// everything as it was.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/own_mounts.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/mesh.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 3;

// Hidden folders that a save leaves.
int left_over(const std::string& parent) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(parent)) {
    count += entry.path().filename().string()[0] == '.' ? 1 : 0;
  }
  return count;
}

TEST(SaveErrorTest, AnExistingTargetIsKeptUnlessOverwriteSwapsIt) {
  const std::string parent = fresh_folder("existing");
  const std::string folder = parent + "/a";
  fs::create_directories(parent + "/photos");
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 1);
    run.optimizer->save_checkpoint(folder);
    run.train(1, 2);
    expect_words(error_of([&] { run.optimizer->save_checkpoint(folder); }),
                 {"rank " + std::to_string(group.rank()), folder, "overwrite(true)"});
    CheckpointRun other(Training(), group, 5);
    other.optimizer->load_checkpoint(folder);
    EXPECT_EQ(other.optimizer->stats().steps, 1);
    run.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
    other.optimizer->load_checkpoint(folder);
    EXPECT_EQ(other.optimizer->stats().steps, 2);
    EXPECT_EQ(differing(run.snapshot(), other.snapshot()), 0);
    expect_words(error_of([&] {
                   run.optimizer->save_checkpoint(parent + "/photos",
                                                  SaveOptions().overwrite(true));
                 }),
                 {"photos", "manifest.json"});
    run.train(2, 3);  // the optimizer still works
  });
  EXPECT_EQ(left_over(parent), 0);
}

TEST(SaveErrorTest, GradientsSinceTheLastStepAreRefused) {
  const std::string parent = fresh_folder("gradients");
  for (bool no_sync : {false, true}) {
    run_ranks(kRanks, [&](const Group& group) {
      CheckpointRun run(Training(), group, 1);
      run.train(0, 1);
      run.optimizer->save_checkpoint(parent + "/" + std::to_string(no_sync));
      {
        const auto guard = run.optimizer->no_sync(no_sync);
        // On one rank only: the others must learn of it.
        if (group.rank() == 1) {
          run.optimizer->backward(run.model->loss(random_tensor({3, 17}, 1),
                                                  random_tensor({3, 11}, 2), OddModelImpl::kAll));
        }
      }
      const std::vector<std::string> expected = {"rank 1", "gradients since the last step",
                                                 "zero_grad()"};
      expect_words(error_of([&] { run.optimizer->save_checkpoint(parent + "/b"); }), expected);
      expect_words(
          error_of([&] { run.optimizer->load_checkpoint(parent + "/" + std::to_string(no_sync)); }),
          expected);
      run.optimizer->step();
      run.optimizer->save_checkpoint(parent + "/c" + std::to_string(no_sync));
    });
  }
}

TEST(SaveErrorTest, AFullDiskIsAnErrorOnAllRanksAndThePreviousCheckpointStays) {
  const std::string parent = fresh_folder("disk");
  // A file takes whole pages, so that as many files fit with pages of 4 KiB as with those of 64.
  const std::string size = "size=" + std::to_string(24 * sysconf(_SC_PAGESIZE));
  const std::string problem = why_not_mounted(parent, size);
  if (!problem.empty()) GTEST_SKIP() << problem;
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 1);
    run.optimizer->save_checkpoint(parent + "/a");
    const Snapshot saved = run.snapshot();
    run.train(1, 2);
    int errors = 0;
    for (int i = 0; i < 8; ++i) {  // the disk is full before
      const std::string folder = parent + "/b" + std::to_string(i);
      const std::string error = error_of([&] { run.optimizer->save_checkpoint(folder); });
      if (error.empty()) {
        run.optimizer->load_checkpoint(folder);  // saved means complete
        continue;
      }
      ++errors;
      expect_words(error, {"rank " + std::to_string(group.rank()), "No space left on device"});
      expect_words(error_of([&] {
                     run.optimizer->save_checkpoint(parent + "/a", SaveOptions().overwrite(true));
                   }),
                   {"No space left on device"});
    }
    EXPECT_GT(errors, 0) << "the disk is larger than thought";
    run.optimizer->load_checkpoint(parent + "/a");
    EXPECT_EQ(differing(saved, run.snapshot()), 0);
    run.train(1, 2);
  });
  EXPECT_EQ(left_over(parent), 0);
  EXPECT_NO_THROW(verify_checkpoint(parent + "/a"));
  umount(parent.c_str());
}

TEST(SaveErrorTest, AFolderThatCannotBeMadeIsAnErrorOnAllRanks) {
  const std::string parent = fresh_folder("unwritable");
  std::ofstream(parent + "/file") << "x";
  std::vector<std::string> folders = {parent + "/file/a", "/proc/zero/a", ""};
  if (geteuid() != 0) {  // root writes everywhere
    fs::create_directories(parent + "/read-only");
    fs::permissions(parent + "/read-only", fs::perms::owner_read | fs::perms::owner_exec);
    folders.push_back(parent + "/read-only/a");
  }
  for (const std::string& folder : folders) {
    run_ranks(kRanks, [&](const Group& group) {
      CheckpointRun run(Training(), group, 1);
      const std::string error = error_of([&] { run.optimizer->save_checkpoint(folder); });
      expect_words(error, {folder, folder.empty() ? "new folder" : "errno"});
    });
  }
}

TEST(SaveErrorTest, AFolderThatNotAllRanksSeeIsAnErrorThatSaysSo) {
  const std::string parent = fresh_folder("hosts");
  run_ranks(kRanks, [&](const Group& group) {
    // Ranks with working folders of their own, as machines have disks of their own.
    ASSERT_EQ(unshare(CLONE_FS), 0);
    const std::string own = parent + "/" + std::to_string(group.rank() / 2);
    fs::create_directories(own);
    ASSERT_EQ(chdir(own.c_str()), 0);
    CheckpointRun run(Training(), group, 1);
    expect_words(error_of([&] { run.optimizer->save_checkpoint("a"); }),
                 {"rank 2", "a folder that all ranks share", "shared_folder(false)"});
  });
  EXPECT_FALSE(fs::exists(parent + "/0/a"));
  EXPECT_EQ(left_over(parent + "/0"), 0);
}

TEST(SaveErrorTest, ARelativePathIsOfTheWorkingFolderInWhichTheSaveBegan) {
  const std::string parent = fresh_folder("relative");
  fs::create_directories(parent + "/elsewhere");
  run_ranks(2, [&](const Group& group) {
    ASSERT_EQ(unshare(CLONE_FS), 0);
    ASSERT_EQ(chdir(parent.c_str()), 0);
    CheckpointRun run(Training(), group, 1);
    const auto pending = run.optimizer->save_checkpoint_async("run/a");
    ASSERT_EQ(chdir("elsewhere"), 0);
    pending->finish();
    run.optimizer->load_checkpoint(parent + "/run/a");
  });
  EXPECT_TRUE(fs::is_empty(parent + "/elsewhere"));
  EXPECT_EQ(left_over(parent + "/run"), 0);
}

// Experts of a module that numbers its own from 0.
TEST(SaveErrorTest, OneNameForDifferentExpertsIsRefusedOnAllRanks) {
  const std::string parent = fresh_folder("experts");
  run_ranks(4, [&](const Group& group) {
    const Mesh mesh(group, {{"ep", 2}, {"dp", 2}});
    Training t;
    t.options.placement(0, GroupPlacement().sharded_over(mesh.group({"dp"})));
    CheckpointRun run(t, group, 1);
    run.train(0, 1);
    const std::vector<std::string> expected = {"expected different names", "begin with 0, 2",
                                               "a name of its own"};
    expect_words(error_of([&] { run.optimizer->save_checkpoint(parent + "/a"); }), expected);
    expect_words(error_of([&] { run.optimizer->load_checkpoint(parent + "/a"); }), expected);
    run.train(1, 2);
  });
  EXPECT_FALSE(fs::exists(parent + "/a"));
}

TEST(SaveErrorTest, OneNameForTensorsOfTwoKindsIsRefusedOnAllRanks) {
  const std::string parent = fresh_folder("kinds");
  run_ranks(kRanks, [&](const Group& group) {
    torch::nn::Linear model(3, 2);
    const auto make = [&] {
      return std::make_unique<ZeroOptimizer>(
          *model, std::make_unique<torch::optim::AdamW>(model->parameters(), 0.1), group);
    };
    model->register_buffer("bias", at::ones({2}));
    expect_words(error_of([&] { make()->save_checkpoint(parent + "/a"); }),
                 {"bias", "a parameter and a buffer", "another name"});
  });
  run_ranks(kRanks, [&](const Group& group) {
    torch::nn::Linear model(3, 2);
    model->register_parameter("__metadata__", at::ones({2}));
    ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::AdamW>(model->parameters(), 0.1),
                            group);
    expect_words(error_of([&] { optimizer.save_checkpoint(parent + "/a"); }),
                 {"__metadata__", "expected another name"});
  });
}

TEST(SaveErrorTest, AFolderMayEndInADot) {
  const std::string parent = fresh_folder("dot");
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    for (const std::string end : {"/a/.", "/b/", "/c/./."}) {
      run.optimizer->save_checkpoint(parent + end);
      run.optimizer->load_checkpoint(parent + end.substr(0, 2));
    }
  });
}

TEST(SaveErrorTest, MetadataThatIsNotTextIsRefused) {
  const std::string parent = fresh_folder("metadata");
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const auto options = SaveOptions().metadata({{"random state", "\xff\xfe\x01"}});
    expect_words(error_of([&] { run.optimizer->save_checkpoint(parent + "/a", options); }),
                 {"UTF-8", "hexadecimal"});
  });
  EXPECT_EQ(left_over(parent), 0);
}

// Another model: wider, without one layer, with another one.
struct OtherModelImpl : torch::nn::Module {
  OtherModelImpl() {
    trunk = register_module("trunk", torch::nn::Linear(17, 24));
    left = register_module("left", torch::nn::Linear(23, 11));
    extra = register_module("extra", torch::nn::Linear(3, 2));
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, extra{nullptr};
};

TEST(LoadErrorTest, AnotherModelIsListedAndStrictFalseLoadsWhatMatches) {
  const std::string folder = fresh_folder("model") + "/a";
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 2);
    run.optimizer->save_checkpoint(folder);
    OtherModelImpl other;
    const at::Tensor trunk = other.trunk->weight.detach().clone();
    ZeroOptimizer optimizer(other, std::make_unique<torch::optim::AdamW>(other.parameters(), 0.01),
                            group);
    const std::string error = error_of([&] { optimizer.load_checkpoint(folder); });
    expect_words(error, {"parameter trunk.weight: shape [23, 17] in the checkpoint, [24, 17]",
                         "parameter extra.bias: in the model, missing in the checkpoint",
                         "differences", "...", "strict(false)"});
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 12) << error;
    EXPECT_FALSE(other.left->weight.equal(run.model->left->weight));
    const at::Tensor before = optimizer.master(other.trunk->weight);

    const LoadReport report = optimizer.load_checkpoint(folder, LoadOptions().strict(false));
    EXPECT_GT(report.differences.size(), 10u);
    EXPECT_TRUE(other.left->weight.equal(run.model->left->weight));
    EXPECT_TRUE(optimizer.master(other.trunk->weight).equal(before));
  });
}

// As a head that was read from a file, on every rank or on one, into other memory or in place.
TEST(LoadErrorTest, WhatStrictFalseLeavesAsItIsHasNoChangesThatMastersLack) {
  const std::string folder = fresh_folder("changed") + "/a";
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(folder);
  });
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool in_place : {false, true}) {
      run_ranks(kRanks, [&](const Group& group) {
        OtherModelImpl other;
        other.to(dtype);
        ZeroOptimizer optimizer(
            other, std::make_unique<torch::optim::AdamW>(other.parameters(), 0.01), group);
        const at::Tensor left = other.left->weight.detach().clone();
        const at::Tensor ones = at::ones({2, 3}, dtype);
        const at::Tensor& head = other.extra->weight;
        if (!in_place) {
          head.set_data(ones.clone());
        } else if (group.rank() == 1) {
          const at::NoGradGuard no_grad;
          head.copy_(ones);
        }
        const auto load = [&] { optimizer.load_checkpoint(folder, LoadOptions().strict(false)); };
        expect_words(error_of(load), {in_place ? "rank 1" : "rank 0", "parameter extra.weight",
                                      "call refresh_master_parameters()"});
        EXPECT_TRUE(other.left->weight.equal(left));
        if (in_place) other.extra->weight.data().copy_(ones);
        EXPECT_TRUE(head.equal(ones));
        optimizer.refresh_master_parameters();
        // What the load sets may have any values.
        other.left->weight.set_data(left.clone());
        load();
        EXPECT_FALSE(other.left->weight.equal(left));
        EXPECT_TRUE(head.equal(ones));
        optimizer.check_replicas();
      });
    }
  }
}

// Storage is seldom equally fast everywhere: the others wait, as long as the group's timeout says.
TEST(SlowRankTest, ARankTenTimesSlowerThanTheOthersIsWaitedFor) {
  const std::string parent = fresh_folder("slow");
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 1);
    const auto start = std::chrono::steady_clock::now();
    run.optimizer->save_checkpoint(parent + "/a");
    const auto usual = std::chrono::steady_clock::now() - start;
    run.train(1, 2);
    if (group.rank() == 1) std::this_thread::sleep_for(10 * usual);
    run.optimizer->save_checkpoint(parent + "/b");
    // In the middle of a save.
    const auto pending = run.optimizer->save_checkpoint_async(parent + "/c");
    run.train(2, 3);
    if (group.rank() == 2) std::this_thread::sleep_for(10 * usual);
    pending->finish();
    const Snapshot now = run.snapshot();
    run.optimizer->load_checkpoint(parent + "/c");
    run.train(2, 3);
    EXPECT_EQ(differing(run.snapshot(), now), 0);
  });
  EXPECT_EQ(left_over(parent), 0);
}

TEST(SlowRankTest, ARankSlowerThanTheTimeoutIsNamedAndThePreviousCheckpointStays) {
  const std::string parent = fresh_folder("too_slow");
  const std::string folder = parent + "/a";
  std::latch others_have_failed(kRanks - 1);
  RunOptions options;
  options.timeout = std::chrono::seconds(2);
  run_ranks(
      kRanks,
      [&](const Group& group) {
        CheckpointRun run(Training(), group, 1);
        run.train(0, 1);
        run.optimizer->save_checkpoint(folder);
        run.train(1, 2);
        const auto pending =
            run.optimizer->save_checkpoint_async(folder, SaveOptions().overwrite(true));
        if (group.rank() == 1) others_have_failed.wait();
        const std::string text = error_of([&] { pending->finish(); });
        EXPECT_FALSE(text.empty());
        if (group.rank() == 1) return;
        expect_words(text, {"rank 1"});
        others_have_failed.count_down();
      },
      options);
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 3);
    run.optimizer->load_checkpoint(folder);
    EXPECT_EQ(run.optimizer->stats().steps, 1);
  });
}

// Groups decide on learning rates and decay: they are not taken for each other.
struct OddBuffers : torch::nn::Module {
  explicit OddBuffers(int64_t first) {
    weight = register_parameter("weight", at::full({7, 5}, static_cast<double>(first)));
    plain = register_buffer("plain", at::full({3}, first));
    expanded = register_buffer("expanded", (at::arange(5) + first).expand({3, 5}));
    const c10::InferenceMode mode;
    made = register_buffer("made", at::full({4, 2}, first).t());
  }
  std::unique_ptr<torch::optim::Optimizer> inner() const {
    return std::make_unique<torch::optim::AdamW>(parameters(), 0.1);
  }
  bool has(int64_t first) const {
    return plain.eq(first).all().item<bool>() && made.eq(first).all().item<bool>() &&
           expanded.equal((at::arange(5) + first).expand({3, 5})) && expanded.stride(0) == 0;
  }
  at::Tensor weight, plain, expanded, made;
};

TEST(LoadErrorTest, ExpandedBuffersAndThoseOfInferenceModeAreSentSavedAndLoaded) {
  for (const int world_size : {1, 2, 3}) {
    const std::string folder = fresh_folder("odd") + "/a";
    run_ranks(world_size, [&](const Group& group) {
      OddBuffers model(1 + group.rank());
      ZeroOptimizer optimizer(model, model.inner(), group);
      EXPECT_TRUE(model.has(1));
      optimizer.save_checkpoint(folder);
      OddBuffers other(5 + group.rank());
      ZeroOptimizer loads(other, other.inner(), group);
      EXPECT_TRUE(other.has(5));
      loads.load_checkpoint(folder);
      EXPECT_TRUE(other.has(1));
      EXPECT_TRUE(other.weight.eq(1).all().item<bool>());
      loads.backward(other.weight.sum());
      loads.step();
    });
  }
}

TEST(LoadErrorTest, AnExpandedBufferThatCannotHoldWhatWasStoredChangesNothing) {
  const std::string folder = fresh_folder("expanded") + "/a";
  run_ranks(kRanks, [&](const Group& group) {
    OddBuffers model(1);
    model.expanded.set_data(at::arange(15).reshape({3, 5}));
    ZeroOptimizer optimizer(model, model.inner(), group);
    optimizer.save_checkpoint(folder);
    OddBuffers other(5);
    ZeroOptimizer loads(other, other.inner(), group);
    expect_words(error_of([&] { loads.load_checkpoint(folder); }), {"expanded", "equal values"});
    EXPECT_TRUE(other.has(5));
    EXPECT_TRUE(other.weight.eq(5).all().item<bool>());
    EXPECT_TRUE(loads.master(other.weight).eq(5).all().item<bool>());
  });
}

std::unique_ptr<torch::optim::Optimizer> adam_of(const at::Tensor& p) {
  return std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{p}, 0.1);
}

// As a model that makes what it needs in its first forward pass.
struct LateBuffer : torch::nn::Module {
  LateBuffer() { weight = register_parameter("weight", at::ones({7, 5})); }
  void make_late(double value) {
    queue = register_buffer("queue", at::full({3}, value));
    adapter = register_parameter("adapter", at::full({2}, value), /*requires_grad=*/false);
  }
  bool has(double value) const {
    return queue.eq(value).all().item<bool>() && adapter.eq(value).all().item<bool>();
  }
  at::Tensor weight, queue, adapter;
};

TEST(LateTensorsTest, WhatIsRegisteredSinceConstructionIsSavedLoadedAndSent) {
  for (const int world_size : {1, 2, 3}) {
    const std::string folder = fresh_folder("late");
    run_ranks(world_size, [&](const Group& group) {
      const auto optimizer_of = [&](LateBuffer& model) {
        return std::make_unique<ZeroOptimizer>(model, adam_of(model.weight), group);
      };
      LateBuffer model;
      const auto optimizer = optimizer_of(model);
      optimizer->save_checkpoint(folder + "/early");
      model.make_late(1 + group.rank());
      optimizer->save_checkpoint(folder + "/late");
      optimizer->broadcast_buffers();
      EXPECT_TRUE(model.queue.eq(1).all().item<bool>());
      optimizer->refresh_master_parameters();
      EXPECT_TRUE(model.has(1));
      // Here, and not in the checkpoint.
      const LoadReport report = optimizer->load_checkpoint(folder + "/early");
      ASSERT_EQ(report.differences.size(), 2u);
      expect_words(report.differences[0], {"adapter", "stays as it is"});
      expect_words(report.differences[1], {"queue", "stays as it is"});
      // In the checkpoint, and here from the beginning, since then, or not.
      for (const bool since : {false, true}) {
        LateBuffer other;
        if (!since) other.make_late(5);
        const auto loads = optimizer_of(other);
        if (since) other.make_late(5);
        EXPECT_TRUE(other.has(5));
        loads->load_checkpoint(folder + "/late");
        EXPECT_TRUE(other.has(1)) << since;
      }
      LateBuffer without;
      expect_words(error_of([&] { optimizer_of(without)->load_checkpoint(folder + "/late"); }),
                   {"buffer queue", "frozen parameter adapter", "missing in the model"});
    });
  }
}

TEST(LateTensorsTest, WhatOneRankAloneHasRegisteredIsSentByNone) {
  const std::string folder = fresh_folder("late_on_one") + "/a";
  for (const int late : {0, 1}) {
    run_ranks(2, [&](const Group& group) {
      LateBuffer model;
      ZeroOptimizer optimizer(model, adam_of(model.weight), group);
      if (group.rank() == late) model.make_late(1);
      expect_words(error_of([&] { optimizer.broadcast_buffers(); }), {"queue [3] Float"});
      expect_words(error_of([&] { optimizer.refresh_master_parameters(); }), {"adapter [2] Float"});
      // Rank 0 saves what it has.
      optimizer.save_checkpoint(folder, SaveOptions().overwrite(true));
      LateBuffer other;
      if (late == 0) other.make_late(5);
      ZeroOptimizer(other, adam_of(other.weight), group).load_checkpoint(folder);
      EXPECT_TRUE(late != 0 || other.has(1));
    });
  }
}

struct TwoParts : torch::nn::Module {
  explicit TwoParts(int64_t seed) {
    a = register_parameter("a", random_tensor({4, 3}, seed).t());
    b = register_parameter("b", random_tensor({5, 3}, seed + 1).t());
  }
  void train(ZeroOptimizer& of_a, ZeroOptimizer& of_b, int steps) const {
    for (int step = 0; step < steps; ++step) {
      of_a.backward((a.pow(2).sum() + b.pow(3).sum()) * (1 + step));
      of_a.step();
      of_b.step();
    }
  }
  at::Tensor a, b;
};

TEST(TwoOptimizersTest, EachSavesAndLoadsItsOwnPartOfAModule) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (const bool load_first : {false, true}) {
      const std::string parent = fresh_folder("two");
      run_ranks(2, [&](const Group& group) {
        const auto make = [&](TwoParts& model, const at::Tensor& p) {
          return std::make_unique<ZeroOptimizer>(model, adam_of(p), group,
                                                 ZeroOptions().layout(layout));
        };
        TwoParts model(1);
        const auto of_a = make(model, model.a), of_b = make(model, model.b);
        model.train(*of_a, *of_b, 2);
        of_a->save_checkpoint(parent + "/a");
        of_b->save_checkpoint(parent + "/b");
        of_a->refresh_master_parameters();  // disturbs no other optimizer
        expect_words(error_of([&] { of_a->unfreeze({model.b}); }),
                     {"parameter b", "no other ZeroOptimizer"});
        model.train(*of_a, *of_b, 2);

        TwoParts again(7);
        const auto other_a = make(again, again.a);
        if (load_first) other_a->load_checkpoint(parent + "/a");
        const auto other_b = make(again, again.b);
        if (!load_first) other_a->load_checkpoint(parent + "/a");
        other_b->load_checkpoint(parent + "/b");
        again.train(*other_a, *other_b, 2);
        EXPECT_TRUE(again.a.equal(model.a));
        EXPECT_TRUE(again.b.equal(model.b));
        other_a->check_replicas();
        other_b->check_replicas();
      });
    }
  }
}

TEST(TwoOptimizersTest, WhatWentFromOneToTheOtherIsLeftToTheOther) {
  const std::string parent = fresh_folder("transfer");
  run_ranks(2, [&](const Group& group) {
    TwoParts model(1);
    ZeroOptimizer of_a(
        model,
        std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{model.a, model.b}, 0.1),
        group);
    of_a.freeze({model.b});
    model.b.requires_grad_(true);
    ZeroOptimizer of_b(model, adam_of(model.b), group);
    model.train(of_a, of_b, 1);
    of_a.save_checkpoint(parent + "/a");
    of_a.refresh_master_parameters();
    model.train(of_a, of_b, 1);
    const at::Tensor b = model.b.detach().clone();
    of_a.load_checkpoint(parent + "/a");
    EXPECT_TRUE(model.b.equal(b));
    model.train(of_a, of_b, 1);
    EXPECT_EQ(of_a.stats().steps, 2);
    EXPECT_EQ(of_b.stats().steps, 3);
  });
}

TEST(LoadErrorTest, AParameterThatWasFrozenSinceOrThenIsADifferenceThatSaysWhatToDo) {
  const std::string parent = fresh_folder("kinds");
  run_ranks(2, [&](const Group& group) {
    const auto make = [&](TwoParts& model, bool frozen) {
      model.b.requires_grad_(!frozen);
      std::vector<at::Tensor> trained = {model.a};
      if (!frozen) trained.push_back(model.b);
      return std::make_unique<ZeroOptimizer>(
          model, std::make_unique<torch::optim::AdamW>(trained, 0.1), group);
    };
    for (const bool frozen : {false, true}) {
      const std::string folder = parent + "/" + std::to_string(frozen);
      TwoParts saved(1), other(7);
      make(saved, frozen)->save_checkpoint(folder);
      const auto optimizer = make(other, !frozen);
      const at::Tensor b = other.b.detach().clone();
      const std::vector<std::string> words = {"parameter b: kind ", "frozen parameter in the ",
                                              "freeze()", "unfreeze()", "export_model()"};
      expect_words(error_of([&] { optimizer->load_checkpoint(folder); }), words);
      const LoadReport report = optimizer->load_checkpoint(folder, LoadOptions().strict(false));
      expect_words(report.differences.at(0), words);
      EXPECT_TRUE(other.a.equal(saved.a));
      EXPECT_TRUE(other.b.equal(b));
    }
  });
}

TEST(LoadErrorTest, GroupsInAnotherOrderAreADifference) {
  const std::string folder = fresh_folder("groups") + "/a";
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 2);
    run.optimizer->save_checkpoint(folder);
    OddModel model(3);
    auto inner = make_inner(Inner::kAdamW, *model);
    auto& groups = inner->param_groups();
    std::swap(groups[0], groups[1]);
    ZeroOptimizer optimizer(*model, std::move(inner), group);
    const at::Tensor before = model->trunk->weight.detach().clone();
    expect_words(error_of([&] { optimizer.load_checkpoint(folder); }),
                 {"parameter trunk.weight: parameter group 0 in the checkpoint, 1 in the model",
                  "strict(false)"});
    EXPECT_TRUE(model->trunk->weight.equal(before));
    const auto report = optimizer.load_checkpoint(folder, LoadOptions().strict(false));
    EXPECT_GT(report.differences.size(), 5u);
    EXPECT_TRUE(model->trunk->weight.equal(run.model->trunk->weight));
    // The options of a group belong to its parameters.
    const auto decay_of = [](ZeroOptimizer& of, size_t g) {
      return static_cast<torch::optim::AdamWOptions&>(of.param_groups()[g].options())
          .weight_decay();
    };
    EXPECT_NE(decay_of(*run.optimizer, 0), decay_of(*run.optimizer, 1));
    EXPECT_EQ(decay_of(optimizer, 0), decay_of(*run.optimizer, 1));
    EXPECT_EQ(decay_of(optimizer, 1), decay_of(*run.optimizer, 0));
  });
}

// A head that was replaced: by another name, or by one of another shape.
TEST(LoadErrorTest, AGroupOfNewParametersKeepsItsOptions) {
  const std::string folder = fresh_folder("head") + "/a";
  run_ranks(2, [&](const Group& group) {
    const auto make = [&](torch::nn::Module& model, const char* head, int64_t size, double rate) {
      using torch::optim::AdamWOptions, torch::optim::OptimizerParamGroup;
      std::vector<OptimizerParamGroup> groups;
      for (const at::Tensor& p : {model.register_parameter("body", at::ones({6})),
                                  model.register_parameter(head, at::ones({size}))}) {
        groups.emplace_back(std::vector<at::Tensor>{p}, std::make_unique<AdamWOptions>(rate));
        rate *= 2;
      }
      return std::make_unique<ZeroOptimizer>(model, std::make_unique<torch::optim::AdamW>(groups),
                                             group);
    };
    torch::nn::Module model;
    make(model, "head", 4, 0.25)->save_checkpoint(folder);
    for (const auto& [head, size] : {std::pair("new_head", 4), std::pair("head", 5)}) {
      torch::nn::Module other;
      const auto optimizer = make(other, head, size, 1);
      const LoadReport report = optimizer->load_checkpoint(folder, LoadOptions().strict(false));
      EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.25);
      EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 2);
      expect_words(report.differences.back(), {"parameter group 1", "options stay as they are"});
    }
  });
}

TEST(LoadErrorTest, AnotherInnerOptimizerIsADifference) {
  const std::string folder = fresh_folder("inner") + "/a";
  run_ranks(kRanks, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 2);
    run.optimizer->save_checkpoint(folder);
    Training t;
    t.inner = Inner::kSgdMomentum;
    CheckpointRun other(t, group, 3);
    expect_words(error_of([&] { other.optimizer->load_checkpoint(folder); }),
                 {"inner optimizer: AdamW in the checkpoint, SGD here", "nor its options"});
    other.optimizer->param_groups()[0].options().set_lr(0.125);
    const auto report = other.optimizer->load_checkpoint(folder, LoadOptions().strict(false));
    EXPECT_EQ(report.differences.size(), 1u);
    EXPECT_EQ(other.optimizer->param_groups()[0].options().get_lr(), 0.125);
    EXPECT_TRUE(other.model->trunk->weight.equal(run.model->trunk->weight));
    other.train(2, 3);
  });
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
