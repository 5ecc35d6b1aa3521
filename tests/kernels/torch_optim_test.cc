// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Several steps beside libtorch's own optimizers. They fuse some products and
// sums where the processor can, so the last bits differ: the tests bound the
// difference in units of the update (lr) and, for parameters, in ulp.
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>

#include "kernels/adam.h"
#include "kernels/sgd.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

constexpr int64_t kNumel = 4099;
constexpr int64_t kSteps = 20;

at::Tensor gradient_of(int64_t step) {
  at::Tensor gradient = at::empty({kNumel});
  fill_ordinary(gradient.data_ptr<float>(), kNumel, static_cast<uint32_t>(100 + step), 1e-2F);
  return gradient;
}

at::Tensor initial_values() {
  at::Tensor values = at::empty({kNumel});
  fill_ordinary(values.data_ptr<float>(), kNumel, 99);
  return values;
}

// The largest distance in ulp between elements above 0.1 in magnitude. (Near zero an ulp is far
// smaller than the rounding of the update, which the other bound covers.)
int64_t largest_ulp(const at::Tensor& a, const at::Tensor& b) {
  int64_t largest = 0;
  for (int64_t i = 0; i < kNumel; ++i) {
    const float x = a.data_ptr<float>()[i];
    if (std::fabs(x) > 0.1F) {
      largest = std::max(largest, ulp_distance(x, b.data_ptr<float>()[i]));
    }
  }
  return largest;
}

void expect_close(const at::Tensor& torch_values, const at::Tensor& ours, double lr) {
  const double difference = (torch_values - ours).abs().max().item<double>();
  EXPECT_LT(difference, 1e-3 * lr);
  const int64_t ulp = largest_ulp(torch_values, ours);
  EXPECT_LE(ulp, 8);
  ::testing::Test::RecordProperty("largest_ulp", static_cast<int>(ulp));
  std::printf("after %d steps: largest difference %.3g = %.3g lr, %d ulp\n",
              static_cast<int>(kSteps), difference, difference / lr, static_cast<int>(ulp));
}

template <class Optimizer, class Options>
void run_torch(const at::Tensor& parameter, const Options& options) {
  Optimizer optimizer(std::vector<at::Tensor>{parameter}, options);
  for (int64_t step = 1; step <= kSteps; ++step) {
    parameter.mutable_grad() = gradient_of(step);
    optimizer.step();
  }
}

void compare_adam(bool decoupled, bool amsgrad, double weight_decay) {
  const double lr = 1e-3;
  at::Tensor theirs = initial_values().requires_grad_();
  if (decoupled) {
    run_torch<torch::optim::AdamW>(
        theirs, torch::optim::AdamWOptions(lr).weight_decay(weight_decay).amsgrad(amsgrad));
  } else {
    run_torch<torch::optim::Adam>(
        theirs, torch::optim::AdamOptions(lr).weight_decay(weight_decay).amsgrad(amsgrad));
  }

  at::Tensor ours = initial_values();
  at::Tensor m = at::zeros({kNumel}), v = at::zeros({kNumel}), max_v = at::zeros({kNumel});
  AdamOptions options{.lr = lr, .weight_decay = weight_decay};
  options.decoupled = decoupled;
  options.amsgrad = amsgrad;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const at::Tensor gradient = gradient_of(step);
    AdamSegment segment;
    segment.master = ours.data_ptr<float>();
    segment.exp_avg = m.data_ptr<float>();
    segment.exp_avg_sq = v.data_ptr<float>();
    segment.max_exp_avg_sq = max_v.data_ptr<float>();
    segment.gradient = gradient.data_ptr<float>();
    segment.numel = kNumel;
    segment.step = step;
    adam_step(segment, options, nullptr, nullptr, c10::ScalarType::Float, Stream{});
  }
  expect_close(theirs.detach(), ours, lr);
}

TEST(TorchOptim, AdamW) { compare_adam(true, false, 0.01); }
TEST(TorchOptim, AdamWWithoutDecay) { compare_adam(true, false, 0.0); }
TEST(TorchOptim, AdamWAmsgrad) { compare_adam(true, true, 0.1); }
TEST(TorchOptim, Adam) { compare_adam(false, false, 0.0); }
TEST(TorchOptim, AdamWithDecay) { compare_adam(false, false, 0.01); }
TEST(TorchOptim, AdamAmsgrad) { compare_adam(false, true, 0.01); }

void compare_sgd(const SgdOptions& options) {
  at::Tensor theirs = initial_values().requires_grad_();
  run_torch<torch::optim::SGD>(theirs, torch::optim::SGDOptions(options.lr)
                                           .momentum(options.momentum)
                                           .dampening(options.dampening)
                                           .weight_decay(options.weight_decay)
                                           .nesterov(options.nesterov));
  at::Tensor ours = initial_values();
  at::Tensor momentum = at::empty({kNumel});
  for (int64_t step = 1; step <= kSteps; ++step) {
    const at::Tensor gradient = gradient_of(step);
    SgdSegment segment;
    segment.master = ours.data_ptr<float>();
    segment.momentum = momentum.data_ptr<float>();
    segment.gradient = gradient.data_ptr<float>();
    segment.numel = kNumel;
    segment.first_step = step == 1;
    sgd_step(segment, options, nullptr, nullptr, c10::ScalarType::Float, Stream{});
  }
  expect_close(theirs.detach(), ours, 1e-2);
}

TEST(TorchOptim, SgdPlain) { compare_sgd({.lr = 0.1}); }
TEST(TorchOptim, SgdDecay) { compare_sgd({.lr = 0.1, .weight_decay = 0.01}); }
TEST(TorchOptim, SgdMomentumDampening) {
  compare_sgd({.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.01});
}
TEST(TorchOptim, SgdNesterov) { compare_sgd({.lr = 0.1, .momentum = 0.9, .nesterov = true}); }

}  // namespace
}  // namespace zero::kernels
