// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Forms the union over ranks of one flag per parameter. While ranks agree, messages do not grow
// with the number of parameters: ranks first send hashes of the flags, and the flags themselves, as
// bits, only if hashes differ.
#pragma once

#include <ATen/core/Tensor.h>

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

// [ceil(flags / 32)] int32, for a bitwise OR over ranks, and back.
at::Tensor pack_flags(const std::vector<uint8_t>& flags);
void unpack_flags(const at::Tensor& bits, std::vector<uint8_t>& flags);

}  // namespace zero
