// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Changes of rows: every bit comes back, whatever numbers there are; how few bytes they take; and
// bytes that are no changes.
#include "kernels/row_changes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr ScalarType kDtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

struct Row {
  ScalarType dtype;
  std::vector<uint8_t> bytes;
  int64_t numel() const { return static_cast<int64_t>(bytes.size() / c10::elementSize(dtype)); }
};

Row row_of(ScalarType dtype, const std::vector<float>& values) {
  Row row{dtype, std::vector<uint8_t>(values.size() * c10::elementSize(dtype))};
  for (size_t i = 0; i < values.size(); ++i) {
    uint8_t* place = row.bytes.data() + i * c10::elementSize(dtype);
    const c10::BFloat16 bfloat16(values[i]);
    const c10::Half half(values[i]);
    if (dtype == ScalarType::Float) std::memcpy(place, &values[i], 4);
    if (dtype == ScalarType::BFloat16) std::memcpy(place, &bfloat16, 2);
    if (dtype == ScalarType::Half) std::memcpy(place, &half, 2);
  }
  return row;
}

// Memory of its own for each, so that AddressSanitizer sees what is beyond.
std::unique_ptr<uint8_t[]> exactly(const uint8_t* bytes, size_t size) {
  std::unique_ptr<uint8_t[]> result(new uint8_t[size]);
  if (size > 0) std::memcpy(result.get(), bytes, size);
  return result;
}

std::vector<uint8_t> changes_of(const Row& before, const Row& after) {
  std::vector<uint8_t> room(static_cast<size_t>(max_changes_bytes(before.dtype, before.numel())));
  const int64_t bytes = encode_changes(before.bytes.data(), after.bytes.data(), before.dtype,
                                       before.numel(), room.data());
  EXPECT_LE(bytes, static_cast<int64_t>(room.size()));
  room.resize(static_cast<size_t>(bytes));
  return room;
}

bool takes(const std::vector<uint8_t>& changes, Row& row) {
  const auto exact = exactly(changes.data(), changes.size());
  const auto numbers = exactly(row.bytes.data(), row.bytes.size());
  const bool applied = apply_changes(exact.get(), static_cast<int64_t>(changes.size()), row.dtype,
                                     row.numel(), numbers.get());
  if (!row.bytes.empty()) std::memcpy(row.bytes.data(), numbers.get(), row.bytes.size());
  return applied;
}

void expect_round_trip(const Row& before, const Row& after) {
  Row row = before;
  ASSERT_TRUE(takes(changes_of(before, after), row));
  EXPECT_EQ(row.bytes, after.bytes) << before.dtype << " " << before.numel();
}

Row random_bits(ScalarType dtype, int64_t numel, std::mt19937& generator) {
  Row row{dtype, std::vector<uint8_t>(static_cast<size_t>(numel) * c10::elementSize(dtype))};
  for (uint8_t& byte : row.bytes) byte = static_cast<uint8_t>(generator());
  return row;
}

// Parameters, and the same after a step of this size.
std::pair<Row, Row> step_of(ScalarType dtype, int64_t numel, float size, std::mt19937& generator) {
  std::normal_distribution<float> normal(0.0F, 0.02F), direction(0.0F, 1.0F);
  std::vector<float> before, after;
  for (int64_t i = 0; i < numel; ++i) {
    before.push_back(normal(generator));
    after.push_back(before.back() - size * std::tanh(direction(generator)));
  }
  return {row_of(dtype, before), row_of(dtype, after)};
}

TEST(RowChanges, EveryBitComesBackForRowsOfEveryLength) {
  std::mt19937 generator(1);
  for (const ScalarType dtype : kDtypes) {
    for (int64_t numel : {0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1000, 5003}) {
      const auto [before, after] = step_of(dtype, numel, 1e-3F, generator);
      expect_round_trip(before, after);
      expect_round_trip(before, before);
      expect_round_trip(random_bits(dtype, numel, generator), random_bits(dtype, numel, generator));
    }
  }
}

