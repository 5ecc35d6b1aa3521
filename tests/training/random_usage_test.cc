// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Usage that nobody planned: seeded random patterns of passes, dropped layers,
// no_sync and backward calls, different on every rank, against the unsharded
// reference after every step; and a weight whose gradient arrives several times
// in one pass, as activation checkpointing makes it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <iostream>
#include <sstream>
#include <string>

#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kMemoryCases = 60;
constexpr int kGlooCases = 0;
constexpr int kSharedCases = 20;
#else
constexpr int kMemoryCases = 300;
constexpr int kGlooCases = 60;
constexpr int kSharedCases = 60;
#endif

// Equally distributed bits that depend on the arguments alone, so that every rank
// and the reference draw the same.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u) {}
  Draw& with(int64_t value) {
    state_ = (state_ ^ static_cast<uint64_t>(value + 1)) * 0xBF58476D1CE4E5B9u;
    state_ ^= state_ >> 29;
    return *this;
  }
  // In [0, n).
  int64_t below(int64_t n) {
    with(n);
    return static_cast<int64_t>((state_ >> 11) % static_cast<uint64_t>(n));
  }
  bool percent(int64_t n) { return below(100) < n; }

 private:
  uint64_t state_;
};

Draw draw(uint64_t seed, int what, int rank, int step, int micro) {
  return Draw(seed).with(what).with(rank).with(step).with(micro);
}

Training random_training(uint64_t seed) {
  Draw d(seed);
  Training t;
  t.world_size = static_cast<int>(2 + d.below(3));
  t.steps = 3;
  t.micro_batches = static_cast<int>(1 + d.below(4));
  t.width = 4 + d.below(20);
  t.inner = d.percent(80) ? Inner::kSgdMomentum : Inner::kSgd;
  if (d.percent(30)) t.max_norm = 0.05;
  t.options.stage(1 + d.below(2))
      .layout(d.percent(50) ? Layout::kContiguous : Layout::kPerParameter)
      .bucket_bytes(d.percent(15) ? 0 : 64 + d.below(3000))
      .fused(d.percent(70));
  t.use = [seed, dropped = d.below(60)](int rank, int step, int micro) {
    Draw u = draw(seed, 1, rank, step, micro);
    if (u.percent(8)) return 0U;
    unsigned use = 0;
    for (unsigned bit = 1; bit <= OddModelImpl::kLeftAgain; bit *= 2) {
      if (!u.percent(dropped)) use |= bit;
    }
    return use;
  };
  t.runs = [seed, some = d.percent(50)](int rank, int step, int micro) {
    return !some || !draw(seed, 2, rank, step, micro).percent(25);
  };
  t.under_no_sync = [seed, some = d.percent(60)](int rank, int step, int micro) {
    return some && draw(seed, 3, rank, step, micro).percent(45);
  };
  t.by_plain_backward = [seed, share = d.below(3) * 50](int rank, int step, int micro) {
    return draw(seed, 4, rank, step, micro).percent(share);
  };
  return t;
}

std::string describe(uint64_t seed, const Training& t) {
  std::ostringstream text;
  text << "seed " << seed << " W " << t.world_size << " stage " << t.options.stage() << " layout "
       << static_cast<int>(t.options.layout()) << " bucket " << t.options.bucket_bytes().value_or(0)
       << " micro " << t.micro_batches << " width " << t.width << " fused " << t.options.fused()
       << " clip " << t.max_norm.value_or(0);
  return text.str();
}

void run_cases(Transport transport, bool shared_memory, uint64_t first_seed, int count) {
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Training t = random_training(seed);
    t.transport = transport;
    t.shared_memory = shared_memory;
    SCOPED_TRACE(describe(seed, t));
    const double difference = largest_difference(train_on_ranks(t), train_reference(t));
    ASSERT_LE(difference, 1e-6);
    worst = std::max(worst, difference);
  }
  std::cout << count << " random usage cases, largest difference " << worst << std::endl;
}

TEST(RandomUsageTest, OverMemoryEqualsTheUnshardedReference) {
  run_cases(Transport::kMemory, false, 1, kMemoryCases);
}

TEST(RandomUsageTest, OverGlooEqualsTheUnshardedReference) {
  if (kGlooCases == 0) GTEST_SKIP() << "ThreadSanitizer does not see what orders Gloo's threads";
  run_cases(Transport::kGloo, false, 10001, kGlooCases);
}

TEST(RandomUsageTest, OverSharedMemoryEqualsTheUnshardedReference) {
  run_cases(kDefaultTransport, true, 20001, kSharedCases);
}

// --- A weight whose gradient arrives several times in one pass

using Body = std::function<at::Tensor(const at::Tensor&)>;

// Activation checkpointing in small: keeps its input only, and runs `body` again
// when its gradient is asked for, with a backward pass inside the backward pass.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* body = reinterpret_cast<const Body*>(context->saved_data["body"].toInt());
    const at::AutoGradMode enable(true);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({(*body)(x)}, gradients);
    return {x.grad(), at::Tensor()};
  }
};

