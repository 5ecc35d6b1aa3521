// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/benchmark/workload.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <map>
#include <optional>

namespace zero::examples {
namespace {

uint32_t hash32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}

uint32_t raw(uint32_t stream, uint32_t index) {
  return hash32(index ^ hash32(stream * 0x9E3779B9U + 0x85EBCA6BU));
}

uint32_t input_stream(int rank, int micro_batch) { return 100000U + 64U * rank + micro_batch; }
uint32_t target_stream(int rank, int micro_batch) { return 200000U + 64U * rank + micro_batch; }

// 24 layers of 1024 x 1024 with ReLU between them; 25,190,400 parameters.
class Mlp final : public Workload {
 public:
  Mlp() {
    const auto scale = static_cast<float>(std::sqrt(6.0 / kWidth));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      begin_layer("layer" + std::to_string(layer));
      add("weight", workload_tensor({kWidth, kWidth}, 2 * layer, scale));
      add("bias", workload_tensor({kWidth}, 2 * layer + 1, 0.01F));
    }
  }
  void make_data(int rank, int micro_batches, at::Device device) override {
    for (int m = 0; m < micro_batches; ++m) {
      inputs_.push_back(workload_tensor({8, kWidth}, input_stream(rank, m), 1.0F).to(device));
      targets_.push_back(workload_tensor({8, kWidth}, target_stream(rank, m), 0.5F).to(device));
    }
  }
  at::Tensor loss(int m) override {
    at::Tensor y = inputs_[m];
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      enter(layer);
      y = at::linear(y, numbered_[2 * layer], numbered_[2 * layer + 1]);
      if (layer + 1 < kLayers) y = at::relu(y);
    }
    return at::mse_loss(y, targets_[m]);
  }

 private:
  static constexpr int64_t kWidth = 1024;
  static constexpr uint32_t kLayers = 24;
  std::vector<at::Tensor> inputs_, targets_;
};

struct GptShape {
  int64_t width = 384;
  int blocks = 6;
  int64_t heads = 6;
  int64_t time = 128;
  int64_t vocabulary = 256;
  int64_t sequences = 2;
};

// Pre-norm blocks with an untied head. gpt10m: 10,893,312 parameters in 77 tensors, over bytes.
// gpt350m: 353,691,648 in 293, with the blocks of GPT-2 medium.
class GptWorkload final : public Workload {
 public:
  GptWorkload(const GptShape& shape, c10::ScalarType dtype) : shape_(shape), dtype_(dtype) {
    const auto wide = static_cast<float>(0.02 * std::sqrt(3.0));
    const auto narrow = static_cast<float>(0.02 * std::sqrt(3.0) / std::sqrt(2.0 * shape.blocks));
    const int64_t width = shape.width;
    begin_layer("embedding");
    matrix("wte", {shape.vocabulary, width}, wide);
    matrix("wpe", {shape.time, width}, wide);
    for (int block = 0; block < shape.blocks; ++block) {
      begin_layer("block" + std::to_string(block));
      norm("ln1");
      layer("qkv", 3 * width, width, wide);
      layer("proj", width, width, narrow);
      norm("ln2");
      layer("fc", 4 * width, width, wide);
      layer("out", width, 4 * width, narrow);
    }
    begin_layer("end");
    norm("lnf");
    matrix("head", {shape.vocabulary, width}, wide);
  }
  void make_data(int rank, int micro_batches, at::Device device) override {
    for (int m = 0; m < micro_batches; ++m) {
      at::Tensor tokens = at::empty({shape_.sequences, shape_.time + 1}, at::kLong);
      for (int64_t i = 0; i < tokens.numel(); ++i) {
        tokens.mutable_data_ptr<int64_t>()[i] =
            raw(input_stream(rank, m), static_cast<uint32_t>(i)) % shape_.vocabulary;
      }
      tokens_.push_back(tokens.to(device));
    }
  }
  at::Tensor loss(int m) override {
    const auto [width, blocks, n_heads, time, vocabulary, sequences] = shape_;
    enter(0);
    const at::Tensor input = tokens_[m].narrow(1, 0, time);
    const at::Tensor labels = tokens_[m].narrow(1, 1, time).reshape({-1});
    at::Tensor h = at::embedding(numbered_[0], input) + numbered_[1];
    size_t next = 2;
    const auto take = [&]() -> const at::Tensor& { return numbered_[next++]; };
    const auto normed = [&, width = width](const at::Tensor& x) {
      const at::Tensor &weight = take(), &bias = take();
      return at::layer_norm(x, {width}, weight, bias, 1e-5);
    };
    const auto linear = [&](const at::Tensor& x) {
      const at::Tensor &weight = take(), &bias = take();
      return at::linear(x, weight, bias);
    };
    for (int block = 0; block < blocks; ++block) {
      enter(1 + block);
      const auto parts = linear(normed(h)).split(width, 2);
      std::vector<at::Tensor> heads;
      for (const at::Tensor& part : parts) {
        heads.push_back(part.view({sequences, time, n_heads, width / n_heads}).transpose(1, 2));
      }
      const at::Tensor o =
          at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
      h = h + linear(o.transpose(1, 2).reshape({sequences, time, width}));
      h = h + linear(at::gelu(linear(normed(h))));
    }
    enter(1 + blocks);
    const at::Tensor logits = at::matmul(normed(h), numbered_.back().t()).to(at::kFloat);
    return at::cross_entropy_loss(logits.reshape({-1, vocabulary}), labels);
  }

