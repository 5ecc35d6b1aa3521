// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/differences.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "zero/inner/classes.h"
#include "zero/inner/state.h"

namespace zero {
namespace {

constexpr size_t kLinesShown = 10;

// All that a checkpoint or a model holds, whatever its kind.
struct Entry {
  std::string kind;
  ManifestParameter about;
};

std::vector<Entry> entries(const Manifest& manifest) {
  std::vector<Entry> result;
  for (const auto& p : manifest.parameters) result.push_back({"parameter", p});
  for (const auto& p : manifest.frozen) result.push_back({"frozen parameter", p});
  for (const auto& p : manifest.buffers) result.push_back({"buffer", p});
  return result;
}

std::vector<Entry> entries(const ParameterTable& table) {
  std::vector<Entry> result;
  for (const Parameter& p : table.parameters()) {
    result.push_back({"parameter", {p.name, p.sizes, p.strides, p.tensor.scalar_type(), p.group}});
  }
  const auto add = [&](const std::vector<NamedTensor>& list, const char* kind) {
    for (const NamedTensor& item : list) {
      result.push_back(
          {kind, {item.name, item.tensor.sizes().vec(), {}, item.tensor.scalar_type(), 0}});
    }
  };
  add(table.frozen(), "frozen parameter");
  add(table.buffers(), "buffer");
  return result;
}

class Comparison {
 public:
  // False where the checkpoint's entry cannot fill the model's.
  bool compare(const Entry& model, const Entry& stored) {
    name_ = model.kind + " " + model.about.name;
    if (model.kind != stored.kind) return different("kind", stored.kind, model.kind, false);
    const ManifestParameter& a = stored.about;
    const ManifestParameter& b = model.about;
    if (a.shape != b.shape) {
      return different("shape", c10::IntArrayRef(a.shape), c10::IntArrayRef(b.shape), false);
    }
    bool usable = true;
    if (a.strides != b.strides && numel(a) > 1) {
      usable = different("memory order (strides)", c10::IntArrayRef(a.strides),
                         c10::IntArrayRef(b.strides), false);
    }
    if (a.dtype != b.dtype) different("dtype", a.dtype, b.dtype, true);
    if (a.group != b.group) {
      same_groups = different("parameter group", a.group, b.group, false);
    }
    return usable;
  }
  std::vector<std::string> lines;
  bool same_groups = true;

 private:
  template <typename Value>
  bool different(const char* what, const Value& stored, const Value& model, bool usable) {
    std::ostringstream line;
    line << name_ << ": " << what << " " << stored << " in the checkpoint, " << model
         << " in the model";
    lines.push_back(line.str());
    return usable;
  }

  std::string name_;
};

void compare_optimizers(const Manifest& manifest, const torch::optim::Optimizer& inner,
                        CheckpointDifferences& result) {
  const std::string name = optimizer_name(inner);
  result.same_optimizer = manifest.optimizer == name;
  if (!result.same_optimizer) {
    result.lines.push_back("inner optimizer: " + manifest.optimizer + " in the checkpoint, " +
                           name + " here; masters load, its state does not");
  }
  if (manifest.groups.size() != inner.param_groups().size()) {
    result.same_groups = false;
    result.lines.push_back("parameter groups: " + std::to_string(manifest.groups.size()) +
                           " in the checkpoint, " + std::to_string(inner.param_groups().size()) +
                           " here; their options stay as they are");
  }
}

}  // namespace

CheckpointDifferences find_differences(const Manifest& manifest, const ParameterTable& table,
                                       const torch::optim::Optimizer& inner) {
  CheckpointDifferences result;
  Comparison comparison;
  std::map<std::string, Entry> stored;
  for (Entry& entry : entries(manifest)) stored.emplace(entry.about.name, std::move(entry));
  for (const Entry& model : entries(table)) {
    const auto found = stored.find(model.about.name);
    if (found == stored.end()) {
      comparison.lines.push_back(model.kind + " " + model.about.name +
                                 ": in the model, missing in the checkpoint");
      result.unusable.insert(model.about.name);
      continue;
    }
    if (!comparison.compare(model, found->second)) result.unusable.insert(model.about.name);
    stored.erase(found);
  }
  for (const auto& [name, entry] : stored) {
    comparison.lines.push_back(entry.kind + " " + name +
                               ": in the checkpoint, missing in the model");
  }
  result.lines = std::move(comparison.lines);
  result.same_groups = comparison.same_groups;
  compare_optimizers(manifest, inner, result);
  return result;
}

void find_missing_state(const Manifest& manifest, const ParameterTable& table,
                        const torch::optim::Optimizer& inner, CheckpointDifferences& differences) {
  std::map<std::string, std::set<std::string>> kinds;
  for (const ManifestFile& file : manifest.files) {
    for (const ManifestTensor& t : file.tensors) kinds[t.owner].insert(t.kind);
  }
  for (const Parameter& p : table.parameters()) {
    const std::set<std::string>& stored = kinds[p.name];
    // A parameter that was never used has no state.
    if (stored.size() <= stored.count("master")) continue;
    for (const std::string& kind : required_state(inner, p.group)) {
      if (stored.count(kind) != 0) continue;
      differences.lines.push_back("parameter " + p.name + ": state " + kind +
                                  " missing in the checkpoint");
      differences.without_state.insert(p.name);
    }
  }
}

void find_unknown_options(const Manifest& manifest, const torch::optim::Optimizer& inner,
                          CheckpointDifferences& differences) {
  const size_t groups = std::min(manifest.groups.size(), inner.param_groups().size());
  for (size_t g = 0; g < groups; ++g) {
    std::set<std::string> known;
    for (const auto& option : stored_option_values(inner.param_groups()[g].options())) {
      known.insert(option.first);
    }
    for (const auto& option : manifest.groups[g]) {
      if (known.count(option.first) != 0) continue;
      differences.lines.push_back("parameter group " + std::to_string(g) + ": option " +
                                  option.first + " in the checkpoint, unknown here");
    }
  }
}

void throw_differences(const CheckpointDifferences& differences, const std::string& folder) {
  if (differences.lines.empty()) return;
  std::string text;
  for (size_t i = 0; i < std::min(differences.lines.size(), kLinesShown); ++i) {
    text += "\n  " + differences.lines[i];
  }
  if (differences.lines.size() > kLinesShown) text += "\n  ...";
  TORCH_CHECK(false, folder, ": expected the model and optimizer of the checkpoint, got ",
              differences.lines.size(), " differences:", text,
              "\nstrict(false) loads what matches and reports the rest");
}

}  // namespace zero
