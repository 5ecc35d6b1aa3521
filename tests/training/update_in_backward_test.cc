// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::update_in_backward beside a run without it, bit by bit; what it takes, and what it
// refuses.
#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/checkpoint.h"
#include "zero/communicator.h"
#include "zero/lion.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;
using torch::optim::Optimizer;

Tensors initial_values(c10::ScalarType dtype, at::Device device = at::kCPU) {
  Tensors values{random_tensor({67, 130}, 1), random_tensor({41}, 2), random_tensor({300}, 3),
                 random_tensor({4500}, 4)};
  for (at::Tensor& v : values) v = v.to(device, dtype);
  return values;
}

// Where `some`, the second parameter has none in each third step, and the third one has one on rank
// 0 alone.
Tensors gradients(bool some, int rank, int step) {
  Tensors result;
  for (const at::Tensor& v : initial_values(at::kFloat)) {
    const auto seed = static_cast<uint64_t>(1000 * step + 10 * rank) + result.size();
    result.push_back(random_tensor(v.sizes(), seed + 50));
  }
  if (some && step % 3 == 1) result[1] = at::Tensor();
  if (some && rank > 0) result[2] = at::Tensor();
  return result;
}

enum class Class { kAdamW, kAdam, kSgd, kPlainSgd, kLion };

// Two groups; the second one has options of its own.
template <typename Inner, typename Options>
std::unique_ptr<Optimizer> in_two_groups(const Tensors& p, const Options& first, Options second) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{p[0], p[2]}, std::make_unique<Options>(first));
  groups.emplace_back(Tensors{p[1], p[3]}, std::make_unique<Options>(second));
  return std::make_unique<Inner>(groups, first);
}

std::unique_ptr<Optimizer> inner_of(Class c, const Tensors& p) {
  using namespace torch::optim;
  switch (c) {
    case Class::kAdamW:
      return in_two_groups<AdamW>(p, AdamWOptions(0.01).weight_decay(0.1),
                                  AdamWOptions(0.02).weight_decay(0));
    case Class::kAdam:
      return in_two_groups<Adam>(p, AdamOptions(0.01).amsgrad(true), AdamOptions(0.02));
    case Class::kSgd:
      return in_two_groups<SGD>(p, SGDOptions(0.1).momentum(0.9).nesterov(true),
                                SGDOptions(0.2).momentum(0.5).weight_decay(0.1));
    case Class::kPlainSgd:
      return in_two_groups<SGD>(p, SGDOptions(0.1), SGDOptions(0.2));
    case Class::kLion:
      return in_two_groups<Lion>(p, LionOptions(0.01), LionOptions(0.02));
  }
  return nullptr;
}

void set_rates(Optimizer& optimizer, int step) {
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(group.options().get_lr() * (step % 2 == 0 ? 0.5 : 1.5));
  }
}

struct Case {
  std::string name;
  Class inner = Class::kAdamW;
  c10::ScalarType dtype = at::kFloat;
  ZeroOptions options = ZeroOptions();
  bool some = true;      // parameters lack gradients
  bool by_hand = false;  // a gradient is put into p.grad() before the pass
  Wire wire = Wire::kMemory;
};

// So that a failure does not print bytes.
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

ZeroOptions small() { return ZeroOptions().bucket_bytes(4096); }

