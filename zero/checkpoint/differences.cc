// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/differences.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

ManifestParameter described(const Parameter& p) {
  return {p.name, p.sizes, p.strides, p.tensor.scalar_type(), p.group};
}

ManifestParameter described(const NamedTensor& item) {
  return {item.name, item.tensor.sizes().vec(), {}, item.tensor.scalar_type(), 0};
}

namespace {

constexpr size_t kLinesShown = 10;

// All that a checkpoint or a model holds, whatever its kind.
struct Entry {
  std::string kind;
  ManifestParameter about;
  bool trainable = false;  // by another optimizer, which may save it too
  bool late = false;       // registered since the optimizer was made, so maybe since the save
};

std::vector<Entry> entries(const Manifest& manifest) {
  std::vector<Entry> result;
  for (const auto& p : manifest.parameters) result.push_back({"parameter", p});
  for (const auto& p : manifest.frozen) result.push_back({"frozen parameter", p});
  for (const auto& p : manifest.buffers) result.push_back({"buffer", p});
  return result;
}

// The tensors of the model, with the parts of them that this rank holds.
std::vector<Entry> entries(const ParameterTable& table, const MeshTensors* mesh) {
  std::vector<Entry> result;
  for (const Parameter& p : table.parameters()) {
    result.push_back({"parameter", held_here(p, mesh)});
  }
  const auto add = [&](const std::vector<NamedTensor>& list, const char* kind) {
    for (const NamedTensor& item : list) {
      result.push_back({kind, held_here(item, mesh), item.trainable, item.late});
    }
  };
  add(table.unmanaged(), "frozen parameter");
  add(table.buffers(), "buffer");
  return result;
}

// False where the checkpoint's entry cannot fill the model's.
bool compare(const Entry& model, const Entry& stored, bool numbered_groups,
             CheckpointDifferences& result) {
  const auto add = [&](const char* what, const auto& there, const auto& here) {
    result.lines.push_back(c10::str(model.kind, " ", model.about.name, ": ", what, " ", there,
                                    " in the checkpoint, ", here, " in the model"));
  };
  if (model.kind != stored.kind) {
    add("kind", stored.kind, model.kind);
    result.lines.back() +=
        "; it stays as it is: load with the parameters frozen that were frozen in the save, and "
        "freeze() or unfreeze() afterwards, or load_weights() from files of export_model()";
    return false;
  }
  const ManifestParameter& a = stored.about;
  const ManifestParameter& b = model.about;
  if (whole_shape(a) != whole_shape(b)) {
    add("shape", c10::IntArrayRef(whole_shape(a)), c10::IntArrayRef(whole_shape(b)));
    return false;
  }
  // Parts of a fused tensor that do not say so are those of one that is not. Along another
  // dimension they may be those of a tensor in which that one is not fused.
  if (is_part(a) && is_part(b) && a.dimension == b.dimension && a.sections != b.sections) {
    add("sections", c10::IntArrayRef(a.sections), c10::IntArrayRef(b.sections));
    return false;
  }
  const bool usable =
      memory_order(a) == memory_order(b) || c10::multiply_integers(whole_shape(a)) == 0;
  if (!usable) {
    add("memory order (strides)", c10::IntArrayRef(a.strides), c10::IntArrayRef(b.strides));
    result.lines.back() += "; files of export_model() and export_optimizer_state() fit either";
  }
  if (a.dtype != b.dtype) add("dtype", a.dtype, b.dtype);
  if (numbered_groups && a.group != b.group) {
    add("parameter group", a.group, b.group);
    result.same_groups = false;
  }
  return usable;
}

// Finds the stored group of each group of the model by the parameters in it. They may be of several
// stored groups, if these have the same options.
void find_groups(const Manifest& manifest, const ParameterTable& table,
                 CheckpointDifferences& result) {
  std::map<std::string, int64_t> stored;
  for (const ManifestParameter& p : manifest.parameters) stored[p.name] = p.group;
  const auto count = static_cast<int64_t>(manifest.groups.size());
  for (const Parameter& p : table.parameters()) {
    const auto found = stored.find(p.name);
    if (found == stored.end()) continue;
    const int64_t group = found->second;
    TORCH_CHECK(group < count, "parameter ", p.name, ": expected one of the ", count,
                " parameter groups of the checkpoint, got number ", group);
    int64_t& from = result.groups_from[p.group];
    if (from < 0) from = group;
    if (manifest.groups[from] == manifest.groups[group]) continue;
    result.same_groups = false;
    result.lines.push_back(c10::str("parameter ", p.name, ": in group ", group,
                                    " of the checkpoint, whose options are not those of group ",
                                    from, ", with which it shares one here"));
  }
  for (size_t g = 0; g < result.groups_from.size(); ++g) {  // without parameters
    if (result.groups_from[g] < 0 && g < manifest.groups.size()) result.groups_from[g] = g;
  }
}

// Options are meant for the parameters that were saved with them.
void leave_groups_without_any(const ParameterTable& table, CheckpointDifferences& result) {
  std::set<int64_t> present, filled;
  for (const Parameter& p : table.parameters()) {
    present.insert(p.group);
    if (result.unusable.count(p.name) == 0) filled.insert(p.group);
  }
  for (const int64_t g : present) {
    if (filled.count(g) != 0 || result.groups_from[g] < 0) continue;
    result.groups_from[g] = -1;
    result.lines.push_back("parameter group " + std::to_string(g) +
                           ": none of its parameters can be loaded; its options stay as they are");
  }
}

void compare_optimizers(const Manifest& manifest, const torch::optim::Optimizer& inner,
                        bool numbered_groups, CheckpointDifferences& result) {
  const std::string name = optimizer_name(inner);
  result.same_optimizer = manifest.optimizer == name;
  if (!result.same_optimizer) {
    result.lines.push_back("inner optimizer: " + manifest.optimizer + " in the checkpoint, " +
                           name + " here; masters load, but not its state, nor its options");
  }
  if (!numbered_groups) return;
  for (size_t g = 0; g < std::min(manifest.groups.size(), result.groups_from.size()); ++g) {
    result.groups_from[g] = static_cast<int64_t>(g);
  }
  if (manifest.groups.size() != inner.param_groups().size()) {
    result.same_groups = false;
    result.lines.push_back("parameter groups: " + std::to_string(manifest.groups.size()) +
                           " in the checkpoint, " + std::to_string(inner.param_groups().size()) +
                           " here; their options stay as they are");
  }
}

void add_missing(const Entry& model, CheckpointDifferences& result) {
  const std::string name = " " + model.about.name;
  if (model.trainable || model.late) {
    result.notes.push_back(
        (model.trainable ? "parameter" : model.kind) + name + ": stays as it is, as one " +
        (model.trainable ? "of another optimizer" : "that was registered after construction") +
        ", since it is not in the checkpoint");
  } else {
    result.lines.push_back(model.kind + name + ": in the model, missing in the checkpoint");
  }
}

// Compares each tensor of the model with the one of its name in the checkpoint, and takes that out
// of `stored`.
void compare_model(const std::vector<Entry>& here, bool numbered_groups,
                   std::map<std::string, Entry>& stored, CheckpointDifferences& result) {
  for (const Entry& model : here) {
    const auto found = stored.find(model.about.name);
    if (found == stored.end()) {
      result.unusable.insert(model.about.name);
      add_missing(model, result);
      continue;
    }
    if (!compare(model, found->second, numbered_groups, result)) {
      result.unusable.insert(model.about.name);
    }
    stored.erase(found);
  }
}

// What is `left` of the checkpoint has no tensor on this rank.
void add_surplus(const std::map<std::string, Entry>& left, const ParameterTable& table,
                 const MeshTensors* mesh, CheckpointDifferences& result) {
  std::set<std::string> others;  // trained by other optimizers, which set them
  for (const NamedTensor& f : table.frozen()) {
    if (f.trainable) others.insert(f.name);
  }
  for (const auto& [name, entry] : left) {
    if (mesh != nullptr && mesh->has(name)) continue;
    if (entry.kind == "frozen parameter" && others.count(name) != 0) continue;
    result.lines.push_back(entry.kind + " " + name + ": in the checkpoint, missing in the model");
  }
}

}  // namespace

