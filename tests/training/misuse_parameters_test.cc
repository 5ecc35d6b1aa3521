// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Parameters and buffers that change behind the optimizer's back. See tests/training/misuse.h.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/training/misuse.h"

namespace zero {
namespace {

INSTANTIATE_TEST_SUITE_P(Stage, AtStage, ::testing::Values(1, 2));

TEST(MisuseTest, ParameterGroupAddedOrChangedAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    torch::optim::Optimizer& base = *r.optimizer;
    const Words words = {"groups as this optimizer left them",
                         "added, removed or changed from outside", "add_param_group()"};
    r.backward(1);
    if (r.is(1)) {
      base.add_param_group(torch::optim::OptimizerParamGroup({at::ones({3})}));
      const std::string text = error_soon([&] { r.optimizer->refresh_learning_rates(); });
      expect_words(text, words);
      EXPECT_EQ(text.find("rank 1: refresh_learning_rates(): parameter group 2"), 0) << text;
    }
    r.refuses_step(1, words);
    r.refuses_step(1, {"parameter group 2", "expected the 2 groups", "got 3", "(1 parameters)"});
    if (r.is(1)) base.param_groups().pop_back();
    if (r.is(0)) base.add_parameters({at::ones({3})});
    r.refuses_step(0, words);
    auto& members = base.param_groups()[0].params();
    if (r.is(0)) members.pop_back();
    // As many as before, but others.
    const at::Tensor first = members[0];
    if (r.is(1)) members[0] = at::ones({3});
    r.refuses_step(1, words);
    members[0] = first;
    r.clip_and_step();
  });
}

TEST(MisuseTest, UnfrozenAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    if (r.is(1)) {
      r.model->frozen.requires_grad_(true);
      r.model->frozen.sum().backward();
    }
    r.backward(1);
    r.refuses_step(1, {"parameter frozen", "expected it to stay without gradients",
                       "got requires_grad and a gradient", "unfreeze()"});
    r.model->frozen.requires_grad_(false);
    r.model->frozen.mutable_grad().reset();
    r.clip_and_step();
  });
}

TEST(MisuseTest, FrozenAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    if (r.is(1)) r.model->left->bias.requires_grad_(false);
    r.refuses_step(1, {"parameter left.bias", "expected requires_grad as at construction",
                       "got a frozen one", "freeze()"});
    r.model->left->bias.requires_grad_(true);
    r.clip_and_step();
  });
}

TEST(MisuseTest, AParameterThatWentToAnotherOptimizerMayHaveGradients) {
  run_ranks(2, [](const Group& group) {
    OddModel model{1};
    const auto sgd = [](const std::vector<at::Tensor>& of) {
      return std::make_unique<torch::optim::SGD>(of, 0.1);
    };
    std::vector<at::Tensor> trained;
    for (const at::Tensor& p : model->parameters()) {
      if (p.requires_grad()) trained.push_back(p);
    }
    const std::vector<at::Tensor> head = model->left->parameters();
    ZeroOptimizer first(*model, sgd(trained), group);
    first.freeze(head);
    for (const at::Tensor& p : head) p.requires_grad_(true);
    ZeroOptimizer second(*model, sgd(head), group);
    const at::Tensor before = model->left->weight.detach().clone();
    first.backward(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    first.clip_grad_norm_(1.0);
    first.step();
    second.step();
    EXPECT_EQ(first.stats().steps, 1);
    EXPECT_EQ(second.stats().steps, 1);
    EXPECT_FALSE(model->left->weight.equal(before));
  });
}

TEST(MisuseTest, ParameterReassigned) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    Affine old = r.model->never;
    if (r.is(1)) r.model->replace_module("never", Affine(5, 3, at::kCPU));
    r.refuses_step(1, {"parameter never.weight", "the tensor that was registered at construction",
                       "holds another in its place", "make a new optimizer"});
    if (r.is(1)) r.model->replace_module("never", old);
    r.clip_and_step();
  });
}

