// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Prints what a checkpoint holds and verifies every byte of it.
//
// Usage:
//   ./bazelw run //examples:inspect_checkpoint -- run/step-200
//   ./bazelw run //examples:inspect_checkpoint -- run            # the newest in there
//   ./bazelw run //examples:inspect_checkpoint -- run/step-200 model.safetensors   # export
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "zero/checkpoint.h"
#include "zero/checkpoint/manifest.h"

namespace {

void print_tensors(const char* title, const std::vector<zero::ManifestParameter>& list) {
  std::printf("%s: %zu\n", title, list.size());
  for (const zero::ManifestParameter& p : list) {
    std::ostringstream shape;
    shape << c10::IntArrayRef(p.shape);
    std::printf("  %-40s %-10s %s\n", p.name.c_str(), c10::toString(p.dtype), shape.str().c_str());
  }
}

// Of the objects that the save included; one that each rank has counts once per rank.
void print_states(const zero::Manifest& m) {
  std::map<std::string, std::pair<int64_t, int64_t>> states;  // count, bytes
  for (const zero::ManifestFile& file : m.files) {
    for (const zero::ManifestTensor& t : file.tensors) {
      if (t.owner.empty() || t.owner[0] != zero::kStatePrefix) continue;
      auto& [count, bytes] = states[t.owner.substr(1)];
      count += 1;
      bytes += t.numel;
    }
  }
  for (const auto& [name, state] : states) {
    std::printf("state %s: %lld bytes", name.c_str(), static_cast<long long>(state.second));
    if (state.first > 1) std::printf(" of %lld ranks", static_cast<long long>(state.first));
    std::printf("\n");
  }
}

// Of microseconds since 1970: "2026-01-31 12:00:00 UTC".
std::string date(int64_t microseconds) {
  const auto seconds = static_cast<std::time_t>(microseconds / 1000000);
  std::tm parts{};
  char text[64] = "at an unknown time";
  if (gmtime_r(&seconds, &parts) != nullptr) {
    std::strftime(text, sizeof(text), "%F %T UTC", &parts);
  }
  return text;
}

void print(const std::string& folder, const zero::Manifest& m) {
  std::printf("%s\n", folder.c_str());
  std::printf("id %s, written by zero %s with torch %s\n", m.id.c_str(), m.library_version.c_str(),
              m.torch_version.c_str());
  if (!m.run.empty()) std::printf("run %s, saved %s\n", m.run.c_str(), date(m.saved).c_str());
  std::printf("saved by %lld ranks, stage %lld, layout %s, buckets of %lld bytes\n",
              static_cast<long long>(m.world_size), static_cast<long long>(m.stage),
              m.layout.c_str(), static_cast<long long>(m.bucket_bytes));
  std::printf("after %lld steps and %lld skipped ones; loss scale %g%s\n",
              static_cast<long long>(m.steps), static_cast<long long>(m.skipped_steps), m.scale,
              m.dynamic_scale ? ", dynamic" : "");
  for (const auto& [name, value] : m.metadata) {
    std::printf("metadata %s: %s\n", name.c_str(), value.c_str());
  }
  for (size_t g = 0; g < m.groups.size(); ++g) {
    std::printf("%s group %zu:", m.optimizer.c_str(), g);
    for (const auto& [name, value] : m.groups[g]) std::printf(" %s %g", name.c_str(), value);
    std::printf("\n");
  }
  print_states(m);
  print_tensors("parameters", m.parameters);
  print_tensors("frozen parameters", m.frozen);
  print_tensors("buffers", m.buffers);
  for (const zero::ManifestFile& file : m.files) {
    std::printf("%-32s %12llu bytes, %zu tensors\n", file.name.c_str(),
                static_cast<unsigned long long>(file.bytes), file.tensors.size());
  }
}

int inspect(std::string folder, const char* model) {
  if (const auto newest = zero::latest(folder)) folder = *newest;
  print(folder, zero::read_manifest(folder));
  zero::verify_checkpoint(folder);
  std::printf("all checksums match\n");
  if (model != nullptr) {
    zero::export_model(folder, model);
    std::printf("exported to %s\n", model);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: inspect_checkpoint <folder> [<model.safetensors to write>]\n");
    return 2;
  }
  // `bazel run` starts programs elsewhere; paths mean what they meant to the user.
  if (const char* place = std::getenv("BUILD_WORKING_DIRECTORY")) {
    if (chdir(place) != 0) std::perror(place);
  }
  try {
    return inspect(argv[1], argc == 3 ? argv[2] : nullptr);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "inspect_checkpoint: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "inspect_checkpoint: %s\n", error.what());
  }
  return 1;
}
