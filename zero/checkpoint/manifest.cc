// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/manifest.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>

#include "zero/base/error_text.h"
#include "zero/checkpoint/hashed_file.h"
#include "zero/checkpoint/limited_json.h"

namespace zero {
namespace {

// Keeps the order of the fields, for people who read the file.
using ordered_json = nlohmann::ordered_json;
// For reading: finds a field in logarithmic time, however many a file has.
using nlohmann::json;

constexpr char kFormat[] = "zero checkpoint";
constexpr char kChecksumField[] = "\"xxh3\": \"";

std::string checksum_line(uint64_t hash) { return kChecksumField + hash_text(hash) + "\"}\n"; }

ordered_json to_json(const std::vector<ManifestFile>& files) {
  ordered_json result = ordered_json::array();
  for (const ManifestFile& file : files) {
    ordered_json tensors = ordered_json::array();
    for (const ManifestTensor& t : file.tensors) {
      tensors.push_back({{"key", t.key},
                         {"of", t.owner},
                         {"kind", t.kind},
                         {"begin", t.begin},
                         {"numel", t.numel},
                         {"xxh3", hash_text(t.hash)}});
    }
    result.push_back({{"name", file.name},
                      {"bytes", file.bytes},
                      {"xxh3", hash_text(file.hash)},
                      {"tensors", std::move(tensors)}});
  }
  return result;
}

ordered_json to_json(const std::vector<ManifestParameter>& parameters) {
  ordered_json result = ordered_json::array();
  for (const ManifestParameter& p : parameters) {
    result.push_back({{"name", p.name},
                      {"shape", p.shape},
                      {"strides", p.strides},
                      {"dtype", c10::toString(p.dtype)},
                      {"group", p.group}});
  }
  return result;
}

ordered_json to_json(const Manifest& m) {
  ordered_json groups = ordered_json::array();
  for (const auto& options : m.groups) {
    ordered_json group = ordered_json::object();
    for (const auto& [name, value] : options) {
      // JSON has no infinity or NaN and would write null.
      group[name] =
          std::isfinite(value) ? ordered_json(value) : ordered_json(std::to_string(value));
    }
    groups.push_back(std::move(group));
  }
  return {
      {"format", kFormat},
      {"version", kCheckpointVersion},
      {"id", m.id},
      {"run", m.run},
      {"saved", m.saved},
      {"library_version", m.library_version},
      {"torch_version", m.torch_version},
      {"metadata", m.metadata},
      {"steps", m.steps},
      {"skipped_steps", m.skipped_steps},
      {"world_size", m.world_size},
      {"stage", m.stage},
      {"layout", m.layout},
      {"bucket_bytes", m.bucket_bytes},
      {"plan", hash_text(m.plan_fingerprint)},
      {"optimizer", m.optimizer},
      {"groups", std::move(groups)},
      {"loss_scale",
       {{"dynamic", m.dynamic_scale},
        {"scale", m.scale},
        {"good_steps", m.good_steps},
        {"hysteresis_left", m.hysteresis_left},
        {"skipped_at_min", m.skipped_at_min}}},
      {"parameters", to_json(m.parameters)},
      {"frozen", to_json(m.frozen)},
      {"buffers", to_json(m.buffers)},
      {"files", to_json(m.files)},
  };
}

std::string dump(const ordered_json& value) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "checkpoint: expected names and metadata in UTF-8, got other bytes (",
                error.what(), "); encode binary data as text, for example as hexadecimal digits");
  }
}

// A name inside the folder, never a way out of it.
void check_file_name(const std::string& name) {
  TORCH_CHECK(!name.empty() && name[0] != '.' && name.find('/') == std::string::npos &&
                  name.find('\0') == std::string::npos,
              "expected a plain file name, got \"", printable(name), "\"");
}

// From 0 to 2^63 - 1. The JSON library's own conversion is undefined for 1e20 and
// wraps around for -1.
int64_t whole_number(const json& value, const char* field) {
  TORCH_CHECK(
      value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<int64_t>::max(),
      field, ": expected a whole number from 0 to 2^63 - 1, got another ", value.type_name());
  return value.get<int64_t>();
}

int64_t whole(const json& object, const char* field) {
  return whole_number(object.at(field), field);
}

int64_t count(const json& object, const char* field) {
  const int64_t number = whole(object, field);
  TORCH_CHECK(number <= kCountLimit, field, ": expected at most ", kCountLimit, ", got ", number);
  return number;
}

