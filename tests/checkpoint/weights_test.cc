// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Weights of other programs fill a model: all that was asked for, or nothing and an error.
#include "zero/checkpoint.h"

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

// A head whose weight is that of the embedding, and a counter.
struct TiedModel : torch::nn::Module {
  TiedModel() {
    register_module("embedding", embedding);
    register_parameter("head", embedding->weight);
    register_module("linear", linear);
    counter = register_buffer("counter", at::zeros({1}, at::kLong));
  }

  torch::nn::Embedding embedding{5, 3};
  torch::nn::Linear linear{3, 2};
  at::Tensor counter;
};

Tensors weights_of_tied_model() {
  return {{"embedding.weight", random_tensor({5, 3}, 1)},
          {"linear.weight", random_tensor({2, 3}, 2)},
          {"linear.bias", random_tensor({2}, 3)},
          {"counter", at::full({1}, 7, at::kLong)}};
}

std::string write(const std::string& path, const Tensors& tensors) {
  std::filesystem::remove(path);
  std::vector<TensorToWrite> to_write;
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.second;
    to_write.push_back(
        {item.first, tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor; }});
  }
  return write_safetensors_files(path, to_write, {{"format", "pt"}}, /*max_file_bytes=*/0);
}

std::string write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  return path;
}

// A header with `data_bytes` zeros behind it.
std::string write_raw(const std::string& path, const std::string& header, size_t data_bytes) {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  return write_text(path, length + header + std::string(data_bytes, '\0'));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& rest) {
  return "\"" + name + R"(":{"dtype":")" + dtype + "\"," + rest + "}";
}

NamedTensors list_of(const Tensors& tensors) {
  NamedTensors list;
  for (const auto& [name, tensor] : tensors) list.insert(name, tensor);
  return list;
}

// All tensors of a model, and of the next call: whether no bit of them has changed.
class Unchanged {
 public:
  explicit Unchanged(const torch::nn::Module& module) : module_(module) {
    for (const at::Tensor& t : tensors()) before_.push_back(t.detach().clone());
  }
  ~Unchanged() {
    const auto now = tensors();
    for (size_t i = 0; i < now.size(); ++i) {
      EXPECT_TRUE(now[i].equal(before_[i])) << "a refused load has changed a tensor";
    }
  }

 private:
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> result = module_.parameters();
    for (const at::Tensor& t : module_.buffers()) result.push_back(t);
    return result;
  }

  const torch::nn::Module& module_;
  std::vector<at::Tensor> before_;
};

std::string refusal(torch::nn::Module& module, const std::string& path,
                    const WeightOptions& options = {}) {
  const Unchanged unchanged(module);
  const std::string error = error_of([&] { load_weights(module, path, options); });
  EXPECT_NE(error.find(std::filesystem::path(path).filename().string()), std::string::npos)
      << "no path in: " << error;
  return error;
}

TEST(WeightsTest, EachFloatingDtypeFillsEachOtherRounded) {
  const std::string folder = fresh_folder("dtypes");
  const at::Tensor values = random_tensor({3, 7}, 1).to(at::kDouble);
  for (const auto stored : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    const std::string path =
        write(folder + "/" + c10::toString(stored), {{"x", values.to(stored)}});
    for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor x = at::zeros({3, 7}, dtype).requires_grad_();
      const WeightReport report = load_weights(list_of({{"x", x}}), path);
      EXPECT_TRUE(x.detach().equal(values.to(stored).to(dtype))) << stored << " to " << dtype;
      EXPECT_EQ(report.bytes_read, std::filesystem::file_size(path));
      EXPECT_TRUE(x.is_leaf() && x.grad_fn() == nullptr);
    }
  }
}

TEST(WeightsTest, IntegersAreConvertedAndQuantizedWeightsRefused) {
  const std::string path = fresh_folder("integers") + "/model.safetensors";
  TiedModel model;
  Tensors weights = weights_of_tied_model();
  load_weights(model, write(path, weights));
  EXPECT_EQ(model.counter.item<int64_t>(), 7);
  // Module::to(dtype) converts counters too.
  for (const auto dtype : {at::kInt, at::kFloat}) {
    weights["counter"] = at::full({1}, 8, dtype);
    model.counter.zero_();
    load_weights(model, write(path, weights));
    EXPECT_EQ(model.counter.item<int64_t>(), 8) << dtype;
  }
  for (const auto dtype : {at::kChar, at::kByte}) {
    weights["linear.weight"] = at::ones({2, 3}, dtype);
    expect_words(refusal(model, write(path, weights)),
                 {"linear.weight: expected a dtype that converts to Float, got", "quantized"});
  }
  const at::Tensor bytes = at::zeros({2, 3}, at::kByte);
  load_weights(list_of({{"linear.weight", bytes}}), path, WeightOptions().allow_unexpected(true));
  EXPECT_EQ(bytes.sum().item<int64_t>(), 6);
}

