// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What code that holds a torch::optim::Optimizer& calls: the table of docs/from_libtorch.md, in its
// order.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

template <class Optimizer>
concept HasState = requires(Optimizer& optimizer) {
  optimizer.state();
};

using torch::optim::Optimizer;

struct Both {
  explicit Both(const Group& group)
      : zero_optimizer(*net, make(net->parameters()), group),
        base(zero_optimizer),
        plain_optimizer(make(plain->parameters())) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      plain->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  // Two groups, as programs with and without decay have them.
  static std::unique_ptr<torch::optim::Adam> make(const std::vector<at::Tensor>& p) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{p[0]});
    groups.emplace_back(std::vector<at::Tensor>{p[1]},
                        std::make_unique<torch::optim::AdamOptions>(0.05));
    return std::make_unique<torch::optim::Adam>(std::move(groups), torch::optim::AdamOptions(0.1));
  }
  static at::Tensor loss(torch::nn::Linear& of) {
    return of(random_tensor({5, 4}, 3)).square().sum();
  }
  void expect_equal() {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6)) << i;
    }
  }

  torch::nn::Linear net{4, 3};
  torch::nn::Linear plain{4, 3};
  ZeroOptimizer zero_optimizer;
  Optimizer& base;
  std::unique_ptr<Optimizer> plain_optimizer;
};

void run(const std::function<void(Both&)>& body) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Group& group) {
      Both both(group);
      body(both);
    });
  }
}

void step_plainly(Both& both) {
  both.plain_optimizer->zero_grad();
  Both::loss(both.plain).backward();
  both.plain_optimizer->step();
}

// Through the base class.
void train(Both& both, int steps = 1) {
  for (int i = 0; i < steps; ++i) {
    Both::loss(both.net).backward();
    both.base.step();
    step_plainly(both);
  }
  both.expect_equal();
}

TEST(OptimizerBaseTest, StepAlsoWithAClosure) {
  run([](Both& both) {
    train(both, 2);
    {
      const at::NoGradGuard no_grad;  // a closure has gradients all the same
      const at::Tensor loss = both.base.step([&] {
        at::Tensor of_closure = Both::loss(both.net);
        of_closure.backward();
        return of_closure;
      });
      EXPECT_TRUE(loss.defined());
    }
    step_plainly(both);
    both.expect_equal();
  });
}

TEST(OptimizerBaseTest, ParamGroupsAndDefaultsAreThoseOfTheWrappedOne) {
  run([](Both& both) {
    ASSERT_EQ(both.base.param_groups().size(), 2u);
    EXPECT_TRUE(both.base.param_groups()[1].params()[0].is_same(both.net->bias));
    EXPECT_EQ(both.base.param_groups()[1].options().get_lr(), 0.05);
    EXPECT_EQ(both.base.defaults().get_lr(), 0.1);
    for (Optimizer* o : {&both.base, both.plain_optimizer.get()}) {
      o->param_groups()[0].options().set_lr(0.02);
    }
    train(both);
  });
}

TEST(OptimizerBaseTest, ParametersAndSizeAreThoseThatTorchGives) {
  run([](Both& both) {
    EXPECT_TRUE(both.base.parameters()[0].is_same(both.net->weight));
    EXPECT_EQ(both.base.parameters().size(), both.plain_optimizer->parameters().size());
    EXPECT_EQ(both.base.size(), both.plain_optimizer->size());
  });
}

TEST(OptimizerBaseTest, ASchedulerOfTorchSetsTheRates) {
  run([](Both& both) {
    torch::optim::StepLR of_zero(both.base, /*step_size=*/1, /*gamma=*/0.5);
    torch::optim::StepLR of_plain(*both.plain_optimizer, /*step_size=*/1, /*gamma=*/0.5);
    for (int i = 0; i < 3; ++i) {
      train(both);
      of_zero.step();
      of_plain.step();
    }
    const double rate = both.plain_optimizer->param_groups()[1].options().get_lr();
    EXPECT_LT(rate, 0.03);
    EXPECT_EQ(both.base.param_groups()[1].options().get_lr(), rate);
  });
}

TEST(OptimizerBaseTest, StateIsThatOfTheInnerOptimizer) {
  run([](Both& both) {
    train(both);
    // `*optimizer.state()[p]` would be a null pointer.
    static_assert(HasState<torch::optim::Optimizer> && !HasState<ZeroOptimizer>);
    EXPECT_TRUE(both.base.state().empty());
    EXPECT_FALSE(both.zero_optimizer.inner().state().empty());
  });
}

TEST(OptimizerBaseTest, SaveAndLoadNameTheCallsToUse) {
  run([](Both& both) {
    std::stringstream stream;
    expect_words(error_of([&] { torch::save(both.base, stream); }), {"save_checkpoint()"});
    torch::serialize::InputArchive archive;
    expect_words(error_of([&] { both.base.load(archive); }),
                 {"load_checkpoint()", "load_plain_state()"});
  });
}

}  // namespace
}  // namespace zero
