// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Adafactor by itself. python_optimizers_test compares its numbers with Python.
#include "zero/adafactor.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "tests/inner_optimizers/own_class.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"

namespace zero {
namespace {

const AdafactorParamState& state_of(Adafactor& adafactor, const at::Tensor& p) {
  return static_cast<const AdafactorParamState&>(*adafactor.state().at(p.unsafeGetTensorImpl()));
}

TEST(AdafactorTest, StateIsARowAndAColumnForEachMatrixAndOneTensorForVectors) {
  const at::Tensor matrices = parameter({2, 5, 7}), vector = parameter({9}), scalar = parameter({});
  const at::Tensor empty = parameter({0, 3});
  Adafactor adafactor(Params{matrices, vector, scalar, empty});
  for (const at::Tensor& p : {matrices, vector, scalar, empty}) p.mutable_grad() = gradient(p, 1);
  adafactor.step();
  EXPECT_EQ(state_of(adafactor, matrices).row_var().sizes(), at::IntArrayRef({2, 5, 1}));
  EXPECT_EQ(state_of(adafactor, matrices).col_var().sizes(), at::IntArrayRef({2, 1, 7}));
  EXPECT_FALSE(state_of(adafactor, matrices).variance().defined());
  for (const at::Tensor& p : {vector, scalar}) {
    EXPECT_EQ(state_of(adafactor, p).variance().sizes(), p.sizes());
    EXPECT_FALSE(state_of(adafactor, p).row_var().defined());
  }
  EXPECT_EQ(adafactor.state().size(), 3);
}

// An update of 2^-4 * g / sqrt(v) of zeros, without clipping: with a power of two, and nothing to
// add to, the last sum is exact on processors with and without fused multiply-adds.
AdafactorOptions exact_options() { return AdafactorOptions(0x1p-4).eps({1e-3, 1.0}).d(1e30); }

// v = row_var * col_var / mean, each operation rounded to the dtype once: a matrix product may keep
// the first unrounded, or flush what is small, depending on the processor.
template <class T>
void expect_update_element_by_element(at::ScalarType dtype) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1, 1}, {3, 70}, {130, 67}}) {
    const at::Tensor p = at::zeros(shape, dtype).requires_grad_();
    p.mutable_grad() = gradient(p, 1);
    Adafactor adafactor(Params{p}, exact_options());
    adafactor.step();
    const AdafactorParamState& state = state_of(adafactor, p);
    const T mean = state.row_var().mean(-2).item<T>();
    const at::Tensor rows = state.row_var().flatten(), columns = state.col_var().flatten();
    at::Tensor expected = at::empty(shape, dtype);
    for (int64_t i = 0; i < shape[0]; ++i) {
      for (int64_t j = 0; j < shape[1]; ++j) {
        const T product = rows[i].item<T>() * columns[j].item<T>();
        const T v = product / mean;
        const T root = std::sqrt(static_cast<float>(v));
        const T u = static_cast<T>(1 / root) * p.grad()[i][j].item<T>();
        expected[i][j] = -u / 16;
      }
    }
    EXPECT_TRUE(at::equal(p.detach(), expected)) << dtype << " " << shape[0] << " x " << shape[1];
  }
}

TEST(AdafactorTest, AMatrixIsUpdatedElementByElementWithOneRoundingAnOperation) {
  expect_update_element_by_element<float>(at::kFloat);
  expect_update_element_by_element<c10::BFloat16>(at::kBFloat16);
}

TEST(AdafactorTest, AMatrixHasTheSameBitsInABatchAndAlone) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{5, 1, 9}, {3, 37, 70}, {2, 70, 4}, {2, 5000, 20}}) {
      const at::Tensor batch = at::zeros(shape, dtype).requires_grad_();
      batch.mutable_grad() = gradient(batch, 1);
      Params alone;
      for (int64_t i = 0; i < shape[0]; ++i) {
        alone.push_back(at::zeros({shape[1], shape[2]}, dtype).requires_grad_());
        alone.back().mutable_grad() = batch.grad()[i].clone();
      }
      Adafactor of_batch(Params{batch}, exact_options()), of_alone(alone, exact_options());
      of_batch.step();
      of_alone.step();
      for (int64_t i = 0; i < shape[0]; ++i) {
        EXPECT_TRUE(at::equal(batch.detach()[i], alone[i])) << dtype << " " << i;
      }
    }
  }
}