TEST(WeightsTest, AMapNamesTheTensorsOfTheFiles) {
  const std::string path =
      write(fresh_folder("names") + "/model.safetensors",
            {{"model.a", at::full({2}, 1.0)}, {"model.b", at::full({2}, 2.0)}});
  const Tensors tensors = {{"a", at::zeros({2})},
                           {"a_again", at::zeros({2})},
                           {"b", at::zeros({2})},
                           {"new", at::full({2}, 9.0)}};
  load_weights(list_of(tensors), path,
               WeightOptions().name_in_files([](const std::string& name) -> std::string {
                 if (name == "new") return "";
                 return name == "a_again" ? "model.a" : "model." + name;
               }));
  EXPECT_EQ(tensors.at("a")[1].item<float>(), 1.0f);
  EXPECT_EQ(tensors.at("a_again")[1].item<float>(), 1.0f);
  EXPECT_EQ(tensors.at("b")[1].item<float>(), 2.0f);
  EXPECT_EQ(tensors.at("new")[1].item<float>(), 9.0f);
}

TEST(WeightsTest, NamesThatAreMissingOrUnexpectedAreRefusedOrReported) {
  const std::string path = fresh_folder("missing") + "/model.safetensors";
  TiedModel model;
  Tensors weights = weights_of_tied_model();
  weights.erase("linear.bias");
  weights["mask"] = at::ones({4, 4});
  write(path, weights);
  const std::vector<std::string> missing = {"linear.bias: in the model, missing in the files",
                                            "name_in_files()", "allow_missing(true)"};
  const std::vector<std::string> unexpected = {"mask: in the files, missing in the model",
                                               "allow_unexpected(true)"};
  expect_words(refusal(model, path), missing);
  expect_words(refusal(model, path), unexpected);
  expect_words(refusal(model, path, WeightOptions().allow_unexpected(true)), missing);
  expect_words(refusal(model, path, WeightOptions().allow_missing(true)), unexpected);
  const at::Tensor bias = model.linear->bias.detach().clone();
  const WeightReport report =
      load_weights(model, path, WeightOptions().allow_missing(true).allow_unexpected(true));
  EXPECT_EQ(report.missing, std::vector<std::string>{"linear.bias"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"mask"});
  EXPECT_TRUE(model.linear->bias.equal(bias));
  EXPECT_TRUE(model.linear->weight.equal(weights["linear.weight"]));
}

TEST(WeightsTest, TheFirstTenDifferencesAreListed) {
  Tensors weights;
  for (int i = 0; i < 12; ++i) weights["x" + std::to_string(100 + i)] = at::zeros({1});
  const std::string path = write(fresh_folder("ten") + "/model.safetensors", weights);
  const std::string error = error_of([&] { load_weights(NamedTensors(), path); });
  expect_words(error, {"got 12 differences", "x109"});
  EXPECT_EQ(error.find("x110"), std::string::npos) << error;
}

TEST(WeightsTest, TiedTensorsNeedOneOfTheirNames) {
  const std::string path = fresh_folder("tied") + "/model.safetensors";
  Tensors weights = weights_of_tied_model();
  // Under the first name, the second, and both.
  const at::Tensor values = weights["embedding.weight"];
  for (const auto& names : std::vector<std::vector<std::string>>{
           {"embedding.weight"}, {"head"}, {"embedding.weight", "head"}}) {
    weights.erase("head");
    weights.erase("embedding.weight");
    for (const std::string& name : names) weights[name] = values;
    TiedModel model;
    const WeightReport report = load_weights(model, write(path, weights));
    EXPECT_EQ(report.tied.size(), 1u);
    EXPECT_TRUE(report.missing.empty());
    EXPECT_TRUE(model.embedding->weight.equal(values));
  }
  // Both, with other values: which of them is meant?
  weights["head"] = values + 1;
  TiedModel model;
  write(path, weights);
  const std::vector<std::string> words = {"ties it, got others", "name_in_files()"};
  expect_words(refusal(model, path), words);
  expect_words(refusal(model, path, WeightOptions().allow_missing(true).allow_unexpected(true)),
               words);
  // Neither: one name is missing, and so is the other.
  weights.erase("head");
  weights.erase("embedding.weight");
  write(path, weights);
  EXPECT_EQ(load_weights(model, path, WeightOptions().allow_missing(true)).missing.size(), 2u);
}

