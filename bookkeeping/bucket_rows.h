// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a bucket: row r is [begin(r), end(r)) of the flat bucket, and rank r owns it. Rows
// follow each other without a gap and may differ in length; a row may be empty.
#pragma once

#include <cstdint>
#include <vector>

namespace zero {

// Where the row of each rank begins and ends in a flat bucket.
class BucketRows {
 public:
  BucketRows() = default;
  // Rows of one length. They take no memory per row, so that a plan does not grow with the ranks.
  BucketRows(int64_t count, int64_t numel) : count_(count), numel_(numel) {}
  // Row r ends at ends[r]. Throws c10::Error when a row ends before it begins.
  explicit BucketRows(const std::vector<int64_t>& ends);
  // Row filled[i] ends at ends[i], and all others of `count` are empty. Memory grows with filled
  // rows only. Throws c10::Error unless both ascend and rows are from 0 to count - 1.
  BucketRows(int64_t count, std::vector<int64_t> filled, std::vector<int64_t> ends);

  int64_t count() const { return count_; }
  // O(1) with equal(), else O(log of filled rows).
  int64_t begin(int64_t row) const { return equal() ? row * numel_ : end_of_filled_below(row); }
  int64_t end(int64_t row) const {
    return equal() ? (row + 1) * numel_ : end_of_filled_below(row + 1);
  }
  int64_t numel(int64_t row) const { return end(row) - begin(row); }
  int64_t total() const { return equal() ? count_ * numel_ : ends_.back(); }

  bool equal() const { return ends_.empty(); }
  // The length of every row. Requires equal().
  int64_t equal_numel() const;
  // The rows that are not empty, ascending. Empty with equal().
  const std::vector<int64_t>& filled() const { return filled_; }
  // Rows that are `factor` times as long.
  BucketRows times(int64_t factor) const;

 private:
  int64_t end_of_filled_below(int64_t row) const;
  void set(std::vector<int64_t> filled, std::vector<int64_t> ends);

  int64_t count_ = 0;
  int64_t numel_ = 0;                   // with equal()
  std::vector<int64_t> filled_, ends_;  // empty with equal()
};

}  // namespace zero
