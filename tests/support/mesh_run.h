// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One model that any mesh can train: dense layers, experts, an embedding that the first and the
// last pipeline stage share, and tensor-parallel parts. Gradients are equal on all data ranks and
// exact, so that runs on all meshes have the same bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {

struct MeshShape {
  int stages = 1;   // pipeline
  int copies = 1;   // of everything
  int data = 1;     // ranks that share a shard of everything
  int experts = 1;  // ranks that hold different experts, and share dense parameters
  int parts = 1;    // tensor parallelism
  // The first layer of each stage but the first; empty: layers are cut evenly.
  std::vector<int> cuts = {};
  Layout layout = Layout::kContiguous;
  int64_t bucket_bytes = 100;
  bool adam = true;
  bool says_sections = true;  // of fused tensors
  Moments moments = Moments::kFloat32;
  // The first and the last stage have a parameter of more than 4096 elements, as their first one
  // and as their last.
  bool has_large = false;
  bool swaps_cuts = false;  // what is cut into rows elsewhere is cut into columns, and vice versa

  int ranks() const { return stages * copies * data * experts * parts; }
  std::string text() const;
};

// Everything that a checkpoint must bring back, of the whole model: full tensors by "kind/name".
// Ranks add what they own; copies that differ are counted.
class WholeState {
 public:
  // `place` numbers the elements of `whole`, in the whole, that `values` are, in their order.
  void add(const std::string& key, const std::vector<int64_t>& whole, const at::Tensor& place,
           const at::Tensor& values);
  void add_number(const std::string& key, double value);
  int64_t conflicts() const { return conflicts_; }
  // Elements and numbers that differ in any bit, entries that only one has, and conflicts.
  static int64_t differing(const WholeState& a, const WholeState& b);
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
  int64_t conflicts_ = 0;
};

class MeshRun {
 public:
  static constexpr int kLayers = 4;
  static constexpr int kExperts = 4;  // of each layer

  // Initial values are `factor` times those that the names have.
  MeshRun(const MeshShape& shape, const Group& world, double factor);
  // Steps [first, last); in step 1 a gradient is not finite on one rank.
  void train(int first, int last);
  // Collective. Adds this rank's part of masters, averages, state, options and counters.
  void add_to(WholeState& state);

  torch::nn::Module module;
  std::unique_ptr<ZeroOptimizer> optimizer;

 private:
  struct Held {
    std::string name;
    at::Tensor tensor;
    int64_t kind = 0;
    int64_t group = 0;                   // the optimizer's
    std::vector<int64_t> whole;          // shape of all parts together
    int64_t dimension = -1;              // along which it is cut
    bool transposed = false;             // its first dimension is the fastest in memory
    std::vector<int64_t> sections = {};  // of a fused one
  };

  void hold(const std::string& name, std::vector<int64_t> whole, int64_t kind,
            int64_t dimension = -1, bool transposed = false, std::vector<int64_t> sections = {});
  void hold_layer(int layer);
  void hold_others(const std::string& name, int64_t dimension);
  at::Tensor part(const at::Tensor& whole, const Held& held) const;
  // The number in the whole of each element, in the memory order of the part.
  at::Tensor places(const Held& held) const;
  static at::Tensor in_memory_order(const at::Tensor& part, const Held& held);
  void make_optimizer();
  GroupPlacement placement(int64_t kind) const;
  std::unique_ptr<torch::optim::OptimizerOptions> group_options(int64_t kind) const;

  const MeshShape shape_;
  const Mesh mesh_;
  const double factor_;
  std::vector<Held> held_;    // managed
  std::vector<Held> others_;  // frozen parameters and buffers
};

}  // namespace zero
