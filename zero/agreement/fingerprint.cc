// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/fingerprint.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero {

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

}  // namespace zero
