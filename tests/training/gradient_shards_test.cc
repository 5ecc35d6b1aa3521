// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::gradient_shard_dtype: what is rounded to bf16 and when, beside plain torch that
// rounds by hand, and what it takes.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/combined_optimizer.h"
#include "zero/mesh.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors initial_values(c10::ScalarType dtype) {
  Tensors values{random_tensor({67, 130}, 1), random_tensor({41}, 2), random_tensor({300}, 3),
                 random_tensor({4500}, 4)};
  for (at::Tensor& v : values) v = v.to(dtype);
  return values;
}

// The second parameter has none in each third step, and the third one has one on rank 0 alone.
Tensors gradients(const Tensors& values, int rank, int step, int round) {
  Tensors result;
  for (const at::Tensor& v : values) {
    const auto seed = static_cast<uint64_t>(1000 * step + 100 * round + 10 * rank);
    result.push_back(random_tensor(v.sizes(), seed + result.size() + 50));
  }
  if (step % 3 == 1) result[1] = at::Tensor();
  if (rank > 0) result[2] = at::Tensor();
  return result;
}

enum class Class { kAdamW, kSgd, kRmsprop, kMuon };

std::unique_ptr<torch::optim::Optimizer> inner_of(Class c, const Tensors& p) {
  using namespace torch::optim;
  switch (c) {
    case Class::kAdamW:
      return std::make_unique<AdamW>(p, AdamWOptions(0.01).weight_decay(0.1));
    case Class::kSgd:
      return std::make_unique<SGD>(p, SGDOptions(1.0).momentum(0.5));
    case Class::kRmsprop:  // has no fused kernel
      return std::make_unique<RMSprop>(p, RMSpropOptions(0.01));
    case Class::kMuon: {
      std::vector<std::unique_ptr<Optimizer>> parts;
      parts.push_back(std::make_unique<Muon>(Tensors{p[0]}, MuonOptions(0.02)));
      parts.push_back(std::make_unique<SGD>(Tensors(p.begin() + 1, p.end()), SGDOptions(1.0)));
      return std::make_unique<CombinedOptimizer>(std::move(parts));
    }
  }
  return nullptr;
}

struct Case {
  std::string name;
  Class inner = Class::kSgd;
  c10::ScalarType dtype = at::kBFloat16;
  ZeroOptions options = ZeroOptions().bucket_bytes(4096);
  int rounds = 1;
  std::optional<double> max_norm = std::nullopt;
  std::optional<double> max_value = std::nullopt;
  Wire wire = Wire::kMemory;
};

// So that a failure does not print bytes.
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  const ZeroOptions small = ZeroOptions().bucket_bytes(4096);
  return {
      {.name = "AdamW", .inner = Class::kAdamW, .max_norm = 0.5, .wire = Wire::kGloo},
      {.name = "Sgd", .max_norm = 0.5},
      {.name = "SgdOfFp32", .dtype = at::kFloat, .options = ZeroOptions().stage(1)},
      {.name = "PerParameter",
       .options = ZeroOptions(small).layout(Layout::kPerParameter),
       .rounds = 3,
       .max_norm = 0.5,
       .wire = Wire::kShared},
      {.name = "WholeParameters",
       .options = ZeroOptions(small).layout(Layout::kWholeParameters),
       .rounds = 2},
      {.name = "StageOne", .options = ZeroOptions(small).stage(1), .rounds = 2},
      {.name = "ThroughCollectives", .rounds = 2, .max_norm = 0.5, .wire = Wire::kNative},
      // 0.3 is no bf16 number.
      {.name = "ClippedByValue", .max_value = 0.3},
      {.name = "ClippedByBoth", .inner = Class::kAdamW, .max_norm = 5.0, .max_value = 0.3},
      {.name = "StepOfItsOwn", .inner = Class::kRmsprop, .max_norm = 0.5, .max_value = 0.3},
  };
}

