// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies between pieces of a parameter before and after some of its rows went and others came.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

// Where the rows of a parameter come from. A row is what one index of the first dimension selects.
struct RowSources {
  // Per row now: the row of before that it continues, or -1 for none. int64, 1-D, in host memory;
  // undefined where all rows are as they were.
  at::Tensor rows;
  int64_t row_numel = 0;  // elements of a row, which follow each other in memory
};

// Elements [begin, begin + values.numel()) of a parameter in its memory order; `values` is 1-D and
// contiguous.
struct ElementRange {
  int64_t begin = 0;
  at::Tensor values;
};

// Copies the elements of `from`, a piece of the parameter before, to those of `to`, a piece of it
// now, that continue them. Elements of other rows keep their values. Both have one dtype and
// device.
void copy_rows(const ElementRange& from, const ElementRange& to, const RowSources& sources);

}  // namespace zero
