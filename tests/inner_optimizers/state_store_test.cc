// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// State tensors in each format of ZeroOptions::moments: memory, bytes, and the cuts of a
// checkpoint. The codes themselves are tested with the kernels.
#include "zero/inner_optimizers/state_store.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/reshard.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"

namespace zero {
namespace {

constexpr Moments kAll[] = {Moments::kFloat32, Moments::kBFloat16, Moments::kInt8};
constexpr StateRole kRoles[] = {StateRole::kAverage, StateRole::kSecondMoment};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Elements of very different sizes, and a run of zeros.
at::Tensor elements(int64_t numel, StateRole role) {
  at::Tensor result = random_tensor({numel}, 5) *
                      at::pow(10.0, at::remainder(at::arange(numel, at::kFloat), 9) - 4);
  if (numel > 70) result.narrow(0, 32, 32).zero_();
  result = result.to(at::kFloat);
  return role == StateRole::kSecondMoment ? result.square() : result;
}

TEST(StateStoreTest, BytesAreThoseOfTheFormatAndOfTheAllocation) {
  for (int64_t numel : {0, 1, 255, 256, 257, 1000}) {
    EXPECT_EQ(moment_bytes(Moments::kFloat32, numel), 4 * numel);
    EXPECT_EQ(moment_bytes(Moments::kBFloat16, numel), 2 * numel);
    EXPECT_EQ(moment_bytes(Moments::kInt8, numel), numel + 4 * ((numel + 255) / 256));
    for (const Moments moments : kAll) {
      const at::Tensor segment = at::ones({numel}), made = zero_state(segment, moments);
      EXPECT_EQ(static_cast<int64_t>(made.nbytes()), moment_bytes(moments, numel));
      EXPECT_EQ(static_cast<int64_t>(empty_state(segment, moments).nbytes()),
                moment_bytes(moments, numel));
      for (const StateRole role : kRoles) {
        EXPECT_TRUE(at::equal(state_elements(made, role, segment), at::zeros({numel})));
      }
    }
  }
}

TEST(StateStoreTest, SmallParametersKeepFp32) {
  for (const Moments moments : kAll) {
    EXPECT_EQ(moments_of_parameter(moments, 4095), Moments::kFloat32);
    EXPECT_EQ(moments_of_parameter(moments, 4096), moments);
  }
}

TEST(StateStoreTest, MemoryOfARankIsThatOfItsSegments) {
  for (const Moments moments : kAll) {
    ParameterInfo info{10000, c10::ScalarType::BFloat16, 0};
    info.block = kMomentBlock;
    const Plan plan = make_plan({info}, {3}, {});
    for (int64_t rank = 0; rank < 3; ++rank) {
      int64_t expected = 0;
      for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
        for (const Segment& s : plan.segments(b, rank)) {
          expected += static_cast<int64_t>(zero_state(at::empty({s.numel}), moments).nbytes());
        }
      }
      MemoryOptions options;
      options.state_bytes = [&](int64_t numel, int64_t) { return moment_bytes(moments, numel); };
      EXPECT_GT(expected, 0);
      EXPECT_EQ(expected_memory(plan, rank, options).optimizer_state, expected);
    }
  }
}

TEST(StateStoreTest, AWholeTensorComesBackInEveryBit) {
  for (int64_t numel : {1, 256, 370, 1000, 5000}) {
    for (const Moments moments : kAll) {
      for (const StateRole role : kRoles) {
        const at::Tensor segment = at::empty({numel});
        const at::Tensor stored = stored_state(elements(numel, role), role, moments, segment);
        const at::Tensor exchanged = state_elements(stored, role, segment);
        EXPECT_EQ(exchanged.scalar_type(), at::kFloat);
        EXPECT_EQ(exchanged.sizes(), segment.sizes());
        EXPECT_TRUE(same_bits(stored_state(exchanged.clone(), role, moments, segment), stored))
            << numel << " " << static_cast<int>(moments) << " " << static_cast<int>(role);
      }
    }
  }
}

// Of a layout of whole parameters: a matrix in an order of its own.
TEST(StateStoreTest, KeepsTheShapeAndTheOrderOfASegment) {
  const at::Tensor segment = at::empty({40, 30}).t();
  const at::Tensor values = elements(1200, StateRole::kAverage).view({40, 30}).t();
  for (const Moments moments : kAll) {
    const at::Tensor stored =
        stored_state(values.detach().clone(), StateRole::kAverage, moments, segment);
    const at::Tensor back = state_elements(stored, StateRole::kAverage, segment);
    EXPECT_EQ(back.sizes(), segment.sizes());
    EXPECT_EQ(back.strides(), segment.strides());
    const at::Tensor flat =
        stored_state(values.t().reshape({-1}), StateRole::kAverage, moments, at::empty({1200}));
    EXPECT_TRUE(at::equal(back.t().reshape({-1}),
                          state_elements(flat, StateRole::kAverage, at::empty({1200}))));
  }
}

// Segments of one number of ranks become those of another, at multiples of blocks.
TEST(StateStoreTest, CutsAtBlocksKeepEveryBit) {
  const int64_t numel = 1700;
  const std::vector<ParameterRange> saved = {{0, 0, 256}, {0, 256, 1024}, {0, 1280, 420}};
  const std::vector<ParameterRange> wanted = {{0, 0, 768}, {0, 768, 932}};
  for (const StateRole role : kRoles) {
    const at::Tensor whole = elements(numel, role);
    for (const Moments moments : kAll) {
      const at::Tensor all = at::empty({numel});
      const at::Tensor uncut =
          state_elements(stored_state(whole.clone(), role, moments, all), role, all);
      std::vector<at::Tensor> pieces, joined;
      for (const ParameterRange& r : saved) {
        const at::Tensor segment = at::empty({r.numel});
        const at::Tensor stored =
            stored_state(whole.narrow(0, r.begin, r.numel).clone(), role, moments, segment);
        pieces.push_back(state_elements(stored, role, segment));
      }
      EXPECT_TRUE(same_bits(at::cat(pieces), uncut));
      for (const ParameterRange& r : wanted) joined.push_back(at::empty({r.numel}));
      for (const RangeOverlap& c : reshard(saved, wanted)) {
        joined[c.wanted]
            .narrow(0, c.wanted_begin, c.numel)
            .copy_(pieces[c.stored].narrow(0, c.stored_begin, c.numel));
      }
      std::vector<at::Tensor> loaded;
      for (const at::Tensor& piece : joined) {
        const at::Tensor stored = stored_state(piece.clone(), role, moments, piece);
        EXPECT_EQ(static_cast<int64_t>(stored.nbytes()), moment_bytes(moments, piece.numel()));
        loaded.push_back(state_elements(stored, role, piece));
      }
      EXPECT_TRUE(same_bits(at::cat(loaded), uncut));
    }
  }
}

TEST(StateStoreTest, OnlyElementsInFp32BecomeState) {
  for (const Moments moments : kAll) {
    EXPECT_NE(error_of([&] {
                stored_state(at::ones({3}, at::kDouble), StateRole::kAverage, moments,
                             at::empty({3}));
              }),
              "");
  }
  EXPECT_NE(error_of([&] {
              state_elements(at::zeros({5}, at::kByte), StateRole::kAverage, at::empty({20}));
            }),
            "");
  EXPECT_NE(error_of([&] { state_type(at::zeros({5}, at::kLong)); }), "");
}

}  // namespace
}  // namespace zero
