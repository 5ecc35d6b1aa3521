// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Losses that reach the parameters of several optimizers, of which one runs the backward pass.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/device/emulated_network.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Words = std::vector<std::string>;

// Six weights that are 1 at the start, and SGD with a learning rate of 1.
struct Net final : torch::nn::Module {
  Net(const Group& group, c10::ScalarType dtype, const ZeroOptions& options = {})
      : weight(register_parameter("weight",
                                  at::ones({6}, at::TensorOptions(dtype).device(group.device())))) {
    optimizer = std::make_unique<ZeroOptimizer>(
        *this, std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weight}, 1.0), group,
        options);
  }
  // Its gradient is `slope` in each element.
  at::Tensor loss(double slope) const { return weight.to(at::kFloat).sum() * slope; }
  void expect_all(double value) const {
    EXPECT_TRUE(at::equal(weight.detach(), at::full_like(weight.detach(), value))) << weight;
  }

  at::Tensor weight;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

ZeroOptions constant_scale(double scale) {
  return ZeroOptions().loss_scaler(
      LossScalerOptions().initial_scale(scale).min_scale(scale).max_scale(scale));
}

// On a device autograd calls hooks in threads of its own.
void on_ranks(const std::function<void(const Group&)>& body) {
  for (const int world_size : {1, 2, 3}) run_ranks(world_size, body);
  run_device_ranks(2, body, {.room = 5});
}

const Words kOtherScale{"loss scale of 1,", "65536", "ZeroOptions::loss_scaler",
                        "one optimizer of all that", "requires_grad_(false)"};

TEST(SharedLossTest, AnotherLossScaleIsRefusedOnAllRanks) {
  on_ranks([](const Group& group) {
    Net a(group, at::kHalf), b(group, at::kFloat);
    for (const bool on_all : {true, false}) {
      const bool reached = on_all || group.rank() == 0;
      const at::Tensor loss = reached ? a.loss(0.25) + b.loss(0.5) : a.loss(0.25);
      const std::string text = error_of([&] { a.optimizer->backward(loss); });
      if (reached) expect_words(text, kOtherScale);
      expect_words(error_of([&] { a.optimizer->step(); }), {"zero_grad()"});
      expect_words(error_of([&] { b.optimizer->step(); }), kOtherScale);
      a.optimizer->zero_grad();
      b.optimizer->zero_grad();
    }
    // As the text says.
    b.weight.requires_grad_(false);
    a.optimizer->backward(a.loss(0.25) + b.loss(0.5));
    b.weight.requires_grad_(true);
    b.optimizer->backward(b.loss(0.125));
    for (Net* net : {&a, &b}) net->optimizer->step();
    a.expect_all(0.75);
    b.expect_all(0.875);
  });
}

// The second pass runs inside of the first one, as that of a checkpointed part does.
TEST(SharedLossTest, APassInsideHasTheScaleOfThePassOutside) {
  on_ranks([](const Group& group) {
    Net a(group, at::kHalf), b(group, at::kFloat), c(group, at::kHalf);
    const auto inside = [&](const Net& other) {
      const at::Tensor loss = a.loss(0.25);
      loss.register_hook([&other](const at::Tensor& gradient) {
        const at::AutoGradMode with_graph(true);
        other.loss(0.5).backward(gradient.detach());
      });
      return loss * 1;
    };
    expect_words(error_of([&] { a.optimizer->backward(inside(b)); }), kOtherScale);
    for (Net* net : {&a, &b}) {
      EXPECT_NE(error_of([&] { net->optimizer->step(); }), "");
      net->optimizer->zero_grad();
    }
    a.optimizer->backward(inside(c));
    for (Net* net : {&a, &b, &c}) net->optimizer->step();
    a.expect_all(0.75);
    b.expect_all(1);
    c.expect_all(0.5);
  });
}

TEST(SharedLossTest, EqualLossScalesAreTaken) {
  on_ranks([](const Group& group) {
    Net a(group, at::kHalf), b(group, at::kHalf), c(group, at::kFloat, constant_scale(65536));
    Net d(group, at::kFloat, constant_scale(8)), e(group, at::kBFloat16, constant_scale(8));
    for (int step = 1; step <= 2; ++step) {
      // On a device it waits for the last step. Else the hooks of all but `a` and `d` would.
      for (Net* net : {&a, &b, &c, &d, &e}) net->optimizer->loss_scale();
      a.optimizer->backward(a.loss(0.25) + b.loss(0.125) + c.loss(0.5));
      d.optimizer->backward(d.loss(0.25) + e.loss(0.125));
      for (Net* net : {&a, &b, &c, &d, &e}) net->optimizer->step();
      a.expect_all(1 - 0.25 * step);
      b.expect_all(1 - 0.125 * step);
      c.expect_all(1 - 0.5 * step);
      d.expect_all(1 - 0.25 * step);
      e.expect_all(1 - 0.125 * step);
    }
  });
}

