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

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "examples/callers_folder.h"
#include "zero/checkpoint.h"

namespace {

constexpr const char* kUsage =
    "usage: inspect_checkpoint <folder> [<model.safetensors to write> [ema]]\n";
constexpr const char* kHelp =
    "\n"
    "Prints what a checkpoint holds and verifies every byte of it. <folder> is a checkpoint, or a\n"
    "folder of checkpoints, of which the newest one is taken. With a second argument it also\n"
    "writes the model into one file, which Python's safetensors reads: parameters in the\n"
    "dtype of the model, frozen ones and buffers; with \"ema\" averages in place of parameters.\n"
    "\n"
    "The exit code is 0, 1 when the checkpoint cannot be read or is damaged, and 2 for other\n"
    "arguments.\n";

int64_t elements(const std::vector<zero::CheckpointTensor>& list) {
  int64_t sum = 0;
  for (const zero::CheckpointTensor& tensor : list) {
    int64_t numel = 1;
    for (const int64_t size : tensor.shape) numel *= size;
    sum += numel;
  }
  return sum;
}

void print_tensors(const char* title, const std::vector<zero::CheckpointTensor>& list) {
  std::printf("%s: %zu with %lld elements\n", title, list.size(),
              static_cast<long long>(elements(list)));
  for (const zero::CheckpointTensor& t : list) {
    std::ostringstream shape;
    shape << c10::IntArrayRef(t.shape);
    const std::string moments = t.moments.empty() ? "" : ", moments in " + t.moments;
    const std::string master = t.master.empty() ? "" : ", " + t.master + " master";
    std::printf("  %-40s %-10s %s%s%s\n", t.name.c_str(), c10::toString(t.dtype),
                shape.str().c_str(), moments.c_str(), master.c_str());
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
  if (d.ema) std::printf("with an average of the parameters\n");
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
  uint64_t bytes = 0;
  for (const zero::CheckpointFile& file : d.files) {
    bytes += file.bytes;
    std::printf("%-32s %12llu bytes, %lld tensors, XXH3 %016llx\n", file.name.c_str(),
                static_cast<unsigned long long>(file.bytes), static_cast<long long>(file.tensors),
                static_cast<unsigned long long>(file.xxh3));
  }
  const int64_t parameters = elements(d.parameters);
  std::printf("in all %zu files, %llu bytes; %.2f bytes for each of %lld parameters\n",
              d.files.size(), static_cast<unsigned long long>(bytes),
              static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(parameters, 1)),
              static_cast<long long>(parameters));
}

int inspect(std::string folder, const char* model, bool ema) {
  if (const auto newest = zero::latest(folder)) folder = *newest;
  const zero::CheckpointDescription d = zero::describe_checkpoint(folder);
  print(folder, d);
  int64_t elsewhere = 0;
  for (const zero::CheckpointFile& file : d.files) {
    const bool here = access((folder + "/" + file.name).c_str(), F_OK) == 0;
    elsewhere += file.disk != d.disk && !here ? 1 : 0;
  }
  zero::verify_checkpoint(folder, /*one_disk=*/elsewhere > 0);
  if (elsewhere > 0) {
    std::printf("all checksums of disk %lld match; %lld files are on other disks\n",
                static_cast<long long>(d.disk), static_cast<long long>(elsewhere));
  } else {
    std::printf("all checksums match\n");
  }
  if (model != nullptr) {
    zero::export_model(folder, model, zero::ExportOptions().ema(ema));
    std::printf("exported to %s\n", model);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "", last = argv[argc - 1];
  if (first == "--help" || first == "-h") {
    std::printf("%s%s", kUsage, kHelp);
    return 0;
  }
  const bool ema = argc == 4 && std::string(argv[3]) == "ema";
  if (argc < 2 || (argc > 3 && !ema) || first.starts_with("-") || last.starts_with("-")) {
    std::fprintf(stderr, "%s", kUsage);
    return 2;
  }
  try {
    zero::examples::enter_callers_folder();
    return inspect(argv[1], argc > 2 ? argv[2] : nullptr, ema);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "inspect_checkpoint: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "inspect_checkpoint: %s\n", error.what());
  }
  return 1;
}
