// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/layout.h"

#include <c10/util/Exception.h>

#include <limits>

namespace zero {

bool ParameterLayout::is_master(const Arena& arena) const {
  return in_place() && arena.dtype == c10::ScalarType::Float;
}

int64_t ParameterLayout::full_numel(const Arena& arena) const {
  return in_place() ? arena.numel : arena.parameter_numel;
}

size_t ParameterLayout::max_gathers() const {
  return in_place() ? std::numeric_limits<size_t>::max() : 4;
}

const ParameterLayout& layout_of(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return contiguous_layout();
    case Layout::kPerParameter:
      return per_parameter_layout();
    case Layout::kWholeParameters:
      return whole_parameters_layout();
  }
  TORCH_CHECK(false, "layout: expected a value of zero::Layout, got ", static_cast<int>(layout));
}

int64_t alignment_of(c10::ScalarType dtype) {
  return kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace zero
