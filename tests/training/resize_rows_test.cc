// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptimizer::resize_rows() beside plain torch, whose state is edited by hand as programs with
// parameters that grow and shrink do it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/adafactor.h"
#include "zero/base/message_probe.h"
#include "zero/lion.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using torch::optim::Optimizer;

enum class Kind { kAdamW, kSgd, kAdagrad, kLion };

std::unique_ptr<Optimizer> make(Kind kind, const std::vector<at::Tensor>& parameters) {
  switch (kind) {
    case Kind::kAdamW:
      return std::make_unique<torch::optim::AdamW>(
          parameters, torch::optim::AdamWOptions(0.05).weight_decay(0.1).amsgrad(true));
    case Kind::kSgd:
      return std::make_unique<torch::optim::SGD>(parameters,
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    case Kind::kAdagrad:
      return std::make_unique<torch::optim::Adagrad>(
          parameters, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.25));
    case Kind::kLion:
      return std::make_unique<Lion>(parameters, LionOptions(0.01).weight_decay(0.1));
  }
  return nullptr;
}

// The rows that `rows` names, and `fill` for -1.
at::Tensor selected(const at::Tensor& before, const at::Tensor& rows, double fill) {
  at::Tensor result = before.index_select(0, rows.clamp_min(0));
  result.index_fill_(0, rows.lt(0).nonzero().squeeze(1), fill);
  return result;
}

// One process, with fp32 masters of parameters of any dtype, as torch's optimizers would be used.
class Plain {
 public:
  Plain(Kind kind, const std::vector<at::Tensor>& parameters) : kind_(kind) {
    for (const at::Tensor& p : parameters) {
      masters.push_back(p.detach().to(at::kFloat).clone().requires_grad_());
    }
    optimizer_ = make(kind, masters);
  }
  void step(const std::vector<at::Tensor>& gradients) {
    for (size_t i = 0; i < masters.size(); ++i) {
      masters[i].mutable_grad() =
          gradients[i].defined() ? gradients[i].to(at::kFloat) : at::Tensor();
    }
    optimizer_->step();
  }
  // `values`: those of all rows, or undefined. Rows that `kept` names by 1 are said to have the
  // values of their sources.
  void resize(size_t i, const at::Tensor& rows, const at::Tensor& values, const at::Tensor& kept) {
    const at::NoGradGuard no_grad;
    const at::Tensor before = masters[i];
    at::Tensor now = selected(before.detach(), rows, 0);
    if (values.defined()) {
      const at::Tensor given = kept.eq(0).nonzero().squeeze(1);
      now.index_copy_(0, given, values.to(at::kFloat).index_select(0, given));
    }
    now.requires_grad_();
    optimizer_->param_groups()[0].params()[i] = now;
    auto& states = optimizer_->state();
    auto state = std::move(states[before.unsafeGetTensorImpl()]);
    states.erase(before.unsafeGetTensorImpl());
    if (state) {
      select(*state, rows);
      states[now.unsafeGetTensorImpl()] = std::move(state);
    }
    masters[i] = now;
  }

  std::vector<at::Tensor> masters;

 private:
  void select(torch::optim::OptimizerParamState& state, const at::Tensor& rows) const {
    if (kind_ == Kind::kAdamW) {
      auto& s = static_cast<torch::optim::AdamWParamState&>(state);
      s.exp_avg(selected(s.exp_avg(), rows, 0));
      s.exp_avg_sq(selected(s.exp_avg_sq(), rows, 0));
      s.max_exp_avg_sq(selected(s.max_exp_avg_sq(), rows, 0));
    } else if (kind_ == Kind::kSgd) {
      auto& s = static_cast<torch::optim::SGDParamState&>(state);
      s.momentum_buffer(selected(s.momentum_buffer(), rows, 0));
    } else if (kind_ == Kind::kAdagrad) {
      auto& s = static_cast<torch::optim::AdagradParamState&>(state);
      s.sum(selected(s.sum(), rows, 0.25));
    } else {
      auto& s = static_cast<LionParamState&>(state);
      s.exp_avg(selected(s.exp_avg(), rows, 0));
    }
  }

  const Kind kind_;
  std::unique_ptr<Optimizer> optimizer_;
};

