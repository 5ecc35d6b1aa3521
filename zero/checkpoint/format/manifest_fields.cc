// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The fields of a manifest, in lists that write and read it, and its text. A new field is a member
// in manifest.h and a line in its list.
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/json_text.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/json.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

// Keeps the order of the fields, for people who read the file.
using nlohmann::ordered_json;
// For reading: finds a field in logarithmic time, however many a file has.
using nlohmann::json;

// ---- Forms of values ----

void check_is(bool expected, const json& value, const char* name, const char* what) {
  TORCH_CHECK(expected, name, ": expected ", what, ", got another ", value.type_name());
}

// From 0 to 2^63 - 1. The JSON library's conversion is undefined for 1e20 and wraps -1 around.
int64_t whole_number(const json& value, const char* name) {
  const bool fits =
      value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
  check_is(fits, value, name, "a whole number from 0 to 2^63 - 1");
  return value.get<int64_t>();
}

std::string text_from(const json& value, const char* name) {
  check_is(value.is_string(), value, name, "text");
  return value.get<std::string>();
}

// Some readers take a NUL for the end of a text.
const std::string& without_nul(const std::string& text, const char* name, const char* to_do = "") {
  const size_t at = text.find('\0');
  TORCH_CHECK(at == std::string::npos, name, ": expected text without a NUL, got \"",
              printable(text.substr(at - std::min<size_t>(at, 60), 80)), "\"", to_do);
  return text;
}

// A text that a user chose.
const std::string& to_write(const std::string& text) {
  return without_nul(text, "names and metadata of a checkpoint", "; rename what has it");
}

// What JSON has as it is.
template <typename Value>
struct AsItIs {
  static ordered_json write(const Value& value) { return value; }
};

// Ranks send it in texts, where blanks end it.
struct IdForm : AsItIs<std::string> {
  static std::string read(const json& value, const char* name, int64_t) {
    std::string text = text_from(value, name);
    const bool valid = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
      return std::isgraph(static_cast<unsigned char>(c));
    });
    TORCH_CHECK(valid, name, ": expected visible characters, got \"", printable(text), "\"");
    return text;
  }
};

// Sums of which do not overflow.
struct CountForm : AsItIs<int64_t> {
  static ordered_json write(int64_t number) {
    TORCH_CHECK(number <= kCountLimit, "checkpoint: expected at most ", kCountLimit,
                " of what it counts, got ", number);
    return number;
  }
  static int64_t read(const json& value, const char* name, int64_t) {
    const int64_t number = whole_number(value, name);
    TORCH_CHECK(number <= kCountLimit, name, ": expected at most ", kCountLimit, ", got ", number);
    return number;
  }
};

struct HashForm {
  static ordered_json write(uint64_t hash) { return hash_text(hash); }
  static uint64_t read(const json& value, const char* name, int64_t) {
    return parse_hash(text_from(value, name));
  }
};

// Gradients are divided by it.
struct LossScaleForm : AsItIs<double> {
  static double read(const json& value, const char* name, int64_t) {
    check_is(value.is_number(), value, name, "a number");
    const auto scale = value.get<double>();
    TORCH_CHECK(std::isnormal(scale) && scale > 0,
                "loss scale: expected a positive, finite number, got ", scale);
    return scale;
  }
};

using Texts = std::map<std::string, std::string>;
using Options = OptionGroups::value_type;
using Pieces = std::vector<ManifestPiece>;

// JSON has no infinity or NaN and would write null.
ordered_json option_json(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(std::to_string(value));
}

