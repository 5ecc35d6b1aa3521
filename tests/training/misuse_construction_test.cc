// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What an optimizer cannot be made of. See tests/training/misuse.h.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/training/misuse.h"
#include "zero/adafactor.h"
#include "zero/combined_optimizer.h"
#include "zero/inner_optimizers/newton_schulz.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"

namespace zero {
namespace {

struct Ingredients {
  OddModel model{1};
  std::unique_ptr<torch::optim::Optimizer> inner = make_inner(Inner::kAdamW, *model);
  ZeroOptions options;
  std::unique_ptr<ZeroOptimizer> earlier;  // must outlive the attempt

  void optimize(std::vector<at::Tensor> parameters) {
    inner = std::make_unique<torch::optim::AdamW>(std::move(parameters), 0.01);
  }
};
using Spoil = std::function<void(Ingredients&, const Group&)>;

// Rank `culprit` of 3 makes its optimizer from what `spoil` left. Returns what
// each rank read. A correct optimizer on the same group then works.
Words construction_errors(int culprit, const Spoil& spoil) {
  Words texts(3);
  run_ranks(3, [&](const Group& group) {
    {
      Ingredients in;
      if (group.rank() == culprit) spoil(in, group);
      texts[group.rank()] = error_soon(
          [&] { ZeroOptimizer optimizer(*in.model, std::move(in.inner), group, in.options); });
    }
    Rank rank(group);
    rank.train(0);
    EXPECT_EQ(rank.optimizer->stats().steps, 1);
  });
  return texts;
}

void expect_unusable(const Spoil& spoil, const Words& words) {
  const Words texts = construction_errors(1, spoil);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_words(texts[rank], words);
    expect_words(texts[rank], {"rank " + std::to_string(rank) + ": "});
    if (rank != 1) {
      expect_words(texts[rank], {"not made on any rank because of:", "\n  rank 1: "});
    }
  }
}

void expect_differs(const Spoil& spoil, const std::string& first, const std::string& second) {
  const Words texts = construction_errors(2, spoil);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    expect_words(texts[rank], {"rank " + std::to_string(rank) + ": ", "expected the same model",
                               "the first difference is\n  rank 0: ", first, "\n  rank 2: ", second,
                               "build the model alike on all ranks"});
    EXPECT_EQ(texts[rank].find("\n  rank 1: "), std::string::npos) << texts[rank];
  }
}

TEST(ConstructionTest, StageZeroAndThreeAndOtherOptions) {
  for (int64_t wrong : {int64_t{0}, int64_t{3}}) {
    expect_unusable([&](Ingredients& in, const Group&) { in.options.stage(wrong); },
                    {"stage: expected 1 or 2, got " + std::to_string(wrong),
                     "stage 0 is plain data parallelism", "stage 3"});
  }
  expect_unusable([](Ingredients& in, const Group&) { in.options.layout(7, Layout::kContiguous); },
                  {"layout of parameter group 7", "expected one of the"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.options.layout(Layout::kWholeParameters).owner_cost([](c10::IntArrayRef) { return -1; });
      },
      {"owner_cost: expected 0 or more for parameter", "got -1"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.options.layout(Layout::kWholeParameters).owner_cost([](c10::IntArrayRef) -> int64_t {
          throw 1;
        });
      },
      {"no std::exception"});
  expect_unusable([](Ingredients& in, const Group&) { in.options.bucket_bytes(-1); },
                  {"bucket_bytes: expected 0 or more, got -1"});
  expect_unusable([](Ingredients& in, const Group&) { in.options.reduce_dtype(at::kDouble); },
                  {"reduce_dtype: expected float, bfloat16 or half, got Double"});
}

// Their numbers would differ by roundings to bfloat16.
TEST(ConstructionTest, MuonOnDifferentProcessorsNeedsADtype) {
  const auto error = [](std::optional<at::ScalarType> dtype) {
    Words texts(2);
    run_ranks(2, [&](const Group& group) {
      torch::nn::Linear model(torch::nn::LinearOptions(4, 4).bias(false));
      pretend_bf16_products(group.rank() == 0);
      texts[group.rank()] = error_soon([&] {
        ZeroOptimizer optimizer(
            *model, std::make_unique<Muon>(model->parameters(), MuonOptions().ns_dtype(dtype)),
            group);
      });
      pretend_bf16_products(std::nullopt);
    });
    return texts;
  };
  for (const std::string& text : error(std::nullopt)) {
    expect_words(text, {"first difference",
                        "parameter group 0 zero::Muon multiplies large matrices in bfloat16",
                        "rank 1: arithmetic of parameter group 0", "set MuonOptions::ns_dtype()"});
  }
  EXPECT_EQ(error(at::kFloat), (Words{"", ""}));
}