std::vector<Case> cases() {
  const auto int8 = small().moments(Moments::kInt8);
  return {
      {.name = "AdamW", .options = small()},
      {.name = "SumThroughCollectives",
       .options = small().reduction(Reduction::kSum),
       .wire = Wire::kNative},
      {.name = "ByHand", .options = small(), .by_hand = true},
      {.name = "Adam", .inner = Class::kAdam, .dtype = at::kBFloat16, .options = small()},
      {.name = "Sgd", .inner = Class::kSgd, .options = small(), .wire = Wire::kShared},
      {.name = "PlainSgdOfHalf", .inner = Class::kPlainSgd, .dtype = at::kHalf, .options = small()},
      {.name = "Lion", .inner = Class::kLion, .dtype = at::kBFloat16, .options = small()},
      {.name = "PerParameter",
       .options = small().layout(Layout::kPerParameter),
       .wire = Wire::kShared},
      {.name = "PerParameterOfBFloat16",
       .inner = Class::kSgd,
       .dtype = at::kBFloat16,
       .options = small().layout(Layout::kPerParameter)},
      {.name = "WholeParameters", .options = small().layout(Layout::kWholeParameters)},
      {.name = "StageOne", .dtype = at::kBFloat16, .options = small().stage(1)},
      {.name = "SplitMasters",
       .dtype = at::kBFloat16,
       .options = small().split_masters(true).ema(EmaOptions())},
      {.name = "Average", .options = small().ema(EmaOptions().decay(0.7))},
      {.name = "MomentsInEightBits", .dtype = at::kBFloat16, .options = int8},
      {.name = "MomentsInBFloat16",
       .inner = Class::kLion,
       .options = small().moments(Moments::kBFloat16)},
      {.name = "StaticGraphWithAll",
       .dtype = at::kBFloat16,
       .options =
           ZeroOptions(int8).static_graph(true).split_masters(true).ema(EmaOptions()).stage(1),
       .some = false},
      {.name = "StaticGraph", .options = small().static_graph(true), .some = false},
      {.name = "OverlapGather", .options = small().overlap_gather(true)},
      {.name = "OverlapGatherPerParameter",
       .dtype = at::kBFloat16,
       .options = small().overlap_gather(true).layout(Layout::kPerParameter)},
      {.name = "GradientShardsInBFloat16",
       .dtype = at::kBFloat16,
       .options = small().gradient_shard_dtype(at::kBFloat16),
       .wire = Wire::kGloo},
      {.name = "OneBucket"},
  };
}

ZeroOptions without(const ZeroOptions& options) {
  return ZeroOptions(options).skip_nonfinite(false);
}
ZeroOptions with(const ZeroOptions& options) { return without(options).update_in_backward(true); }

struct TestRun {
  TestRun(const Group& group, const Case& given, const ZeroOptions& options)
      : c(given),
        rank(group.rank()),
        model(initial_values(c.dtype, group.device())),
        optimizer(model, inner_of(c.inner, model.values), group, options) {}

  at::Tensor loss(int step) {
    optimizer.wait_for(model);
    Tensors given = gradients(c.some, rank, step);
    for (at::Tensor& g : given) {
      if (g.defined()) g = g.to(model.values[0].device());
    }
    if (c.by_hand) {
      const auto put = [&](size_t p, const at::Tensor& g) {
        model.values[p].mutable_grad() = g.to(c.dtype);
      };
      put(0, given[0] * 0.5);
      given[0] = given[0] * 0.5;
      if (given[1].defined()) put(1, std::exchange(given[1], at::Tensor()));
    }
    return model.loss(given);
  }
  void backward(int step) { optimizer.backward(loss(step)); }
  void step(int number) {
    set_rates(optimizer, number);
    backward(number);
    optimizer.step();
  }
  // Collective. All that a step may change.
  Tensors everything() { return all_bits(model, optimizer); }

  const Case c;
  const int rank;
  GivenGradients model;
  ZeroOptimizer optimizer;
};

class UpdateInBackward : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Of, UpdateInBackward, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

void expect_the_bits_of_a_run_without(const Case& c, const Group& group, int steps) {
  TestRun updated(group, c, with(c.options)), stepped(group, c, without(c.options));
  for (int n = 0; n < steps; ++n) {
    SCOPED_TRACE(::testing::Message() << group.world_size() << " ranks, step " << n);
    updated.step(n);
    stepped.step(n);
    EXPECT_TRUE(same_bits(updated.everything(), stepped.everything()));
    EXPECT_EQ(updated.optimizer.stats().steps, n + 1);
  }
}

// Numbers of ranks and devices are taken in turns, by the place of a case among all: those at every
// fourth place, which have one rank on a device, do what others do too. The long test has all.
bool is_turn(const Case& c, size_t number, size_t of) {
  if (std::getenv("ZERO_COMBINATIONS") != nullptr) return true;
  const auto all = cases();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Case& other) { return other.name == c.name; });
  return static_cast<size_t>(found - all.begin()) % of == number;
}

TEST_P(UpdateInBackward, HasTheBitsOfARunWithout) {
  for (const int world_size : {1, 2, 3, 4}) {
    if (!is_turn(GetParam(), static_cast<size_t>(world_size) % 2, 2)) continue;
    run_ranks(
        world_size,
        [&](const Group& group) { expect_the_bits_of_a_run_without(GetParam(), group, 4); },
        on(GetParam().wire));
  }
}