TEST(WeightsTest, AnotherShapeIsRefusedAndSaysWhatToDo) {
  const std::string path = fresh_folder("shapes") + "/model.safetensors";
  TiedModel model;
  Tensors weights = weights_of_tied_model();
  weights["linear.weight"] = weights["linear.weight"].t();
  const WeightOptions all = WeightOptions().allow_missing(true).allow_unexpected(true);
  for (const WeightOptions& options : {WeightOptions(), all}) {
    expect_words(refusal(model, write(path, weights), options),
                 {"linear.weight: expected shape [2, 3] as in the model, got [3, 2]",
                  "its transpose", "tensor.t()"});
  }
  weights["linear.weight"] = at::zeros({6, 3});
  const std::string error = refusal(model, write(path, weights));
  expect_words(error,
               {"linear.weight: expected shape [2, 3] as in the model, got [6, 3]", "a view"});
  EXPECT_EQ(error.find("transpose"), std::string::npos) << error;
  weights["linear.weight"] = at::zeros({6});
  expect_words(refusal(model, write(path, weights)), {"got [6]"});
}

TEST(WeightsTest, ViewsInAListTakeTransposesAndPartsOfFusedMatrices) {
  const at::Tensor square = random_tensor({3, 3}, 1), tall = random_tensor({4, 3}, 2);
  const at::Tensor query = random_tensor({2, 3}, 3), key = random_tensor({2, 3}, 4);
  const std::string path =
      write(fresh_folder("views") + "/model.safetensors",
            {{"square", square}, {"tall", tall}, {"query", query}, {"key", key}});
  torch::nn::Linear a(3, 3), b(4, 3), fused(3, 4);
  const auto version = fused->weight._version();
  load_weights(list_of({{"square", a->weight.t()},
                        {"tall", b->weight.t()},
                        {"query", fused->weight.narrow(0, 0, 2)},
                        {"key", fused->weight.narrow(0, 2, 2)}}),
               path);
  EXPECT_TRUE(a->weight.equal(square.t()));
  EXPECT_TRUE(b->weight.equal(tall.t()));
  EXPECT_TRUE(fused->weight.narrow(0, 0, 2).equal(query));
  EXPECT_TRUE(fused->weight.narrow(0, 2, 2).equal(key));
  EXPECT_GT(fused->weight._version(), version) << "autograd would not notice";
}

TEST(WeightsTest, ATensorWithoutMemoryOfItsOwnIsRefused) {
  const std::string path = write(fresh_folder("meta") + "/model.safetensors",
                                 {{"a", at::ones({2})}, {"b", at::ones({2})}});
  const at::Tensor a = at::zeros({2});
  for (const at::Tensor& b :
       {at::zeros({1}).expand({2}), at::empty({2}, at::TensorOptions().device(at::kMeta)),
        at::_efficientzerotensor({2})}) {
    expect_words(error_of([&] {
                   load_weights(list_of({{"a", a}, {"b", b}}), path);
                 }),
                 {"b: expected memory for each element"});
    EXPECT_EQ(a.sum().item<float>(), 0.0f) << "a refused load has changed a tensor";
  }
}

TEST(WeightsTest, ABufferMadeUnderInferenceModeIsFilledLikeTheOthers) {
  torch::nn::Linear model{3, 2};
  {
    const c10::InferenceMode mode;
    model->register_buffer("table", at::zeros({4}));
  }
  const Tensors stored = {{"bias", random_tensor({2}, 1)},
                          {"table", random_tensor({4}, 2)},
                          {"weight", random_tensor({2, 3}, 3)}};
  load_weights(*model, write(fresh_folder("inference") + "/model.safetensors", stored));
  EXPECT_TRUE(model->bias.equal(stored.at("bias")));
  EXPECT_TRUE(model->named_buffers()["table"].equal(stored.at("table")));
  EXPECT_TRUE(model->weight.equal(stored.at("weight")));
  EXPECT_FALSE(model->weight.is_inference());
}

TEST(WeightsTest, TensorsThatWereNotAskedForMayHaveAnyDtype) {
  const std::string path = fresh_folder("unknown") + "/model.safetensors";
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  const std::string weight = R"("shape":[1,2],"data_offsets":[0,8])";
  write_raw(path,
            "{" + entry("weight", "F32", weight) + "," +
                entry("scales", "F8_E4M3", R"("shape":[4],"data_offsets":[8,12])") + "}",
            12);
  expect_words(refusal(*linear, path), {"scales: in the files, missing in the model"});
  const WeightReport report = load_weights(*linear, path, WeightOptions().allow_unexpected(true));
  EXPECT_EQ(report.unexpected.size(), 1u);
  EXPECT_TRUE(linear->weight.equal(at::zeros({1, 2})));
  EXPECT_EQ(report.bytes_read, std::filesystem::file_size(path) - 4) << "not what it needs alone";
  write_raw(path, "{" + entry("weight", "C64", weight) + "}", 8);
  expect_words(refusal(*linear, path), {"weight: expected a dtype that is known here"});
}