// Those of a group may be set behind the constructor of Muon, which looks at its split too.
TEST(ConstructionTest, ASplitThatDoesNotCoverItsParameter) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        const at::Tensor weight = in.model->trunk->weight;
        auto muon = std::make_unique<Muon>(std::vector<at::Tensor>{weight});
        static_cast<MuonOptions&>(muon->param_groups()[0].options())
            .split(split_rows({weight.size(0) - 1}));
        in.inner = std::move(muon);
      },
      {"parameter trunk.weight: split_rows: expected a matrix of"});
}

TEST(ConstructionTest, OptionsOfAnotherClassThanTheInnerOptimizers) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner->param_groups()[0].set_options(std::make_unique<torch::optim::SGDOptions>(0.1));
      },
      {"parameter group 0: expected options of the class that AdamW reads",
       "got torch::optim::SGDOptions", "set_options()"});
}

TEST(ConstructionTest, OptionsThatCannotTrain) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner->param_groups()[0].options().set_lr(std::numeric_limits<double>::quiet_NaN());
      },
      {"parameter group 0: expected a number as lr, got nan"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner = std::make_unique<Lion>(in.model->parameters());
        in.inner->param_groups()[0].options().set_lr(-1);
      },
      {"parameter group 0: Lion: expected a learning rate of 0 or more, got -1"});
}

TEST(ConstructionTest, AGroupThatNoPartOfACombinedOptimizerSteps) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        auto parameters = in.model->parameters();
        const at::Tensor last = parameters.back();
        parameters.pop_back();
        std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
        parts.push_back(std::make_unique<torch::optim::AdamW>(parameters, 0.01));
        in.inner = std::make_unique<CombinedOptimizer>(std::move(parts));
        in.inner->add_param_group(torch::optim::OptimizerParamGroup({last}));
      },
      {"expected the 1 parameter groups of its parts, got 2",
       "make the parts with all their groups"});
}

TEST(ConstructionTest, LbfgsIsRefusedWithOrWithoutAClosure) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner = std::make_unique<torch::optim::LBFGS>(in.model->parameters());
        in.options.elementwise(true);
      },
      {"expected one that needs one parameter at a time, got LBFGS", "closure", "Use AdamW"});
}

TEST(ConstructionTest, OptimizersOfWholeParametersAreRefusedInOtherLayouts) {
  for (const bool elementwise : {false, true}) {
    const auto refused = [&](const auto& make, const std::string& name) {
      expect_unusable(
          [&](Ingredients& in, const Group&) {
            in.inner = make(in.model->parameters());
            in.options.elementwise(elementwise)
                .layout(0, elementwise ? Layout::kContiguous : Layout::kPerParameter);
          },
          {"expected one that treats every element by itself, got " + name, "whole parameters"});
    };
    refused(
        [](const std::vector<at::Tensor>& all) {
          std::vector<at::Tensor> matrices;
          for (const at::Tensor& p : all) {
            if (p.dim() == 2) matrices.push_back(p);
          }
          return std::make_unique<Muon>(matrices);
        },
        "zero::Muon");
    refused([](const auto& all) { return std::make_unique<Lamb>(all); }, "zero::Lamb");
    refused([](const auto& all) { return std::make_unique<Adafactor>(all); }, "zero::Adafactor");
  }
}

// p -= sign(grad) / 64
class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure) override {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups()[0].params()) {
      if (p.grad().defined()) p.sub_(p.grad().sign(), 1.0 / 64);
    }
    return {};
  }
};

