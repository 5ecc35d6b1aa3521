// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sizes of the parameters of well-known models, or of those that a file names, in registration
// order: enough to plan a job without building one tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero::examples {

struct ParameterShape {
  std::string name;
  int64_t numel = 0;
  bool expert = false;  // one of several experts of its layer, which may live on other ranks
};

struct ModelShape {
  std::vector<ParameterShape> parameters;
  int64_t experts = 0;  // of each layer that has any
  int64_t numel() const;
};

// mlp25m, gpt2 (124M, head tied to the embedding), llama_7b, llama_70b, llama3_405b or
// mixtral_8x7b.
const std::vector<std::string>& model_names();
// Throws c10::Error for another name.
ModelShape model_shape(const std::string& name);

// The model of a text file with a line for each parameter: its name and its sizes, none for a
// scalar, between spaces. Empty lines and lines that begin with # do not count. No parameter is an
// expert. Throws c10::Error, with the number of the line, for any other.
ModelShape read_shapes(const std::string& path);

}  // namespace zero::examples
