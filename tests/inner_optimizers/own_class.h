// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What each class of inner optimizers of this library promises in the same words: its archive holds
// all of it, groups have their own options, and options that cannot train are refused.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"

namespace zero {

using Params = std::vector<at::Tensor>;

inline at::Tensor parameter(at::IntArrayRef shape, uint64_t seed = 1) {
  return random_tensor(shape, seed).requires_grad_();
}

inline at::Tensor gradient(const at::Tensor& p, int step) {
  return random_tensor(p.sizes(), 100 + static_cast<uint64_t>(step)).to(p.scalar_type());
}

// With a vector of floats as sum of squares, as libtorch's norm of a CPU has it, the first elements
// make each of its floats so large that the others change none: the norm is 0.2 % too small.
inline at::Tensor values_that_a_float_loses() {
  at::Tensor values = at::full({1 << 20}, 1.9);
  values.narrow(0, 0, 64).fill_(4096);
  return values;
}

// One with `other` options loads what one with `options` saves, and goes on in every bit.
template <class Class, class Options>
void expect_goes_on_from_its_archive(const Params& params, const Options& options,
                                     const Options& other) {
  const auto steps = [](Class& optimizer, const Params& over, int first, int last) {
    for (int step = first; step < last; ++step) {
      for (const at::Tensor& p : over) p.mutable_grad() = gradient(p, step);
      optimizer.step();
    }
  };
  Class saved(params, options);
  steps(saved, params, 0, 3);
  std::stringstream stream;
  torch::serialize::OutputArchive written;
  saved.save(written);
  written.save_to(stream);
  Params others;
  for (const at::Tensor& p : params) others.push_back(p.detach().clone().requires_grad_());
  Class loaded(others, other);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  loaded.load(archive);
  EXPECT_EQ(static_cast<const Options&>(loaded.param_groups()[0].options()), options);
  steps(saved, params, 3, 6);
  steps(loaded, others, 3, 6);
  for (size_t i = 0; i < params.size(); ++i) EXPECT_TRUE(at::equal(params[i], others[i]));
}

// The first group has its own options, the second `others`, and the update of the first is `factor`
// times that of the second. One parameter has no gradient, and those of `empty` have no elements.
template <class Class, class Options>
void expect_options_of_groups(at::IntArrayRef shape, const Options& own, const Options& others,
                              double factor, const Params& empty = {}) {
  const at::Tensor a = parameter(shape), b = parameter(shape), c = parameter(shape);
  const at::Tensor start = a.detach().clone();
  Params second{c, b};
  second.insert(second.begin() + 1, empty.begin(), empty.end());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Params{a}, std::make_unique<Options>(own));
  groups.emplace_back(second);
  Class optimizer(groups, others);
  a.mutable_grad() = gradient(a, 1);
  b.mutable_grad() = gradient(a, 1);
  for (const at::Tensor& p : empty) p.mutable_grad() = gradient(p, 1);
  const at::Tensor loss = optimizer.step([] {
    EXPECT_TRUE(at::GradMode::is_enabled());
    return at::full({}, 3.0);
  });
  EXPECT_EQ(loss.item<double>(), 3.0);
  const at::Tensor moved = a.detach() - start;
  EXPECT_LE((moved - factor * (b.detach() - start)).abs().max().item<double>(), 1e-6);
  EXPECT_GT(moved.abs().max().item<double>(), 0.1);
  EXPECT_TRUE(at::equal(c, start));
  EXPECT_EQ(optimizer.state().size(), 2);
}

// What a class throws for options, be they those of all groups or of one.
template <class Class, class Options>
std::string refused(const Options& options) {
  const auto params = [] { return Params{at::ones({2, 2}).requires_grad_()}; };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(params(), std::make_unique<Options>(options));
  const std::string text = error_of([&] { Class own(params(), options); });
  EXPECT_EQ(error_of([&] { Class own(groups); }), text);
  return text;
}

}  // namespace zero
