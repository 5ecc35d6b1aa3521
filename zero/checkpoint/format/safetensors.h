// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The safetensors format: 8 bytes of length, a JSON header of that length, and
// the bytes of all tensors. Python's `safetensors` package reads what this
// writes, and this reads what that writes.
//
// Reading trusts nothing: headers above 100 MB, nesting, names given twice, overflowing shapes, and
// tensors that overlap, leave holes or do not end with the file are c10::Error, before anything of
// that size is allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"

namespace zero {

inline constexpr uint64_t kSafetensorsHeaderLimit = 100'000'000;
inline constexpr uint64_t kSafetensorsLengthBytes = 8;

struct StoredTensor {
  std::string name;
  // Undefined where a file that was read has a dtype unknown here: its bytes are not compared with
  // its shape.
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // in the file
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // by `begin`
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // in the file

  // Null when there is none.
  const StoredTensor* find(const std::string& name) const;
};

// Returns whether the format has a name for `dtype`.
bool safetensors_knows(c10::ScalarType dtype);

// `json` is the header alone; `path` is for errors.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           const std::string& path);
SafetensorsHeader read_safetensors_header(StoredBytes& file);
// The length and the header.
std::string read_safetensors_beginning(StoredBytes& file);

// Returns the path of each tensor's file, by its name, from an index as Hugging Face writes it:
// {"weight_map": {"h.0.weight": "model-00001-of-00002.safetensors"}}. Throws for a file that is not
// in the folder of the index.
std::map<std::string, std::string> read_safetensors_index(StoredBytes& file);

// Returns the beginning of a file of `tensors`: the length and the header. Puts `tensors` into the
// order in which they are stored, wide dtypes first, so that every tensor is aligned to its dtype,
// and sets `begin` and `end`. `path` is for errors.
std::string lay_out_safetensors(std::vector<StoredTensor>& tensors,
                                const std::map<std::string, std::string>& metadata,
                                const std::string& path);

// Writes one file, tensors one after another.
//
//   SafetensorsWriter writer(path, {{"a", at::kFloat, {2, 3}}, {"b", at::kLong, {1}}}, {});
//   for (const StoredTensor& t : writer.tensors()) writer.write(bytes_of(t.name), size_of(t.name));
//   writer.finish();
class SafetensorsWriter {
 public:
  // Writes the header. Of `tensors`, `begin` and `end` are ignored.
  SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors,
                    const std::map<std::string, std::string>& metadata);

  // In the order they must be written, that of lay_out_safetensors().
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // The bytes of the next tensor, in host memory.
  void write(const void* data, uint64_t bytes);
  // Waits until the file is on disk.
  void finish();

 private:
  FileWriter file_;
  std::vector<StoredTensor> tensors_;
  size_t next_ = 0;
};

}  // namespace zero
