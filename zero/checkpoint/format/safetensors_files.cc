// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/json_text.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/file_system.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {

SafetensorsFiles::File::File(const std::string& path) : reader(path) {
  SafetensorsHeader header = read_safetensors_header(reader);
  for (StoredTensor& tensor : header.tensors) tensors.emplace(tensor.name, std::move(tensor));
  metadata = std::move(header.metadata);
  reader.release();
}

at::Tensor SafetensorsFiles::Source::read() const {
  at::Tensor host = at::empty(tensor->shape, at::TensorOptions().dtype(tensor->dtype));
  file->reader.read(tensor->begin, host.mutable_data_ptr(), host.nbytes());
  return host;
}

SafetensorsFiles::SafetensorsFiles(const std::string& path) {
  if (path.ends_with(".json")) {
    FileReader index(path);
    path_of_ = read_safetensors_index(index);
    bytes_of_index_ = index.bytes_read();
  } else {
    for (const auto& item : open(path).tensors) path_of_[item.first] = path;
  }
}

SafetensorsFiles::Source SafetensorsFiles::find(const std::string& name) {
  const auto place = path_of_.find(name);
  if (place == path_of_.end()) return {};
  File& file = open(place->second);
  const auto found = file.tensors.find(name);
  TORCH_CHECK(found != file.tensors.end(), place->second, ": expected the tensor ", printable(name),
              ", which the index says is in it, got a file without it");
  return {&file, &found->second};
}

std::map<std::string, std::string> SafetensorsFiles::metadata() {
  if (files_.empty() && !path_of_.empty()) open(path_of_.begin()->second);
  return files_.empty() ? std::map<std::string, std::string>() : files_.begin()->second.metadata;
}

uint64_t SafetensorsFiles::bytes_read() const {
  uint64_t bytes = bytes_of_index_;
  for (const auto& item : files_) bytes += item.second.reader.bytes_read();
  return bytes;
}

namespace {

constexpr char kEnding[] = ".safetensors";

void refuse_existing(const std::string& path) {
  if (exists(path)) throw_errno("cannot export to " + path, EEXIST);
}

// Files that get their names when all are on disk, or never.
class NewFiles {
 public:
  NewFiles() = default;
  ~NewFiles() {
    for (const auto& [present, target] : files_) unlink(present.c_str());
  }
  NewFiles(const NewFiles&) = delete;
  NewFiles& operator=(const NewFiles&) = delete;

  // Returns the hidden path to write to.
  std::string add(const std::string& path) {
    files_.emplace_back(saving_path(path, random_id()), path);
    return files_.back().first;
  }

  void publish() {
    for (size_t i = 0; i < files_.size(); ++i) {
      auto& [present, target] = files_[i];
      if (i > 0 && i + 1 == files_.size()) sync_folder(parent_of(target));  // before the index
      const int error = rename_to_free_name(present, target);
      if (error != 0) throw_errno("cannot name the exported file " + target, error);
      present = target;
    }
    sync_folder(parent_of(files_.back().second));
    files_.clear();
  }

 private:
  std::vector<std::pair<std::string, std::string>> files_;  // where it is now, its name
};

using Tensors = std::vector<const TensorToWrite*>;

uint64_t bytes_of(const TensorToWrite& tensor) {
  return c10::multiply_integers(tensor.shape) * c10::elementSize(tensor.dtype);
}

std::vector<Tensors> split(const std::vector<TensorToWrite>& tensors, int64_t max_file_bytes) {
  std::vector<Tensors> files(1);
  uint64_t bytes = 0;
  for (const TensorToWrite& tensor : tensors) {
    bytes += bytes_of(tensor);
    const bool full = max_file_bytes > 0 && bytes > static_cast<uint64_t>(max_file_bytes);
    if (full && !files.back().empty()) {
      files.emplace_back();
      bytes = bytes_of(tensor);
    }
    files.back().push_back(&tensor);
  }
  return files;
}

void write_file(const std::string& path, const Tensors& tensors,
                const std::map<std::string, std::string>& metadata) {
  std::map<std::string, const TensorToWrite*> by_name;
  std::vector<StoredTensor> stored;
  for (const TensorToWrite* t : tensors) {
    by_name[t->name] = t;
    stored.push_back({t->name, t->dtype, t->shape, 0, 0});
  }
  const std::string beginning = lay_out_safetensors(stored, metadata, path);
  FileWriter writer(path);
  writer.write(beginning.data(), beginning.size());
  for (const StoredTensor& place : stored) {
    const at::Tensor tensor = by_name.at(place.name)->read().contiguous();
    TORCH_INTERNAL_ASSERT(tensor.scalar_type() == place.dtype && tensor.sizes() == place.shape);
    writer.write(tensor.const_data_ptr(), tensor.nbytes());
  }
  writer.finish();
}

std::string numbered(const std::string& path, size_t file, size_t files) {
  const bool ends = path.ends_with(kEnding);
  char number[64];
  snprintf(number, sizeof(number), "-%05zu-of-%05zu", file + 1, files);
  return path.substr(0, path.size() - (ends ? sizeof(kEnding) - 1 : 0)) + number +
         (ends ? kEnding : "");
}

// The index of `files`, which have these names.
std::string index_text(const std::string& path, const std::vector<Tensors>& files,
                       const std::vector<std::string>& names) {
  nlohmann::json weight_map = nlohmann::json::object();
  uint64_t bytes = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    for (const TensorToWrite* t : files[f]) {
      weight_map[t->name] = names[f].substr(names[f].rfind('/') + 1);
      bytes += bytes_of(*t);
    }
  }
  const nlohmann::json root = {{"metadata", {{"total_size", bytes}}}, {"weight_map", weight_map}};
  std::string text;
  try {
    text = json_text(root, 2) + "\n";
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK(false, printable(path),
                ": expected names of files and tensors in UTF-8, which an index has, got others; "
                "choose another path, or no limit of bytes");
  }
  TORCH_CHECK(text.size() <= kSafetensorsHeaderLimit, path, ": expected an index of at most ",
              kSafetensorsHeaderLimit, " bytes, got ", text.size(), "; write fewer tensors");
  return text;
}

}  // namespace

std::string write_safetensors_files(const std::string& path,
                                    const std::vector<TensorToWrite>& tensors,
                                    const std::map<std::string, std::string>& metadata,
                                    int64_t max_file_bytes) {
  TORCH_CHECK(max_file_bytes >= 0, path, ": expected a limit of 0 bytes (none) or more, got ",
              max_file_bytes);
  TORCH_CHECK(!path.ends_with(".json"), path,
              ": expected the path of a safetensors file, got one that ends in .json, which "
              "readers take for an index");
  const std::string index = path + ".index.json";
  const std::vector<Tensors> files = split(tensors, max_file_bytes);
  std::vector<std::string> names;
  for (size_t f = 0; files.size() > 1 && f < files.size(); ++f) {
    names.push_back(numbered(path, f, files.size()));
  }
  refuse_existing(path);
  refuse_existing(index);
  for (const std::string& name : names) refuse_existing(name);
  NewFiles made;
  if (names.empty()) {
    write_file(made.add(path), files[0], metadata);
    made.publish();
    return path;
  }
  const std::string text = index_text(path, files, names);
  for (size_t f = 0; f < files.size(); ++f) write_file(made.add(names[f]), files[f], metadata);
  FileWriter writer(made.add(index));
  writer.write(text.data(), text.size());
  writer.finish();
  made.publish();
  return index;
}

}  // namespace zero
