// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::moments beside one process that steps over whole parameters by the definition of the
// kernels in tests/kernels/stored_reference.h: bits do not depend on ranks, layouts, buckets or
// saves.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/kernels/stored_reference.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/training.h"
#include "tests/training/plain_moments.h"
#include "zero/checkpoint.h"
#include "zero/lion.h"
#include "zero/update/shard_optimizer.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kRate = 0.01;

// Two large parameters, the second with a block that is not whole, and two that stay in fp32.
std::vector<at::Tensor> initial_values(c10::ScalarType dtype) {
  return {random_tensor({41}, 1).to(dtype), random_tensor({67, 130}, 2).to(dtype),
          random_tensor({5000}, 3).to(dtype), random_tensor({4095}, 4).to(dtype)};
}

// Elements of very different sizes, and rows that have none. The third parameter has a gradient in
// two of three steps.
std::vector<at::Tensor> gradients(int rank, int step) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& value : initial_values(at::kFloat)) {
    const auto seed = static_cast<uint64_t>(1000 * step + 100 * rank) + result.size();
    const at::Tensor magnitude =
        at::pow(10.0, at::remainder(at::arange(value.numel(), at::kFloat), 5) - 4);
    result.push_back(random_tensor(value.sizes(), seed) * magnitude.view(value.sizes()));
  }
  result[1].narrow(0, 3, 4).zero_();
  if (step % 3 == 1) result[2] = at::Tensor();
  return result;
}

std::unique_ptr<torch::optim::Optimizer> inner_of(Inner inner, const std::vector<at::Tensor>& p) {
  using namespace torch::optim;
  switch (inner) {
    case Inner::kAdamW:
      return std::make_unique<AdamW>(p, AdamWOptions(kRate).weight_decay(0.1));
    case Inner::kAdam:
      return std::make_unique<Adam>(p, AdamOptions(kRate).amsgrad(true));
    case Inner::kSgdMomentum:
      return std::make_unique<SGD>(p, SGDOptions(kRate).momentum(0.9).nesterov(true));
    case Inner::kLion:
      return std::make_unique<Lion>(p, LionOptions(kRate));
    default:
      return nullptr;
  }
}

