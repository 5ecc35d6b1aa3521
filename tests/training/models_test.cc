// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Trainers as people write them: two optimizers at once (a GAN), tied and
// frozen parameters, learning-rate schedulers, several outputs, closures,
// buffers, and models whose memory is not row-major.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cfenv>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/in_memory_backend.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

void fill(torch::nn::Module& module, uint64_t seed) {
  at::NoGradGuard no_grad;
  for (at::Tensor& p : module.parameters()) p.copy_(random_tensor(p.sizes(), seed++) * 0.3);
}

std::vector<at::Tensor> values(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : module.parameters()) result.push_back(p.detach().clone());
  return result;
}

void expect_close(const torch::nn::Module& module, const std::vector<at::Tensor>& expected) {
  const auto parameters = module.parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-5, 1e-6)) << "parameter " << i;
  }
}

// A weight used by two layers and registered under both names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    in = register_parameter("in", at::zeros({9, 5}));
    out = register_parameter("out", in);
    bias = register_parameter("bias", at::zeros({9}));
  }
  at::Tensor loss(const at::Tensor& x) {
    return (at::matmul(at::tanh(at::matmul(x, in)), out.t()) + bias - x).pow(2).mean();
  }
  at::Tensor in, out, bias;
};
TORCH_MODULE(Tied);

TEST(ModelsTest, TiedParametersAreOneParameter) {
  Tied reference;
  fill(*reference, 3);
  torch::optim::SGD sgd({reference->in, reference->bias},
                        torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    for (int rank = 0; rank < 2; ++rank) {
      (reference->loss(random_tensor({4, 9}, 10 * step + rank)) / 2).backward();
    }
    sgd.step();
    expected.push_back(values(*reference));
  }
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    run_ranks(2, [&](const Group& group) {
      Tied model;
      fill(*model, 3);
      // parameters() lists the tied tensor twice.
      ZeroOptimizer optimizer(*model,
                              std::make_unique<torch::optim::SGD>(
                                  model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
                              group, ZeroOptions().layout(layout));
      for (int step = 0; step < 3; ++step) {
        optimizer.backward(model->loss(random_tensor({4, 9}, 10 * step + group.rank())));
        optimizer.step();
        EXPECT_TRUE(model->in.is_same(model->out));
        expect_close(*model, expected[step]);
      }
    });
  }
}

TEST(ModelsTest, TiedParametersCountOnceInTheNormAndInACheckpoint) {
  for (const int world_size : {1, 2, 3}) {
    Tied reference;
    fill(*reference, 3);
    for (int rank = 0; rank < world_size; ++rank) {
      (reference->loss(random_tensor({4, 9}, rank)) / world_size).backward();
    }
    const auto squares = [](const at::Tensor& p) {
      return p.grad().to(at::kDouble).pow(2).sum().item<double>();
    };
    const double norm = std::sqrt(squares(reference->in) + squares(reference->bias));
    const std::string folder =
        ::testing::TempDir() + "/tied" + std::to_string(world_size) + std::to_string(getpid());
    run_ranks(world_size, [&](const Group& group) {
      Tied model, again;
      fill(*model, 3);
      const auto optimizer_of = [&](Tied& tied) {
        return std::make_unique<ZeroOptimizer>(
            *tied, std::make_unique<torch::optim::AdamW>(tied->parameters(), 0.1), group);
      };
      const auto optimizer = optimizer_of(model);
      optimizer->backward(model->loss(random_tensor({4, 9}, group.rank())));
      EXPECT_NEAR(optimizer->grad_norm().item<double>(), norm, 1e-6 * norm);
      optimizer->step();
      optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
      std::map<std::string, int64_t> stored;
      for (const ManifestTensors& entry : read_manifest(folder).tensors) {
        for (const ManifestPiece& piece : entry.pieces) stored[entry.owner] += piece.numel;
      }
      EXPECT_EQ(stored, (std::map<std::string, int64_t>{{"in", 45}, {"bias", 9}}));
      optimizer_of(again)->load_checkpoint(folder);
      EXPECT_TRUE(again->in.is_same(again->out));
      EXPECT_TRUE(at::equal(again->out, model->out));
    });
  }
}

