// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/parameter_table.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

struct Layer : torch::nn::Module {
  explicit Layer(const at::Tensor& value) : weight(register_parameter("weight", value)) {}
  at::Tensor weight;
};

// first.weight and second.weight, which are optimized, and what is not.
struct Model : torch::nn::Module {
  Model() {
    first = register_module("first", std::make_shared<Layer>(at::ones({2, 3})));
    second = register_module("second", std::make_shared<Layer>(at::ones({5}, at::kBFloat16)));
    frozen = register_parameter("frozen", at::ones({4}), /*requires_grad=*/false);
    counter = register_buffer("counter", at::ones({1}, at::kLong));
  }
  Groups groups() const {
    return {torch::optim::OptimizerParamGroup(Tensors{first->weight}),
            torch::optim::OptimizerParamGroup(Tensors{second->weight, frozen})};
  }
  std::shared_ptr<Layer> first, second;
  at::Tensor frozen, counter;
};

TEST(ParameterTableTest, ParametersComeInTheModulesOrderWithNamesAndGroups) {
  const Model model;
  Groups groups = model.groups();
  std::swap(groups[0], groups[1]);
  const ParameterTable table(model, groups);
  ASSERT_EQ(table.parameters().size(), 2u);
  EXPECT_EQ(table.parameters()[0].name, "first.weight");
  EXPECT_EQ(table.parameters()[0].group, 1);
  EXPECT_EQ(table.parameters()[0].sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(table.parameters()[1].name, "second.weight");
  EXPECT_EQ(table.parameters()[1].group, 0);
  ASSERT_EQ(table.frozen().size(), 1u);
  EXPECT_EQ(table.frozen()[0].name, "frozen");
  EXPECT_FALSE(table.frozen()[0].trainable);
  ASSERT_EQ(table.buffers().size(), 1u);
  EXPECT_EQ(table.buffers()[0].name, "counter");
}

TEST(ParameterTableTest, AParameterOfNoGroupIsSentAndNotOptimized) {
  const Model model;
  const ParameterTable table(model, {model.groups()[0]});
  EXPECT_EQ(table.parameters().size(), 1u);
  ASSERT_EQ(table.frozen().size(), 2u);
  EXPECT_EQ(table.frozen()[0].name + " " + table.frozen()[1].name, "frozen second.weight");
  EXPECT_TRUE(table.frozen()[1].trainable);
}

TEST(ParameterTableTest, ATiedParameterIsManagedOnceUnderItsFirstName) {
  Model model;
  model.register_parameter("again", model.first->weight);
  for (const Tensors& given :
       {Tensors{model.first->weight}, Tensors{model.first->weight, model.first->weight}}) {
    const ParameterTable table(model, {torch::optim::OptimizerParamGroup(given)});
    ASSERT_EQ(table.parameters().size(), 1u);
    EXPECT_EQ(table.parameters()[0].name, "again");
  }
}

TEST(ParameterTableTest, MemoryWithGapsCountsAsContiguous) {
  const at::Tensor turned = at::ones({4, 3}).t();
  const at::Tensor gaps = at::ones({4, 6}).slice(1, 0, 6, 2);
  for (const auto& [value, strides] :
       std::vector<std::pair<at::Tensor, std::vector<int64_t>>>{{turned, {1, 3}}, {gaps, {3, 1}}}) {
    const Layer layer(value);
    const ParameterTable table(layer, {torch::optim::OptimizerParamGroup(Tensors{layer.weight})});
    EXPECT_EQ(table.parameters()[0].strides, strides);
  }
}

TEST(ParameterTableTest, FindsItsParametersAndNoOthers) {
  const Model model;
  const ParameterTable table(model, model.groups());
  EXPECT_EQ(table.find(model.second->weight), 1);
  EXPECT_EQ(table.index_or_throw(model.first->weight), 0);
  for (const at::Tensor& other : {model.frozen, model.counter, at::ones({5}), at::Tensor()}) {
    EXPECT_EQ(table.find(other), -1);
    EXPECT_NE(error_of([&] { table.index_or_throw(other); }), "");
  }
  expect_words(error_of([&] { table.index_or_throw(at::ones({5})); }), {"of shape [5]"});
  EXPECT_EQ(table.managed_by(model), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(table.managed_by(*model.second), std::vector<int64_t>{1});
}

// Which parameter is managed and which tensors share memory; `moves`: managed ones get other
// memory.
std::string overlap(const torch::nn::Module& module, const Tensors& managed, bool moves) {
  const ParameterTable table(module, {torch::optim::OptimizerParamGroup(managed)});
  return error_of([&] { table.check_overlaps([&](const Parameter&) { return moves; }); });
}

TEST(ParameterTableTest, TwoManagedParametersOverOneMemoryAreNamed) {
  const at::Tensor memory = at::ones({6});
  const std::vector<std::pair<at::Tensor, at::Tensor>> shared{
      {memory, memory.detach()},
      {memory.view({2, 3}), memory.view({2, 3}).t()},
      {memory.narrow(0, 0, 4), memory.narrow(0, 3, 3)},
      {memory.narrow(0, 5, 1), memory.slice(0, 1, 6, 2)}};
  for (const auto& [first, second] : shared) {
    for (const bool moves : {false, true}) {
      torch::nn::Module module;
      module.register_parameter("a", first.detach());
      module.register_parameter("other", at::ones({5}));
      module.register_parameter("b", second.detach());
      expect_words(overlap(module, module.parameters(), moves),
                   {"parameter a", "parameter b", "expected memory of its own", "tie"});
    }
  }
  torch::nn::Module neighbours;
  neighbours.register_parameter("b", memory.narrow(0, 2, 4));
  neighbours.register_parameter("a", memory.narrow(0, 0, 2));
  neighbours.register_parameter("none", memory.narrow(0, 1, 0));
  EXPECT_EQ(overlap(neighbours, neighbours.parameters(), true), "");
}

TEST(ParameterTableTest, TensorsOverAManagedOnesMemoryAreNamedWhereItMoves) {
  torch::nn::Module module;
  const at::Tensor w = module.register_parameter("w", at::ones({6}));
  EXPECT_EQ(overlap(module, {w}, true), "");
  const at::Tensor frozen = module.register_parameter("f", w.detach().narrow(0, 1, 2), false);
  EXPECT_EQ(overlap(module, {w}, false), "");
  expect_words(overlap(module, {w}, true), {"parameter w", "frozen parameter f"});
  // Another optimizer's has masters of its own.
  frozen.requires_grad_(true);
  expect_words(overlap(module, {w}, false), {"parameter w", "parameter f"});
  frozen.set_data(at::ones({2}));
  module.register_buffer("same", w);  // the same object, which follows
  EXPECT_EQ(overlap(module, {w}, true), "");
  module.register_buffer("view", w.detach().view({2, 3}).t());
  EXPECT_EQ(overlap(module, {w}, false), "");
  expect_words(overlap(module, {w}, true), {"parameter w", "buffer view"});
}

TEST(ParameterTableTest, BuffersWithoutPlainMemoryAreNamed) {
  const at::Tensor complex = at::ones({2}, at::kComplexFloat);
  const std::vector<std::pair<at::Tensor, std::string>> refused{
      {at::eye(3).to_sparse(), "Sparse"},
      {at::quantize_per_tensor(at::ones({3}), 0.1, 0, at::kQInt8), "quantized"},
      {complex.conj(), "resolve_conj()"},
      {at::imag(complex.conj()), "resolve_neg()"},
      {at::ones({2}, at::TensorOptions().device(at::kMeta)), "meta"},
      {at::_efficientzerotensor({2}), "immutable zeros"}};
  for (const auto& [tensor, word] : refused) {
    Model model;
    model.register_buffer("odd", tensor);
    expect_words(error_of([&] { const ParameterTable table(model, model.groups()); }),
                 {"buffer odd", word});
  }
  Model model;
  model.register_buffer("expanded", at::arange(5).expand({3, 5}));
  model.register_buffer("gaps", at::ones({4, 6}).slice(1, 0, 6, 2));
  model.register_buffer("undefined", at::Tensor());
  EXPECT_EQ(ParameterTable(model, model.groups()).buffers().size(), 3U);
}

TEST(ParameterTableTest, AParameterThatAutogradCannotUseIsNamed) {
  std::unique_ptr<Layer> layer;
  {
    const c10::InferenceMode mode;
    layer = std::make_unique<Layer>(at::ones({3}));
  }
  expect_words(error_of([&] {
                 const ParameterTable table(
                     *layer, {torch::optim::OptimizerParamGroup(Tensors{layer->weight})});
               }),
               {"parameter weight", "InferenceMode"});
}

TEST(ParameterTableTest, DescribesAllThatRanksMustHaveInCommon) {
  const auto lines = [](const std::function<void(Model&)>& change) {
    Model model;
    change(model);
    return ParameterTable(model, model.groups()).describe();
  };
  const std::vector<std::string> plain = lines([](Model&) {});
  EXPECT_EQ(plain, (std::vector<std::string>{
                       "parameter first.weight shape [2, 3] dtype Float strides [3, 1] group 0",
                       "parameter second.weight shape [5] dtype BFloat16 strides [1] group 1",
                       "frozen parameter frozen shape [4] dtype Float",
                       "buffer counter shape [1] dtype Long"}));
  EXPECT_NE(lines([](Model& m) { m.first->weight.set_data(at::ones({3, 2})); }), plain);
  EXPECT_NE(lines([](Model& m) { m.first->weight.set_data(at::ones({3, 2}).t()); }), plain);
  EXPECT_NE(lines([](Model& m) { m.second->to(at::kHalf); }), plain);
  EXPECT_NE(lines([](Model& m) { m.counter.set_data(at::ones({2}, at::kLong)); }), plain);
}

TEST(ParameterTableTest, EveryChangeFromOutsideIsNamed) {
  struct Change {
    std::function<void(Model&)> make;
    std::vector<std::string> words;
    bool of_shapes = false;  // seen by verify_shapes() too
    bool lasts = false;      // remember() does not accept it
  };
  const std::vector<Change> changes{
      {[](Model& m) {
         m.first->weight.set_data(at::ones({2, 3}));
       },
       {"first.weight", "expected the storage the last step left", "refresh_master_parameters()"}},
      {[](Model& m) { m.second->weight.detach().add_(1); },
       {"second.weight", "edited in place", "refresh_master_parameters()"}},
      {[](Model& m) { m.first->weight.set_requires_grad(false); },
       {"first.weight", "expected requires_grad as at construction"},
       false,
       true},
      {[](Model& m) {
         m.frozen.set_requires_grad(true);
         m.frozen.mutable_grad() = at::ones({4});
       },
       {"frozen", "expected it to stay without gradients"},
       false,
       true},
      {[](Model& m) { m.second->to(at::kHalf); },
       {"second.weight", "expected dtype BFloat16 as at construction, got Half"},
       true},
      {[](Model& m) {
         m.first->weight.set_data(at::ones({3, 2}));
       },
       {"first.weight", "expected shape [2, 3] as at construction, got [3, 2]"},
       true,
       true},
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE("change " + std::to_string(i));
    Model model;
    ParameterTable table(model, model.groups());
    table.remember();
    table.verify_unchanged();
    changes[i].make(model);
    expect_words(error_of([&] { table.verify_unchanged(); }), changes[i].words);
    EXPECT_EQ(error_of([&] { table.verify_shapes(); }) != "", changes[i].of_shapes);
    table.remember();
    EXPECT_EQ(error_of([&] { table.verify_unchanged(); }) != "", changes[i].lasts);
  }
}

TEST(ParameterTableTest, AnotherOrderOfTheSameElementsIsNamed) {
  Layer square(at::ones({3, 3}));
  ParameterTable table(square, {torch::optim::OptimizerParamGroup(square.parameters())});
  table.remember();
  square.weight.set_data(square.weight.data().t());
  expect_words(
      error_of([&] { table.verify_unchanged(); }),
      {"weight", "expected strides [3, 1] as", "got [1, 3]", "refresh_master_parameters()"});
  square.weight.set_data(square.weight.data().t());
  table.verify_unchanged();
}

TEST(ParameterTableTest, StridesOfOneElementMayDiffer) {
  Layer row(at::ones({1, 5}));
  ParameterTable table(row, {torch::optim::OptimizerParamGroup(row.parameters())});
  table.remember();
  row.weight.set_data(row.weight.data().as_strided({1, 5}, {77, 1}));
  table.verify_unchanged();
}

TEST(ParameterTableTest, AFrozenParameterThatAnotherOptimizerTookIsNotOurs) {
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    void operator()(const torch::autograd::Variable&) override {}
  };
  const Model model;
  ParameterTable table(model, model.groups());
  table.remember();
  ASSERT_EQ(table.unmanaged().size(), 1u);
  EXPECT_EQ(table.unmanaged()[0].name, "frozen");
  model.frozen.requires_grad_(true);
  torch::autograd::impl::set_post_acc_grad_hooks(model.frozen, std::make_unique<Hook>());
  model.frozen.mutable_grad() = at::ones({4});
  EXPECT_TRUE(table.unmanaged().empty());
  table.verify_unchanged();
}

TEST(ParameterTableTest, AnotherTensorInAParametersPlaceIsNamed) {
  Model model;
  const ParameterTable table(model, model.groups());
  table.verify_in_module(model);
  // The same tensors in another order, as after a submodule was taken out and put back.
  model.unregister_module("first");
  model.register_module("first", model.first);
  table.verify_in_module(model);
  model.replace_module("second", std::make_shared<Layer>(at::ones({5}, at::kBFloat16)));
  expect_words(error_of([&] { table.verify_in_module(model); }),
               {"parameter second.weight", "holds another in its place"});
}

TEST(ParameterTableTest, RefusesWhatCannotBeOptimized) {
  const auto refused = [](const torch::nn::Module& module, const Groups& groups) {
    return error_of([&] { const ParameterTable table(module, groups); });
  };
  const auto refused_layer = [&](const at::Tensor& value) {
    const Layer layer(value);
    return refused(layer, {torch::optim::OptimizerParamGroup(Tensors{layer.weight})});
  };
  expect_words(refused_layer(at::ones({2}, at::kDouble)), {"weight", "float, bfloat16 or half"});
  expect_words(refused_layer(at::ones({2}, at::kComplexFloat)), {"weight", "real dtype"});
  const Model model;
  Groups groups = model.groups();
  expect_words(
      refused(model, {torch::optim::OptimizerParamGroup(Tensors{})}),
      {"nothing to optimize", "add the groups to the inner optimizer before it is wrapped"});
  expect_words(refused(model, {torch::optim::OptimizerParamGroup(Tensors{model.frozen})}),
               {"nothing to optimize", "got 1 frozen ones", "unfreeze some"});
  expect_words(refused(model, {torch::optim::OptimizerParamGroup(Tensors{at::ones({9})})}),
               {"of shape [9]", "not registered"});
  expect_words(refused(model, {torch::optim::OptimizerParamGroup(Tensors{at::Tensor()})}),
               {"undefined"});
  groups.push_back(groups[0]);
  expect_words(refused(model, groups), {"first.weight", "given again in group 2 after group 0"});
  expect_words(refused(model, {torch::optim::OptimizerParamGroup(
                                  Tensors{model.first->weight, model.first->weight})}),
               {"first.weight", "expected once"});
}

}  // namespace
}  // namespace zero