TEST(ConstructionTest, UnknownOptimizerNeedsTheUsersWord) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner = std::make_unique<SignDescent>(in.model->parameters());
      },
      {"expected AdamW, Adam, SGD, RMSprop or Adagrad", "SignDescent",
       "say so with ZeroOptions().elementwise(true)"});
  run_ranks(2, [](const Group& group) {
    OddModel model{1}, plain{1};
    ZeroOptimizer optimizer(*model, std::make_unique<SignDescent>(model->parameters()), group,
                            ZeroOptions().elementwise(true));
    SignDescent reference(plain->parameters());
    const auto loss = [](OddModel& m) {
      return m->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll);
    };
    optimizer.backward(loss(model));
    optimizer.step();
    loss(plain).backward();
    reference.step(nullptr);
    EXPECT_EQ(differing_elements({model->parameters()}, {plain->parameters()}), 0);
  });
}

TEST(ConstructionTest, StateThatIsNotEmpty) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll)
            .backward();
        in.inner->step();
      },
      {"expected no state yet, got", "Make a new one", "load_checkpoint()"});
  expect_unusable([](Ingredients& in, const Group&) { in.inner = nullptr; },
                  {"inner optimizer: expected one, got a null pointer"});
}

TEST(ConstructionTest, ParametersThatCannotBeSharded) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        auto parameters = in.model->parameters();
        parameters.push_back(parameters[1]);
        in.optimize(parameters);
      },
      {"parameter", "expected once, given again in group 0", "give every parameter to one group"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->register_parameter("s", at::eye(3).to_sparse());
        in.optimize(in.model->parameters());
      },
      {"parameter s: expected a dense (strided) tensor, got layout Sparse", "use a dense one"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->register_parameter("c", at::ones({3}, at::kComplexFloat));
        in.optimize(in.model->parameters());
      },
      {"parameter c: expected a real dtype, got ComplexFloat", "view_as_complex()"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->to(at::kDouble);
        in.optimize(in.model->parameters());
      },
      {"expected dtype float, bfloat16 or half, got Double", "module.to(dtype)"});
  // torch refuses non-leaf tensors itself, unless they become so afterwards.
  expect_unusable([](Ingredients& in,
                     const Group&) { in.model->frozen.mul_(at::ones({7}).requires_grad_(true)); },
                  {"parameter frozen: expected a leaf tensor, got the result of an operation",
                   "module.parameters()"});
  expect_unusable(
      [](Ingredients& in, const Group&) { in.optimize({at::ones({4}).requires_grad_()}); },
      {"expected a parameter of the module, got a tensor that is not registered",
       "register it or leave it to another optimizer"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.options.layout(Layout::kPerParameter);
        in.model->last.set_data(at::ones({1, 11, 1, 4}).slice(3, 0, 4, 2));
      },
      {"parameter last: expected dense memory, got strides", "use Layout::kContiguous"});
}

TEST(ConstructionTest, TensorsThatShareMemory) {
  const Words words = {"expected memory of its own", "to tie two layers"};
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.options.layout(Layout::kPerParameter);
        in.model->right->weight.set_data(in.model->left->weight.data());
      },
      {"parameter left.weight", "parameter right.weight", words[0], words[1]});
  expect_unusable([](Ingredients& in,
                     const Group&) { in.model->register_buffer("view", in.model->scale.detach()); },
                  {"parameter scale", "buffer view", words[0], words[1]});
}

TEST(ConstructionTest, BuffersWithoutPlainMemory) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->register_buffer("q", at::quantize_per_tensor(at::ones({3}), 0.1, 0, at::kQInt8));
      },
      {"buffer q: expected a tensor that is not quantized"});
}

