// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptimizer on a device with streams of its own, against plain torch. The device is emulated:
// see tests/support/device/emulated_device.h for the mistakes that it finds.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <ios>
#include <iterator>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/error_of.h"
#include "tests/support/own_optimizer.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/base/streams.h"
#include "zero/checkpoint.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Rank 0's, after checking that all ranks hold the same bits.
Trajectory train_on_devices(const Training& training, const DeviceRunOptions& options = {}) {
  std::vector<Trajectory> all(training.world_size);
  run_device_ranks(
      training.world_size,
      [&](const Group& group) { all[group.rank()] = train_sharded(training, group); }, options);
  for (const Trajectory& t : all) EXPECT_EQ(differing_elements(t, all[0]), 0);
  return all[0];
}

// Compares with plain torch, and bit by bit with the same run on the CPU.
void expect_same_training(const Training& training, const DeviceRunOptions& options = {}) {
  const Trajectory device = train_on_devices(training, options);
  EXPECT_LT(largest_difference(device, train_reference(training)), 1e-6)
      << "W " << training.world_size << " stage " << training.options.stage();
  EXPECT_EQ(differing_elements(device, train_on_ranks(training)), 0)
      << "W " << training.world_size << " stage " << training.options.stage();
}

// Optimizers and stages take turns, so that each layout has all of them.
TEST(DeviceTest, HasTheBitsOfTheCpu) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      const int turn = world_size + static_cast<int>(layout);
      Training training;
      training.world_size = world_size;
      training.steps = 3;
      training.inner = turn % 2 == 0 ? Inner::kSgd : Inner::kAdamW;
      training.options = ZeroOptions().stage(1 + turn / 2 % 2).layout(layout).bucket_bytes(2048);
      expect_same_training(training);
    }
  }
}

// NCCL may add fp32 gradients up itself, in an order of its own, or leaves it to us.
TEST(DeviceTest, SumsOverNcclAreItsOwnOrInRankOrder) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    Training training;
    training.world_size = 4;
    training.transport = Transport::kMemory;
    training.options = ZeroOptions().layout(layout).bucket_bytes(2048);
    const Trajectory in_rank_order = train_on_ranks(training);
    for (const bool ours : {false, true}) {
      training.options.two_level(!ours);
      const Trajectory device = train_on_devices(training, {.ring_sums = true});
      EXPECT_LT(largest_difference(device, train_reference(training)), 1e-5) << ours;
      EXPECT_EQ(differing_elements(device, in_rank_order) == 0, ours);
    }
  }
}

std::string text_of(const DeviceRunOptions& options) {
  return (options.ranks_per_machine > 0 ? "two levels" : "one level") +
         std::string(options.over_host ? " over the host" : "");
}

// Layers that ranks drop, accumulation, gathers that overlap, clipping and 16 bits. Dtypes
// take turns, so that each network has both, and both with and without overlap.
TEST(DeviceTest, UnevenPassesHaveTheBitsOfTheCpu) {
  int turn = 0;
  for (const DeviceRunOptions& options : {DeviceRunOptions{},
                                          {.over_host = true},
                                          {.ranks_per_machine = 2},
                                          {.ranks_per_machine = 2, .over_host = true}}) {
    ++turn;
    for (const bool overlap : {false, true}) {
      const c10::ScalarType dtype = turn++ % 2 == 0 ? at::kFloat : at::kBFloat16;
      Training training;
      training.world_size = 4;
      training.inner = Inner::kSgdMomentum;
      training.dtype = dtype;
      training.steps = 3;
      training.micro_batches = 3;
      training.max_norm = 0.1;
      training.use = [](int rank, int step, int micro) {
        return static_cast<unsigned>((7 * rank + 5 * step + 3 * micro) % 16);
      };
      training.under_no_sync = [](int rank, int, int micro) { return micro == 0 && rank < 2; };
      training.runs = [](int rank, int step, int micro) { return (rank + step + micro) % 4 != 0; };
      training.options =
          ZeroOptions().overlap_gather(overlap).stage(overlap ? 2 : 1).bucket_bytes(1024);
      const Trajectory device = train_on_devices(training, options);
      if (options.ranks_per_machine == 0) {
        EXPECT_EQ(differing_elements(device, train_on_ranks(training)), 0)
            << text_of(options) << " " << dtype;
      }
      EXPECT_LT(largest_difference(device, train_reference(training)),
                dtype == at::kFloat ? 1e-6 : 2e-2)
          << text_of(options) << " " << dtype;
    }
  }
}

