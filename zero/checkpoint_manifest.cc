// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint_manifest.h"

#include <c10/util/Exception.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "zero/checked_file.h"

namespace zero {
namespace {

// Keeps the order of the fields, for people who read the file.
using json = nlohmann::ordered_json;

constexpr char kFormat[] = "zero checkpoint";
constexpr char kChecksumField[] = "\"xxh3\": \"";
// Nobody's manifest; what is larger is not read into memory.
constexpr uint64_t kLargest = uint64_t{1} << 30;

std::string checksum_line(uint64_t hash) { return kChecksumField + hash_text(hash) + "\"}\n"; }

json to_json(const std::vector<ManifestFile>& files) {
  json result = json::array();
  for (const ManifestFile& file : files) {
    json tensors = json::array();
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

json to_json(const std::vector<ManifestParameter>& parameters) {
  json result = json::array();
  for (const ManifestParameter& p : parameters) {
    result.push_back({{"name", p.name},
                      {"shape", p.shape},
                      {"strides", p.strides},
                      {"dtype", c10::toString(p.dtype)},
                      {"group", p.group}});
  }
  return result;
}

json to_json(const Manifest& m) {
  json groups = json::array();
  for (const auto& options : m.groups) {
    json group = json::object();
    for (const auto& [name, value] : options) group[name] = value;
    groups.push_back(std::move(group));
  }
  return {
      {"format", kFormat},
      {"version", kCheckpointVersion},
      {"id", m.id},
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

std::string dump(const json& value) {
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
              "expected a plain file name, got \"", name, "\"");
}

std::vector<ManifestFile> files_from(const json& value) {
  std::vector<ManifestFile> files;
  for (const json& item : value) {
    ManifestFile file{item.at("name").get<std::string>(),
                      item.at("bytes").get<uint64_t>(),
                      parse_hash(item.at("xxh3").get<std::string>()),
                      {}};
    check_file_name(file.name);
    for (const json& t : item.at("tensors")) {
      file.tensors.push_back({t.at("key").get<std::string>(), t.at("of").get<std::string>(),
                              t.at("kind").get<std::string>(), t.at("begin").get<int64_t>(),
                              t.at("numel").get<int64_t>(),
                              parse_hash(t.at("xxh3").get<std::string>())});
      const ManifestTensor& last = file.tensors.back();
      TORCH_CHECK(last.begin >= 0 && last.numel >= 0 &&
                      last.begin <= std::numeric_limits<int64_t>::max() - last.numel,
                  "tensor ", last.key, ": expected a range of elements, got ", last.begin, " and ",
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

std::vector<ManifestParameter> parameters_from(const json& value) {
  std::vector<ManifestParameter> parameters;
  for (const json& p : value) {
    parameters.push_back(
        {p.at("name").get<std::string>(), p.at("shape").get<std::vector<int64_t>>(),
         p.at("strides").get<std::vector<int64_t>>(), dtype_from(p.at("dtype").get<std::string>()),
         p.at("group").get<int64_t>()});
  }
  return parameters;
}

Manifest manifest_from(const json& root) {
  Manifest m;
  m.id = root.at("id").get<std::string>();
  m.library_version = root.at("library_version").get<std::string>();
  m.torch_version = root.at("torch_version").get<std::string>();
  m.metadata = root.at("metadata").get<std::map<std::string, std::string>>();
  m.steps = root.at("steps").get<int64_t>();
  m.skipped_steps = root.at("skipped_steps").get<int64_t>();
  m.world_size = root.at("world_size").get<int64_t>();
  m.stage = root.at("stage").get<int64_t>();
  m.layout = root.at("layout").get<std::string>();
  m.bucket_bytes = root.at("bucket_bytes").get<int64_t>();
  m.plan_fingerprint = parse_hash(root.at("plan").get<std::string>());
  m.optimizer = root.at("optimizer").get<std::string>();
  for (const json& group : root.at("groups")) {
    m.groups.emplace_back();
    for (const auto& [name, value] : group.items()) {
      // JSON has no infinity or NaN and writes null.
      m.groups.back().emplace_back(
          name, value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>());
    }
  }
  const json& scale = root.at("loss_scale");
  m.dynamic_scale = scale.at("dynamic").get<bool>();
  m.scale = scale.at("scale").get<double>();
  m.good_steps = scale.at("good_steps").get<int64_t>();
  m.hysteresis_left = scale.at("hysteresis_left").get<int64_t>();
  m.skipped_at_min = scale.at("skipped_at_min").get<int64_t>();
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
    return read(json::parse(text));
  } catch (const json::exception& error) {
    TORCH_CHECK(false, origin,
                ": expected what this library writes, got something else: ", error.what());
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error.what_without_backtrace());
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  std::string text = dump(to_json(manifest));
  text.back() = ',';  // in place of the closing brace
  text += '\n';
  return text + checksum_line(content_hash(text.data(), text.size()));
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  const size_t tail = checksum_line(0).size();
  TORCH_CHECK(text.size() > tail, path, ": expected a checkpoint's manifest, got ", text.size(),
              " bytes; the file was truncated");
  const size_t body = text.size() - tail;
  // First of all, so that nothing else sees a damaged one.
  TORCH_CHECK(text.compare(body, tail, checksum_line(content_hash(text.data(), body))) == 0, path,
              ": expected content that matches its checksum, got other bytes; the file is damaged, "
              "use another checkpoint");
  return read_json(text, path, [](const json& root) {
    TORCH_CHECK(root.at("format").get<std::string>() == kFormat, "expected \"", kFormat,
                "\", got another format");
    const auto version = root.at("version").get<int64_t>();
    TORCH_CHECK(version == kCheckpointVersion, "expected format version ", kCheckpointVersion,
                ", got ", version, " of library ", root.value("library_version", "(unknown)"),
                "; use a version of this library that reads it");
    return manifest_from(root);
  });
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  FileReader file(path);
  TORCH_CHECK(file.size() <= kLargest, path, ": expected a manifest of at most ", kLargest,
              " bytes, got ", file.size());
  return parse_manifest(file.read_text(0, file.size()), path);
}

std::string files_text(const std::vector<ManifestFile>& files) { return dump(to_json(files)); }

std::vector<ManifestFile> parse_files(const std::string& text, const std::string& origin) {
  return read_json(text, origin, [](const json& root) { return files_from(root); });
}

}  // namespace zero
