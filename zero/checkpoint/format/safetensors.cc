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
#include "zero/base/json_text.h"
#include "zero/checkpoint/format/json.h"

namespace zero {
namespace {

using nlohmann::json;

// {name: {"shape": [...]}}: whatever is deeper is no header.
constexpr int kDeepest = 4;
constexpr char kMetadata[] = "__metadata__";

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

// The bytes of a tensor. Throws where 63 bits do not hold them; where() is for errors.
template <typename Where>
uint64_t tensor_bytes(const std::vector<int64_t>& shape, c10::ScalarType dtype,
                      const Where& where) {
  // An empty dimension excuses no other: torch would overflow on the rest.
  uint64_t bytes = c10::elementSize(dtype);
  bool empty = false;
  for (int64_t size : shape) {
    empty = empty || size == 0;
    const bool overflow =
        size < 0 ||
        __builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &bytes) ||
        bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    TORCH_CHECK(!overflow, where(), ": expected a shape whose bytes fit 63 bits, got ",
                c10::IntArrayRef(shape));
  }
  return empty ? 0 : bytes;
}

// Fills a SafetensorsHeader while the text is read, without values in between: a file has four
// tensors for each parameter. Its errors do not name the path.
class HeaderReader final : public LimitedJson {
 public:
  // `file_bytes` is at least header.data_begin.
  HeaderReader(SafetensorsHeader& header, uint64_t file_bytes)
      : LimitedJson(kDeepest), header_(header), data_bytes_(file_bytes - header.data_begin) {}

  // Whether the text is an object.
  bool is_object() const { return is_object_; }

  bool number_unsigned(number_unsigned_t number) override {
    if (!is_number()) return value("number");
    if (field_ == kShape) {
      TORCH_CHECK(number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), where(),
                  ": expected sizes of 63 bits, got ", number);
      tensor_.shape.push_back(static_cast<int64_t>(number));
      return true;
    }
    TORCH_CHECK(offsets_ < 2, where(), kExpected);
    (offsets_++ == 0 ? tensor_.begin : tensor_.end) = number;
    return true;
  }
  bool string(string_t& text) override {
    if (depth() == kInEntry && in_metadata_) {
      header_.metadata[key_] = text;
      return true;
    }
    if (depth() != kInEntry || field_ != kDtype) return value("string");
    tensor_.dtype = parse_dtype(text);
    found_ |= kDtype;
    return true;
  }

  bool key(string_t& name) override {
    if (depth() == kInRoot) {
      in_metadata_ = name == kMetadata;
      tensor_.name = name;
    } else if (depth() == kInEntry) {
      if (in_metadata_) key_ = name;
      field_ = name == "dtype" ? kDtype : name == "shape" ? kShape : kNone;
      if (name == "data_offsets") field_ = kOffsets;
    }
    return LimitedJson::key(name);
  }

  bool start_object(std::size_t size) override {
    if (depth() == 0) is_object_ = true;
    if (depth() >= kInEntry) value("object");
    if (depth() == kInRoot && !in_metadata_) {
      tensor_.shape.clear();
      found_ = kNone;
      offsets_ = 0;
    }
    return LimitedJson::start_object(size);
  }
  bool end_object() override {
    LimitedJson::end_object();
    if (depth() == kInRoot && !in_metadata_) add_tensor();
    return true;
  }

  bool start_array(std::size_t size) override {
    if (depth() == kInEntry && !in_metadata_ && (field_ & (kShape | kOffsets)) != 0) {
      found_ |= field_;
    } else {
      value("array");
    }
    return LimitedJson::start_array(size);
  }

 private:
  // Levels, by depth().
  static constexpr int kInRoot = 1;
  static constexpr int kInEntry = 2;  // of a tensor, or the metadata
  static constexpr int kInField = 3;
  // Fields of a tensor, as bits.
  static constexpr int kNone = 0;  // which this library does not know, and ignores
  static constexpr int kDtype = 1;
  static constexpr int kShape = 2;
  static constexpr int kOffsets = 4;
  static constexpr char kExpected[] =
      ": expected dtype, shape and two data_offsets, got something else";

  std::string where() const { return "tensor " + printable(tensor_.name); }
  // Whether a number is one of a list that a tensor needs.
  bool is_number() const {
    return depth() == kInField && !in_metadata_ && (field_ & (kShape | kOffsets)) != 0;
  }

  // A value of a kind that only a field which is ignored may have.
  bool value(const char* kind) override {
    if (!is_object_) return true;
    if (in_metadata_) {
      TORCH_CHECK(depth() != kInRoot, "expected metadata by name, got something else");
      TORCH_CHECK(false, "metadata ", key_, ": expected text, got ", kind);
    }
    TORCH_CHECK(!is_number(), where(), ": expected whole numbers of at least 0, got another ",
                kind);
    TORCH_CHECK(depth() != kInRoot && field_ == kNone, where(), kExpected);
    return true;
  }

