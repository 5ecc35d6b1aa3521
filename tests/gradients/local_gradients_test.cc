// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/local_gradients.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"

namespace zero {
namespace {

// A matrix and a vector.
struct Model {
  explicit Model(c10::ScalarType dtype, bool fp32 = false)
      : flat({at::zeros({2, 3}, dtype), at::zeros({4}, dtype)}, 1, {Layout::kContiguous, 256}),
        local(flat.table, fp32) {}
  at::Tensor& grad(int64_t p) { return flat.model.values[p].mutable_grad(); }
  void accumulate(int64_t p, double value) {
    local.clear_placeholder(p);
    const at::Tensor added = at::full_like(flat.model.values[p].detach(), value);
    grad(p) = grad(p).defined() ? grad(p) + added : added;
  }

  FlatModel flat;
  LocalGradients local;
};

TEST(LocalGradientsTest, ReleaseReturnsEverythingOnce) {
  Model m(at::kFloat);
  EXPECT_FALSE(m.local.has(0));
  m.accumulate(0, 2);
  m.local.accumulate_locally(0);
  m.accumulate(0, 3);
  EXPECT_TRUE(m.local.has(0));
  EXPECT_EQ(m.local.bytes(), 6 * 4);
  EXPECT_TRUE(at::equal(m.local.take_sum(0), at::full({2, 3}, 5.0)));
  EXPECT_FALSE(m.grad(0).defined());
  EXPECT_FALSE(m.local.has(0));
  EXPECT_EQ(m.local.bytes(), 0);
}

// 256 + 1 is no bfloat16, so a sum in that dtype would stay at 256.
TEST(LocalGradientsTest, SixteenBitGradientsAddUpInFp32WhenAsked) {
  for (const bool fp32 : {false, true}) {
    Model m(at::kBFloat16, fp32);
    for (const double value : {256.0, 1.0, 1.0, 1.0}) {
      m.accumulate(1, value);
      m.local.accumulate_locally(1);
      EXPECT_EQ(is_marker(m.grad(1)), fp32);
    }
    EXPECT_EQ(m.local.bytes(), fp32 ? 4 * 4 : 4 * 2);
    m.accumulate(1, 1.0);
    const at::Tensor sum = m.local.take_sum(1);
    EXPECT_EQ(sum.scalar_type(), fp32 ? at::kFloat : at::kBFloat16);
    EXPECT_TRUE(at::equal(sum.to(at::kFloat), at::full({4}, fp32 ? 260.0 : 256.0))) << sum;
  }
}

TEST(LocalGradientsTest, AKeptGradientThatWasResetIsForgotten) {
  for (const bool fp32 : {false, true}) {
    Model m(at::kBFloat16, fp32);
    m.accumulate(1, 1);
    m.local.accumulate_locally(1);
    m.accumulate(0, 2);
    m.local.accumulate_locally(0);
    m.local.verify();
    m.grad(1).reset();
    EXPECT_TRUE(m.local.was_reset(1));
    EXPECT_FALSE(m.local.drop_resets()) << "nothing was sent";
    EXPECT_FALSE(m.local.has(1));
    EXPECT_TRUE(m.local.has(0));
    m.local.verify();
  }
}

TEST(LocalGradientsTest, AMarkerStaysUntilTheStepIsOverAndMayNotBeReplaced) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Model m(dtype);
    m.accumulate(0, 1);
    m.local.take_sum(0);
    m.local.mark_sent(0);
    EXPECT_TRUE(is_marker(m.grad(0)));
    EXPECT_EQ(m.grad(0).sizes(), m.flat.model.values[0].sizes());
    EXPECT_EQ(m.grad(0).scalar_type(), dtype);
    EXPECT_FALSE(m.local.has(0));
    EXPECT_EQ(m.local.bytes(), 0);
    m.local.verify();
    const std::vector<std::string> words{"parameter value0", "expected p.grad() as the backward",
                                         "register_hook()"};
    // As zero_grad(false) of a module does.
    m.grad(0).detach_().zero_();
    expect_words(error_of([&] { m.local.verify(); }), words);
    m.local.drop_all();
    EXPECT_FALSE(m.grad(0).defined());
    m.accumulate(0, 1);
    m.local.mark_sent(0);
    EXPECT_TRUE(is_marker(m.grad(0)));
    m.grad(0) = at::ones({2, 3});
    expect_words(error_of([&] { m.local.verify(); }), words);
    expect_words(error_of([&] { m.local.clear_placeholder(0); }), words);
    m.local.drop_all();
    // Also what waits for the next round is a part of more.
    m.accumulate(0, 1);
    m.local.mark_sent(0);
    m.accumulate(0, 2);
    m.local.note_accumulated(0);
    m.local.verify();
    m.grad(0).mul_(2);
    expect_words(error_of([&] { m.local.verify(); }), words);
    m.local.drop_all();
    m.accumulate(0, 1);
    m.local.mark_sent(0);
    m.local.end_step();
    EXPECT_FALSE(m.grad(0).defined());
    m.local.verify();
  }
}