std::vector<int64_t> wholes(const json& object, const char* field) {
  const json& list = object.at(field);
  TORCH_CHECK(list.is_array(), field, ": expected a list of whole numbers, got ", list.dump());
  std::vector<int64_t> result;
  for (const json& value : list) result.push_back(whole_number(value, field));
  return result;
}

std::vector<ManifestFile> files_from(const json& value) {
  std::vector<ManifestFile> files;
  for (const json& item : value) {
    ManifestFile file{item.at("name").get<std::string>(),
                      static_cast<uint64_t>(whole(item, "bytes")),
                      parse_hash(item.at("xxh3").get<std::string>()),
                      {}};
    check_file_name(file.name);
    for (const json& t : item.at("tensors")) {
      file.tensors.push_back({t.at("key").get<std::string>(), t.at("of").get<std::string>(),
                              t.at("kind").get<std::string>(), whole(t, "begin"), whole(t, "numel"),
                              parse_hash(t.at("xxh3").get<std::string>())});
      const ManifestTensor& last = file.tensors.back();
      TORCH_CHECK(last.begin <= std::numeric_limits<int64_t>::max() - last.numel, "tensor ",
                  last.key, ": expected a range of elements, got ", last.begin, " and ",
                  last.numel);
    }
    files.push_back(std::move(file));
  }
  return files;
}

c10::ScalarType dtype_from(const std::string& text) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    if (text == c10::toString(dtype)) return dtype;
  }
  TORCH_CHECK(false, "expected a dtype of torch, got ", text);
}

