// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/plain_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

#include "zero/checkpoint/format/hashed_file.h"

namespace zero {
namespace {

using json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "state.";
constexpr std::string_view kNamespace = "zero::";

// What a checkpoint has as several numbers and Python as one tuple.
constexpr std::pair<const char*, const char*> kTuples[] = {{"beta1", "betas"},
                                                           {"beta2", "betas"},
                                                           {"eps1", "eps"},
                                                           {"eps2", "eps"},
                                                           {"ns_a", "ns_coefficients"},
                                                           {"ns_b", "ns_coefficients"},
                                                           {"ns_c", "ns_coefficients"}};
constexpr const char* kTruths[] = {"amsgrad", "nesterov",        "centered", "maximize", "batched",
                                   "adapt",   "bias_correction", "ns_fp32",  "ns_bf16"};

json python_value(const std::string& name, double value) {
  if (std::find(std::begin(kTruths), std::end(kTruths), name) != std::end(kTruths)) {
    return value != 0.0;
  }
  if (name == "eps1" && value < 0) return nullptr;  // the machine epsilon
  if (name == "ns_steps") return static_cast<int64_t>(value);
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

void add_option(json& group, const std::string& name, double value) {
  if (name == "match_rms_adamw") {
    group["adjust_lr_fn"] = value != 0.0 ? "match_rms_adamw" : "original";
    return;
  }
  for (const auto& [own, python] : kTuples) {
    if (name == own) {
      group[python].push_back(python_value(name, value));
      return;
    }
  }
  group[name] = python_value(name, value);
}

}  // namespace

std::string plain_state_key(const std::string& parameter, const std::string& kind) {
  TORCH_CHECK(!kind.empty() && kind.find('.') == std::string::npos, "parameter ", parameter,
              ": expected state with a name without dots, got ", printable(kind));
  return std::string(kPrefix) + parameter + "." + kind;
}

std::pair<std::string, std::string> parse_plain_state_key(const std::string& key,
                                                          const std::string& path) {
  const size_t dot = key.rfind('.');
  TORCH_CHECK(key.starts_with(kPrefix) && dot > kPrefix.size() && dot != std::string::npos &&
                  dot + 1 < key.size(),
              path, ": expected tensors called state.<parameter>.<state>, got ", printable(key));
  return {key.substr(kPrefix.size(), dot - kPrefix.size()), key.substr(dot + 1)};
}

std::string plain_class_name(const std::string& optimizer) {
  std::string name = optimizer;
  for (size_t at = name.find(kNamespace); at != std::string::npos; at = name.find(kNamespace)) {
    name.erase(at, kNamespace.size());
  }
  return name;
}

std::string plain_groups_text(const Manifest& manifest) {
  json groups = json::array();
  for (const auto& options : manifest.groups) {
    json group = json::object();
    for (const auto& [name, value] : options) add_option(group, name, value);
    group["params"] = json::array();
    groups.push_back(std::move(group));
  }
  for (const ManifestParameter& p : manifest.parameters) {
    const size_t g = static_cast<size_t>(p.group);
    TORCH_CHECK(g < groups.size(), "parameter ", p.name, ": expected one of ", groups.size(),
                " parameter groups, got number ", p.group);
    json& names = groups[g]["params"];
    // Parts of one tensor are one parameter; they stand one behind the other or far apart.
    if (!is_part(p) || p.from == 0) names.push_back(p.name);
  }
  return groups.dump();
}

std::optional<std::vector<int64_t>> factor_shape(const std::string& kind, c10::IntArrayRef shape) {
  const bool row = kind == "row_var", column = kind == "col_var";
  if ((!row && !column) || shape.size() < 2) return std::nullopt;
  std::vector<int64_t> result = shape.vec();
  result[result.size() - (row ? 1 : 2)] = 1;
  return result;
}

}  // namespace zero
