// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace zero {

// As c10::str(), for texts that ranks compare or read: in the global C++ locale of a program, which
// may differ between ranks, numbers may have separators.
template <class... Parts>
std::string plain_text(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  return text.str();
}

}  // namespace zero
