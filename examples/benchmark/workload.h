// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The models and data of the benchmark: no random numbers, so that a program
// in any language trains the same and its losses can be compared, not only its
// time. examples/benchmark/pytorch_workload.py has the same definitions.
//
//   hash32(x)   x ^= x>>16; x *= 0x7feb352d; x ^= x>>15; x *= 0x846ca68b; x ^= x>>16
//   raw(t, i)   hash32(i ^ hash32(t * 0x9E3779B9 + 0x85EBCA6B))
//   value(t, i) float(raw(t, i) >> 8) * 2^-23 - 1, in [-1, 1)
//
// Parameter number t of a model is filled with scale * value(t, i).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zero::examples {

float workload_value(uint32_t stream, uint32_t index);
// fp32; element i of the row-major tensor is scale * value(stream, i), rounded once.
at::Tensor workload_tensor(at::IntArrayRef shape, uint32_t stream, float scale);

// A model with its data. Workloads differ in nothing else.
class Workload : public torch::nn::Module {
 public:
  // Makes the data of (rank, micro batch) on `device`, once before timing.
  virtual void make_data(int rank, int micro_batches, at::Device device) = 0;
  virtual at::Tensor loss(int micro_batch) = 0;
  // Parameters in the order in which they are numbered.
  const std::vector<at::Tensor>& numbered() const { return numbered_; }

  // Called in loss() with each layer before it computes.
  std::function<void(const torch::nn::Module& layer)> before_layer = [](const auto&) {};

  // The matrices but those of the first and the last layer: in a GPT embeddings and head.
  std::vector<at::Tensor> hidden_matrices() const;

 protected:
  // Begins a layer, to which the next parameters belong.
  void begin_layer(const std::string& name);
  at::Tensor add(const std::string& name, const at::Tensor& value);
  // To be called in loss() when the layer of this number is next.
  void enter(size_t layer) const { before_layer(*layers_[layer]); }
  std::vector<at::Tensor> numbered_;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> layers_;
};

struct WorkloadInfo {
  int micro_batches = 1;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool muon = false;  // trains Workload::hidden_matrices() by Muon, and the rest by AdamW
};

// mlp25m, mlp25m_accum4, gpt10m, gpt10m_bf16, gpt10m_muon and gpt350m_bf16.
std::vector<std::string> workload_names();
// The two below throw c10::Error for another name.
WorkloadInfo workload_info(const std::string& name);
std::shared_ptr<Workload> make_workload(const std::string& name);

}  // namespace zero::examples
