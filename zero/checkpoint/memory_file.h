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
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/hashed_file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/shard_copies.h"
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

  // The copies to be made, tensor by tensor as the file was given; their buckets are not set.
  std::vector<ShardCopies::Copy> copies() const;
  // After all copies. Hashes what was copied.
  MemoryFile finish();

 private:
  FileToSave file_;
  std::vector<StoredTensor> places_;  // in the order of the file
  std::vector<size_t> place_of_;      // of each tensor as given
  at::Tensor bytes_;
};

}  // namespace zero
