// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/manifest.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <filesystem>
#include <numeric>
#include <system_error>
#include <unordered_map>

#include "zero/checkpoint/format/hashed_file.h"

namespace zero {

int64_t numel(const ManifestParameter& parameter) {
  return c10::multiply_integers(parameter.shape);
}

const std::vector<int64_t>& whole_shape(const ManifestParameter& parameter) {
  return is_part(parameter) ? parameter.whole : parameter.shape;
}

std::string stored_name(const ManifestParameter& parameter) {
  if (!is_part(parameter)) return parameter.name;
  const int64_t end = parameter.from + parameter.shape[parameter.dimension];
  return parameter.name + "{" + std::to_string(parameter.dimension) + ":" +
         std::to_string(parameter.from) + ":" + std::to_string(end) + "}";
}

std::vector<size_t> memory_order(const ManifestParameter& parameter) {
  std::vector<size_t> order(parameter.shape.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (parameter.strides.empty()) return order;
  // A dimension of one element is nowhere in memory, whatever its stride: it comes first.
  const std::vector<int64_t>& whole = whole_shape(parameter);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const bool alone = whole[a] == 1, other_alone = whole[b] == 1;
    if (alone || other_alone) return alone && !other_alone;
    return parameter.strides[a] > parameter.strides[b];
  });
  return order;
}

TensorPart part_of(const ManifestParameter& parameter) {
  TensorPart part;
  TensorBox box;
  for (const size_t d : memory_order(parameter)) {
    const bool cut = is_part(parameter) && d == static_cast<size_t>(parameter.dimension);
    if (cut) part.along = box.from.size();
    box.from.push_back(cut ? parameter.from : 0);
    box.sizes.push_back(parameter.shape[d]);
  }
  // A part of a fused tensor has its share of each section, one behind the other.
  if (parameter.sections.empty()) {
    part.boxes.push_back(std::move(box));
    return part;
  }
  const int64_t size = parameter.shape[parameter.dimension];
  const int64_t parts = parameter.whole[parameter.dimension] / size;
  int64_t begin = 0;  // of the section in the whole
  for (const int64_t section : parameter.sections) {
    box.sizes[part.along] = section / parts;
    box.from[part.along] = begin + parameter.from / size * (section / parts);
    part.boxes.push_back(box);
    begin += section;
  }
  return part;
}

int64_t writer_of(const ManifestFile& file) {
  const size_t end = std::min(file.name.rfind('.'), file.name.size());
  size_t begin = end;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(file.name[begin - 1]))) --begin;
  int64_t rank = 0;
  for (size_t i = begin; i < end && i < begin + 9; ++i) rank = rank * 10 + (file.name[i] - '0');
  return rank;  // 0 for the frozen parameters of a save without a mesh
}

bool is_value(const std::string& kind) {
  return kind == "step" || kind.rfind("value:", 0) == 0 || kind.rfind("scalar:", 0) == 0;
}

bool is_held_whole(const std::string& kind) { return kind == "frozen" || kind == "buffer"; }

bool has_ema(const Manifest& manifest) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(), [](const auto& entry) {
    return std::find(entry.kinds.begin(), entry.kinds.end(), kEmaKind) != entry.kinds.end();
  });
}

std::string tensor_key(const ManifestTensor& t) {
  const bool whole = is_held_whole(t.kind) || (!t.owner.empty() && t.owner[0] == kStatePrefix);
  if (whole) return t.owner;
  const std::string from = std::to_string(t.begin), to = std::to_string(t.begin + t.numel);
  return t.owner + "[" + from + ":" + to + "]." + t.kind;
}

bool is_uncut(const std::string& kind) { return kind.rfind(kUncutPrefix, 0) == 0; }

