// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// GatherWire::kChanges: parameters have the bits of plain torch and of whole rows, after every
// step, and links carry less; ranks that were changed apart throw.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>
#include <limits>
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

std::vector<WireCase> cases() {
  std::vector<WireCase> all{{Wire::kMemory, 2, 1}, {Wire::kMemory, 3, 1}};
  for (const Wire wire : {Wire::kMemory, Wire::kGloo, Wire::kShared, Wire::kNative}) {
    all.push_back({wire, 4, 2});
  }
  return all;
}

class GatherWireTest : public ::testing::TestWithParam<WireCase> {
 protected:
  Training training() const {
    const WireCase& c = GetParam();
    Training t;
    t.world_size = c.world_size;
    t.options.bucket_bytes(2000).fused(false).gather_wire(GatherWire::kChanges);
    t.reference_in_fp32 = true;
    t.reference_ranks_per_machine = c.ranks_per_machine > 1 ? c.ranks_per_machine : 0;
    return t;
  }
  RunOptions run_options() const {
    return on(GetParam().wire, std::chrono::seconds(60), GetParam().ranks_per_machine);
  }
  Trajectory train(const Training& t) const { return train_on_ranks(t, run_options()); }
  void expect_bits_of_whole_rows(Training t) const {
    const Trajectory changes = train(t);
    t.options.gather_wire(GatherWire::kWhole);
    EXPECT_EQ(differing_elements(changes, train(t)), 0);
  }
  // NCCL and its stand-in send rows whole, and add fp32 in an order of their own.
  bool native() const { return GetParam().wire == Wire::kNative; }
};

INSTANTIATE_TEST_SUITE_P(Wires, GatherWireTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return wire_case_name(info); });

TEST_P(GatherWireTest, BitsAreThoseOfPlainTorch) {
  for (const Inner inner : {Inner::kSgdMomentum, Inner::kAdamW}) {
    for (const int64_t stage : {1, 2}) {
      Training t = training();
      t.inner = inner;
      t.options.stage(stage);
      if (native()) {
        EXPECT_LT(largest_difference(train(t), train_reference(t)), 1e-5);
      } else {
        EXPECT_EQ(differing_elements(train(t), train_reference(t)), 0);
      }
    }
  }
}

TEST_P(GatherWireTest, BitsAreThoseOfWholeRows) {
  if (native()) return;
  for (const bool fused : {true, false}) {
    Training t = training();
    t.dtype = fused ? at::kFloat : at::kBFloat16;
    t.options.fused(fused).overlap_gather(fused);
    t.max_norm = 0.5;
    expect_bits_of_whole_rows(t);
  }
  Training muon = training();
  muon.dtype = at::kBFloat16;
  muon.inner = Inner::kMuon;
  expect_bits_of_whole_rows(muon);
  // Some ranks that exchange with each other share a machine, and others do not.
  Training flat = training();
  flat.options.two_level(false);
  expect_bits_of_whole_rows(flat);
  Training copied = training();
  copied.options.layout(Layout::kPerParameter);
  expect_bits_of_whole_rows(copied);
}

at::Tensor normal(int64_t n, int seed) { return random_tensor({n}, seed); }

std::unique_ptr<torch::optim::SGD> sgd(const GivenGradients& model, double lr) {
  return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(lr));
}

// Also after a step that was skipped, and where everything is set anew in between.
TEST_P(GatherWireTest, LinksCarryLessAndValuesAreThoseOfOneProcess) {
  if (native()) return;
  const int64_t n = 30000;
  std::atomic<int64_t> whole_bytes = 0, changes_bytes = 0;
  for (const auto& [wire, static_graph] : {std::pair{GatherWire::kWhole, false},
                                           {GatherWire::kChanges, false},
                                           {GatherWire::kWhole, true},
                                           {GatherWire::kChanges, true}}) {
    run_ranks(
        GetParam().world_size,
        [&, wire = wire, static_graph = static_graph](const Group& group) {
          GivenGradients model({normal(n, 5) * 0.02});
          ZeroOptimizer optimizer(
              model, sgd(model, 1.0), group,
              ZeroOptions().bucket_bytes(40000).static_graph(static_graph).gather_wire(wire));
          at::Tensor expected = model.values[0].detach().clone();
          const auto step = [&](const at::Tensor& gradient) {
            optimizer.backward(model.loss({gradient}));
            optimizer.step();
          };
          const auto expect_values = [&](const char* what) {
            ASSERT_TRUE(model.values[0].detach().equal(expected)) << what;
          };
          for (int i = 0; i < 3; ++i) {
            const at::Tensor gradient = 1e-4 * normal(n, 70 + i);
            const int64_t before = optimizer.stats().data.gather_bytes_sent;
            step(gradient);
            (wire == GatherWire::kWhole ? whole_bytes : changes_bytes) +=
                optimizer.stats().data.gather_bytes_sent - before;
            expected -= gradient;
            // Sums of equal gradients of 3 ranks round.
            if (GetParam().world_size % 2 == 1) expected = model.values[0].detach().clone();
            expect_values("step");
          }
          step(at::full({n}, std::numeric_limits<float>::infinity()));
          EXPECT_TRUE(optimizer.step_skipped());
          expect_values("skipped step");
          {
            const at::NoGradGuard no_grad;
            model.values[0].mul_(-3);
          }
          optimizer.refresh_master_parameters();
          expected.mul_(-3);
          expect_values("refreshed");
          step(at::ones({n}));
          expected -= 1;
          expect_values("step after a refresh");
          optimizer.check_replicas();
        },
        run_options());
  }
  // Ranks that share memory pass on whole messages.
  if (GetParam().wire == Wire::kShared) return;
  if (GetParam().world_size == 2) {
    EXPECT_LT(changes_bytes, whole_bytes * 6 / 10);
  } else {
    EXPECT_LT(changes_bytes, whole_bytes);
  }
  EXPECT_GT(changes_bytes, 0);
}

// With whole rows, what the owner has comes back; here the ranks would differ for good.
TEST_P(GatherWireTest, ParametersThatOneRankChangedBehindTheOptimizersBackAreAnError) {
  if (native() || GetParam().world_size != 2) return;
  for (const GatherWire wire : {GatherWire::kWhole, GatherWire::kChanges}) {
    run_ranks(
        2,
        [&](const Group& group) {
          const int64_t n = 3000;
          GivenGradients model({normal(n, 5)});
          ZeroOptimizer optimizer(model, sgd(model, 1e-3), group, ZeroOptions().gather_wire(wire));
          const auto step = [&] {
            optimizer.backward(model.loss({at::ones({n})}));
            optimizer.step();
          };
          step();
          // Rank 1's part of the parameter, changed on rank 0.
          if (group.rank() == 0) model.values[0].mutable_data_ptr<float>()[n - 1] += 1;
          const std::string text = error_of(step);
          if (wire == GatherWire::kWhole) {
            EXPECT_EQ(text, "");
            optimizer.check_replicas();
          } else if (group.rank() == 0) {
            expect_words(text, {"rank 1 sends what has changed", "differ", "check_replicas()",
                                "this is rank 0"});
          }
        },
        run_options());
  }
}

}  // namespace
}  // namespace zero
