// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// 16-bit working parameters: what is summed, accumulated and measured in fp32, against exact
// values; and the bytes it takes.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/training.h"
#include "tests/training/precision.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

std::unique_ptr<torch::optim::Optimizer> sgd(const torch::nn::Module& model, double lr,
                                             double momentum = 0) {
  return std::make_unique<torch::optim::SGD>(model.parameters(),
                                             torch::optim::SGDOptions(lr).momentum(momentum));
}

// --- Sums over ranks

TEST_P(PrecisionAt, SumOverRanksIsFp32WhateverTravels) {
  const int world_size = GetParam();
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    // The next number after `large` is large + 2: a 16-bit sum would lose every 1.
    const double large = dtype == at::kHalf ? 2048 : 256;
    ASSERT_EQ((filled(large, 1, dtype) + 1).item<double>(), large);
    for (std::optional<c10::ScalarType> wire :
         {std::optional<c10::ScalarType>(), std::optional(at::kFloat)}) {
      for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
        run_ranks(world_size, [&](const Group& group) {
          GivenGradients model({filled(0, 70, dtype), filled(0, 31, dtype)});
          ZeroOptimizer optimizer(model, sgd(model, 0.1), group,
                                  with_scale(1).reduce_dtype(wire).layout(layout));
          const bool last = group.rank() == world_size - 1 && world_size > 2;
          const double cancels = group.rank() == 0 ? large : last ? -large : 1;
          const double adds = group.rank() == 0 ? large : 1;
          optimizer.backward(
              model.loss({filled(adds, 70, at::kFloat), filled(cancels, 31, at::kFloat)}));
          const auto mean = [&](double sum) {
            return static_cast<float>(sum) * static_cast<float>(1.0 / world_size);
          };
          EXPECT_TRUE(at::equal(optimizer.gradient(model.values[0]),
                                filled(mean(large + world_size - 1), 70, at::kFloat)))
              << dtype;
          const double rest = world_size == 1   ? large
                              : world_size == 2 ? large + 1
                                                : world_size - 2;
          EXPECT_TRUE(
              at::equal(optimizer.gradient(model.values[1]), filled(mean(rest), 31, at::kFloat)))
              << dtype;
          optimizer.zero_grad();
        });
      }
    }
  }
}

// --- Accumulation over micro-batches

struct Accumulation {
  const char* name;
  bool plain;
  bool no_sync;
  bool no_sync_fp32;
  std::optional<c10::ScalarType> wire;
  double tolerance;
};

constexpr int kMicroGradients = 512;

at::Tensor micro_gradient(int rank, int micro) {
  const auto seed = static_cast<uint64_t>(rank * 1000 + micro);
  return (random_tensor({64}, seed) * 0.5 + 1.0).to(at::kBFloat16).to(at::kFloat);
}

double relative_error(const at::Tensor& got, const at::Tensor& exact) {
  return ((got.to(at::kDouble) - exact) / exact).abs().max().item<double>();
}

