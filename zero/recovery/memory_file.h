// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A file of a checkpoint in host memory, byte for byte as a save would write it, so that what is
// read from it goes through the reader of checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/hashed_file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/writer.h"

namespace zero {

// Immutable once it is whole.
struct MemoryFile {
  ManifestFile about;
  at::Tensor bytes;  // [about.bytes] of kByte
};

// Fills a file with tensors, in any order.
class MemoryFileWriter {
 public:
  // Lays `file` out; `id` is that of its checkpoint. allocate(bytes) returns the memory.
  MemoryFileWriter(FileToSave file, const std::string& id,
                   const std::function<at::Tensor(int64_t bytes)>& allocate);

  size_t count() const { return file_.tensors.size(); }
  // Copies a tensor, as the file was given, from any device.
  void copy(size_t tensor);
  // After all copies. Hashes what was copied.
  MemoryFile finish();

 private:
  FileToSave file_;
  std::vector<StoredTensor> places_;  // in the order of the file
  std::vector<size_t> place_of_;      // of each tensor as given
  at::Tensor bytes_;
};

// Parts of a file, or all of it, for CheckpointReader.
class MemoryReader final : public StoredBytes {
 public:
  // `parts` are 1-D of kByte, by where they begin; they do not overlap.
  MemoryReader(std::string path, uint64_t size, std::map<uint64_t, at::Tensor> parts)
      : StoredBytes(std::move(path), size), parts_(std::move(parts)) {}

  // Throws for bytes that are not in one of the parts.
  void read(uint64_t offset, void* data, size_t bytes) override;

 private:
  const std::map<uint64_t, at::Tensor> parts_;
};

}  // namespace zero