namespace {

// The numbers of entries in a list, by their name and kinds, which have no NUL.
using EntryNumbers = std::unordered_map<std::string, size_t>;

// A load wants for each element of a parameter what any of them has.
void check_pieces(const std::vector<ManifestTensors>& tensors) {
  std::unordered_map<std::string, std::map<std::string, int64_t>> elements;  // by owner and kind
  for (const ManifestTensors& entry : tensors) {
    std::map<std::string, int64_t>& of = elements[entry.owner];
    for (const std::string& kind : entry.kinds) {
      if (is_value(kind) || is_uncut(kind)) continue;
      for (const ManifestPiece& piece : entry.pieces) of[kind] += piece.numel;
    }
  }
  for (const auto& [owner, kinds] : elements) {
    const auto master = kinds.find("master");
    if (master == kinds.end()) continue;
    for (const auto& [kind, numel] : kinds) {
      TORCH_CHECK(numel == master->second, "parameter ", owner, ": expected ", kind, " of all its ",
                  master->second, " elements, got it of ", numel,
                  "; an optimizer that makes state where a gradient is not zero does not treat "
                  "every element by itself: let its step() make it for each parameter that has a "
                  "gradient");
    }
  }
}

// Adds the pieces of `entry`, which are in `file`, to what has its name and its kinds.
void add_entry(const ManifestTensors& entry, int64_t file, EntryNumbers& numbers,
               std::vector<ManifestTensors>& into) {
  std::string key = entry.owner;
  for (const std::string& kind : entry.kinds) key.append(1, '\0').append(kind);
  const auto [at, added] = numbers.emplace(std::move(key), into.size());
  if (added) {
    TORCH_CHECK(entry.kinds.size() <= kKindsLimit, "checkpoint: ", entry.owner,
                ": expected at most ", kKindsLimit, " kinds of tensors, got ", entry.kinds.size());
    into.push_back({entry.owner, entry.kinds, {}});
  }
  for (ManifestPiece piece : entry.pieces) {
    piece.file = file;
    into[at->second].pieces.push_back(piece);
  }
}

}  // namespace

std::vector<ManifestTensors> tensors_by_name(const std::vector<ManifestTensor>& tensors) {
  std::vector<ManifestTensors> result;
  EntryNumbers numbers;
  for (size_t first = 0; first < tensors.size();) {
    // The kinds of one piece follow each other.
    const ManifestTensor& piece = tensors[first];
    ManifestTensors entry{piece.owner, {}, {{0, piece.begin, piece.numel}}};
    for (; first < tensors.size(); ++first) {
      const ManifestTensor& t = tensors[first];
      if (t.owner != piece.owner || t.begin != piece.begin || t.numel != piece.numel) break;
      entry.kinds.push_back(t.kind);
    }
    add_entry(entry, 0, numbers, result);
  }
  return result;
}

void add_files(const std::vector<FileContent>& files, Manifest& manifest) {
  EntryNumbers numbers;
  std::unordered_map<std::string, uint64_t> seen;  // by name, NUL and kind
  for (const FileContent& file : files) {
    for (const ManifestTensors& entry : file.tensors) {
      add_entry(entry, static_cast<int64_t>(manifest.files.size()), numbers, manifest.tensors);
    }
    manifest.files.push_back(file.about);
    for (const StoredValue& value : file.values) {
      const auto [first, added] = seen.emplace(value.owner + '\0' + value.kind, value.hash);
      TORCH_CHECK(added || first->second == value.hash, "parameter ", value.owner,
                  ": expected one ", value.kind, " for all its pieces, got different ones in ",
                  file.about.name,
                  "; an optimizer that keeps a value of the piece it was given, such as a norm, "
                  "does not treat every element by itself");
    }
  }
  check_pieces(manifest.tensors);
}

Manifest read_manifest(const std::string& folder) {
  return parse_manifest(read_manifest_text(folder), folder + "/" + kManifestName);
}

bool has_size(const std::string& folder, const ManifestFile& file) {
  namespace fs = std::filesystem;
  const fs::path path = folder + "/" + file.name;
  std::error_code error;
  const bool regular = fs::is_regular_file(path, error);
  const uintmax_t bytes = regular ? fs::file_size(path, error) : 0;
  if (error && !is_not_there(error)) throw_errno("cannot look at " + path.string(), error.value());
  return !error && regular && bytes == file.bytes;
}

bool has_files(const std::string& folder, const Manifest& manifest) {
  return std::all_of(manifest.files.begin(), manifest.files.end(), [&](const auto& file) {
    return file.disk != manifest.disk || has_size(folder, file);
  });
}

bool is_complete_checkpoint(const std::string& folder) {
  try {
    return has_files(folder, read_manifest_without_tensors(folder));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace zero
