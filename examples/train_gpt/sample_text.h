// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Text from a trained model, one byte after another.
#pragma once

#include <cstdint>
#include <string>

#include "examples/train_gpt/gpt.h"

namespace zero::examples {

struct SampleOptions {
  int64_t bytes = 400;       // to add to the prompt
  double temperature = 0.8;  // below 1 likelier bytes, above 1 wilder ones
  uint64_t seed = 0;
};

// `prompt`, which must not be empty, and what the model adds to it. Sends
// nothing: one rank may call it alone.
std::string sample_text(Gpt& model, const std::string& prompt, const SampleOptions& options);

// `text` with every byte that a terminal might not like as a dot.
std::string printable(const std::string& text);

}  // namespace zero::examples