// Of two pipeline stages, one has its own part of the model.
TEST(WeightsTest, AnIndexOpensTheFilesOfTheTensorsThatTheModelHas) {
  const std::string folder = fresh_folder("index");
  const at::Tensor a = random_tensor({4}, 1), b = random_tensor({4}, 2);
  write(folder + "/1.safetensors", {{"a", a}, {"b", b}});
  // As in Hugging Face's cache, a link.
  std::filesystem::create_directory(folder + "/blobs");
  std::filesystem::rename(folder + "/1.safetensors", folder + "/blobs/0123");
  std::filesystem::create_symlink("blobs/0123", folder + "/1.safetensors");
  const std::string index =
      write_text(folder + "/model.safetensors.index.json",
                 R"({"metadata":{"total_size":48},"weight_map":{"a":"1.safetensors",)"
                 R"("b":"1.safetensors","c":"2.safetensors"}})");
  const Tensors stage = {{"a", at::zeros({4})}, {"b", at::zeros({4})}};
  const WeightReport report =
      load_weights(list_of(stage), index, WeightOptions().allow_unexpected(true));
  EXPECT_TRUE(stage.at("a").equal(a));
  EXPECT_TRUE(stage.at("b").equal(b));
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"c"});
  EXPECT_EQ(report.bytes_read, std::filesystem::file_size(index) +
                                   std::filesystem::file_size(folder + "/1.safetensors"));
  // A file that is needed is missing, or lacks what the index says; a and b stay as they are.
  stage.at("a").zero_();
  const Tensors all = {{"a", stage.at("a")}, {"c", at::zeros({4})}};
  const WeightOptions some = WeightOptions().allow_unexpected(true);
  expect_words(error_of([&] { load_weights(list_of(all), index, some); }),
               {"2.safetensors: No such file"});
  write(folder + "/2.safetensors", {{"d", a}});
  expect_words(error_of([&] { load_weights(list_of(all), index, some); }),
               {"2.safetensors: expected the tensor c, which the index says is in it"});
  EXPECT_TRUE(stage.at("a").equal(at::zeros({4})));
}