double option_from(const json& value, const char* name) {
  if (value.is_number()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::string text = text_from(value, name);
  TORCH_CHECK(text == "inf" || text == "-inf" || text == "nan" || text == "-nan",
              "expected an option that is a number, got ", printable(text));
  if (text.find("nan") != std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

}  // namespace

template <>
struct JsonForm<std::string> {
  static ordered_json write(const std::string& text) { return to_write(text); }
  static std::string read(const json& value, const char* name, int64_t) {
    return without_nul(text_from(value, name), name);
  }
};

template <>
struct JsonForm<bool> : AsItIs<bool> {
  static bool read(const json& value, const char* name, int64_t) {
    check_is(value.is_boolean(), value, name, "true or false");
    return value.get<bool>();
  }
};

template <>
struct JsonForm<int64_t> : AsItIs<int64_t> {
  static int64_t read(const json& value, const char* name, int64_t) {
    return whole_number(value, name);
  }
};

template <>
struct JsonForm<uint64_t> : AsItIs<uint64_t> {
  static uint64_t read(const json& value, const char* name, int64_t) {
    return static_cast<uint64_t>(whole_number(value, name));
  }
};

template <>
struct JsonForm<c10::ScalarType> {
  static ordered_json write(c10::ScalarType dtype) { return c10::toString(dtype); }
  static c10::ScalarType read(const json& value, const char* name, int64_t) {
    const std::string text = text_from(value, name);
    for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
      const auto known = static_cast<c10::ScalarType>(i);
      if (text == c10::toString(known)) return known;
    }
    TORCH_CHECK(false, name, ": expected a dtype of torch, got ", printable(text));
  }
};

template <>
struct JsonForm<Texts> {
  static ordered_json write(const Texts& texts) {
    for (const auto& [key, value] : texts) {
      to_write(key);
      to_write(value);
    }
    return texts;
  }
  static Texts read(const json& object, const char* name, int64_t) {
    check_is(object.is_object(), object, name, "texts by name");
    Texts texts;
    for (const auto& [key, value] : object.items()) texts.emplace(key, text_from(value, name));
    return texts;
  }
};

template <>
struct JsonForm<Options> {
  static ordered_json write(const Options& options) {
    ordered_json group = ordered_json::object();
    for (const auto& [key, value] : options) group[to_write(key)] = option_json(value);
    return group;
  }
  static Options read(const json& group, const char* name, int64_t) {
    check_is(group.is_object(), group, name, "options by name");
    Options options;
    for (const auto& [key, value] : group.items()) {
      options.emplace_back(without_nul(key, name), option_from(value, key.c_str()));
    }
    return options;
  }
};

// [file, begin, numel, file, begin, numel, ...]
template <>
struct JsonForm<Pieces> {
  static ordered_json write(const Pieces& pieces) {
    ordered_json list = ordered_json::array();
    for (const ManifestPiece& piece : pieces) {
      for (const int64_t number : {piece.file, piece.begin, piece.numel}) list.push_back(number);
    }
    return list;
  }
  static Pieces read(const json& list, const char* name, int64_t) {
    check_is(list.is_array() && list.size() % 3 == 0, list, name,
             "a list of files, beginnings and sizes");
    Pieces result;
    result.reserve(list.size() / 3);
    for (size_t i = 0; i < list.size(); i += 3) {
      result.push_back({whole_number(list[i], name), whole_number(list[i + 1], name),
                        whole_number(list[i + 2], name)});
    }
    return result;
  }
};

namespace {

// ---- Values that go together ----

void check_range(const std::string& owner, int64_t begin, int64_t numel) {
  TORCH_CHECK(begin <= std::numeric_limits<int64_t>::max() - numel, "tensor ", owner,
              ": expected a range of elements, got ", begin, " and ", numel);
}

// A tensor as versions before 5 list it.
struct ListedTensor {
  std::string key;
  ManifestTensor about;
  uint64_t hash = 0;
};

// A name inside the folder, never a way out of it.
void check_file(const ManifestFile& file) {
  const std::string& name = file.name;
  TORCH_CHECK(!name.empty() && name[0] != '.' && name.find('/') == std::string::npos &&
                  name.find('\0') == std::string::npos,
              "expected a plain file name, got \"", printable(name), "\"");
  // Eight bytes of each hash are in the file.
  TORCH_CHECK(file.blocks <= static_cast<int64_t>(file.bytes / 8), "file ", name,
              ": expected the hashes of its blocks in ", file.bytes, " bytes, got ", file.blocks,
              " blocks");
}

void check_pieces(const ManifestTensors& entry) {
  const std::set<std::string> kinds(entry.kinds.begin(), entry.kinds.end());
  TORCH_CHECK(kinds.size() == entry.kinds.size() && kinds.size() <= kKindsLimit, "tensor ",
              printable(entry.owner), ": expected at most ", kKindsLimit, " kinds, each once, got ",
              entry.kinds.size());
  for (const ManifestPiece& piece : entry.pieces)
    check_range(entry.owner, piece.begin, piece.numel);
}

// A frozen parameter or a buffer is stored in one piece of its size: the key in its file is its
// name alone.
void check_held_whole(const Manifest& manifest, const std::vector<ManifestParameter>& list,
                      const std::string& kind) {
  std::map<std::string, int64_t> sizes;
  for (const ManifestParameter& p : list) sizes.emplace(stored_name(p), numel(p));
  for (const ManifestTensors& entry : manifest.tensors) {
    if (std::find(entry.kinds.begin(), entry.kinds.end(), kind) == entry.kinds.end()) continue;
    const bool whole = entry.pieces.size() == 1 && entry.pieces[0].begin == 0;
    const auto size = sizes.find(entry.owner);
    TORCH_CHECK(whole && (size == sizes.end() || size->second == entry.pieces[0].numel), kind, " ",
                entry.owner, ": expected one piece of all its elements");
  }
}

// Holds for writing too, so that what is saved can be loaded.
void check_entries(const Manifest& manifest) {
  TORCH_CHECK(manifest.metadata.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " entries of metadata, got ", manifest.metadata.size(),
              "; put many values into one text");
  TORCH_CHECK(manifest.groups.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " parameter groups, got ", manifest.groups.size());
}

void check_files_of(const Manifest& manifest) {
  for (const ManifestTensors& entry : manifest.tensors) {
    for (const ManifestPiece& piece : entry.pieces) {
      TORCH_CHECK(piece.file < static_cast<int64_t>(manifest.files.size()), "tensor ", entry.owner,
                  ": expected one of the ", manifest.files.size(), " files, got file ", piece.file);
    }
  }
}

void check_sections(const ManifestParameter& p) {
  if (p.sections.empty()) return;
  const int64_t all = p.whole[p.dimension], size = p.shape[p.dimension];
  bool fits = size > 0 && all % size == 0 && p.from % size == 0;
  int64_t left = all;
  for (size_t s = 0; fits && s < p.sections.size(); ++s) {
    fits = p.sections[s] > 0 && p.sections[s] <= left && p.sections[s] % (all / size) == 0;
    left -= p.sections[s];
  }
  TORCH_CHECK(fits && left == 0, "parameter ", p.name, ": expected sections of ", all,
              " elements of dimension ", p.dimension, " together, each for ",
              all / std::max<int64_t>(size, 1), " equal parts, got ", c10::IntArrayRef(p.sections),
              " in parts of ", size, " from ", p.from,
              "; TensorParts::sections gives their sizes in the whole tensor");
}

}  // namespace

void check_part(const ManifestParameter& p) {
  TORCH_CHECK(is_part(p) || p.sections.empty(), "parameter ", p.name,
              ": expected sections of a part alone");
  if (!is_part(p)) return;
  bool fits = p.whole.size() == p.shape.size() &&
              p.dimension < static_cast<int64_t>(p.shape.size()) &&
              p.from <= p.whole[p.dimension] - p.shape[p.dimension];
  for (size_t d = 0; fits && d < p.shape.size(); ++d) {
    fits = d == static_cast<size_t>(p.dimension) || p.shape[d] == p.whole[d];
  }
  TORCH_CHECK(fits, "parameter ", p.name, ": expected a part of a tensor of shape ",
              c10::IntArrayRef(p.whole), " cut along dimension ", p.dimension, ", got shape ",
              c10::IntArrayRef(p.shape), " from ", p.from);
  check_sections(p);
}

namespace {

// That a tensor of this shape exists, and that its elements lie within as many
// elements of memory: what is read is seen through these strides.
void check_geometry(const ManifestParameter& p) {
  check_part(p);
  // As wide as any dtype, so that bytes can be counted in 63 bits.
  int64_t bytes = 16;
  bool fits = true;
  for (const int64_t size : whole_shape(p)) {
    fits = fits && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
  }
  TORCH_CHECK(fits, "parameter ", p.name, ": expected a shape whose bytes fit 63 bits, got ",
              c10::IntArrayRef(p.shape));
  if (p.strides.empty()) return;
  bool within = p.strides.size() == p.shape.size();
  int64_t last = 0;
  for (size_t i = 0; within && numel(p) > 0 && i < p.shape.size(); ++i) {
    int64_t reach = 0;
    within = !__builtin_mul_overflow(p.shape[i] - 1, p.strides[i], &reach) &&
             !__builtin_add_overflow(last, reach, &last) && last < numel(p);
  }
  TORCH_CHECK(within, "parameter ", p.name, ": expected strides of a dense tensor of shape ",
              c10::IntArrayRef(p.shape), ", got ", c10::IntArrayRef(p.strides));
}

}  // namespace

// ---- Fields, in the order in which they are written ----

template <>
struct JsonFields<ListedTensor> {
  static constexpr char kWhat[] = "a tensor";
  static void list(auto& fields, auto& t) {
    fields.required("key", t.key);
    fields.required("of", t.about.owner);
    fields.required("kind", t.about.kind);
    fields.required("begin", t.about.begin);
    fields.required("numel", t.about.numel);
    fields.required("xxh3", t.hash, 1, HashForm());
  }
  static void check(const ListedTensor& t) {
    check_range(t.about.owner, t.about.begin, t.about.numel);
    TORCH_CHECK(t.key == tensor_key(t.about), "tensor ", printable(t.key), ": expected the key ",
                printable(tensor_key(t.about)), " of what it holds, got another");
  }
};

template <>
struct JsonFields<ManifestFile> {
  static constexpr char kWhat[] = "a file";
  static void list(auto& fields, auto& file) {
    fields.required("name", file.name);
    fields.required("bytes", file.bytes);
    fields.required("xxh3", file.hash, 1, HashForm());
    fields.required("blocks", file.blocks, kVersionOfBlocks);
    fields.optional("disk", file.disk, file.disk != 0, CountForm());
    fields.optional("id", file.id, !file.id.empty(), IdForm());
  }
  static void check(const ManifestFile& file) { check_file(file); }
};

template <>
struct JsonFields<ManifestTensors> {
  static constexpr char kWhat[] = "tensors of one name";
  static void list(auto& fields, auto& entry) {
    fields.required("of", entry.owner);
    fields.required("kinds", entry.kinds);
    fields.required("pieces", entry.pieces);
  }
  static void check(const ManifestTensors& entry) { check_pieces(entry); }
};

template <>
struct JsonFields<StoredValue> {
  static constexpr char kWhat[] = "a value";
  static void list(auto& fields, auto& value) {
    fields.required("of", value.owner);
    fields.required("kind", value.kind);
    fields.required("xxh3", value.hash, 1, HashForm());
  }
};

template <>
struct JsonFields<FileContent> {
  static constexpr char kWhat[] = "a file of a rank";
  static void list(auto& fields, auto& file) {
    fields.required("about", file.about);
    fields.required("tensors", file.tensors);
    fields.required("values", file.values);
  }
  static void check(const FileContent& file) {
    for (const ManifestTensors& entry : file.tensors) {
      for (const ManifestPiece& piece : entry.pieces)
        TORCH_CHECK(piece.file == 0, "expected pieces of one file, got others");
    }
  }
};

template <>
struct JsonFields<ManifestParameter> {
  static constexpr char kWhat[] = "a parameter";
  static void list(auto& fields, auto& p) {
    fields.required("name", p.name);
    fields.required("shape", p.shape);
    fields.required("strides", p.strides);
    fields.required("dtype", p.dtype);
    fields.required("group", p.group);
    // Since version 2.
    fields.optional("whole", p.whole, is_part(p));
    fields.optional("dimension", p.dimension, is_part(p));
    fields.optional("from", p.from, is_part(p));
    // Since version 3.
    fields.optional("sections", p.sections, !p.sections.empty());
    fields.optional("moments", p.moments, !p.moments.empty());
    fields.optional("master", p.master, !p.master.empty());
  }
  static void check(const ManifestParameter& p) { check_geometry(p); }
};

template <>
struct JsonFields<Manifest> {
  static constexpr char kWhat[] = "the manifest";
  static void list(auto& fields, auto& m) {
    fields.required("id", m.id, 1, IdForm());
    fields.optional("run", m.run);
    fields.optional("saved", m.saved);
    fields.required("library_version", m.library_version);
    fields.required("torch_version", m.torch_version);
    fields.required("metadata", m.metadata);
    fields.required("steps", m.steps, 1, CountForm());
    fields.required("skipped_steps", m.skipped_steps, 1, CountForm());
    fields.required("world_size", m.world_size);
    fields.required("stage", m.stage);
    fields.required("layout", m.layout);
    fields.required("bucket_bytes", m.bucket_bytes);
    fields.required("plan", m.plan_fingerprint, 1, HashForm());
    fields.optional("holders", m.holders, m.holders != 1);
    fields.optional("disk", m.disk, m.disk != 0, CountForm());
    fields.required("optimizer", m.optimizer);
    fields.required("groups", m.groups);
    fields.section("loss_scale", [&](auto& scale) {
      scale.required("dynamic", m.dynamic_scale);
      scale.required("scale", m.scale, 1, LossScaleForm());
      scale.required("good_steps", m.good_steps, 1, CountForm());
      scale.required("hysteresis_left", m.hysteresis_left, 1, CountForm());
      scale.required("skipped_at_min", m.skipped_at_min, 1, CountForm());
    });
    fields.required("parameters", m.parameters);
    fields.required("frozen", m.frozen);
    fields.required("buffers", m.buffers);
    fields.required("files", m.files);
    fields.required("tensors", m.tensors, kVersionOfBlocks);
  }
  static void check(const Manifest& m) {
    check_entries(m);
    check_files_of(m);
    check_held_whole(m, m.frozen, "frozen");
    check_held_whole(m, m.buffers, "buffer");
  }
};

template <>
struct JsonFields<HeldTensor> {
  static constexpr char kWhat[] = "a held tensor";
  static void list(auto& fields, auto& t) {
    fields.required("about", t.about);
    fields.required("index", t.index);
    fields.required("first_rank", t.first_rank);
    fields.required("norm_copies", t.norm_copies);
    fields.required("xxh3", t.hash, 1, HashForm());
    fields.required("part", t.part);
    fields.required("parts", t.parts);
    fields.required("dimension", t.dimension);
    fields.required("sections", t.sections);
  }
};

template <>
struct JsonFields<HeldTensors> {
  static constexpr char kWhat[] = "held tensors";
  static void list(auto& fields, auto& held) {
    fields.required("parameters", held.parameters);
    fields.required("frozen", held.frozen);
    fields.required("buffers", held.buffers);
    fields.required("groups", held.groups);
  }
};

namespace {

// Before version 5 each file listed its tensors, with their hashes.
void read_listed_tensors(const json& root, int64_t version, Manifest& manifest) {
  const json& files = root.at("files");
  std::vector<FileContent> contents;
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    std::vector<ListedTensor> listed;
    FieldReader(JsonFields<ManifestFile>::kWhat, files[f], version).required("tensors", listed);
    FileContent& content = contents.emplace_back();
    content.about = std::move(manifest.files[f]);
    content.about.blocks = -1;  // whatever a field of that name says
    content.about.id.clear();
    std::vector<ManifestTensor> tensors;
    for (ListedTensor& t : listed) {
      content.about.tensor_hashes[std::move(t.key)] = t.hash;
      tensors.push_back(std::move(t.about));
    }
    content.tensors = tensors_by_name(tensors);
  }
  manifest.files.clear();
  manifest.tensors.clear();
  add_files(contents, manifest);
}

// ---- Texts ----

// {"files": [{"tensors": [{...}]}]} has six levels with the values in it.
constexpr int kDeepest = 6;
constexpr char kFormat[] = "zero checkpoint";
constexpr char kChecksumField[] = "\"xxh3\": \"";

std::string checksum_line(uint64_t hash) { return kChecksumField + hash_text(hash) + "\"}\n"; }

int64_t values_in(const ordered_json& value) {
  int64_t count = 1;
  if (value.is_structured()) {
    for (const ordered_json& item : value) count += values_in(item);
  }
  return count;
}

std::string dump(const ordered_json& value) {
  try {
    return json_text(value);
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "checkpoint: expected names and metadata in UTF-8, got other bytes (",
                error.what(), "); encode binary data as text, for example as hexadecimal digits");
  }
}

