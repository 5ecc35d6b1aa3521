// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/byte_dataset.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <utility>

#include "examples/train_gpt/mix.h"

namespace zero::examples {

namespace {

namespace fs = std::filesystem;

// One file in this many is held out.
constexpr uint64_t kHeldOutEvery = 20;

// What counts as text inside a folder. A file named on its own is always read.
constexpr std::array<std::string_view, 16> kTextEndings = {
    ".txt", ".md", ".rst", ".h",   ".hpp", ".hh",  ".cc",   ".cpp",
    ".cxx", ".c",  ".cu",  ".cuh", ".py",  ".bzl", ".json", ".tex"};

struct TextFile {
  fs::path path;
  std::string name;  // relative to the folder that was asked for
};

// FNV-1a. Not std::hash, which differs between standard libraries.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  }
  return mix(hash);
}

bool is_text(const fs::path& path) {
  const std::string ending = path.extension().string();
  return std::find(kTextEndings.begin(), kTextEndings.end(), ending) != kTextEndings.end();
}

// Sorted by name, because the order of a folder's entries differs between
// machines and the ranks must agree.
std::vector<TextFile> list_files(const std::vector<std::string>& paths) {
  std::vector<TextFile> files;
  for (const std::string& path : paths) {
    const size_t first = files.size();
    if (fs::is_regular_file(path)) {
      files.push_back({path, fs::path(path).filename().string()});
    } else if (fs::is_directory(path)) {
      for (const auto& entry : fs::recursive_directory_iterator(path)) {
        if (entry.is_regular_file() && is_text(entry.path())) {
          files.push_back({entry.path(), entry.path().lexically_relative(path).generic_string()});
        }
      }
    } else {
      TORCH_CHECK(false, "expected --data to name files and folders, found neither at ", path);
    }
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(first), files.end(),
              [](const TextFile& a, const TextFile& b) { return a.name < b.name; });
  }
  return files;
}

void append_file(const fs::path& path, std::string& text) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  TORCH_CHECK(size >= 0, "cannot read ", path.string());
  const size_t before = text.size();
  text.resize(before + static_cast<size_t>(size));
  file.seekg(0);
  file.read(text.data() + before, size);
  TORCH_CHECK(file.gcount() == size, "expected ", size, " bytes of ", path.string(), ", read ",
              file.gcount());
  text.push_back('\0');  // tells the model where one file ends
}

// Writes bytes [begin, begin + context] of `text` as row `row` of both tensors.
void fill_row(Sequences& sequences, int64_t row, std::string_view text, uint64_t begin) {
  const int64_t context = sequences.inputs.size(1);
  auto* inputs = sequences.inputs.mutable_data_ptr<int64_t>() + row * context;
  auto* targets = sequences.targets.mutable_data_ptr<int64_t>() + row * context;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data()) + begin;
  for (int64_t t = 0; t < context; ++t) {
    inputs[t] = bytes[t];
    targets[t] = bytes[t + 1];
  }
}

Sequences make_sequences(int64_t count, int64_t context) {
  return {at::empty({count, context}, at::kLong), at::empty({count, context}, at::kLong)};
}

}  // namespace

ByteDataset::ByteDataset(const ByteDatasetOptions& options) : options_(options) {
  read_files();
  const auto needed = static_cast<size_t>(options_.context) + 1;
  TORCH_CHECK(training_.size() >= needed && validation_.size() >= needed, "expected at least ",
              needed, " bytes in the training and in the held-out text, got ", training_.size(),
              " and ", validation_.size(), " in ", files_,
              " files; give more text with --data or a smaller --context");
}

void ByteDataset::read_files() {
  const std::vector<TextFile> files = list_files(options_.paths);
  files_ = static_cast<int64_t>(files.size());
  for (const TextFile& file : files) {
    const bool held_out = hash_of(file.name) % kHeldOutEvery == 0;
    append_file(file.path, held_out ? validation_ : training_);
  }
  // Few files may all fall on one side, or nearly so. Then the end of the text
  // is held out instead.
  const size_t total = training_.size() + validation_.size();
  if (validation_.size() < total / 100 || validation_.size() > total / 5) {
    training_.clear();
    validation_.clear();
    for (const TextFile& file : files) append_file(file.path, training_);
    const size_t kept = total - total / kHeldOutEvery;
    validation_ = training_.substr(kept);
    training_.resize(kept);
  }
}

Sequences ByteDataset::training_sequences(int64_t step, int64_t first, int64_t count) const {
  Sequences sequences = make_sequences(count, options_.context);
  const uint64_t begins = training_.size() - static_cast<uint64_t>(options_.context);
  const uint64_t step_key = mix(mix(options_.seed) ^ static_cast<uint64_t>(step));
  for (int64_t row = 0; row < count; ++row) {
    // The remainder favours low values by less than one part in 10^11 for any
    // text that fits in memory.
    const uint64_t begin = mix(step_key ^ mix(static_cast<uint64_t>(first + row))) % begins;
    fill_row(sequences, row, training_, begin);
  }
  return sequences;
}

Sequences ByteDataset::validation_sequences(int64_t total, int64_t first, int64_t count) const {
  Sequences sequences = make_sequences(count, options_.context);
  const uint64_t begins = validation_.size() - static_cast<uint64_t>(options_.context);
  const uint64_t stride = std::max<uint64_t>(begins / static_cast<uint64_t>(total), 1);
  for (int64_t row = 0; row < count; ++row) {
    fill_row(sequences, row, validation_, static_cast<uint64_t>(first + row) * stride % begins);
  }
  return sequences;
}

}  // namespace zero::examples