// One process that holds everything, and gets the gradients of `world_size` ranks.
class PlainRun {
 public:
  PlainRun(Inner inner, Moments moments, int world_size, c10::ScalarType dtype)
      : world_size_(world_size),
        dtype_(dtype),
        options_(inner_of(inner, initial_values(at::kFloat))->param_groups()[0].options().clone()),
        moments_(inner, {"value0", "value1", "value2", "value3"}, {41, 67 * 130, 5000, 4095},
                 moments) {
    for (const at::Tensor& value : initial_values(dtype)) {
      masters.push_back(value.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
  }

  void step(int number) {
    ++steps_;
    std::vector<std::vector<at::Tensor>> of_rank;
    for (int r = 0; r < world_size_; ++r) of_rank.push_back(gradients(r, number));
    for (size_t p = 0; p < masters.size(); ++p) {
      if (!of_rank[0][p].defined() || p == frozen_) continue;
      at::Tensor sum;
      for (const auto& given : of_rank) {
        const at::Tensor sent = given[p].to(dtype_).to(at::kFloat);
        sum = sum.defined() ? sum + sent : sent;
      }
      moments_.step(p, masters[p], sum * (1.0F / static_cast<float>(world_size_)), kNoClip,
                    *options_, steps_);
    }
  }

  // A parameter that leaves, without a gradient from then on; it comes back without state.
  void freeze(size_t p) {
    frozen_ = p;
    moments_.freeze(p);
  }
  void unfreeze() { frozen_.reset(); }

  // Rounds all moments to nearest, as a load does.
  void convert(Moments to) { moments_.convert(to); }

  std::vector<at::Tensor> masters;

 private:
  static constexpr PlainMoments::Clip kNoClip{std::numeric_limits<double>::infinity(), 1.0};

  const int world_size_;
  const c10::ScalarType dtype_;
  const std::unique_ptr<torch::optim::OptimizerOptions> options_;
  PlainMoments moments_;
  std::optional<size_t> frozen_;
  int64_t steps_ = 0;
};

// A sharded run and on rank 0 the plain one beside it.
struct Pair {
  Pair(const Group& group, Inner inner, Moments moments, ZeroOptions options,
       c10::ScalarType dtype = at::kFloat)
      : group(group),
        model(initial_values(dtype)),
        optimizer(std::make_unique<ZeroOptimizer>(model, inner_of(inner, model.parameters()), group,
                                                  options.moments(moments))),
        plain(inner, moments, group.world_size(), dtype) {}

  // Parameter `without` has no gradient.
  void step(int number, std::optional<size_t> without = std::nullopt) {
    auto given = gradients(group.rank(), number);
    if (without) given[*without] = at::Tensor();
    optimizer->backward(model.loss(given));
    optimizer->step();
    if (group.rank() == 0) plain.step(number);
  }
  // Steps, and compares every bit after each.
  void steps(int first, int last) {
    for (int n = first; n < last; ++n) {
      step(n);
      compare(n);
    }
  }
  void compare(int number) const {
    for (size_t p = 0; p < model.values.size(); ++p) {
      const at::Tensor value = model.values[p].detach();
      const bool frozen = !model.values[p].requires_grad();
      const at::Tensor master = frozen ? value : optimizer->master(model.values[p]);
      EXPECT_TRUE(group.rank() != 0 || at::equal(master, plain.masters[p]))
          << "step " << number << " parameter " << p;
      EXPECT_TRUE(at::equal(value, master.to(value.scalar_type())))
          << "step " << number << " parameter " << p;
    }
  }

  const Group& group;
  GivenGradients model;
  std::unique_ptr<ZeroOptimizer> optimizer;
  PlainRun plain;
};

ZeroOptions small_buckets() { return ZeroOptions().bucket_bytes(8192); }

class MomentsAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, MomentsAt, ::testing::Values(1, 2, 3, 4));

TEST_P(MomentsAt, HaveTheBitsOfOneProcess) {
  struct Case {
    Inner inner;
    Moments moments;
    c10::ScalarType dtype;
    ZeroOptions options;
  };
  const Case cases[] = {
      {Inner::kAdamW, Moments::kInt8, at::kFloat, small_buckets()},
      {Inner::kAdamW, Moments::kInt8, at::kBFloat16, ZeroOptions().stage(1)},
      {Inner::kAdam, Moments::kInt8, at::kFloat, small_buckets().layout(Layout::kPerParameter)},
      {Inner::kSgdMomentum, Moments::kInt8, at::kFloat,
       small_buckets().layout(Layout::kWholeParameters)},
      {Inner::kLion, Moments::kInt8, at::kBFloat16, small_buckets().overlap_gather(true)},
      {Inner::kAdamW, Moments::kBFloat16, at::kFloat, small_buckets()},
      {Inner::kSgdMomentum, Moments::kBFloat16, at::kBFloat16, small_buckets()},
      {Inner::kLion, Moments::kBFloat16, at::kFloat, ZeroOptions()},
      {Inner::kAdam, Moments::kFloat32, at::kFloat, small_buckets()},
  };
  run_ranks(GetParam(), [&](const Group& group) {
    for (const Case& c : cases) {
      // All at two ranks, and in turns at the other numbers.
      if (GetParam() != 2 && (&c - cases + GetParam()) % 3 == 0) continue;
      SCOPED_TRACE(::testing::Message() << "case " << &c - cases);
      Pair run(group, c.inner, c.moments, c.options, c.dtype);
      run.steps(0, 5);
      run.optimizer->check_replicas();
    }
  });
}

// Where the device knows the step alone, kernels read its number there.
TEST_P(MomentsAt, HaveTheSameBitsWithAStaticGraph) {
  run_ranks(GetParam(), [&](const Group& group) {
    Pair run(group, Inner::kAdamW, Moments::kInt8, small_buckets().static_graph(true));
    // Steps with all gradients.
    for (const int n : {0, 2, 3, 5}) {
      run.step(n);
      run.compare(n);
    }
  });
}

TEST_P(MomentsAt, TakeTheBytesOfTheirFormat) {
  run_ranks(GetParam(), [&](const Group& group) {
    for (const Moments moments : {Moments::kFloat32, Moments::kBFloat16, Moments::kInt8}) {
      Pair run(group, Inner::kAdamW, moments, small_buckets());
      run.step(0);
      const Plan& plan = run.optimizer->plan();
      int64_t expected = 0, elements = 0;
      for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
        for (const Segment& s : plan.segments(b, group.rank())) {
          const int64_t whole = run.model.values[s.parameter].numel();
          expected += 2 * moment_bytes(moments_of_parameter(moments, whole), s.numel);
          if (whole >= 4096) elements += s.numel;
          if (moments != Moments::kFloat32 && whole >= 4096) {
            EXPECT_EQ(s.begin % kMomentBlock, 0);
          }
        }
      }
      const int64_t got = run.optimizer->memory().optimizer_state;
      EXPECT_EQ(got, expected);
      if (group.world_size() > 1 || moments != Moments::kInt8) continue;
      EXPECT_EQ(elements, 67 * 130 + 5000);
      // A byte an element, a scale a block, and fp32 for the small ones.
      EXPECT_EQ(got, 2 * (elements + 4 * (35 + 20) + 4 * (41 + 4095)));
    }
  });
}

