// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/sample_text.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace zero::examples {

std::string sample_text(Gpt& model, const std::string& prompt, const SampleOptions& options) {
  TORCH_CHECK(!prompt.empty(), "expected a prompt of at least one byte, got an empty one");
  const c10::NoGradGuard no_grad;
  // A generator of its own: sampling leaves the run's random numbers alone.
  const at::Generator generator = at::detail::createCPUGenerator(options.seed);
  const at::Device device = model->parameters().front().device();
  std::string text = prompt;
  for (int64_t i = 0; i < options.bytes; ++i) {
    const auto time =
        std::min<int64_t>(static_cast<int64_t>(text.size()), model->options().context);
    at::Tensor tokens = at::empty({1, time}, at::kLong);
    std::transform(text.end() - time, text.end(), tokens.mutable_data_ptr<int64_t>(),
                   [](char c) { return static_cast<unsigned char>(c); });
    const at::Tensor logits = model(tokens.to(device)).select(1, time - 1) / options.temperature;
    if (!logits.isfinite().all().item<bool>()) return text + "[not finite]";
    const at::Tensor next =
        at::multinomial(at::softmax(logits.cpu(), -1), 1, /*replacement=*/false, generator);
    text.push_back(static_cast<char>(next.item<int64_t>()));
  }
  return text;
}

std::string printable(const std::string& text) {
  std::string result = text;
  std::replace_if(
      result.begin(), result.end(),
      [](char c) { return (c < ' ' && c != '\n' && c != '\t') || c > '~'; }, '.');
  return result;
}

}  // namespace zero::examples