// As a handle of p.grad() of the last step does.
TEST(LocalGradientsTest, AMarkerThatWasFilledBetweenStepsIsNaNInTheNext) {
  for (const bool with_version : {true, false}) {
    Model m(at::kHalf);
    m.local.mark_sent(0);
    const at::Tensor handle = m.grad(0);
    m.local.end_step();
    (with_version ? handle : handle.data()).zero_();
    m.local.mark_sent(0);
    EXPECT_TRUE(is_marker(m.grad(0)));
    m.local.verify();
  }
}

// Neither torch nor Gloo nor MPI knows that memory behind a pointer is not that of numel().
TEST(LocalGradientsTest, AMarkerCannotBeUsedThroughItsPointer) {
  FlatModel flat({at::zeros({100}), at::zeros({64, 64}), at::zeros({2, 3}, at::kBFloat16)}, 1,
                 {Layout::kContiguous, 256});
  LocalGradients local(flat.table, false);
  local.mark_sent(1);
  const at::Tensor& marker = flat.model.values[1].grad();
  volatile float* const values = marker.mutable_data_ptr<float>();
  values[0] = 1;
  EXPECT_DEATH(values[marker.numel() - 1] = 1, "");
}

TEST(LocalGradientsTest, AMarkerGoesWithItsOwner) {
  FlatModel flat({at::zeros({2, 3})}, 1, {Layout::kContiguous, 256});
  {
    LocalGradients local(flat.table, false);
    local.mark_sent(0);
    EXPECT_TRUE(is_marker(flat.model.values[0].grad()));
  }
  EXPECT_FALSE(flat.model.values[0].grad().defined());
}

// Raw memory of these is not what they are worth.
TEST(LocalGradientsTest, LazyGradientsAreWorthWhatTorchTakesThemFor) {
  const at::Tensor negative = at::complex(at::zeros({2, 3}), at::full({2, 3}, 7.0));
  const std::vector<at::Tensor> lazy{
      at::imag(negative.conj()).contiguous(), at::_neg_view(at::full({2, 3}, 7.0)),
      at::_efficientzerotensor({2, 3}, at::kFloat), at::full({}, 3.0).expand({2, 3})};
  ASSERT_TRUE(lazy[1].is_neg() && lazy[2]._is_zerotensor());
  for (const at::Tensor& gradient : lazy) {
    const at::Tensor expected = at::zeros({2, 3}) + gradient;
    Model m(at::kFloat);
    const bool plain = !gradient.is_neg() && !gradient._is_zerotensor() && gradient.stride(1) == 1;
    EXPECT_EQ(m.local.sum_to_add(0, gradient, at::kFloat).has_value(), plain);
    m.grad(0) = gradient;
    EXPECT_TRUE(at::equal(m.local.take_sum(0), expected)) << expected;
    m.grad(0) = gradient;
    m.local.accumulate_locally(0);
    EXPECT_TRUE(at::equal(m.local.take_sum(0), expected)) << expected;
  }
}

TEST(LocalGradientsTest, AGradientThatCannotBeSentIsRefused) {
  Model m(at::kFloat);
  m.accumulate(0, 1);
  m.flat.model.values[0].mutable_grad() = at::zeros({2, 3}).to_sparse();
  expect_words(error_of([&] { m.local.accumulate_locally(0); }), {"expected a dense tensor"});
  expect_words(error_of([&] { m.local.verify(); }), {"expected a dense tensor"});
  expect_words(error_of([&] { m.local.take_sum(0); }), {"expected a dense tensor"});
  m.flat.model.values[0].mutable_grad() = at::zeros({2, 3}, at::kComplexFloat);
  expect_words(error_of([&] { m.local.accumulate_locally(0); }),
               {"gradient of value0", "expected a real dtype"});
}

// The sum of an addend and a gradient is rounded once: to the dtype of the bucket.
TEST(LocalGradientsTest, AnAddendIsTakenInTheDtypeOfTheBucketOnly) {
  const at::Tensor gradient = at::ones({4}, at::kBFloat16);
  Model none(at::kBFloat16);
  ASSERT_TRUE(none.local.sum_to_add(1, gradient, at::kFloat));
  EXPECT_FALSE(none.local.sum_to_add(1, gradient, at::kFloat)->defined());
  EXPECT_FALSE(none.local.sum_to_add(1, gradient.to_sparse(), at::kFloat));
  EXPECT_FALSE(none.local.sum_to_add(1, at::ones({5}, at::kBFloat16), at::kFloat));

  Model kept(at::kBFloat16);
  kept.accumulate(1, 3);
  kept.local.accumulate_locally(1);
  const auto same = kept.local.sum_to_add(1, gradient, at::kBFloat16);
  ASSERT_TRUE(same && same->defined());
  EXPECT_TRUE(at::equal(*same, at::full({4}, 3, at::kBFloat16)));
  EXPECT_FALSE(kept.local.sum_to_add(1, gradient, at::kFloat));

  Model in_fp32(at::kBFloat16, /*fp32=*/true);
  in_fp32.accumulate(1, 3);
  in_fp32.local.accumulate_locally(1);
  EXPECT_TRUE(in_fp32.local.sum_to_add(1, gradient, at::kFloat));
  EXPECT_FALSE(in_fp32.local.sum_to_add(1, gradient, at::kBFloat16));
  in_fp32.accumulate(1, 1);  // Two addends are not taken at once.
  EXPECT_FALSE(in_fp32.local.sum_to_add(1, gradient, at::kFloat));
}