TEST(SharedLossTest, ALossIsScaledOnceByBackwardOrByScaleLoss) {
  on_ranks([](const Group& group) {
    Net a(group, at::kHalf), b(group, at::kHalf), c(group, at::kFloat);
    const auto loss = [&] { return a.loss(0.25) + b.loss(0.5); };
    for (Net* net : {&a, &b, &c}) {
      const at::Tensor scaled = b.optimizer->scale_loss(loss());
      const Words words{"scale_loss() has not multiplied", "call backward(loss), or"};
      expect_words(error_of([&] { net->optimizer->backward(scaled); }), words);
      expect_words(error_of([&] { net->optimizer->step(); }), words);
      net->optimizer->zero_grad();
    }
    a.optimizer->scale_loss(loss());  // so that both know of it
    b.optimizer->scale_loss(loss()).backward();
    for (Net* net : {&a, &b}) net->optimizer->step();
    a.expect_all(0.75);
    b.expect_all(0.5);
  });
}

// Dynamic scales come apart where one of two optimizers skips a step.
TEST(SharedLossTest, AScaleThatHasShrunkIsRefused) {
  on_ranks([](const Group& group) {
    Net a(group, at::kHalf), b(group, at::kHalf);
    a.optimizer->backward(a.loss(0.25) + b.loss(1e6));
    for (Net* net : {&a, &b}) net->optimizer->step();
    EXPECT_TRUE(b.optimizer->step_skipped());
    expect_words(error_of([&] { a.optimizer->backward(a.loss(0.25) + b.loss(0.5)); }),
                 {"loss scale of 32768,", "65536"});
    for (Net* net : {&a, &b}) {
      EXPECT_NE(error_of([&] { net->optimizer->step(); }), "");
      net->optimizer->zero_grad();
    }
    b.expect_all(1);
  });
}

// As the error says: two runs that are resumed with one constant scale.
TEST(SharedLossTest, AConstantScaleIsThatOfALoadedOptimizerToo) {
  const std::string parent = ::testing::TempDir() + "/shared_loss";
  std::filesystem::remove_all(parent);
  on_ranks([&](const Group& group) {
    {
      Net a(group, at::kHalf), b(group, at::kHalf);
      a.optimizer->backward(a.loss(0.25) + b.loss(1e6));
      int number = 0;
      for (Net* net : {&a, &b}) {
        net->optimizer->step();
        net->optimizer->save_checkpoint(parent + "/" + std::to_string(number++),
                                        SaveOptions().overwrite(true));
      }
    }
    Net a(group, at::kHalf, constant_scale(1024)), b(group, at::kHalf, constant_scale(1024));
    int number = 0;
    for (Net* net : {&a, &b}) {
      net->optimizer->load_checkpoint(parent + "/" + std::to_string(number++));
      EXPECT_EQ(net->optimizer->loss_scale(), 1024);
    }
    a.optimizer->backward(a.loss(0.25) + b.loss(0.5));
    for (Net* net : {&a, &b}) net->optimizer->step();
    a.expect_all(0.5);
    b.expect_all(0.5);
  });
}

// The generator's loss reaches an fp16 discriminator: of a ZeroOptimizer, of one of torch.
TEST(SharedLossTest, APassThatReachesAScaledOptimizerNamesTheRemedyOfAGan) {
  on_ranks([](const Group& group) {
    Net generator(group, at::kFloat), discriminator(group, at::kHalf);
    for (const bool plain : {false, true}) {
      const at::Tensor loss = generator.loss(0.5) + discriminator.loss(0.25);
      expect_words(error_of([&] { plain ? loss.backward() : generator.optimizer->backward(loss); }),
                   {"65536", "requires_grad_(false)"});
      for (Net* net : {&generator, &discriminator}) {
        error_of([&] { net->optimizer->step(); });
        net->optimizer->zero_grad();
      }
    }
  });
}

TEST(SharedLossTest, APassThatThrowsLeavesNoOptimizerAPartOfItsGradient) {
  on_ranks([](const Group& group) {
    Net a(group, at::kFloat), b(group, at::kFloat);
    const auto pass = [&](bool fails) {
      at::Tensor loss = a.loss(0.25) * 1;
      if (fails) {
        loss.register_hook(
            [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("of the model"); });
      }
      // What was computed last comes first.
      a.optimizer->backward(loss + b.loss(0.5));
    };
    if (group.rank() == 0) {
      EXPECT_THROW(pass(true), std::runtime_error);
    } else {
      pass(false);
    }
    for (Net* net : {&a, &b}) {
      for (int i = 0; i < 2; ++i) {
        expect_words(error_of([&] { net->optimizer->step(); }),
                     {"of the model", "zero_grad()", "every optimizer that the loss reaches"});
      }
    }
    for (Net* net : {&a, &b}) net->optimizer->zero_grad();
    pass(false);
    for (Net* net : {&a, &b}) net->optimizer->step();
    a.expect_all(0.75);
    b.expect_all(0.5);
  });
}

}  // namespace
}  // namespace zero