// `shared` is used outside of the checkpointed parts and in both of them.
struct CheckpointedModel : torch::nn::Module {
  CheckpointedModel() {
    const auto add = [&](const char* name, at::IntArrayRef shape, uint64_t seed) {
      return register_parameter(name, random_tensor(shape, seed) * 0.4);
    };
    first = add("first", {9, 9}, 1);
    shared = add("shared", {9, 9}, 2);
    second = add("second", {9, 9}, 3);
    bias = add("bias", {9}, 4);
    never = add("never", {31}, 5);
  }
  at::Tensor loss(const at::Tensor& x) const {
    at::Tensor h = at::tanh(at::matmul(at::matmul(x, first), shared));
    h = Recompute::apply(h, &inner_part);
    h = Recompute::apply(h, &outer_part);
    return at::mean(at::pow(at::matmul(h, shared), 2));
  }

  at::Tensor first, shared, second, bias, never;
  Body inner_part = [this](const at::Tensor& h) { return at::tanh(at::matmul(h, shared) + bias); };
  Body outer_part = [this](const at::Tensor& h) {
    return at::tanh(at::matmul(at::matmul(h, second), shared) + bias);
  };
};

struct CheckpointedRun {
  int world_size = 2;
  bool plain = false;
  bool no_sync = false;
  ZeroOptions options;
};

constexpr int kSteps = 3;
constexpr int kMicroBatches = 2;

at::Tensor checkpointed_batch(int rank, int step, int micro) {
  return random_tensor({4, 9}, 1000u + static_cast<unsigned>(100 * rank + 10 * step + micro));
}

std::unique_ptr<torch::optim::Optimizer> sgd_of(const CheckpointedModel& model) {
  return std::make_unique<torch::optim::SGD>(model.parameters(),
                                             torch::optim::SGDOptions(0.2).momentum(0.9));
}

void append(Trajectory& trajectory, const CheckpointedModel& model) {
  trajectory.emplace_back();
  for (const at::Tensor& p : model.parameters()) trajectory.back().push_back(p.detach().clone());
}

Trajectory checkpointed_reference(int world_size) {
  CheckpointedModel model;
  const auto inner = sgd_of(model);
  Trajectory trajectory;
  for (int step = 0; step < kSteps; ++step) {
    inner->zero_grad();
    for (int rank = 0; rank < world_size; ++rank) {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        (model.loss(checkpointed_batch(rank, step, micro)) / world_size).backward();
      }
    }
    inner->step();
    append(trajectory, model);
  }
  return trajectory;
}

Trajectory checkpointed_on_ranks(const CheckpointedRun& t) {
  std::vector<Trajectory> all(t.world_size);
  run_ranks(t.world_size, [&](const Group& group) {
    CheckpointedModel model;
    int firings = 0;
    model.shared.register_hook([&](const at::Tensor&) { ++firings; });
    ZeroOptimizer optimizer(model, sgd_of(model), group, t.options);
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        const auto guard = optimizer.no_sync(t.no_sync && micro == 0);
        const at::Tensor loss = model.loss(checkpointed_batch(group.rank(), step, micro));
        firings = 0;
        t.plain ? optimizer.scale_loss(loss).backward() : optimizer.backward(loss);
        EXPECT_EQ(firings, 3) << "the model does not do what this test is about";
      }
      optimizer.step();
      append(all[group.rank()], model);
    }
  });
  for (const Trajectory& t : all) EXPECT_EQ(differing_elements(t, all[0]), 0);
  return all[0];
}

class CheckpointedAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, CheckpointedAt, ::testing::Values(1, 2, 3));

TEST_P(CheckpointedAt, SharedWeightThatFiresSeveralTimesEqualsPlainTorch) {
  const Trajectory reference = checkpointed_reference(GetParam());
  for (bool plain : {false, true}) {
    for (bool no_sync : {false, true}) {
      std::optional<Trajectory> first;
      for (int64_t stage : {1, 2}) {
        for (int64_t bucket_bytes : {int64_t{0}, int64_t{128}, int64_t{700}}) {
          CheckpointedRun t;
          t.world_size = GetParam();
          t.plain = plain;
          t.no_sync = no_sync;
          t.options.stage(stage)
              .bucket_bytes(bucket_bytes)
              .layout(bucket_bytes == 128 ? Layout::kPerParameter : Layout::kContiguous);
          SCOPED_TRACE("stage " + std::to_string(stage) + " bucket " +
                       std::to_string(bucket_bytes) + (plain ? " plain" : " own") +
                       (no_sync ? " no_sync" : ""));
          const Trajectory ours = checkpointed_on_ranks(t);
          EXPECT_LE(largest_difference(ours, reference), 1e-6);
          if (!first) first = ours;
          EXPECT_EQ(differing_elements(ours, *first), 0)
              << "stages and bucket sizes must give the same bits";
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero
