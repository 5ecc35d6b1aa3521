// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: any bytes as the manifest of a checkpoint whose one tensor
// file is good, with a checksum that matches, since a checksum protects against
// damage only. Reads everything that the manifest speaks of. Whatever is wrong is a
// c10::Error, and nothing larger than the files is allocated.
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/seed_checkpoint.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/match/part_reader.h"

namespace {

namespace fs = std::filesystem;

void write_manifest(const std::string& folder, const std::string& body) {
  std::ofstream(folder + "/" + zero::kManifestName, std::ios::binary | std::ios::trunc)
      << zero::with_checksum(body);
}

// A folder of this process, with the tensor file in it. Throws, which ends the
// fuzzer, unless the readers accept the seed: else they would never come far.
std::string make_folder() {
  std::string folder = fs::temp_directory_path() / "checkpoint_fuzzer.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) std::abort();
  write_manifest(folder, zero::without_checksum(zero::write_seed_file(folder)));
  zero::verify_checkpoint(folder);
  zero::export_model(folder, folder + "/seed");
  return folder;
}

template <typename Call>
void refused_or_not(const Call& call) {
  try {
    call();
  } catch (const c10::Error&) {
  }
}

void read_everything(const std::string& folder) {
  zero::CheckpointReader reader(folder);
  const zero::Manifest& m = reader.manifest();
  for (size_t f = 0; f < m.files.size(); ++f) refused_or_not([&] { reader.verify_file(f); });
  for (const auto& p : m.parameters) {
    for (const std::string& kind : reader.kinds(p.name)) {
      refused_or_not([&] { reader.dtype(kind, {p.name, 0, numel(p)}); });
      refused_or_not([&] { reader.read_values(kind, {{p.name, 0, 1}}); });
      refused_or_not([&] { reader.read_all(kind, {{p.name, 0, numel(p)}}); });
    }
  }
  for (const std::string& name : reader.state_names()) {
    const std::string owner = zero::kStatePrefix + name;
    for (const std::string& kind : reader.kinds(owner)) {
      refused_or_not([&] { reader.read_bytes(owner, kind); });
    }
  }
  zero::PartReader parts(reader);
  for (const auto& p : m.frozen) refused_or_not([&] { parts.read_all(p, "frozen"); });
  for (const auto& p : m.buffers) refused_or_not([&] { parts.read_all(p, "buffer"); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = make_folder();
  const std::string input(reinterpret_cast<const char*>(data), size);
  refused_or_not([&] { zero::parse_manifest(input, "fuzzed"); });
  refused_or_not([&] { zero::parse_files(input, "fuzzed"); });

  write_manifest(folder, input);
  refused_or_not([&] { read_everything(folder); });
  const std::string exported = folder + "/exported";
  refused_or_not([&] { zero::export_model(folder, exported); });
  fs::remove(exported);
  return 0;
}