struct Case {
  Kind kind = Kind::kAdamW;
  Layout layout = Layout::kContiguous;
  c10::ScalarType dtype = at::kFloat;
  int64_t stage = 2;
  bool fused = true;
};

// Points with three kinds of properties, and one parameter that has no rows to change.
struct Points {
  explicit Points(c10::ScalarType dtype, int64_t rows = 37) {
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"means", {rows, 3}}, {"colors", {rows, 4, 5}}, {"opacities", {rows}}, {"sky", {7}}}) {
      parameters.push_back(random_tensor(sizes, 40 + parameters.size()).to(dtype).requires_grad_());
      list.insert(name, parameters.back());
    }
  }
  std::vector<at::Tensor> parameters;
  NamedTensors list;
};

// The gradient of parameter i at a step: the same on all ranks.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, int step) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : parameters) {
    const auto seed = static_cast<uint64_t>(1000 * step + 7) + result.size();
    result.push_back(random_tensor(p.sizes().vec(), seed).to(p.scalar_type()));
  }
  if (step % 3 == 1 && result.size() > 2) result[2] = at::Tensor();  // not used in this step
  return result;
}

void step(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters, int number) {
  at::Tensor loss;
  const auto gradients = gradients_of(parameters, number);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const at::Tensor term = (parameters[i] * gradients[i]).to(at::kDouble).sum();
    loss = loss.defined() ? loss + term : term;
  }
  optimizer.backward(loss);
  optimizer.step();
}

void expect_equal(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters,
                  const Plain& plain, const std::string& when) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& expected = plain.masters[i];
    ASSERT_EQ(parameters[i].sizes(), expected.sizes()) << when;
    // A master that was rounded to bfloat16 is 4e-3 away.
    EXPECT_TRUE(at::allclose(optimizer.master(parameters[i]), expected, 1e-5, 1e-6))
        << when << ", master of parameter " << i;
    EXPECT_TRUE(at::equal(parameters[i].detach(),
                          optimizer.master(parameters[i]).to(parameters[i].scalar_type())))
        << when << ", working parameter " << i;
  }
}

// What ranks draw alike.
at::Tensor random_rows(int64_t before, int64_t now, uint64_t seed, bool with_new) {
  const at::Tensor drawn = random_tensor({now}, seed).abs().mul(1000).to(at::kLong);
  return drawn.remainder(before + (with_new ? 3 : 0)).sub(with_new ? 3 : 0).clamp_min(-1);
}

void run_case(const Group& group, const Case& c) {
  Points points(c.dtype);
  const auto& parameters = points.parameters;
  Plain plain(c.kind, parameters);
  ZeroOptimizer optimizer(points.list, make(c.kind, parameters), group,
                          ZeroOptions()
                              .bucket_bytes(c.layout == Layout::kPerParameter ? 500 : 700)
                              .stage(c.stage)
                              .layout(c.layout)
                              .fused(c.fused));
  int number = 0;
  const auto train = [&](int steps, const std::string& when) {
    for (int i = 0; i < steps; ++i, ++number) {
      step(optimizer, parameters, number);
      plain.step(gradients_of(parameters, number));
      expect_equal(optimizer, parameters, plain, c10::str(when, ", step ", number));
    }
  };
  train(2, "before");
  for (const int64_t rows : {61, 20, 1, 44}) {
    SCOPED_TRACE(rows);
    const int64_t before = parameters[0].size(0);
    at::Tensor from = random_rows(before, rows, static_cast<uint64_t>(rows), true);
    // A column of a tensor, whose other one differs between ranks.
    if (rows == 44) from = at::stack({from, at::full_like(from, group.rank())}, 1).select(1, 0);
    // Row 0 goes on with the state of another row, but has a value of its own.
    at::Tensor kept = from.ge(0).to(at::kLong);
    kept[0] = 0;
    std::vector<ResizedRows> changes;
    for (size_t i = 0; i < 2; ++i) {
      at::Tensor values = selected(parameters[i].detach().to(at::kFloat), from, 0.5);
      values[0] = 0.375;
      changes.push_back({parameters[i], from, i == 0 ? values.to(at::kDouble) : values});
      plain.resize(i, from, values, kept);
    }
    const at::Tensor others = random_rows(before, rows, 5, false);
    changes.push_back({parameters[2], others});
    plain.resize(2, others, {}, {});
    optimizer.resize_rows(changes);
    expect_equal(optimizer, parameters, plain, "right after");
    train(3, "after");
  }
  EXPECT_EQ(optimizer.stats().steps, number);
}

