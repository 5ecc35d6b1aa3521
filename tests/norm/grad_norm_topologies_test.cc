// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/grad_norm.h without an optimizer: the norm of a model that is cut up in
// every way against the same model in one piece.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/norm/norm_on_mesh.h"
#include "tests/support/random_tensors.h"
#include "zero/grad_norm.h"
#include "zero/mesh.h"

namespace zero {
namespace {

// One logical parameter: its whole gradient and the dimensions it is cut over.
struct Logical {
  at::Tensor gradient;
  Names sharded;
  bool expert = false;
  int stage = 0;
};

// Odd sizes, so that ranks have different amounts and some nothing.
std::vector<Logical> model(const Names& dimensions, c10::ScalarType dtype) {
  std::vector<Names> cuts{{}};
  for (const std::string& d : dimensions) {
    if (d != "pp" && d != "dp_replicate") cuts.push_back({d});
  }
  if (cuts.size() == 3) cuts.push_back({cuts[1][0], cuts[2][0]});
  std::vector<Logical> result;
  uint64_t seed = 1;
  for (const Names& cut : cuts) {
    for (const int64_t rows : {1, 3, 13}) {
      const bool expert = cut == Names{"ep"};
      const double size = expert ? 3.0 : 1.0;
      result.push_back({(random_tensor({rows, 7}, seed) * size).to(dtype), cut, expert,
                        static_cast<int>(seed % 3 == 0)});
      ++seed;
    }
  }
  return result;
}

std::string name_of(const Names& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : "+") + n;
  return text.empty() ? "replicated" : text;
}

struct Row {
  std::string topology;
  double error = 0;
  int64_t messages = 0;
};

// Measures and clips `logical` on this rank; returns the largest relative error of the norm and,
// where fp32, of the clipped gradients.
double compare(const Mesh& mesh, const std::vector<Logical>& logical, double p, double max_norm) {
  const bool staged = std::any_of(mesh.dimensions().begin(), mesh.dimensions().end(),
                                  [](const Mesh::Dimension& d) { return d.name == "pp"; });
  std::vector<at::Tensor> whole;
  std::vector<NormParameter> parameters;
  std::vector<at::Tensor> expected;
  for (const Logical& l : logical) whole.push_back(l.gradient);
  const double norm = plain_norm(whole, p);
  const double factor = std::min(1.0, max_norm / (norm + 1e-6));
  for (const Logical& l : logical) {
    const Group group = mesh.group(l.sharded);
    Placement placement;
    placement.sharded_over({group}).expert(l.expert);
    if (staged && mesh.coordinate("pp") != l.stage) {
      // Not this stage's, but its peers of the group may list one.
      parameters.push_back({at::Tensor(), placement});
      continue;
    }
    const at::Tensor part = l.gradient.tensor_split(group.world_size())[group.rank()].clone();
    parameters.push_back({parameter(part), placement});
    expected.push_back(part.to(at::kDouble) * factor);
  }
  const auto groups = group_parameters_for_norm(parameters);
  const auto pipeline = staged ? std::optional(mesh.group({"pp"})) : std::nullopt;
  const double measured = clip_grad_norm_(groups, max_norm, p, pipeline).item<double>();
  double error = std::abs(measured - norm) / norm;
  size_t i = 0;
  for (const NormParameter& item : parameters) {
    if (!item.tensor.defined()) continue;
    const at::Tensor difference = item.tensor.grad().to(at::kDouble) - expected[i++];
    if (difference.numel() == 0) continue;
    const double tolerance = item.tensor.scalar_type() == at::kFloat ? 1e-6 : 0x1p-8;
    EXPECT_LE(difference.abs().max().item<double>(), tolerance * 3 * factor);
  }
  return error;
}

Names names_of(const Dimensions& dimensions) {
  Names names;
  for (const Mesh::Dimension& d : dimensions) names.push_back(d.name);
  return names;
}

// All meshes of two and of three dimensions out of the five, and for each the model cut over every
// one of its dimensions alone and in pairs.
std::vector<std::pair<Dimensions, Names>> topologies() {
  const Names all{"pp", "dp_replicate", "dp_shard", "ep", "tp"};
  std::vector<Dimensions> meshes;
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a + 1; b < all.size(); ++b) {
      meshes.push_back({{all[a], 2}, {all[b], 2}});
      for (size_t c = b + 1; c < all.size(); ++c) {
        meshes.push_back({{all[a], 2}, {all[b], 2}, {all[c], 2}});
      }
    }
  }
  std::vector<std::pair<Dimensions, Names>> result;
  for (const Dimensions& mesh : meshes) {
    const Names names = names_of(mesh);
    for (size_t a = 0; a < names.size(); ++a) {
      result.push_back({mesh, {names[a]}});
      for (size_t b = a + 1; b < names.size(); ++b) result.push_back({mesh, {names[a], names[b]}});
    }
  }
  return result;
}

void expect_exact(c10::ScalarType dtype, double tolerance) {
  std::printf("%-28s %-20s %-16s %s\n", "mesh (2 each)", "cut over", "largest error",
              "messages per call");
  for (const auto& [dimensions, cut] : topologies()) {
    const std::vector<Logical> logical = model(cut, dtype);
    std::mutex mutex;
    double largest = 0;
    int64_t most = 0;
    on_mesh(dimensions, [&](const Mesh& mesh) {
      std::set<Names> distinct;
      for (const Logical& l : logical) distinct.insert(l.sharded);
      distinct.insert({"pp"});
      const auto count = [&] {
        int64_t sum = 0;
        for (const Names& names : distinct) {
          if (names == Names{"pp"} && dimensions[0].name != "pp") continue;
          sum += messages(mesh.group(names));
        }
        return sum;
      };
      const int64_t before = count();
      double error = 0;
      int calls = 0;
      for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
        for (const double max_norm : {0.5, 1e6}) {
          const double here = compare(mesh, logical, p, max_norm);
          if (!(here <= error)) error = here;  // a NaN must not pass
          ++calls;
        }
      }
      const int64_t sent = count() - before;
      EXPECT_EQ(sent % calls, 0);
      // At most one for each distinct set of groups, the pipeline included.
      EXPECT_LE(sent / calls, static_cast<int64_t>(distinct.size()));
      const std::lock_guard<std::mutex> lock(mutex);
      if (!(error <= largest)) largest = error;
      most = std::max(most, sent / calls);
    });
    std::printf("%-28s %-20s %-16.2e %lld\n", name_of(names_of(dimensions)).c_str(),
                name_of(cut).c_str(), largest, static_cast<long long>(most));
    EXPECT_LE(largest, tolerance) << name_of(names_of(dimensions)) << " cut over " << name_of(cut);
  }
}

TEST(GradNormTest, EveryDimensionAloneAndInPairsEqualsOneProcessInFloat) {
  expect_exact(at::kFloat, 1e-6);
}

// Against the bf16 values in one piece: sums are in double, so rounding to bf16 costs the norm
// nothing. Only clipped gradients are rounded, once, to 8 bits.
TEST(GradNormTest, EveryDimensionAloneAndInPairsEqualsOneProcessInBfloat16) {
  expect_exact(at::kBFloat16, 1e-6);
}

}  // namespace
}  // namespace zero