// A module that is used twice, two heads on it, and a backward pass for the loss of each.
struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() : body(6, 6), first(6, 3), second(6, 2) {
    register_module("body", body);
    register_module("first", first);
    register_module("second", second);
    fill(*this, 5);
  }
  std::vector<at::Tensor> losses(const at::Tensor& x) {
    const at::Tensor h = at::tanh(body(at::tanh(body(x))));
    return {first(h).pow(2).mean(), second(h).pow(2).mean()};
  }
  torch::nn::Linear body, first, second;
};
TORCH_MODULE(TwoHeads);

TEST(ModelsTest, TwoLossesOverOneGraphAndASharedModule) {
  for (const int world_size : {1, 2, 3}) {
    TwoHeads reference;
    torch::optim::SGD sgd(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::vector<std::vector<at::Tensor>> expected;
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      for (int rank = 0; rank < world_size; ++rank) {
        for (const at::Tensor& loss : reference->losses(random_tensor({4, 6}, 10 * step + rank))) {
          (loss / world_size).backward({}, /*retain_graph=*/true);
        }
      }
      sgd.step();
      expected.push_back(values(*reference));
    }
    for (const int64_t stage : {1, 2}) {
      for (const bool no_sync : {false, true}) {
        run_ranks(world_size, [&](const Group& group) {
          TwoHeads model;
          ZeroOptimizer optimizer(
              *model,
              std::make_unique<torch::optim::SGD>(model->parameters(),
                                                  torch::optim::SGDOptions(0.1).momentum(0.9)),
              group, ZeroOptions().stage(stage).bucket_bytes(100));
          for (int step = 0; step < 3; ++step) {
            const auto losses = model->losses(random_tensor({4, 6}, 10 * step + group.rank()));
            {
              const auto guard = optimizer.no_sync(no_sync);
              optimizer.backward({losses[0]}, {}, /*retain_graph=*/true);
            }
            optimizer.backward(losses[1]);
            optimizer.step();
            expect_close(*model, expected[step]);
          }
        });
      }
    }
  }
}

TEST(ModelsTest, SeveralOutputsAndAClosure) {
  torch::nn::Linear reference(6, 3);
  fill(*reference, 1);
  torch::optim::SGD sgd(reference->parameters(), 0.2);
  const at::Tensor x = random_tensor({4, 6}, 8), seed = random_tensor({4, 3}, 9);
  at::Tensor y = reference(x);
  y.backward(seed, /*retain_graph=*/true);
  y.pow(2).sum().backward();
  sgd.step();
  run_ranks(3, [&](const Group& group) {
    torch::nn::Linear model(6, 3);
    fill(*model, 1);
    ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::SGD>(model->parameters(), 0.2),
                            group);
    const at::Tensor loss = optimizer.step([&] {
      at::Tensor out = model(x);
      optimizer.backward({out, out.pow(2).sum()}, {seed, at::Tensor()}, false);
      return out.sum().detach();
    });
    EXPECT_TRUE(loss.defined());
    expect_close(*model, values(*reference));
  });
}

// As torch's loss.backward() does: C++ trainers begin a loss with zeros({1}).
TEST(ModelsTest, ALossOfOneElementMayHaveDimensions) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const auto after_a_step = [&](const std::vector<int64_t>& shape, bool outputs) {
        torch::nn::Linear model(6, 3);
        fill(*model, 1);
        ZeroOptimizer optimizer(
            *model, std::make_unique<torch::optim::SGD>(model->parameters(), 0.2), group,
            ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(8)));
        const auto backward = [&](const at::Tensor& loss) {
          outputs ? optimizer.backward({loss}, {}) : optimizer.backward(loss);
        };
        const at::Tensor x = random_tensor({4, 6}, static_cast<uint64_t>(group.rank()));
        backward(model(x).pow(2).mean().reshape(shape));
        backward(at::zeros(shape).requires_grad_());  // a regularizer that is off
        optimizer.step();
        return values(*model);
      };
      const std::vector<at::Tensor> expected = after_a_step({}, false);
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1}, {1, 1, 1}}) {
        for (const bool outputs : {false, true}) {
          const std::vector<at::Tensor> got = after_a_step(shape, outputs);
          for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i]));
        }
      }
    });
  }
}

