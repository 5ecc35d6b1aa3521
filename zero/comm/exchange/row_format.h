// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows that wait to be added up, and how an exchange in two levels adds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace zero {

// Rows of n elements whose sum, in this order, is the result of reduce_rows().
struct SummandRows {
  // The dtype of the rows sent, or fp32 for partial sums that are not kept apart.
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t count = 1;
  // Host only: the address of each row. If null, the rows are those of `received` and `own_row`.
  const void* const* addresses = nullptr;
  // [count, n]; its row `own` is unspecified, and `own_row` takes its place. Null for one row.
  const void* received = nullptr;
  const void* own_row = nullptr;
  int64_t own = 0;

  // The address of row `i`, of rows of `bytes` bytes each.
  const void* row(int64_t i, int64_t bytes) const {
    if (addresses != nullptr) return addresses[i];
    return i == own ? own_row : static_cast<const char*>(received) + i * bytes;
  }
};

using UseRows = std::function<void(const SummandRows& rows)>;

// The meaning of rows, for an exchange that adds up the rows of one machine before it sends their
// sum to others. Functions may be called on any thread, on the current stream.
class RowFormat {
 public:
  virtual ~RowFormat() = default;
  // Writes the fp32 sum of `rows`, added in their order, to `sum`: [numel] fp32.
  virtual void sum(const SummandRows& rows, const at::Tensor& sum) const = 0;
  // True: sums are sent in this format, rounded once on each machine. False: in fp32.
  virtual bool encodes_sums() const = 0;
  // True: the sums of machines, in fp32, are received as bytes, since exchanges may not add them
  // up.
  virtual bool keeps_sums_apart() const { return false; }
  // Encodes sums [count, numel] fp32 as rows [count, n] of the dtype that is sent. Only where
  // encodes_sums().
  virtual void encode_sums(const at::Tensor& sums, const at::Tensor& rows) const = 0;
};

// A format and the number of values in a row. Without a format, rows are numbers of their dtype
// (fp32, bf16 or fp16) and sums are sent in fp32.
struct RowValues {
  const RowFormat* format = nullptr;  // outlives the operation
  int64_t numel = 0;                  // with a format
};

}  // namespace zero