TEST_P(UpdateInBackward, HasTheBitsOfARunWithoutOnADevice) {
  const auto run = [&](int world_size, DeviceRunOptions options) {
    SCOPED_TRACE(::testing::Message() << options.ranks_per_machine << options.over_host);
    options.room = 2;  // of two optimizers
    run_device_ranks(
        world_size,
        [&](const Group& group) { expect_the_bits_of_a_run_without(GetParam(), group, 3); },
        options);
  };
  if (is_turn(GetParam(), 0, 4)) run(1, {});
  if (is_turn(GetParam(), 1, 4)) run(2, {});
  if (is_turn(GetParam(), 2, 4)) run(3, {.over_host = true});
  if (is_turn(GetParam(), 3, 4)) run(4, {.ranks_per_machine = 2});
}

// Branches that ranks use or not, shared weights, frozen layers and some that are never used.
TEST(UpdateInBackwardTest, OfAModelIsThePlainRun) {
  for (const int world_size : {1, 2, 3, 4}) {
    SCOPED_TRACE(::testing::Message() << world_size << " ranks");
    const auto buckets = ZeroOptions().bucket_bytes(700).layout(
        world_size % 2 == 0 ? Layout::kContiguous : Layout::kPerParameter);
    Training t;
    t.world_size = world_size;
    t.steps = 6;
    t.reference_in_fp32 = true;
    t.options = with(buckets);
    t.use = [](int rank, int step, int) -> unsigned {
      if (step == 3) return OddModelImpl::kTrunk;
      if ((rank + step) % 3 == 1) return OddModelImpl::kTrunk | OddModelImpl::kLeft;
      return OddModelImpl::kAll | (step == 2 ? OddModelImpl::kLeftAgain : 0U);
    };
    const Trajectory sharded = train_on_ranks(t);
    EXPECT_LE(largest_difference(sharded, train_reference(t)), 1e-5);
    t.options = without(buckets);
    EXPECT_EQ(differing_elements(sharded, train_on_ranks(t)), 0);
  }
}

// Changes of parameters make everything anew.
TEST(UpdateInBackwardTest, GoesOnWhereParametersAreFrozenAndTrainedAgain) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const Case c{.name = "", .options = small()};
      TestRun updated(group, c, with(c.options)), stepped(group, c, without(c.options));
      for (int n = 0; n < 6; ++n) {
        for (TestRun* run : {&updated, &stepped}) {
          if (n == 2) run->optimizer.freeze({run->model.values[0]});
          if (n == 4) run->optimizer.unfreeze({run->model.values[0]});
          set_rates(run->optimizer, n);
          run->optimizer.backward(run->model.loss(gradients(c.some, group.rank(), n)));
          run->optimizer.step();
          const Tensors& values = run->model.values;
          EXPECT_EQ(values[0].requires_grad(), n < 2 || n >= 4);
        }
        for (size_t p = 0; p < updated.model.values.size(); ++p) {
          EXPECT_TRUE(at::equal(updated.model.values[p], stepped.model.values[p])) << p;
        }
      }
    });
  }
}

// --- Memory

std::atomic<int64_t> live_bytes{0};

// Counts what is allocated and not freed, of all ranks, which are threads.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& real) : real_(real) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{real_.allocate(bytes), static_cast<int64_t>(bytes)};
    live_bytes += block->bytes;
    return {block->data.get(), block, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    real_.copy_data(to, from, bytes);
  }

 private:
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
  };
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes -= block->bytes;
    delete block;
  }

  c10::Allocator& real_;
};