TEST_P(PrecisionAt, AccumulationOf512SameSignBf16GradientsIsFp32) {
  const int world_size = GetParam();
  at::Tensor exact = at::zeros({64}, at::kDouble);
  at::Tensor in_bf16 = at::zeros({64}, at::kDouble);
  for (int rank = 0; rank < world_size; ++rank) {
    at::Tensor accumulator = at::zeros({64}, at::kBFloat16);
    for (int micro = 0; micro < kMicroGradients; ++micro) {
      exact.add_(micro_gradient(rank, micro));
      accumulator.add_(micro_gradient(rank, micro).to(at::kBFloat16));
    }
    in_bf16.add_(accumulator);
  }
  exact.div_(world_size);
  in_bf16.div_(world_size);
  const double error_in_bf16 = relative_error(in_bf16, exact);
  std::cout << "W " << world_size << ": bf16 accumulator " << error_in_bf16;
  EXPECT_GT(error_in_bf16, 0.01);
  const auto bf16 = std::optional<c10::ScalarType>(at::kBFloat16);
  const auto fp32 = std::optional<c10::ScalarType>(at::kFloat);
  for (const Accumulation& a : {
           Accumulation{"backward()", false, false, false, bf16, 2e-6},
           Accumulation{"plain backward()", true, false, false, bf16, 2e-6},
           Accumulation{"no_sync_fp32, fp32 sent", false, true, true, fp32, 2e-6},
           // One rounding to 8 bits of mantissa per rank.
           Accumulation{"no_sync_fp32, bf16 sent", false, true, true, bf16, 1.0 / 256},
           // What the option is for.
           Accumulation{"no_sync in bf16", false, true, false, fp32, 1.0},
       }) {
    double error = -1;
    run_ranks(world_size, [&](const Group& group) {
      // The second parameter is never used: the bucket is never complete.
      GivenGradients model({filled(0, 64, at::kBFloat16), filled(0, 40, at::kBFloat16)});
      ZeroOptimizer optimizer(model, sgd(model, 0.1), group,
                              ZeroOptions().reduce_dtype(a.wire).no_sync_fp32(a.no_sync_fp32));
      for (int micro = 0; micro < kMicroGradients; ++micro) {
        const auto guard = optimizer.no_sync(a.no_sync);
        const at::Tensor loss = model.loss({micro_gradient(group.rank(), micro)});
        a.plain ? loss.backward() : optimizer.backward(loss);
      }
      const at::Tensor gradient = optimizer.gradient(model.values[0]);
      if (group.rank() == 0) error = relative_error(gradient, exact);
      optimizer.zero_grad();
    });
    std::cout << "; " << a.name << " " << error;
    EXPECT_LE(error, a.tolerance) << a.name;
    EXPECT_GE(error, a.tolerance == 1.0 ? 0.01 : 0.0) << a.name;
  }
  std::cout << std::endl;
}

// --- Small and large numbers

// 2^-23, the 1.19e-7 at the lower end of fp16, whose quarter is zero there: the mean is made
// after the sum, in fp32. So it is kept whatever travels; what backward itself cannot represent,
// below 2^-24, needs a loss scale.
TEST(PrecisionTest, TinyHalfGradientsOnFourRanksAreNotFlushed) {
  ASSERT_EQ(filled(0x1p-25, 1, at::kFloat).to(at::kHalf).item<float>(), 0.0F);
  for (std::optional<c10::ScalarType> wire :
       {std::optional<c10::ScalarType>(), std::optional(at::kFloat)}) {
    for (double scale : {1.0, 65536.0}) {
      for (bool everywhere : {true, false}) {
        run_ranks(4, [&](const Group& group) {
          GivenGradients model({filled(1, 33, at::kHalf)});
          ZeroOptimizer optimizer(model, sgd(model, 0x1p20), group,
                                  with_scale(scale).reduce_dtype(wire));
          // With the default scale 2^16 even 2^-39 is kept.
          const double tiny = 0x1p-23 / scale;
          const bool has = everywhere || group.rank() == 3;
          optimizer.backward(model.loss({filled(has ? tiny : 0, 33, at::kFloat)}));
          const double mean = everywhere ? tiny : tiny / 4;
          EXPECT_TRUE(at::equal(optimizer.gradient(model.values[0]), filled(mean, 33, at::kFloat)));
          optimizer.step();
          EXPECT_TRUE(at::equal(optimizer.master(model.values[0]),
                                filled(static_cast<float>(1.0 - 0x1p20 * mean), 33, at::kFloat)));
        });
      }
    }
  }
}

TEST_P(PrecisionAt, NormsOfLargeGradientsAreFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  struct Large {
    c10::ScalarType dtype;
    double value;
  };
  // The square of the first is above fp16's 65504, those of the others above fp32's 3.4e38.
  for (const Large& large :
       {Large{at::kHalf, 60000}, Large{at::kFloat, 1e19}, Large{at::kBFloat16, 1e38}}) {
    for (double norm_type : {2.0, 1.0, 3.0, 0.5, infinity}) {
      run_ranks(GetParam(), [&](const Group& group) {
        constexpr int64_t kNumel = 5000;
        GivenGradients model({filled(0, kNumel, large.dtype)});
        ZeroOptimizer optimizer(model, sgd(model, 1.0), group, with_scale(1));
        // Only rank 0's is large, so that the sum in fp32 stays finite.
        const double value = group.rank() == 0 ? large.value : 0;
        optimizer.backward(model.loss({filled(value, kNumel, at::kFloat)}));
        const double element =
            filled(large.value, 1, large.dtype).item<double>() / group.world_size();
        const double expected =
            element * (std::isinf(norm_type) ? 1 : std::pow(kNumel, 1 / norm_type));
        const double norm = optimizer.clip_grad_norm_(expected / 1000, norm_type).item<double>();
        EXPECT_NEAR(norm / expected, 1, 1e-6) << large.dtype << " norm " << norm_type;
        optimizer.step();
        EXPECT_FALSE(optimizer.step_skipped());
        EXPECT_NEAR(optimizer.master(model.values[0])[7].item<double>() / (-element / 1000), 1,
                    1e-6)
            << large.dtype << " norm " << norm_type;
      });
    }
  }
}

