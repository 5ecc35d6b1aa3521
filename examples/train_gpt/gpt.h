// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A small GPT over bytes: learned positions, layer norm before each half of a
// block, causal attention, GELU, a head of its own. Nothing in it knows that it
// is trained by several ranks.
//
//   Gpt model(GptOptions{.context = 128, .layers = 4, .width = 192, .heads = 6});
//   at::Tensor logits = model(tokens);  // [batch, time] -> [batch, time, 256]
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace zero::examples {

struct GptOptions {
  int64_t vocabulary = 256;  // one token per byte value
  int64_t context = 128;     // the most tokens one forward pass may see
  int64_t layers = 4;
  int64_t width = 192;  // of the residual stream; a multiple of `heads`
  int64_t heads = 6;
  double dropout = 0.0;  // part of the units that train() drops where GPT-2 does
};

// One layer: attention, then a feed-forward part, each added to its input.
// [batch, time, width] in and out.
class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  // Every position looks at itself and at those before it.
  at::Tensor attend(const at::Tensor& x);

  int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear attention_out_;
  torch::nn::LayerNorm feed_forward_norm_;
  torch::nn::Linear feed_forward_in_;
  torch::nn::Linear feed_forward_out_;
};
TORCH_MODULE(GptBlock);

class GptImpl : public torch::nn::Module {
 public:
  // Draws the initial parameters from torch's default generator: seed it with
  // torch::manual_seed() for the same model again.
  explicit GptImpl(const GptOptions& options);

  // tokens [batch, time <= context], int64 -> logits [batch, time, vocabulary].
  // Logits are fp32 whatever dtype the model has, because a loss summed in
  // 16 bits is too coarse to train on.
  at::Tensor forward(const at::Tensor& tokens);

  const GptOptions& options() const { return options_; }

 private:
  void initialize_parameters();

  GptOptions options_;
  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

}  // namespace zero::examples