// Tensors that the optimizer keeps can be used outside of the mode of the call that made them.
TEST(ConstructionTest, UnderInferenceModeItTrainsAsWithout) {
  for (const bool fused : {false, true}) {
    std::vector<at::Tensor> expected;
    for (const bool inference : {false, true}) {
      run_ranks(2, [&](const Group& group) {
        OddModel model{1};
        auto inner = make_inner(Inner::kAdamW, *model);
        std::unique_ptr<ZeroOptimizer> optimizer;
        {
          const c10::InferenceMode mode(inference);
          optimizer = std::make_unique<ZeroOptimizer>(*model, std::move(inner), group,
                                                      ZeroOptions().fused(fused));
        }
        const auto step = [&](uint64_t seed) {
          const at::Tensor loss = model->loss(random_tensor({3, 17}, seed),
                                              random_tensor({3, 11}, seed + 1), OddModelImpl::kAll);
          {
            const c10::InferenceMode mode(inference);
            optimizer->backward(loss);
          }
          optimizer->clip_grad_norm_(1.0);
          optimizer->step();
          // In a buffer of the pass.
          EXPECT_TRUE(at::equal(optimizer->master(model->last), model->last));
        };
        step(1);
        {
          const c10::InferenceMode mode(inference);
          optimizer->freeze({model->scale});
        }
        step(3);
        {
          const c10::InferenceMode mode(inference);
          optimizer->unfreeze({model->scale});
        }
        step(5);
        if (group.rank() != 0) return;
        std::vector<at::Tensor> got;
        for (const at::Tensor& p : model->parameters()) got.push_back(p.detach().clone());
        if (!inference) expected = got;
        for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
      });
    }
  }
}

TEST(ConstructionTest, ParametersElsewhereThanWhereTheDataTravels) {
  const Group group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "gpu", nullptr,
                    at::Device(at::kCUDA, 0), std::chrono::seconds(30));
  OddModel model(1);
  const std::string text =
      error_soon([&] { ZeroOptimizer(*model, make_inner(Inner::kSgd, *model), group); });
  expect_words(text, {"rank 0: ", "parameters: expected them on cuda:0", "got cpu",
                      "to(group.device()) on the model"});
}

TEST(ConstructionTest, NothingToOptimize) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        for (at::Tensor& p : in.model->parameters()) p.requires_grad_(false);
      },
      {"nothing to optimize", "got 12 frozen ones", "unfreeze some"});
  run_ranks(2, [](const Group& group) {
    expect_words(error_soon([&] { group.subgroup({}, "nobody"); }),
                 {"subgroup \"nobody\"", "expected different ranks in [0, 2)"});
  });
}

TEST(ConstructionTest, ParametersOfAnotherZeroOptimizer) {
  run_ranks(2, [](const Group& group) {
    Rank rank(group);
    const std::string text = error_soon(
        [&] { ZeroOptimizer second(*rank.model, make_inner(Inner::kAdamW, *rank.model), group); });
    expect_words(text, {"rank " + std::to_string(group.rank()), "parameter scale",
                        "can belong to one ZeroOptimizer at a time", "call reset() before"});
    rank.train(0);  // the first is none the worse
    EXPECT_EQ(rank.optimizer->stats().steps, 1);
  });
}

