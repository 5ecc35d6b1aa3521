// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A row as a message between ranks that both have what it held before: what has changed in it
// (kernels/row_changes.h), or the row itself where that is shorter.
//
//   | XXH3 of the row before, 8 bytes | bytes of changes, 8 bytes; 0: the row | changes or row |
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace zero {

// Returns the most bytes that the message of a row takes.
int64_t max_changed_row_bytes(const at::Tensor& row);

// A message, which begins `memory`.
struct ChangedRow {
  at::Tensor memory;  // [max_changed_row_bytes(row)] of kByte
  int64_t bytes = 0;
};

//   before, row  [numel] in host memory of a dtype that has_changes(); contiguous
ChangedRow encode_changed_row(const at::Tensor& before, const at::Tensor& row);

// Makes `row` what `message` says; bytes behind its end are ignored. Throws c10::Error if `row`
// does not hold what it held on the sender before. `sender` is for the error.
void apply_changed_row(const at::Tensor& message, const std::string& sender, const at::Tensor& row);

}  // namespace zero