TEST(ModelsTest, EverythingStartsFromRankZero) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    run_ranks(3, [&](const Group& group) {
      OddModel model(40 + group.rank());
      const std::vector<int64_t> strides = model->last.strides().vec();
      model->counter.fill_(7 + group.rank());
      ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group,
                              ZeroOptions().layout(layout));
      OddModel first(40);
      expect_close(*model, values(*first));
      EXPECT_EQ(model->counter.item<int64_t>(), 7);
      EXPECT_EQ(model->last.strides().vec(), strides) << "channels_last must stay";
      model->counter.fill_(20 + group.rank());
      optimizer.broadcast_buffers();
      EXPECT_EQ(model->counter.item<int64_t>(), 20);
      EXPECT_FALSE(model->frozen.grad().defined());
    });
  }
}

TEST(ModelsTest, FrozenParametersAndBuffersAreThoseOfRankZeroInReplicasToo) {
  run_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {{"rep", 2}, {"shard", 2}});
    const auto copies = GroupPlacement().replicated_over(mesh.group({"rep"}));
    OddModel model(40 + world.rank());
    model->counter.fill_(7 + world.rank());
    ZeroOptimizer optimizer(
        *model, make_inner(Inner::kSgd, *model), mesh.group({"shard"}),
        ZeroOptions().mesh_group(world).placement(0, copies).placement(1, copies));
    EXPECT_TRUE(at::equal(model->frozen, OddModel(40)->frozen));
    EXPECT_EQ(model->counter.item<int64_t>(), 7);
    model->counter.fill_(20 + world.rank());
    optimizer.broadcast_buffers();
    EXPECT_EQ(model->counter.item<int64_t>(), 20);
  });
}

// And a large one in pieces of at most the bytes that an operation sends.
TEST(ModelsTest, BuffersOfEveryDtypeAndMemoryOrderAreSentBitByBit) {
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    const auto random = [](int rank) { return random_tensor({6, 4}, 1 + rank) * 100; };
    std::vector<std::pair<at::Tensor, at::Tensor>> expected;
    const auto add = [&](const char* name, c10::ScalarType dtype, const at::Tensor& own,
                         const at::Tensor& of_rank_0) {
      expected.emplace_back(model->register_buffer(c10::str(name, dtype), own), of_rank_0);
    };
    for (const c10::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt,
                                        at::kLong, at::kByte, at::kBool, at::kComplexFloat}) {
      const at::Tensor own = random(group.rank()).to(dtype), first = random(0).to(dtype);
      const at::Tensor all = own.repeat({1, 2}), rest = all.narrow(1, 6, 2);
      add("dense", dtype, own.clone(), first);
      add("transposed", dtype, own.t().contiguous().t(), first);
      add("scalar", dtype, own[0][0].clone(), first[0][0]);
      add("part", dtype, all.narrow(1, 2, 4), first.repeat({1, 2}).narrow(1, 2, 4));
      add("empty", dtype, at::empty({0, 3}, dtype), at::empty({0, 3}, dtype));
      // The rest of the memory that it is a part of is this rank's own.
      expected.emplace_back(rest, own.narrow(1, 2, 2));
    }
    for (int i = 0; i < 20; ++i) {  // more than go together
      const auto full = [&](int value) { return at::full({1 << 18}, value, at::kByte); };
      expected.emplace_back(
          model->register_buffer(c10::str("one of many", i), full(i + 100 * group.rank())),
          full(i));
    }
    constexpr int64_t kMost = int64_t{64} << 20;
    const at::Tensor large = model->register_buffer("large", at::zeros({kMost + 1}, at::kByte));
    for (const int64_t i : {int64_t{0}, kMost - 1, kMost}) large[i] = 7 + group.rank();
    ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(expected[i].first, expected[i].second)) << i;
    }
    for (const int64_t i : {int64_t{0}, kMost - 1, kMost}) EXPECT_EQ(large[i].item<int>(), 7) << i;
    const int64_t before = optimizer.stats().data.small_calls;
    const auto version = expected[0].first._version();
    optimizer.broadcast_buffers();
    EXPECT_EQ(expected[0].first._version(), version);  // a graph may have saved it
    // Small ones by 4 MiB together, and the large one in two pieces.
    EXPECT_EQ(optimizer.stats().data.small_calls - before, 2 + 2);
  });
}

