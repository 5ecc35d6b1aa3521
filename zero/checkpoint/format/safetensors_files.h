// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Tensors by name in one safetensors file, or in several with an index as Hugging Face writes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {

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