// Layers that some micro-batches drop, norms, and averages that are read.
TEST(DeviceTest, MicroBatchesHaveTheSameBitsOnEveryNumberOfRanks) {
  struct Ranks {
    int count;
    DeviceRunOptions options;
  };
  const auto train = [](const Group& group, c10::ScalarType dtype, int64_t stage) {
    std::vector<at::Tensor> read;
    OddModel model(1 + group.rank(), 23, group.device());
    model->to(dtype);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                            ZeroOptions().stage(stage).bucket_bytes(1024).micro_batches(6));
    for (int step = 0; step < 3; ++step) {
      for (const int64_t number : optimizer.micro_batches()) {
        const auto seed = static_cast<uint64_t>(10 * step + number);
        const auto use = static_cast<unsigned>((5 * step + 3 * number) % 16);
        const at::Tensor x = random_tensor({3, 17}, seed).to(group.device(), dtype);
        const at::Tensor target = random_tensor({3, 11}, seed + 90).to(group.device(), dtype);
        optimizer.backward(model->loss(x, target, use));
      }
      read.push_back(optimizer.gradient(model->trunk->weight).cpu());
      read.push_back(optimizer.clip_grad_norm_(0.1).cpu());
      optimizer.step();
      for (const at::Tensor& p : model->parameters()) read.push_back(p.detach().cpu().clone());
    }
    return read;
  };
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> one;  // of one rank on the host
    run_ranks(1, [&](const Group& group) { one = train(group, dtype, 1); });
    for (const Ranks& ranks : {Ranks{1, {}},
                               {2, {}},
                               {3, {.over_host = true}},
                               {4, {.ranks_per_machine = 2}},
                               {4, {.ranks_per_machine = 2, .over_host = true}},
                               {6, {.ranks_per_machine = 1}}}) {
      std::vector<std::vector<at::Tensor>> all(ranks.count);
      run_device_ranks(
          ranks.count,
          [&](const Group& group) { all[group.rank()] = train(group, dtype, 1 + ranks.count % 2); },
          ranks.options);
      for (const auto& read : all) {
        ASSERT_EQ(read.size(), one.size());
        const auto pair = std::mismatch(read.begin(), read.end(), one.begin(), equal);
        EXPECT_EQ(pair.first - read.begin(), static_cast<int64_t>(one.size()))
            << ranks.count << " ranks, " << text_of(ranks.options) << ", " << dtype;
      }
    }
  }
}

TEST(DeviceTest, AStepDoesNotWaitForTheDevice) {
  struct Turn {
    Inner inner = Inner::kAdamW;
    ZeroOptions options = {};
    int ranks_per_machine = 0;
    int64_t waits = 0;  // of a step
  };
  const std::vector<Turn> turns = {
      {},
      {.ranks_per_machine = 2},
      {.options = ZeroOptions().micro_batches(4)},
      // Without kernels of its own the step of a class cannot be taken back.
      {.inner = Inner::kMuon,
       .options = ZeroOptions().layout(Layout::kWholeParameters),
       .waits = 1},
      {.inner = Inner::kMuon,
       .options = ZeroOptions().layout(Layout::kWholeParameters).skip_nonfinite(false)}};
  for (const Turn& turn : turns) {
    DeviceRunOptions options;
    options.ranks_per_machine = turn.ranks_per_machine;
    run_device_ranks(
        4,
        [&](const Group& group) {
          OddModel model(1, 23, group.device());
          ZeroOptimizer optimizer(*model, make_inner(turn.inner, *model), group,
                                  ZeroOptions(turn.options).bucket_bytes(1024));
          const at::Tensor x = random_tensor({3, 17}, 1).to(group.device());
          const at::Tensor target = random_tensor({3, 11}, 2).to(group.device());
          int64_t before = 0;
          for (int step = 0; step < 5; ++step) {
            if (step == 2) before = EmulatedDevice::host_waits(group.rank());
            optimizer.backward(model->loss(x, target, OddModelImpl::kAll));
            optimizer.clip_grad_norm_(0.5);
            optimizer.step();
          }
          EXPECT_EQ(EmulatedDevice::host_waits(group.rank()) - before, 3 * turn.waits);
          EXPECT_EQ(optimizer.stats().steps, 5);
        },
        options);
  }
}