void count_allocations() {
  static CountingAllocator counting(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(&counting, /*priority=*/255);
}

constexpr int64_t kBuckets = 40;  // of a parameter each

struct Held {
  int64_t between_steps = 0;  // by the allocator
  MemoryReport report;
  MemoryReport expected;
};

Held held(const Group& group, bool in_backward, int64_t elements,
          c10::ScalarType shards = at::kFloat) {
  const int64_t before = live_bytes;
  Held result;
  Tensors values;
  const auto on_device = at::TensorOptions(group.device());
  for (int64_t i = 0; i < kBuckets; ++i) {
    values.push_back(at::zeros({elements}, on_device.dtype(at::kBFloat16)));
  }
  GivenGradients model(values);
  values.clear();
  const ZeroOptions options = ZeroOptions().bucket_bytes(2 * elements).gradient_shard_dtype(shards);
  ZeroOptimizer optimizer(
      model,
      std::make_unique<torch::optim::SGD>(model.values, torch::optim::SGDOptions(1).momentum(0.9)),
      group, in_backward ? with(options) : without(options));
  EXPECT_EQ(optimizer.plan().buckets.size(), kBuckets);
  for (int n = 0; n < 3; ++n) {
    optimizer.backward(model.loss(Tensors(kBuckets, at::full({elements}, 0.5, on_device))));
    optimizer.step();
  }
  result.between_steps = live_bytes - before;
  result.report = optimizer.memory();
  const auto momentum = [](int64_t numel, int64_t) {
    return moment_bytes(Moments::kFloat32, numel);
  };
  result.expected = expected_memory(
      optimizer.plan(), group.rank(),
      {.state_bytes = momentum, .gradient_shard_dtype = shards, .update_in_backward = in_backward});
  return result;
}

int64_t without_buckets(const MemoryReport& report) { return report.total() - report.buckets; }

TEST(UpdateInBackwardTest, KeepsTheShardsOfAFewBuckets) {
  count_allocations();
  run_ranks(1, [](const Group& group) {
    constexpr int64_t kElements = 24 * 1024;
    const Held updated = held(group, true, kElements), stepped = held(group, false, kElements);
    const Held halves = held(group, false, kElements, at::kBFloat16);
    const double saved = 4.0 * kBuckets * kElements;
    EXPECT_GE(static_cast<double>(stepped.between_steps - updated.between_steps), 0.9 * saved);
    EXPECT_GE(static_cast<double>(stepped.between_steps - halves.between_steps), 0.45 * saved);
    for (const Held& h : {updated, stepped, halves}) {
      EXPECT_EQ(without_buckets(h.report), without_buckets(h.expected));
      EXPECT_NEAR(static_cast<double>(h.report.total()), static_cast<double>(h.between_steps),
                  0.01 * static_cast<double>(h.between_steps));
    }
    // One rank alone reduces a bucket where it sends it.
    EXPECT_LE(updated.report.peak_buckets, stepped.report.peak_buckets + 2 * 4 * kElements);
  });
  run_ranks(3, [](const Group& group) {
    constexpr int64_t kElements = 512 * 1024;
    const Held updated = held(group, true, kElements), stepped = held(group, false, kElements);
    for (const Held& h : {updated, stepped}) {
      EXPECT_EQ(without_buckets(h.report), without_buckets(h.expected));
    }
    EXPECT_EQ(updated.report.gradient_shards, 0);
    const int64_t row = 4 * kElements / 3;
    EXPECT_GE(stepped.report.gradient_shards, kBuckets * row);
    // Buckets of 1 MiB: eight are under way and two wait, in both directions;
    // and some padding.
    EXPECT_LE(updated.report.buckets, 20 * 2 * kElements + 11 * row);
  });
}

const Case kUsual{.name = "", .options = small(), .some = false};

// --- On a device, which is emulated

TEST(UpdateInBackwardTest, OnADeviceNoShardsAreKept) {
  for (const int world_size : {1, 2}) {
    run_device_ranks(world_size, [](const Group& group) {
      const Held updated = held(group, true, 16 * 1024);
      EXPECT_EQ(updated.report.gradient_shards, 0);
      EXPECT_EQ(without_buckets(updated.report), without_buckets(updated.expected));
    });
  }
}

TEST(UpdateInBackwardTest, OnADeviceNoPassOrStepWaitsForTheDeviceOrForARankWithoutAPass) {
  run_device_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    for (int n = 0; n < 4; ++n) {
      const at::Tensor loss = run.loss(n);
      const int64_t before = EmulatedDevice::host_waits(group.rank());
      // Rank 1 learns of the pass in step().
      if (group.rank() == 0 || n % 2 == 0) run.optimizer.backward(loss);
      run.optimizer.step();
      const int64_t waits = EmulatedDevice::host_waits(group.rank()) - before;
      EXPECT_EQ(n == 0 ? 0 : waits, 0) << n;
    }
  });
}

// --- Misuse

void expect_refused(const std::function<void()>& call, const std::vector<std::string>& words) {
  expect_words(error_of(call), words);
}

