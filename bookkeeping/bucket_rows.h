// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a bucket: row r is [begin(r), end(r)) of the flat bucket, and rank r owns it. Rows
// follow each other without a gap and may differ in length; a row may be empty.
#pragma once

#include <cstdint>
#include <vector>

namespace zero {

class BucketRows {
 public:
  BucketRows() = default;
  // Rows of one length. They take no memory per row, so that a plan does not grow with the ranks.
  BucketRows(int64_t count, int64_t numel) : count_(count), numel_(numel) {}
  // Row r ends at ends[r]. Throws c10::Error when a row ends before it begins.
  explicit BucketRows(std::vector<int64_t> ends);

  int64_t count() const { return count_; }
  int64_t begin(int64_t row) const {
    return ends_.empty() ? row * numel_ : (row == 0 ? 0 : ends_[row - 1]);
  }
  int64_t end(int64_t row) const { return ends_.empty() ? (row + 1) * numel_ : ends_[row]; }
  int64_t numel(int64_t row) const { return end(row) - begin(row); }
  int64_t total() const { return ends_.empty() ? count_ * numel_ : ends_.back(); }

  bool equal() const { return ends_.empty(); }
  // The length of every row. Requires equal().
  int64_t equal_numel() const;

 private:
  int64_t count_ = 0;
  int64_t numel_ = 0;          // with equal()
  std::vector<int64_t> ends_;  // empty with equal()
};

}  // namespace zero
