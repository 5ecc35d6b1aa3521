// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/manifest_fields.h"

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

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/json_fields.h"

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

// Values that JSON has as they are.
template <typename Value>
JsonForm<Value> as_is(Value (*read)(const json& value, const char* name)) {
  return {[](const Value& value) { return ordered_json(value); },
          [read](const json& value, const char* name, int64_t) { return read(value, name); }};
}

JsonForm<std::string> text() { return as_is(text_from); }

// Ranks send it in texts, where blanks end it.
JsonForm<std::string> id() {
  return as_is<std::string>([](const json& value, const char* name) {
    std::string text = text_from(value, name);
    const bool valid = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
      return std::isgraph(static_cast<unsigned char>(c));
    });
    TORCH_CHECK(valid, name, ": expected visible characters, got \"", printable(text), "\"");
    return text;
  });
}

JsonForm<bool> flag() {
  return as_is<bool>([](const json& value, const char* name) {
    check_is(value.is_boolean(), value, name, "true or false");
    return value.get<bool>();
  });
}

JsonForm<int64_t> whole() { return as_is(whole_number); }

// Sums of which do not overflow.
JsonForm<int64_t> count() {
  return as_is<int64_t>([](const json& value, const char* name) {
    const int64_t number = whole_number(value, name);
    TORCH_CHECK(number <= kCountLimit, name, ": expected at most ", kCountLimit, ", got ", number);
    return number;
  });
}

JsonForm<uint64_t> byte_count() {
  return as_is<uint64_t>([](const json& value, const char* name) {
    return static_cast<uint64_t>(whole_number(value, name));
  });
}

JsonForm<std::vector<int64_t>> wholes() { return list_of(whole()); }

JsonForm<uint64_t> hash() {
  return {[](const uint64_t& value) { return ordered_json(hash_text(value)); },
          [](const json& value, const char* name, int64_t) {
            return parse_hash(text_from(value, name));
          }};
}

// Gradients are divided by it.
JsonForm<double> loss_scale() {
  return as_is<double>([](const json& value, const char* name) {
    check_is(value.is_number(), value, name, "a number");
    const auto scale = value.get<double>();
    TORCH_CHECK(std::isnormal(scale) && scale > 0,
                "loss scale: expected a positive, finite number, got ", scale);
    return scale;
  });
}

JsonForm<c10::ScalarType> dtype() {
  return {[](const c10::ScalarType& value) { return ordered_json(c10::toString(value)); },
          [](const json& value, const char* name, int64_t) {
            const std::string text = text_from(value, name);
            for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
              const auto known = static_cast<c10::ScalarType>(i);
              if (text == c10::toString(known)) return known;
            }
            TORCH_CHECK(false, name, ": expected a dtype of torch, got ", text);
          }};
}

using Texts = std::map<std::string, std::string>;

JsonForm<Texts> texts_by_name() {
  return as_is<Texts>([](const json& object, const char* name) {
    check_is(object.is_object(), object, name, "texts by name");
    Texts texts;
    for (const auto& [key, value] : object.items()) texts.emplace(key, text_from(value, name));
    return texts;
  });
}

using Options = std::vector<std::pair<std::string, double>>;

// JSON has no infinity or NaN and would write null.
ordered_json option_json(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(std::to_string(value));
}