TEST(UpdateInBackwardTest, OptionsThatNeedTheWholeGradientAreRefused) {
  run_ranks(2, [](const Group& group) {
    const ZeroOptions good = with(small());
    const auto refused = [&](const ZeroOptions& options, const std::string& expected) {
      expect_refused([&] { TestRun run(group, kUsual, options); },
                     {"update_in_backward: expected " + expected, "or update_in_backward(false)"});
    };
    refused(ZeroOptions(good).skip_nonfinite(true), "skip_nonfinite(false), since");
    refused(ZeroOptions(good).loss_scaler(LossScalerOptions()), "no loss_scaler, since");
    refused(ZeroOptions(good).skip_if(std::make_shared<OutlierRule>()), "no skip_if, since");
    refused(ZeroOptions(good).micro_batches(2), "micro_batches(0), since");
    refused(ZeroOptions(good).gather_wire(GatherWire::kChanges), "gather_wire(GatherWire::kWhole)");
    const auto copies = GroupPlacement()
                            .sharded_over(group.subgroup({group.rank()}, "own"))
                            .replicated_over(group.subgroup({0, 1}, "copies"));
    refused(ZeroOptions(good).placement(1, copies), "no placement with replicated_over, since");
    refused(ZeroOptions(good).fused(false), "a fused kernel for parameter value0, since");
    expect_refused(
        [&] {
          GivenGradients model(initial_values(at::kFloat));
          ZeroOptimizer optimizer(model, std::make_unique<torch::optim::RMSprop>(model.values, 0.1),
                                  group, good);
        },
        {"a fused kernel for parameter value0"});
    TestRun run(group, kUsual, good);  // the group works still
    run.step(0);
  });
}

TEST(UpdateInBackwardTest, CallsThatReadOrDropGradientsAreRefusedAndLoseNothing) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    ZeroOptimizer& o = run.optimizer;
    expect_refused([&] { const auto guard = o.no_sync(); },
                   {"no_sync with update_in_backward(true)"});
    expect_refused([&] { o.step(); }, {"no_sync with"});  // all ranks hear of it
    o.zero_grad();                                        // nothing is there to drop
    run.backward(0);
    expect_refused([&] { o.clip_grad_norm_(1.0); }, {"no call that reads or clips gradients"});
    expect_refused([&] { o.grad_norm(); }, {"no call that reads or clips gradients"});
    expect_refused([&] { o.clip_grad_value_(1.0); }, {"no call that reads or clips gradients"});
    expect_refused([&] { o.reduce_gradients(); }, {"no call that reads or clips gradients"});
    expect_refused([&] { o.gradient(run.model.values[0]); }, {"reads or clips gradients"});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { o.zero_grad(); }, [&] { o.master(run.model.values[0]); },
             [&] { o.refresh_master_parameters(); }, [&] { o.check_replicas(); },
             [&] { o.save_checkpoint("never-written"); },
             [&] { const auto guard = o.use_ema(); }}) {
      expect_refused(call, {"expected step() after backward() with update_in_backward(true)"});
    }
    const at::Tensor loss = run.model.loss(gradients(false, group.rank(), 1));
    expect_refused([&] { o.backward(loss); }, {"expected step() after each backward pass"});
    expect_refused([&] { o.step(); }, {"expected step() after each backward pass"});
    o.step();
    other.backward(0);
    other.optimizer.step();
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
  });
}

TEST(UpdateInBackwardTest, OptionsThatChangeBetweenBackwardAndStepAreRefused) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    run.backward(0);
    auto& options = run.optimizer.param_groups()[1].options();
    const double rate = options.get_lr();
    options.set_lr(2 * rate);
    for (int i = 0; i < 2; ++i) {
      expect_refused([&] { run.optimizer.step(); }, {"expected the options that backward()"});
    }
    options.set_lr(rate);
    run.optimizer.step();
    other.backward(0);
    other.optimizer.step();
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
  });
}

TEST(UpdateInBackwardTest, AGradientByHandAfterThePassIsRefused) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    Tensors given = gradients(false, group.rank(), 0);
    given[1] = at::Tensor();
    run.optimizer.backward(run.model.loss(given));
    run.model.values[1].mutable_grad() = at::ones({41});
    expect_refused([&] { run.optimizer.step(); }, {"gradients in p.grad() before backward()"});
    run.model.values[1].mutable_grad().reset();
    run.optimizer.step();
    run.step(1);
  });
}

