// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::moments of zero::Muon beside one process: the momentum, which follows given
// gradients, in every bit of its formula in plain torch and of the formats in
// tests/kernels/stored_reference.h, and the parameters as near as fp32 is to Muon's formula in
// double.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/kernels/stored_reference.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/training.h"
#include "zero/checkpoint.h"
#include "zero/combined_optimizer.h"
#include "zero/muon.h"
#include "zero/update/shard_optimizer.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kRate = 0.02;
constexpr size_t kVector = 1;  // AdamW's; all others are matrices of Muon

// Two matrices with many elements, one of them with columns that lie together, and one that keeps
// fp32.
std::vector<at::Tensor> initial_values() {
  return {random_tensor({67, 130}, 1), random_tensor({5000}, 2),
          random_tensor({96, 64}, 3).t().contiguous().t(), random_tensor({40, 60}, 4)};
}

std::vector<at::Tensor> gradients(int rank, int step) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& value : initial_values()) {
    const auto seed = static_cast<uint64_t>(1000 * step + 100 * rank) + result.size();
    const at::Tensor magnitude =
        at::pow(10.0, at::remainder(at::arange(value.numel(), at::kFloat), 4) - 3);
    result.push_back(random_tensor(value.sizes(), seed) * magnitude.view(value.sizes()));
  }
  return result;
}

MuonOptions muon_options() { return MuonOptions(kRate).ns_dtype(at::kFloat); }

std::unique_ptr<torch::optim::Optimizer> inner_of(const std::vector<at::Tensor>& p,
                                                  const MuonOptions& options) {
  std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
  parts.push_back(std::make_unique<Muon>(std::vector<at::Tensor>{p[0], p[2], p[3]}, options));
  parts.push_back(std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{p[kVector]}));
  return std::make_unique<CombinedOptimizer>(std::move(parts));
}

// Elements in the order of their memory.
at::Tensor in_memory_order(const at::Tensor& t) { return t.as_strided({t.numel()}, {1}).clone(); }

// A matrix in one process: its momentum as it is stored, and its value in double.
class PlainMatrix {
 public:
  PlainMatrix(const at::Tensor& value, const std::string& name, Moments moments,
              MuonOptions options)
      : value_(value.to(at::kDouble)),
        options_(std::move(options)),
        noise_number_(noise_number(name)),
        moments_(moments_of_parameter(moments, value.numel())),
        stored_(at::zeros({moment_bytes(moments_, value.numel())}, at::kByte)) {}

  // The momentum alone where the value is not compared, since that is much dearer.
  void step(const at::Tensor& gradient, int64_t number, bool with_value) {
    const at::Tensor b = follow(gradient, number).to(at::kDouble);
    if (!with_value) return;
    const at::Tensor g = gradient.to(at::kDouble);
    const at::Tensor u = options_.nesterov() ? g + options_.momentum() * (b - g) : b;
    const auto [left, values, right] = at::linalg_svd(u, /*full_matrices=*/false);
    at::Tensor s = values / std::max(u.norm().item<double>(), options_.eps());
    const auto [x, y, z] = options_.ns_coefficients();
    for (int64_t i = 0; i < options_.ns_steps(); ++i) s = x * s + y * s.pow(3) + z * s.pow(5);
    const double rows = u.size(0), columns = u.size(1);
    value_ *= 1 - options_.lr() * options_.weight_decay();
    value_ -=
        options_.lr() * std::sqrt(std::max(1.0, rows / columns)) * at::matmul(left * s, right);
  }

  const at::Tensor& value() const { return value_; }
  const at::Tensor& stored() const { return stored_; }
  bool is_narrow() const { return moments_ != Moments::kFloat32; }

 private:
  kernels::StateType type() const {
    return moments_ == Moments::kInt8 ? kernels::StateType::kInt8 : kernels::StateType::kBFloat16;
  }