double option_from(const json& value, const char* name) {
  if (value.is_number()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::string text = text_from(value, name);
  TORCH_CHECK(text == "inf" || text == "-inf" || text == "nan" || text == "-nan",
              "expected an option that is a number, got ", text);
  if (text.find("nan") != std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

JsonForm<std::vector<Options>> option_groups() {
  return {[](const std::vector<Options>& groups) {
            ordered_json list = ordered_json::array();
            for (const Options& options : groups) {
              ordered_json group = ordered_json::object();
              for (const auto& [key, value] : options) group[key] = option_json(value);
              list.push_back(std::move(group));
            }
            return list;
          },
          [](const json& list, const char* name, int64_t) {
            check_is(list.is_array(), list, name, "a list");
            std::vector<Options> groups;
            for (const json& group : list) {
              check_is(group.is_object(), group, name, "options by name");
              groups.emplace_back();
              for (const auto& [key, value] : group.items()) {
                groups.back().emplace_back(key, option_from(value, key.c_str()));
              }
            }
            return groups;
          }};
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

void check_tensor(const ListedTensor& t) {
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
              " together, each cut into equal parts, got ", c10::IntArrayRef(p.sections),
              " in parts of ", size, " from ", p.from);
}

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

// ---- Tables, in the order in which the fields are written ----

// A member of a member, which is read alone.
template <typename Object, typename Inner, typename Value>
JsonField<Object> within(const char* name, Inner Object::*inner, Value Inner::*member,
                         const JsonForm<Value>& form) {
  JsonField<Object> field;
  field.name = name;
  field.read = [=](const json& value, int64_t version, Object& object) {
    object.*inner.*member = form.read(value, name, version);
  };
  return field;
}

const JsonFields<ListedTensor>& listed_tensor_fields() {
  static const JsonFields<ListedTensor> fields(
      "a tensor",
      {
          {"key", &ListedTensor::key, text(), kRequired, 1},
          within("of", &ListedTensor::about, &ManifestTensor::owner, text()),
          within("kind", &ListedTensor::about, &ManifestTensor::kind, text()),
          within("begin", &ListedTensor::about, &ManifestTensor::begin, whole()),
          within("numel", &ListedTensor::about, &ManifestTensor::numel, whole()),
          {"xxh3", &ListedTensor::hash, hash(), kRequired, 1},
      },
      check_tensor);
  return fields;
}

const JsonFields<ManifestFile>& file_fields() {
  static const JsonFields<ManifestFile> fields(
      "a file",
      {
          {"name", &ManifestFile::name, text(), kRequired, 1},
          {"bytes", &ManifestFile::bytes, byte_count(), kRequired, 1},
          {"xxh3", &ManifestFile::hash, hash(), kRequired, 1},
          {"blocks", &ManifestFile::blocks, whole(), kRequired, kVersionOfBlocks},
          JsonField<ManifestFile>("disk", &ManifestFile::disk, count(), kOptional, 1)
              .where([](const ManifestFile& f) { return f.disk != 0; }),
          JsonField<ManifestFile>("id", &ManifestFile::id, id(), kOptional, kVersionOfBlocks)
              .where([](const ManifestFile& f) { return !f.id.empty(); }),
      },
      check_file);
  return fields;
}

// [file, begin, numel, file, begin, numel, ...]
JsonForm<std::vector<ManifestPiece>> pieces() {
  return {[](const std::vector<ManifestPiece>& pieces) {
            ordered_json list = ordered_json::array();
            for (const ManifestPiece& piece : pieces) {
              for (const int64_t number : {piece.file, piece.begin, piece.numel}) {
                list.push_back(number);
              }
            }
            return list;
          },
          [](const json& list, const char* name, int64_t) {
            check_is(list.is_array() && list.size() % 3 == 0, list, name,
                     "a list of files, beginnings and sizes");
            std::vector<ManifestPiece> result;
            result.reserve(list.size() / 3);
            for (size_t i = 0; i < list.size(); i += 3) {
              result.push_back({whole_number(list[i], name), whole_number(list[i + 1], name),
                                whole_number(list[i + 2], name)});
            }
            return result;
          }};
}

const JsonFields<ManifestTensors>& tensors_fields() {
  static const JsonFields<ManifestTensors> fields(
      "tensors of one name",
      {
          {"of", &ManifestTensors::owner, text(), kRequired, 1},
          {"kinds", &ManifestTensors::kinds, list_of(text()), kRequired, 1},
          {"pieces", &ManifestTensors::pieces, pieces(), kRequired, 1},
      },
      check_pieces);
  return fields;
}

const JsonFields<StoredValue>& value_fields() {
  static const JsonFields<StoredValue> fields(
      "a value",
      {
          {"of", &StoredValue::owner, text(), kRequired, 1},
          {"kind", &StoredValue::kind, text(), kRequired, 1},
          {"xxh3", &StoredValue::hash, hash(), kRequired, 1},
      },
      /*check=*/nullptr);
  return fields;
}

const JsonFields<FileContent>& content_fields() {
  static const JsonFields<FileContent> fields(
      "a file of a rank",
      {
          {"about", &FileContent::about, object_of(file_fields()), kRequired, 1},
          {"tensors", &FileContent::tensors, list_of(tensors_fields()), kRequired, 1},
          {"values", &FileContent::values, list_of(value_fields()), kRequired, 1},
      },
      [](const FileContent& file) {
        for (const ManifestTensors& entry : file.tensors) {
          for (const ManifestPiece& piece : entry.pieces)
            TORCH_CHECK(piece.file == 0, "expected pieces of one file, got others");
        }
      });
  return fields;
}

// Before version 5 each file listed its tensors, with their hashes.
void read_listed_tensors(const json& root, int64_t version, Manifest& manifest) {
  const json& files = root.at("files");
  const auto list = list_of(listed_tensor_fields());
  std::vector<FileContent> contents;
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    const auto found = files[f].find("tensors");
    TORCH_CHECK(found != files[f].end(),
                "expected the field \"tensors\" of a file, which every file of version ", version,
                " has, got none");
    FileContent& content = contents.emplace_back();
    content.about = std::move(manifest.files[f]);
    content.about.blocks = -1;  // whatever a field of that name says
    content.about.id.clear();
    std::vector<ManifestTensor> tensors;
    for (ListedTensor& t : list.read(*found, "tensors", version)) {
      content.about.tensor_hashes[std::move(t.key)] = t.hash;
      tensors.push_back(std::move(t.about));
    }
    content.tensors = tensors_by_name(tensors);
  }
  manifest.files.clear();
  manifest.tensors.clear();
  add_files(contents, manifest);
}

const JsonFields<ManifestParameter>& parameter_fields() {
  using Field = JsonField<ManifestParameter>;
  static const JsonFields<ManifestParameter> fields(
      "a parameter",
      {
          {"name", &ManifestParameter::name, text(), kRequired, 1},
          {"shape", &ManifestParameter::shape, wholes(), kRequired, 1},
          {"strides", &ManifestParameter::strides, wholes(), kRequired, 1},
          {"dtype", &ManifestParameter::dtype, dtype(), kRequired, 1},
          {"group", &ManifestParameter::group, whole(), kRequired, 1},
          Field("whole", &ManifestParameter::whole, wholes(), kOptional, 2).where(is_part),
          Field("dimension", &ManifestParameter::dimension, whole(), kOptional, 2).where(is_part),
          Field("from", &ManifestParameter::from, whole(), kOptional, 2).where(is_part),
          Field("sections", &ManifestParameter::sections, wholes(), kOptional, 3)
              .where([](const ManifestParameter& p) { return !p.sections.empty(); }),
          Field("moments", &ManifestParameter::moments, text(), kOptional, 1)
              .where([](const ManifestParameter& p) { return !p.moments.empty(); }),
          Field("master", &ManifestParameter::master, text(), kOptional, 1)
              .where([](const ManifestParameter& p) { return !p.master.empty(); }),
      },
      check_geometry);
  return fields;
}

const JsonFields<Manifest>& loss_scale_fields() {
  static const JsonFields<Manifest> fields(
      "loss_scale",
      {
          {"dynamic", &Manifest::dynamic_scale, flag(), kRequired, 1},
          {"scale", &Manifest::scale, loss_scale(), kRequired, 1},
          {"good_steps", &Manifest::good_steps, count(), kRequired, 1},
          {"hysteresis_left", &Manifest::hysteresis_left, count(), kRequired, 1},
          {"skipped_at_min", &Manifest::skipped_at_min, count(), kRequired, 1},
      },
      /*check=*/nullptr);
  return fields;
}

const JsonFields<Manifest>& manifest_fields() {
  const auto parameters = list_of(parameter_fields());
  static const JsonFields<Manifest> fields(
      "the manifest",
      {
          {"id", &Manifest::id, id(), kRequired, 1},
          {"run", &Manifest::run, text(), kOptional, 1},
          {"saved", &Manifest::saved, whole(), kOptional, 1},
          {"library_version", &Manifest::library_version, text(), kRequired, 1},
          {"torch_version", &Manifest::torch_version, text(), kRequired, 1},
          {"metadata", &Manifest::metadata, texts_by_name(), kRequired, 1},
          {"steps", &Manifest::steps, count(), kRequired, 1},
          {"skipped_steps", &Manifest::skipped_steps, count(), kRequired, 1},
          {"world_size", &Manifest::world_size, whole(), kRequired, 1},
          {"stage", &Manifest::stage, whole(), kRequired, 1},
          {"layout", &Manifest::layout, text(), kRequired, 1},
          {"bucket_bytes", &Manifest::bucket_bytes, whole(), kRequired, 1},
          {"plan", &Manifest::plan_fingerprint, hash(), kRequired, 1},
          JsonField<Manifest>("holders", &Manifest::holders, whole(), kOptional, 1)
              .where([](const Manifest& m) { return m.holders != 1; }),
          JsonField<Manifest>("disk", &Manifest::disk, count(), kOptional, 1)
              .where([](const Manifest& m) { return m.disk != 0; }),
          {"optimizer", &Manifest::optimizer, text(), kRequired, 1},
          {"groups", &Manifest::groups, option_groups(), kRequired, 1},
          section("loss_scale", loss_scale_fields(), kRequired, 1),
          {"parameters", &Manifest::parameters, parameters, kRequired, 1},
          {"frozen", &Manifest::frozen, parameters, kRequired, 1},
          {"buffers", &Manifest::buffers, parameters, kRequired, 1},
          {"files", &Manifest::files, list_of(file_fields()), kRequired, 1},
          {"tensors", &Manifest::tensors, list_of(tensors_fields()), kRequired, kVersionOfBlocks},
      },
      check_files_of);
  return fields;
}

const JsonFields<HeldTensor>& held_tensor_fields() {
  static const JsonFields<HeldTensor> fields(
      "a held tensor",
      {
          {"about", &HeldTensor::about, object_of(parameter_fields()), kRequired, 1},
          {"index", &HeldTensor::index, whole(), kRequired, 1},
          {"holder", &HeldTensor::holder, whole(), kRequired, 1},
          {"copies", &HeldTensor::copies, whole(), kRequired, 1},
          {"xxh3", &HeldTensor::hash, hash(), kRequired, 1},
          {"part", &HeldTensor::part, whole(), kRequired, 1},
          {"parts", &HeldTensor::parts, whole(), kRequired, 1},
          {"dimension", &HeldTensor::dimension, whole(), kRequired, 1},
          {"sections", &HeldTensor::sections, wholes(), kRequired, 1},
      },
      /*check=*/nullptr);
  return fields;
}

const JsonFields<HeldTensors>& held_fields() {
  const auto tensors = list_of(held_tensor_fields());
  static const JsonFields<HeldTensors> fields(
      "held tensors",
      {
          {"parameters", &HeldTensors::parameters, tensors, kRequired, 1},
          {"frozen", &HeldTensors::frozen, tensors, kRequired, 1},
          {"buffers", &HeldTensors::buffers, tensors, kRequired, 1},
          {"groups", &HeldTensors::groups, option_groups(), kRequired, 1},
      },
      /*check=*/nullptr);
  return fields;
}

}  // namespace

void write_fields(const Manifest& manifest, nlohmann::ordered_json& root) {
  manifest_fields().write(manifest, root);
}

Manifest read_fields(const nlohmann::json& root, int64_t version) {
  Manifest manifest;
  manifest_fields().read(root, version, manifest);
  if (version < kVersionOfBlocks) read_listed_tensors(root, version, manifest);
  return manifest;
}

nlohmann::ordered_json files_json(const std::vector<FileContent>& files) {
  return list_of(content_fields()).write(files);
}

std::vector<FileContent> files_from(const nlohmann::json& list) {
  return list_of(content_fields()).read(list, "files", kCheckpointVersion);
}

ordered_json held_json(const HeldTensors& held) { return object_of(held_fields()).write(held); }

HeldTensors held_from(const json& object) {
  return object_of(held_fields()).read(object, "held tensors", kCheckpointVersion);
}

}  // namespace zero