// That a tensor of this shape exists, and that its elements lie within as many
// elements of memory: what is read is seen through these strides.
void check_geometry(const ManifestParameter& p) {
  // As wide as any dtype, so that bytes can be counted in 63 bits.
  int64_t bytes = 16;
  bool fits = true;
  for (const int64_t size : p.shape) {
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

std::vector<ManifestParameter> parameters_from(const json& value) {
  std::vector<ManifestParameter> parameters;
  for (const json& p : value) {
    parameters.push_back({p.at("name").get<std::string>(), wholes(p, "shape"), wholes(p, "strides"),
                          dtype_from(p.at("dtype").get<std::string>()), whole(p, "group")});
    check_geometry(parameters.back());
  }
  return parameters;
}

double option_from(const json& value) {
  if (!value.is_string()) return value.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto text = value.get<std::string>();
  TORCH_CHECK(text == "inf" || text == "-inf" || text == "nan" || text == "-nan",
              "expected an option that is a number, got ", text);
  if (text.find("nan") != std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

Manifest manifest_from(const json& root) {
  Manifest m;
  m.id = root.at("id").get<std::string>();
  m.run = root.value("run", "");
  if (root.contains("saved")) m.saved = whole(root, "saved");
  m.library_version = root.at("library_version").get<std::string>();
  m.torch_version = root.at("torch_version").get<std::string>();
  m.metadata = root.at("metadata").get<std::map<std::string, std::string>>();
  m.steps = count(root, "steps");
  m.skipped_steps = count(root, "skipped_steps");
  m.world_size = whole(root, "world_size");
  m.stage = whole(root, "stage");
  m.layout = root.at("layout").get<std::string>();
  m.bucket_bytes = whole(root, "bucket_bytes");
  m.plan_fingerprint = parse_hash(root.at("plan").get<std::string>());
  m.optimizer = root.at("optimizer").get<std::string>();
  for (const json& group : root.at("groups")) {
    TORCH_CHECK(group.is_object(), "groups: expected options by name, got a ", group.type_name());
    m.groups.emplace_back();
    for (const auto& [name, value] : group.items()) {
      m.groups.back().emplace_back(name, option_from(value));
    }
  }
  const json& scale = root.at("loss_scale");
  m.dynamic_scale = scale.at("dynamic").get<bool>();
  m.scale = scale.at("scale").get<double>();
  // Gradients are divided by it.
  TORCH_CHECK(std::isnormal(m.scale) && m.scale > 0,
              "loss scale: expected a positive, finite number, got ", m.scale);
  m.good_steps = count(scale, "good_steps");
  m.hysteresis_left = count(scale, "hysteresis_left");
  m.skipped_at_min = count(scale, "skipped_at_min");
  m.parameters = parameters_from(root.at("parameters"));
  m.frozen = parameters_from(root.at("frozen"));
  m.buffers = parameters_from(root.at("buffers"));
  m.files = files_from(root.at("files"));
  return m;
}

// Runs `read` on what `text` says; whatever goes wrong names `origin`.
template <typename Read>
auto read_json(const std::string& text, const std::string& origin, const Read& read) {
  try {
    return read(parse_limited_json(text));
  } catch (const json::exception& error) {
    TORCH_CHECK(false, origin,
                ": expected what this library writes, got something else: ", error.what());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error_text(error));
  }
}

void check_length(uint64_t bytes, const std::string& path) {
  TORCH_CHECK(bytes > checksum_line(0).size(), path, ": expected a checkpoint's manifest, got ",
              bytes, " bytes; the file was truncated");
  TORCH_CHECK(bytes <= kManifestLimit + checksum_line(0).size(), path,
              ": expected a manifest of at most ", kManifestLimit, " bytes, got ", bytes);
}

void check_last_line(const std::string& line, uint64_t hash, const std::string& path) {
  TORCH_CHECK(line == checksum_line(hash), path,
              ": expected content that matches its checksum, got other bytes; the file is damaged, "
              "use another checkpoint");
}

}  // namespace

int64_t numel(const ManifestParameter& parameter) {
  int64_t result = 1;
  for (const int64_t size : parameter.shape) result *= size;
  return result;
}

bool is_value(const std::string& kind) {
  return kind == "step" || kind.rfind("value:", 0) == 0 || kind.rfind("scalar:", 0) == 0;
}

void check_values_agree(const std::vector<ManifestFile>& files) {
  std::map<std::pair<std::string, std::string>, uint64_t> seen;
  for (const ManifestFile& file : files) {
    for (const ManifestTensor& t : file.tensors) {
      if (!is_value(t.kind)) continue;
      const auto [first, added] = seen.emplace(std::pair(t.owner, t.kind), t.hash);
      TORCH_CHECK(added || first->second == t.hash, "parameter ", t.owner, ": expected one ",
                  t.kind, " for all its pieces, got different ones in ", file.name,
                  "; an optimizer that keeps a value of the piece it was given, such as a norm, "
                  "does not treat every element by itself");
    }
  }
}

std::string manifest_text(const Manifest& manifest) {
  TORCH_CHECK(manifest.metadata.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " entries of metadata, got ", manifest.metadata.size(),
              "; put many values into one text");
  TORCH_CHECK(manifest.groups.size() <= kEntriesLimit, "checkpoint: expected at most ",
              kEntriesLimit, " parameter groups, got ", manifest.groups.size());
  std::string text = dump(to_json(manifest));
  TORCH_CHECK(text.size() < kManifestLimit, "checkpoint: expected a manifest of less than ",
              kManifestLimit, " bytes, got ", text.size(),
              "; larger buckets have fewer pieces of parameters, and metadata counts too");
  text.back() = ',';  // in place of the closing brace
  text += '\n';
  return text + checksum_line(content_hash(text.data(), text.size()));
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  check_length(text.size(), path);
  const size_t body = text.size() - checksum_line(0).size();
  // First of all, so that nothing else sees a damaged one.
  check_last_line(text.substr(body), content_hash(text.data(), body), path);
  return read_json(text, path, [](const json& root) {
    TORCH_CHECK(root.at("format").get<std::string>() == kFormat, "expected \"", kFormat,
                "\", got another format");
    const int64_t version = whole(root, "version");
    TORCH_CHECK(version == kCheckpointVersion, "expected format version ", kCheckpointVersion,
                ", got ", version, " of library ", root.value("library_version", "(unknown)"),
                "; use a version of this library that reads it");
    return manifest_from(root);
  });
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  FileReader file(path);
  check_length(file.size(), path);
  const size_t tail = checksum_line(0).size();
  const uint64_t body = file.size() - tail;
  const uint64_t hash = file.scan(0, body);
  check_last_line(file.read_text(body, tail), hash, path);
  return parse_manifest(file.read_text(0, file.size()), path);
}

bool is_complete_checkpoint(const std::string& folder) {
  try {
    for (const ManifestFile& file : read_manifest(folder).files) {
      if (FileReader(folder + "/" + file.name).size() != file.bytes) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

std::string files_text(const std::vector<ManifestFile>& files) { return dump(to_json(files)); }

std::vector<ManifestFile> parse_files(const std::string& text, const std::string& origin) {
  return read_json(text, origin, [](const json& root) { return files_from(root); });
}

}  // namespace zero
