// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What every WireFormat promises: the same suite for all of them. A new format is one more line in
// kWires.
#include "zero/gradients/wire_format.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/random_tensors.h"
#include "zero/gradients/block_int8_wire.h"
#include "zero/gradients/elementwise_wire.h"
#include "zero/memory/buffer_pool.h"

namespace zero {
namespace {

struct Wire {
  std::string name;
  std::shared_ptr<const WireFormat> format;
  // The error of a decoded value against the packed one, by the largest value of its row.
  double error;
};

void PrintTo(const Wire& wire, std::ostream* out) { *out << wire.name; }

const std::vector<Wire> kWires = {
    {"Fp32", std::make_shared<ElementwiseWire>(at::kFloat), 0},
    {"Bf16", std::make_shared<ElementwiseWire>(at::kBFloat16), 0},
    {"Fp16", std::make_shared<ElementwiseWire>(at::kHalf), 0},
    {"BlockInt8OfFp32", std::make_shared<BlockInt8Wire>(at::kFloat), 1.0 / 254 + 0x1p-22},
    {"BlockInt8OfBf16", std::make_shared<BlockInt8Wire>(at::kBFloat16), 1.0 / 254 + 0x1p-22},
    {"BlockInt8OfFp16", std::make_shared<BlockInt8Wire>(at::kHalf), 1.0 / 254 + 0x1p-22},
};

constexpr int64_t kRows[] = {1, 16, 255, 256, 257, 1000, 20000};

class WireFormatAt : public ::testing::TestWithParam<Wire> {
 protected:
  const WireFormat& wire() const { return *GetParam().format; }

  // [world_size, n] in the format's dtype of packing, with zeros here and there.
  at::Tensor gradients(int64_t world_size, int64_t n, uint64_t seed) const {
    at::Tensor values = random_tensor({world_size, n}, seed);
    values.view({-1}).slice(0, 0, std::numeric_limits<int64_t>::max(), 7).zero_();
    return values.to(wire().packed_dtype());
  }
  at::Tensor encode(const at::Tensor& values) {
    const Rows packed = wire().open({values.size(0), values.size(1)}, pool);
    packed.values().copy_(values);
    return wire().encode(packed, pool).values();
  }
  // The shard of rank `me` where `sent[r]` is what rank r has encoded.
  at::Tensor received_sum(const std::vector<at::Tensor>& sent, int64_t me, at::Tensor shard,
                          float scale = 1.0F, bool accumulate = false) {
    std::vector<at::Tensor> received;
    for (const at::Tensor& rows : sent) received.push_back(rows.select(0, me));
    const at::Tensor own = received[me].clone();
    // Is not read there.
    received[me] = at::empty_like(own).view(at::kByte).fill_(0xff).view(own.scalar_type());
    const at::Tensor all = at::stack(received);
    SummandRows rows;
    rows.dtype = own.scalar_type();
    rows.received = all.const_data_ptr();
    rows.own_row = own.const_data_ptr();
    rows.count = static_cast<int64_t>(sent.size());
    rows.own = me;
    wire().decode_and_sum(rows, shard, scale, accumulate);
    return shard;
  }
  at::Tensor sum_in_place(const std::vector<at::Tensor>& sent, int64_t me, at::Tensor shard,
                          float scale = 1.0F, bool accumulate = false) {
    std::vector<const void*> addresses;
    for (const at::Tensor& rows : sent) {
      addresses.push_back(rows.select(0, me).const_data_ptr());
    }
    SummandRows rows;
    rows.dtype = sent.front().scalar_type();
    rows.addresses = addresses.data();
    rows.count = static_cast<int64_t>(sent.size());
    wire().decode_and_sum(rows, shard, scale, accumulate);
    return shard;
  }
  at::Tensor decoded(const at::Tensor& encoded, int64_t n) {
    return sum_in_place({encoded}, 0, at::empty({n}));
  }