// Matrices have shards over all ranks; vectors over two, with copies on the other two.
TEST(DeviceTest, DomainsReplicasAndLevelsNeedRoomForOneCollective) {
  for (const int ranks_per_machine : {0, 2}) {
    run_device_ranks(
        4,
        [](const Group& group) {
          const int rank = group.rank();
          const std::vector<int> shared{rank / 2 * 2, rank / 2 * 2 + 1};
          const std::vector<int> copies{rank % 2, rank % 2 + 2};
          OddModel model(1, 23, group.device());
          const auto vectors = GroupPlacement()
                                   .sharded_over(group.subgroup(shared, "shared"))
                                   .replicated_over(group.subgroup(copies, "copies"));
          ZeroOptimizer optimizer(
              *model, make_inner(Inner::kAdamW, *model), group,
              ZeroOptions().bucket_bytes(512).overlap_gather(true).placement(1, vectors));
          const at::Tensor x = random_tensor({3, 17}, rank).to(group.device());
          const at::Tensor target = random_tensor({3, 11}, 2).to(group.device());
          for (int step = 0; step < 4; ++step) {
            optimizer.wait_for(*model);
            for (int pass = 0; pass <= (rank + step) % 3; ++pass) {
              optimizer.backward(model->loss(x, target, OddModelImpl::kAll));
            }
            if (step % 2 == 0) optimizer.clip_grad_norm_(0.1);
            optimizer.step();
          }
          optimizer.check_replicas();
        },
        {.ranks_per_machine = ranks_per_machine, .room = 1});
  }
}

// Kernels that rank 0 launches in one backward pass of the per-parameter layout, whose parameters
// have a piece for each rank.
int64_t launches_of_a_pass(int world_size, bool accumulated) {
  int64_t launches = 0;
  run_device_ranks(world_size, [&](const Group& group) {
    Affine layer(17, 23, group.device());
    ZeroOptimizer optimizer(*layer,
                            std::make_unique<torch::optim::AdamW>(layer->parameters(), 0.01), group,
                            ZeroOptions().layout(Layout::kPerParameter).bucket_bytes(1 << 20));
    const at::Tensor x = random_tensor({3, 17}, 1).to(group.device());
    const auto pass = [&] { optimizer.backward(layer->forward(x).sum()); };
    if (accumulated) {
      const auto guard = optimizer.no_sync();
      pass();
    }
    const int64_t before = EmulatedDevice::launches(group.rank());
    pass();
    if (group.rank() == 0) launches = EmulatedDevice::launches(0) - before;
    optimizer.step();
  });
  return launches;
}

TEST(DeviceTest, APieceForEachRankIsNoLaunchForEachRank) {
  for (const bool accumulated : {false, true}) {
    const int64_t alone = launches_of_a_pass(1, accumulated);
    EXPECT_GT(alone, 0);
    EXPECT_EQ(launches_of_a_pass(4, accumulated), alone) << "accumulated " << accumulated;
  }
}

// A parameter of many segments is not copied to the host for each of them.
TEST(DeviceTest, ChecksOfReplicasCopyEachValueOnce) {
  run_device_ranks(2, [&](const Group& group) {
    OddModel model(1, 5003, group.device());
    ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group,
                            ZeroOptions().bucket_bytes(4096));
    int64_t bytes = 0;
    for (const at::Tensor& p : model->parameters()) bytes += static_cast<int64_t>(p.nbytes());
    const int64_t before = EmulatedDevice::bytes_to_host(group.rank());
    optimizer.check_replicas();
    // The parameters, and this rank's segments of them and of their masters.
    EXPECT_LE(EmulatedDevice::bytes_to_host(group.rank()) - before, 2 * bytes + 4096);
  });
}

// Runs `work` on a stream of its own, behind the current one and before what follows.
void on_another_stream(at::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) return work();
  const c10::Stream current = current_torch_stream(device);
  const c10::Stream other = new_stream(device);
  make_wait(other, current);
  {
    const c10::StreamGuard guard(other);
    work();
  }
  make_wait(current, other);
}