  // b before it is rounded.
  at::Tensor follow(const at::Tensor& given, int64_t number) {
    const at::Tensor gradient = at::empty_like(value_, at::kFloat).copy_(given);
    const at::Tensor flat = in_memory_order(gradient);
    const int64_t numel = flat.numel();
    at::Tensor b = stored_.numel() == 4 * numel ? stored_.view(at::kFloat).clone() : flat.clone();
    if (is_narrow()) {
      auto* const values = b.mutable_data_ptr<float>();
      for (int64_t i = 0; i < numel; ++i) {
        values[i] = kernels::reference::stored_value(type(), /*root=*/false,
                                                     stored_.const_data_ptr(), numel, i);
      }
      // Each product and the sum are rounded by themselves.
      b = b * options_.momentum() + flat * (1.0 - options_.momentum());
      std::vector<uint32_t> noise;
      for (int64_t i = 0; i < numel; ++i) {
        noise.push_back(kernels::reference::state_noise(number, noise_number_, i));
      }
      kernels::reference::store_values(type(), /*root=*/false, b.const_data_ptr<float>(), numel,
                                       noise.data(), stored_.mutable_data_ptr());
    } else {
      b = b + (1.0 - options_.momentum()) * (flat - b);
      stored_ = b.view(at::kByte).clone();
    }
    return b.as_strided(gradient.sizes(), gradient.strides());
  }

  at::Tensor value_;
  const MuonOptions options_;
  const int64_t noise_number_;
  const Moments moments_;
  at::Tensor stored_;
};

struct Pair {
  Pair(const Group& group, Moments moments, ZeroOptions options, const MuonOptions& muon)
      : group(group),
        model(initial_values()),
        optimizer(std::make_unique<ZeroOptimizer>(model, inner_of(model.values, muon), group,
                                                  options.moments(moments))) {
    const auto values = initial_values();
    for (size_t p = 0; p < values.size(); ++p) {
      plain.emplace_back(values[p], "value" + std::to_string(p), moments, muon);
    }
  }

  // The momentum of this rank's matrices, and the values on rank 0.
  void compare(int64_t step) {
    const Plan& plan = optimizer->plan();
    auto& inner = optimizer->inner();
    size_t seen = 0;
    for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
      for (const Segment& s : plan.segments(b, group.rank())) {
        if (s.parameter == kVector) continue;
        const at::Tensor& master = inner.param_groups()[0].params().at(seen++);
        const auto& state =
            static_cast<MuonParamState&>(*inner.state().at(master.unsafeGetTensorImpl()));
        const at::Tensor& got = state.momentum_buffer();
        const PlainMatrix& expected = plain[s.parameter];
        ASSERT_EQ(static_cast<int64_t>(got.nbytes()), expected.stored().numel());
        if (!expected.is_narrow()) continue;
        EXPECT_EQ(
            std::memcmp(got.const_data_ptr(), expected.stored().const_data_ptr(), got.nbytes()), 0)
            << "step " << step << " parameter " << s.parameter;
      }
    }
    for (size_t p = 0; p < model.values.size() && group.rank() == 0; ++p) {
      if (p == kVector) continue;
      const at::Tensor difference = model.values[p].detach() - plain[p].value();
      EXPECT_LT(difference.abs().max().item<double>(), 2e-5)
          << "step " << step << " parameter " << p;
    }
  }

  void step(int number) {
    optimizer->backward(model.loss(gradients(group.rank(), number)));
    optimizer->step();
    std::vector<std::vector<at::Tensor>> of_rank;
    for (int r = 0; r < group.world_size(); ++r) of_rank.push_back(gradients(r, number));
    for (size_t p = 0; p < plain.size(); ++p) {
      if (p == kVector) continue;
      at::Tensor sum = of_rank[0][p];
      for (size_t r = 1; r < of_rank.size(); ++r) sum = sum + of_rank[r][p];
      plain[p].step(sum * (1.0F / static_cast<float>(of_rank.size())), number + 1,
                    group.rank() == 0);
    }
    compare(number);
  }

  const Group& group;
  GivenGradients model;
  std::unique_ptr<ZeroOptimizer> optimizer;
  std::vector<PlainMatrix> plain;
};

class MuonMomentsAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, MuonMomentsAt, ::testing::Values(1, 2, 3, 4));

TEST_P(MuonMomentsAt, HaveTheBitsOfOneProcess) {
  run_ranks(GetParam(), [&](const Group& group) {
    for (const Moments moments : {Moments::kInt8, Moments::kBFloat16, Moments::kFloat32}) {
      int option = 0;
      for (const MuonOptions& muon : {muon_options(), muon_options().nesterov(false).momentum(0.5),
                                      muon_options().momentum(0)}) {
        // Formats, options and sizes of buckets in pairs.
        const int64_t bucket_bytes =
            (static_cast<int>(moments) + option++ + group.world_size()) % 2 == 0 ? 8192 : 1 << 20;
        Pair run(group, moments, ZeroOptions().bucket_bytes(bucket_bytes), muon);
        for (int n = 0; n < 3; ++n) run.step(n);
        run.optimizer->check_replicas();
      }
    }
  });
}

