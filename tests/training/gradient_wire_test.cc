// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Training with gradient_wire(GradientWire::kBlockInt8): shards have the bits that plain torch
// gives for quantised gradients and are within the bound of the exact mean; what is not finite
// skips the step; the bytes on the wire are the formula.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iostream>
#include <limits>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr int64_t kBlock = 256;

ZeroOptions int8_options() { return ZeroOptions().gradient_wire(GradientWire::kBlockInt8); }

class GradientWireAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, GradientWireAt, ::testing::Values(1, 2, 3, 4));

// Buckets that hold pieces of several parameters, and parameters cut by buckets and rows.
const std::vector<int64_t> kSizes = {37, 700, 1, 530, 3000};
constexpr int64_t kBucketBytes = 6000;

std::vector<at::Tensor> initial_values(c10::ScalarType dtype) {
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < kSizes.size(); ++i)
    values.push_back(random_tensor({kSizes[i]}, i).to(dtype));
  return values;
}

std::unique_ptr<torch::optim::Optimizer> sgd(const GivenGradients& model) {
  return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.1));
}

// Of magnitudes that differ by parameter. No rank uses parameter 2, and rank 0 does not use 3.
std::vector<at::Tensor> gradients(int rank, int micro, c10::ScalarType dtype) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    const auto seed = 1000u + static_cast<unsigned>(100 * rank + 10 * micro) + i;
    at::Tensor g = random_tensor({kSizes[i]}, seed) * (i % 2 == 0 ? 1e-3 : 4.0);
    g[0].zero_();
    const bool unused = i == 2 || (i == 3 && rank == 0);
    result.push_back(unused ? at::Tensor() : g.to(dtype).to(at::kFloat));
  }
  return result;
}

// A gradient in blocks, [n, kBlock], with zeros behind its end; and back.
at::Tensor in_blocks(const at::Tensor& gradient) {
  const int64_t blocks = (gradient.numel() + kBlock - 1) / kBlock;
  const at::Tensor padded = at::zeros(blocks * kBlock);
  padded.narrow(0, 0, gradient.numel()).copy_(gradient);
  return padded.view({blocks, kBlock});
}

at::Tensor out_of_blocks(const at::Tensor& blocks, int64_t numel) {
  return blocks.reshape(-1).narrow(0, 0, numel).clone();
}

// What plain torch gives for a gradient: quantised and back.
at::Tensor quantised(const at::Tensor& gradient) {
  const at::Tensor x = in_blocks(gradient);
  const at::Tensor scale = x.abs().amax(1, /*keepdim=*/true) / 127;
  const at::Tensor q = at::where(scale > 0, at::round(x / scale), at::zeros_like(x));
  return out_of_blocks(q * scale, gradient.numel());
}

// The largest of its block, for every value.
at::Tensor largest_of_block(const at::Tensor& gradient) {
  const at::Tensor x = in_blocks(gradient);
  return out_of_blocks(x.abs().amax(1, true).expand_as(x), gradient.numel());
}

struct Expected {
  std::vector<at::Tensor> bits;   // means of quantised gradients, in fp32
  std::vector<at::Tensor> exact;  // means of the gradients, in double
  std::vector<at::Tensor> bound;  // of their difference
};

// rounds[k][r]: what rank r sends in round k.
Expected expected(const std::vector<std::vector<std::vector<at::Tensor>>>& rounds) {
  Expected result;
  const double ranks = static_cast<double>(rounds[0].size());
  for (size_t i = 0; i < kSizes.size(); ++i) {
    at::Tensor total = at::zeros(kSizes[i]);
    at::Tensor exact = total.to(at::kDouble), bound = exact.clone();
    for (const auto& round : rounds) {
      at::Tensor sum = at::zeros(kSizes[i]);
      for (const std::vector<at::Tensor>& of_rank : round) {
        if (!of_rank[i].defined()) continue;
        sum = sum + quantised(of_rank[i]);
        exact.add_(of_rank[i]);
        bound.add_(largest_of_block(of_rank[i]));
      }
      total = total + sum * static_cast<float>(1.0 / ranks);
    }
    result.bits.push_back(total);
    result.exact.push_back(exact / ranks);
    result.bound.push_back(bound / ranks * (1.0 / 254 + 1e-6));
  }
  return result;
}

