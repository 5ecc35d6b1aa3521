// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::protect(): complete or not at all, what it sends, and what it refuses.
#include "zero/recovery/protection.h"
#include "zero/checkpoint/file_exchange.h"

#include <ATen/ops/full.h>
#include <c10/util/Synchronized.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// They are never freed: of a tensor that two threads let go, ThreadSanitizer cannot see in libtorch
// that the second one frees it behind the first.
at::Tensor values(double value) {
  static auto& kept = *new c10::Synchronized<std::vector<at::Tensor>>;
  const at::Tensor made = at::full({1000}, value, at::kFloat);
  kept.withLock([&](std::vector<at::Tensor>& all) { all.push_back(made); });
  return made;
}

FileToSave file_of(int rank, const at::Tensor& master) {
  const std::string owner = "w" + std::to_string(rank);
  return {owner, {{{owner, "master", 0, 1000}, master, /*bucket=*/0}}};
}

std::string no_failure() { return {}; }

TEST(ProtectionTest, ASnapshotIsAddedCompleteAndReadsAsACheckpoint) {
  run_ranks(3, [](const Group& group) {
    const auto snapshots = std::make_shared<Snapshots>();
    Protection protection(group, snapshots, 0, no_failure);
    const at::Tensor master = values(group.rank());
    OwnThreadWait limit("the test waits for its thread", group.timeout());
    protection.begin({}, file_of(group.rank(), master))->wait(0, limit);
    master.fill_(-1);  // as the next step does
    EXPECT_EQ(protection.finish().text, "");
    ASSERT_EQ(snapshots->all().size(), 1U);
    const auto snapshot = snapshots->all()[0];
    const int primary = (group.rank() + 2) % 3;
    ASSERT_EQ(snapshot->files.size(), 2U);
    for (const int rank : {group.rank(), primary}) {
      const MemoryFile& file = snapshot->files.at(rank);
      Manifest manifest = snapshot->manifest;
      add_files({file.content}, manifest);
      CheckpointReader reader("memory", manifest, [&](const ManifestFile& about) {
        return std::make_unique<MemoryReader>(about.name, about.bytes,
                                              std::map<uint64_t, at::Tensor>{{0, file.bytes}});
      });
      const at::Tensor read = values(-2);
      reader.read("master", {{"w" + std::to_string(rank), 0, 1000}}, {read});
      EXPECT_TRUE(read.equal(values(rank)));
      reader.verify_file(0);
    }
  });
}

TEST(ProtectionTest, AnUnfinishedSnapshotNeverReplacesAFinishedOne) {
  run_ranks(2, [](const Group& group) {
    const auto snapshots = std::make_shared<Snapshots>();
    Protection protection(group, snapshots, 0, no_failure);
    protection.begin({}, file_of(group.rank(), values(1)));
    ASSERT_EQ(protection.finish().text, "");
    // Rank 1 ends in the middle of the second one.
    if (group.rank() == 0) {
      protection.begin({}, file_of(group.rank(), values(2)));
    } else {
      protection.abort("this rank gives up");
    }
    const Problem problem = protection.finish();
    EXPECT_EQ(problem.empty(), group.rank() == 1) << problem.text;
    ASSERT_EQ(snapshots->all().size(), 1U);
    EXPECT_EQ(snapshots->all()[0]->number, 0);
    EXPECT_EQ(snapshots->all()[0]->files.size(), 2U);
  });
}

// A rank that dies before all have agreed on the first one behind a recovery must not take a shard
// of the restored step with it.
TEST(ProtectionTest, TheFirstOneBehindARecoveryReplacesNoneUntilItIsWhole) {
  run_ranks(2, [](const Group& group) {
    const auto snapshots = std::make_shared<Snapshots>();
    std::vector<size_t> held;
    for (const int recovery : {0, 1}) {
      Protection protection(group, snapshots, recovery, no_failure);
      for (const double value : {1, 2}) {
        protection.begin({}, file_of(group.rank(), values(value)));
        ASSERT_EQ(protection.finish().text, "");
        held.push_back(snapshots->all().size());
      }
    }
    EXPECT_EQ(held, (std::vector<size_t>{1, 2, 3, 2}));
  });
}

TEST(ProtectionTest, WhatIsCopiedBehindAFailureIsLeftOut) {
  run_ranks(2, [](const Group& group) {
    const auto snapshots = std::make_shared<Snapshots>();
    std::atomic<bool> fails = false;
    Protection protection(group, snapshots, 0,
                          [&] { return std::string(fails ? "a link went down" : ""); });
    protection.begin({}, file_of(group.rank(), values(1)));
    ASSERT_EQ(protection.finish().text, "");
    fails = true;
    protection.begin({}, file_of(group.rank(), values(2)));
    const Problem problem = protection.finish();
    EXPECT_EQ(problem.text, "the copy of a protected step failed: a link went down");
    EXPECT_TRUE(problem.of_communication);
    EXPECT_EQ(snapshots->all().size(), 1U);
  });
}

