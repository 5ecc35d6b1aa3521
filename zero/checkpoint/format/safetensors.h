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
#include <functional>
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

// The files behind one path. Opens those whose tensors are asked for.
class SafetensorsFiles {
 public:
  struct File {
    explicit File(const std::string& path);

    FileReader reader;
    std::map<std::string, StoredTensor> tensors;
    std::map<std::string, std::string> metadata;
  };

  // A tensor of the files; `tensor` is null for none.
  struct Source {
    at::Tensor read() const;

    File* file = nullptr;
    const StoredTensor* tensor = nullptr;
  };

  // `path` is one file, or an index (*.json) of files in its folder.
  explicit SafetensorsFiles(const std::string& path);

  // Throws where the index names a file that has no such tensor.
  Source find(const std::string& name);
  // The file of each tensor.
  const std::map<std::string, std::string>& names() const { return path_of_; }
  // The metadata of the first file by name among those that are open; if none is, opens the file
  // of the first tensor by name. None without tensors.
  std::map<std::string, std::string> metadata();
  uint64_t bytes_read() const;

 private:
  File& open(const std::string& path) { return files_.try_emplace(path, path).first->second; }

  std::map<std::string, std::string> path_of_;
  std::map<std::string, File> files_;
  uint64_t bytes_of_index_ = 0;
};

// A tensor that write_safetensors_files() writes.
struct TensorToWrite {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> read;  // of this dtype and shape, on the host, in any memory order
};

// Writes the file `path`, or, where tensors have more than `max_file_bytes` together (0: no limit),
// "<path without .safetensors>-00001-of-00003.safetensors" and so on, in the order of `tensors`,
// and the index "<path>.index.json". Each file has `metadata`. A tensor above the limit has a file
// of its own. Returns the path to read from: `path` or the index.
//
// Files are written under hidden names ".<name>.<random>.saving" and get theirs when all are on
// disk, the index last. Throws, before anything is written, when any of them exists, or `path`, or
// its index; for a path that ends in ".json"; and for an index that readers refuse: above 100 MB,
// or with a name that is not UTF-8.
std::string write_safetensors_files(const std::string& path,
                                    const std::vector<TensorToWrite>& tensors,
                                    const std::map<std::string, std::string>& metadata,
                                    int64_t max_file_bytes);

}  // namespace zero