// One process of plain torch, which rounds as the option says.
class Plain {
 public:
  explicit Plain(const Case& c, int world_size) : c_(c), world_size_(world_size) {
    for (const at::Tensor& v : initial_values(c.dtype)) {
      masters_.push_back(v.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    inner_ = inner_of(c.inner, masters_);
  }

  void step(int number) {
    for (size_t p = 0; p < masters_.size(); ++p) {
      at::Tensor shard;
      for (int round = 0; round < c_.rounds; ++round) {
        at::Tensor sum = at::zeros_like(masters_[p]);
        bool any = false;
        for (int rank = 0; rank < world_size_; ++rank) {
          const at::Tensor g = gradients(masters_, rank, number, round)[p];
          if (!g.defined()) continue;
          sum = sum + g.to(c_.dtype).to(at::kFloat);
          any = true;
        }
        if (!any) continue;
        sum = sum * (1.0F / static_cast<float>(world_size_));
        if (shard.defined()) sum = shard.to(at::kFloat) + sum;
        shard = sum.to(at::kBFloat16);
      }
      masters_[p].mutable_grad() = shard.defined() ? shard.to(at::kFloat) : at::Tensor();
    }
    gradients_.clear();
    for (const at::Tensor& m : masters_) {
      gradients_.push_back(m.grad().defined() ? m.grad().clone() : at::Tensor());
    }
    clip();
    inner_->step();
  }
  // Before clipping.
  const Tensors& rounded() const { return gradients_; }
  double norm() const { return norm_; }
  const Tensors& masters() const { return masters_; }

 private:
  void clip() {
    double squares = 0;
    for (const at::Tensor& m : masters_) {
      if (!m.grad().defined()) continue;
      if (c_.max_value) m.mutable_grad().clamp_(-*c_.max_value, *c_.max_value);
      squares += m.grad().to(at::kDouble).square().sum().item<double>();
    }
    norm_ = std::sqrt(squares);
    if (!c_.max_norm) return;
    for (const at::Tensor& m : masters_) {
      if (m.grad().defined()) m.mutable_grad().mul_(std::min(1.0, *c_.max_norm / (norm_ + 1e-6)));
    }
  }

  const Case c_;
  const int world_size_;
  Tensors masters_, gradients_;
  double norm_ = 0;
  std::unique_ptr<torch::optim::Optimizer> inner_;
};

struct ShardRun {
  ShardRun(const Group& group, const Case& given, c10::ScalarType shards = at::kBFloat16)
      : c(given),
        group(group),
        model(initial_values(c.dtype)),
        optimizer(model, inner_of(c.inner, model.values), group,
                  ZeroOptions(c.options).gradient_shard_dtype(shards)) {}

  // Returns the norm.
  double step(int number) {
    for (int round = 0; round < c.rounds; ++round) {
      optimizer.backward(model.loss(gradients(model.values, group.rank(), number, round)));
    }
    if (c.max_value) optimizer.clip_grad_value_(*c.max_value);
    const at::Tensor norm =
        c.max_norm ? optimizer.clip_grad_norm_(*c.max_norm) : optimizer.grad_norm();
    optimizer.step();
    return norm.item<double>();
  }

  const Case c;
  const Group& group;
  GivenGradients model;
  ZeroOptimizer optimizer;
};

class GradientShards : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(InBFloat16, GradientShards, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(GradientShards, AreRoundedAfterEachRoundAndReadInFp32) {
  const Case& c = GetParam();
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(
        world_size,
        [&](const Group& group) {
          Plain plain(c, world_size);
          ShardRun run(group, c);
          for (int n = 0; n < 5; ++n) {
            SCOPED_TRACE(::testing::Message() << world_size << " ranks, step " << n);
            plain.step(n);
            const double norm = run.step(n);
            EXPECT_NEAR(norm, plain.norm(), 1e-6 * plain.norm());
            for (size_t p = 0; p < run.model.values.size(); ++p) {
              const at::Tensor master = run.optimizer.master(run.model.values[p]);
              EXPECT_TRUE(at::allclose(master, plain.masters()[p], 1e-5, 1e-6)) << p;
              EXPECT_TRUE(at::equal(run.model.values[p], master.to(c.dtype))) << p;
            }
          }
        },
        on(c.wire));
  }
}

TEST(GradientShardsTest, GradientIsTheRoundedMean) {
  for (const int64_t stage : {1, 2}) {
    const Case c{.name = "", .options = ZeroOptions().bucket_bytes(4096).stage(stage)};
    for (const int world_size : {1, 2, 3}) {
      run_ranks(world_size, [&](const Group& group) {
        Plain plain(c, world_size);
        ShardRun run(group, c);
        run.optimizer.backward(run.model.loss(gradients(run.model.values, group.rank(), 0, 0)));
        plain.step(0);
        for (size_t p = 0; p < run.model.values.size(); ++p) {
          EXPECT_TRUE(at::equal(run.optimizer.gradient(run.model.values[p]), plain.rounded()[p]));
        }
        run.optimizer.step();
      });
    }
  }
}

TEST(GradientShardsTest, ASumOverReplicasIsRoundedOnceMore) {
  const auto given = [](int rank) {
    return random_tensor({300}, static_cast<uint64_t>(rank) + 1).to(at::kBFloat16).to(at::kFloat);
  };
  const auto rounded = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };
  run_ranks(4, [&](const Group& world) {
    const Mesh mesh(world, {{"replica", 2}, {"shard", 2}});
    GivenGradients model({at::zeros({300}, at::kBFloat16)});
    const auto placement = GroupPlacement().replicated_over(mesh.group({"replica"}));
    ZeroOptimizer optimizer(model, inner_of(Class::kSgd, model.values), mesh.group({"shard"}),
                            ZeroOptions()
                                .mesh_group(world)
                                .placement(0, placement)
                                .gradient_shard_dtype(at::kBFloat16));
    optimizer.backward(model.loss({given(world.rank())}));
    const at::Tensor first = rounded((given(0) + given(1)) * 0.25);
    const at::Tensor second = rounded((given(2) + given(3)) * 0.25);
    EXPECT_TRUE(at::equal(optimizer.gradient(model.values[0]), rounded(first + second)));
    optimizer.step();
  });
}

// The mean of one bf16 gradient is that gradient.
TEST(GradientShardsTest, OfOneRankAndOneRoundLoseNothing) {
  run_ranks(1, [](const Group& group) {
    for (const Class inner : {Class::kAdamW, Class::kSgd}) {
      const Case c{.name = "", .inner = inner, .max_norm = 0.5};
      ShardRun bf16(group, c), fp32(group, c, at::kFloat);
      for (int n = 0; n < 4; ++n) {
        EXPECT_EQ(bf16.step(n), fp32.step(n));
        for (size_t p = 0; p < bf16.model.values.size(); ++p) {
          EXPECT_TRUE(at::equal(bf16.optimizer.master(bf16.model.values[p]),
                                fp32.optimizer.master(fp32.model.values[p])));
        }
      }
    }
  });
}

// Muon steps the matrix by itself, and a kernel all others.
TEST(GradientShardsTest, GroupsWithAndWithoutAKernelShareThem) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const Case c{.name = "",
                   .inner = Class::kMuon,
                   .options = ZeroOptions().bucket_bytes(4096).layout(Layout::kWholeParameters),
                   .max_norm = 0.5,
                   .max_value = 0.3};
      Plain plain(c, world_size);
      ShardRun run(group, c);
      for (int n = 0; n < 3; ++n) {
        plain.step(n);
        run.step(n);
        for (size_t p = 0; p < run.model.values.size(); ++p) {
          const double loose = p == 0 ? 2e-3 : 1e-6;  // of a bf16 product
          EXPECT_TRUE(at::allclose(run.optimizer.master(run.model.values[p]), plain.masters()[p],
                                   1e-5, loose))
              << p << " in step " << n;
        }
      }
    });
  }
}