// Of three sums of 64 KiB, released in the order 2, 0, 1.
struct ThreeSums {
  explicit ThreeSums(int64_t numel = 16 << 10)
      : flat({at::zeros({numel}), at::zeros({numel}), at::zeros({numel})}, 1,
             {Layout::kContiguous, 1 << 20}),
        local(flat.table, /*fp32=*/false) {}
  // A pass of a step under no_sync, or without: each gradient is new.
  void make(int64_t p) {
    local.clear_placeholder(p);
    at::Tensor& grad = flat.model.values[p].mutable_grad();
    grad = at::ones_like(flat.model.values[p].detach());
    memory[p] = grad.storage().getWeakStorageImpl();
  }
  void keep(int64_t p) {
    make(p);
    local.accumulate_locally(p);
  }
  void release_all() {
    for (const int64_t p : {2, 0, 1}) {
      local.take_sum(p);
      local.mark_sent(p);
    }
    local.end_step();
  }
  bool is_free(int64_t p) const { return memory[p]->expired(); }

  FlatModel flat;
  LocalGradients local;
  std::array<std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>, 3> memory;
};

TEST(LocalGradientsTest, TheMemoryOfASumIsFreedBeforeTheGradientThatTakesIt) {
  ThreeSums m;
  for (const int64_t p : {2, 0, 1}) m.keep(p);
  m.release_all();
  EXPECT_TRUE(m.is_free(2)) << "the next step begins with it";
  EXPECT_FALSE(m.is_free(0) || m.is_free(1));
  EXPECT_EQ(m.local.bytes(), 2 * (64 << 10));
  const auto old = m.memory;
  m.local.drop_all();  // zero_grad() at the beginning of a step
  m.keep(2);
  EXPECT_TRUE(old[0]->expired());
  EXPECT_FALSE(old[1]->expired());
  m.keep(0);
  EXPECT_TRUE(old[1]->expired());
  m.keep(1);
  EXPECT_EQ(m.local.bytes(), 3 * (64 << 10));
}

// As that of create_graph, which leads to all that its pass has saved.
TEST(LocalGradientsTest, NoGraphIsHeld) {
  ThreeSums m;
  for (const int64_t p : {2, 0, 1}) {
    m.make(p);
    const at::Tensor saved = at::ones({1}).set_requires_grad(true);
    m.memory[p] = c10::weak_intrusive_ptr<c10::StorageImpl>(saved.storage().getWeakStorageImpl());
    at::Tensor& gradient = m.flat.model.values[p].mutable_grad();
    gradient = gradient * saved;
    m.local.accumulate_locally(p);
  }
  m.release_all();
  for (const int64_t p : {2, 0, 1}) EXPECT_TRUE(m.is_free(p)) << p;
  EXPECT_GT(m.local.bytes(), 0);
}

TEST(LocalGradientsTest, AStepWithoutNoSyncHoldsNoMemory) {
  ThreeSums m;
  for (const int64_t p : {2, 0, 1}) m.keep(p);
  m.release_all();
  EXPECT_GT(m.local.bytes(), 0);
  // As where each gradient goes straight into its bucket.
  m.release_all();
  EXPECT_EQ(m.local.bytes(), 0);
  for (const int64_t p : {2, 0, 1}) m.make(p);
  m.release_all();
  EXPECT_EQ(m.local.bytes(), 0);
}

TEST(LocalGradientsTest, OnlyWhatWasKeptIsHeld) {
  ThreeSums m;
  m.make(2);
  m.keep(0);
  m.make(1);
  m.release_all();
  EXPECT_EQ(m.local.bytes(), 64 << 10);
  m.local.free_recycled();
  EXPECT_EQ(m.local.bytes(), 0);
}

// malloc maps a larger one anew each time, so that holding it would gain nothing.
TEST(LocalGradientsTest, OnlyWhatMallocTakesFromItsHeapIsHeld) {
  for (const int64_t numel : {int64_t{8}, int64_t{(32 << 18) + 1}}) {
    ThreeSums m(numel);
    for (const int64_t p : {2, 0, 1}) m.keep(p);
    m.release_all();
    EXPECT_EQ(m.local.bytes(), 0) << numel;
  }
}

}  // namespace
}  // namespace zero
