// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// State tensors of other element types than the fp32 of today's classes: memory, bytes, pointers
// and the cuts of a checkpoint.
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

constexpr StateFormat kFloat32{};
constexpr StateFormat kBf16{c10::ScalarType::BFloat16, 1};
constexpr StateFormat kBlocks{c10::ScalarType::Char, 16};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Elements of very different sizes, and a run of zeros.
at::Tensor elements(int64_t numel) {
  at::Tensor result = random_tensor({numel}, 5) *
                      at::pow(10.0, at::remainder(at::arange(numel, at::kFloat), 9) - 4);
  if (numel > 70) result.narrow(0, 32, 32).zero_();
  return result.to(at::kFloat);
}

TEST(StateStoreTest, BytesAreThoseOfTheFormatAndOfTheAllocation) {
  for (int64_t numel : {0, 1, 15, 16, 17, 100}) {
    EXPECT_EQ(kFloat32.bytes(numel), 4 * numel);
    EXPECT_EQ(kBf16.bytes(numel), 2 * numel);
    EXPECT_EQ(kBlocks.bytes(numel), numel + 4 * ((numel + 15) / 16));
    for (const StateFormat& format : {kFloat32, kBf16, kBlocks}) {
      const at::Tensor segment = at::ones({numel}), made = format.zeros(segment);
      EXPECT_EQ(static_cast<int64_t>(made.nbytes()), format.bytes(numel));
      EXPECT_EQ(static_cast<int64_t>(format.empty(segment).nbytes()), format.bytes(numel));
      EXPECT_EQ(made.dim(), 1);
      EXPECT_TRUE(at::equal(format.to_elements(made, numel).to(at::kFloat), at::zeros({numel})));
    }
  }
}

TEST(StateStoreTest, MemoryOfARankIsThatOfItsSegments) {
  // 1000 elements on 3 ranks, in segments of their own blocks.
  const Plan plan = make_plan({{1000, c10::ScalarType::BFloat16, 0}}, {3}, {});
  for (const StateFormat& format : {kFloat32, kBf16, kBlocks}) {
    for (int64_t rank = 0; rank < 3; ++rank) {
      int64_t expected = 0;
      for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
        for (const Segment& s : plan.segments(b, rank)) {
          expected += static_cast<int64_t>(format.zeros(at::empty({s.numel})).nbytes());
        }
      }
      MemoryOptions options;
      options.state_bytes = [&](int64_t numel) { return format.bytes(numel); };
      EXPECT_GT(expected, 0);
      EXPECT_EQ(expected_memory(plan, rank, options).optimizer_state, expected);
    }
  }
}

TEST(StateStoreTest, KernelsGetTheElementsAndTheScales) {
  const at::Tensor whole = elements(40);
  const at::Tensor fp32 = kFloat32.from_elements(whole);
  EXPECT_EQ(kFloat32.values<float>(fp32, 40), fp32.const_data_ptr());
  EXPECT_EQ(kFloat32.scales(fp32), nullptr);
  const at::Tensor bf16 = kBf16.from_elements(whole);
  EXPECT_EQ(kBf16.values<c10::BFloat16>(bf16, 40), bf16.const_data_ptr());
  EXPECT_THROW(kBf16.values<float>(bf16, 40), c10::Error);
  const at::Tensor blocks = kBlocks.from_elements(whole);
  const int8_t* q = kBlocks.values<int8_t>(blocks, 40);
  const float* largest = kBlocks.scales(blocks);
  EXPECT_EQ(reinterpret_cast<const char*>(q), reinterpret_cast<const char*>(largest) + 4 * 3);
  for (int64_t i = 0; i < 40; ++i) {
    const float x = whole.const_data_ptr<float>()[i], scale = largest[i / 16];
    EXPECT_LE(std::abs(x), scale);
    EXPECT_NEAR(static_cast<float>(q[i]) / 127 * scale, x, scale / 253) << i;
  }
  EXPECT_THROW(kBlocks.values<float>(blocks, 40), c10::Error);
}

