// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Folders that stand for the disks of machines, each seen by some ranks only.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zero {

class OwnDisks {
 public:
  // The disk of each rank; kNone is one without a folder.
  static constexpr int kNone = -1;
  OwnDisks(std::string parent, std::vector<int> of_rank)
      : parent_(std::move(parent)), of_rank_(std::move(of_rank)) {}

  int ranks() const { return static_cast<int>(of_rank_.size()); }
  std::string disk(int number) const {
    return parent_ + (number == kNone ? "/none" : "/disk-" + std::to_string(number));
  }
  std::string of(int rank) const { return disk(of_rank_[static_cast<size_t>(rank)]); }
  std::set<int> numbers() const { return {of_rank_.begin(), of_rank_.end()}; }
  std::string text() const {
    std::string text;
    for (const int disk : of_rank_) text += disk == kNone ? "-" : std::to_string(disk);
    return text;
  }

  // Hidden names on all disks.
  int hidden() const {
    int count = 0;
    for (const int number : numbers()) {
      if (!std::filesystem::is_directory(disk(number))) continue;
      for (const auto& entry : std::filesystem::directory_iterator(disk(number))) {
        count += entry.path().filename().string()[0] == '.' ? 1 : 0;
      }
    }
    return count;
  }

 private:
  std::string parent_;
  std::vector<int> of_rank_;
};

// Copies all files of the checkpoints `name` of `disks` into one folder.
inline void merge_disks(const OwnDisks& disks, const std::string& name, const std::string& into) {
  namespace fs = std::filesystem;
  fs::create_directories(into);
  for (const int number : disks.numbers()) {
    fs::copy(disks.disk(number) + "/" + name, into,
             fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }
}

}  // namespace zero