 private:
  void matrix(const std::string& name, at::IntArrayRef shape, float scale) {
    add(name, workload_tensor(shape, static_cast<uint32_t>(numbered_.size()), scale).to(dtype_));
  }
  void constant(const std::string& name, int64_t size, double value) {
    add(name, at::full({size}, value, at::kFloat).to(dtype_));
  }
  void norm(const std::string& name) {
    constant(name + "_weight", shape_.width, 1.0);
    constant(name + "_bias", shape_.width, 0.0);
  }
  void layer(const std::string& name, int64_t out, int64_t in, float scale) {
    matrix(name + "_weight", {out, in}, scale);
    constant(name + "_bias", out, 0.0);
  }

  const GptShape shape_;
  const c10::ScalarType dtype_;
  std::vector<at::Tensor> tokens_;
};

struct NamedWorkload {
  WorkloadInfo info;
  std::optional<GptShape> gpt;  // else the Mlp
};

const std::map<std::string, NamedWorkload>& workloads() {
  static const std::map<std::string, NamedWorkload> all = [] {
    const GptShape medium{1024, 24, 16, 1024, 24576, 8};
    return std::map<std::string, NamedWorkload>{
        {"mlp25m", {}},
        {"mlp25m_accum4", {{4, at::kFloat}, std::nullopt}},
        {"gpt10m", {{}, GptShape{}}},
        {"gpt10m_bf16", {{1, at::kBFloat16}, GptShape{}}},
        {"gpt10m_muon", {{1, at::kFloat, true}, GptShape{}}},
        {"gpt350m_bf16", {{1, at::kBFloat16}, medium}}};
  }();
  return all;
}

const NamedWorkload& workload_of(const std::string& name) {
  const auto found = workloads().find(name);
  TORCH_CHECK(found != workloads().end(), "workload: expected one of ",
              c10::Join(", ", workload_names()), ", got ", name);
  return found->second;
}

}  // namespace

float workload_value(uint32_t stream, uint32_t index) {
  return static_cast<float>(raw(stream, index) >> 8) * 0x1p-23F - 1.0F;
}

at::Tensor workload_tensor(at::IntArrayRef shape, uint32_t stream, float scale) {
  at::Tensor result = at::empty(shape, at::kFloat);
  float* data = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    data[i] = scale * workload_value(stream, static_cast<uint32_t>(i));
  }
  return result;
}

void Workload::begin_layer(const std::string& name) {
  layers_.push_back(register_module(name, std::make_shared<torch::nn::Module>(name)));
}

at::Tensor Workload::add(const std::string& name, const at::Tensor& value) {
  numbered_.push_back(layers_.back()->register_parameter(name, value));
  return numbered_.back();
}

std::vector<at::Tensor> Workload::hidden_matrices() const {
  std::vector<at::Tensor> result;
  for (size_t i = 1; i + 1 < layers_.size(); ++i) {
    for (const at::Tensor& p : layers_[i]->parameters()) {
      if (p.dim() == 2) result.push_back(p);
    }
  }
  return result;
}

std::vector<std::string> workload_names() {
  std::vector<std::string> names;
  for (const auto& [name, workload] : workloads()) names.push_back(name);
  return names;
}

WorkloadInfo workload_info(const std::string& name) { return workload_of(name).info; }

std::shared_ptr<Workload> make_workload(const std::string& name) {
  const NamedWorkload& workload = workload_of(name);
  if (!workload.gpt) return std::make_shared<Mlp>();
  return std::make_shared<GptWorkload>(*workload.gpt, workload.info.dtype);
}

}  // namespace zero::examples