// Masters of bf16 parameters are not what the graph has; those of fp32 are, and a graph that saved
// one throws in every run, whether its bucket was updated already or not.
TEST(UpdateInBackwardTest, AGraphThatStillNeedsAnOldValueThrows) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    run_ranks(1, [](const Group& group) {
      TestRun run(group, kUsual, with(small()));
      const at::Tensor& first = run.model.values[1];
      const at::Tensor& last = run.model.values[3];
      // Backward comes to what is used last first.
      const at::Tensor saved = (first * last.detach().narrow(0, 0, 41)).sum();
      const at::Tensor loss = saved + (last * 2).sum();
      expect_refused([&] { run.optimizer.backward(loss); }, {"modified by an inplace operation"});
      expect_refused([&] { run.optimizer.step(); },
                     {"some parameters may be updated already", "modified by an inplace"});
    });
  }
}

// Such as the generator's of a GAN, which reaches the discriminator.
TEST(UpdateInBackwardTest, GradientsOfOtherPassesAreRefusedAndUpdateNothing) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    const at::Tensor loss = run.model.loss(gradients(false, group.rank(), 0));
    expect_refused([&] { loss.backward(); }, {"a gradient outside of backward()",
                                              "requires_grad_(false)", "one optimizer of"});
    expect_refused([&] { run.optimizer.step(); }, {"a gradient outside of backward()"});
    run.model.zero_grad();
    run.step(0);
    other.step(0);
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
  });
}

TEST(UpdateInBackwardTest, GradientsByHandAreUpdatedByNoCallButStep) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    for (TestRun* r : {&run, &other}) {
      for (at::Tensor& value : r->model.values) value.mutable_grad() = at::ones_like(value);
    }
    for (const auto& call :
         std::vector<std::function<void()>>{[&] { run.optimizer.refresh_master_parameters(); },
                                            [&] { run.optimizer.broadcast_buffers(); },
                                            [&] { run.optimizer.master(run.model.values[0]); }}) {
      expect_refused(call, {"expected step() after backward() with update_in_backward(true)"});
    }
    run.optimizer.step();
    other.optimizer.step();
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
    // Nor is it an update to drop them, where a call has refused them too.
    for (TestRun* r : {&run, &other}) {
      for (at::Tensor& value : r->model.values) value.mutable_grad() = at::ones_like(value);
    }
    const int64_t rounds = run.optimizer.stats().rounds;
    expect_refused([&] { run.optimizer.broadcast_buffers(); }, {"or zero_grad()"});
    for (TestRun* r : {&run, &other}) r->optimizer.zero_grad();
    EXPECT_EQ(run.optimizer.stats().rounds, rounds);
    EXPECT_FALSE(run.model.values[0].grad().defined());
    for (TestRun* r : {&run, &other}) r->step(1);
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
  });
}

// As a program does that keeps their moments.
TEST(UpdateInBackwardTest, AParameterMayRequireNoGradientInThePass) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    for (int step = 0; step < 3; ++step) {
      for (TestRun* r : {&run, &other}) {
        for (const size_t p : {0, 1}) r->model.values[p].requires_grad_(step != 1);
        r->backward(step);
        for (const size_t p : {0, 1}) r->model.values[p].requires_grad_(true);
        r->optimizer.step();
      }
      EXPECT_TRUE(same_bits(run.everything(), other.everything())) << step;
    }
  });
}

// Without the option step() sees them, and nothing is lost.
TEST(UpdateInBackwardTest, ValuesThatAProgramWroteAreSeenBeforeTheFirstUpdate) {
  run_ranks(2, [](const Group& group) {
    const Case c{.name = "", .dtype = at::kBFloat16, .options = small()};
    TestRun run(group, c, with(c.options));
    run.step(0);
    {
      const at::NoGradGuard no_grad;
      run.model.values[0].fill_(0.5);
    }
    expect_refused([&] { run.backward(1); }, {"refresh_master_parameters()"});
    expect_refused([&] { run.optimizer.refresh_master_parameters(); }, {"refresh_master"});
    run.optimizer.refresh_master_parameters();
    EXPECT_TRUE(run.optimizer.master(run.model.values[0]).eq(0.5).all().item<bool>());
    run.step(1);
  });
}