TEST(ProtectionTest, ARankThatCannotCopyEndsTheWaitsOfTheOthersAtOnce) {
  // Over Gloo a send waits for its receive.
  for (const auto& [transport, world_size] : {std::pair{Transport::kMemory, 2},
                                              {Transport::kMemory, 3},
                                              {kRealTransport, 2},
                                              {kRealTransport, 3}}) {
    RunOptions options;
    options.transport = transport;
    options.timeout = std::chrono::seconds(20);
    std::latch connected(world_size), done(world_size);
    run_ranks(
        world_size,
        [&](const Group& group) {
          const bool fails = group.rank() == 1;
          Protection protection(group, std::make_shared<Snapshots>(), 0, [&]() -> std::string {
            if (fails) throw std::bad_alloc();
            return {};
          });
          connected.arrive_and_wait();  // or it would end what others still connect
          const auto start = std::chrono::steady_clock::now();
          protection.begin({}, file_of(group.rank(), values(1)));
          const Problem problem = protection.finish();
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5))
              << problem.text;
          expect_words(problem.text,
                       {"the copy of a protected step failed", fails ? "memory" : ""});
          EXPECT_EQ(problem.of_communication, !fails);
          done.arrive_and_wait();  // the destructor of a Protection ends them, too
        },
        options);
  }
}

// What was sent for copies, once nothing is under way any more.
int64_t sent_in_the_end(const ZeroOptimizer& optimizer) {
  int64_t sent = -1;
  for (int unchanged = 0; unchanged < 10; ++unchanged) {
    const int64_t now = optimizer.stats().copies.small_bytes_sent;
    if (now != sent) unchanged = 0;
    sent = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return sent;
}

// The file of a rank: its shard, and of each tensor a header entry.
TEST(ProtectionTest, AProtectedStepSendsTheOwnShardAndHoldsFour) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      OddModel model(1);
      ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                              ZeroOptions().bucket_bytes(4000).protect(2));
      const auto step = [&] {
        optimizer.backward(
            model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
        optimizer.step();
      };
      // Of protected steps two and four.
      step();
      const int64_t before = sent_in_the_end(optimizer);
      for (int i = 0; i < 4; ++i) step();
      optimizer.step();  // nothing to do, and nothing to protect
      const int64_t sent = sent_in_the_end(optimizer) - before;
      int64_t shard = 0;
      int64_t tensors = 0;
      for (const auto& g : optimizer.inner().param_groups()) {
        for (const at::Tensor& master : g.params()) {
          const bool has_state = optimizer.inner().state().count(master.unsafeGetTensorImpl()) > 0;
          shard +=
              static_cast<int64_t>(master.nbytes()) * (has_state ? 3 : 1) + (has_state ? 8 : 0);
          tensors += has_state ? 4 : 1;
        }
      }
      const int64_t held = optimizer.memory().protected_steps;
      if (world_size == 1) {
        EXPECT_EQ(sent, 0);
        EXPECT_EQ(held, 0);
      } else {
        EXPECT_GE(sent, 2 * shard);
        EXPECT_LE(sent, 2 * (shard + 300 * tensors + 500));
        // Two steps, each with this shard and one that may be a few elements larger or smaller.
        EXPECT_GE(held, 2 * shard);
        EXPECT_LE(held, 4 * (shard + 300 * tensors + 500) + 500);
      }
    });
  }
}

TEST(ProtectionTest, MeshesAndStaticGraphsAreRefused) {
  run_ranks(2, [](const Group& group) {
    OddModel model(1);
    const auto made_with = [&](const ZeroOptions& options) {
      return error_of(
          [&] { ZeroOptimizer(*model, make_inner(Inner::kAdamW, *model), group, options); });
    };
    expect_words(made_with(ZeroOptions().protect(1).static_graph(true)),
                 {"protect", "static_graph(false)"});
    expect_words(made_with(ZeroOptions().protect(1).mesh_group(group)),
                 {"protect", "plain data parallelism"});
    expect_words(made_with(ZeroOptions().protect(-1)), {"protect", "0 or more", "-1"});
    expect_words(made_with(ZeroOptions().protect(group.rank())), {"protect"});
  });
}

TEST(ProtectionTest, RecoverIsRefusedWithoutProtection) {
  run_ranks(2, [](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group);
    expect_words(error_of([&] { optimizer.recover(); }), {"recover(): expected", "protect(n)"});
  });
}

// update_in_backward asks for it after a pass that breaks.
TEST(ProtectionTest, OneRankAloneHasNoStepToGoBackTo) {
  run_ranks(1, [](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                            ZeroOptions().protect(1));
    optimizer.backward(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    optimizer.step();
    group.make_communicator("own", Purpose::kControl)->abort("as in a test");
    expect_words(error_of([&] { optimizer.recover(); }),
                 {"no step was protected before the failure", "one rank alone protects none",
                  "start again from a checkpoint"});
  });
}