TEST(ModelsTest, ABroadcastThatFailsNamesWhatItSends) {
  for (const bool buffers : {false, true}) {
    const RunOptions options{.network = std::make_shared<MemoryNetwork>(RowTransport::kWhole)};
    run_ranks(
        2,
        [&](const Group& group) {
          OddModel model(1 + group.rank());  // equal parameters would not be sent
          std::unique_ptr<ZeroOptimizer> optimizer;
          const auto make = [&] {
            optimizer =
                std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kSgd, *model), group);
          };
          if (buffers) make();
          if (group.rank() == 1) options.network->kill_at(1, MemoryOp::kBroadcast, 1);
          const std::string text =
              error_of([&] { buffers ? optimizer->broadcast_buffers() : make(); });
          if (group.rank() != 1) return;  // the sender may be done
          expect_words(text, {buffers ? "broadcast of buffers" : "broadcast of parameters"});
        },
        options);
  }
}

TEST(ModelsTest, StepWithoutGradientsDoesNothing) {
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group);
    const auto before = values(*model);
    optimizer.step();
    expect_close(*model, before);
    optimizer.backward(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    optimizer.zero_grad();
    optimizer.step();
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(model->parameters()[i], before[i]));
    }
    EXPECT_EQ(optimizer.stats().steps, 0);
  });
}

TEST(ModelsTest, ParametersOutliveTheOptimizer) {
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    const at::Tensor& weight = model->trunk->weight;
    int calls = 0;
    weight.register_hook([&](const at::Tensor&) { ++calls; });
    const size_t hooks = torch::autograd::impl::hooks(weight).size();
    { ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group); }
    at::Tensor loss =
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll);
    loss.backward();
    EXPECT_TRUE(weight.grad().defined()) << "hooks must be gone";
    EXPECT_EQ(torch::autograd::impl::hooks(weight).size(), hooks);
    EXPECT_EQ(calls, 1) << "that of the user stays";
    ZeroOptimizer again(*model, make_inner(Inner::kSgd, *model), group);
  });
}

struct OwnHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

TEST(ModelsTest, AHookThatTookThePlaceOfTheOptimizersStays) {
  using torch::autograd::impl::post_acc_grad_hooks;
  run_ranks(1, [&](const Group& group) {
    OddModel model(1);
    auto own = std::make_unique<OwnHook>();
    const auto* const there = own.get();
    {
      ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group);
      torch::autograd::impl::set_post_acc_grad_hooks(model->scale, std::move(own));
    }
    EXPECT_EQ(post_acc_grad_hooks(model->last), nullptr);
    EXPECT_EQ(post_acc_grad_hooks(model->scale).get(), there);
  });
}

// A program that traps it would end.
TEST(ModelsTest, ConstructionRaisesNoInvalidOperation) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    run_ranks(1, [&](const Group& group) {
      torch::nn::Linear layer(3, 2);
      layer->to(dtype);
      auto sgd = std::make_unique<torch::optim::SGD>(layer->parameters(), 0.1);
      std::feclearexcept(FE_INVALID);
      const ZeroOptimizer optimizer(*layer, std::move(sgd), group);
      EXPECT_EQ(std::fetestexcept(FE_INVALID), 0) << dtype;
    });
  }
}

// A parameter that is frozen while the plan is made can have no hook.
TEST(ModelsTest, AnOptimizerThatCannotBeMadeLeavesNoHooks) {
  run_ranks(1, [&](const Group& group) {
    OddModel model(1);
    const auto freezes = [&](c10::IntArrayRef) {
      model->last.requires_grad_(false);
      return int64_t{1};
    };
    EXPECT_THROW(ZeroOptimizer(*model, make_inner(Inner::kSgd, *model), group,
                               ZeroOptions().layout(Layout::kWholeParameters).owner_cost(freezes)),
                 c10::Error);
    for (const at::Tensor& p : {model->scale, model->empty, model->last}) {
      EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(p), nullptr);
      // One entry holds the hooks of the user.
      EXPECT_LE(torch::autograd::impl::hooks(p).size(), 1U);
    }
  });
}

TEST(ModelsTest, ASavedGraphNoticesTheUpdate) {
  run_ranks(1, [&](const Group& group) {
    torch::nn::Linear model(4, 4), second(4, 4);
    ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::SGD>(model->parameters(), 0.2),
                            group);
    const at::Tensor x = random_tensor({2, 4}, 1).requires_grad_();
    const at::Tensor stale = model(model(x)).sum();  // saves the weight for backward
    optimizer.backward(model(random_tensor({2, 4}, 2)).sum());
    optimizer.step();
    EXPECT_ANY_THROW(stale.backward());
  });
}

}  // namespace
}  // namespace zero