// Of which tests replace modules: a frozen parameter, buffers, and what is trained.
struct ThreeParts : torch::nn::Module {
  ThreeParts() {
    encoder->weight.requires_grad_(false);
    register_module("encoder", encoder);
    register_module("norm", norm);
    register_module("head", head);
  }
  torch::nn::Linear encoder{torch::nn::LinearOptions(3, 5).bias(false)};
  torch::nn::BatchNorm1d norm{torch::nn::BatchNormOptions(5).affine(false)};
  torch::nn::Linear head{torch::nn::LinearOptions(5, 2).bias(false)};
};

TEST(MisuseTest, ATensorThatWasReplacedIsRefusedByAllThatSendSaveOrLoadIt) {
  const std::string folder = ::testing::TempDir() + "/before_replaced_";
  for (const std::string part : {"encoder", "norm", "head"}) {
    run_ranks(2, [&](const Group& group) {
      ThreeParts model;
      ZeroOptimizer optimizer(model,
                              std::make_unique<torch::optim::SGD>(model.head->parameters(), 0.1),
                              group, ZeroOptions().protect(1));
      optimizer.save_checkpoint(folder + part, SaveOptions().overwrite(true));
      ThreeParts other;
      other.encoder->weight.requires_grad_(false);
      const auto of = [&](ThreeParts& all) { return all.named_children()[part]; };
      const std::shared_ptr<torch::nn::Module> old = of(model);
      if (group.rank() == 1) model.replace_module(part, of(other));
      const std::vector<std::function<void()>> calls = {
          [&] { optimizer.save_checkpoint(folder + "never"); },
          [&] { optimizer.load_checkpoint(folder + part); },
          [&] { optimizer.refresh_master_parameters(); },
          [&] { optimizer.broadcast_buffers(); },
          [&] { optimizer.unfreeze({model.encoder->weight}); },
          [&] {
            optimizer.resize_rows({{model.head->weight, at::arange(2)}});
          },
          [&] { optimizer.step(); }};  // it would be protected
      for (size_t i = 0; i < calls.size(); ++i) {
        const std::string text = error_soon(calls[i]);
        expect_words(text, {part == "encoder" ? "frozen parameter encoder.weight"
                            : part == "norm"  ? "buffer norm.running_mean"
                                              : "parameter head.weight",
                            "expected the tensor that was registered", "another in its place",
                            "make a new optimizer"});
        if (group.rank() == 0) expect_words(text, {"because of rank 1"});
      }
      if (group.rank() == 1) model.replace_module(part, old);
      for (size_t i = 1; i < calls.size(); ++i) EXPECT_EQ(error_soon(calls[i]), "") << i;
    });
  }
}

TEST_P(AtStage, MovedToAnotherDtype) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      r.backward(1);
      const Words words = {"parameter scale", "expected dtype Float as at construction",
                           "got BFloat16", "move it back"};
      if (r.is(1)) r.model->to(at::kBFloat16);
      r.refuses_step(1, words);
      r.refuses(
          1, [&] { r.optimizer->master(r.model->scale); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_working_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) r.model->to(at::kFloat);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "got another", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

// What module.to(device) leaves behind, made without the device: nothing may read its memory.
at::Tensor as_if_on_gpu(const at::Tensor& tensor) {
  const at::Device gpu(at::kCUDA, 0);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(), c10::DataPtr(nullptr, gpu),
                       nullptr, false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
  return result;
}

TEST_P(AtStage, MovedToAnotherDevice) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      r.backward(1);
      const Words words = {"parameter scale", "expected device cpu as at construction",
                           "got cuda:0", "move it back", "refresh_master_parameters()"};
      const at::Tensor there = r.model->scale.detach().clone();
      if (r.is(1)) r.model->scale.set_data(as_if_on_gpu(there));
      r.refuses_step(1, words);
      r.refuses(
          1, [&] { r.optimizer->clip_grad_norm_(1.0); }, words);
      r.refuses(
          1, [&] { r.optimizer->master(r.model->scale); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) r.model->scale.set_data(there);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "got another", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

TEST_P(AtStage, ShapeReplaced) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      at::Tensor scale = r.model->scale;
      const at::Tensor old = scale.detach();
      const Words words = {"scale",    "expected shape [1] as at construction",
                           "got [11]", "give",
                           "back",     "its shape"};
      if (r.is(1)) {
        scale.set_data(at::ones({11}));
        expect_words(error_soon([&] { r.backward(7); }), words);
      }
      r.refuses_step(1, words);
      r.optimizer->zero_grad();
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) scale.set_data(old.clone());
      r.refuses_step(1, {"scale", "expected the storage"});
      r.optimizer->refresh_master_parameters();
      r.train(1);
    });
  }
}

