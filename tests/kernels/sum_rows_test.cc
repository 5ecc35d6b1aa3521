// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// sum_rows against a serial sum over ranks: equal bits in every setting.
#include "kernels/sum_rows.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

// Rows of `world` ranks with NaN in the own row of `received`, which must not be read.
struct Rows {
  Rows(ScalarType dtype, int64_t world, int64_t own_rank, int64_t numel, int64_t offset)
      : received(world * numel * size_of(dtype), offset * size_of(dtype)),
        own(numel * size_of(dtype), offset * size_of(dtype)) {
    std::vector<float> values(static_cast<size_t>(world * numel));
    fill_ordinary(values.data(), world * numel, 5, 300.0F);
    reference::cast_copy(values.data() + own_rank * numel, ScalarType::Float, own.as<void>(), dtype,
                         numel, nullptr);
    for (int64_t i = 0; i < numel; ++i) {
      values[own_rank * numel + i] = NAN;
    }
    reference::cast_copy(values.data(), ScalarType::Float, received.as<void>(), dtype,
                         world * numel, nullptr);
  }
  Buffer received;
  Buffer own;
};

TEST(SumRows, EveryWorldRankTypeAndSettingMatchesTheSerialSum) {
  for (ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}) {
    for (int64_t world : {1, 2, 3, 5, 8}) {
      for (int64_t own_rank = 0; own_rank<world; own_rank += world> 3 ? world - 1 : 1) {
        for (int64_t numel : kSizes) {
          if (numel > 17000 && world > 3) {
            continue;
          }
          Rows rows(dtype, world, own_rank, numel, 1);
          SumRowsArgs args;
          args.received = rows.received.as<void>();
          args.own = rows.own.as<void>();
          args.world_size = world;
          args.own_rank = own_rank;
          args.numel = numel;
          args.dtype = dtype;
          args.scale = 1.0F / static_cast<float>(world);
          std::vector<const void*> addresses;
          for (int64_t r = 0; r < world; ++r) {
            const auto* row = rows.received.as<char>() + r * numel * size_of(dtype);
            addresses.push_back(r == own_rank ? rows.own.as<char>() : row);
          }
          for (bool accumulate : {false, true}) {
            args.accumulate = accumulate;
            Buffer start(4 * numel, 4);
            fill_ordinary(start.as<float>(), numel, 6);
            Buffer expected = start;
            args.shard = expected.as<float>();
            reference::sum_rows(args);
            SumRowsArgs in_place = args;
            in_place.rows = addresses.data();
            in_place.received = in_place.own = nullptr;
            for_each_setting([&] {
              for (const SumRowsArgs& way : {args, in_place}) {
                Buffer got = start;
                SumRowsArgs now = way;
                now.shard = got.as<float>();
                sum_rows(now, Stream{});
                ASSERT_TRUE(got.same_bytes(expected))
                    << c10::toString(dtype) << " world " << world << " numel " << numel;
                ASSERT_TRUE(got.guards_intact());
              }
            });
          }
        }
      }
    }
  }
}

TEST(SumRows, TheOrderIsThatOfTheRanksWhereverTheOwnRowStands) {
  // ((1e8 + 1) - 1e8) is 0 in fp32; any other order gives 1.
  const float received[3] = {1e8F, 1.0F, -1e8F};
  for (int64_t own_rank : {0, 1, 2}) {
    const float own = received[own_rank];
    float shard = -1.0F;
    SumRowsArgs args;
    args.received = received;
    args.own = &own;
    args.world_size = 3;
    args.own_rank = own_rank;
    args.numel = 1;
    args.shard = &shard;
    sum_rows(args, Stream{});
    EXPECT_EQ(shard, 0.0F);
  }
}

TEST(SumRows, HalfRowsWhoseSumExceedsHalfStayFinite) {
  constexpr int64_t kNumel = 37;
  constexpr int64_t kWorld = 300;
  std::vector<c10::Half> rows(kNumel * kWorld, c10::Half(300.0F));
  std::vector<float> shard(kNumel);
  SumRowsArgs args;
  args.received = rows.data();
  args.own = rows.data();
  args.world_size = kWorld;
  args.numel = kNumel;
  args.dtype = ScalarType::Half;
  args.scale = 1.0F;
  args.shard = shard.data();
  for_each_setting([&] {
    sum_rows(args, Stream{});
    for (float value : shard) {
      ASSERT_EQ(value, 90000.0F);  // the largest fp16 number is 65504
    }
  });
}

TEST(SumRows, OneRankMaySumInPlace) {
  std::vector<float> shard(1000);
  fill_ordinary(shard.data(), 1000, 8);
  const std::vector<float> before = shard;
  SumRowsArgs args;
  args.own = shard.data();
  args.numel = 1000;
  args.scale = 0.25F;
  args.shard = shard.data();
  sum_rows(args, Stream{});
  for (size_t i = 0; i < shard.size(); ++i) {
    EXPECT_EQ(shard[i], 0.25F * before[i]);
  }
}

TEST(SumRows, RefusesARankOutsideTheWorldAndOtherTypes) {
  float x = 0.0F;
  SumRowsArgs args;
  args.received = &x;
  args.own = &x;
  args.shard = &x;
  args.numel = 1;
  args.own_rank = 1;
  EXPECT_THROW(sum_rows(args, Stream{}), c10::Error);
  args.own_rank = 0;
  args.dtype = ScalarType::Int;
  EXPECT_THROW(sum_rows(args, Stream{}), c10::Error);
}

}  // namespace
}  // namespace zero::kernels