enum class Passes { kOne, kTwoRounds, kNoSync };

// What each rank sends in each round.
std::vector<std::vector<std::vector<at::Tensor>>> sent(int world_size, Passes passes,
                                                       c10::ScalarType dtype, bool fp32_sum) {
  std::vector<std::vector<std::vector<at::Tensor>>> rounds;
  for (int micro = 0; micro < (passes == Passes::kOne ? 1 : 2); ++micro) {
    if (micro == 0 || passes == Passes::kTwoRounds) rounds.emplace_back(world_size);
    for (int r = 0; r < world_size; ++r) {
      const std::vector<at::Tensor> g = gradients(r, micro, dtype);
      std::vector<at::Tensor>& all = rounds.back()[r];
      all.resize(g.size());
      for (size_t i = 0; i < g.size(); ++i) {
        if (!all[i].defined()) {
          all[i] = g[i];
        } else {
          all[i] = all[i] + g[i];
          if (!fp32_sum) all[i] = all[i].to(dtype).to(at::kFloat);
        }
      }
    }
  }
  return rounds;
}

struct Case {
  c10::ScalarType dtype;
  Passes passes;
  bool no_sync_fp32;
};

TEST_P(GradientWireAt, ShardsAreTheSumsOfQuantisedGradientsAndWithinTheBound) {
  const int world_size = GetParam();
  double largest = 0;
  for (const Case& c :
       {Case{at::kFloat, Passes::kOne, false}, Case{at::kFloat, Passes::kTwoRounds, false},
        Case{at::kFloat, Passes::kNoSync, false}, Case{at::kBFloat16, Passes::kOne, false},
        Case{at::kBFloat16, Passes::kNoSync, false}, Case{at::kBFloat16, Passes::kNoSync, true}}) {
    for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      for (int64_t stage : {1, 2}) {
        SCOPED_TRACE(c10::str(c.dtype, " passes ", static_cast<int>(c.passes), " fp32 sum ",
                              c.no_sync_fp32, " layout ", static_cast<int>(layout), " stage ",
                              stage));
        run_ranks(world_size, [&](const Group& group) {
          GivenGradients model(initial_values(c.dtype));
          ZeroOptimizer optimizer(model, sgd(model), group,
                                  int8_options()
                                      .stage(stage)
                                      .layout(layout)
                                      .no_sync_fp32(c.no_sync_fp32)
                                      .bucket_bytes(kBucketBytes));
          EXPECT_GE(optimizer.plan().buckets.size(), 2u);
          const Expected want = expected(sent(world_size, c.passes, c.dtype, c.no_sync_fp32));
          // Buffers that were used before have no effect.
          for (int step = 0; step < 2; ++step) {
            for (int micro = 0; micro < (c.passes == Passes::kOne ? 1 : 2); ++micro) {
              const auto guard = optimizer.no_sync(c.passes == Passes::kNoSync && micro == 0);
              optimizer.backward(model.loss(gradients(group.rank(), micro, c.dtype)));
            }
            for (size_t i = 0; i < kSizes.size(); ++i) {
              const at::Tensor got = optimizer.gradient(model.values[i]);
              EXPECT_EQ(got.defined(), i != 2 && (i != 3 || world_size > 1));
              if (!got.defined()) continue;
              EXPECT_TRUE(at::equal(got, want.bits[i])) << "parameter " << i;
              const at::Tensor error = (got.to(at::kDouble) - want.exact[i]).abs();
              EXPECT_TRUE((error <= want.bound[i] + 1e-9).all().item<bool>()) << "parameter " << i;
              if (group.rank() == 0) {
                largest = std::max(largest, (error / (want.bound[i] + 1e-12)).max().item<double>());
              }
            }
            optimizer.step();
            EXPECT_FALSE(optimizer.step_skipped());
          }
        });
      }
    }
  }
  std::cout << "W " << world_size << ": the largest error is " << largest << " of the bound"
            << std::endl;
  EXPECT_GT(largest, 0.3);
}

