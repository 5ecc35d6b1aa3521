// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks of a mesh, parameters with given gradients, and their norm by torch.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/mesh.h"

namespace zero {

using Names = std::vector<std::string>;
using Dimensions = std::vector<Mesh::Dimension>;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline void on_mesh(const Dimensions& dimensions, const std::function<void(const Mesh&)>& body,
                    std::shared_ptr<MemoryNetwork> network = nullptr) {
  int ranks = 1;
  for (const Mesh::Dimension& d : dimensions) ranks *= d.size;
  RunOptions options;
  options.network = std::move(network);
  run_ranks(
      ranks, [&](const Group& world) { body(Mesh(world, dimensions)); }, options);
}

inline at::Tensor parameter(const at::Tensor& gradient) {
  at::Tensor result = at::zeros(gradient.sizes(), gradient.options());
  result.mutable_grad() = gradient;
  return result;
}

// In double and in one piece.
inline double plain_norm(const std::vector<at::Tensor>& gradients, double p) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& g : gradients) flat.push_back(g.to(at::kDouble).reshape({-1}).abs());
  const at::Tensor all = at::cat(flat);
  return std::isinf(p) ? all.max().item<double>()
                       : std::pow(all.pow(p).sum().item<double>(), 1.0 / p);
}

inline int64_t messages(const Group& group) {
  if (group.world_size() == 1) return 0;
  return group.shared_communicator("norm", Purpose::kData)->traffic().small_calls;
}

}  // namespace zero
