// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// write_seeds <folder>: <folder>/safetensors and <folder>/checkpoint, what the
// fuzzers of these names start from. Made by the library's own writers, so that
// they never go out of date.
#include <cstdio>
#include <filesystem>
#include <string>

#include "tests/fuzz/seed_checkpoint.h"
#include "tests/support/files.h"

namespace fs = std::filesystem;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const fs::path folder = argv[1];
  fs::create_directories(folder / "safetensors");
  fs::create_directories(folder / "checkpoint");
  const zero::Manifest manifest = zero::write_seed_file(folder.string());
  for (const fs::path& file : {folder / manifest.files[0].name}) {
    fs::rename(file, folder / "safetensors" / "file");
  }
  const std::string file = zero::content(folder / "safetensors" / "file");
  const size_t header_bytes =
      static_cast<unsigned char>(file[0]) + (size_t{static_cast<unsigned char>(file[1])} << 8);
  // Its data lies where the header alone has 24 bytes, as the fuzzer assumes.
  zero::overwrite(folder / "safetensors" / "header",
                  R"({"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                  R"("y":{"dtype":"I64","shape":[1],"data_offsets":[16,24]}})");
  zero::overwrite(
      folder / "safetensors" / "index",
      R"({"metadata":{"total_size":8},"weight_map":{"x":"1.safetensors","y":"2.safetensors"}})");
  zero::overwrite(folder / "safetensors" / "header_of_file", file.substr(8, header_bytes));
  zero::overwrite(folder / "checkpoint" / "manifest", zero::without_checksum(manifest));
  zero::overwrite(folder / "checkpoint" / "files",
                  zero::files_text({{manifest.files[0], manifest.tensors, {}}}));
  return 0;
}
