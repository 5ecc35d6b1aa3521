// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <set>

namespace zero {

bool ParameterLayout::is_master(const Arena& arena) const {
  return in_place() && arena.dtype == c10::ScalarType::Float;
}

int64_t ParameterLayout::full_numel(const Arena& arena) const {
  return in_place() ? arena.numel : arena.parameter_numel;
}

size_t max_gathers(const Plan& plan) {
  const bool in_place = std::all_of(plan.arenas.begin(), plan.arenas.end(),
                                    [](const Arena& arena) { return arena.layout->in_place(); });
  return in_place ? std::numeric_limits<size_t>::max() : 4;
}

std::string layout_names(const Plan& plan) {
  std::string text;
  std::set<const ParameterLayout*> known;
  for (const Arena& arena : plan.arenas) {
    if (known.insert(arena.layout).second)
      text += (text.empty() ? "" : " + ") + std::string(arena.layout->name());
  }
  return text;
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
