// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/plan/model_shapes.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace zero::examples {
namespace {

class Builder {
 public:
  void add(const std::string& name, int64_t rows, int64_t columns = 1, bool expert = false) {
    model_.parameters.push_back({name, rows * columns, expert});
  }
  // With a bias.
  void linear(const std::string& name, int64_t out, int64_t in) {
    add(name + ".weight", out, in);
    add(name + ".bias", out);
  }
  void layer_norm(const std::string& name, int64_t width) {
    add(name + ".weight", width);
    add(name + ".bias", width);
  }
  ModelShape finish(int64_t experts) {
    model_.experts = experts;
    return std::move(model_);
  }

 private:
  ModelShape model_;
};

ModelShape gpt2() {
  constexpr int64_t kWidth = 768;
  Builder model;
  model.add("wte", 50257, kWidth);
  model.add("wpe", 1024, kWidth);
  for (int layer = 0; layer < 12; ++layer) {
    const std::string prefix = "h." + std::to_string(layer) + ".";
    model.layer_norm(prefix + "ln_1", kWidth);
    model.linear(prefix + "attn.c_attn", 3 * kWidth, kWidth);
    model.linear(prefix + "attn.c_proj", kWidth, kWidth);
    model.layer_norm(prefix + "ln_2", kWidth);
    model.linear(prefix + "mlp.c_fc", 4 * kWidth, kWidth);
    model.linear(prefix + "mlp.c_proj", kWidth, 4 * kWidth);
  }
  model.layer_norm("ln_f", kWidth);
  return model.finish(0);
}

// The model of `//examples:benchmark -- --workload mlp25m`, which was measured.
ModelShape mlp25m() {
  Builder model;
  for (int layer = 0; layer < 24; ++layer) model.linear(std::to_string(layer), 1024, 1024);
  return model.finish(0);
}

// The numbers in which models of the Llama family differ; Mixtral is one of them with experts.
struct Llama {
  int64_t vocabulary, width, layers, hidden, key_value_width, experts;
};

ModelShape llama(const Llama& shape) {
  Builder model;
  model.add("embed_tokens", shape.vocabulary, shape.width);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    model.add(prefix + "attn.q", shape.width, shape.width);
    model.add(prefix + "attn.k", shape.key_value_width, shape.width);
    model.add(prefix + "attn.v", shape.key_value_width, shape.width);
    model.add(prefix + "attn.o", shape.width, shape.width);
    if (shape.experts > 0) model.add(prefix + "gate", shape.experts, shape.width);
    for (int64_t e = 0; e < std::max<int64_t>(shape.experts, 1); ++e) {
      const bool expert = shape.experts > 0;
      const std::string mlp = prefix + "mlp" + (expert ? "." + std::to_string(e) : "");
      model.add(mlp + ".gate", shape.hidden, shape.width, expert);
      model.add(mlp + ".up", shape.hidden, shape.width, expert);
      model.add(mlp + ".down", shape.width, shape.hidden, expert);
    }
    model.add(prefix + "attn_norm", shape.width);
    model.add(prefix + "mlp_norm", shape.width);
  }
  model.add("norm", shape.width);
  model.add("lm_head", shape.vocabulary, shape.width);
  return model.finish(shape.experts);
}

const std::map<std::string, Llama> kLlamas = {
    {"llama_7b", {32000, 4096, 32, 11008, 4096, 0}},
    {"llama_70b", {32000, 8192, 80, 28672, 1024, 0}},
    {"llama3_405b", {128256, 16384, 126, 53248, 1024, 0}},
    {"mixtral_8x7b", {32000, 4096, 32, 14336, 1024, 8}},
};

}  // namespace

int64_t ModelShape::numel() const {
  int64_t sum = 0;
  for (const ParameterShape& parameter : parameters) sum += parameter.numel;
  return sum;
}

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = {"mlp25m",    "gpt2",        "llama_7b",
                                                 "llama_70b", "llama3_405b", "mixtral_8x7b"};
  return names;
}

ModelShape model_shape(const std::string& name) {
  if (name == "mlp25m") return mlp25m();
  if (name == "gpt2") return gpt2();
  const auto found = kLlamas.find(name);
  TORCH_CHECK(found != kLlamas.end(), "model: expected one of ",
              c10::ArrayRef<std::string>(model_names()), ", got ", name);
  return llama(found->second);
}

ModelShape read_shapes(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file.good(), "cannot read ", path);
  ModelShape model;
  std::set<std::string> names;
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::istringstream words(line);
    ParameterShape parameter;
    if (!(words >> parameter.name) || parameter.name.front() == '#') continue;
    TORCH_CHECK(names.insert(parameter.name).second, path, ", line ", number,
                ": expected different names, got ", parameter.name, " twice");
    parameter.numel = 1;
    // Far below what 64 bits hold, so that sums over the model and its ranks fit as well.
    constexpr int64_t kMost = int64_t{1} << 50;
    for (int64_t size = 0; words >> size; parameter.numel *= size) {
      TORCH_CHECK(size >= 0 && (size == 0 || parameter.numel <= kMost / size), path, ", line ",
                  number, ": expected sizes of at most 2^50 elements together, got ", line);
    }
    TORCH_CHECK(words.eof(), path, ", line ", number,
                ": expected a name and whole numbers between spaces, got ", line);
    model.parameters.push_back(std::move(parameter));
  }
  TORCH_CHECK(file.eof(), "cannot read ", path);
  TORCH_CHECK(model.numel() > 0, path, ": expected a parameter with elements, got none");
  return model;
}

}  // namespace zero::examples
