// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/memory_file.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace zero {

MemoryFileWriter::MemoryFileWriter(FileToSave file, const std::string& id,
                                   const std::function<at::Tensor(int64_t bytes)>& allocate)
    : file_(std::move(file)) {
  for (const TensorToSave& t : file_.tensors) {
    const bool known = safetensors_knows(t.tensor.scalar_type());
    const auto size = static_cast<int64_t>(t.tensor.nbytes());
    places_.push_back({t.about.key, known ? t.tensor.scalar_type() : at::kByte,
                       known ? t.tensor.sizes().vec() : std::vector<int64_t>{size}, 0, 0});
  }
  const std::string beginning = lay_out_safetensors(places_, {{"checkpoint", id}}, file_.name);
  std::unordered_map<std::string, size_t> by_key;
  for (size_t p = 0; p < places_.size(); ++p) by_key[places_[p].name] = p;
  for (const TensorToSave& t : file_.tensors) place_of_.push_back(by_key.at(t.about.key));
  const uint64_t size = places_.empty() ? beginning.size() : places_.back().end;
  bytes_ = allocate(static_cast<int64_t>(size));
  std::memcpy(bytes_.mutable_data_ptr(), beginning.data(), beginning.size());
}

std::vector<ShardCopies::Copy> MemoryFileWriter::copies() const {
  std::vector<ShardCopies::Copy> result;
  for (size_t i = 0; i < file_.tensors.size(); ++i) {
    const StoredTensor& place = places_[place_of_[i]];
    const auto begin = static_cast<int64_t>(place.begin);
    const auto end = static_cast<int64_t>(place.end);
    result.push_back({file_.tensors[i].tensor.detach(), bytes_.slice(0, begin, end)});
  }
  return result;
}

MemoryFile MemoryFileWriter::finish() {
  const auto* const data = static_cast<const char*>(bytes_.const_data_ptr());
  // In parts, so that the second hash finds them in the cache.
  constexpr uint64_t kPart = uint64_t{256} << 10;
  ContentHash whole, tensor;
  whole.add(data, places_.empty() ? bytes_.nbytes() : places_.front().begin);
  std::vector<uint64_t> hashes;
  for (const StoredTensor& place : places_) {
    tensor.reset();
    for (uint64_t at = place.begin; at < place.end; at += kPart) {
      const uint64_t part = std::min(kPart, place.end - at);
      whole.add(data + at, part);
      tensor.add(data + at, part);
    }
    hashes.push_back(tensor.value());
  }
  MemoryFile result;
  result.about.name = file_.name;
  result.about.bytes = bytes_.nbytes();
  result.about.hash = whole.value();
  for (size_t i = 0; i < file_.tensors.size(); ++i) {
    result.about.tensors.push_back(file_.tensors[i].about);
    result.about.tensors.back().hash = hashes[place_of_[i]];
  }
  result.bytes = std::move(bytes_);
  file_.tensors.clear();
  return result;
}

}  // namespace zero
