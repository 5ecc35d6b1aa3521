// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/masters_hash.h"

#include <memory>
#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero::examples {

namespace {

// `bytes`, the most significant first.
std::string hexadecimal(const unsigned char* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

}  // namespace

MastersHash hash_masters(const torch::nn::Module& module, ZeroOptimizer& optimizer) {
  MastersHash result;
  const auto all = std::make_unique<XXH3_state_t>();  // aligned to 64 bytes
  XXH3_128bits_reset(all.get());
  for (const auto& item : module.named_parameters()) {
    const at::Tensor master = optimizer.master(item.value()).cpu().contiguous();
    XXH3_128bits_update(all.get(), master.const_data_ptr(), master.nbytes());
    XXH64_canonical_t digits;
    XXH64_canonicalFromHash(&digits, XXH3_64bits(master.const_data_ptr(), master.nbytes()));
    result.parameters.emplace_back(item.key(), hexadecimal(digits.digest, sizeof(digits.digest)));
  }
  XXH128_canonical_t digits;
  XXH128_canonicalFromHash(&digits, XXH3_128bits_digest(all.get()));
  result.all = hexadecimal(digits.digest, sizeof(digits.digest));
  return result;
}

}  // namespace zero::examples
