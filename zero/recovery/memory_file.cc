// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/memory_file.h"

#include <c10/util/Exception.h>

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

void MemoryFileWriter::copy(size_t tensor) {
  const at::Tensor host = file_.tensors[tensor].tensor.detach().cpu().contiguous();
  const StoredTensor& place = places_[place_of_[tensor]];
  TORCH_INTERNAL_ASSERT(place.end - place.begin == host.nbytes());
  std::memcpy(bytes_.mutable_data_ptr<uint8_t>() + place.begin, host.const_data_ptr(),
              host.nbytes());
}

MemoryFile MemoryFileWriter::finish() {
  const auto* const data = bytes_.const_data_ptr<uint8_t>();
  MemoryFile result;
  result.about.name = file_.name;
  result.about.bytes = bytes_.nbytes();
  result.about.hash = content_hash(data, bytes_.nbytes());
  for (size_t i = 0; i < file_.tensors.size(); ++i) {
    const StoredTensor& place = places_[place_of_[i]];
    result.about.tensors.push_back(file_.tensors[i].about);
    result.about.tensors.back().hash = content_hash(data + place.begin, place.end - place.begin);
  }
  result.bytes = std::move(bytes_);
  file_.tensors.clear();
  return result;
}

}  // namespace zero
