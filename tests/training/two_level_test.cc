// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Training over several machines: parameters have the bits of plain torch that adds up the
// gradients of each machine first, over every transport; and a machine sends each byte once.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/random_tensors.h"
#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Every shape in memory, and the smaller ones on the other wires: comm/two_level_exchange_test has
// more of them.
std::vector<WireCase> two_level_cases() {
  std::vector<WireCase> all = wire_cases();
  std::erase_if(all, [](const WireCase& c) {
    const bool is_large = c.world_size > (c.wire == Wire::kGloo ? 4 : 6) || c.machines() == 3;
    return !c.two_level() || (is_large && c.wire != Wire::kMemory);
  });
  return all;
}

class TwoLevelTest : public ::testing::TestWithParam<WireCase> {
 protected:
  Training training() const {
    Training t;
    t.world_size = GetParam().world_size;
    t.options.bucket_bytes(2000).fused(false);
    t.reference_in_fp32 = true;
    t.reference_ranks_per_machine = GetParam().ranks_per_machine;
    return t;
  }
  int machines() const { return GetParam().machines(); }
  bool whole() const { return GetParam().wire == Wire::kNative; }
  RunOptions run_options() const {
    return on(GetParam().wire, std::chrono::seconds(60), GetParam().ranks_per_machine);
  }
  Trajectory train(const Training& t) const { return train_on_ranks(t, run_options()); }
  void expect_reference(const Training& t) const {
    const Trajectory sharded = train(t), reference = train_reference(t);
    if (whole()) {  // The backend adds fp32 in an order of its own.
      EXPECT_LT(largest_difference(sharded, reference), 1e-5);
    } else {
      EXPECT_EQ(differing_elements(sharded, reference), 0);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Wires, TwoLevelTest, ::testing::ValuesIn(two_level_cases()),
                         [](const auto& info) { return wire_case_name(info); });

// At two machines of two ranks optimizers have both stages, elsewhere one of them in turns.
TEST_P(TwoLevelTest, BitsAreThoseOfSumsByMachine) {
  for (const Inner inner : {Inner::kSgdMomentum, Inner::kAdamW}) {
    for (const int64_t stage : {1, 2}) {
      const int64_t turn = stage + machines() + (inner == Inner::kAdamW);
      if (GetParam().world_size > 4 && turn % 2 != 0) continue;
      Training t = training();
      t.inner = inner;
      t.options.stage(stage);
      expect_reference(t);
    }
  }
}

// A layer that some ranks drop, and one that all ranks of a machine drop.
TEST_P(TwoLevelTest, DroppedLayers) {
  Training t = training();
  const int local = GetParam().ranks_per_machine;
  t.use = [local](int rank, int step, int) -> unsigned {
    if (rank < local) return OddModelImpl::kTrunk | OddModelImpl::kLeft;
    return (rank + step) % 2 == 0 ? OddModelImpl::kAll
                                  : OddModelImpl::kTrunk | OddModelImpl::kRight;
  };
  expect_reference(t);
}

TEST_P(TwoLevelTest, WithoutTwoLevelsBitsDependOnRanksAlone) {
  if (whole()) return;
  Training t = training();
  t.options.two_level(false);
  t.reference_ranks_per_machine = 0;
  expect_reference(t);
}

// Per machine G (1 - 1/H) of gradients and P (1 - 1/H) of parameters, with the padded sizes.
TEST_P(TwoLevelTest, AMachineSendsEachByteOnce) {
  struct Case {
    c10::ScalarType dtype;
    bool fp32_sums;
    int64_t sum_bytes;
  };
  for (const Case& c :
       {Case{at::kFloat, true, 4}, Case{at::kBFloat16, true, 4}, Case{at::kBFloat16, false, 2}}) {
    std::atomic<int64_t> sent = 0, padded = 0;
    run_ranks(
        GetParam().world_size,
        [&](const Group& group) {
          OddModel model(1);
          model->to(c.dtype);
          ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group,
                                  ZeroOptions().bucket_bytes(2000).fp32_machine_sums(c.fp32_sums));
          const auto step = [&] {
            optimizer.backward(model->loss(random_tensor({3, 17}, group.rank()).to(c.dtype),
                                           random_tensor({3, 11}, 9).to(c.dtype),
                                           OddModelImpl::kAll));
            optimizer.step();
          };
          step();
          const int64_t before = optimizer.stats().data.link_bytes_sent;
          step();
          const Stats after = optimizer.stats();
          if (group.topology().machine_of(group.rank()) != 0) return;
          sent += after.data.link_bytes_sent - before;
          int64_t numel = 0;
          for (const Bucket& bucket : optimizer.plan().buckets) {
            numel += optimizer.plan().bucket_numel(bucket);
          }
          padded = numel;
        },
        run_options());
    const auto others = GetParam().machines() - 1;
    const int64_t parameter_bytes = c.dtype == at::kFloat ? 4 : 2;
    // The check for non-finite values sends two doubles a rank; NCCL's way takes 2 (H-1)/H.
    const int64_t norm = GetParam().ranks_per_machine *
                         (whole() ? 2 * others * 16 / GetParam().machines() : others * 16);
    EXPECT_EQ(sent,
              padded * (c.sum_bytes + parameter_bytes) * others / GetParam().machines() + norm);
  }
}

// 16-bit gradients whose sums need more digits than they have.
TEST_P(TwoLevelTest, SumsOfAMachineAreRoundedOnRequestOnly) {
  for (const bool fp32_sums : {true, false}) {
    run_ranks(
        GetParam().world_size,
        [&](const Group& group) {
          GivenGradients model({at::zeros({300}, at::kBFloat16)});
          ZeroOptimizer optimizer(model,
                                  std::make_unique<torch::optim::SGD>(
                                      model.parameters(), torch::optim::SGDOptions(1.0)),
                                  group, ZeroOptions().fp32_machine_sums(fp32_sums));
          // 256 and 1 in turns: 257 is no bf16 number.
          const auto value_of = [](int rank) { return rank % 2 == 0 ? 256.0 : 1.0; };
          optimizer.backward(model.loss({at::full({300}, value_of(group.rank()))}));
          double expected = 0;
          for (int g = 0; g < group.topology().machines(); ++g) {
            double sum = 0;
            for (int r = 0; r < group.world_size(); ++r) {
              if (group.topology().machine_of(r) == g) sum += value_of(r);
            }
            expected += fp32_sums ? sum : at::full({}, sum, at::kBFloat16).item<double>();
          }
          optimizer.step();
          EXPECT_FLOAT_EQ(optimizer.master(model.values[0])[0].item<float>(),
                          -expected / group.world_size());
        },
        run_options());
  }
}

// Quantised where it is sent and once more as the sum of a machine: with blocks of one magnitude m
// a mean is off by at most m / 254 for each.
TEST_P(TwoLevelTest, BlockInt8IsWithinTwiceItsBound) {
  if (whole()) return;
  const int world = GetParam().world_size;
  std::vector<at::Tensor> gradients;
  for (int r = 0; r < world; ++r) gradients.push_back(random_tensor({3000}, 77 + r));
  at::Tensor mean = at::zeros({3000}, at::kDouble);
  for (const at::Tensor& g : gradients) mean += g.to(at::kDouble) / world;
  run_ranks(
      world,
      [&](const Group& group) {
        GivenGradients model({at::zeros({3000})});
        ZeroOptimizer optimizer(
            model,
            std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(1.0)),
            group, ZeroOptions().gradient_wire(GradientWire::kBlockInt8));
        optimizer.backward(model.loss({gradients[group.rank()]}));
        optimizer.step();
        const at::Tensor difference =
            (optimizer.master(model.values[0]).to(at::kDouble) + mean).abs().max();
        double largest = 0;
        for (const at::Tensor& g : gradients)
          largest = std::max(largest, g.abs().max().item<double>());
        // The sum of a machine is at most L times the largest value, and the mean divides by W.
        EXPECT_LT(difference.item<double>(), 2 * largest / 254 * 1.01);
        EXPECT_GT(difference.item<double>(), 0);
      },
      run_options());
}

}  // namespace
}  // namespace zero
