// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/seed_checkpoint.h"

#include <ATen/ops/empty.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/stored_file.h"

namespace zero {
namespace {

// Both pieces of a parameter, and what a saver stores beside them. Steps of all pieces must agree,
// so every tensor counts from zero.
FileToSave seed_file() {
  FileToSave file{"rank-00000.safetensors", {}};
  const auto add = [&](const std::string& owner, const char* kind, int64_t begin, int64_t numel,
                       c10::ScalarType dtype, std::vector<int64_t> shape) {
    const at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(dtype));
    auto* const bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) bytes[i] = static_cast<uint8_t>(i);
    file.tensors.push_back({{owner, kind, begin, numel}, tensor});
  };
  for (const auto& [begin, numel] : {std::pair<int64_t, int64_t>{0, 4}, {4, 2}}) {
    add("w", "master", begin, numel, c10::kFloat, {numel});
    add("w", "exp_avg", begin, numel, c10::kFloat, {numel});
    add("w", "step", begin, numel, c10::kLong, {1});
  }
  add("f", "frozen", 0, 2, c10::kHalf, {2});
  add("b", "buffer", 0, 1, c10::kLong, {});
  add("c", "buffer", 0, 3, c10::kByte, {24});  // as dtypes travel that safetensors lacks
  add(".s", "state", 0, 5, c10::kByte, {5});
  add(".r", "state of rank 0", 0, 0, c10::kByte, {0});
  return file;
}

}  // namespace

Manifest write_seed_file(const std::string& folder) {
  Manifest m;
  m.id = "0123456789abcdef";
  m.library_version = "0.1";
  m.torch_version = "2";
  m.world_size = 1;
  m.stage = 2;
  m.layout = "contiguous";
  m.optimizer = "AdamW";
  m.steps = 3;
  m.groups = {{{"lr", 0.5}, {"amsgrad", 0.0}}};
  m.parameters = {{"w", {2, 3}, {1, 2}, c10::kBFloat16, 0}};
  m.frozen = {{"f", {2}, {}, c10::kHalf, 0}};
  m.buffers = {{"b", {}, {}, c10::kLong, 0}, {"c", {3, 1}, {}, c10::kLong, 0}};
  m.metadata = {{"epoch", "3"}};

  const FileToSave file = seed_file();
  add_files({write_file(file, folder + "/" + file.name, m.id)}, m);
  return m;
}

std::string with_checksum(std::string body) {
  if (!body.empty()) body.back() = ',';
  body += '\n';
  return body + "\"xxh3\": \"" + hash_text(content_hash(body.data(), body.size())) + "\"}\n";
}

std::string without_checksum(const Manifest& manifest) {
  std::string text = manifest_text(manifest);
  text.resize(text.find(",\n\"xxh3\""));
  return text + "}";
}

}  // namespace zero