// Each step runs on another stream, and its forward pass on three.
Trajectory train_on_streams(const Group& group, const ZeroOptions& options) {
  const at::Device device = group.device();
  OddModel model(1, 23, device);
  // From the second step on, the bucket with the trunk and a part of the left layer is full, and
  // sent, when the trunk is packed.
  ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group,
                          ZeroOptions(options).bucket_bytes(2048));
  // The stream of the left layer packs late.
  model->left->weight.register_hook([device](const at::Tensor&) {
    if (device.is_cpu()) return;
    emulated::enqueue(emulated::current_stream(device.index()),
                      [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  });
  Trajectory result;
  for (int step = 0; step < 4; ++step) {
    on_another_stream(device, [&] {
      const auto seed = static_cast<uint64_t>(10 * step + group.rank());
      const at::Tensor x = random_tensor({3, 17}, seed).to(device);
      const at::Tensor hidden = at::tanh(model->trunk(x));
      at::Tensor left;
      at::Tensor right;
      on_another_stream(device, [&] { left = model->left(hidden); });
      on_another_stream(device, [&] { right = model->right(hidden); });
      optimizer.backward(at::mean(left * right));
      optimizer.step();
      result.emplace_back();
      for (const at::Tensor& p : model->parameters()) {
        result.back().push_back(p.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
      }
    });
  }
  return result;
}

TEST(DeviceTest, BuffersAndFrozenParametersInHostMemoryAreSent) {
  for (const bool over_host : {false, true}) {
    run_device_ranks(
        3,
        [](const Group& group) {
          OddModel model(1, 23, group.device());
          const at::Tensor counter = model->register_buffer(
              "host_counter", at::full({3}, group.rank() + 5, at::kLong).expand({2, 3}));
          const at::Tensor frozen = model->register_parameter(
              "host_frozen", at::full({2, 3}, group.rank() + 7.0).t(), /*requires_grad=*/false);
          // By itself, since it is large.
          const at::Tensor large =
              model->register_buffer("host_large", at::full({300, 300}, group.rank() + 3.0));
          ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group);
          EXPECT_TRUE(large.eq(3).all().item<bool>());
          EXPECT_TRUE(counter.eq(5).all().item<bool>());
          EXPECT_TRUE(frozen.eq(7).all().item<bool>());
          counter[0].fill_(group.rank() + 9);
          optimizer.broadcast_buffers();
          EXPECT_TRUE(counter.eq(9).all().item<bool>());
        },
        {.over_host = over_host});
  }
}

TEST(DeviceTest, RowsOfEightBitsAreRefused) {
  run_device_ranks(2, [](const Group& group) {
    OddModel model(1, 23, group.device());
    expect_words(error_of([&] {
                   ZeroOptimizer(*model, make_inner(Inner::kSgd, *model), group,
                                 ZeroOptions().gradient_wire(GradientWire::kBlockInt8));
                 }),
                 {"gradient_wire: expected parameters on cpu with kBlockInt8", "reduce_dtype"});
  });
}

// Over Gloo ranks share host memory, which large buffers and parameters of a device must not use.
TEST(DeviceTest, MemoryThatRanksShareIsForModelsInHostMemory) {
  for (const int64_t stage : {1, 2}) {
    run_ranks(2,
              [&](const Group& group) {
                const c10::Device device(kEmulated, static_cast<c10::DeviceIndex>(group.rank()));
                OddModel on_device(1, 1000, device), on_host(1, 1000);
                const auto train = [&](OddModel& model) {
                  ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group,
                                          ZeroOptions().stage(stage));
                  const at::Tensor x = random_tensor({3, 17}, 5 + group.rank());
                  const at::Device place = model->scale.device();
                  optimizer.backward(
                      model->loss(x.to(place), at::zeros({3, 11}, place), OddModelImpl::kAll));
                  optimizer.step();
                };
                train(on_device);
                train(on_host);
                const auto expected = on_host->parameters();
                const auto parameters = on_device->parameters();
                for (size_t i = 0; i < parameters.size(); ++i) {
                  EXPECT_EQ(parameters[i].device(), device);
                  EXPECT_TRUE(at::equal(parameters[i].detach().cpu(), expected[i].detach()))
                      << "stage " << stage << " parameter " << i;
                }
              },
              {.shared_memory = true});
  }
}

// A rank of the tests of copies: OddModel and AdamW on the group's device.
struct Copied {
  Copied(const Group& group, const ZeroOptions& options)
      : model(1, 23, group.device()),
        optimizer(std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kAdamW, *model), group,
                                                  options)),
        target(random_tensor({3, 11}, 2).to(group.device())) {
    for (uint64_t i = 0; i < 8; ++i) x.push_back(random_tensor({3, 17}, i).to(group.device()));
  }
  void step(uint64_t input) {
    optimizer->backward(model->loss(x[input], target, OddModelImpl::kAll));
    optimizer->step();
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : model->parameters()) {
      result.push_back(p.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    }
    return result;
  }

  OddModel model;
  std::unique_ptr<ZeroOptimizer> optimizer;
  std::vector<at::Tensor> x;
  at::Tensor target;
};

