// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a call throws, and whether that says what it should.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace zero {

// Without a backtrace; empty when the call does not throw.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

// The same for a call that may take `limit`, and half a second more for other programs.
inline std::string error_within(std::chrono::milliseconds limit,
                                const std::function<void()>& call) {
  constexpr std::chrono::milliseconds kLoad{500};
  const auto start = std::chrono::steady_clock::now();
  const std::string text = error_of(call);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  EXPECT_LE(took.count(), (limit + kLoad).count()) << text;
  return text;
}

inline void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
  }
}

}  // namespace zero
