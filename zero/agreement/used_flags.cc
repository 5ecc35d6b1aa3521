// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/used_flags.h"

#include <ATen/ops/zeros.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero {
namespace {

constexpr size_t kBits = 32;

}  // namespace

Fingerprint fingerprint_of(const void* bytes, size_t size) {
  const uint64_t hash = XXH3_64bits(bytes, size);
  // 31 bits each, so that a negative exists.
  const auto low = static_cast<int32_t>(hash & 0x7fffffff);
  const auto high = static_cast<int32_t>((hash >> 31) & 0x7fffffff);
  return {low, -low, high, -high};
}

Fingerprint fingerprint_of(const std::vector<uint8_t>& flags) {
  return fingerprint_of(flags.data(), flags.size());
}

Fingerprint fingerprint_of(const std::string& text) {
  return fingerprint_of(text.data(), text.size());
}

bool all_equal(const int32_t* maxima) { return maxima[0] == -maxima[1] && maxima[2] == -maxima[3]; }

at::Tensor pack_flags(const std::vector<uint8_t>& flags) {
  const size_t words = (flags.size() + kBits - 1) / kBits;
  at::Tensor bits = at::zeros({static_cast<int64_t>(words)}, at::TensorOptions().dtype(at::kInt));
  auto* out = bits.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0) out[i / kBits] |= static_cast<int32_t>(uint32_t{1} << (i % kBits));
  }
  return bits;
}

void unpack_flags(const at::Tensor& bits, std::vector<uint8_t>& flags) {
  const auto* in = bits.const_data_ptr<int32_t>();
  for (size_t i = 0; i < flags.size(); ++i) {
    flags[i] = static_cast<uint8_t>((static_cast<uint32_t>(in[i / kBits]) >> (i % kBits)) & 1U);
  }
}

}  // namespace zero