CheckpointDifferences find_differences(const Manifest& manifest, const ParameterTable& table,
                                       const torch::optim::Optimizer& inner,
                                       const MeshTensors* mesh) {
  CheckpointDifferences result;
  const bool numbered_groups = mesh == nullptr && manifest.holders == 1;
  std::map<std::string, Entry> stored;
  for (Entry& entry : entries(manifest)) stored.emplace(entry.about.name, std::move(entry));
  compare_model(entries(table, mesh), numbered_groups, stored, result);
  add_surplus(stored, table, mesh, result);
  result.groups_from.assign(inner.param_groups().size(), -1);
  if (!numbered_groups) find_groups(manifest, table, result);
  compare_optimizers(manifest, inner, numbered_groups, result);
  if (result.same_groups) leave_groups_without_any(table, result);
  return result;
}

namespace {

// The kinds that are stored of each stored_name().
std::map<std::string, std::set<std::string>> stored_kinds(const Manifest& manifest) {
  std::map<std::string, std::set<std::string>> kinds;
  for (const ManifestTensors& entry : manifest.tensors) {
    kinds[entry.owner].insert(entry.kinds.begin(), entry.kinds.end());
  }
  return kinds;
}

bool has_moments(const std::set<std::string>& kinds) {
  return std::any_of(kinds.begin(), kinds.end(), [](const std::string& kind) {
    return kind != "master" && kind != kEmaKind && !is_value(kind) && !is_uncut(kind);
  });
}

// Of a parameter, in a manifest.
std::string format_text(const std::string& format) {
  return format.empty() ? "float32" : printable(format);
}

}  // namespace

