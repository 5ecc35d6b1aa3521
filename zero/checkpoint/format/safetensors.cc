// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/safetensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/checkpoint/format/limited_json.h"

namespace zero {
namespace {

using nlohmann::json;

// {name: {"shape": [...]}}: whatever is deeper is no header.
constexpr int kDeepest = 4;

constexpr std::pair<c10::ScalarType, const char*> kDtypes[] = {
    {c10::kDouble, "F64"}, {c10::kFloat, "F32"}, {c10::kHalf, "F16"},  {c10::kBFloat16, "BF16"},
    {c10::kLong, "I64"},   {c10::kInt, "I32"},   {c10::kShort, "I16"}, {c10::kChar, "I8"},
    {c10::kByte, "U8"},    {c10::kBool, "BOOL"},
};

const char* dtype_name(c10::ScalarType dtype) {
  for (const auto& [type, name] : kDtypes) {
    if (type == dtype) return name;
  }
  return nullptr;
}

// Undefined for a dtype that is unknown here.
c10::ScalarType parse_dtype(const std::string& text) {
  for (const auto& [type, name] : kDtypes) {
    if (text == name) return type;
  }
  return c10::ScalarType::Undefined;
}

uint64_t unsigned_number(const json& value, const std::string& where) {
  TORCH_CHECK(value.is_number_unsigned(), where, ": expected a whole number of at least 0, got ",
              value.dump());
  return value.get<uint64_t>();
}

// The bytes of a tensor. Throws where 63 bits do not hold them.
uint64_t tensor_bytes(const std::vector<int64_t>& shape, c10::ScalarType dtype,
                      const std::string& where) {
  // An empty dimension excuses no other: torch would overflow on the rest.
  uint64_t bytes = c10::elementSize(dtype);
  bool empty = false;
  for (int64_t size : shape) {
    empty = empty || size == 0;
    const bool overflow =
        size < 0 ||
        __builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &bytes) ||
        bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    TORCH_CHECK(!overflow, where, ": expected a shape whose bytes fit 63 bits, got ",
                c10::IntArrayRef(shape));
  }
  return empty ? 0 : bytes;
}

StoredTensor parse_tensor(const std::string& name, const json& value, uint64_t data_begin,
                          uint64_t data_bytes, const std::string& path) {
  const std::string where = path + ": tensor " + printable(name);
  TORCH_CHECK(value.is_object() && value.contains("dtype") && value.contains("shape") &&
                  value.contains("data_offsets") && value["dtype"].is_string() &&
                  value["shape"].is_array() && value["data_offsets"].is_array() &&
                  value["data_offsets"].size() == 2,
              where, ": expected dtype, shape and two data_offsets, got something else");
  StoredTensor tensor{name, parse_dtype(value["dtype"].get<std::string>()), {}, 0, 0};
  for (const json& size : value["shape"]) {
    const uint64_t number = unsigned_number(size, where);
    TORCH_CHECK(number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), where,
                ": expected sizes of 63 bits, got ", number);
    tensor.shape.push_back(static_cast<int64_t>(number));
  }
  const uint64_t begin = unsigned_number(value["data_offsets"][0], where);
  const uint64_t end = unsigned_number(value["data_offsets"][1], where);
  TORCH_CHECK(begin <= end && end <= data_bytes, where, ": expected a place within ", data_bytes,
              " bytes of data, got ", begin, " to ", end);
  const uint64_t bytes = tensor.dtype == c10::ScalarType::Undefined
                             ? end - begin
                             : tensor_bytes(tensor.shape, tensor.dtype, where);
  TORCH_CHECK(end - begin == bytes, where, ": expected ", bytes, " bytes for its shape, got ",
              end - begin);
  tensor.begin = data_begin + begin;
  tensor.end = data_begin + end;
  return tensor;
}

void check_covers(const SafetensorsHeader& header, uint64_t file_bytes, const std::string& path) {
  uint64_t at = header.data_begin;
  for (const StoredTensor& tensor : header.tensors) {
    TORCH_CHECK(tensor.begin == at, path, ": tensor ", printable(tensor.name),
                ": expected it to begin at ", at, " where the one before ends, got ", tensor.begin,
                "; tensors must not overlap or leave holes");
    at = tensor.end;
  }
  TORCH_CHECK(at == file_bytes, path, ": expected tensors up to the end of the file at ",
              file_bytes, ", got ", at);
}

json parse_json(std::string_view text, const std::string& path) {
  json value;
  try {
    value = parse_json_of_depth(text, kDeepest);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ": ", error_text(error));
  }
  TORCH_CHECK(value.is_object(), path, ": expected a JSON object, got something else");
  return value;
}

}  // namespace

bool safetensors_knows(c10::ScalarType dtype) { return dtype_name(dtype) != nullptr; }

