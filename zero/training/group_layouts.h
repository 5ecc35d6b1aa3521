// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The layout of each parameter group: as the options say, and whole parameters for classes that
// need them. Likewise how its moments are stored.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "zero/memory/parameter_table.h"
#include "zero/options.h"

namespace zero {

// Returns the layout of each parameter group of `inner`. Throws c10::Error for a layout of a group
// that does not exist, and what check_inner_optimizer() throws.
std::vector<Layout> group_layouts(const torch::optim::Optimizer& inner, const ZeroOptions& options);

inline bool is_whole(Layout layout) { return layout == Layout::kWholeParameters; }

// Throws c10::Error where the options ask for moments that are not fp32 of a group that does not
// exist, or whose class neither has a fused kernel nor stores them itself.
void check_moments(const torch::optim::Optimizer& inner, const ZeroOptions& options);
// Throws c10::Error where the options ask for split masters or update_in_backward of parameters
// that cannot have them, and where the bits of a step would depend on the number of ranks in spite
// of ZeroOptions::micro_batches.
void check_layouts(const std::vector<Layout>& layouts, const ParameterTable& table,
                   const torch::optim::Optimizer& inner, int world_size,
                   const ZeroOptions& options);
// Returns how the moments of each parameter of `table` are stored.
std::vector<Moments> parameter_moments(const ParameterTable& table, const ZeroOptions& options);

// Returns the cost of a step of `parameter` for its owner. Throws c10::Error if owner_cost() gives
// a negative one.
int64_t cost_of(const Parameter& parameter, const torch::optim::Optimizer& inner,
                const ZeroOptions& options);

}  // namespace zero