TEST(WeightsTest, MoreFilesThanCanBeOpenAreRead) {
  constexpr int kFiles = 300;
  const std::string folder = fresh_folder("many");
  std::string index = "{\"weight_map\":{";
  Tensors tensors;
  for (int i = 0; i < kFiles; ++i) {
    const std::string name = std::to_string(i);
    write(folder + "/" + name, {{name, at::full({1}, 1.0 * i)}});
    index += (i > 0 ? ",\"" : "\"") + name + "\":\"" + name + "\"";
    tensors[name] = at::zeros({1});
  }
  write_text(folder + "/index.json", index + "}}");
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{128, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  const std::string error =
      error_of([&] { load_weights(list_of(tensors), folder + "/index.json"); });
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(error, "");
  EXPECT_EQ(tensors["299"].item<float>(), 299.0f);
}

TEST(WeightsTest, HostileFilesAreRefused) {
  const std::string path = fresh_folder("hostile") + "/model.safetensors";
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  const std::string shape = R"("shape":[1,2],)", x = R"("shape":[2],)";
  const auto weight = [&](const std::string& offsets) {
    return entry("weight", "F32", shape + "\"data_offsets\":" + offsets);
  };
  const std::vector<std::tuple<std::string, size_t, std::string>> files = {
      {"{" + weight("[0,8]") + "}", 7, "place within 7 bytes"},
      {"{" + weight("[0,8]") + "}", 9, "up to the end"},
      {"{" + weight("[8,16]") + "}", 8, "place within 8 bytes"},
      {"{" + weight("[0,18446744073709551615]") + "}", 8, "place within"},
      {"{" + weight("[0,8]") + "," + entry("x", "F32", x + "\"data_offsets\":[4,12]") + "}", 12,
       "must not overlap"},
      {"{" + weight("[0,8]") + "," + entry("x", "F8", x + "\"data_offsets\":[10,12]") + "}", 12,
       "leave holes"},
      {"{" + weight("[0,8]") + "," +
           entry("weight", "I64", "\"shape\":[1],\"data_offsets\":[0,8]") + "}",
       8, "each name once in an object, got \"weight\" twice"},
      {"{" + entry("weight", "F32", "\"shape\":[4611686018427387904,4],\"data_offsets\":[0,8]") +
           "}",
       8, "fit 63 bits"},
      {std::string(100000, '['), 0, "levels"},
      {"{", 0, "JSON"},
  };
  for (const auto& [header, bytes, words] : files) {
    write_raw(path, header, bytes);
    for (const bool allow : {false, true}) {
      expect_words(refusal(*linear, path, WeightOptions().allow_unexpected(allow)), {words});
    }
  }
  // Longer than the file, or than any header may be.
  for (const unsigned char last : {0, 1, 255}) {
    write_text(path, std::string("\xff\xff\xff\xff\0\0\0", 7) + static_cast<char>(last) + "{}");
    expect_words(refusal(*linear, path), {"expected a header of at most"});
  }
  expect_words(refusal(*linear, write_text(path, "short")), {"truncated"});
  std::filesystem::remove(path);
  expect_words(refusal(*linear, path), {"No such file"});
  std::filesystem::create_directory(path);
  expect_words(refusal(*linear, path), {"as a file"});
}

TEST(WeightsTest, HostileIndexesAreRefused) {
  const std::string parent = fresh_folder("hostile_index"), folder = parent + "/model";
  std::filesystem::create_directory(folder);
  const at::Tensor values = at::ones({1, 2});
  write(parent + "/outside", {{"weight", values}});
  write(folder + "/inside", {{"weight", values}});
  const std::string path = folder + "/model.safetensors.index.json";
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  const auto index = [](const std::string& file) {
    return R"({"weight_map":{"weight":)" + file + "}}";
  };
  const std::vector<std::pair<std::string, std::string>> texts = {
      {index(R"("../outside")"), "a file in the folder of the index, got ../outside"},
      {index("\"" + parent + "/outside\""), "a file in the folder of the index"},
      {index(R"("sub/../../outside")"), "a file in the folder of the index"},
      {index(R"("..")"), "as a file"},
      {index(R"("")"), "as a file"},
      {index(R"("inside\u0000")"), "NUL"},
      {index("7"), "the name of its file"},
      {index(R"({"file":"inside"})"), "the name of its file"},
      {R"({"weight_map":{"weight":"inside","weight":"inside"}})", "each name once"},
      {R"({"weight_map":["inside"]})", "expected a weight_map"},
      {R"({"weights":{}})", "expected a weight_map"},
      {"[]", "in a JSON object, got none"},
      {"", "not JSON: [json.exception.parse_error"},
      {R"({"weight_map":)", "not JSON: [json.exception.parse_error"},
      {index(std::string(100000, '[')), "levels"},
  };
  for (const auto& [text, words] : texts) {
    write_text(path, text);
    const Unchanged unchanged(*linear);
    expect_words(error_of([&] { load_weights(*linear, path); }), {words});
  }
  write_text(path, "");
  std::filesystem::resize_file(path, kSafetensorsHeaderLimit + 1);
  expect_words(refusal(*linear, path), {"an index of at most"});
  load_weights(*linear, write_text(path, index(R"("inside")")));
  EXPECT_TRUE(linear->weight.equal(values));
}

TEST(WeightsTest, WhatRank0LoadsIsSentAndTrainedFrom) {
  const std::string path = fresh_folder("ranks") + "/model.safetensors";
  const at::Tensor weight = random_tensor({5, 7}, 1), bias = random_tensor({5}, 2);
  write(path, {{"weight", weight}, {"bias", bias}});
  run_ranks(3, [&](const Group& group) {
    torch::nn::Linear linear(7, 5);
    if (group.rank() == 0) load_weights(*linear, path);
    ZeroOptimizer optimizer(*linear, std::make_unique<torch::optim::SGD>(linear->parameters(), 0.5),
                            group);
    EXPECT_TRUE(linear->weight.equal(weight));
    EXPECT_TRUE(linear->bias.equal(bias));
    // A step changes the parameters; a second load, and the masters, bring them back.
    optimizer.backward(linear->forward(at::ones({2, 7})).sum());
    optimizer.step();
    EXPECT_FALSE(linear->weight.equal(weight));
    load_weights(*linear, path);
    optimizer.refresh_master_parameters();
    EXPECT_TRUE(linear->weight.equal(weight));
    EXPECT_TRUE(optimizer.master(linear->weight).equal(weight));
  });
}

}  // namespace
}  // namespace zero