// A run that goes from one format to the next, or on in the same, on other ranks and layouts each
// time, beside one process that rounds its moments where the run is loaded.
TEST(MomentsTest, GoOnFromACheckpointOfOtherRanksAndFormats) {
  struct Part {
    int world_size;
    Moments moments;
    bool split;
    std::vector<std::string> conversions;
    Layout layout = Layout::kContiguous;
  };
  const Part parts[] = {
      {2, Moments::kFloat32, false, {}},
      {3,
       Moments::kInt8,
       true,
       {"masters of 4 parameters: float32 in the checkpoint, split here",
        "moments of 2 parameters: float32 in the checkpoint, int8 here"}},
      {2, Moments::kInt8, true, {}, Layout::kWholeParameters},
      {1,
       Moments::kBFloat16,
       true,
       {"moments of 2 parameters: int8 in the checkpoint, bfloat16 here"}},
      {2, Moments::kBFloat16, true, {}},
      {4,
       Moments::kFloat32,
       false,
       {"masters of 4 parameters: split in the checkpoint, float32 here",
        "moments of 2 parameters: bfloat16 in the checkpoint, float32 here"}},
      {2, Moments::kInt8, false, {"moments of 2 parameters: float32 in the checkpoint, int8 here"}},
      {3, Moments::kInt8, false, {}, Layout::kPerParameter},
  };
  const std::string folder = ::testing::TempDir() + "moments_chain";
  std::filesystem::remove_all(folder);
  PlainRun plain(Inner::kAdamW, Moments::kFloat32, 1, at::kBFloat16);
  int step = 0;
  for (const Part& part : parts) {
    plain.convert(part.moments);
    for (int n = step; n < step + 3; ++n) plain.step(n);
    run_ranks(part.world_size, [&](const Group& group) {
      Pair run(
          group, Inner::kAdamW, part.moments,
          small_buckets().reduction(Reduction::kSum).split_masters(part.split).layout(part.layout),
          at::kBFloat16);
      if (step > 0) {
        const LoadReport report = run.optimizer->load_checkpoint(folder);
        EXPECT_EQ(report.conversions, part.conversions) << "step " << step;
        EXPECT_TRUE(report.differences.empty());
      }
      for (int n = step; n < step + 3; ++n) {
        // The first rank alone has gradients, so that their sum does not depend on the others.
        auto given = gradients(0, n);
        for (at::Tensor& g : given) {
          if (g.defined() && group.rank() != 0) g = at::zeros_like(g);
        }
        run.optimizer->backward(run.model.loss(given));
        run.optimizer->step();
      }
      for (size_t p = 0; p < run.model.values.size(); ++p) {
        EXPECT_TRUE(at::equal(run.optimizer->master(run.model.values[p]), plain.masters[p]))
            << "step " << step << " parameter " << p;
      }
      run.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
    });
    step += 3;
  }
  // Before the first step there are no moments.
  run_ranks(2, [&](const Group& group) {
    const std::string before = folder + "_before";
    Pair saved(group, Inner::kAdamW, Moments::kInt8, small_buckets());
    saved.optimizer->save_checkpoint(before, SaveOptions().overwrite(true));
    Pair loaded(group, Inner::kAdamW, Moments::kBFloat16, small_buckets());
    EXPECT_TRUE(loaded.optimizer->load_checkpoint(before).conversions.empty());
  });
  // Of another class of optimizer the masters alone are loaded.
  run_ranks(1, [&](const Group& group) {
    Pair other(group, Inner::kLion, Moments::kBFloat16, small_buckets().split_masters(true),
               at::kBFloat16);
    const LoadReport report = other.optimizer->load_checkpoint(
        folder, LoadOptions().strict(false).restore_options(false));
    EXPECT_EQ(
        report.conversions,
        std::vector<std::string>{"masters of 4 parameters: float32 in the checkpoint, split here"});
  });
}