// Without the option step() sees them, and nothing is lost.
TEST(UpdateInBackwardTest, WrongGroupsAreSeenBeforeTheFirstUpdate) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small())), other(group, kUsual, without(small()));
    auto& groups = run.optimizer.param_groups();
    auto& inner = const_cast<torch::optim::Optimizer&>(run.optimizer.inner()).param_groups();
    const auto refused = [&](const std::string& words) {
      const at::Tensor loss = run.loss(0);
      expect_refused([&] { run.optimizer.backward(loss); }, {words});
      expect_refused([&] { run.optimizer.step(); }, {words});
    };
    static_cast<torch::optim::Optimizer&>(run.optimizer).add_parameters({at::ones({2})});
    refused("parameter group 0: expected the");
    groups[0].params().pop_back();
    const auto options = groups[0].options().clone();
    groups[0].set_options(std::make_unique<torch::optim::RMSpropOptions>(0.1));
    refused("expected options of class");
    groups[0].set_options(options->clone());
    const double rate = inner[0].options().get_lr();
    inner[0].options().set_lr(2 * rate);  // as a scheduler of it does
    refused("expected the inner optimizer's options as they were pushed");
    inner[0].options().set_lr(rate);
    run.step(0);
    other.step(0);
    EXPECT_TRUE(same_bits(run.everything(), other.everything()));
  });
}

TEST(UpdateInBackwardTest, APassWithoutGradientsMayBeDropped) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    const at::Tensor none = at::ones({}, at::TensorOptions().requires_grad(true));
    run.optimizer.backward(none * 2);
    run.optimizer.zero_grad();
    run.step(0);
  });
}

TEST(UpdateInBackwardTest, UnderInferenceModeMomentsAreMadeToLast) {
  run_ranks(1, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    const at::Tensor loss = run.model.loss(gradients(false, 0, 0));
    {
      const c10::InferenceMode mode;
      const at::AutoGradMode grad(true);
      run.optimizer.backward(loss);
    }
    run.optimizer.step();
    for (const auto& [key, state] : run.optimizer.inner().state()) {
      const auto& adamw = static_cast<const torch::optim::AdamWParamState&>(*state);
      EXPECT_FALSE(adamw.exp_avg().is_inference());
    }
  });
}

TEST(UpdateInBackwardTest, ASecondGradientInAPassEndsTheOptimizer) {
  run_ranks(1, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    const at::Tensor loss = run.model.loss(gradients(false, 0, 0));
    loss.register_hook([&](const at::Tensor& gradient) {
      const at::AutoGradMode records(true);
      run.model.loss(gradients(false, 0, 1)).backward();
      return gradient;
    });
    expect_refused([&] { run.optimizer.backward(loss); },
                   {"expected one gradient and one backward pass"});
    expect_refused([&] { run.optimizer.step(); }, {"expected one gradient and one backward pass"});
    expect_refused([&] { run.optimizer.zero_grad(); }, {"expected one gradient and one"});
  });
}

TEST(UpdateInBackwardTest, AZeroGradOfTheModuleBeforeTheStepIsRefused) {
  run_ranks(2, [](const Group& group) {
    TestRun run(group, kUsual, with(small()));
    run.model.zero_grad();  // before the pass it does nothing
    run.step(0);
    run.backward(1);
    run.model.zero_grad();
    expect_refused([&] { run.optimizer.step(); },
                   {"zero_grad() of the module", "expected step() next"});
  });
}

// --- Failures and readers of the shard

TEST(UpdateInBackwardTest, AFailedPassIsAFailureOfAllRanksAndRecoverGoesOn) {
  run_ranks(2, [](const Group& group) {
    Training training;
    training.options = with(ZeroOptions().bucket_bytes(900).protect(1));
    CheckpointRun run(training, group, 1);
    run.train(0, 3);
    const Snapshot before = run.snapshot();
    bool throws = group.rank() == 1;
    // The first layer, which backward comes to last.
    run.model->trunk->weight.register_hook([&](const at::Tensor&) {
      if (throws) TORCH_CHECK(false, "no more sugar");
    });
    expect_refused([&] { run.train(3, 4); }, {group.rank() == 1 ? "no more sugar" : "rank 1"});
    expect_refused([&] { run.optimizer->step(); }, {"expected a working optimizer"});
    throws = false;
    EXPECT_EQ(run.optimizer->recover().steps, 3);
    {
      at::NoGradGuard no_grad;
      run.model->counter.add_(1);  // what run.train() does after step()
    }
    EXPECT_EQ(differing(before, run.snapshot()), 0);
    run.train(3, 5);
  });
}

