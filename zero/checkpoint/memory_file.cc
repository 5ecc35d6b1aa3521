// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/memory_file.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "zero/base/streams.h"
#include "zero/memory/locked_pages.h"

namespace zero {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

c10::Device device_of(const FileToSave& file) {
  for (const TensorToSave& t : file.tensors) {
    if (has_streams(t.tensor.device())) return t.tensor.device();
  }
  return at::kCPU;
}

}  // namespace

at::Tensor fresh_memory(int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  // A locked page must hold nothing else.
  if (bytes == 0 || (bytes < kHugePage && device.is_cpu())) return at::empty({bytes}, options);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "not enough memory: expected ", bytes, " bytes for a copy");
  madvise(memory, bytes, MADV_HUGEPAGE);  // refused by systems without them
  const bool locked = lock_pages(memory, bytes, device);
  const auto free = [=](void* begin) {
    if (!locked || unlock_pages(begin, device)) munmap(begin, bytes);
  };
  return at::from_blob(memory, {bytes}, free, options);
}

at::Tensor KeptMemory::allocate(int64_t bytes, c10::Device device) {
  const bool fits = memory_.defined() && memory_.numel() == bytes && device_ == device &&
                    memory_.storage().use_count() == 1;
  if (!fits) memory_ = fresh_memory(bytes, device);
  device_ = device;
  // Not the same tensor: the storage counts who uses it.
  return memory_.narrow(0, 0, bytes);
}

MemoryFileWriter::MemoryFileWriter(
    FileToSave file, const std::string& id,
    const std::function<at::Tensor(int64_t bytes, c10::Device device)>& allocate)
    : file_(std::move(file)), hashes_(file_, id), device_(device_of(file_)) {
  bytes_ = allocate(static_cast<int64_t>(hashes_.file_bytes()), device_);
  const std::string& beginning = hashes_.beginning();
  std::memcpy(bytes_.mutable_data_ptr(), beginning.data(), beginning.size());
}

std::shared_ptr<ShardCopies> MemoryFileWriter::copy(const std::vector<int64_t>& bucket_of) {
  TORCH_INTERNAL_ASSERT(bucket_of.size() == file_.tensors.size(), "a bucket for every tensor");
  std::vector<ShardCopy> list;
  for (size_t i = 0; i < bucket_of.size(); ++i) {
    const FileBytes place = hashes_.place(i);
    const auto begin = static_cast<int64_t>(place.begin);
    const auto end = static_cast<int64_t>(place.end);
    list.push_back({std::exchange(file_.tensors[i].tensor, {}).detach(),
                    bytes_.slice(0, begin, end), bucket_of[i]});
  }
  auto copies = std::make_shared<ShardCopies>(list);
  OwnThreadWait no_thread({}, {});  // has the copies yet
  copies->wait(kOfNoBucket, no_thread);
  return copies;
}

void MemoryFileWriter::copy_all() {
  copy(std::vector<int64_t>(file_.tensors.size(), kOfNoBucket))->copy_all();
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