  BufferPool pool{at::kCPU, int64_t{1} << 30};
};

INSTANTIATE_TEST_SUITE_P(All, WireFormatAt, ::testing::ValuesIn(kWires),
                         [](const auto& info) { return info.param.name; });

TEST_P(WireFormatAt, RowsHaveTheBytesThatWerePromisedAndBuffersGoBack) {
  for (int64_t n : kRows) {
    for (int64_t world_size : {1, 3}) {
      const Rows opened = wire().open({world_size, n}, pool);
      const at::Tensor& packed = opened.values();
      EXPECT_EQ(packed.sizes(), at::IntArrayRef({world_size, n}));
      EXPECT_EQ(packed.scalar_type(), wire().packed_dtype());
      const void* const memory = packed.const_data_ptr();
      packed.zero_();
      const at::Tensor rows = wire().encode(opened, pool).values();
      EXPECT_TRUE(rows.is_contiguous());
      EXPECT_EQ(rows.size(0), world_size);
      EXPECT_EQ(static_cast<int64_t>(rows.nbytes()), world_size * wire().bytes(n));
      EXPECT_EQ(rows.const_data_ptr() == memory, wire().packs_in_place());
      pool.release(rows);
    }
  }
  // Nothing was lost: the same again needs no more memory.
  const int64_t held = pool.held_bytes();
  pool.release(encode(gradients(3, kRows[6], 1)));
  EXPECT_EQ(pool.held_bytes(), held);
}

// Each row is what it is in a bucket of its own.
TEST_P(WireFormatAt, RowsOfDifferentLengths) {
  const std::vector<int64_t> numels = {700, 0, 16, 0, 1024};
  std::vector<int64_t> ends;
  for (const int64_t numel : numels) ends.push_back((ends.empty() ? 0 : ends.back()) + numel);
  const Rows packed = wire().open(BucketRows(ends), pool);
  EXPECT_EQ(packed.values().numel(), ends.back());
  std::vector<at::Tensor> alone;
  for (size_t r = 0; r < numels.size(); ++r) {
    const at::Tensor values = gradients(1, numels[r], r);
    packed.row(static_cast<int64_t>(r)).copy_(values.select(0, 0));
    alone.push_back(numels[r] == 0 ? at::Tensor() : encode(values).select(0, 0).clone());
  }
  const Rows encoded = wire().encode(packed, pool);
  for (size_t r = 0; r < numels.size(); ++r) {
    const at::Tensor row = encoded.row(static_cast<int64_t>(r));
    EXPECT_EQ(static_cast<int64_t>(row.nbytes()), wire().bytes(numels[r]));
    if (numels[r] == 0) continue;
    EXPECT_TRUE(row.equal(alone[r])) << r;
  }
}

TEST_P(WireFormatAt, SumsAreThoseOfThePackedGradientsInRankOrder) {
  for (int64_t n : kRows) {
    for (int64_t world_size : {1, 2, 3, 4}) {
      std::vector<at::Tensor> packed, sent;
      for (int64_t r = 0; r < world_size; ++r) {
        packed.push_back(gradients(world_size, n, 10 * r + 1));
        sent.push_back(encode(packed.back()));
      }
      const float scale = 1.0F / static_cast<float>(world_size);
      for (int64_t me = 0; me < world_size; ++me) {
        for (const bool accumulate : {false, true}) {
          const at::Tensor before = random_tensor({n}, 99);
          const at::Tensor got = sum_in_place(sent, me, before.clone(), scale, accumulate);
          EXPECT_TRUE(at::equal(got, received_sum(sent, me, before.clone(), scale, accumulate)));
          // One rank after the other, each decoded alone.
          at::Tensor of_decoded = at::zeros({n}), exact = at::zeros({n}, at::kDouble);
          double largest = 0;
          for (int64_t r = 0; r < world_size; ++r) {
            const at::Tensor row = packed[r].select(0, me).to(at::kFloat);
            const at::Tensor alone = decoded(sent[r].narrow(0, me, 1), n);
            EXPECT_LE((alone - row).abs().max().item<double>(),
                      GetParam().error * row.abs().max().item<double>());
            EXPECT_EQ((alone * (row == 0)).abs().max().item<double>(), 0);
            largest += row.abs().max().item<double>();
            r == 0 ? of_decoded.copy_(alone) : of_decoded.add_(alone);
            exact.add_(row.to(at::kDouble));
          }
          of_decoded.mul_(scale);
          const at::Tensor expected = accumulate ? before + of_decoded : of_decoded;
          EXPECT_TRUE(at::equal(got, expected)) << "n " << n << " rank " << me;
          const at::Tensor mean = accumulate ? exact * scale + before : exact * scale;
          EXPECT_LE((got - mean).abs().max().item<double>(),
                    GetParam().error * largest * scale + 1e-6);
        }
      }
    }
  }
}

TEST_P(WireFormatAt, RowsAreEncodedByThemselvesWithTheSameBitsEveryTime) {
  for (int64_t n : kRows) {
    const at::Tensor values = gradients(3, n, 5);
    const at::Tensor all = encode(values).view(at::kByte);
    EXPECT_TRUE(at::equal(all, encode(values).view(at::kByte)));
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(all[r], encode(values.narrow(0, r, 1)).view(at::kByte)[0]));
    }
  }
}