TEST(ConstructionTest, ModelsAndOptionsThatDiffer) {
  expect_differs(
      [](Ingredients& in, const Group&) {
        in.model = OddModel(1, 24);
        in.inner = make_inner(Inner::kAdamW, *in.model);
      },
      "parameter trunk.weight shape [23, 17]", "parameter trunk.weight shape [24, 17]");
  expect_differs([](Ingredients& in, const Group&) { in.model->to(at::kBFloat16); }, "dtype Float",
                 "dtype BFloat16");
  struct OtherOptions {
    ZeroOptions options;
    std::string first, second;  // what ranks without and with them read
  };
  for (const OtherOptions& other : std::vector<OtherOptions>{
           {ZeroOptions().stage(1).bucket_bytes(700), "stage 2 bucket_bytes by default",
            "stage 1 bucket_bytes 700"},
           {ZeroOptions().fused(false).reduction(Reduction::kSum), "fused 1 reduction mean",
            "fused 0 reduction sum"},
           {ZeroOptions().skip_nonfinite(false).skip_if(std::make_shared<OutlierRule>()),
            "skip_nonfinite 1 skip_if none", "skip_nonfinite 0 skip_if given"},
           {ZeroOptions().no_sync_fp32(true).overlap_gather(true).two_level(false),
            "no_sync_fp32 0 overlap_gather 0 two_level 1",
            "no_sync_fp32 1 overlap_gather 1 two_level 0"},
           {ZeroOptions().static_graph(true).max_skipped_in_a_row(3),
            "static_graph 0 max_skipped_in_a_row 50", "static_graph 1 max_skipped_in_a_row 3"},
           {ZeroOptions()
                .fp32_machine_sums(false)
                .gather_wire(GatherWire::kChanges)
                .reduce_dtype(at::kFloat),
            "options", "fp32_machine_sums 0 gather_wire changes reduce_dtype Float"},
           {ZeroOptions().gradient_wire(GradientWire::kBlockInt8), "options",
            "gradient_wire block_int8"},
           {ZeroOptions().micro_batches(6), "options", "micro_batches 6"},
           {ZeroOptions().loss_scaler(LossScalerOptions()
                                          .initial_scale(1048577)
                                          .growth_factor(3)
                                          .backoff_factor(0.25)
                                          .growth_interval(7)
                                          .hysteresis(2)
                                          .min_scale(4)
                                          .max_scale(2097152)),
            "options", "loss scaler 1048577 3 0.25 7 2 4 2097152"},
           {ZeroOptions().ema(EmaOptions().decay(0.9).warm_up(false)), "options",
            "ema 0.9 warm-up 0"},
           {ZeroOptions()
                .split_masters(true)
                .moments(Moments::kInt8)
                .moments(1, Moments::kBFloat16)
                .gradient_shard_dtype(at::kBFloat16)
                .skip_nonfinite(false)
                .update_in_backward(true),
            "split_masters 0 moments 0 gradient_shard_dtype Float update_in_backward 0 ranks 3",
            "split_masters 1 moments 2 gradient_shard_dtype BFloat16 update_in_backward 1 of group "
            "1 1 ranks 3"},
           {ZeroOptions().layout(1, Layout::kPerParameter), "layout of parameter group 1 0",
            "layout of parameter group 1 1"}}) {
    expect_differs([&](Ingredients& in, const Group&) { in.options = other.options; }, other.first,
                   other.second);
  }
  expect_differs([](Ingredients& in,
                    const Group&) { in.inner->param_groups()[1].options().set_lr(0.01000000001); },
                 "group 1 lr 0.01 ", "group 1 lr 0.01000000001 ");
  expect_differs(
      [](Ingredients& in, const Group&) { in.inner = make_inner(Inner::kAdam, *in.model); },
      "inner optimizer AdamW", "inner optimizer Adam\n");
  expect_differs([](Ingredients& in, const Group&) { in.model->scale.requires_grad_(false); },
                 "parameter scale", "parameter empty");
  expect_differs(
      [](Ingredients& in, const Group&) { in.model->register_buffer("more", at::ones({2})); },
      "(nothing more)", "buffer more shape [2] dtype Float");
}

struct TwoLayers : torch::nn::Module {
  TwoLayers(const std::string& first, const std::string& second) {
    register_parameter(first, at::ones({4}));
    register_parameter(second, at::ones({4}));
  }
};

TEST(ConstructionTest, NamesAndOrderThatDiffer) {
  const std::vector<std::pair<std::string, std::string>> other = {{"a", "c"}, {"b", "a"}};
  for (const auto& names : other) {
    run_ranks(2, [&](const Group& group) {
      TwoLayers model(group.rank() == 0 ? "a" : names.first,
                      group.rank() == 0 ? "b" : names.second);
      const std::string text = error_soon([&] {
        ZeroOptimizer optimizer(
            model, std::make_unique<torch::optim::AdamW>(model.parameters(), 0.1), group);
      });
      const bool order = names.first == "b";
      expect_words(text,
                   {"first difference", order ? "rank 0: parameter a" : "rank 0: parameter b",
                    order ? "rank 1: parameter b" : "rank 1: parameter c", "in the same order"});
    });
  }
}

// Every rank believes in another number of ranks.
TEST(ConstructionTest, WorldSizesThatDiffer) {
  const std::vector<std::vector<int>> cases = {{2, 3}, {3, 2, 3}, {4, 3, 3}};
  for (const std::vector<int>& sizes : cases) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> texts(sizes.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < sizes.size(); ++r) {
      threads.emplace_back([&, r] {
        const Group group(store, static_cast<int>(r), sizes[r], "test",
                          default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                          std::chrono::seconds(30));
        texts[r] = error_soon([&] { Rank rank(group); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t r = 0; r < sizes.size(); ++r) {
      expect_words(texts[r], {"expected the same world size on every rank, got ", " on rank ",
                              "this is rank " + std::to_string(r),
                              "start all ranks with the same WORLD_SIZE"});
    }
  }
}

}  // namespace
}  // namespace zero