// What a rank has saved, without the header, which names the checkpoint.
std::string saved_bytes(const std::string& folder, int rank) {
  std::ifstream file(folder + "/rank-0000" + std::to_string(rank) + ".safetensors",
                     std::ios::binary);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  file.seekg(static_cast<std::streamoff>(header), std::ios::cur);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(DeviceTest, AnAsynchronousSaveIsOfTheMomentOfTheCallAndNoStepWaitsForIt) {
  const std::string folder = fresh_folder("device_save");
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(10));
  for (const int turn : {0, 1, 2}) {
    const bool fused = turn != 1, early = turn == 2;
    run_device_ranks(2, [&](const Group& group) {
      const auto options = ZeroOptions().bucket_bytes(1024).fused(fused);
      Copied run(group, ZeroOptions(options).skip_nonfinite(!early).update_in_backward(early));
      run.step(0);
      const auto waits = [&] { return EmulatedDevice::host_waits(group.rank()); };
      for (int save = 0; save < 2; ++save) {
        const std::string name = folder + "/" + std::to_string(3 * save + turn);
        run.optimizer->save_checkpoint(name + "-expected");
        int64_t before = waits();
        const auto pending = run.optimizer->save_checkpoint_async(name);
        // 10 ms for each of two dozen tensors.
        EXPECT_GT(EmulatedDevice::copies_under_way(group.rank()), 0);
        // For the counts of steps and the one frozen parameter of rank 0, which is hashed, and not
        // for tensors.
        EXPECT_LE(waits() - before, (fused ? 3 : 0) + (group.rank() == 0 ? 1 : 0));
        before = waits();
        for (uint64_t i = 1; i < 4; ++i) run.step(i);
        if (fused) {
          EXPECT_EQ(waits() - before, 0);
        }
        pending->finish();
        const std::string saved = saved_bytes(name, group.rank());
        EXPECT_GT(saved.size(), 1000U);
        EXPECT_TRUE(saved == saved_bytes(name + "-expected", group.rank())) << name;
      }
    });
  }
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(0));
}

TEST(DeviceTest, AnOptimizerMayEndWhileItsShardIsCopied) {
  const std::string folder = fresh_folder("device_end");
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(10));
  for (int turn = 0; turn < 2; ++turn) {
    run_device_ranks(2, [&](const Group& group) {
      auto run = std::make_unique<Copied>(group, ZeroOptions().bucket_bytes(1024).protect(1));
      run->step(0);
      const auto pending = run->optimizer->save_checkpoint_async(folder + "/save");
      run->step(1);
      run.reset();
    });
  }
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(0));
}

// The counts of updates are on the device: those of before must not come back.
TEST(DeviceTest, APlainStateReplacesTheOneThatWasThere) {
  const std::string folder = fresh_folder("device_plain_state");
  std::latch exported(2);
  run_device_ranks(2, [&](const Group& group) {
    Copied trained(group, ZeroOptions().bucket_bytes(1024));
    for (uint64_t i = 0; i < 3; ++i) trained.step(i);
    trained.optimizer->save_checkpoint(folder + "/saved");
    if (group.rank() == 0) export_optimizer_state(folder + "/saved", folder + "/state.safetensors");
    exported.arrive_and_wait();
    for (const bool used : {false, true}) {
      trained.optimizer->load_checkpoint(folder + "/saved");
      Copied other(group, ZeroOptions().bucket_bytes(1024));
      if (used) other.step(7);
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < other.model->parameters().size(); ++i) {
          other.model->parameters()[i].copy_(trained.model->parameters()[i]);
        }
      }
      other.optimizer->refresh_master_parameters();
      other.optimizer->load_plain_state(folder + "/state.safetensors");
      trained.step(3);
      other.step(3);
      const std::vector<at::Tensor> expected = trained.values(), values = other.values();
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(at::equal(values[i], expected[i])) << "parameter " << i;
      }
    }
  });
}