// Such a scale is infinite there, as the product of loss and scale is.
TEST_P(PrecisionAt, AScaleThatTheLossCannotHoldSkipsTheStepAndShrinks) {
  struct Case {
    c10::ScalarType dtype;
    double too_large, held;
  };
  for (const Case& c : {Case{at::kHalf, 65536, 32768}, Case{at::kFloat, 0x1p128, 0x1p64}}) {
    for (const bool outputs : {false, true}) {
      run_ranks(GetParam(), [&](const Group& group) {
        GivenGradients model({filled(0, 33, c.dtype)});
        auto scaler = LossScalerOptions().initial_scale(c.too_large).max_scale(c.too_large);
        scaler.growth_factor(c.too_large / c.held).backoff_factor(c.held / c.too_large);
        ZeroOptimizer optimizer(model, sgd(model, 1.0), group,
                                ZeroOptions().loss_scaler(scaler.growth_interval(1)));
        const auto step = [&] {
          const at::Tensor loss = at::sum(model.values[0] * 0.125);
          ASSERT_EQ(loss.scalar_type(), c.dtype);
          outputs ? optimizer.backward({loss}, {}) : optimizer.backward(loss);
          optimizer.step();
        };
        for (const double good_steps : {1.0, 2.0}) {
          step();
          EXPECT_TRUE(optimizer.step_skipped());
          EXPECT_EQ(optimizer.loss_scale(), c.held);
          step();
          EXPECT_FALSE(optimizer.step_skipped());
          EXPECT_EQ(optimizer.loss_scale(), c.too_large) << "it has grown";
          EXPECT_NEAR(optimizer.master(model.values[0])[7].item<double>(), -0.125 * good_steps,
                      1e-6);
        }
      });
    }
  }
}

// --- Memory between steps

struct MemoryCase {
  std::vector<c10::ScalarType> dtypes;  // of the parameters, in turn
  std::vector<int64_t> sizes;
  Inner inner = Inner::kAdamW;
  int64_t state_per_element = 2;
  int64_t stage = 2;
  Layout layout = Layout::kContiguous;
};

std::unique_ptr<torch::optim::Optimizer> memory_inner(Inner inner,
                                                      const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  switch (inner) {
    case Inner::kAdamW:
      return std::make_unique<AdamW>(parameters, AdamWOptions(0.01));
    case Inner::kAdagrad:
      return std::make_unique<Adagrad>(parameters, AdagradOptions(0.01));
    case Inner::kSgdMomentum:
      return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
    default:
      return std::make_unique<SGD>(parameters, SGDOptions(0.1));
  }
}

// memory() after two steps, on each rank; also compares it with the bookkeeping's formulas.
std::vector<MemoryReport> memory_of(const MemoryCase& c, int world_size) {
  std::vector<MemoryReport> reports(world_size);
  run_ranks(world_size, [&](const Group& group) {
    std::vector<at::Tensor> initial, gradients;
    for (size_t i = 0; i < c.sizes.size(); ++i) {
      initial.push_back(filled(1, c.sizes[i], c.dtypes[i % c.dtypes.size()]));
      gradients.push_back(at::ones({c.sizes[i]}));
    }
    GivenGradients model(initial);
    ZeroOptimizer optimizer(model, memory_inner(c.inner, model.parameters()), group,
                            with_scale(1).stage(c.stage).layout(c.layout).bucket_bytes(1000));
    for (int step = 0; step < 2; ++step) {
      optimizer.backward(model.loss(gradients));
      optimizer.reduce_gradients();  // in stage 1 it gathers averages
      optimizer.step();
    }
    const MemoryReport got = optimizer.memory();
    const MemoryReport expected = expected_memory(
        optimizer.plan(), group.rank(),
        {c.stage, [&](int64_t numel, int64_t) { return 4 * c.state_per_element * numel; }});
    EXPECT_EQ(got.working_parameters, expected.working_parameters);
    EXPECT_EQ(got.master_parameters, expected.master_parameters);
    EXPECT_EQ(got.optimizer_state, expected.optimizer_state);
    EXPECT_EQ(got.gradient_shards, expected.gradient_shards);
    EXPECT_EQ(got.full_gradients, expected.full_gradients);
    std::vector<int64_t> buckets;
    for (const Bucket& bucket : optimizer.plan().buckets) {
      const auto bytes =
          static_cast<int64_t>(c10::elementSize(optimizer.plan().arena_of(bucket).dtype));
      buckets.push_back(optimizer.plan().bucket_numel(bucket) * bytes);
    }
    std::sort(buckets.rbegin(), buckets.rend());
    // Two or 8 MiB under way in both directions, two that wait and two that are being filled.
    const int64_t under_way = std::max<int64_t>(2, ((8 << 20) + buckets[0] - 1) / buckets[0]);
    const auto kept = static_cast<size_t>(2 * under_way + 4);
    buckets.resize(std::min(buckets.size(), kept));
    EXPECT_LE(got.buckets, std::accumulate(buckets.begin(), buckets.end(), int64_t{0}));
    reports[group.rank()] = got;
  });
  return reports;
}