// Of 2^18 elements each.
TEST(GradientShardsTest, ANormOfManyBatchesIsThatOfAllElements) {
  const Tensors given{random_tensor({300000}, 1), random_tensor({200001}, 2),
                      random_tensor({700}, 3)};
  for (const int64_t micro_batches : {0, 2}) {
    run_ranks(2, [&](const Group& group) {
      GivenGradients model({at::zeros({300000}), at::zeros({200001}), at::zeros({700})});
      ZeroOptimizer optimizer(model, inner_of(Class::kSgd, model.values), group,
                              ZeroOptions()
                                  .gradient_shard_dtype(at::kBFloat16)
                                  .layout(Layout::kWholeParameters)
                                  .micro_batches(micro_batches));
      optimizer.backward(model.loss(given));
      double squares = 0, clamped = 0;
      for (const at::Tensor& g : given) {
        const at::Tensor rounded = g.to(at::kBFloat16).to(at::kDouble);
        squares += rounded.square().sum().item<double>();
        clamped += rounded.clamp(-0.3F, 0.3F).square().sum().item<double>();
      }
      const double norm = std::sqrt(squares);
      EXPECT_NEAR(optimizer.grad_norm().item<double>(), norm, 1e-9 * norm);
      optimizer.clip_grad_value_(0.3);
      EXPECT_NEAR(optimizer.grad_norm().item<double>(), std::sqrt(clamped), 1e-6 * norm);
    });
  }
}

TEST(GradientShardsTest, TakeTwoBytesAnElement) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const ShardRun bf16(group, {.name = ""}), fp32(group, {.name = ""}, at::kFloat);
      const int64_t bytes = bf16.optimizer.memory().gradient_shards;
      EXPECT_EQ(2 * bytes, fp32.optimizer.memory().gradient_shards);
      EXPECT_EQ(bytes, expected_memory(bf16.optimizer.plan(), group.rank(),
                                       {.gradient_shard_dtype = at::kBFloat16})
                           .gradient_shards);
    });
  }
}

TEST(GradientShardsTest, OtherDtypesAreRefused) {
  run_ranks(2, [](const Group& group) {
    const std::string text = error_of([&] { ShardRun run(group, {.name = ""}, at::kHalf); });
    expect_words(text, {"gradient_shard_dtype: expected kFloat or kBFloat16, got Half"});
  });
}

}  // namespace
}  // namespace zero
