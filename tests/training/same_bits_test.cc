// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// With ZeroOptions::micro_batches, parameters, moments and norms have the same bits on every number
// of ranks, and those of one process of plain torch that adds up gradients over the tree.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/training/same_bits_run.h"
#include "zero/skip_rule.h"

namespace zero {
namespace {

ZeroOptions small_buckets() { return ZeroOptions().bucket_bytes(8192); }

// What the random programs of same_bits_program_test do not draw or seldom draw together, and what
// is compared with plain torch.
std::vector<SameBitsCase> cases() {
  const auto whole = small_buckets().layout(Layout::kWholeParameters);
  const auto each = small_buckets().layout(Layout::kPerParameter);
  return {
      {.name = "AdamW",
       .micro_batches = 5,
       .world_sizes = {2, 3, 4, 5},
       .max_norm = 0.5,
       .options = small_buckets(),
       .looks = true,
       .plain = true},
      {.name = "AdamWInOneBucket",
       .micro_batches = 8,
       .world_sizes = {2, 3, 4},
       .max_norm = 0.5,
       .options = ZeroOptions().stage(1),
       .wire = Wire::kGloo,
       .plain = true},
      {.name = "AdamWPerParameterInBFloat16",
       .micro_batches = 6,
       .world_sizes = {2, 4, 5},
       .dtype = at::kBFloat16,
       .max_norm = 0.5,
       .options = each,
       .looks = true,
       .plain = true},
      {.name = "AdamWOfWholeParametersInBFloat16",
       .micro_batches = 12,
       .world_sizes = {3, 5},
       .dtype = at::kBFloat16,
       .max_norm = 0.5,
       .options = ZeroOptions(whole).stage(1),
       .bad_step = 2,
       .plain = true},
      {.name = "SgdOfWholeParameters",
       .micro_batches = 12,
       .world_sizes = {2, 5},
       .inner = Inner::kSgdMomentum,
       .max_norm = 0.5,
       .options = whole,
       .looks = true,
       .plain = true},
      {.name = "SgdInBFloat16",
       .micro_batches = 5,
       .world_sizes = {3, 4, 5},
       .inner = Inner::kSgdMomentum,
       .dtype = at::kBFloat16,
       .options = small_buckets(),
       .bad_step = 1,
       .looks = true,
       .plain = true},
      {.name = "SgdPerParameterAsASum",
       .micro_batches = 6,
       .world_sizes = {3, 4},
       .inner = Inner::kSgdMomentum,
       .max_norm = 0.5,
       .options = ZeroOptions(each).stage(1).reduction(Reduction::kSum),
       .plain = true},
      {.name = "OnTwoMachines",
       .micro_batches = 8,
       .world_sizes = {4},
       .max_norm = 0.5,
       .options = small_buckets(),
       .ranks_per_machine = 2,
       .wire = Wire::kGloo,
       .looks = true,
       .plain = true},
      {.name = "OnTwoMachinesInBFloat16",
       .micro_batches = 5,
       .world_sizes = {4},
       .dtype = at::kBFloat16,
       .max_norm = 0.5,
       .options = ZeroOptions().stage(1).gather_wire(GatherWire::kChanges),
       .ranks_per_machine = 2,
       .plain = true},
      {.name = "OnTwoMachinesOfWholeParameters",
       .micro_batches = 12,
       .world_sizes = {4},
       .inner = Inner::kSgdMomentum,
       .options = ZeroOptions(whole).fp32_machine_sums(false),
       .ranks_per_machine = 2,
       .plain = true},
      {.name = "OnTwoMachinesInOneLevel",
       .micro_batches = 6,
       .world_sizes = {4},
       .options = small_buckets().two_level(false),
       .ranks_per_machine = 2,
       .plain = true},
      {.name = "OnThreeMachines",
       .micro_batches = 9,
       .world_sizes = {6},
       .max_norm = 0.5,
       .options = small_buckets(),
       .ranks_per_machine = 2,
       .looks = true,
       .plain = true},
      {.name = "OnTwoMachinesOfThreeRanksInBFloat16",
       .micro_batches = 7,
       .world_sizes = {6},
       .inner = Inner::kSgdMomentum,
       .dtype = at::kBFloat16,
       .max_norm = 0.5,
       .options = ZeroOptions(each).stage(1),
       .ranks_per_machine = 3,
       .plain = true},
      // So many machines that rows are copied into the order of places.
      {.name = "OnFiveMachines",
       .micro_batches = 11,
       .world_sizes = {10},
       .max_norm = 0.5,
       .options = small_buckets(),
       .steps = 2,
       .ranks_per_machine = 2,
       .wire = Wire::kMemory,
       .plain = true},
      {.name = "MuonAndAdamWInBFloat16",
       .micro_batches = 8,
       .world_sizes = {4},
       .inner = Inner::kMuon,
       .dtype = at::kBFloat16,
       .options = small_buckets().stage(1),
       .ranks_per_machine = 2},
      {.name = "MomentsInInt8",
       .micro_batches = 8,
       .world_sizes = {3, 4},
       .max_norm = 0.5,
       .options = small_buckets().moments(Moments::kInt8)},
      {.name = "SplitMasters",
       .micro_batches = 12,
       .world_sizes = {3, 5},
       .dtype = at::kBFloat16,
       .max_norm = 0.5,
       .options = small_buckets().split_masters(true).moments(Moments::kInt8).ema(EmaOptions()),
       .bad_step = 1,
       .looks = true},
      {.name = "GradientShardsInBFloat16",
       .micro_batches = 6,
       .world_sizes = {2, 3, 4},
       .inner = Inner::kSgdMomentum,
       .max_norm = 0.5,
       .options = small_buckets().gradient_shard_dtype(at::kBFloat16),
       .looks = true},
      {.name = "AStaticGraph",
       .micro_batches = 6,
       .world_sizes = {2, 4},
       .max_norm = 0.5,
       .options = small_buckets().static_graph(true),
       .drops = false,
       .plain = true},
      {.name = "StepsOfTheInnerOptimizer",
       .micro_batches = 5,
       .world_sizes = {2, 3},
       .max_norm = 0.5,
       .options = ZeroOptions(whole).fused(false)},
  };
}

class SameBits : public ::testing::TestWithParam<SameBitsCase> {};
INSTANTIATE_TEST_SUITE_P(Runs, SameBits, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(SameBits, OnEveryNumberOfRanks) {
  const SameBitsCase& c = GetParam();
  const Record one = run_same_bits(c, 1);
  if (c.plain) expect_plain_bits(run_plain(c), one);
  for (const int world_size : c.world_sizes) {
    EXPECT_EQ(first_difference(one, run_same_bits(c, world_size)), "") << world_size << " ranks";
  }
}

// ---------------------------------------------------------------------
// Every tree

// Sums of these differ in every other order.
std::vector<at::Tensor> hard_gradients(int64_t number, int step) {
  std::vector<at::Tensor> result;
  for (const int64_t numel : {300, 7}) {
    const auto seed = static_cast<uint64_t>(100 * step + 2 * number) + result.size();
    result.push_back(random_tensor({numel}, seed) * (number % 3 == 1 ? 1e4 : 1.0));
  }
  if (number % 5 == 4) result[1] = at::Tensor();
  return result;
}

// The gradients of two steps, and the parameters behind them.
Record hard_run(int world_size, int64_t micro_batches, int ranks_per_machine) {
  Record result;
  run_ranks(
      world_size,
      [&](const Group& group) {
        GivenGradients model({at::ones({300}), at::ones({7})});
        ZeroOptimizer optimizer(model, same_bits_inner(Inner::kSgdMomentum, model.values), group,
                                ZeroOptions().bucket_bytes(512).micro_batches(micro_batches));
        int64_t next = micro_batches * group.rank() / world_size;
        EXPECT_EQ(*optimizer.micro_batches().begin(), next);
        for (int step = 0; step < 2; ++step) {
          for (const int64_t number : optimizer.micro_batches()) {
            optimizer.backward(model.loss(hard_gradients(number, step)));
            if (step == 0) {
              EXPECT_EQ(number, next++);
            }
          }
          for (const at::Tensor& v : model.values) {
            const at::Tensor gradient = optimizer.gradient(v);
            if (group.rank() == 0) result.push_back({"gradient", gradient});
          }
          optimizer.step();
        }
        EXPECT_EQ(next, micro_batches * (group.rank() + 1) / world_size);
        if (group.rank() == 0) {
          for (const at::Tensor& v : model.values) result.push_back({"value", v.detach().clone()});
        }
      },
      on(Wire::kMemory, std::chrono::seconds(60), ranks_per_machine));
  return result;
}

// A third of all combinations on more than 3 ranks, or all of them with ZERO_COMBINATIONS=all.
TEST(SameBitsTest, OverEveryTree) {
  const char* const wanted = std::getenv("ZERO_COMBINATIONS");
  const bool all = wanted != nullptr && std::string(wanted) == "all";
  for (int64_t m = 1; m <= (all ? 40 : 16); ++m) {
    Record one;
    for (int world_size = 1; world_size <= std::min<int64_t>(m, all ? 9 : 6); ++world_size) {
      for (int local = 1; local <= (world_size > 3 ? world_size : 1); ++local) {
        if (world_size % local != 0 || (!all && world_size > 3 && (m + local) % 3 != 0)) continue;
        SCOPED_TRACE(::testing::Message() << m << " micro-batches on " << world_size << " ranks, "
                                          << local << " on a machine");
        const Record run = hard_run(world_size, m, world_size > 3 ? local : 0);
        if (world_size > 1) {
          EXPECT_EQ(first_difference(one, run), "");
          continue;
        }
        one = run;
        for (int step = 0; step < 2; ++step) {
          for (size_t p = 0; p < 2; ++p) {
            std::vector<at::Tensor> leaves;
            for (int64_t k = 0; k < m; ++k) leaves.push_back(hard_gradients(k, step)[p]);
            const at::Tensor sum = tree_sum(leaves) * (1.0F / static_cast<float>(m));
            EXPECT_EQ(first_difference({{"gradient", sum}}, {run[2 * step + p]}), "");
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------
// A model

// Matrix products and random numbers, as in the comment of ZeroOptimizer::micro_batches().
TEST(SameBitsTest, OfAModelWithMatrixProductsAndDropout) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<Record> records;
    for (const int world_size : {1, 2, 3, 5}) {
      records.emplace_back();
      std::mutex random;  // ranks are threads with one generator
      run_ranks(world_size, [&](const Group& group) {
        OddModel model(group.rank(), /*width=*/150);
        model->to(dtype);
        ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                                ZeroOptions()
                                    .bucket_bytes(3000)
                                    .layout(static_cast<Layout>(world_size % 3))
                                    .micro_batches(6));
        for (int step = 0; step < 4; ++step) {
          for (const int64_t number : optimizer.micro_batches()) {
            const auto seed = static_cast<uint64_t>(100 * step + number);
            const at::Tensor target = random_tensor({9, 11}, seed + 50).to(dtype);
            at::Tensor x = random_tensor({9, 17}, seed).to(dtype);
            {
              const std::lock_guard<std::mutex> lock(random);
              torch::manual_seed(seed);
              x = at::dropout(x, 0.25, /*train=*/true);
            }
            const unsigned use = number == 4       ? 0U
                                 : number % 2 == 0 ? OddModelImpl::kAll
                                                   : OddModelImpl::kTrunk | OddModelImpl::kLeft;
            optimizer.backward(model->loss(x, target, use));
          }
          const at::Tensor norm = optimizer.clip_grad_norm_(0.5);
          optimizer.step();
          if (group.rank() != 0) continue;
          records.back().push_back({"norm", norm});
          for (const auto& item : model->named_parameters()) {
            records.back().push_back({item.key(), item.value().detach().clone()});
          }
        }
      });
      EXPECT_EQ(first_difference(records[0], records.back()), "") << world_size << " ranks";
    }
  }
}

// ---------------------------------------------------------------------
// Norms

// Squares whose sums in double depend on the order: of 1e-12 to 1e12.
TEST(SameBitsTest, TheNormIsExactOverBlocks) {
  const auto gradient = [](int64_t number, int64_t numel) {
    // Multiples of a power of 2, so that the sum of a block is exact in every order.
    const at::Tensor line = at::arange(numel, at::kLong);
    at::Tensor value = (line * 7919 + 13 * number).remainder(15).to(at::kFloat) - 7;
    const at::Tensor block = at::floor_divide(line, 256).remainder(5).to(at::kFloat);
    return value * at::exp2(20 * (block - 2));
  };
  const std::vector<int64_t> sizes{3000, 1, 257, 5000};
  for (const int64_t m : {4, 8}) {
    std::vector<at::Tensor> sums;
    for (const int64_t numel : sizes) {
      std::vector<at::Tensor> leaves;
      for (int64_t k = 0; k < m; ++k) leaves.push_back(gradient(k, numel));
      sums.push_back(tree_sum(leaves) * (1.0F / static_cast<float>(m)));
    }
    const double expected = exact_norm(sums);
    for (const int world_size : {1, 2, 3, 4}) {
      for (const Layout layout :
           {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
        run_ranks(world_size, [&](const Group& group) {
          std::vector<at::Tensor> initial;
          for (const int64_t numel : sizes) initial.push_back(at::ones({numel}));
          GivenGradients model(initial);
          ZeroOptimizer optimizer(model, same_bits_inner(Inner::kSgdMomentum, model.values), group,
                                  ZeroOptions().bucket_bytes(2048).layout(layout).micro_batches(m));
          for (const int64_t number : optimizer.micro_batches()) {
            std::vector<at::Tensor> given;
            for (const int64_t numel : sizes) given.push_back(gradient(number, numel));
            optimizer.backward(model.loss(given));
          }
          EXPECT_EQ(optimizer.grad_norm().item<double>(), expected) << world_size << " " << m;
          // The largest element, which no order changes.
          double largest = 0;
          for (const at::Tensor& s : sums)
            largest = std::max(largest, s.abs().max().item<double>());
          EXPECT_EQ(optimizer.grad_norm(std::numeric_limits<double>::infinity()).item<double>(),
                    largest);
          // What clips leave is measured from the same number.
          EXPECT_EQ(optimizer.clip_grad_norm_(expected / 2).item<double>(), expected);
          EXPECT_EQ(optimizer.grad_norm().item<double>(),
                    expected * std::min(1.0, expected / 2 / (expected + 1e-6)));
          optimizer.step();
          EXPECT_FALSE(optimizer.step_skipped());
        });
      }
    }
  }
}

// Clips of elements, then of the norm of what they leave, and a rule that leaves out large steps.
TEST(SameBitsTest, ClipsOfElementsAndSkipRules) {
  std::vector<Record> records;
  for (const int world_size : {1, 2, 3, 5}) {
    records.emplace_back();
    run_ranks(world_size, [&](const Group& group) {
      SameBitsCase c{.micro_batches = 6, .options = small_buckets()};
      c.options.skip_if(std::make_shared<OutlierRule>(/*sigmas=*/3, /*window=*/4));
      SameBitsRun run(group, c);
      ZeroOptimizer& optimizer = *run.optimizer;
      for (int n = 0; n < 8; ++n) {
        run.passes(n);
        if (n % 2 == 0) optimizer.clip_grad_value_(0.01);
        run.add("norm", optimizer.grad_norm());
        if (n % 4 != 3) run.add("clip", optimizer.clip_grad_norm_(0.2));
        optimizer.clip_grad_value_(0.005);
        optimizer.step();
        run.add("skipped", at::full({}, optimizer.step_skipped() ? 1.0 : 0.0));
        for (const at::Tensor& v : run.model.values) run.add("master", optimizer.master(v));
      }
      run.add("rule", at::full({}, static_cast<double>(
                                       std::hash<std::string>()(c.options.skip_if()->state()))));
      if (group.rank() == 0) records.back() = run.record;
    });
    EXPECT_EQ(first_difference(records[0], records.back()), "") << world_size << " ranks";
  }
}

}  // namespace
}  // namespace zero
