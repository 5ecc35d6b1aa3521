// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sends tensors of a checkpoint's files from the ranks that have the files to those that need the
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/process_group.h"

namespace zero {

// Ranges of bytes of a file, 1-D of kByte, by where they begin. They do not overlap.
using FileParts = std::map<uint64_t, at::Tensor>;

// Parts of a file, or all of it, for CheckpointReader.
class MemoryReader final : public StoredBytes {
 public:
  MemoryReader(std::string path, uint64_t size, FileParts parts)
      : StoredBytes(std::move(path), size), parts_(std::move(parts)) {}

  // Throws for bytes that are not in one of the parts.
  void read(uint64_t offset, void* data, size_t bytes) override;

 private:
  const FileParts parts_;
};

// The part of one rank in an exchange.
struct FileWishes {
  const Manifest& manifest;  // equal on all ranks
  // For each file, the rank that reads it for this one; its own number where it reads it itself.
  std::vector<int> sources;
  std::function<bool(const ManifestTensor&)> needed;
  // Opens a file of which this rank is a source.
  CheckpointReader::Open open;
};

struct ReceivedFiles {
  // By file name: its header, and the tensors that are needed.
  std::map<std::string, FileParts> parts;
  uint64_t bytes = 0;  // of them
};

// Collective over `group`, whose ranks `control` connects in their order. Returns what this rank
// needs of files that others read. A rank sends to each rank that asks it over a connection of the
// two, 4 MiB at a time, so that it needs no more memory. Throws c10::Error on all ranks where a
// file cannot be read. What is received was not verified: CheckpointReader does that. `what` is for
// errors.
ReceivedFiles exchange_files(Communicator& control, const Group& group, const std::string& what,
                             const FileWishes& wishes);

// A server and a client. Sorts pairs into the order in which all ranks go through them: by the
// distance of the two, and so that those of one distance form no long chain.
using FilePair = std::pair<int, int>;
void sort_pairs(std::vector<FilePair>& pairs, int world_size);

// Memory of the host: 1-D of kByte.
at::Tensor host_bytes(uint64_t bytes);

// Collective. Returns the text of rank `source`; those of others are not looked at.
std::string broadcast_text(Communicator& ranks, const std::string& text, int source,
                           const std::string& label);

}  // namespace zero
