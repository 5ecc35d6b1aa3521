// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/memory_file.h"

#include <cstring>
#include <utility>
#include <vector>

#include "zero/base/own_thread_wait.h"

namespace zero {
namespace {

// The tensors of `file`, with no place for their copies yet.
std::vector<ShardCopy> copies_of(const FileToSave& file) {
  std::vector<ShardCopy> copies;
  for (const TensorToSave& t : file.tensors) copies.push_back({t.tensor.detach(), {}, t.bucket});
  return copies;
}

}  // namespace

MemoryFileWriter::MemoryFileWriter(
    FileToSave file, const std::string& id,
    const std::function<at::Tensor(int64_t bytes, c10::Device device)>& allocate)
    : file_(std::move(file)), hashes_(file_, id), device_(stream_device(copies_of(file_))) {
  bytes_ = allocate(static_cast<int64_t>(hashes_.file_bytes()), device_);
  const std::string& beginning = hashes_.beginning();
  std::memcpy(bytes_.mutable_data_ptr(), beginning.data(), beginning.size());
}

std::shared_ptr<ShardCopies> MemoryFileWriter::copy() {
  std::vector<ShardCopy> list = copies_of(file_);
  for (size_t i = 0; i < list.size(); ++i) {
    const FileBytes place = hashes_.place(i);
    list[i].to =
        bytes_.slice(0, static_cast<int64_t>(place.begin), static_cast<int64_t>(place.end));
    file_.tensors[i].tensor.reset();
  }
  auto copies = std::make_shared<ShardCopies>(list);
  OwnThreadWait never_waits({}, {});  // no other thread knows the copies yet
  copies->wait(kOfNoBucket, never_waits);
  return copies;
}

bool MemoryFileWriter::hash_part() {
  const FileBytes block = hashes_.next();
  if (block.begin == block.end) return false;
  hashes_.add(static_cast<const char*>(bytes_.const_data_ptr()) + block.begin);
  return true;
}

MemoryFile MemoryFileWriter::finish() {
  while (hash_part()) {
  }
  const std::string table = hashes_.table();
  auto* const end = static_cast<char*>(bytes_.mutable_data_ptr()) + bytes_.nbytes();
  std::memcpy(end - table.size(), table.data(), table.size());
  MemoryFile result;
  result.content = hashes_.content();
  result.bytes = std::move(bytes_);
  result.device = device_;
  return result;
}

}  // namespace zero
