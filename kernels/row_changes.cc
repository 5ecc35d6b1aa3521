// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/row_changes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <type_traits>

namespace zero::kernels {
namespace {

// Bits that are read and written at once, beyond the end of a block too.
constexpr int64_t kWord = 8;
constexpr int64_t kHeader = 2;

// The numbers of a dtype, seen as integers.
template <typename Integer, int kExponentShift, uint32_t kExponentMask>
struct Numbers {
  using Unsigned = Integer;
  using Signed = std::make_signed_t<Integer>;
  static constexpr int kBits = 8 * sizeof(Integer);
  // The mantissa has kExponentShift bits.
  static constexpr int32_t kWholeWidth = kExponentShift + 3;

  static uint32_t exponent(Unsigned number) { return (number >> kExponentShift) & kExponentMask; }
  // The integer of the number's bits, with negative ones turned over, and the way back.
  static Unsigned ordered(Unsigned number) {
    return number ^ (static_cast<Unsigned>(static_cast<Signed>(number) >> (kBits - 1)) >> 1);
  }
  static Unsigned stored(Unsigned difference) {
    return static_cast<Unsigned>(difference << 1) ^
           static_cast<Unsigned>(static_cast<Signed>(difference) >> (kBits - 1));
  }
  static Unsigned difference(Unsigned stored) {
    return (stored >> 1) ^ static_cast<Unsigned>(-static_cast<Signed>(stored & 1));
  }
};

using Float = Numbers<uint32_t, 23, 0xff>;
using BFloat16 = Numbers<uint16_t, 7, 0xff>;
using Half = Numbers<uint16_t, 10, 0x1f>;

uint64_t load_word(const uint8_t* address) {
  uint64_t word = 0;
  std::memcpy(&word, address, kWord);
  return word;
}

// The bits of each change of a block. This loop, and those that touch no bits, use vectors.
template <typename N>
void find_widths(uint32_t reach, const typename N::Unsigned* before, int64_t numel,
                 uint32_t* widths) {
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t left = static_cast<int32_t>(reach) - static_cast<int32_t>(N::exponent(before[i]));
    const int32_t width = std::max(left, 0);
    widths[i] = static_cast<uint32_t>(width < N::kWholeWidth ? width : N::kBits);
  }
}

template <typename N>
uint8_t* encode_block(const typename N::Unsigned* before, const typename N::Unsigned* after,
                      int64_t numel, uint8_t* out) {
  typename N::Unsigned stored[kChangesBlock];
  uint32_t widths[kChangesBlock];
  for (int64_t i = 0; i < numel; ++i) {
    stored[i] =
        N::stored(static_cast<typename N::Unsigned>(N::ordered(after[i]) - N::ordered(before[i])));
  }
  int32_t reach = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t needed = std::min<int32_t>(std::bit_width(stored[i]), N::kWholeWidth);
    const auto exponent = static_cast<int32_t>(N::exponent(before[i]));
    reach = std::max(reach, needed > 0 ? needed + exponent : 0);
  }
  out[0] = static_cast<uint8_t>(reach);
  out[1] = static_cast<uint8_t>(reach >> 8);
  out += kHeader;
  if (reach == 0) return out;
  find_widths<N>(static_cast<uint32_t>(reach), before, numel, widths);
  uint64_t word = 0;
  uint32_t filled = 0;
  for (int64_t i = 0; i < numel; ++i) {
    word |= uint64_t{stored[i]} << filled;
    filled += widths[i];
    std::memcpy(out, &word, kWord);
    const uint32_t written = filled & ~7U;
    out += written / 8;
    word >>= written;
    filled &= 7;
  }
  return out + (filled > 0 ? 1 : 0);
}

// Reads kWord bytes from the last byte of a change on.
template <typename N>
void apply_block(const uint8_t* changes, const uint32_t* widths, int64_t numel,
                 typename N::Unsigned* numbers) {
  typename N::Unsigned stored[kChangesBlock];
  uint64_t bit = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t mask = (uint64_t{1} << widths[i]) - 1;
    stored[i] =
        static_cast<typename N::Unsigned>((load_word(changes + bit / 8) >> (bit % 8)) & mask);
    bit += widths[i];
  }
  for (int64_t i = 0; i < numel; ++i) {
    numbers[i] = N::ordered(
        static_cast<typename N::Unsigned>(N::ordered(numbers[i]) + N::difference(stored[i])));
  }
}

template <typename N>
int64_t encode(const void* before, const void* after, int64_t numel, uint8_t* changes) {
  const auto* from = static_cast<const typename N::Unsigned*>(before);
  const auto* to = static_cast<const typename N::Unsigned*>(after);
  uint8_t* out = changes;
  for (int64_t i = 0; i < numel; i += kChangesBlock) {
    out = encode_block<N>(from + i, to + i, std::min(kChangesBlock, numel - i), out);
  }
  return out - changes;
}

template <typename N>
bool apply(const uint8_t* changes, int64_t bytes, int64_t numel, void* row) {
  auto* numbers = static_cast<typename N::Unsigned*>(row);
  const uint8_t* const end = changes + bytes;
  uint32_t widths[kChangesBlock];
  for (int64_t i = 0; i < numel; i += kChangesBlock) {
    const int64_t count = std::min(kChangesBlock, numel - i);
    if (end - changes < kHeader) return false;
    const uint32_t reach = changes[0] | uint32_t{changes[1]} << 8;
    changes += kHeader;
    find_widths<N>(reach, numbers + i, count, widths);
    const int64_t bits = std::accumulate(widths, widths + count, int64_t{0});
    const int64_t size = (bits + 7) / 8;
    if (end - changes < size) return false;
    if (end - changes >= size + kWord) {
      apply_block<N>(changes, widths, count, numbers + i);
    } else {  // Nothing behind the end is read.
      uint8_t last[kChangesBlock * sizeof(typename N::Unsigned) + kWord] = {};
      std::memcpy(last, changes, static_cast<size_t>(size));
      apply_block<N>(last, widths, count, numbers + i);
    }
    changes += size;
  }
  return changes == end;
}

template <typename Call>
auto with_numbers(c10::ScalarType dtype, Call call) {
  TORCH_CHECK(has_changes(dtype), "row changes: expected Float, BFloat16 or Half, got ", dtype);
  if (dtype == c10::ScalarType::Float) return call(Float());
  return dtype == c10::ScalarType::Half ? call(Half()) : call(BFloat16());
}

}  // namespace

bool has_changes(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 ||
         dtype == c10::ScalarType::Half;
}

int64_t max_changes_bytes(c10::ScalarType dtype, int64_t numel) {
  const int64_t blocks = (numel + kChangesBlock - 1) / kChangesBlock;
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return blocks * kHeader + numel * size + kWord;
}

int64_t encode_changes(const void* before, const void* after, c10::ScalarType dtype, int64_t numel,
                       uint8_t* changes) {
  return with_numbers(dtype, [&](auto numbers) {
    return encode<decltype(numbers)>(before, after, numel, changes);
  });
}

bool apply_changes(const uint8_t* changes, int64_t bytes, c10::ScalarType dtype, int64_t numel,
                   void* row) {
  return with_numbers(
      dtype, [&](auto numbers) { return apply<decltype(numbers)>(changes, bytes, numel, row); });
}

}  // namespace zero::kernels