// Sums and updates of the pass are on their streams still when the memory of the shard is given up.
TEST(UpdateInBackwardTest, OnADeviceRecoverIsBehindTheUpdatesOfTheLastPass) {
  std::latch connected(2), passed(2);
  std::vector<std::string> violations;  // rank 1 does not make the calls of the last pass
  run_device_ranks(
      2,
      [&](const Group& group) {
        TestRun run(group, kUsual, with(small()).protect(1)), other(group, kUsual, with(small()));
        for (int n = 0; n < 3; ++n) {
          run.step(n);
          other.step(n);
        }
        const auto own = run.optimizer.group().make_communicator("own", Purpose::kControl);
        connected.arrive_and_wait();
        // Its sums wait for the other rank until the recovery ends them.
        if (group.rank() == 0) run.backward(3);
        passed.arrive_and_wait();
        own->abort("as in a test");
        EXPECT_EQ(run.optimizer.recover().steps, 3);
        for (int n = 3; n < 5; ++n) {
          run.step(n);
          other.step(n);
        }
        EXPECT_TRUE(same_bits(run.everything(), other.everything()));
      },
      {.room = 2, .violations = &violations});
  for (const std::string& violation : violations) EXPECT_EQ(violation.find("same calls:"), 0U);
}

// One whose gradients were reset since the pass, and one whose ranks updated with other options.
TEST(UpdateInBackwardTest, RecoverGoesOnFromAStepThatCannotBeMade) {
  for (const bool reset : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      Training training;
      training.options = with(ZeroOptions().bucket_bytes(900).protect(1));
      CheckpointRun run(training, group, 1);
      run.train(0, 3);
      const Snapshot before = run.snapshot();
      auto& options = run.optimizer->param_groups()[0].options();
      if (!reset && group.rank() == 1) options.set_lr(2 * options.get_lr());
      run.optimizer->backward(
          run.model->loss(at::ones({3, 17}), at::zeros({3, 11}), OddModelImpl::kAll));
      if (reset) run.model->zero_grad();
      for (int i = 0; i < 2; ++i) {
        expect_refused([&] { run.optimizer->step(); }, {reset ? "expected step() next" : "lr"});
      }
      EXPECT_EQ(run.optimizer->recover().steps, 3);
      {
        at::NoGradGuard no_grad;
        run.model->counter.add_(1);  // what run.train() does after step()
      }
      EXPECT_EQ(differing(before, run.snapshot()), 0);
      run.train(3, 5);
    });
  }
}

// The copy of an asynchronous save has the shard of its step, whatever the next pass updates. It
// comes last to the bucket that a pass comes to first.
TEST(UpdateInBackwardTest, WaitsForTheCopiesOfASave) {
  run_ranks(1, [](const Group& group) {
    constexpr int64_t kLarge = 4 << 20, kOfABucket = 16 << 10;
    const std::string folder = ::testing::TempDir() + "update_in_backward";
    GivenGradients model({at::ones({kLarge}), at::ones({kOfABucket})});
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::AdamW>(model.values, 0.1), group,
                            with(ZeroOptions().bucket_bytes(4 * kOfABucket)));
    optimizer.backward(model.loss({at::ones({kLarge}), at::ones({kOfABucket})}));
    optimizer.step();
    const at::Tensor saved = model.values[1].detach().clone();
    const auto pending = optimizer.save_checkpoint_async(folder, SaveOptions().overwrite(true));
    optimizer.backward(model.loss({at::Tensor(), at::ones({kOfABucket})}));
    optimizer.step();
    pending->finish();
    const at::Tensor later = model.values[1].detach().clone();
    EXPECT_FALSE(at::equal(saved, later));
    optimizer.load_checkpoint(folder);
    EXPECT_TRUE(at::equal(model.values[1], saved));
    optimizer.backward(model.loss({at::Tensor(), at::ones({kOfABucket})}));
    optimizer.step();
    EXPECT_TRUE(at::equal(model.values[1], later));
  });
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
