// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/memory_file.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
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
    : file_(std::move(file)), device_(device_of(file_)) {
  for (const TensorToSave& t : file_.tensors) places_.push_back(stored_as(t));
  const std::string beginning = lay_out_safetensors(places_, {{"checkpoint", id}}, file_.name);
  std::unordered_map<std::string, size_t> by_key;
  for (size_t p = 0; p < places_.size(); ++p) by_key[places_[p].name] = p;
  for (const TensorToSave& t : file_.tensors) place_of_.push_back(by_key.at(t.about.key));
  const uint64_t size = places_.empty() ? beginning.size() : places_.back().end;
  bytes_ = allocate(static_cast<int64_t>(size), device_);
  std::memcpy(bytes_.mutable_data_ptr(), beginning.data(), beginning.size());
  hashed_ = beginning.size();
  whole_hash_.add(beginning.data(), beginning.size());
}

std::shared_ptr<ShardCopies> MemoryFileWriter::copy(const std::vector<int64_t>& bucket_of) {
  TORCH_INTERNAL_ASSERT(bucket_of.size() == file_.tensors.size(), "a bucket for every tensor");
  std::vector<ShardCopy> list;
  for (size_t i = 0; i < bucket_of.size(); ++i) {
    const StoredTensor& place = places_[place_of_[i]];
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
  const auto* const data = static_cast<const char*>(bytes_.const_data_ptr());
  while (hashes_.size() < places_.size()) {
    const StoredTensor& place = places_[hashes_.size()];
    if (hashed_ == place.end) {
      hashes_.push_back(tensor_hash_.value());
      tensor_hash_.reset();
      continue;
    }
    const uint64_t part = std::min<uint64_t>(kCachedBytes, place.end - hashed_);
    whole_hash_.add(data + hashed_, part);
    tensor_hash_.add(data + hashed_, part);
    hashed_ += part;
    return true;
  }
  return false;
}

MemoryFile MemoryFileWriter::finish() {
  while (hash_part()) {
  }
  MemoryFile result;
  result.about.name = file_.name;
  result.about.bytes = bytes_.nbytes();
  result.about.hash = whole_hash_.value();
  for (size_t i = 0; i < file_.tensors.size(); ++i) {
    result.about.tensors.push_back(file_.tensors[i].about);
    result.about.tensors.back().hash = hashes_[place_of_[i]];
  }
  result.bytes = std::move(bytes_);
  result.device = device_;
  return result;
}

}  // namespace zero