// All of it at two ranks, where dtypes take turns. At the other numbers layouts do too, so that
// each number has each layout, optimizer and dtype.
TEST(ResizeRowsTest, FollowsPlainTorch) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      for (const Kind kind : {Kind::kAdamW, Kind::kSgd, Kind::kAdagrad, Kind::kLion}) {
        for (const Layout layout :
             {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
          const int turn = static_cast<int>(kind) + static_cast<int>(layout);
          const bool chosen = (turn + static_cast<int>(layout) + world_size) % 3 == 0;
          if (world_size != 2 && !chosen) continue;
          const auto dtype = (turn / 2 + world_size) % 2 == 0 ? at::kFloat : at::kBFloat16;
          run_case(group, {kind, layout, dtype, 1 + turn % 2, turn % 3 != 0});
        }
      }
    });
  }
}

// The order of the module is that of the parameters when the optimizer is made anew.
TEST(ResizeRowsTest, AnotherListOfParametersIsRefused) {
  struct Net : torch::nn::Module {
    Net() {
      weight = register_parameter("weight", random_tensor({6, 4}, 1));
      bias = register_parameter("bias", at::ones({3}));
    }
    void register_again(const std::string& name, const at::Tensor& tensor) {
      parameters_.erase(name);
      register_parameter(name, tensor);
    }
    at::Tensor weight, bias;
  };
  run_ranks(2, [](const Group& group) {
    Net net;
    ZeroOptimizer optimizer(net, make(Kind::kAdamW, net.parameters()), group);
    step(optimizer, net.parameters(), 0);
    const at::Tensor rows = at::arange(5, at::kLong);
    if (group.rank() == 1) net.register_again("weight", net.weight);
    expect_words(error_of([&] {
                   optimizer.resize_rows({{net.weight, rows}});
                 }),
                 {"parameter bias", "in their order"});
    EXPECT_EQ(net.weight.size(0), 6);
    if (group.rank() == 1) net.register_again("bias", net.bias);
    optimizer.resize_rows({{net.weight, rows}});
    step(optimizer, net.parameters(), 3);
  });
}

// The tensor is the one that the module has, and graphs of before do no harm.
TEST(ResizeRowsTest, AParameterOfAModuleStaysTheSameTensor) {
  struct Net : torch::nn::Module {
    Net() { weight = register_parameter("weight", random_tensor({6, 4}, 1)); }
    at::Tensor weight;
  };
  run_ranks(2, [](const Group& group) {
    Net net;
    ZeroOptimizer optimizer(net, make(Kind::kAdamW, net.parameters()), group);
    const at::Tensor old_loss = net.weight.square().sum();
    optimizer.backward(old_loss);
    optimizer.step();
    const at::Tensor unused_graph = net.weight.sum();
    const at::Tensor stale = net.weight.square().sum();
    optimizer.resize_rows({{net.weight, at::arange(5, -1, -1).to(at::kLong)}});
    // It would compute with rows of other numbers.
    EXPECT_NE(error_of([&] { stale.backward(); }), "");
    optimizer.zero_grad();
    optimizer.resize_rows({{net.weight, at::tensor({5, 0}, at::kLong)}});
    EXPECT_TRUE(net.parameters()[0].is_same(net.weight));
    EXPECT_EQ(net.weight.sizes(), at::IntArrayRef({2, 4}));
    EXPECT_EQ(optimizer.param_groups()[0].params()[0].size(0), 2);
    for (int i = 0; i < 3; ++i) {
      optimizer.backward(net.weight.square().sum());
      optimizer.clip_grad_norm_(1.0);
      optimizer.step();
    }
    EXPECT_EQ(optimizer.gradient(net.weight).defined(), false);
    optimizer.check_replicas();
  });
}