// Two shards in two copies: copies are added up in fp32.
TEST(GradientWireTest, SumsOverReplicasKeepTheBound) {
  run_ranks(4, [](const Group& group) {
    const Mesh mesh(group, {{"rep", 2}, {"shard", 2}});
    GivenGradients model(initial_values(at::kFloat));
    ZeroOptimizer optimizer(
        model, sgd(model), mesh.group({"shard"}),
        int8_options()
            .mesh_group(mesh.all())
            .bucket_bytes(kBucketBytes)
            .placement(0, GroupPlacement().replicated_over(mesh.group({"rep"}))));
    const Expected want = expected(sent(4, Passes::kTwoRounds, at::kFloat, false));
    for (int micro = 0; micro < 2; ++micro) {
      optimizer.backward(model.loss(gradients(group.rank(), micro, at::kFloat)));
    }
    for (size_t i : {0, 1, 3, 4}) {
      const at::Tensor got = optimizer.gradient(model.values[i]);
      const at::Tensor error = (got.to(at::kDouble) - want.exact[i]).abs();
      EXPECT_TRUE((error <= want.bound[i] + 1e-7).all().item<bool>()) << "parameter " << i;
      EXPECT_GT(error.max().item<double>(), 0);
    }
    optimizer.step();
    optimizer.check_replicas();
  });
}

// Beside parts of a matrix whose gradients differ by the rank.
TEST(GradientWireTest, CopiesOnTensorParallelRanksStayEqual) {
  run_ranks(4, [](const Group& group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 2}});
    const double large = mesh.coordinate("tp") == 0 ? 127.0 : 12.7;
    for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      GivenGradients model({at::zeros(64), at::zeros(16)});
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const at::Tensor& value : model.values) groups.emplace_back(std::vector{value});
      ZeroOptimizer optimizer(
          model, std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(1.0)),
          mesh.group({"dp"}),
          int8_options()
              .layout(layout)
              .mesh_group(mesh.all())
              .placement(1, GroupPlacement().copies(2)));
      optimizer.backward(model.loss({at::full(64, large), at::full(16, 0.4)}));
      optimizer.step();
      EXPECT_TRUE(at::allclose(model.values[1], at::full(16, -0.4), 0, 1e-6)) << model.values[1];
    }
  });
}

TEST_P(GradientWireAt, AValueThatIsNotFiniteSkipsTheStepOnEveryRank) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const int world_size = GetParam();
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
    run_ranks(world_size, [&](const Group& group) {
      GivenGradients model(initial_values(at::kFloat));
      ZeroOptimizer optimizer(model, sgd(model), group,
                              int8_options().layout(layout).bucket_bytes(kBucketBytes));
      for (int bad_rank = 0; bad_rank < world_size; ++bad_rank) {
        for (double bad : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
          for (int64_t place : {0, 300, 699}) {
            const auto before = everything(model, optimizer);
            std::vector<at::Tensor> g = gradients(group.rank(), 0, at::kFloat);
            if (group.rank() == bad_rank) g[1][place] = bad;
            optimizer.backward(model.loss(g));
            optimizer.step();
            EXPECT_TRUE(optimizer.step_skipped());
            EXPECT_TRUE(same_bits(before, everything(model, optimizer)));
          }
        }
        // What was not finite is not left behind in any buffer.
        optimizer.backward(model.loss(gradients(group.rank(), 1, at::kFloat)));
        optimizer.step();
        EXPECT_FALSE(optimizer.step_skipped());
      }
    });
  }
}

