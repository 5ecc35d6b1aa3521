// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace zero {

// What an error says, without the C++ backtrace that c10::Error carries.
inline std::string error_text(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours != nullptr ? ours->what_without_backtrace() : error.what();
}

// The same for a message within a message: its first line.
inline std::string error_line(const std::exception& error) {
  const std::string text = error_text(error);
  return text.substr(0, text.find('\n'));
}

}  // namespace zero