// Counts of updates are in the device's memory then.
TEST(ResizeRowsTest, AStaticGraphGoesOnWithItsCounts) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor weight = random_tensor({6, 4}, 1).requires_grad_();
    NamedTensors list;
    list.insert("weight", weight);
    Plain plain(Kind::kAdamW, {weight});
    ZeroOptimizer optimizer(list, make(Kind::kAdamW, {weight}), group,
                            ZeroOptions().static_graph(true));
    for (int i = 0; i < 6; ++i) {
      if (i == 3) {
        const at::Tensor rows = at::tensor({5, 0, 3}, at::kLong);
        optimizer.resize_rows({{weight, rows}});
        plain.resize(0, rows, {}, {});
      }
      step(optimizer, {weight}, 3 * i);
      plain.step(gradients_of({weight}, 3 * i));
      expect_equal(optimizer, {weight}, plain, c10::str("step ", i));
    }
  });
}

// Sharded checkpoints, protected steps and freezing go on with the new size.
TEST(ResizeRowsTest, WhatComesAfterKnowsTheNewSize) {
  const std::string folder = ::testing::TempDir() + "resized";
  std::filesystem::remove_all(folder);
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      Points points(at::kFloat);
      const auto& p = points.parameters;
      const auto options = ZeroOptions().bucket_bytes(700).protect(1);
      ZeroOptimizer optimizer(points.list, make(Kind::kAdamW, p), group, options);
      step(optimizer, p, 0);
      const at::Tensor rows = random_rows(37, 50, 3, false);
      // Of gradients, of which a change of parameters sends none.
      const auto bytes = [&] { return optimizer.stats().data.exchange_bytes_sent; };
      const int64_t before = bytes();
      optimizer.resize_rows({{p[0], rows}, {p[1], rows}, {p[2], rows}});
      EXPECT_EQ(bytes(), before);
      step(optimizer, p, 1);
      optimizer.freeze({p[1]});
      EXPECT_EQ(bytes(), 0);
      step(optimizer, {p[0], p[1].detach(), p[2], p[3]}, 2);
      optimizer.unfreeze({p[1]});
      step(optimizer, p, 3);
      optimizer.save_checkpoint(folder, SaveOptions().overwrite(true));
      Points other(at::kFloat, 50);
      ZeroOptimizer again(other.list, make(Kind::kAdamW, other.parameters), group, options);
      again.load_checkpoint(folder);
      for (int i = 4; i < 6; ++i) {
        step(optimizer, p, i);
        step(again, other.parameters, i);
      }
      for (size_t i = 0; i < p.size(); ++i) EXPECT_TRUE(at::equal(p[i], other.parameters[i])) << i;
    });
  }
}

TEST(ResizeRowsTest, ADeathAfterwardsGoesBackToTheNewRows) {
  run_ranks(3,
            [](const Group& group) {
              Points points(at::kFloat);
              const auto& p = points.parameters;
              auto optimizer =
                  std::make_unique<ZeroOptimizer>(points.list, make(Kind::kAdamW, p), group,
                                                  ZeroOptions().bucket_bytes(700).protect(2));
              for (int i = 0; i < 3; ++i) step(*optimizer, p, i);
              const at::Tensor rows = random_rows(37, 50, 3, false);
              optimizer->resize_rows({{p[0], rows}});
              std::vector<at::Tensor> protected_values;
              for (const at::Tensor& t : p) protected_values.push_back(t.detach().clone());
              if (group.rank() == 1) return;
              EXPECT_THROW(
                  {
                    for (int i = 3; i < 9; ++i) step(*optimizer, p, i);
                  },
                  CommunicationError);
              EXPECT_EQ(optimizer->recover().steps, 3);
              for (size_t i = 0; i < p.size(); ++i)
                EXPECT_TRUE(at::equal(p[i], protected_values[i])) << i;
              for (int i = 3; i < 6; ++i) step(*optimizer, p, i);
              optimizer->check_replicas();
            },
            {.timeout = std::chrono::seconds(8)});
}

