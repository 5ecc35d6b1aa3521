// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says about a process or a thread in /proc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace zero {

// The fields of /proc/<process>/stat, numbered as in proc(5), of which the first three are left
// out: the number of the process and its name in parentheses, which may contain any character.
// Field 3, its state, is at(3). Empty where there is no such file.
class StatFields {
 public:
  static constexpr size_t kState = 3, kUserTicks = 14, kSystemTicks = 15, kThreads = 20,
                          kBegan = 22;

  explicit StatFields(const std::string& path) {
    std::ifstream file(path);
    std::string text;
    std::getline(file, text, '\0');
    std::istringstream rest(text.substr(std::min(text.rfind(')') + 1, text.size())));
    for (std::string field; rest >> field;) fields_.push_back(field);
  }
  bool empty() const { return fields_.size() + kState <= kBegan; }
  const std::string& at(size_t number) const { return fields_.at(number - kState); }

 private:
  std::vector<std::string> fields_;
};

}  // namespace zero