template <typename Visit>
void for_each_memory_case(Visit visit) {
  struct InnerState {
    Inner inner;
    int64_t per_element;
  };
  for (const InnerState& s : {InnerState{Inner::kAdamW, 2}, InnerState{Inner::kSgdMomentum, 1},
                              InnerState{Inner::kAdagrad, 1}, InnerState{Inner::kSgd, 0}}) {
    for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      MemoryCase c;
      c.inner = s.inner;
      c.state_per_element = s.per_element;
      c.layout = layout;
      c.stage = 1 + (static_cast<int64_t>(s.inner) + static_cast<int64_t>(layout)) % 2;
      visit(c);
    }
  }
}

int turn_of(const MemoryCase& c, int world_size) {
  return static_cast<int>(c.inner) + static_cast<int>(c.layout) + world_size;
}

TEST_P(PrecisionAt, MemoryIsExactlyWhatTheFormulasSay) {
  const int world_size = GetParam();
  const std::vector<c10::ScalarType> dtypes[] = {
      {at::kFloat}, {at::kBFloat16}, {at::kHalf}, {at::kBFloat16, at::kFloat}};
  for_each_memory_case([&](MemoryCase c) {
    // In turns over classes, layouts and ranks.
    c.dtypes = dtypes[turn_of(c, world_size) % 4];
    SCOPED_TRACE(c10::str(c.dtypes[0], " of ", c.dtypes.size(), " stage ", c.stage, " layout ",
                          static_cast<int>(c.layout), " inner ", static_cast<int>(c.inner)));
    // Sizes that need padding everywhere.
    c.sizes = {37, 501, 1, 260};
    memory_of(c, world_size);
  });
}

// Sizes that every number of ranks and every alignment divides: the formulas of design and paper.
TEST_P(PrecisionAt, MemoryWithoutPaddingIsTheTextbookFormula) {
  const int world_size = GetParam();
  constexpr c10::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  for_each_memory_case([&](MemoryCase c) {
    const c10::ScalarType dtype = kDtypes[turn_of(c, world_size) % 3];
    c.dtypes = {dtype};
    c.sizes = {384, 768, 1152};
    // Whole parameters of different sizes cannot be even.
    if (c.layout == Layout::kWholeParameters) c.sizes.assign(12, 192);
    const int64_t p = 384 + 768 + 1152;
    const int64_t w = world_size;
    const int64_t element = dtype == at::kFloat ? 4 : 2;
    // The masters are the working rows themselves where these are fp32 views of the arena.
    const bool master = dtype != at::kFloat || c.layout == Layout::kPerParameter;
    int64_t expected = element * p + 4 * p / w + (master ? 4 * p / w : 0);
    expected += 4 * c.state_per_element * p / w;
    if (c.stage == 1) expected += element * p;
    for (const MemoryReport& report : memory_of(c, world_size)) {
      EXPECT_EQ(report.total() - report.buckets, expected)
          << dtype << " stage " << c.stage << " layout " << static_cast<int>(c.layout) << " inner "
          << static_cast<int>(c.inner);
    }
  });
}

}  // namespace
}  // namespace zero