const StoredTensor* SafetensorsHeader::find(const std::string& name) const {
  for (const StoredTensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t file_bytes,
                                           const std::string& path) {
  TORCH_CHECK(text.size() <= kSafetensorsHeaderLimit && file_bytes >= kSafetensorsLengthBytes &&
                  text.size() <= file_bytes - kSafetensorsLengthBytes,
              path, ": expected a header of at most ", kSafetensorsHeaderLimit,
              " bytes within the file, got ", text.size());
  SafetensorsHeader header;
  header.data_begin = kSafetensorsLengthBytes + text.size();
  const json root = parse_json(text, path);
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      TORCH_CHECK(value.is_object(), path, ": expected metadata by name, got something else");
      for (const auto& [key, entry] : value.items()) {
        TORCH_CHECK(entry.is_string(), path, ": metadata ", key, ": expected text, got ",
                    entry.type_name());
        header.metadata[key] = entry.get<std::string>();
      }
      continue;
    }
    header.tensors.push_back(
        parse_tensor(name, value, header.data_begin, file_bytes - header.data_begin, path));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
            });
  check_covers(header, file_bytes, path);
  return header;
}

std::string read_safetensors_beginning(StoredBytes& file) {
  const std::string length_bytes = file.read_text(0, kSafetensorsLengthBytes);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(length_bytes[i]);
  TORCH_CHECK(length <= kSafetensorsHeaderLimit && length <= file.size() - kSafetensorsLengthBytes,
              file.path(), ": expected a header of at most ", kSafetensorsHeaderLimit,
              " bytes within the file of ", file.size(), ", got a length of ", length);
  return length_bytes + file.read_text(kSafetensorsLengthBytes, length);
}

SafetensorsHeader read_safetensors_header(StoredBytes& file) {
  const std::string beginning = read_safetensors_beginning(file);
  return parse_safetensors_header(std::string_view(beginning).substr(kSafetensorsLengthBytes),
                                  file.size(), file.path());
}

std::map<std::string, std::string> read_safetensors_index(StoredBytes& file) {
  TORCH_CHECK(file.size() <= kSafetensorsHeaderLimit, file.path(),
              ": expected an index of at most ", kSafetensorsHeaderLimit, " bytes, got ",
              file.size());
  const json root = parse_json(file.read_text(0, file.size()), file.path());
  const auto weight_map = root.find("weight_map");
  TORCH_CHECK(weight_map != root.end() && weight_map->is_object(), file.path(),
              ": expected a weight_map with the file of each tensor, got none");
  std::map<std::string, std::string> paths;
  for (const auto& [name, value] : weight_map->items()) {
    TORCH_CHECK(value.is_string(), file.path(), ": tensor ", printable(name),
                ": expected the name of its file, got ", value.type_name());
    const std::string in_folder = value.get<std::string>();
    TORCH_CHECK(in_folder.find('/') == std::string::npos, file.path(), ": tensor ", printable(name),
                ": expected a file in the folder of the index, got ", printable(in_folder));
    paths[name] = std::filesystem::path(file.path()).replace_filename(in_folder).string();
  }
  return paths;
}

std::string lay_out_safetensors(std::vector<StoredTensor>& tensors,
                                const std::map<std::string, std::string>& metadata,
                                const std::string& path) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
                   });
  json root = json::object();
  if (!metadata.empty()) root["__metadata__"] = metadata;
  uint64_t at = 0;
  for (StoredTensor& tensor : tensors) {
    const std::string where = path + ": tensor " + tensor.name;
    TORCH_CHECK(safetensors_knows(tensor.dtype), where, ": safetensors has no name for dtype ",
                tensor.dtype);
    TORCH_CHECK(tensor.name != "__metadata__" && !root.contains(tensor.name), where,
                ": expected a name that is free, got one that is taken");
    tensor.begin = at;
    tensor.end = at + tensor_bytes(tensor.shape, tensor.dtype, where);
    at = tensor.end;
    root[tensor.name] = {{"dtype", dtype_name(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = root.dump();
  // Blanks are part of the header: with them the data begins aligned.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK(text.size() <= kSafetensorsHeaderLimit, path, ": expected a header of at most ",
              kSafetensorsHeaderLimit, " bytes, got ", text.size());
  std::string beginning(kSafetensorsLengthBytes, '\0');
  for (size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    beginning[i] = static_cast<char>(text.size() >> (8 * i));
  }
  beginning += text;
  for (StoredTensor& tensor : tensors) {
    tensor.begin += beginning.size();
    tensor.end += beginning.size();
  }
  return beginning;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), tensors_(std::move(tensors)) {
  const std::string beginning = lay_out_safetensors(tensors_, metadata, path);
  file_.write(beginning.data(), beginning.size());
}

void SafetensorsWriter::write(const void* data, uint64_t bytes) {
  TORCH_INTERNAL_ASSERT(next_ < tensors_.size());
  const StoredTensor& tensor = tensors_[next_++];
  TORCH_INTERNAL_ASSERT(bytes == tensor.end - tensor.begin);
  file_.write(data, bytes);
}

void SafetensorsWriter::finish() {
  TORCH_INTERNAL_ASSERT(next_ == tensors_.size());
  file_.finish();
}

}  // namespace zero