TEST(StateStoreTest, AWholeTensorComesBackInEveryBit) {
  for (int64_t numel : {1, 16, 37, 100, 1000}) {
    for (const StateFormat& format : {kFloat32, kBf16, kBlocks}) {
      const at::Tensor stored = format.from_elements(elements(numel));
      const at::Tensor exchanged = format.to_elements(stored, numel);
      EXPECT_EQ(exchanged.scalar_type(), format.exchange_type());
      EXPECT_EQ(exchanged.numel(), numel);
      EXPECT_TRUE(same_bits(format.from_elements(exchanged.clone()), stored));
    }
  }
}

// Segments of one number of ranks become those of another, at boundaries that are none of blocks.
TEST(StateStoreTest, CutsAtSegmentBoundariesKeepElements) {
  const int64_t numel = 100;
  const std::vector<ParameterRange> saved = {{0, 0, 37}, {0, 37, 30}, {0, 67, 33}};
  const std::vector<ParameterRange> wanted = {{0, 0, 50}, {0, 50, 50}};
  const at::Tensor whole = elements(numel);
  for (const StateFormat& format : {kFloat32, kBf16, kBlocks}) {
    std::vector<at::Tensor> pieces, joined;
    for (const ParameterRange& r : saved) {
      const at::Tensor stored = format.from_elements(whole.narrow(0, r.begin, r.numel).clone());
      pieces.push_back(format.to_elements(stored, r.numel));
    }
    const at::Tensor before = at::cat(pieces).to(at::kFloat);
    for (const ParameterRange& r : wanted) {
      joined.push_back(at::empty({r.numel}, pieces[0].options()));
    }
    for (const RangeOverlap& c : reshard(saved, wanted)) {
      joined[c.wanted]
          .narrow(0, c.wanted_begin, c.numel)
          .copy_(pieces[c.stored].narrow(0, c.stored_begin, c.numel));
    }
    std::vector<at::Tensor> loaded;
    for (const at::Tensor& piece : joined) {
      const at::Tensor stored = format.from_elements(piece);
      EXPECT_EQ(static_cast<int64_t>(stored.nbytes()), format.bytes(piece.numel()));
      loaded.push_back(format.to_elements(stored, piece.numel()).to(at::kFloat));
    }
    const at::Tensor after = at::cat(loaded);
    if (format.block == 1) {
      EXPECT_TRUE(same_bits(before, after));
      continue;
    }
    // Half a step of the largest value nearby, for each of the two roundings.
    for (int64_t i = 0; i < numel; ++i) {
      const int64_t begin = std::max<int64_t>(0, i - 15), end = std::min(numel, i + 16);
      const float largest = whole.narrow(0, begin, end - begin).abs().max().item<float>();
      const float x = whole[i].item<float>();
      EXPECT_NEAR(before[i].item<float>(), x, largest / 253) << i;
      EXPECT_NEAR(after[i].item<float>(), x, 2 * largest / 253) << i;
    }
  }
}

TEST(StateStoreTest, OnlyItsOwnTypeAndFp32BecomeState) {
  EXPECT_TRUE(kFloat32.accepts(at::kFloat));
  EXPECT_FALSE(kFloat32.accepts(at::kBFloat16));
  EXPECT_TRUE(kBf16.accepts(at::kBFloat16));
  EXPECT_TRUE(kBf16.accepts(at::kFloat));
  EXPECT_FALSE(kBlocks.accepts(at::kChar));
  for (const StateFormat& format : {kFloat32, kBf16, kBlocks}) {
    EXPECT_NE(error_of([&] { format.from_elements(at::ones({3}, at::kDouble)); }), "");
  }
  EXPECT_NE(error_of([&] { kBlocks.to_elements(at::zeros({5}, at::kByte), 20); }), "");
}

}  // namespace
}  // namespace zero