TEST(DeviceTest, AProtectedStepComesBackBitByBit) {
  std::latch connected(2);
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(10));
  run_device_ranks(2, [&](const Group& group) {
    Copied run(group, ZeroOptions().bucket_bytes(1024).protect(2));
    for (uint64_t i = 1; i <= 5; ++i) run.step(i);
    const std::vector<at::Tensor> expected = run.values();
    const auto own = run.optimizer->group().make_communicator("own", Purpose::kControl);
    connected.arrive_and_wait();
    own->abort("as in a test");
    const RecoveryReport report = run.optimizer->recover();
    ASSERT_TRUE(report.steps == 2 || report.steps == 4) << report.steps;
    for (auto i = static_cast<uint64_t>(report.steps) + 1; i <= 5; ++i) run.step(i);
    const std::vector<at::Tensor> values = run.values();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(at::equal(values[i], expected[i])) << "parameter " << i;
    }
  });
  EmulatedDevice::set_copy_time(std::chrono::milliseconds(0));
}

TEST(DeviceTest, AModelMayUseSeveralStreams) {
  for (const bool early : {false, true}) {
    for (const int world_size : {1, 2}) {
      const auto options = ZeroOptions().skip_nonfinite(!early).update_in_backward(early);
      std::vector<Trajectory> device(world_size), cpu(world_size);
      run_device_ranks(world_size, [&](const Group& group) {
        device[group.rank()] = train_on_streams(group, options);
      });
      run_ranks(world_size,
                [&](const Group& group) { cpu[group.rank()] = train_on_streams(group, options); });
      for (const Trajectory& t : device) EXPECT_EQ(differing_elements(t, cpu[0]), 0);
    }
  }
}

// A stream that asks second has them as well as the first.
TEST(DeviceTest, EveryStreamThatWaitsForParametersHasThem) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    run_device_ranks(2, [&](const Group& group) {
      const c10::DeviceGuard on(group.device());
      const at::Tensor weight = random_tensor({300}, 1).to(group.device()).requires_grad_();
      ZeroOptimizer optimizer(
          {{"weight", weight}},
          std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weight}, 0.1), group,
          ZeroOptions().overlap_gather(true).layout(layout));
      optimizer.backward(weight.sum());
      const c10::Stream main = current_torch_stream(group.device());
      if (group.rank() == 1) {
        emulated::enqueue(main,
                          [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
      }
      optimizer.step();
      {
        const c10::Stream side = new_stream(group.device());
        const c10::StreamGuard guard(side);
        optimizer.wait_for(weight);
      }
      optimizer.wait_for(weight);
      const at::Tensor seen = weight.detach().cpu();
      EXPECT_TRUE(at::equal(seen, optimizer.master(weight).cpu()));
    });
  }
}

TEST(DeviceTest, RowsOfStateOfAnyDtypeMoveWithTheirParameter) {
  run_device_ranks(2, [](const Group& group) {
    const c10::DeviceGuard on(group.device());
    std::vector<at::Tensor> results;
    for (const bool moves : {false, true}) {
      const at::Tensor weight = random_tensor({6, 4}, 1).to(group.device()).requires_grad_();
      ZeroOptimizer optimizer(
          {{"weight", weight}},
          std::make_unique<OwnOptimizer>(std::vector<torch::optim::OptimizerParamGroup>{{{weight}}},
                                         OwnOptions(0.01)),
          group, ZeroOptions().elementwise(true));
      for (int step = 0; step < 3; ++step) {
        optimizer.backward(weight.square().sum());
        optimizer.step();
        if (moves) optimizer.resize_rows({{weight, at::arange(5, -1, -1).to(at::kLong)}});
      }
      results.push_back(weight.detach().cpu());
    }
    EXPECT_TRUE(at::equal(results[0].flip(0), results[1]));
  });
}

// A gradient of more bytes than a queue keeps in flight, and a pass that only rank 0 runs. Rank 1
// learns of it in step(), which rank 0 calls only when it has read its loss.
TEST(DeviceTest, APassOfOneRankWaitsForNoPeer) {
  for (const int ranks_per_machine : {0, 2}) {
    for (const bool over_host : {false, true}) {
      Training training;
      training.world_size = ranks_per_machine == 0 ? 2 : 4;
      training.steps = 1;
      training.width = 60013;
      training.micro_batches = 2;
      training.runs = [](int rank, int, int micro) { return rank == 0 || micro == 0; };
      training.reads_loss = true;
      training.options = ZeroOptions().bucket_bytes(1 << 20);
      DeviceRunOptions options;
      options.ranks_per_machine = ranks_per_machine;
      options.over_host = over_host;
      options.timeout = std::chrono::seconds(20);
      EXPECT_LT(largest_difference(train_on_devices(training, options), train_reference(training)),
                1e-3)
          << ranks_per_machine << (over_host ? " over the host" : "");
    }
  }
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