void find_missing_state(const Manifest& manifest, const ParameterTable& table,
                        const torch::optim::Optimizer& inner, const MeshTensors* mesh,
                        CheckpointDifferences& differences) {
  std::map<std::string, std::set<std::string>> kinds = stored_kinds(manifest);
  std::map<std::string, std::set<std::string>> parts;  // their stored names, by name
  for (const ManifestParameter& p : manifest.parameters) {
    // A part without elements has no tensors.
    if (numel(p) > 0) parts[p.name].insert(stored_name(p));
  }
  for (const Parameter& p : table.parameters()) {
    std::set<std::string>& stored = parts[p.name];
    // What is cut as in the save needs its own part alone, and a part without elements no state.
    const ManifestParameter here = held_here(p, mesh);
    if (numel(here) == 0) continue;
    if (stored.count(stored_name(here)) != 0) stored = {stored_name(here)};
    std::set<std::string> found;  // that any part has
    for (const std::string& part : stored) found.insert(kinds[part].begin(), kinds[part].end());
    found.erase("master");
    found.erase(kEmaKind);
    if (found.empty()) continue;  // a parameter that was never used has no state
    for (const std::string& kind : adapter_of(inner, p.group).required_state()) found.insert(kind);
    for (const std::string& kind : found) {
      const auto has_it = [&](const std::string& part) { return kinds[part].count(kind) != 0; };
      if (std::all_of(stored.begin(), stored.end(), has_it)) continue;
      differences.lines.push_back("parameter " + p.name + ": state " + kind +
                                  " missing in the checkpoint");
      differences.without_state.insert(p.name);
    }
  }
}

void find_unknown_options(const Manifest& manifest, const torch::optim::Optimizer& inner,
                          CheckpointDifferences& differences) {
  for (size_t g = 0; g < differences.groups_from.size(); ++g) {
    if (differences.groups_from[g] < 0) continue;
    std::set<std::string> known;
    const auto& options = inner.param_groups()[g].options();
    for (const auto& option : adapter_of(options).option_values(options)) {
      known.insert(option.first);
    }
    for (const auto& option : manifest.groups[differences.groups_from[g]]) {
      if (known.count(option.first) != 0) continue;
      differences.lines.push_back("parameter group " + std::to_string(g) + ": option " +
                                  option.first + " in the checkpoint, unknown here");
    }
  }
}

std::vector<std::string> find_conversions(const Manifest& manifest,
                                          const std::vector<ManifestParameter>& here,
                                          const CheckpointDifferences& differences) {
  std::map<std::string, std::set<std::string>> kinds = stored_kinds(manifest);
  std::map<std::string, std::vector<const ManifestParameter*>> stored;  // the parts, by name
  for (const ManifestParameter& p : manifest.parameters) stored[p.name].push_back(&p);
  // How many parameters, by what is converted, and from and to which format.
  std::map<std::array<std::string, 3>, int64_t> counts;
  for (const ManifestParameter& p : here) {
    if (differences.unusable.count(p.name) != 0) continue;
    const bool takes_state =
        differences.same_optimizer && differences.without_state.count(p.name) == 0;
    std::set<std::array<std::string, 3>> of_parameter;
    for (const ManifestParameter* part : stored[p.name]) {
      if (part->master != p.master) {
        of_parameter.insert({"masters", format_text(part->master), format_text(p.master)});
      }
      if (takes_state && part->moments != p.moments && has_moments(kinds[stored_name(*part)])) {
        of_parameter.insert({"moments", format_text(part->moments), format_text(p.moments)});
      }
    }
    for (const auto& conversion : of_parameter) ++counts[conversion];
  }
  std::vector<std::string> lines;
  for (const auto& [conversion, count] : counts) {
    const auto& [what, from, to] = conversion;
    lines.push_back(what + " of " + std::to_string(count) +
                    (count == 1 ? " parameter: " : " parameters: ") + from +
                    " in the checkpoint, " + to + " here");
  }
  return lines;
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