// Some of its parameters have sizes that no protected step knows.
TEST(ResizeRowsTest, ADeathWithinIsFinal) {
  static thread_local bool dies = false;
  message_probe = [](const std::string& what) {
    TORCH_CHECK(!dies || what.find("before resize_rows()") == std::string::npos, "a death");
  };
  run_ranks(3,
            [](const Group& group) {
              Points points(at::kFloat);
              const auto& p = points.parameters;
              auto optimizer =
                  std::make_unique<ZeroOptimizer>(points.list, make(Kind::kAdamW, p), group,
                                                  ZeroOptions().bucket_bytes(700).protect(1));
              for (int i = 0; i < 3; ++i) step(*optimizer, p, i);
              dies = group.rank() == 1;
              const std::vector<ResizedRows> changes = {{p[0], random_rows(37, 50, 3, false)}};
              if (dies) {
                expect_words(error_of([&] { optimizer->resize_rows(changes); }), {"a death"});
                return;
              }
              EXPECT_THROW(optimizer->resize_rows(changes), CommunicationError);
              expect_words(error_of([&] { optimizer->recover(); }),
                           {"parameter means", "[37, 3]", "[50, 3]", "ended within resize_rows()"});
            },
            {.timeout = std::chrono::seconds(8)});
  message_probe = nullptr;
}

TEST(ResizeRowsTest, MisuseChangesNothing) {
  run_ranks(2, [](const Group& group) {
    Points points(at::kFloat);
    const auto& p = points.parameters;
    ZeroOptimizer optimizer(points.list, make(Kind::kAdamW, p), group);
    step(optimizer, p, 0);
    const at::Tensor rows = at::arange(5, at::kLong);
    const auto refused = [&](const std::vector<ResizedRows>& changes,
                             const std::vector<std::string>& words) {
      expect_words(error_of([&] { optimizer.resize_rows(changes); }), words);
    };
    refused({}, {"resize_rows()", "expected parameters, got none"});
    refused({{p[0], rows}, {p[0], rows}}, {"parameter means", "got it twice"});
    refused({{at::ones({3}), rows}}, {"does not manage"});
    refused({{p[0], {}}}, {"rows", "1-D int64", "got none"});
    refused({{p[0], rows.to(at::kInt)}}, {"rows", "1-D int64", "Int"});
    refused({{p[0], rows.slice(0, 0, 0)}}, {"at least one row", "freeze()"});
    refused({{p[0], rows + 33}}, {"from -1 to 36", "got 37"});
    refused({{p[0], rows - 2, at::ones({5, 3})}}, {"from -1 to 36", "got -2"});
    refused({{p[0], rows - 1}}, {"values", "-1", "got none"});
    refused({{p[0], rows, at::ones({4, 3})}}, {"values", "[5, 3]", "[4, 3]"});
    refused({{p[0], rows, at::ones({5, 3}, at::kLong)}}, {"values", "floating-point", "Long"});
    // On one rank.
    const bool here = group.rank() == 1;
    refused({{p[0], here ? rows + 33 : rows}}, {"rank 1", "got 37"});
    refused({{p[0], here ? rows + 1 : rows}}, {"means to 5 rows with hash"});
    if (here) optimizer.backward(p[0].sum());
    refused({{p[0], rows}}, {"expected no gradients since the last step"});
    optimizer.zero_grad();
    {
      const at::NoGradGuard no_grad;
      p[1].mul_(2);
    }
    refused({{p[0], rows}}, {"parameter colors", "refresh_master_parameters()"});
    optimizer.refresh_master_parameters();
    auto& members = optimizer.param_groups()[0].params();
    members.pop_back();
    refused({{p[0], rows}}, {"parameter group 0"});
    members.push_back(p[3]);
    auto& options = optimizer.param_groups()[0].options();
    const double rate = options.get_lr();
    options.set_lr(std::numeric_limits<double>::quiet_NaN());
    refused({{p[0], rows}}, {"parameter group 0: expected a number as lr, got nan"});
    options.set_lr(rate);
    for (const at::Tensor& t : p) EXPECT_EQ(t.size(0), t.dim() == 1 && t.numel() == 7 ? 7 : 37);
    step(optimizer, p, 1);
    optimizer.resize_rows({{p[0], rows}});
    step(optimizer, p, 2);
    optimizer.check_replicas();
  });
}

