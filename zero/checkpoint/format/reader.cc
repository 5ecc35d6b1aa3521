// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/reader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#include "zero/base/error_text.h"

namespace zero {

namespace {

// A checkpoint has a file for each rank, and a process often no more than 1024 descriptors.
constexpr size_t kOpenFiles = 32;

constexpr int64_t kBitsOfInt = 32;

bool overlap(const ManifestPiece& stored, const WantedRange& wanted) {
  return stored.begin < wanted.begin + wanted.numel && wanted.begin < stored.begin + stored.numel;
}

// File by file, since a parameter has pieces in those of all ranks, which cannot all stay open; and
// those of one piece from its beginning on.
void sort_by_file(std::vector<RangeOverlap>& overlaps, const auto& places) {
  std::ranges::sort(overlaps, {}, [&](const RangeOverlap& o) {
    return std::tuple(places[o.stored].piece.file, o.stored, o.stored_begin);
  });
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder)
    : CheckpointReader(folder, read_manifest(folder)) {}

CheckpointReader::CheckpointReader(const std::string& folder, Manifest manifest)
    : CheckpointReader(folder, std::move(manifest), [this](const ManifestFile& file) {
        const std::string path = folder_ + "/" + file.name;
        TORCH_CHECK(file.disk == manifest_.disk || access(path.c_str(), F_OK) == 0, path,
                    ": expected the file that rank ", writer_of(file), " wrote to disk ", file.disk,
                    ", got none; the folder has the files of disk ", manifest_.disk,
                    ": copy those of all disks into one folder, or load it with ranks that see "
                    "them");
        return std::make_unique<FileReader>(path);
      }) {}

CheckpointReader::CheckpointReader(std::string name, Manifest manifest, Open open)
    : folder_(std::move(name)), manifest_(std::move(manifest)), open_(std::move(open)) {
  for (const ManifestTensors& entry : manifest_.tensors) entries_[entry.owner].push_back(&entry);
  for (const ManifestFile& file : manifest_.files) {
    first_block_.push_back(blocks_);
    const bool fits = !__builtin_add_overflow(blocks_, std::max<int64_t>(file.blocks, 0), &blocks_);
    TORCH_CHECK(fits, folder_, ": expected blocks that fit 63 bits, got more");
  }
}

std::set<std::string> CheckpointReader::kinds(const std::string& owner) const {
  std::set<std::string> result;
  const auto found = entries_.find(owner);
  if (found == entries_.end()) return result;
  for (const ManifestTensors* entry : found->second) {
    result.insert(entry->kinds.begin(), entry->kinds.end());
  }
  return result;
}

std::vector<std::string> CheckpointReader::state_names() const {
  std::set<std::string> names;
  for (const auto& [owner, entries] : entries_) {
    if (!owner.empty() && owner[0] == kStatePrefix) names.emplace(owner.substr(1));
  }
  return {names.begin(), names.end()};
}

std::vector<CheckpointReader::Place> CheckpointReader::places(const std::string& owner,
                                                              const std::string& kind) const {
  std::vector<Place> result;
  const auto found = entries_.find(owner);
  if (found == entries_.end()) return result;
  for (const ManifestTensors* entry : found->second) {
    const auto stored = std::find(entry->kinds.begin(), entry->kinds.end(), kind);
    if (stored == entry->kinds.end()) continue;
    for (const ManifestPiece& piece : entry->pieces) result.push_back({entry, &*stored, piece});
  }
  return result;
}

at::Tensor CheckpointReader::read_uncut(const std::string& owner, const std::string& kind,
                                        std::optional<c10::ScalarType> dtype) {
  const std::vector<Place> list = places(owner, kind);
  TORCH_CHECK(list.size() == 1, folder_, ": ", kind, " ", owner,
              ": expected one stored tensor, got ", list.size());
  const ManifestPiece& piece = list[0].piece;
  if (!dtype) dtype = stored(list[0]).dtype;
  stored(list[0], *dtype, piece.numel);  // also where no element is read
  return read_all(kind, {{owner, piece.begin, piece.numel}}, dtype);
}

StoredFile& CheckpointReader::open(size_t index) {
  const auto known = std::find(recent_.begin(), recent_.end(), index);
  if (known != recent_.end()) recent_.erase(known);
  recent_.push_back(index);
  if (recent_.size() > kOpenFiles) {
    const auto oldest = files_.find(recent_.front());
    if (oldest != files_.end() && oldest->second) oldest->second->bytes().release();
    recent_.erase(recent_.begin());
  }
  auto& slot = files_[index];
  if (!slot) {
    const ManifestFile& about = manifest_.files.at(index);
    slot = std::make_unique<StoredFile>(open_(about), about, manifest_.id);
  }
  return *slot;
}

const StoredTensor& CheckpointReader::stored(const Place& place) {
  const StoredFile& file = open(place.piece.file);
  const auto& [index, begin, numel] = place.piece;
  const StoredTensor& result =
      file.tensor(tensor_key({place.entry->owner, *place.kind, begin, numel}));
  TORCH_CHECK(result.dtype != c10::ScalarType::Undefined, file.path(), ": tensor ",
              printable(result.name), ": expected a dtype that this library knows, got another");
  return result;
}

const StoredTensor& CheckpointReader::stored(const Place& place, c10::ScalarType dtype,
                                             int64_t numel) {
  const StoredTensor& result = stored(place);
  uint64_t bytes = 0;
  const bool fits =
      !__builtin_mul_overflow(static_cast<uint64_t>(numel), c10::elementSize(dtype), &bytes);
  TORCH_CHECK(fits && (result.dtype == dtype || result.dtype == at::kByte) &&
                  result.end - result.begin == bytes,
              open(place.piece.file).path(), ": tensor ", result.name, ": expected ", numel,
              " elements of ", dtype, ", got ", result.end - result.begin, " bytes of ",
              result.dtype);
  return result;
}

int64_t CheckpointReader::count_stored(const std::string& owner, const std::string& kind,
                                       std::optional<c10::ScalarType> dtype) {
  int64_t count = 0;
  for (const Place& place : places(owner, kind)) {
    stored(place, dtype ? *dtype : stored(place).dtype, place.piece.numel);
    count += place.piece.numel;
  }
  return count;
}

std::vector<RangeOverlap> CheckpointReader::overlaps(const std::string& kind,
                                                     const std::vector<WantedRange>& wanted,
                                                     std::vector<Place>& stored) const {
  // The numbers in `wanted` of each owner's ranges; owners by their first ones.
  std::vector<std::vector<int64_t>> of_owners;
  std::unordered_map<std::string_view, size_t> known;
  for (size_t w = 0; w < wanted.size(); ++w) {
    const auto [at, added] = known.emplace(wanted[w].owner, of_owners.size());
    if (added) of_owners.emplace_back();
    of_owners[at->second].push_back(static_cast<int64_t>(w));
  }
  std::vector<RangeOverlap> result;
  for (const std::vector<int64_t>& numbers : of_owners) {
    const std::string& owner = wanted[numbers.front()].owner;
    const auto first = static_cast<int64_t>(stored.size());
    std::vector<ParameterRange> have, want;
    for (const Place& place : places(owner, kind)) {
      have.push_back({0, place.piece.begin, place.piece.numel});
      stored.push_back(place);
    }
    for (const int64_t w : numbers) want.push_back({0, wanted[w].begin, wanted[w].numel});
    try {
      for (const RangeOverlap& o : reshard(have, want)) {
        result.push_back(
            {first + o.stored, numbers[o.wanted], o.stored_begin, o.wanted_begin, o.numel});
      }
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, folder_, ": ", kind, ": ", error_text(error), ", where parameter 0 is ",
                  owner);
    }
  }
  return result;
}

void CheckpointReader::read(const std::string& kind, const std::vector<WantedRange>& wanted,
                            const std::vector<at::Tensor>& into) {
  // 1. Which stored pieces have the ranges, in the order in which they are read.
  std::vector<Place> places;
  std::vector<RangeOverlap> overlaps = this->overlaps(kind, wanted, places);
  sort_by_file(overlaps, places);
  for (size_t first = 0; first < overlaps.size();) {
    const Place& place = places[overlaps[first].stored];
    const at::Tensor& like = into[overlaps[first].wanted];
    const StoredTensor& tensor = stored(place, like.scalar_type(), place.piece.numel);
    const auto size = static_cast<uint64_t>(like.element_size());
    const uint64_t block = open(place.piece.file).block_bytes(tensor);
    const auto begin_of = [&](size_t i) { return overlaps[i].stored_begin * size; };
    const auto end_of = [&](size_t i) { return begin_of(i) + overlaps[i].numel * size; };
    // 2. Overlaps whose blocks meet are read as one range, so that no block is read twice.
    size_t last = first + 1;
    uint64_t end = end_of(first);
    for (; last < overlaps.size() && overlaps[last].stored == overlaps[first].stored; ++last) {
      TORCH_CHECK(into[overlaps[last].wanted].scalar_type() == like.scalar_type(), folder_, ": ",
                  kind, " ", place.entry->owner, ": expected one dtype, got ", like.scalar_type(),
                  " and ", into[overlaps[last].wanted].scalar_type());
      if (begin_of(last) / block > (end - 1) / block + 1) break;
      end = std::max(end, end_of(last));
    }
    // 3. Each part that was read and verified goes to all overlaps in it.
    size_t next = first;  // the first overlap that goes on behind what was read
    open(place.piece.file)
        .read(tensor, begin_of(first), end, [&](uint64_t at, const char* data, size_t bytes) {
          while (next < last && end_of(next) <= at) ++next;
          for (size_t i = next; i < last && begin_of(i) < at + bytes; ++i) {
            const uint64_t from = std::max(at, begin_of(i));
            const uint64_t to = std::min(at + bytes, end_of(i));
            if (from >= to) continue;
            char* const target = static_cast<char*>(into[overlaps[i].wanted].mutable_data_ptr()) +
                                 overlaps[i].wanted_begin * size;
            std::memcpy(target + (from - begin_of(i)), data + (from - at), to - from);
          }
        });
    first = last;
  }
}

void CheckpointReader::check_sizes(const std::string& kind, const std::vector<WantedRange>& wanted,
                                   std::optional<c10::ScalarType>& dtype) {
  std::vector<Place> places;
  for (const RangeOverlap& o : overlaps(kind, wanted, places)) {
    const Place& place = places[o.stored];
    if (!dtype) dtype = stored(place).dtype;
    stored(place, *dtype, place.piece.numel);
  }
}

at::Tensor CheckpointReader::read_all(const std::string& kind,
                                      const std::vector<WantedRange>& wanted,
                                      std::optional<c10::ScalarType> dtype) {
  check_sizes(kind, wanted, dtype);
  int64_t numel = 0;
  for (const WantedRange& range : wanted) numel += range.numel;
  const at::Tensor all = at::empty({numel}, dtype.value_or(c10::ScalarType::Float));
  std::vector<at::Tensor> into;
  int64_t begin = 0;
  for (const WantedRange& range : wanted) {
    into.push_back(all.narrow(0, begin, range.numel));
    begin += range.numel;
  }
  read(kind, wanted, into);
  return all;
}

std::vector<at::Tensor> CheckpointReader::read_values(const std::string& kind,
                                                      const std::vector<WantedRange>& wanted) {
  std::vector<Place> places;
  std::vector<RangeOverlap> overlaps = this->overlaps(kind, wanted, places);
  sort_by_file(overlaps, places);
  std::vector<at::Tensor> values(wanted.size());
  for (const RangeOverlap& o : overlaps) {
    const Place& place = places[o.stored];
    const c10::ScalarType dtype = stored(place).dtype;
    const StoredTensor& tensor = stored(place, dtype, 1);
    const at::Tensor value = at::empty({1}, dtype);
    open(place.piece.file)
        .read(tensor, 0, value.nbytes(), [&](uint64_t at, const char* data, size_t bytes) {
          std::memcpy(static_cast<char*>(value.mutable_data_ptr()) + at, data, bytes);
        });
    at::Tensor& first = values[o.wanted];
    TORCH_CHECK(!first.defined() || same_bytes(first, value), folder_, ": parameter ",
                wanted[o.wanted].owner, ": expected one ", kind,
                " for all its pieces, got different ones");
    first = value;
  }
  return values;
}

c10::ScalarType CheckpointReader::dtype(const std::string& kind, const WantedRange& range) {
  const std::vector<Place> list = places(range.owner, kind);
  TORCH_CHECK(!list.empty(), folder_, ": parameter ", range.owner, ": expected stored ", kind,
              ", got none");
  // The file of another piece may be on another rank.
  const auto overlapping = std::find_if(
      list.begin(), list.end(), [&](const Place& place) { return overlap(place.piece, range); });
  return stored(overlapping == list.end() ? list[0] : *overlapping).dtype;
}

std::string CheckpointReader::read_bytes(const std::string& owner, const std::string& kind) {
  const at::Tensor bytes = read_uncut(owner, kind, at::kByte);
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

at::Tensor CheckpointReader::blocks_read() const {
  const at::Tensor result = at::zeros({blocks_ / kBitsOfInt + 1}, at::kInt);
  auto* const words = result.mutable_data_ptr<int32_t>();
  for (const auto& [index, file] : files_) {
    for (size_t b = 0; b < file->verified().size(); ++b) {
      if (!file->verified()[b]) continue;
      const auto [word, bit] = std::div(first_block_[index] + static_cast<int64_t>(b), kBitsOfInt);
      words[word] |= static_cast<int32_t>(uint32_t{1} << bit);
    }
  }
  return result;
}

void CheckpointReader::verify_file(size_t file, const at::Tensor& read) {
  open(file).verify_rest([&](size_t block) {
    if (!read.defined()) return false;
    const auto [word, bit] = std::div(first_block_[file] + static_cast<int64_t>(block), kBitsOfInt);
    return (static_cast<uint32_t>(read.const_data_ptr<int32_t>()[word]) >> bit & 1) != 0;
  });
}

uint64_t CheckpointReader::bytes_read() const {
  uint64_t bytes = 0;
  for (const auto& [index, file] : files_) bytes += file->bytes_read();
  return bytes;
}

}  // namespace zero