// Each part counts its blocks from its own first element.
TEST(MomentsTest, OfThePartsOfATensorLoadIntoAWhole) {
  const std::string folder = ::testing::TempDir() + "moments_parts";
  std::filesystem::remove_all(folder);
  const at::Tensor whole = random_tensor({128, 64}, 1), gradient = random_tensor({128, 64}, 2);
  run_ranks(2, [&](const Group& group) {
    const auto own = [&](const at::Tensor& t) {
      return t.narrow(0, 64 * group.rank(), 64).contiguous();
    };
    GivenGradients model({own(whole)});
    const TensorParts parts{group, [](const std::string&) { return std::optional<int64_t>(0); }};
    ZeroOptimizer optimizer(
        model, inner_of(Inner::kAdamW, model.parameters()), group.subgroup({group.rank()}, "own"),
        ZeroOptions().moments(Moments::kInt8).mesh_group(group).tensor_parts(parts));
    optimizer.backward(model.loss({own(gradient)}));
    optimizer.step();
    optimizer.save_checkpoint(folder);
  });
  // 0.9 * 0 + 0.1 * g of each part, rounded as in its first step.
  std::vector<at::Tensor> expected;
  for (const at::Tensor& part : gradient.split(64)) {
    const at::Tensor average = part.reshape({-1}) * (1.0 - 0.9);
    at::Tensor stored = at::empty({moment_bytes(Moments::kInt8, 4096)}, at::kByte);
    std::vector<uint32_t> noise;
    const int64_t number = noise_number("value0");
    for (int64_t i = 0; i < 4096; ++i)
      noise.push_back(kernels::reference::state_noise(1, number, i));
    kernels::reference::store_values(kernels::StateType::kInt8, /*root=*/false,
                                     average.const_data_ptr<float>(), 4096, noise.data(),
                                     stored.mutable_data_ptr());
    for (int64_t i = 0; i < 4096; ++i) {
      expected.push_back(
          at::full({}, kernels::reference::stored_value(kernels::StateType::kInt8, /*root=*/false,
                                                        stored.const_data_ptr(), 4096, i)));
    }
  }
  run_ranks(1, [&](const Group& group) {
    GivenGradients model({whole});
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group,
                            ZeroOptions().moments(Moments::kBFloat16));
    EXPECT_EQ(
        optimizer.load_checkpoint(folder).conversions,
        std::vector<std::string>{"moments of 1 parameter: int8 in the checkpoint, bfloat16 here"});
    const auto& master = optimizer.inner().param_groups()[0].params()[0];
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *optimizer.inner().state().at(master.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.exp_avg().view({-1}), at::stack(expected).to(at::kBFloat16)));
  });
}

// Noise has the number of a parameter among those that are trained, which changes with them; what
// comes back begins anew.
TEST(MomentsTest, StayWhereLargeParametersLeaveAndComeBack) {
  for (const Moments moments : {Moments::kInt8, Moments::kBFloat16}) {
    run_ranks(3, [&](const Group& group) {
      Pair run(group, Inner::kAdamW, moments, small_buckets());
      for (int n = 0; n < 9; ++n) {
        if (n == 3) {
          run.optimizer->freeze({run.model.values[1]});
          run.plain.freeze(1);
        }
        if (n == 6) {
          run.optimizer->unfreeze({run.model.values[1]});
          run.plain.unfreeze();
        }
        run.step(n, n >= 3 && n < 6 ? std::optional<size_t>(1) : std::nullopt);
        run.compare(n);
      }
    });
  }
}

// The error after many steps beside fp32 moments, with gradients that have noise and a direction.
TEST(MomentsTest, TrainAsWellAsInFp32) {
  run_ranks(1, [&](const Group& group) {
    const at::Tensor target = random_tensor({64, 128}, 7);
    const auto distance = [&](Inner inner, Moments moments) {
      GivenGradients model({at::zeros({64, 128})});
      ZeroOptimizer optimizer(model, inner_of(inner, model.parameters()), group,
                              ZeroOptions().moments(moments));
      for (int n = 0; n < 250; ++n) {
        for (auto& g : optimizer.param_groups()) g.options().set_lr(kRate * (250.0 - n) / 250.0);
        const at::Tensor noise = 0.7 * random_tensor({64, 128}, static_cast<uint64_t>(n));
        optimizer.backward(model.loss({model.values[0].detach() - target + noise}));
        optimizer.step();
      }
      return (model.values[0].detach() - target).square().mean().item<double>();
    };
    for (const Inner c : {Inner::kAdamW, Inner::kSgdMomentum, Inner::kLion}) {
      const double in_fp32 = distance(c, Moments::kFloat32);
      EXPECT_LT(in_fp32, 0.1);
      EXPECT_NEAR(distance(c, Moments::kBFloat16), in_fp32, 0.02 * in_fp32);
      EXPECT_NEAR(distance(c, Moments::kInt8), in_fp32, 0.05 * in_fp32);
    }
  });
}

