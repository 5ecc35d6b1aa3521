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
#include <concepts>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <type_traits>
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

// ---- Values, as JSON and back ----

// A value that is read.
struct Found {
  const json& value;
  const char* name;  // of its field, for errors
  int64_t version;   // of the file
};

// What the line of a field may say of its value.
struct AsId {};     // visible characters: ranks send it in texts, where blanks end it
struct AsCount {};  // at most kCountLimit: sums of it do not overflow
struct AsHash {};
struct AsLossScale {};  // gradients are divided by it

using Texts = std::map<std::string, std::string>;
using Options = OptionGroups::value_type;
using Pieces = std::vector<ManifestPiece>;

void check_is(bool expected, const Found& found, const char* what) {
  TORCH_CHECK(expected, found.name, ": expected ", what, ", got another ", found.value.type_name());
}

// From 0 to 2^63 - 1. The JSON library's conversion is undefined for 1e20 and wraps -1 around.
int64_t whole_number(const Found& found) {
  const bool fits = found.value.is_number_unsigned() &&
                    found.value.get<uint64_t>() <= std::numeric_limits<int64_t>::max();
  check_is(fits, found, "a whole number from 0 to 2^63 - 1");
  return found.value.get<int64_t>();
}

std::string text_from(const Found& found) {
  check_is(found.value.is_string(), found, "text");
  return found.value.get<std::string>();
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

ordered_json json_of(bool value) { return value; }
ordered_json json_of(int64_t value) { return value; }
ordered_json json_of(uint64_t value) { return value; }
void read(const Found& found, bool& value) {
  check_is(found.value.is_boolean(), found, "true or false");
  value = found.value.get<bool>();
}
void read(const Found& found, int64_t& value) { value = whole_number(found); }
void read(const Found& found, uint64_t& value) {
  value = static_cast<uint64_t>(whole_number(found));
}

ordered_json json_of(int64_t number, AsCount) {
  TORCH_CHECK(number <= kCountLimit, "checkpoint: expected at most ", kCountLimit,
              " of what it counts, got ", number);
  return number;
}
void read(const Found& found, int64_t& number, AsCount) {
  number = whole_number(found);
  TORCH_CHECK(number <= kCountLimit, found.name, ": expected at most ", kCountLimit, ", got ",
              number);
}

ordered_json json_of(uint64_t hash, AsHash) { return hash_text(hash); }
void read(const Found& found, uint64_t& hash, AsHash) { hash = parse_hash(text_from(found)); }

ordered_json json_of(double scale, AsLossScale) { return scale; }
void read(const Found& found, double& scale, AsLossScale) {
  check_is(found.value.is_number(), found, "a number");
  scale = found.value.get<double>();
  TORCH_CHECK(std::isnormal(scale) && scale > 0,
              "loss scale: expected a positive, finite number, got ", scale);
}

ordered_json json_of(const std::string& text) { return to_write(text); }
void read(const Found& found, std::string& text) {
  text = without_nul(text_from(found), found.name);
}

ordered_json json_of(const std::string& id, AsId) { return id; }
void read(const Found& found, std::string& id, AsId) {
  id = text_from(found);
  const bool valid = !id.empty() && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isgraph(static_cast<unsigned char>(c));
  });
  TORCH_CHECK(valid, found.name, ": expected visible characters, got \"", printable(id), "\"");
}

ordered_json json_of(c10::ScalarType dtype) { return c10::toString(dtype); }
void read(const Found& found, c10::ScalarType& dtype) {
  const std::string text = text_from(found);
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    dtype = static_cast<c10::ScalarType>(i);
    if (text == c10::toString(dtype)) return;
  }
  TORCH_CHECK(false, found.name, ": expected a dtype of torch, got ", printable(text));
}

ordered_json json_of(const Texts& texts) {
  for (const auto& [key, value] : texts) {
    to_write(key);
    to_write(value);
  }
  return texts;
}
void read(const Found& found, Texts& texts) {
  check_is(found.value.is_object(), found, "texts by name");
  for (const auto& [key, value] : found.value.items()) {
    texts.emplace(key, text_from({value, found.name, found.version}));
  }
}