TEST_P(WireFormatAt, SumsAreEncodedAsTheGradientsWithTheirValues) {
  for (int64_t n : kRows) {
    const at::Tensor values = gradients(3, n, 7);
    const at::Tensor expected = encode(values);
    const at::Tensor rows = at::empty_like(expected);
    rows.view(at::kByte).fill_(0x5a);
    wire().encode_sums(values.to(at::kFloat), rows);
    EXPECT_TRUE(at::equal(rows.view(at::kByte), expected.view(at::kByte))) << n;
  }
}

TEST(ElementwiseWireTest, SumsAreEncodedIn16BitsOnRequest) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    EXPECT_FALSE(ElementwiseWire(dtype).encodes_sums());
    EXPECT_FALSE(ElementwiseWire(dtype, /*fp32_sums=*/true).encodes_sums());
    EXPECT_TRUE(ElementwiseWire(dtype, /*fp32_sums=*/false).encodes_sums());
  }
  EXPECT_FALSE(ElementwiseWire(at::kFloat, /*fp32_sums=*/true).encodes_sums());
  EXPECT_FALSE(ElementwiseWire(at::kFloat, /*fp32_sums=*/false).encodes_sums());
}

// Memory of the pool has held anything.
TEST_P(WireFormatAt, PaddingHasNoEffectOnGradients) {
  for (int64_t n : {17, 300, 1000}) {
    const at::Tensor values = gradients(2, n, 6);
    const auto with_garbage = [&](int byte) {
      for (const bool packed : {true, false}) {
        const at::Tensor garbage = packed ? pool.acquire(2 * n, wire().packed_dtype())
                                          : pool.acquire(2 * wire().bytes(n), at::kByte);
        garbage.view(at::kByte).fill_(byte);
        pool.release(garbage);
      }
      // Columns 3 to n - 2 are a parameter.
      const Rows packed = wire().open({2, n}, pool);
      packed.values().narrow(1, 3, n - 5).copy_(values.narrow(1, 3, n - 5));
      const at::Tensor rows = wire().encode(packed, pool).values();
      const at::Tensor result = decoded(rows.narrow(0, 1, 1), n).narrow(0, 3, n - 5).clone();
      pool.release(rows);
      return result;
    };
    const at::Tensor clean = with_garbage(0);
    EXPECT_TRUE(clean.abs().max().item<double>() > 0.5);
    for (int byte : {0x7f, 0xff, 0x12}) EXPECT_TRUE(at::equal(clean, with_garbage(byte)));
  }
}

TEST_P(WireFormatAt, WhatIsNotFiniteIsSeen) {
  for (double bad :
       {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
        std::numeric_limits<double>::quiet_NaN()}) {
    for (int64_t place : {0, 255, 256, 999}) {
      for (int64_t bad_rank : {0, 1}) {
        std::vector<at::Tensor> sent;
        for (int64_t r = 0; r < 2; ++r) {
          at::Tensor values = gradients(2, 1000, r);
          if (r == bad_rank) values[1][place] = bad;
          sent.push_back(encode(values));
        }
        EXPECT_TRUE(at::isfinite(sum_in_place(sent, 0, at::empty({1000}))).all().item<bool>());
        EXPECT_FALSE(at::isfinite(sum_in_place(sent, 1, at::empty({1000})))[place].item<bool>());
      }
    }
  }
}

TEST_P(WireFormatAt, ZerosAddZero) {
  const at::Tensor before = random_tensor({1000}, 3);
  const at::Tensor zeros = at::zeros({2, 1000}, wire().packed_dtype());
  EXPECT_TRUE(at::equal(sum_in_place({encode(zeros), encode(zeros)}, 1, before.clone(), 0.5F, true),
                        before));
}

}  // namespace
}  // namespace zero