  void add_tensor() {
    StoredTensor& t = tensor_;
    TORCH_CHECK(found_ == (kDtype | kShape | kOffsets) && offsets_ == 2, where(), kExpected);
    TORCH_CHECK(t.begin <= t.end && t.end <= data_bytes_, where(), ": expected a place within ",
                data_bytes_, " bytes of data, got ", t.begin, " to ", t.end);
    const uint64_t bytes = t.dtype == c10::ScalarType::Undefined
                               ? t.end - t.begin
                               : tensor_bytes(t.shape, t.dtype, [this] { return where(); });
    TORCH_CHECK(t.end - t.begin == bytes, where(), ": expected ", bytes,
                " bytes for its shape, got ", t.end - t.begin);
    t.begin += header_.data_begin;
    t.end += header_.data_begin;
    header_.tensors.push_back(t);
  }

  SafetensorsHeader& header_;
  const uint64_t data_bytes_;
  bool is_object_ = false;
  bool in_metadata_ = false;
  std::string key_;      // of metadata
  StoredTensor tensor_;  // that is being read
  int field_ = kNone;    // of it
  int found_ = kNone;    // its fields so far
  int offsets_ = 0;
};

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

void append_list(c10::IntArrayRef numbers, std::string& into) {
  into += '[';
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) into += ',';
    into += std::to_string(numbers[i]);
  }
  into += ']';
}

std::string entry_text(const StoredTensor& tensor) {
  std::string text = R"({"data_offsets":)";
  append_list({static_cast<int64_t>(tensor.begin), static_cast<int64_t>(tensor.end)}, text);
  text.append(R"(,"dtype":")").append(dtype_name(tensor.dtype)).append(R"(","shape":)");
  append_list(tensor.shape, text);
  return text + '}';
}

// Names are in the order of their bytes, as a JSON library with sorted objects writes them. Throws
// for a name that several have.
std::string header_text(const std::vector<StoredTensor>& tensors,
                        const std::map<std::string, std::string>& metadata,
                        const std::string& path) {
  std::vector<std::pair<std::string, std::string>> entries;  // of JSON, by name
  entries.reserve(tensors.size() + 1);
  entries.emplace_back(kMetadata, json_text(json(metadata)));
  for (const StoredTensor& t : tensors) entries.emplace_back(t.name, entry_text(t));
  std::sort(entries.begin(), entries.end());
  const auto quoted = [&](const std::string& name) {
    try {
      return json_text(json(name));
    } catch (const json::exception&) {
      TORCH_CHECK(false, path, ": tensor ", printable(name),
                  ": expected a name in UTF-8, got other bytes; rename it");
    }
  };
  std::string text = "{";
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& [name, value] = entries[i];
    TORCH_CHECK(i == 0 || entries[i - 1].first != name, path, ": tensor ", name,
                ": expected a name that is free, got one that is taken");
    if (name == kMetadata && metadata.empty()) continue;
    if (text.size() > 1) text += ',';
    text.append(quoted(name)).append(":").append(value);
  }
  return text + '}';
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
  HeaderReader reader(header, file_bytes);
  bool is_json = false;
  try {
    is_json = json::sax_parse(text.begin(), text.end(), &reader);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path, ": ", error_text(error));
  }
  TORCH_CHECK(is_json && reader.is_object(), path, ": expected a JSON object, got something else");
  std::ranges::stable_sort(header.tensors, {},
                           [](const StoredTensor& t) { return std::pair(t.begin, t.end); });
  check_covers(header, file_bytes, path);
  return header;
}

std::string read_safetensors_beginning(StoredBytes& file) {
  const std::string length_bytes = file.read_text(0, kSafetensorsLengthBytes);
  uint64_t length = 0;
  std::memcpy(&length, length_bytes.data(), kSafetensorsLengthBytes);
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
  json root;
  try {
    root = parse_limited_json(file.read_text(0, file.size()), kDeepest);
  } catch (const json::exception& error) {
    // The library's text may have a long word of the file in it.
    TORCH_CHECK(false, file.path(), ": expected an index as a JSON object, got what is not JSON: ",
                printable(std::string(error.what()).substr(0, 200)));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.path(), ": ", error_text(error));
  }
  const auto weight_map = root.find("weight_map");
  TORCH_CHECK(weight_map != root.end() && weight_map->is_object(), file.path(),
              ": expected a weight_map with the file of each tensor in a JSON object, got none");
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
  std::ranges::stable_sort(tensors, std::ranges::greater(),
                           [](const StoredTensor& t) { return c10::elementSize(t.dtype); });
  uint64_t at = 0;
  for (StoredTensor& tensor : tensors) {
    const auto where = [&] { return path + ": tensor " + tensor.name; };
    TORCH_CHECK(safetensors_knows(tensor.dtype), where(), ": safetensors has no name for dtype ",
                tensor.dtype);
    tensor.begin = at;
    tensor.end = at + tensor_bytes(tensor.shape, tensor.dtype, where);
    at = tensor.end;
  }
  std::string text = header_text(tensors, metadata, path);
  // Blanks are part of the header: with them the data begins aligned.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK(text.size() <= kSafetensorsHeaderLimit, path, ": expected a header of at most ",
              kSafetensorsHeaderLimit, " bytes, got ", text.size(),
              "; shorter names, fewer tensors in a file, as by max_file_bytes of an export, and "
              "more ranks, but not with Layout::kPerParameter, make it smaller");
  const uint64_t length = text.size();
  std::string beginning(reinterpret_cast<const char*>(&length), kSafetensorsLengthBytes);
  beginning += text;
  for (StoredTensor& tensor : tensors) {
    tensor.begin += beginning.size();
    tensor.end += beginning.size();
  }
  return beginning;
}

}  // namespace zero