double option_from(const Found& found) {
  if (found.value.is_number()) return found.value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::string text = text_from(found);
  TORCH_CHECK(text == "inf" || text == "-inf" || text == "nan" || text == "-nan",
              "expected an option that is a number, got ", printable(text));
  if (text.find("nan") != std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

ordered_json json_of(const Options& options) {
  ordered_json group = ordered_json::object();
  for (const auto& [key, value] : options) {
    // JSON has no infinity or NaN and would write null.
    ordered_json& option = group[to_write(key)] = value;
    if (!std::isfinite(value)) option = std::to_string(value);
  }
  return group;
}
void read(const Found& found, Options& options) {
  check_is(found.value.is_object(), found, "options by name");
  for (const auto& [key, value] : found.value.items()) {
    options.emplace_back(without_nul(key, found.name),
                         option_from({value, key.c_str(), found.version}));
  }
}

// [file, begin, numel, file, begin, numel, ...]
ordered_json json_of(const Pieces& pieces) {
  ordered_json list = ordered_json::array();
  for (const ManifestPiece& piece : pieces) {
    for (const int64_t number : {piece.file, piece.begin, piece.numel}) list.push_back(number);
  }
  return list;
}
void read(const Found& found, Pieces& pieces) {
  const json& list = found.value;
  check_is(list.is_array() && list.size() % 3 == 0, found, "a list of files, beginnings and sizes");
  pieces.reserve(list.size() / 3);
  const auto number = [&](size_t i) { return whole_number({list[i], found.name, found.version}); };
  for (size_t i = 0; i < list.size(); i += 3) {
    pieces.push_back({number(i), number(i + 1), number(i + 2)});
  }
}

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

void check_listed(const ListedTensor& t) {
  check_range(t.about.owner, t.about.begin, t.about.numel);
  TORCH_CHECK(t.key == tensor_key(t.about), "tensor ", printable(t.key), ": expected the key ",
              printable(tensor_key(t.about)), " of what it holds, got another");
}

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

void check_one_file(const FileContent& file) {
  for (const ManifestTensors& entry : file.tensors) {
    for (const ManifestPiece& piece : entry.pieces)
      TORCH_CHECK(piece.file == 0, "expected pieces of one file, got others");
  }
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
void check_manifest(const Manifest& manifest) {
  TORCH_CHECK(manifest.metadata.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " entries of metadata, got ", manifest.metadata.size(),
              "; put many values into one text");
  TORCH_CHECK(manifest.groups.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " parameter groups, got ", manifest.groups.size());
  for (const ManifestTensors& entry : manifest.tensors) {
    for (const ManifestPiece& piece : entry.pieces) {
      TORCH_CHECK(piece.file < static_cast<int64_t>(manifest.files.size()), "tensor ", entry.owner,
                  ": expected one of the ", manifest.files.size(), " files, got file ", piece.file);
    }
  }
  check_held_whole(manifest, manifest.frozen, "frozen");
  check_held_whole(manifest, manifest.buffers, "buffer");
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

// ---- Fields, in the order in which they are written ----
//
// A struct is an object of JSON. One function lists its fields, to write them and to read them, so
// that the two directions cannot differ. A line says a field's name, its member, and which version
// of the format introduced it; see FieldWriter and FieldReader.
//
// A member that a file does not fill keeps the value that a new struct has. Fields that the list
// does not have are ignored. What is read throws c10::Error for JSON that was not written so, and
// names the field.

// `Object` is a `Struct`, const where it is written.
template <typename Object, typename Struct>
concept Is = std::same_as<std::remove_const_t<Object>, Struct>;

void list_fields(auto& fields, Is<ListedTensor> auto& t) {
  fields.object("a tensor");
  fields.required("key", t.key);
  fields.required("of", t.about.owner);
  fields.required("kind", t.about.kind);
  fields.required("begin", t.about.begin);
  fields.required("numel", t.about.numel);
  fields.required("xxh3", t.hash, 1, AsHash());
  fields.check(check_listed, t);
}

void list_fields(auto& fields, Is<ManifestFile> auto& file) {
  fields.object("a file");
  fields.required("name", file.name);
  fields.required("bytes", file.bytes);
  fields.required("xxh3", file.hash, 1, AsHash());
  fields.required("blocks", file.blocks, kVersionOfBlocks);
  fields.optional("disk", file.disk, file.disk != 0, AsCount());
  fields.optional("id", file.id, !file.id.empty(), AsId());
  fields.check(check_file, file);
}

void list_fields(auto& fields, Is<ManifestTensors> auto& entry) {
  fields.object("tensors of one name");
  fields.required("of", entry.owner);
  fields.required("kinds", entry.kinds);
  fields.required("pieces", entry.pieces);
  fields.check(check_pieces, entry);
}

void list_fields(auto& fields, Is<StoredValue> auto& value) {
  fields.object("a value");
  fields.required("of", value.owner);
  fields.required("kind", value.kind);
  fields.required("xxh3", value.hash, 1, AsHash());
}

void list_fields(auto& fields, Is<FileContent> auto& file) {
  fields.object("a file of a rank");
  fields.required("about", file.about);
  fields.required("tensors", file.tensors);
  fields.required("values", file.values);
  fields.check(check_one_file, file);
}

void list_fields(auto& fields, Is<ManifestParameter> auto& p) {
  fields.object("a parameter");
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
  fields.check(check_geometry, p);
}

void list_fields(auto& fields, Is<Manifest> auto& m) {
  fields.object("the manifest");
  fields.required("id", m.id, 1, AsId());
  fields.optional("run", m.run);
  fields.optional("saved", m.saved);
  fields.required("library_version", m.library_version);
  fields.required("torch_version", m.torch_version);
  fields.required("metadata", m.metadata);
  fields.required("steps", m.steps, 1, AsCount());
  fields.required("skipped_steps", m.skipped_steps, 1, AsCount());
  fields.required("world_size", m.world_size);
  fields.required("stage", m.stage);
  fields.required("layout", m.layout);
  fields.required("bucket_bytes", m.bucket_bytes);
  fields.required("plan", m.plan_fingerprint, 1, AsHash());
  fields.optional("holders", m.holders, m.holders != 1);
  fields.optional("disk", m.disk, m.disk != 0, AsCount());
  fields.required("optimizer", m.optimizer);
  fields.required("groups", m.groups);
  fields.section("loss_scale", [&](auto& scale) {
    scale.required("dynamic", m.dynamic_scale);
    scale.required("scale", m.scale, 1, AsLossScale());
    scale.required("good_steps", m.good_steps, 1, AsCount());
    scale.required("hysteresis_left", m.hysteresis_left, 1, AsCount());
    scale.required("skipped_at_min", m.skipped_at_min, 1, AsCount());
  });
  fields.required("parameters", m.parameters);
  fields.required("frozen", m.frozen);
  fields.required("buffers", m.buffers);
  fields.required("files", m.files);
  fields.required("tensors", m.tensors, kVersionOfBlocks);
  fields.check(check_manifest, m);
}

void list_fields(auto& fields, Is<HeldTensor> auto& t) {
  fields.object("a held tensor");
  fields.required("about", t.about);
  fields.required("index", t.index);
  fields.required("first_rank", t.first_rank);
  fields.required("norm_copies", t.norm_copies);
  fields.required("xxh3", t.hash, 1, AsHash());
  fields.required("part", t.part);
  fields.required("parts", t.parts);
  fields.required("dimension", t.dimension);
  fields.required("sections", t.sections);
}

void list_fields(auto& fields, Is<HeldTensors> auto& held) {
  fields.object("held tensors");
  fields.required("parameters", held.parameters);
  fields.required("frozen", held.frozen);
  fields.required("buffers", held.buffers);
  fields.required("groups", held.groups);
}

// Structs and lists, by the functions above.
template <typename Struct>
ordered_json json_of(const Struct& object);
template <typename Item>
ordered_json json_of(const std::vector<Item>& items);
template <typename Struct>
void read(const Found& found, Struct& object);
template <typename Item>
void read(const Found& found, std::vector<Item>& items);

// Appends the fields to an object, in the order of the list.
class FieldWriter {
 public:
  explicit FieldWriter(ordered_json& into) : into_(into) {}

  void object(const char* /*what*/) {}
  // Every file of version `since` or later has the field.
  void required(const char* name, const auto& value, int64_t /*since*/ = 1, auto... as) {
    into_[name] = json_of(value, as...);
  }
  // Files of any version may lack it: it is written only where it is needed, so that files without
  // a use for it stay as they are.
  void optional(const char* name, const auto& value, bool needed = true, auto... as) {
    if (needed) into_[name] = json_of(value, as...);
  }
  // Members of the same struct as an object of their own. `list` gets the fields to go on with.
  void section(const char* name, const auto& list) {
    FieldWriter fields(into_[name] = ordered_json::object());
    list(fields);
  }
  void check(const auto& /*check*/, const auto& /*object*/) {}

 private:
  ordered_json& into_;
};

class FieldReader {
 public:
  explicit FieldReader(const Found& object) : object_(object) {}

  void object(const char* what) {
    what_ = what;
    TORCH_CHECK(object_.value.is_object(), "expected ", what, " as an object, got another ",
                object_.value.type_name());
  }
  void required(const char* name, auto& value, int64_t since = 1, auto... as) {
    if (const json* const field = find(name, since)) read(found(*field, name), value, as...);
  }
  void optional(const char* name, auto& value, bool /*needed*/ = true, auto... as) {
    const auto field = object_.value.find(name);
    if (field != object_.value.end()) read(found(*field, name), value, as...);
  }
  void section(const char* name, const auto& list) {
    FieldReader fields(found(*find(name, 1), name));
    fields.object(name);
    list(fields);
  }
  // Throws where values do not go together.
  void check(const auto& check, const auto& object) { check(object); }

 private:
  Found found(const json& field, const char* name) const { return {field, name, object_.version}; }
  // Null for a field of a later version than the file's.
  const json* find(const char* name, int64_t since) const {
    const auto field = object_.value.find(name);
    if (field != object_.value.end()) return &*field;
    TORCH_CHECK(object_.version < since, "expected the field \"", name, "\" of ", what_,
                ", which every file since version ", since, " has, got none");
    return nullptr;
  }

  const Found object_;
  const char* what_ = "";
};

template <typename Struct>
ordered_json json_of(const Struct& object) {
  ordered_json result = ordered_json::object();
  FieldWriter fields(result);
  list_fields(fields, object);
  return result;
}

template <typename Item>
ordered_json json_of(const std::vector<Item>& items) {
  ordered_json list = ordered_json::array();
  for (const Item& item : items) list.push_back(json_of(item));
  return list;
}

template <typename Struct>
void read(const Found& found, Struct& object) {
  FieldReader fields(found);
  list_fields(fields, object);
}

template <typename Item>
void read(const Found& found, std::vector<Item>& items) {
  check_is(found.value.is_array(), found, "a list");
  for (const json& item : found.value) {  // without reserve(): it may be hostile
    read({item, found.name, found.version}, items.emplace_back());
  }
}

// Before version 5 each file listed its tensors, with their hashes.
void read_listed_tensors(const json& root, int64_t version, Manifest& manifest) {
  const json& files = root.at("files");
  std::vector<FileContent> contents;
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    std::vector<ListedTensor> listed;
    FieldReader fields({files[f], "files", version});
    fields.object("a file");
    fields.required("tensors", listed);
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

// What a rank of this version has sent.
template <typename Message>
Message parse_message(const std::string& text, const std::string& origin, const char* name) {
  return read_json(text, origin, [&](const json& root) {
    Message message;
    read({root, name, kCheckpointVersion}, message);
    return message;
  });
}

// Returns the version of the manifest. Throws for one that this library cannot read, and says
// whether that is a later one.
int64_t version_of(const json& root, bool& is_later) {
  const json& version = root.at("version");
  TORCH_CHECK(version.is_number_unsigned(), "version: expected a whole number, got another ",
              version.type_name());
  const auto number = version.get<uint64_t>();
  is_later = number > kCheckpointVersion;
  TORCH_CHECK(number >= kOldestCheckpointVersion && !is_later, "expected format version ",
              kOldestCheckpointVersion, " to ", kCheckpointVersion, ", got ", number,
              " of library ", printable(root.value("library_version", "(unknown)")),
              "; load it with that version of this library or a later one");
  return static_cast<int64_t>(number);
}

template <typename... Text>
void check_undamaged(bool expected, const Text&... text) {
  if (expected) return;
  throw DamagedManifest({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(text...));
}

void check_length(uint64_t bytes, const std::string& path) {
  const size_t tail = checksum_line(0).size();
  check_undamaged(bytes > tail, path, ": expected a checkpoint's manifest, got ", bytes,
                  " bytes; the file was truncated");
  check_undamaged(bytes <= kManifestLimit + tail, path, ": expected a manifest of at most ",
                  kManifestLimit, " bytes, got ", bytes);
}

void check_last_line(const std::string& line, uint64_t hash, const std::string& path) {
  check_undamaged(line == checksum_line(hash), path,
                  ": expected content that matches its checksum, got other bytes; the file is "
                  "damaged, use another checkpoint");
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  check_manifest(manifest);
  ordered_json root = {{"format", kFormat}, {"version", kCheckpointVersion}};
  FieldWriter fields(root);
  list_fields(fields, manifest);
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
      const int64_t version = version_of(root, is_later);
      Manifest manifest;
      read({root, "manifest", version}, manifest);
      if (version < kVersionOfBlocks) read_listed_tensors(root, version, manifest);
      manifest.version = version;
      return manifest;
    });
  } catch (const c10::Error& error) {
    check_undamaged(is_later, error_text(error));
    throw;
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

std::string files_text(const std::vector<FileContent>& files) { return dump(json_of(files)); }

std::vector<FileContent> parse_files(const std::string& text, const std::string& origin) {
  return parse_message<std::vector<FileContent>>(text, origin, "files");
}

std::string held_text(const HeldTensors& held) { return dump(json_of(held)); }

HeldTensors parse_held(const std::string& text, const std::string& origin) {
  return parse_message<HeldTensors>(text, origin, "held tensors");
}

}  // namespace zero
