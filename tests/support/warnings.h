// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace zero {

// Keeps what this thread warns of in its scope.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace zero
