// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Fingerprints by which ranks learn whether all of them have the same, however much that is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zero {

// The int32 values of a MAX reduction that shows whether all ranks contribute the same: a hash and
// its negative.
inline constexpr int64_t kFingerprintWords = 4;
using Fingerprint = std::array<int32_t, kFingerprintWords>;

Fingerprint fingerprint_of(const void* bytes, size_t size);
Fingerprint fingerprint_of(const std::vector<uint8_t>& flags);
Fingerprint fingerprint_of(const std::string& text);
// Returns whether all ranks had the same, from the maxima over ranks. XXH3 cut to 62 bits.
bool all_equal(const int32_t* maxima);

}  // namespace zero