// Runs `read` on what `text` says; whatever goes wrong names `origin`.
template <typename Read>
auto read_json(const std::string& text, const std::string& origin, const Read& read) {
  try {
    return read(parse_limited_json(text, kDeepest));
  } catch (const json::exception& error) {
    TORCH_CHECK(false, origin,
                ": expected what this library writes, got something else: ", error.what());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error_text(error));
  }
}

// Returns the version of the manifest. Throws for one that this library cannot read.
int64_t version_of(const json& root) {
  const json& version = root.at("version");
  TORCH_CHECK(version.is_number_unsigned(), "version: expected a whole number, got another ",
              version.type_name());
  const auto number = version.get<uint64_t>();
  TORCH_CHECK(number >= kOldestCheckpointVersion && number <= kCheckpointVersion,
              "expected format version ", kOldestCheckpointVersion, " to ", kCheckpointVersion,
              ", got ", number, " of library ",
              printable(root.value("library_version", "(unknown)")),
              "; load it with that version of this library or a later one");
  return static_cast<int64_t>(number);
}

bool is_of_later_version(const json& root) {
  const json& version = root.at("version");
  return version.is_number_unsigned() && version.get<uint64_t>() > kCheckpointVersion;
}

[[noreturn]] void throw_damaged(const std::string& text) {
  throw DamagedManifest({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

void check_length(uint64_t bytes, const std::string& path) {
  if (bytes <= checksum_line(0).size()) {
    throw_damaged(c10::str(path, ": expected a checkpoint's manifest, got ", bytes,
                           " bytes; the file was truncated"));
  }
  if (bytes > kManifestLimit + checksum_line(0).size()) {
    throw_damaged(
        c10::str(path, ": expected a manifest of at most ", kManifestLimit, " bytes, got ", bytes));
  }
}

void check_last_line(const std::string& line, uint64_t hash, const std::string& path) {
  if (line == checksum_line(hash)) return;
  throw_damaged(c10::str(path,
                         ": expected content that matches its checksum, got other bytes; the file "
                         "is damaged, use another checkpoint"));
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  JsonFields<Manifest>::check(manifest);  // what is saved can be loaded
  ordered_json root = {{"format", kFormat}, {"version", kCheckpointVersion}};
  FieldWriter fields(root);
  JsonFields<Manifest>::list(fields, manifest);
  std::string text = dump(root);
  const int64_t values = values_in(root);  // the checksum is one more
  TORCH_CHECK(text.size() < kManifestLimit && values < kValuesLimit,
              "checkpoint: expected a manifest of less than ", kManifestLimit, " bytes and ",
              kValuesLimit, " values, got ", text.size(), " and ", values,
              "; larger buckets, or Layout::kContiguous in place of kPerParameter, have fewer "
              "pieces of parameters, and metadata counts too");
  text.back() = ',';  // in place of the closing brace
  text += '\n';
  return text + checksum_line(content_hash(text.data(), text.size()));
}

namespace {

// Of text whose checksum was found right.
Manifest manifest_from(const std::string& text, const std::string& path) {
  bool is_later = false;
  try {
    return read_json(text, path, [&](const json& root) {
      TORCH_CHECK(root.at("format").get<std::string>() == kFormat, "expected \"", kFormat,
                  "\", got another format");
      is_later = is_of_later_version(root);
      const int64_t version = version_of(root);
      Manifest manifest = JsonForm<Manifest>::read(root, "manifest", version);
      if (version < kVersionOfBlocks) read_listed_tensors(root, version, manifest);
      manifest.version = version;
      return manifest;
    });
  } catch (const c10::Error& error) {
    if (is_later) throw;
    throw_damaged(error_text(error));
  }
}

}  // namespace

Manifest parse_manifest(const std::string& text, const std::string& path) {
  check_length(text.size(), path);
  const size_t body = text.size() - checksum_line(0).size();
  // First of all, so that nothing else sees a damaged one.
  check_last_line(text.substr(body), content_hash(text.data(), body), path);
  return manifest_from(text, path);
}

Manifest read_manifest_without_tensors(const std::string& folder) {
  const std::string text = read_manifest_text(folder);
  const std::string path = folder + "/" + kManifestName;
  // The last field. Within a text its quotation marks would have backslashes before them.
  const std::string tensors = "\"tensors\":[";
  if (const size_t at = text.find(tensors); at != std::string::npos) {
    try {
      return manifest_from(text.substr(0, at) + tensors + "]}", path);
    } catch (const c10::Error&) {  // before version 5 each file has some
    }
  }
  return manifest_from(text, path);
}

std::string read_manifest_text(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  FileReader file(path);
  check_length(file.size(), path);
  const size_t tail = checksum_line(0).size();
  const uint64_t body = file.size() - tail;
  const uint64_t hash = file.scan(0, body);
  check_last_line(file.read_text(body, tail), hash, path);
  return file.read_text(0, file.size());
}

std::string files_text(const std::vector<FileContent>& files) {
  return dump(JsonForm<std::vector<FileContent>>::write(files));
}

std::vector<FileContent> parse_files(const std::string& text, const std::string& origin) {
  return read_json(text, origin, [](const json& root) {
    return JsonForm<std::vector<FileContent>>::read(root, "files", kCheckpointVersion);
  });
}

std::string held_text(const HeldTensors& held) { return dump(JsonForm<HeldTensors>::write(held)); }

HeldTensors parse_held(const std::string& text, const std::string& origin) {
  return read_json(text, origin, [](const json& root) {
    return JsonForm<HeldTensors>::read(root, "held tensors", kCheckpointVersion);
  });
}

}  // namespace zero