// Its size grows with the model, so it must not go from all ranks to all.
TEST(ProtectionTest, TheManifestOfAProtectedStepIsSentOnceToEachRank) {
  constexpr int kRanks = 4;
  constexpr int64_t kBytes = 200'000;
  const auto network = std::make_shared<MemoryNetwork>();
  std::latch here(kRanks), counted(kRanks), done(kRanks);
  run_ranks(kRanks,
            [&](const Group& group) {
              const auto snapshots = std::make_shared<Snapshots>();
              Protection protection(group, snapshots, 0, no_failure);
              Manifest manifest;
              manifest.metadata["long"] = std::string(kBytes, 'x');
              protection.begin(manifest, file_of(group.rank(), values(1)));
              EXPECT_EQ(protection.finish().text, "");
              const auto control = group.make_communicator("control", Purpose::kControl);
              const auto sent_by_all = [&] {
                int64_t sent = 0;
                for (int rank = 0; rank < kRanks; ++rank)
                  sent += network->counts(rank).bytes_of(MemoryOp::kSend);
                return sent;
              };
              here.arrive_and_wait();
              const int64_t before = sent_by_all();
              counted.arrive_and_wait();
              const auto reader = gather_snapshot(*control, group, *snapshots, {0, 0, {0, 1, 2, 3}},
                                                  [](const ManifestTensor&) { return false; });
              EXPECT_EQ(reader->manifest().metadata.at("long").size(), size_t{kBytes});
              done.arrive_and_wait();
              const double times = static_cast<double>(sent_by_all() - before) / kBytes;
              EXPECT_GE(times, kRanks - 1);
              EXPECT_LT(times, kRanks - 0.5);
            },
            {.network = network});
}

// As after the failure of a communicator that is not the optimizer's, which one rank alone notices.
TEST(ProtectionTest, RecoverOfAllRanksGoesBackToTheProtectedStep) {
  std::latch connected(2);
  run_ranks(2,
            [&](const Group& group) {
              OddModel model(1);
              ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                                      ZeroOptions().protect(2));
              // One that a first forward pass makes.
              at::Tensor steps = model->register_buffer("steps", at::zeros({}));
              const auto step = [&](uint64_t seed) {
                steps.add_(1);
                optimizer.backward(model->loss(random_tensor({3, 17}, seed),
                                               random_tensor({3, 11}, 2), OddModelImpl::kAll));
                optimizer.step();
              };
              step(1);
              step(2);
              const at::Tensor then = model->trunk->weight.detach().clone();
              step(3);
              step(4);  // waits for the copy of the second
              step(5);
              const at::Tensor after = model->trunk->weight.detach().clone();
              const auto own = optimizer.group().make_communicator("own", Purpose::kControl);
              connected.arrive_and_wait();
              if (group.rank() == 0) {
                own->abort("as in a test");
              } else {
                EXPECT_NE(error_within(std::chrono::seconds(10), [&] { step(6); }), "");
              }
              const RecoveryReport report = optimizer.recover();
              EXPECT_EQ(report.members, (std::vector<int>{0, 1}));
              ASSERT_TRUE(report.steps == 2 || report.steps == 4) << report.steps;
              EXPECT_EQ(steps.item<int64_t>(), report.steps);
              if (report.steps == 2) {
                EXPECT_TRUE(then.equal(model->trunk->weight));
                step(3);
                step(4);
              }
              step(5);
              EXPECT_TRUE(after.equal(model->trunk->weight));
              EXPECT_EQ(optimizer.stats().steps, 5);
            },
            {.transport = kRealTransport});
}

// Else recover() could not make the optimizer again.
TEST(ProtectionTest, WhatIsToBeProtectedHasTheSameBuffersOnAllRanks) {
  const std::string folder = ::testing::TempDir() + "/protected-buffers";
  std::filesystem::remove_all(folder);
  std::latch connected(2);
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                            ZeroOptions().protect(2));
    optimizer.save_checkpoint(folder);
    const auto backward = [&] {
      optimizer.backward(
          model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    };
    const auto add_on = [&](int rank, const std::string& name) {
      if (group.rank() == rank) model->register_buffer(name, at::ones({2}));
    };
    add_on(0, "late");
    backward();
    optimizer.step();  // it is not protected
    backward();
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { optimizer.step(); }, [&] { optimizer.load_checkpoint(folder); },
             [&] {
               optimizer.resize_rows({{model->scale, at::arange(1)}});
             }}) {
      expect_words(error_of(call), {"same call with the same arguments", "late [2] Float"});
      if (optimizer.stats().steps == 1) optimizer.zero_grad();
    }
    add_on(1, "late");
    backward();
    optimizer.step();
    EXPECT_EQ(optimizer.stats().steps, 2);
    // After the protected step recover() finds it, and again where that is repaired.
    add_on(1, "later");
    const auto own = optimizer.group().make_communicator("own", Purpose::kControl);
    connected.arrive_and_wait();
    own->abort("as in a test");
    expect_words(error_of([&] { optimizer.recover(); }), {"buffer later"});
    add_on(0, "later");
    EXPECT_NE(optimizer.recover().steps, 1);
    backward();
    optimizer.step();
  });
}

}  // namespace
}  // namespace zero