TEST(ResizeRowsTest, ACostThatThrowsNoStdExceptionChangesNothing) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor weight = random_tensor({6, 4}, 1).requires_grad_();
    bool fails = false;
    ZeroOptimizer optimizer(NamedTensors{{"weight", weight}}, make(Kind::kAdamW, {weight}), group,
                            ZeroOptions()
                                .layout(Layout::kWholeParameters)
                                .owner_cost([&](c10::IntArrayRef sizes) -> int64_t {
                                  if (fails) throw 1;
                                  return static_cast<int64_t>(sizes.size());
                                }));
    const auto resize = [&] { optimizer.resize_rows({{weight, at::tensor({5, 0}, at::kLong)}}); };
    fails = group.rank() == 1;
    expect_words(error_within(std::chrono::seconds(5), resize), {"no std::exception"});
    fails = false;
    EXPECT_EQ(error_of(resize), "");
  });
}

TEST(ResizeRowsTest, WhatHasNoRowsIsRefused) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor columns = random_tensor({4, 6}, 1).t().requires_grad_();
    const at::Tensor number = at::full({}, 1.0).requires_grad_();
    NamedTensors list;
    list.insert("columns", columns);
    list.insert("number", number);
    ZeroOptimizer optimizer(list, make(Kind::kSgd, {columns, number}), group);
    const at::Tensor rows = at::zeros({2}, at::kLong);
    expect_words(error_of([&] {
                   optimizer.resize_rows({{columns, rows}});
                 }),
                 {"parameter columns", "follow each other in memory", "strides [1, 6]"});
    expect_words(error_of([&] {
                   optimizer.resize_rows({{number, rows}});
                 }),
                 {"parameter number", "dimension of rows"});
    const at::Tensor weight = random_tensor({8, 6}, 1).requires_grad_();
    NamedTensors matrix;
    matrix.insert("weight", weight);
    ZeroOptimizer factored(
        matrix, std::make_unique<Adafactor>(std::vector<at::Tensor>{weight}, AdafactorOptions(0.1)),
        group);
    factored.backward(weight.square().sum());
    factored.step();
    expect_words(error_of([&] {
                   factored.resize_rows({{weight, rows}});
                 }),
                 {"parameter weight", "one value for each element"});
    factored.backward(weight.square().sum());
    factored.step();
  });
}

// As filters of a convolution are pruned. The split is no view of a contiguous tensor.
TEST(ResizeRowsTest, ASplitOfMuonSeesTheOrderInMemory) {
  run_ranks(2, [](const Group& group) {
    at::Tensor w = random_tensor({8, 4, 3, 3}, 1).contiguous(at::MemoryFormat::ChannelsLast);
    w.requires_grad_();
    const auto split = [](const at::Tensor& t) {
      return std::vector<at::Tensor>{t.permute({0, 2, 3, 1}).flatten(1)};
    };
    NamedTensors list;
    list.insert("w", w);
    ZeroOptimizer optimizer(
        list, std::make_unique<Muon>(std::vector<at::Tensor>{w}, MuonOptions(0.02).split(split)),
        group);
    for (int i = 0; i < 2; ++i) {
      optimizer.backward(w.square().sum());
      optimizer.step();
      if (i == 0) optimizer.resize_rows({{w, at::arange(6)}});
    }
    EXPECT_EQ(w.strides(), at::IntArrayRef({36, 1, 12, 4}));
  });
}

// Matrices have one owner, which changes with the sizes.
TEST(ResizeRowsTest, MomentumOfMuonFollowsTheOwner) {
  std::vector<at::Tensor> expected;
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      std::vector<at::Tensor> p;
      NamedTensors list;
      for (int i = 0; i < 4; ++i) {
        p.push_back(random_tensor({12 + i, 8}, static_cast<uint64_t>(i)).requires_grad_());
        list.insert(c10::str("matrix", i), p.back());
      }
      ZeroOptimizer optimizer(
          list, std::make_unique<Muon>(p, MuonOptions(0.05).ns_dtype(at::kFloat)), group);
      for (int i = 0; i < 2; ++i) step(optimizer, p, i);
      optimizer.resize_rows(
          {{p[0], random_rows(12, 40, 1, false)}, {p[3], random_rows(15, 2, 2, false)}});
      for (int i = 2; i < 5; ++i) step(optimizer, p, i);
      if (world_size == 1) {
        for (const at::Tensor& t : p) expected.push_back(t.detach().clone());
      }
      for (size_t i = 0; i < p.size(); ++i) {
        EXPECT_TRUE(at::allclose(p[i].detach(), expected[i], 1e-4, 1e-5)) << i;
      }
    });
  }
}

}  // namespace
}  // namespace zero