TEST(MomentsTest, AreRefusedWithoutAFusedKernel) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values(at::kFloat));
    const auto refusal = [&](std::unique_ptr<torch::optim::Optimizer> inner, ZeroOptions options) {
      return error_of([&] { ZeroOptimizer(model, std::move(inner), group, options); });
    };
    const std::vector<std::string> words{"moments of parameter group 0", "kFloat32",
                                         "without a fused kernel", "set moments(0"};
    const ZeroOptions int8 = ZeroOptions().moments(Moments::kInt8);
    expect_words(refusal(std::make_unique<torch::optim::RMSprop>(model.parameters(), 0.1), int8),
                 words);
    expect_words(
        refusal(inner_of(Inner::kAdamW, model.parameters()), ZeroOptions(int8).fused(false)),
        words);
    expect_words(refusal(inner_of(Inner::kAdamW, model.parameters()),
                         ZeroOptions().moments(0, Moments::kBFloat16).fused(false)),
                 words);
    expect_words(refusal(inner_of(Inner::kAdamW, model.parameters()),
                         ZeroOptions().moments(1, Moments::kInt8)),
                 {"moments of parameter group 1", "expected one of the 1 groups"});
  });
}

// torch keeps the state of a half model in half.
TEST(MomentsTest, TakeThePlainStateOfAnyDtype) {
  run_ranks(2, [&](const Group& group) {
    // With moments rounded to `rounded`, in dtype `dtype`.
    const auto after_a_step = [&](c10::ScalarType rounded, c10::ScalarType dtype) {
      GivenGradients model(initial_values(at::kFloat));
      const auto plain = inner_of(Inner::kAdamW, model.parameters());
      model.loss(gradients(0, 0)).backward();
      plain->step();
      model.zero_grad();
      for (const auto& item : plain->state()) {
        auto& state = static_cast<torch::optim::AdamWParamState&>(*item.second);
        state.exp_avg(state.exp_avg().to(rounded).to(dtype));
        state.exp_avg_sq(state.exp_avg_sq().to(rounded).to(dtype));
      }
      ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group,
                              ZeroOptions().moments(Moments::kInt8));
      optimizer.load_plain_state(*plain);
      optimizer.backward(model.loss(gradients(0, 2)));
      optimizer.step();
      return model.values;
    };
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
      const auto values = after_a_step(dtype, dtype), expected = after_a_step(dtype, at::kFloat);
      for (size_t p = 0; p < values.size(); ++p) {
        EXPECT_TRUE(at::equal(values[p], expected[p])) << dtype << " parameter " << p;
      }
    }
  });
}

TEST(MomentsTest, AreChosenForEachGroup) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model({random_tensor({64, 64}, 1), random_tensor({64, 64}, 2)});
    using torch::optim::OptimizerParamGroup;
    auto inner = std::make_unique<torch::optim::AdamW>(std::vector<OptimizerParamGroup>{
        OptimizerParamGroup({model.values[0]}), OptimizerParamGroup({model.values[1]})});
    ZeroOptimizer optimizer(model, std::move(inner), group,
                            ZeroOptions().moments(Moments::kInt8).moments(1, Moments::kBFloat16));
    optimizer.backward(model.loss({at::ones({64, 64}), at::ones({64, 64})}));
    optimizer.step();
    int64_t total = 0;
    for (int64_t b = 0; b < static_cast<int64_t>(optimizer.plan().buckets.size()); ++b) {
      for (const Segment& s : optimizer.plan().segments(b, group.rank())) {
        total += 2 * moment_bytes(s.parameter == 0 ? Moments::kInt8 : Moments::kBFloat16, s.numel);
      }
    }
    EXPECT_EQ(optimizer.memory().optimizer_state, total);
  });
}

}  // namespace
}  // namespace zero
