// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/reader.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "bookkeeping/reshard.h"
#include "zero/base/error_text.h"
#include "zero/checkpoint/format/atomic_directory.h"

namespace zero {

struct CheckpointReader::OpenFile {
  std::unique_ptr<StoredBytes> reader;
  std::unordered_map<std::string, StoredTensor> tensors;
};

namespace {

// A checkpoint has a file for each rank, and a process often no more than 1024 descriptors.
constexpr size_t kOpenFiles = 32;

std::string find_folder(const std::string& folder) {
  check_path(folder);
  return present_path(folder, is_complete_checkpoint);
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder)
    : folder_(find_folder(folder)),
      manifest_(read_manifest(folder_)),
      open_([this](const ManifestFile& file) {
        const std::string path = folder_ + "/" + file.name;
        TORCH_CHECK(file.disk == manifest_.disk || access(path.c_str(), F_OK) == 0, path,
                    ": expected the file that rank ", writer_of(file), " wrote to disk ", file.disk,
                    ", got none; the folder has the files of disk ", manifest_.disk,
                    ": copy those of all disks into one folder, or load it with ranks that see "
                    "them");
        return std::make_unique<FileReader>(path);
      }) {
  list_tensors();
}

CheckpointReader::CheckpointReader(std::string name, Manifest manifest, Open open)
    : folder_(std::move(name)), manifest_(std::move(manifest)), open_(std::move(open)) {
  list_tensors();
}

void CheckpointReader::list_tensors() {
  for (size_t f = 0; f < manifest_.files.size(); ++f) {
    for (const ManifestTensor& t : manifest_.files[f].tensors) {
      places_[t.owner][t.kind].push_back({f, &t});
      kinds_[t.owner].insert(t.kind);
    }
  }
}

CheckpointReader::~CheckpointReader() = default;

const std::set<std::string>& CheckpointReader::kinds(const std::string& owner) const {
  static const std::set<std::string> none;
  const auto found = kinds_.find(owner);
  return found == kinds_.end() ? none : found->second;
}

std::vector<std::string> CheckpointReader::state_names() const {
  std::vector<std::string> names;
  for (auto item = kinds_.lower_bound(std::string(1, kStatePrefix));
       item != kinds_.end() && item->first[0] == kStatePrefix; ++item) {
    names.push_back(item->first.substr(1));
  }
  return names;
}

const std::vector<CheckpointReader::Place>& CheckpointReader::places(
    const std::string& owner, const std::string& kind) const {
  static const std::vector<Place> none;
  const auto found = places_.find(owner);
  if (found == places_.end()) return none;
  const auto list = found->second.find(kind);
  return list == found->second.end() ? none : list->second;
}

CheckpointReader::OpenFile& CheckpointReader::open(size_t index) {
  const auto known = std::find(recent_.begin(), recent_.end(), index);
  if (known != recent_.end()) recent_.erase(known);
  recent_.push_back(index);
  if (recent_.size() > kOpenFiles) {
    const auto oldest = files_.find(recent_.front());
    if (oldest != files_.end() && oldest->second) oldest->second->reader->release();
    recent_.erase(recent_.begin());
  }
  auto& slot = files_[index];
  if (slot) return *slot;
  const ManifestFile& about = manifest_.files[index];
  auto file = std::make_unique<OpenFile>(OpenFile{open_(about), {}});
  const std::string& path = file->reader->path();
  TORCH_CHECK(file->reader->size() == about.bytes, path, ": expected ", about.bytes,
              " bytes as the manifest says, got ", file->reader->size(),
              "; the file was truncated or belongs to another checkpoint");
  SafetensorsHeader header = read_safetensors_header(*file->reader);
  TORCH_CHECK(header.metadata["checkpoint"] == manifest_.id, path,
              ": expected a file of checkpoint ", manifest_.id, ", got one of checkpoint ",
              header.metadata["checkpoint"],
              "; it was mixed in from another checkpoint or damaged");
  for (StoredTensor& t : header.tensors) file->tensors.emplace(t.name, std::move(t));
  slot = std::move(file);
  return *slot;
}

const StoredTensor& CheckpointReader::stored(const Place& place) {
  OpenFile& file = open(place.file);
  const auto found = file.tensors.find(place.tensor->key);
  TORCH_CHECK(found != file.tensors.end(), file.reader->path(), ": expected tensor ",
              place.tensor->key, " as the manifest says, got none of that name");
  TORCH_CHECK(found->second.dtype != c10::ScalarType::Undefined, file.reader->path(), ": tensor ",
              printable(found->first), ": expected a dtype that this library knows, got another");
  return found->second;
}

const StoredTensor& CheckpointReader::stored(const Place& place, c10::ScalarType dtype,
                                             int64_t numel) {
  const StoredTensor& result = stored(place);
  uint64_t bytes = 0;
  const bool fits =
      !__builtin_mul_overflow(static_cast<uint64_t>(numel), c10::elementSize(dtype), &bytes);
  TORCH_CHECK(fits && (result.dtype == dtype || result.dtype == at::kByte) &&
                  result.end - result.begin == bytes,
              open(place.file).reader->path(), ": tensor ", result.name, ": expected ", numel,
              " elements of ", dtype, ", got ", result.end - result.begin, " bytes of ",
              result.dtype);
  return result;
}

void CheckpointReader::scan(const Place& place, c10::ScalarType dtype, int64_t numel,
                            const StoredBytes::Take& take) {
  const StoredTensor& tensor = stored(place, dtype, numel);
  OpenFile& file = open(place.file);
  const uint64_t hash = file.reader->scan(tensor.begin, tensor.end, take);
  TORCH_CHECK(hash == place.tensor->hash, file.reader->path(), ": tensor ", tensor.name,
              ": expected checksum ", hash_text(place.tensor->hash), ", got ", hash_text(hash),
              "; the file is damaged, use another checkpoint");
}

namespace {

// Numbers for the names in `wanted`.
std::map<std::string, int64_t> number_owners(const std::vector<WantedRange>& wanted) {
  std::map<std::string, int64_t> numbers;
  for (const WantedRange& range : wanted) {
    numbers.emplace(range.owner, static_cast<int64_t>(numbers.size()));
  }
  return numbers;
}

std::vector<RangeOverlap> overlaps_of(const std::vector<ParameterRange>& stored,
                                      const std::vector<WantedRange>& wanted,
                                      const std::map<std::string, int64_t>& owners,
                                      const std::string& what) {
  std::vector<ParameterRange> ranges;
  for (const WantedRange& w : wanted) ranges.push_back({owners.at(w.owner), w.begin, w.numel});
  try {
    return reshard(stored, ranges);
  } catch (const c10::Error& error) {
    std::string names;
    for (const auto& [name, number] : owners) {
      if (names.size() < 1000) names += " " + std::to_string(number) + "=" + name;
    }
    TORCH_CHECK(false, what, ": ", error_text(error), " (numbers:", names, ")");
  }
}

}  // namespace

std::vector<RangeOverlap> CheckpointReader::overlaps(const std::string& kind,
                                                     const std::vector<WantedRange>& wanted,
                                                     std::vector<Place>& stored) const {
  const auto owners = number_owners(wanted);
  std::vector<ParameterRange> ranges;
  for (const auto& [owner, number] : owners) {
    for (const Place& place : places(owner, kind)) {
      stored.push_back(place);
      ranges.push_back({number, place.tensor->begin, place.tensor->numel});
    }
  }
  return overlaps_of(ranges, wanted, owners, folder_ + ": " + kind);
}

void CheckpointReader::read(const std::string& kind, const std::vector<WantedRange>& wanted,
                            const std::vector<at::Tensor>& into) {
  std::vector<Place> stored;
  const std::vector<RangeOverlap> overlaps = this->overlaps(kind, wanted, stored);
  for (size_t first = 0; first < overlaps.size();) {
    size_t last = first;
    while (last < overlaps.size() && overlaps[last].stored == overlaps[first].stored) ++last;
    const Place& place = stored[overlaps[first].stored];
    const at::Tensor& like = into[overlaps[first].wanted];
    const int64_t size = like.element_size();
    scan(place, like.scalar_type(), place.tensor->numel,
         [&](uint64_t at, const char* data, size_t bytes) {
           const auto part_begin = static_cast<int64_t>(at);
           const int64_t part_end = part_begin + static_cast<int64_t>(bytes);
           for (size_t i = first; i < last; ++i) {
             const RangeOverlap& overlap = overlaps[i];
             const int64_t from = std::max(part_begin, overlap.stored_begin * size);
             const int64_t to = std::min(part_end, (overlap.stored_begin + overlap.numel) * size);
             if (from >= to) continue;
             char* target = static_cast<char*>(into[overlap.wanted].mutable_data_ptr()) +
                            (overlap.wanted_begin - overlap.stored_begin) * size;
             std::memcpy(target + from, data + (from - part_begin), to - from);
           }
         });
    first = last;
  }
}

std::vector<at::Tensor> CheckpointReader::read_values(const std::string& kind,
                                                      const std::vector<WantedRange>& wanted) {
  std::vector<Place> stored_values;
  overlaps(kind, wanted, stored_values);  // throws where one is missing
  std::vector<at::Tensor> values(wanted.size());
  for (size_t w = 0; w < wanted.size(); ++w) {
    if (wanted[w].numel == 0) continue;
    std::string first;
    for (const Place& place : places(wanted[w].owner, kind)) {
      const ManifestTensor& t = *place.tensor;
      const bool overlaps =
          t.begin < wanted[w].begin + wanted[w].numel && wanted[w].begin < t.begin + t.numel;
      if (!overlaps) continue;
      const c10::ScalarType dtype = stored(place).dtype;
      const at::Tensor value = at::empty({1}, at::TensorOptions().dtype(dtype));
      scan(place, dtype, 1, [&](uint64_t, const char* data, size_t bytes) {
        std::memcpy(value.mutable_data_ptr(), data, bytes);
      });
      const std::string bytes(static_cast<const char*>(value.const_data_ptr()), value.nbytes());
      TORCH_CHECK(first.empty() || first == bytes, folder_, ": parameter ", t.owner,
                  ": expected one ", kind, " for all its pieces, got different ones");
      first = bytes;
      values[w] = value;
    }
  }
  return values;
}

c10::ScalarType CheckpointReader::dtype(const std::string& kind, const WantedRange& range) {
  const auto& list = places(range.owner, kind);
  TORCH_CHECK(!list.empty(), folder_, ": parameter ", range.owner, ": expected stored ", kind,
              ", got none");
  // The file of another piece may be on another rank.
  const auto overlapping = std::find_if(list.begin(), list.end(), [&](const Place& place) {
    const ManifestTensor& t = *place.tensor;
    return t.begin < range.begin + range.numel && range.begin < t.begin + t.numel;
  });
  return stored(overlapping == list.end() ? list[0] : *overlapping).dtype;
}

at::Tensor CheckpointReader::read_all(const ManifestParameter& about, const std::string& kind) {
  const int64_t wanted = numel(about);
  int64_t there = 0;
  const std::string name = stored_name(about);
  for (const Place& place : places(name, kind)) {
    stored(place, at::kFloat, place.tensor->numel);
    there += place.tensor->numel;
  }
  TORCH_CHECK(there == wanted, folder_, ": ", kind, " ", name, ": expected ", wanted,
              " stored elements for its shape, got ", there);
  at::Tensor result = at::empty({wanted}, at::TensorOptions().dtype(at::kFloat));
  read(kind, {{name, 0, wanted}}, {result});
  return result;
}

at::Tensor CheckpointReader::read_whole(const ManifestParameter& about, const std::string& kind) {
  const std::string name = stored_name(about);
  const auto& list = places(name, kind);
  TORCH_CHECK(list.size() == 1, folder_, ": ", kind, " ", name,
              ": expected one stored tensor, got ", list.size());
  stored(list[0], about.dtype, numel(about));
  at::Tensor result = at::empty(about.shape, at::TensorOptions().dtype(about.dtype));
  char* target = static_cast<char*>(result.mutable_data_ptr());
  scan(list[0], about.dtype, result.numel(),
       [&](uint64_t at, const char* data, size_t bytes) { std::memcpy(target + at, data, bytes); });
  return result;
}

at::Tensor CheckpointReader::read_uncut(const std::string& owner, const std::string& kind) {
  const auto& list = places(owner, kind);
  TORCH_CHECK(list.size() == 1, folder_, ": ", kind, " ", owner,
              ": expected one stored tensor, got ", list.size());
  const c10::ScalarType dtype = stored(list[0]).dtype;
  const int64_t numel = list[0].tensor->numel;
  stored(list[0], dtype, numel);
  at::Tensor result = at::empty({numel}, at::TensorOptions().dtype(dtype));
  char* target = static_cast<char*>(result.mutable_data_ptr());
  scan(list[0], dtype, numel,
       [&](uint64_t at, const char* data, size_t bytes) { std::memcpy(target + at, data, bytes); });
  return result;
}

std::string CheckpointReader::read_bytes(const std::string& owner, const std::string& kind) {
  const auto& list = places(owner, kind);
  TORCH_CHECK(list.size() == 1, folder_, ": ", kind, " ", owner,
              ": expected one stored tensor, got ", list.size());
  std::string bytes;
  scan(list[0], at::kByte, list[0].tensor->numel,
       [&](uint64_t, const char* data, size_t size) { bytes.append(data, size); });
  return bytes;
}

void CheckpointReader::verify_file(size_t index) {
  StoredBytes& reader = *open(index).reader;
  const uint64_t hash = reader.scan(0, reader.size());
  TORCH_CHECK(hash == manifest_.files[index].hash, reader.path(), ": expected checksum ",
              hash_text(manifest_.files[index].hash), ", got ", hash_text(hash),
              "; the file is damaged, use another checkpoint");
}

uint64_t CheckpointReader::bytes_read() const {
  uint64_t bytes = 0;
  for (const auto& [index, file] : files_) bytes += file->reader->bytes_read();
  return bytes;
}

}  // namespace zero