TEST(RowChanges, EveryPairOfExtremeNumbersComesBack) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> numbers = {
      0.0F,    -0.0F,  1.0F,  -1.0F,  inf,     -inf,  std::nanf("1"), -std::nanf("2"), 1e-45F,
      -1e-45F, 1e-38F, 6e-8F, -6e-8F, 65504.F, 3e38F, -3e38F,         1.0000001F,      0.02F};
  std::vector<float> before, after;
  for (const float x : numbers) {
    for (const float y : numbers) {
      before.push_back(x);
      after.push_back(y);
    }
  }
  for (const ScalarType dtype : kDtypes) {
    const Row from = row_of(dtype, before), to = row_of(dtype, after);
    expect_round_trip(from, to);
    // One by one, so that each has the width that it needs itself.
    for (size_t i = 0; i < before.size(); ++i) {
      expect_round_trip(row_of(dtype, {before[i]}), row_of(dtype, {after[i]}));
    }
  }
}

TEST(RowChanges, EveryChangeOfABFloat16ComesBack) {
  Row before{ScalarType::BFloat16, std::vector<uint8_t>(2 * 65536)};
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(before.bytes.data() + 2 * i, &bits, 2);
  }
  for (const uint32_t change : {1U, 2U, 127U, 128U, 255U, 32767U, 32768U, 65535U}) {
    Row after = before;
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i + change);
      std::memcpy(after.bytes.data() + 2 * i, &bits, 2);
    }
    expect_round_trip(before, after);
  }
}

// The figures of ZeroOptions::gather_wire.
TEST(RowChanges, AStepTakesFewerBytesThanTheRow) {
  struct Case {
    ScalarType dtype;
    float step;
    double most;
  };
  std::mt19937 generator(2);
  for (const Case& c :
       {Case{ScalarType::Float, 1e-3F, 0.75}, Case{ScalarType::Float, 1e-4F, 0.6},
        Case{ScalarType::BFloat16, 1e-3F, 0.45}, Case{ScalarType::BFloat16, 1e-4F, 0.27}}) {
    const auto [before, after] = step_of(c.dtype, 100000, c.step, generator);
    const auto bytes = static_cast<double>(changes_of(before, after).size());
    EXPECT_LT(bytes, c.most * static_cast<double>(before.bytes.size())) << c.dtype << c.step;
    EXPECT_GT(bytes, (c.most - 0.1) * static_cast<double>(before.bytes.size()));
  }
}

TEST(RowChanges, WhatHasNotChangedTakesTwoBytesABlock) {
  std::mt19937 generator(3);
  for (const ScalarType dtype : kDtypes) {
    const Row row = random_bits(dtype, 3 * kChangesBlock + 1, generator);
    EXPECT_EQ(changes_of(row, row), std::vector<uint8_t>(8));
  }
}

TEST(RowChanges, OneLargeChangeMakesOnlyItsBlockLarger) {
  Row before = row_of(ScalarType::Float, std::vector<float>(4 * kChangesBlock, 1.0F)),
      after = before;
  const float changed = -5.0F;
  std::memcpy(after.bytes.data() + 4 * 2 * kChangesBlock, &changed, 4);
  EXPECT_LE(changes_of(before, after).size(), 4 * 2 + 4 * kChangesBlock);
  expect_round_trip(before, after);
}

// Cut, longer, or of another row: refused, or taken without touching memory beyond the row.
TEST(RowChanges, OtherBytesAreRefused) {
  std::mt19937 generator(4);
  for (const ScalarType dtype : kDtypes) {
    const auto [before, after] = step_of(dtype, 1000, 1e-3F, generator);
    const std::vector<uint8_t> changes = changes_of(before, after);
    for (size_t size = 0; size < changes.size(); size += 1 + size / 7) {
      Row row = before;
      EXPECT_FALSE(takes({changes.begin(), changes.begin() + static_cast<int64_t>(size)}, row));
    }
    std::vector<uint8_t> longer = changes;
    longer.push_back(0);
    Row row = before;
    EXPECT_FALSE(takes(longer, row));
    for (int i = 0; i < 300; ++i) {
      std::vector<uint8_t> other = changes;
      for (int k = 0; k < 4; ++k)
        other[generator() % other.size()] = static_cast<uint8_t>(generator());
      Row unknown = i % 2 == 0 ? before : random_bits(dtype, 1000, generator);
      takes(other, unknown);
    }
  }
}

TEST(RowChanges, OtherDtypesThrow) {
  EXPECT_FALSE(has_changes(ScalarType::Double));
  uint8_t bytes[64] = {};
  EXPECT_THROW(encode_changes(bytes, bytes, ScalarType::Double, 1, bytes), c10::Error);
}

}  // namespace
}  // namespace zero::kernels