TEST_P(AtStage, LoadedOver) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      std::stringstream saved;
      torch::save(r.model, saved);
      r.backward(1);
      if (r.is(1)) torch::load(r.model, saved);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "torch::load", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

TEST(MisuseTest, EditedInPlace) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    at::NoGradGuard no_grad;
    const at::Tensor old = r.model->last.clone();
    if (r.is(1)) r.model->last.add_(1);
    r.refuses_step(1, {"parameter last", "expected the values the last step left", "got version",
                       "edited in place", "call refresh_master_parameters()",
                       "refresh_working_parameters() where the values of the last step are back"});
    r.model->last.copy_(old);
    r.optimizer->refresh_master_parameters();
    r.clip_and_step();
  });
}

TEST(MisuseTest, ViewsOfOneTensorInTwoOptimizers) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor both = at::ones({8});
    const auto make = [&](int64_t begin) {
      const at::Tensor view = both.narrow(0, begin, 4).detach().requires_grad_(true);
      NamedTensors named;
      named.insert("view", view);
      return ZeroOptimizer(
          named, std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{view}, 0.1), group);
    };
    ZeroOptimizer first = make(0), second = make(4);
    first.backward(first.param_groups()[0].params()[0].sum());
    second.backward(second.param_groups()[0].params()[0].sum());
    first.step();
    expect_words(error_soon([&] { second.step(); }),
                 {"parameter view", "it is a view, whose version all views of its tensor share",
                  "give each parameter its clone() before the optimizers are made"});
  });
}

TEST(MisuseTest, EveryCallThatReadsParametersSeesAnEdit) {
  expect_survives(stage(2), [](Rank& r) {
    at::Tensor& edited = r.model->last;
    const at::Tensor old = edited.detach().clone();
    const auto set = [&](const at::Tensor& value) {
      const at::NoGradGuard no_grad;
      if (r.is(1)) edited.copy_(value);
    };
    const auto refuses_all = [&](const std::vector<std::function<void()>>& calls) {
      set(old + 1);
      for (const auto& call : calls) r.refuses(1, call, {"parameter last", "edited in place"});
      set(old);
      r.optimizer->refresh_master_parameters();
    };
    refuses_all(
        {[&] { r.optimizer->save_checkpoint(::testing::TempDir() + "/never"); },
         [&] { r.optimizer->freeze({r.model->scale}); },
         [&] { r.optimizer->unfreeze({r.model->frozen}); },
         [&] { r.optimizer->add_param_group({std::vector<at::Tensor>{r.model->frozen}}); }});
    r.backward(1);
    refuses_all({[&] { r.optimizer->master(r.model->scale); },
                 [&] { r.optimizer->gradient(r.model->scale); },
                 [&] { r.optimizer->reduce_gradients(); }, [&] { r.optimizer->grad_norm(); },
                 [&] { r.optimizer->step(); }});
    r.clip_and_step();
  });
}

TEST(MisuseTest, BuffersThatDiffer) {
  expect_survives(stage(2), [](Rank& r) {
    if (r.is(1)) r.model->counter.set_data(at::zeros({5}, at::kLong));
    r.differs([&] { r.optimizer->broadcast_buffers(); }, {"counter [1] Long", "counter [5] Long"});
    if (r.is(1)) r.model->counter.set_data(at::zeros({1}, at::kLong));
    r.optimizer->broadcast_buffers();
    r.train(1);
  });
}

}  // namespace
}  // namespace zero
