// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/group_layouts.h"

#include <c10/util/Exception.h>

#include "bookkeeping/layout.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

std::vector<Layout> group_layouts(const torch::optim::Optimizer& inner,
                                  const ZeroOptions& options) {
  const int64_t groups = std::ssize(inner.param_groups());
  for (const auto& [index, layout] : options.layouts()) {
    TORCH_CHECK(0 <= index && index < groups, "layout of parameter group ", index,
                ": expected one of the ", groups, " groups of the inner optimizer");
  }
  const std::vector<bool> needs_whole = needs_whole_parameters(inner);
  std::vector<Layout> layouts;
  std::vector<bool> whole;
  for (int64_t g = 0; g < groups; ++g) {
    const auto found = options.layouts().find(g);
    layouts.push_back(found != options.layouts().end() ? found->second
                      : needs_whole[g]                 ? Layout::kWholeParameters
                                                       : options.layout());
    whole.push_back(is_whole(layouts.back()));
  }
  check_inner_optimizer(inner, options.elementwise(), whole);
  return layouts;
}

namespace {

bool is_fused(const torch::optim::Optimizer& inner, int64_t group, const ZeroOptions& options) {
  return options.fused() && adapter_of(inner, group).fused() != nullptr;
}

Moments moments_of_group(const ZeroOptions& options, int64_t group) {
  const auto found = options.group_moments().find(group);
  return found != options.group_moments().end() ? found->second : options.moments();
}

void check_split_masters(const ParameterTable& table, const torch::optim::Optimizer& inner,
                         const std::vector<Layout>& layouts, const ZeroOptions& options) {
  for (const Parameter& p : table.parameters()) {
    const c10::ScalarType dtype = p.tensor.scalar_type();
    TORCH_CHECK(dtype != at::kHalf, "split_masters: expected bfloat16 parameters, got ", p.name,
                " of half, whose 10 bits of mantissa are not the upper ones of an fp32 number; use "
                "to(torch::kBFloat16) or split_masters(false)");
    if (dtype != at::kBFloat16) continue;
    TORCH_CHECK(layout_of(layouts[p.group]).in_place(), "split_masters: expected parameter ",
                p.name,
                " in an arena, which keeps the upper halves, got Layout::kPerParameter; use "
                "kContiguous or split_masters(false)");
    TORCH_CHECK(is_fused(inner, p.group, options),
                "split_masters: expected a fused kernel for parameter ", p.name,
                ", since a step() of its own reads fp32 masters, got none; use AdamW, Adam, SGD or "
                "zero::Lion with fused(true), or split_masters(false)");
  }
}

void check_micro_batches(const torch::optim::Optimizer& inner, const std::vector<Layout>& layouts,
                         int world_size, const ZeroOptions& options) {
  TORCH_CHECK(options.micro_batches() >= world_size, "micro_batches: expected at least the ",
              world_size, " ranks, so that each has a micro-batch, got ", options.micro_batches(),
              "; cut the batch into more parts, or use fewer ranks");
  for (int64_t g = 0; g < std::ssize(layouts); ++g) {
    TORCH_CHECK(
        is_fused(inner, g, options) || is_whole(layouts[g]),
        "micro_batches: expected a fused kernel, or Layout::kWholeParameters, for parameter "
        "group ",
        g,
        ", since a step() of its own may round the end of a piece in another way, and "
        "pieces depend on the number of ranks; use AdamW, Adam, SGD or zero::Lion with "
        "fused(true), or layout(",
        g, ", Layout::kWholeParameters)");
  }
}

void check_update_in_backward(const ParameterTable& table, const torch::optim::Optimizer& inner,
                              const ZeroOptions& options) {
  for (const Parameter& p : table.parameters()) {
    TORCH_CHECK(is_fused(inner, p.group, options),
                "update_in_backward: expected a fused kernel for parameter ", p.name,
                ", since a step() of its own updates all buckets at once, got none; use AdamW, "
                "Adam, SGD or zero::Lion with fused(true), or update_in_backward(false)");
  }
}

}  // namespace

void check_moments(const torch::optim::Optimizer& inner, const ZeroOptions& options) {
  const int64_t groups = std::ssize(inner.param_groups());
  for (const auto& [index, moments] : options.group_moments()) {
    TORCH_CHECK(0 <= index && index < groups, "moments of parameter group ", index,
                ": expected one of the ", groups, " groups of the inner optimizer");
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (moments_of_group(options, g) == Moments::kFloat32) continue;
    TORCH_CHECK(adapter_of(inner, g).stores_moments() || is_fused(inner, g, options),
                "moments of parameter group ", g,
                ": expected Moments::kFloat32 for a group without a fused kernel, since its own "
                "step() reads state in fp32, got ",
                moments_of_group(options, g) == Moments::kInt8 ? "kInt8" : "kBFloat16",
                options.fused() ? "" : " with fused(false)", "; set moments(", g,
                ", Moments::kFloat32), or use zero::Muon, or AdamW, Adam, SGD or zero::Lion with "
                "fused(true)");
  }
}

void check_layouts(const std::vector<Layout>& layouts, const ParameterTable& table,
                   const torch::optim::Optimizer& inner, int world_size,
                   const ZeroOptions& options) {
  if (options.split_masters()) check_split_masters(table, inner, layouts, options);
  if (options.update_in_backward()) check_update_in_backward(table, inner, options);
  if (options.micro_batches() > 0) check_micro_batches(inner, layouts, world_size, options);
}

std::vector<Moments> parameter_moments(const ParameterTable& table, const ZeroOptions& options) {
  std::vector<Moments> result;
  for (const Parameter& p : table.parameters()) {
    result.push_back(moments_of_parameter(moments_of_group(options, p.group), p.tensor.numel()));
  }
  return result;
}

int64_t cost_of(const Parameter& parameter, const torch::optim::Optimizer& inner,
                const ZeroOptions& options) {
  if (!options.owner_cost()) return adapter_of(inner, parameter.group).step_cost(parameter.tensor);
  const int64_t cost = options.owner_cost()(parameter.sizes);
  TORCH_CHECK(cost >= 0, "owner_cost: expected 0 or more for parameter ", parameter.name,
              " of shape ", c10::IntArrayRef(parameter.sizes), ", got ", cost);
  return cost;
}

}  // namespace zero
