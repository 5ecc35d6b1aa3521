// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "zero/atomic_directory.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_manifest.h"
#include "zero/checkpoint_reader.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

struct Found {
  int64_t steps = 0;
  std::string path;
  bool operator<(const Found& other) const {
    return std::tie(steps, path) < std::tie(other.steps, other.path);
  }
};

// The entries of a folder, or none where there is no folder.
std::vector<fs::path> entries(const std::string& parent) {
  std::vector<fs::path> result;
  std::error_code error;
  fs::directory_iterator next(parent, error), end;
  if (error == std::errc::no_such_file_or_directory) return result;
  for (; !error && next != end; next.increment(error)) result.push_back(next->path());
  if (error) throw_errno("cannot list " + parent, error.value());
  return result;
}

// By number of steps.
std::vector<Found> checkpoints(const std::string& parent) {
  std::vector<Found> result;
  for (const fs::path& path : entries(parent)) {
    if (path.filename().string()[0] == '.' || !fs::exists(path / kManifestName)) continue;
    try {
      const Manifest manifest = read_manifest(path.string());
      result.push_back({manifest.steps + manifest.skipped_steps, path.string()});
    } catch (const c10::Error&) {  // damaged, or a manifest of something else
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

bool is_left_over(const fs::path& path) {
  const std::string name = path.filename().string();
  const auto ends_with = [&](const std::string& end) {
    return name.size() > end.size() + 1 &&
           name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  return name[0] == '.' && (ends_with(".saving") || ends_with(".replaced"));
}

}  // namespace

std::optional<std::string> latest(const std::string& parent) {
  const std::vector<Found> found = checkpoints(parent);
  if (found.empty()) return std::nullopt;
  return found.back().path;
}

std::vector<std::string> keep_last(const std::string& parent, int64_t count) {
  TORCH_CHECK(count >= 1, "keep_last: expected a count of at least 1, got ", count);
  std::vector<std::string> removed;
  std::vector<Found> found = checkpoints(parent);
  while (static_cast<int64_t>(found.size()) - static_cast<int64_t>(removed.size()) > count) {
    removed.push_back(found[removed.size()].path);
    remove_directory(removed.back());
  }
  for (const fs::path& path : entries(parent)) {
    std::error_code error;
    if (is_left_over(path)) fs::remove_all(path, error);
    if (error) throw_errno("cannot remove " + path.string(), error.value());
  }
  return removed;
}

void verify_checkpoint(const std::string& folder) {
  CheckpointReader reader(folder);
  for (size_t f = 0; f < reader.manifest().files.size(); ++f) reader.verify_file(f);
}

}  // namespace zero
