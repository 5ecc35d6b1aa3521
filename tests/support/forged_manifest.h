// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Text of manifests with changes in it and a checksum that matches all the same.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {

// The text with a checksum that matches it.
inline std::string signed_again(std::string text) {
  text.resize(text.rfind("\"xxh3\": \""));
  return text + "\"xxh3\": \"" + hash_text(content_hash(text.data(), text.size())) + "\"}\n";
}

// The text with `by` in place of the first `what`.
inline std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

// A manifest without tensors, with something in place of `what`.
inline std::string forged(const std::string& what, const std::string& by) {
  Manifest manifest;
  manifest.id = "1";
  return signed_again(replaced(manifest_text(manifest), what, by));
}

}  // namespace zero