TEST(MuonMomentsTest, TakeTheBytesOfTheirFormat) {
  run_ranks(1, [&](const Group& group) {
    Pair run(group, Moments::kInt8, ZeroOptions(), muon_options());
    run.step(0);
    // A byte an element, a scale a block, and fp32 for the small matrix.
    const int64_t muon = 67 * 130 + 4 * 35 + 96 * 64 + 4 * 24 + 4 * 40 * 60;
    EXPECT_EQ(run.optimizer->memory().optimizer_state, muon + 2 * (5000 + 4 * 20));
  });
}

// The first rank alone has gradients, so that their sum does not depend on the others.
TEST(MuonMomentsTest, GoOnFromACheckpointOfAnotherNumberOfRanksInEveryBit) {
  const std::string folder = ::testing::TempDir() + "muon_moments";
  for (const Moments moments : {Moments::kInt8, Moments::kBFloat16}) {
    std::filesystem::remove_all(folder);
    int first = 0;
    for (const int ranks : {2, 3, 1, 4}) {
      run_ranks(ranks, [&](const Group& group) {
        Pair run(group, moments,
                 ZeroOptions().bucket_bytes(ranks * 9000).reduction(Reduction::kSum),
                 muon_options());
        if (first > 0) run.optimizer->load_checkpoint(folder);
        for (int n = 0; n < first + 2; ++n) {
          const auto given = gradients(0, n);
          for (size_t p = 0; p < given.size(); ++p) {
            if (p != kVector) run.plain[p].step(given[p], n + 1, group.rank() == 0);
          }
          if (n < first) continue;
          auto own = given;
          for (at::Tensor& g : own) {
            if (group.rank() != 0) g = at::zeros_like(g);
          }
          run.optimizer->backward(run.model.loss(own));
          run.optimizer->step();
          run.compare(n);
        }
        run.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
      });
      first += 2;
    }
  }
}

TEST(MuonMomentsTest, TrainAsWellAsInFp32) {
  run_ranks(1, [&](const Group& group) {
    const at::Tensor target = random_tensor({64, 128}, 7);
    const auto distance = [&](Moments moments) {
      GivenGradients model({at::zeros({64, 128})});
      ZeroOptimizer optimizer(
          model,
          std::make_unique<Muon>(model.parameters(),
                                 MuonOptions(0.3).weight_decay(0).ns_dtype(at::kFloat)),
          group, ZeroOptions().moments(moments));
      for (int n = 0; n < 100; ++n) {
        for (auto& g : optimizer.param_groups()) g.options().set_lr(0.3 * (100.0 - n) / 100.0);
        const at::Tensor noise = random_tensor({64, 128}, static_cast<uint64_t>(n));
        optimizer.backward(model.loss({model.values[0].detach() - target + 0.2 * noise}));
        optimizer.step();
      }
      return (model.values[0].detach() - target).square().mean().item<double>();
    };
    const double in_fp32 = distance(Moments::kFloat32);
    const double at_first = target.square().mean().item<double>();
    EXPECT_LT(in_fp32, 0.2 * at_first);
    EXPECT_NEAR(distance(Moments::kBFloat16), in_fp32, 0.02 * in_fp32);
    EXPECT_NEAR(distance(Moments::kInt8), in_fp32, 0.05 * in_fp32);
  });
}

// Its own step() stores them, so that fused(false) leaves them as they are; AdamW's needs its
// kernel.
TEST(MuonMomentsTest, NeedNoFusedKernel) {
  run_ranks(2, [&](const Group& group) {
    Pair run(group, Moments::kFloat32, ZeroOptions().fused(false).moments(0, Moments::kInt8),
             muon_options());
    Pair fused(group, Moments::kFloat32, ZeroOptions().moments(0, Moments::kInt8), muon_options());
    for (Pair* const each : {&run, &fused}) {
      each->optimizer->backward(each->model.loss(gradients(0, 0)));
      each->optimizer->step();
    }
    EXPECT_EQ(run.optimizer->memory().optimizer_state, fused.optimizer->memory().optimizer_state);
    GivenGradients model(initial_values());
    expect_words(error_of([&] {
                   ZeroOptimizer(model, inner_of(model.values, muon_options()), group,
                                 ZeroOptions().fused(false).moments(Moments::kInt8));
                 }),
                 {"moments of parameter group 1", "without a fused kernel", "zero::Muon"});
  });
}

}  // namespace
}  // namespace zero
