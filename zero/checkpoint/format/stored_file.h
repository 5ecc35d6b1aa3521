// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A file of a checkpoint: safetensors whose tensors are hashed in blocks, so that a reader verifies
// the range that it reads without reading the rest.
//
// Each tensor is cut into blocks of kBlockBytes from its beginning on, of which the last may be
// shorter. The last tensor of the file, with the key kTableKey, is a table: the XXH3 of each block,
// in the order of the file, 8 bytes each, the lowest byte first. The *index* of a file is all that
// is no block: the length and the header at its beginning, and the table. The manifest has the hash
// of the index. So a reader of a changed byte anywhere in the file notices it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {

// A reader of a range reads less than two blocks more than the range; rows of buckets have 256 KiB
// and more. A block that was hashed is still in a cache when it is written.
inline constexpr uint64_t kBlockBytes = uint64_t{32} << 10;
// No state of an object has an empty name.
inline constexpr char kTableKey[] = {kStatePrefix, '\0'};

// Bytes [begin, end) of a file.
struct FileBytes {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// In place of a bucket: that of tensors which may change before any bucket does.
inline constexpr int64_t kOfNoBucket = std::numeric_limits<int64_t>::max();

struct TensorToSave {
  ManifestTensor about;
  at::Tensor tensor;             // any device and strides
  int64_t bucket = kOfNoBucket;  // with which step() changes it
};

struct FileToSave {
  std::string name;
  std::vector<TensorToSave> tensors;
};

// Lays a file out, and hashes what is written to it.
class BlockHashes {
 public:
  // Needs no values of the tensors, and puts them into the order of the file. `id` is that of the
  // checkpoint.
  BlockHashes(FileToSave& file, const std::string& id);

  // What comes before the first tensor.
  const std::string& beginning() const { return beginning_; }
  uint64_t file_bytes() const { return content_.about.bytes; }
  // The place in the file of tensor i.
  FileBytes place(size_t i) const { return {tensors_.at(i).begin, tensors_.at(i).end}; }

  // The place of the next block that has no hash; empty once all have one.
  FileBytes next() const;
  // Hashes that block, whose bytes are at `data` in host memory.
  void add(const void* data);
  // The same for content_hash() of its bytes.
  void add_hash(uint64_t hash);

  // Once all blocks have a hash: the table, and what the manifest says of the file.
  std::string table() const;
  FileContent content() const;

 private:
  FileContent content_;                // without tensors and hashes
  std::vector<size_t> value_blocks_;   // of content_.values
  std::vector<ManifestTensor> about_;  // in the order of the constructor's
  std::vector<StoredTensor> tensors_;  // in the order of the file, without the table
  std::string beginning_;
  std::vector<uint64_t> hashes_;
  size_t tensor_ = 0;  // in which the next block is
  uint64_t done_ = 0;  // bytes of that tensor that have a hash
};

// Writes a file, and waits until it is on disk. Throws where `path` exists.
FileContent write_file(FileToSave file, const std::string& path, const std::string& id);
// Returns the same without writing, and hashes on as many threads as libtorch computes on.
FileContent hash_file(FileToSave file, const std::string& id);

// A file that is read. Its functions throw c10::Error, with the path.
class StoredFile {
 public:
  // Reads the index. Throws unless `about` has its hash, and it names the checkpoint `about.id`,
  // or, if that is empty, `id`; if both are empty, any. Before version 5 there is no hash of an
  // index.
  StoredFile(std::unique_ptr<StoredBytes> bytes, const ManifestFile& about,
             const std::string& id = {});

  const std::string& path() const { return bytes_->path(); }
  // Throws where the file has none of that key. What is returned is a `tensor` of the functions
  // below.
  const StoredTensor& tensor(const std::string& key) const;
  // The bytes of each block of a tensor but the last; before version 5 all are one block.
  uint64_t block_bytes(const StoredTensor& tensor) const;
  // The index, for those who send it.
  std::vector<FileBytes> index() const;

  // Gives the blocks of `tensor` that overlap its bytes [begin, end) to `take`, whole; `at` counts
  // from the beginning of the tensor. Throws where one is damaged; of files of before version 5
  // after it was given.
  void read(const StoredTensor& tensor, uint64_t begin, uint64_t end,
            const StoredBytes::Take& take);
  // One for each block: whether it was read. Files of before version 5 have none.
  const std::vector<bool>& verified() const { return verified_; }
  // Reads the blocks for which skip(block) is false, or all of a file of before version 5.
  void verify_rest(const std::function<bool(size_t block)>& skip);

  // Unverified.
  StoredBytes& bytes() { return *bytes_; }
  uint64_t bytes_read() const { return bytes_->bytes_read(); }

 private:
  // Parts of the constructor. The first reads the hashes of blocks; the second takes the tensors
  // out of `header`, and before version 5 their hashes from `about`.
  void read_table(const std::string& beginning, const SafetensorsHeader& header,
                  const ManifestFile& about);
  void list_tensors(SafetensorsHeader& header, const ManifestFile& about);

  // Its number in tensors_.
  size_t number(const StoredTensor& tensor) const;
  void check(const StoredTensor& tensor, uint64_t block, uint64_t hash) const;
  void read_blocks(const StoredTensor& tensor, uint64_t first, uint64_t last,
                   const StoredBytes::Take& take);

  const std::unique_ptr<StoredBytes> bytes_;
  const bool has_blocks_;
  const uint64_t hash_;  // of all bytes, where there are no blocks
  uint64_t data_begin_ = 0;
  std::vector<StoredTensor> tensors_;  // in the order of the file, without the table
  std::vector<size_t> first_block_;    // of each
  std::unordered_map<std::string_view, size_t> numbers_;  // of tensors_, by key
  std::vector<uint64_t> hashes_;                          // of blocks; else of tensors
  std::vector<bool> verified_;
};

}  // namespace zero
