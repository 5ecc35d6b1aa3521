// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The union over ranks of one flag per parameter, in messages that do not grow with the number of
// parameters while ranks agree: first hashes of the flags, and the flags themselves, as bits, only
// where hashes differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace zero {

// Words of a MAX reduction that shows whether all ranks put in the same: values and their
// negatives.
inline constexpr int64_t kFingerprintWords = 4;
using Fingerprint = std::array<int32_t, kFingerprintWords>;

Fingerprint fingerprint_of(const std::vector<uint8_t>& flags);
Fingerprint fingerprint_of(const std::string& text);
// Whether all ranks had the same, by the maxima over ranks. XXH3 cut to 62 bits.
bool all_equal(const int32_t* maxima);

// [ceil(flags / 32)] int32, for a bitwise OR over ranks, and back.
at::Tensor pack_flags(const std::vector<uint8_t>& flags);
void unpack_flags(const at::Tensor& bits, std::vector<uint8_t>& flags);

}  // namespace zero
