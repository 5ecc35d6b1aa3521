// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor that ranks exchange: a row for each of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "bookkeeping/bucket_rows.h"

namespace zero {

// One row for each rank: a contiguous matrix [world_size, n], or rows of different lengths, some of
// them perhaps empty, one after the other in a contiguous 1-D tensor.
class Rows {
 public:
  Rows() = default;
  Rows(at::Tensor matrix) : values_(std::move(matrix)) {}  // not explicit: a matrix is its rows
  // `values` has lengths.total() elements. The matrix where all lengths are equal.
  Rows(const at::Tensor& values, const BucketRows& lengths)
      : values_(lengths.equal() ? values.view({lengths.count(), lengths.equal_numel()}) : values),
        lengths_(lengths.equal() ? BucketRows() : lengths) {}

  bool defined() const { return values_.defined(); }
  const at::Tensor& values() const { return values_; }
  bool equal() const { return lengths_.equal(); }
  const BucketRows& lengths() const { return lengths_; }  // of unequal rows
  at::Tensor row(int64_t r) const {
    return equal() ? values_.select(0, r) : values_.narrow(0, lengths_.begin(r), lengths_.numel(r));
  }
  // The rows of `values`, which has the sizes of values().
  Rows of(at::Tensor values) const {
    Rows result(*this);
    result.values_ = std::move(values);
    return result;
  }

 private:
  at::Tensor values_;
  BucketRows lengths_;
};

}  // namespace zero