// Of a vector, whose v is g^2, u is 1 in the first step.
TEST(AdafactorTest, RootMeanSquaresOfManyElementsAreThoseOfDouble) {
  const at::Tensor values = values_that_a_float_loses();
  const at::Tensor p = values.clone().requires_grad_();
  p.mutable_grad() = at::ones_like(values);
  Adafactor adafactor(Params{p}, AdafactorOptions(0.5));
  adafactor.step();
  const at::Tensor wide = values.to(at::kDouble);
  const double rms = wide.square().mean().sqrt().item<double>();
  EXPECT_NEAR((wide[-1] - p.detach()[-1]).item<double>(), 0.5 * rms, 1e-4 * rms);
}

TEST(AdafactorTest, ColumnsOfManyRowsHaveTheMeansOfDouble) {
  const at::Tensor p = parameter({3, 9000, 20});
  p.mutable_grad() = gradient(p, 1);
  Adafactor adafactor(Params{p});
  adafactor.step();
  const at::Tensor expected = p.grad().to(at::kDouble).square().mean(-2, /*keepdim=*/true);
  EXPECT_TRUE(at::allclose(state_of(adafactor, p).col_var().to(at::kDouble), expected, 1e-6, 0.0));
}

// Python 2.11 would use the first parameter's for the second.
TEST(AdafactorTest, TheDefaultEps1IsThatOfEachParameter) {
  const at::Tensor wide = parameter({4}).to(at::kDouble).detach().requires_grad_();
  const at::Tensor narrow = at::ones({4}, at::kBFloat16).requires_grad_();
  const at::Tensor alone = at::ones({4}, at::kBFloat16).requires_grad_();
  Adafactor both(Params{wide, narrow}, AdafactorOptions(1.0)),
      one(Params{alone}, AdafactorOptions(1.0));
  for (const at::Tensor& p : {wide, narrow, alone}) {
    p.mutable_grad() = at::full({4}, 1e-4, p.scalar_type());
  }
  both.step();
  one.step();
  EXPECT_TRUE(at::equal(narrow, alone));
  // u is g / eps1, since g is smaller; with the epsilon of fp32 it would be 1.
  EXPECT_NEAR(narrow[0].item<double>(), 1 - 1e-4 / 0x1p-7, 0x1p-8);
}

TEST(AdafactorTest, GroupsHaveTheirOwnOptionsAndParametersWithoutGradientStay) {
  expect_options_of_groups<Adafactor>({8, 4}, AdafactorOptions(0.5).maximize(true),
                                      AdafactorOptions(0.25), -2);
}

TEST(AdafactorTest, SavedAndLoadedItGoesOnInEveryBit) {
  for (const auto& eps1 : {std::optional<double>(), std::optional<double>(1e-4)}) {
    const AdafactorOptions options = AdafactorOptions(0.1)
                                         .beta2_decay(-0.5)
                                         .eps({eps1, 0.01})
                                         .d(1.5)
                                         .weight_decay(0.25)
                                         .maximize(true);
    expect_goes_on_from_its_archive<Adafactor>({parameter({6, 5}), parameter({7})}, options,
                                               AdafactorOptions(7).eps({0.5, 0.5}));
  }
}

TEST(AdafactorTest, OptionsThatCannotTrainAreRefusedInEveryGroup) {
  expect_words(refused<Adafactor>(AdafactorOptions(-1)), {"learning rate of 0 or more", "-1"});
  expect_words(refused<Adafactor>(AdafactorOptions().beta2_decay(0.5)),
               {"beta2_decay of 0 or less", "0.5"});
  expect_words(refused<Adafactor>(AdafactorOptions().eps({-1.0, 0.1})), {"eps of 0 or more", "-1"});
  expect_words(refused<Adafactor>(AdafactorOptions().d(0.5)), {"d of 1 or more", "0.5"});
  expect_words(refused<Adafactor>(AdafactorOptions().weight_decay(-2)),
               {"weight decay of 0 or more", "-2"});
}

}  // namespace
}  // namespace zero