TEST_P(GradientWireAt, BytesOnTheWireAreTheFormula) {
  const int64_t world_size = GetParam();
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (Layout layout : {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      run_ranks(GetParam(), [&](const Group& group) {
        GivenGradients model(initial_values(dtype));
        ZeroOptimizer optimizer(model, sgd(model), group,
                                int8_options().layout(layout).bucket_bytes(kBucketBytes));
        const Stats before = optimizer.stats();
        for (int micro = 0; micro < 2; ++micro) {
          optimizer.backward(model.loss(gradients(group.rank(), micro, dtype)));
        }
        optimizer.step();
        const Stats after = optimizer.stats();
        int64_t bytes = 0;  // of the rows for others
        for (const Bucket& bucket : optimizer.plan().buckets) {
          for (int64_t r = 0; r < world_size; ++r) {
            const int64_t n = r == group.rank() ? 0 : bucket.rows.numel(r);
            bytes += 4 * ((n + kBlock - 1) / kBlock) + (n + 3) / 4 * 4;
          }
        }
        EXPECT_EQ(after.data.exchange_bytes_sent - before.data.exchange_bytes_sent, 2 * bytes);
        EXPECT_EQ(after.rounds - before.rounds, 2);
        EXPECT_EQ(optimizer.memory().unsent_gradients, 0);
      });
    }
  }
}

// A bucket that is full is encoded while it waits for those before it.
TEST_P(GradientWireAt, FullBucketsWaitEncoded) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model({at::zeros({4096}), at::zeros({4096})});
    ZeroOptimizer optimizer(model, sgd(model), group,
                            int8_options().layout(Layout::kPerParameter).bucket_bytes(4 * 4096));
    const std::vector<Bucket>& buckets = optimizer.plan().buckets;
    ASSERT_EQ(buckets.size(), 2u);
    optimizer.backward(model.loss({at::ones({4096}), at::ones({4096})}));
    optimizer.zero_grad();
    EXPECT_EQ(optimizer.memory().unsent_gradients, 0);
    // The first parameter is in the last bucket. Without ZeroOptimizer::backward() the
    // round stays open.
    ASSERT_EQ(buckets[1].slots[0].parameter, 0);
    model.loss({at::ones({4096})}).backward();
    const int64_t n = buckets[1].rows.equal_numel();
    EXPECT_EQ(optimizer.memory().unsent_gradients,
              group.world_size() * (4 * ((n + kBlock - 1) / kBlock) + n));
    optimizer.step();
    EXPECT_EQ(optimizer.memory().unsent_gradients, 0);
  });
}

TEST_P(GradientWireAt, TrainsWithTheSameBitsInEveryRunAndOverEveryTransport) {
  Training t;
  t.world_size = GetParam();
  t.micro_batches = 2;
  t.steps = 6;
  t.inner = Inner::kSgdMomentum;
  t.options = int8_options().bucket_bytes(1000);
  // Ranks that leave out different branches.
  t.use = [](int rank, int step, int micro) {
    return static_cast<unsigned>((rank + step + micro) % 3 == 0 ? OddModelImpl::kTrunk
                                                                : OddModelImpl::kAll);
  };
  const Trajectory reference = train_reference(t);
  const Trajectory first = train_on_ranks(t);
  const double error = largest_difference(first, reference);
  std::cout << "W " << t.world_size << ": parameters differ by " << error << std::endl;
  EXPECT_LT(error, 0.02);
  EXPECT_GT(differing_elements(first, reference), 0);
  EXPECT_EQ(differing_elements(first, train_on_ranks(t)), 0);
  for (int64_t stage : {1, 2}) {
    t.options.stage(stage);
    t.shared_memory = false;
    EXPECT_EQ(differing_elements(first, train_on_ranks(t)), 0) << "stage " << stage;
    t.transport = kRealTransport;
    t.shared_memory = true;
    EXPECT_EQ(differing_elements(first, train_on_ranks(t)), 0) << "stage " << stage;
  }
}

TEST(GradientWireTest, IsComparedAcrossRanksAndRefusedWithReduceDtype) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial_values(at::kFloat));
    const auto error = [&](const ZeroOptions& options) {
      return error_of([&] { ZeroOptimizer optimizer(model, sgd(model), group, options); });
    };
    expect_words(error(group.rank() == 0 ? int8_options() : ZeroOptions()),
                 {"expected the same model", "gradient_wire"});
    expect_words(error(int8_options().reduce_dtype(at::kBFloat16)),
                 {"gradient_wire", "reduce_dtype", "leave one of them out"});
  });
}

}  // namespace
}  // namespace zero
