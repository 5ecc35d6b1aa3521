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
#include <sstream>
#include <string>
#include <vector>

#include "zero/checkpoint.h"

namespace {

void print_tensors(const char* title, const std::vector<zero::CheckpointTensor>& list) {
  std::printf("%s: %zu\n", title, list.size());
  for (const zero::CheckpointTensor& t : list) {
    std::ostringstream shape;
    shape << c10::IntArrayRef(t.shape);
    std::printf("  %-40s %-10s %s\n", t.name.c_str(), c10::toString(t.dtype), shape.str().c_str());
  }
}

// The states of the objects that the save included.
void print_states(const std::vector<zero::CheckpointState>& states) {
  for (const zero::CheckpointState& state : states) {
    std::printf("state %s: %lld bytes", state.name.c_str(), static_cast<long long>(state.bytes));
    if (state.ranks > 0) std::printf(" of %lld ranks", static_cast<long long>(state.ranks));
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

void print(const std::string& folder, const zero::CheckpointDescription& d) {
  std::printf("%s\n", folder.c_str());
  std::printf("id %s, format version %lld, written by zero %s with torch %s\n", d.id.c_str(),
              static_cast<long long>(d.version), d.library_version.c_str(),
              d.torch_version.c_str());
  if (!d.run.empty()) std::printf("run %s, saved %s\n", d.run.c_str(), date(d.saved).c_str());
  std::printf("saved by %lld ranks, stage %lld, layout %s, buckets of %lld bytes\n",
              static_cast<long long>(d.world_size), static_cast<long long>(d.stage),
              d.layout.c_str(), static_cast<long long>(d.bucket_bytes));
  std::printf("after %lld steps and %lld skipped ones; loss scale %g%s\n",
              static_cast<long long>(d.steps), static_cast<long long>(d.skipped_steps),
              d.loss_scale, d.dynamic_loss_scale ? ", dynamic" : "");
  for (const auto& [name, value] : d.metadata) {
    std::printf("metadata %s: %s\n", name.c_str(), value.c_str());
  }
  for (size_t g = 0; g < d.groups.size(); ++g) {
    std::printf("%s group %zu:", d.optimizer.c_str(), g);
    for (const auto& [name, value] : d.groups[g]) std::printf(" %s %g", name.c_str(), value);
    std::printf("\n");
  }
  print_states(d.states);
  print_tensors("parameters", d.parameters);
  print_tensors("frozen parameters", d.frozen);
  print_tensors("buffers", d.buffers);
  for (const zero::CheckpointFile& file : d.files) {
    std::printf("%-32s %12llu bytes, %lld tensors, XXH3 %016llx\n", file.name.c_str(),
                static_cast<unsigned long long>(file.bytes), static_cast<long long>(file.tensors),
                static_cast<unsigned long long>(file.xxh3));
  }
}

int inspect(std::string folder, const char* model) {
  if (const auto newest = zero::latest(folder)) folder = *newest;
  print(folder, zero::describe_checkpoint(folder));
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
