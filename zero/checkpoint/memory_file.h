// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A file of a checkpoint in host memory, byte for byte as a save would write it: what an
// asynchronous save writes to the disk, and what a protected step sends to another rank, where the
// reader of checkpoints reads it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/stored_file.h"
#include "zero/checkpoint/shard_copies.h"

namespace zero {

// Immutable once it is whole.
struct MemoryFile {
  FileContent content;
  at::Tensor bytes;               // [content.about.bytes] of kByte
  c10::Device device = at::kCPU;  // from which `bytes` was copied
};

// Fills a file with tensors.
class MemoryFileWriter {
 public:
  // Lays `file` out; `id` is that of its checkpoint. allocate(bytes, device) returns the memory,
  // and `device` is that of the tensors, if they are on one that has streams.
  MemoryFileWriter(FileToSave file, const std::string& id,
                   const std::function<at::Tensor(int64_t bytes, c10::Device device)>& allocate);

  const std::string& name() const { return file_.name; }

  // Once. What belongs to kOfNoBucket may be changed then: it is copied, or the current stream
  // waits until it is. Returns the copies, which are to be completed.
  std::shared_ptr<ShardCopies> copy();

  // After all copies. Hashes the next block, and returns whether there was one.
  bool hash_part();
  // Hashes what is left.
  MemoryFile finish();

 private:
  FileToSave file_;  // without its tensors once they are, or are being, copied
  BlockHashes hashes_;
  c10::Device device_ = at::kCPU;
  at::Tensor bytes_;
};

}  // namespace zero
