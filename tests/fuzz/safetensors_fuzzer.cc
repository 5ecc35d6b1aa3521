// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: any bytes as a safetensors file, and as an index of such files. Whatever the
// reader accepts lies within the file, without overlaps and holes, or in its folder; whatever it
// does not is a c10::Error.
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// A file in memory, which FileReader opens by its name in /proc.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("fuzzed", MFD_CLOEXEC)) { require(descriptor_ >= 0); }
  ~MemoryFile() { close(descriptor_); }
  void fill(const uint8_t* data, size_t bytes) {
    require(ftruncate(descriptor_, 0) == 0);
    require(pwrite(descriptor_, data, bytes, 0) == static_cast<ssize_t>(bytes));
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  const int descriptor_;
};

// That tensors follow each other from the header to the end of the file.
void check_places(const zero::SafetensorsHeader& header, uint64_t file_bytes) {
  uint64_t at = header.data_begin;
  for (const zero::StoredTensor& tensor : header.tensors) {
    require(tensor.begin == at && tensor.end >= at);
    uint64_t bytes = c10::elementSize(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    require(tensor.end - tensor.begin == bytes);
    require(header.find(tensor.name) != nullptr);
    at = tensor.end;
  }
  require(at == file_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static MemoryFile file;
  file.fill(data, size);
  try {
    zero::FileReader reader(file.path());
    const zero::SafetensorsHeader header = zero::read_safetensors_header(reader);
    check_places(header, size);
    for (const zero::StoredTensor& tensor : header.tensors) reader.scan(tensor.begin, tensor.end);
  } catch (const c10::Error&) {
  }
  // As an index.
  try {
    zero::FileReader reader(file.path());
    for (const auto& item : zero::read_safetensors_index(reader)) {
      require(std::filesystem::path(item.second).parent_path() == "/proc/self/fd");
    }
  } catch (const c10::Error&) {
  }
  // The same bytes as a header alone, which spares the fuzzer finding its length.
  constexpr uint64_t kDataBytes = 24;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const uint64_t file_bytes = 8 + size + kDataBytes;
    check_places(zero::parse_safetensors_header(text, file_bytes, "fuzzed"), file_bytes);
  } catch (const c10::Error&) {
  }
  return 0;
}
