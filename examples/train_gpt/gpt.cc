// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/gpt.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <string>

namespace zero::examples {

namespace {

torch::nn::LayerNorm layer_norm(const GptOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}));
}

}  // namespace

GptBlockImpl::GptBlockImpl(const GptOptions& options)
    : heads_(options.heads),
      dropout_(options.dropout),
      attention_norm_(register_module("attention_norm", layer_norm(options))),
      query_key_value_(
          register_module("query_key_value", torch::nn::Linear(options.width, 3 * options.width))),
      attention_out_(
          register_module("attention_out", torch::nn::Linear(options.width, options.width))),
      feed_forward_norm_(register_module("feed_forward_norm", layer_norm(options))),
      feed_forward_in_(
          register_module("feed_forward_in", torch::nn::Linear(options.width, 4 * options.width))),
      feed_forward_out_(register_module("feed_forward_out",
                                        torch::nn::Linear(4 * options.width, options.width))) {}

at::Tensor GptBlockImpl::attend(const at::Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t width = x.size(2);
  // [batch, time, 3 * width] -> [3, batch, heads, time, width / heads]
  const at::Tensor parts =
      query_key_value_(x).view({batch, time, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const at::Tensor mixed =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return attention_out_(mixed.transpose(1, 2).reshape({batch, time, width}));
}

at::Tensor GptBlockImpl::forward(const at::Tensor& x) {
  const auto drop = [this](const at::Tensor& y) { return at::dropout(y, dropout_, is_training()); };
  const at::Tensor attended = x + drop(attend(attention_norm_(x)));
  return attended +
         drop(feed_forward_out_(at::gelu(feed_forward_in_(feed_forward_norm_(attended)))));
}

GptImpl::GptImpl(const GptOptions& options)
    : options_(options),
      token_embedding_(register_module("token_embedding",
                                       torch::nn::Embedding(options.vocabulary, options.width))),
      position_embedding_(register_module("position_embedding",
                                          torch::nn::Embedding(options.context, options.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      norm_(register_module("norm", layer_norm(options))),
      head_(register_module(
          "head", torch::nn::Linear(
                      torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)))) {
  TORCH_CHECK(options.heads > 0 && options.width % options.heads == 0,
              "expected a width that is a ", "multiple of the number of heads, got width ",
              options.width, " and ", options.heads, " heads");
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    blocks_->push_back(GptBlock(options));
  }
  initialize_parameters();
}

void GptImpl::initialize_parameters() {
  const c10::NoGradGuard no_grad;
  // Every layer adds two terms to the residual stream. Shrinking what writes to
  // it keeps the stream's variance the same for any depth.
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(options_.layers));
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    const bool writes_residual = name.ends_with("_out.weight");
    if (item.value().dim() > 1) {
      item.value().normal_(0.0, writes_residual ? residual_std : 0.02);
    } else if (name.ends_with("bias")) {
      item.value().zero_();
    }
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const int64_t time = tokens.size(1);
  TORCH_CHECK(time <= options_.context, "expected at most ", options_.context,
              " tokens a sequence, got ", time, "; cut the input or build a longer model");
  at::Tensor x = token_embedding_(tokens) + position_embedding_(at::arange(time, tokens.options()));
  x = at::dropout(x, options_.dropout, is_training());
  for (const auto& block : *blocks_) {
    x = block->as<GptBlockImpl>()->forward(x);
  }
  return head_(norm_(x)).to(at::kFloat);
}

}  // namespace zero::examples
