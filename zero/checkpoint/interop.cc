// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/interop.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>

#include "zero/base/json_text.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/checkpoint/match/part_reader.h"

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

// The groups as JSON, a list of {"lr": 0.001, "betas": [0.9, 0.999], ..., "params": [names]}.
std::string plain_groups_text(const Manifest& manifest) {
  json groups = json::array();
  for (const auto& options : manifest.groups) {
    json group = json::object();
    for (const auto& [name, value] : options) add_option(group, name, value);
    group["params"] = json::array();
    groups.push_back(std::move(group));
  }
  std::set<std::string> named;
  for (const ManifestParameter& p : manifest.parameters) {
    const size_t g = static_cast<size_t>(p.group);
    TORCH_CHECK(g < groups.size(), "parameter ", p.name, ": expected one of ", groups.size(),
                " parameter groups, got number ", p.group);
    // Parts of one tensor are one parameter; they stand one behind the other or far apart.
    if (named.insert(p.name).second) groups[g]["params"].push_back(p.name);
  }
  return json_text(groups);
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

std::optional<std::vector<int64_t>> factor_shape(const std::string& kind, c10::IntArrayRef shape) {
  const bool row = kind == "row_var", column = kind == "col_var";
  if ((!row && !column) || shape.size() < 2) return std::nullopt;
  std::vector<int64_t> result = shape.vec();
  result[result.size() - (row ? 1 : 2)] = 1;
  return result;
}

namespace {

// The tensors of a model that are stored as `kind`.
void add_tensors(PartReader& reader, const std::vector<ManifestParameter>& list,
                 const std::string& kind, const ExportOptions& options,
                 std::vector<TensorToWrite>& tensors) {
  for (const ManifestParameter& about : list) {
    if (reader.parts(about.name).front() != &about) continue;  // a part of one that is there
    const bool converts = kind != "buffer" && c10::isFloatingType(about.dtype);
    const auto dtype = converts ? options.dtype().value_or(about.dtype) : about.dtype;
    TensorToWrite tensor{about.name, dtype, whole_shape(about), nullptr};
    if (c10::isComplexType(dtype)) {
      tensor.dtype = c10::toRealValueType(dtype);
      tensor.shape.push_back(2);
    }
    if (!safetensors_knows(tensor.dtype)) {
      TORCH_CHECK(options.skip_unsupported(), kind, " ", about.name,
                  ": expected a dtype that safetensors has, got ", dtype,
                  "; ExportOptions::dtype() converts parameters, skip_unsupported(true) leaves "
                  "such tensors out");
      continue;
    }
    tensor.read = [&reader, name = about.name, kind, dtype] {
      const at::Tensor whole = reader.read_whole(name, kind).to(dtype);
      return whole.is_complex() ? at::view_as_real(whole) : whole;
    };
    tensors.push_back(std::move(tensor));
  }
}

// torch's count of updates is a number in fp32, as long as that is exact.
at::Tensor python_step(const at::Tensor& step) {
  constexpr int64_t kExact = int64_t{1} << 24;
  return step.to(step.item<int64_t>() <= kExact ? at::kFloat : at::kDouble);
}

// The state of one parameter, which its parts with elements have.
void add_state(CheckpointReader& reader, PartReader& whole, const PartReader::Parts& parts,
               std::vector<TensorToWrite>& tensors) {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [](const ManifestParameter* p) { return numel(*p) > 0; });
  if (found == parts.end()) return;
  const ManifestParameter& first = **found;
  const std::string owner = stored_name(first);
  const std::set<std::string> kinds = reader.kinds(owner);
  HeldRange all{first.name, {}, {}};
  for (const ManifestParameter* part : parts) {
    if (numel(*part) == 0) continue;
    TORCH_CHECK(reader.kinds(stored_name(*part)) == kinds, "parameter ", first.name,
                ": expected the same state of all tensor-parallel parts, got parts that differ, "
                "which cannot be put together; export the state of a run without tensor "
                "parallelism");
    all.stored.push_back({stored_name(*part), 0, numel(*part)});
  }
  for (const std::string& kind : kinds) {
    if (kind == "master" || kind == kEmaKind) continue;
    const std::string name = kind.substr(kind.find(':') + 1);  // npos + 1 is 0
    TensorToWrite tensor{plain_state_key(first.name, name), at::kFloat, {}, nullptr};
    if (is_value(kind)) {
      const at::Tensor value = whole.read_values(kind, {&all}).front();
      if (!value.defined()) continue;
      const at::Tensor number = (kind == "step" ? python_step(value) : value).reshape({});
      tensor.dtype = number.scalar_type();
      tensor.read = [number] { return number; };
    } else if (is_uncut(kind)) {
      TORCH_CHECK(!is_part(first), "parameter ", first.name, ": expected ", name,
                  " of the whole parameter, got that of a tensor-parallel part, which cannot be "
                  "put together; export the state of a run without tensor parallelism");
      const at::Tensor read = reader.read_uncut(owner, kind);
      tensor.dtype = read.scalar_type();
      tensor.shape = factor_shape(name, first.shape).value_or(read.sizes().vec());
      TORCH_CHECK(c10::multiply_integers(tensor.shape) == read.numel(), "parameter ", first.name,
                  ": expected ", name, " of shape ", c10::IntArrayRef(tensor.shape), ", got ",
                  read.numel(), " elements");
      tensor.read = [&reader, owner, kind, shape = tensor.shape] {
        return reader.read_uncut(owner, kind).reshape(shape);
      };
    } else {
      tensor.dtype = reader.dtype(kind, {owner, 0, numel(first)});
      tensor.shape = whole_shape(first);
      tensor.read = [&whole, &first, kind] { return whole.read_whole(first.name, kind); };
    }
    tensors.push_back(std::move(tensor));
  }
}

}  // namespace

std::string export_model(const std::string& folder, const std::string& path,
                         const ExportOptions& options) {
  if (const auto dtype = options.dtype()) {
    // Those of parameters, of which skip_unsupported() would leave none.
    TORCH_CHECK(c10::isFloatingType(*dtype) && safetensors_knows(*dtype),
                "ExportOptions::dtype: expected a floating point dtype that safetensors has, got ",
                *dtype);
  }
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  TORCH_CHECK(!options.ema() || has_ema(manifest), folder,
              ": expected averages of the parameters, got a checkpoint without; make the optimizer "
              "with ZeroOptions::ema before it is saved");
  PartReader whole(reader);
  std::vector<TensorToWrite> tensors;
  add_tensors(whole, manifest.parameters, options.ema() ? kEmaKind : "master", options, tensors);
  add_tensors(whole, manifest.frozen, "frozen", options, tensors);
  add_tensors(whole, manifest.buffers, "buffer", options, tensors);
  return write_safetensors_files(path, tensors, {{"format", "pt"}}, options.max_file_bytes());
}

std::string export_optimizer_state(const std::string& folder, const std::string& path,
                                   int64_t max_file_bytes) {
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  std::vector<TensorToWrite> tensors;
  PartReader whole(reader);
  for (const ManifestParameter& p : manifest.parameters) {
    const PartReader::Parts& parts = whole.parts(p.name);
    if (parts.front() == &p) add_state(reader, whole, parts, tensors);
  }
  return write_safetensors_files(path, tensors,
                                 {{"format", "pt"},
                                  {kPlainOptimizer, plain_class_name(manifest.optimizer)},
                                  {kPlainGroups, plain_groups_text(manifest)}},
                                 max_file_bytes);
}

namespace {

using Tensors = torch::OrderedDict<std::string, at::Tensor>;

constexpr size_t kLinesShown = 10;

using Source = SafetensorsFiles::Source;

// Equal for the names of a tied tensor.
using Memory = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>>;

// Files have complex numbers as a last dimension of 2, as export_model() writes them.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

Memory memory_of(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

// Why `tensor` cannot take what is stored; empty if it can.
std::string misfit(const at::Tensor& tensor, const StoredTensor& stored) {
  const c10::IntArrayRef shape = stored.shape;
  if (stored.dtype == c10::ScalarType::Undefined) {
    return "expected a dtype that is known here, got one that is not; convert the file";
  }
  const bool quantized = stored.dtype == at::kChar || stored.dtype == at::kByte;
  if (quantized && stored.dtype != tensor.scalar_type()) {
    return c10::str("expected a dtype that converts to ", tensor.scalar_type(), ", got ",
                    stored.dtype, ", of which quantized weights are; convert the file");
  }
  if (tensor.sizes() != shape) {
    const bool transposed = shape.size() == 2 && tensor.dim() == 2 && shape[0] == tensor.size(1) &&
                            shape[1] == tensor.size(0);
    return c10::str("expected shape ", tensor.sizes(), " as in the model, got ", shape,
                    transposed ? ", its transpose; load a list of tensors that has tensor.t()"
                               : "; load a list of tensors that has a view of that shape",
                    " under this name, or leave it out by an empty name_in_files()");
  }
  if (tensor.is_meta() || tensor._is_zerotensor() ||
      at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "expected memory for each element in the model, got a meta, an expanded or a zero "
           "tensor";
  }
  return {};
}

bool same_bytes(const Source& a, const Source& b) {
  if (a.tensor == b.tensor) return true;
  if (a.tensor->dtype != b.tensor->dtype) return false;
  const at::Tensor left = a.read(), right = b.read();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

struct Copy {
  std::string name;
  at::Tensor into;
  Source from;
};

// What is to be copied, and why not.
struct Match {
  std::vector<Copy> copies;
  WeightReport report;
  std::vector<std::string> problems;
};

Match match(const Tensors& tensors, SafetensorsFiles& files, const WeightOptions& options) {
  Match result;
  std::map<Memory, size_t> copy_of;
  std::set<std::string> asked;
  std::vector<const Tensors::Item*> absent;
  for (const auto& item : tensors) {
    const std::string& name = item.key();
    if (!item.value().defined()) continue;
    const at::Tensor tensor = as_real(item.value());
    const std::string wanted = options.name_in_files() ? options.name_in_files()(name) : name;
    if (wanted.empty()) continue;
    asked.insert(wanted);
    const Source source = files.find(wanted);
    if (source.tensor == nullptr) {
      absent.push_back(&item);
      continue;
    }
    const std::string problem = misfit(tensor, *source.tensor);
    if (!problem.empty()) {
      result.problems.push_back(name + ": " + problem);
      continue;
    }
    const auto [first, is_new] = copy_of.emplace(memory_of(tensor), result.copies.size());
    if (is_new) {
      result.copies.push_back({name, tensor, source});
      continue;
    }
    result.report.tied.push_back(name);
    const Copy& copy = result.copies[first->second];
    if (!same_bytes(copy.from, source)) {
      result.problems.push_back(name + ": expected the values of " + copy.name +
                                ", with which the model ties it, got others; leave one of them "
                                "out by an empty name_in_files()");
    }
  }
  for (const Tensors::Item* item : absent) {
    const bool tied = copy_of.count(memory_of(as_real(item->value()))) > 0;
    (tied ? result.report.tied : result.report.missing).push_back(item->key());
    if (tied || options.allow_missing()) continue;
    result.problems.push_back(item->key() + ": in the model, missing in the files; " +
                              "name_in_files() gives other names, allow_missing(true) skips it");
  }
  for (const auto& item : files.names()) {
    if (asked.count(item.first) > 0) continue;
    result.report.unexpected.push_back(item.first);
    if (options.allow_unexpected()) continue;
    result.problems.push_back(printable(item.first) + ": in the files, missing in the model; " +
                              "allow_unexpected(true) skips it");
  }
  return result;
}

}  // namespace

WeightReport load_weights(const Tensors& tensors, const std::string& path,
                          const WeightOptions& options) {
  SafetensorsFiles files(path);
  Match found = match(tensors, files, options);
  std::string lines;
  for (size_t i = 0; i < std::min(found.problems.size(), kLinesShown); ++i) {
    lines += "\n  " + found.problems[i];
  }
  TORCH_CHECK(found.problems.empty(), path, ": expected the tensors of the model, got ",
              found.problems.size(), " differences:", lines);
  const at::NoGradGuard no_grad;
  // File by file, so that few are open.
  std::ranges::sort(found.copies, {},
                    [](const Copy& c) { return std::pair(c.from.file, c.from.tensor->begin); });
  for (size_t i = 0; i < found.copies.size(); ++i) {
    const Copy& copy = found.copies[i];
    // Shares the version counter, so that an optimizer notices.
    copy.into.detach().copy_(copy.from.read());
    const bool last =
        i + 1 == found.copies.size() || found.copies[i + 1].from.file != copy.from.file;
    if (last) copy.from.file->reader.release();
  }
  found.report.bytes_read = files.bytes_read();
  return std::move(found.report);
}

WeightReport load_weights(torch::nn::Module& module, const std::string& path,
                          const WeightOptions& options) {
  Tensors tensors = module.named_parameters();
  tensors.update(module.named_buffers());
  return load_weights(tensors, path, options);
}

}  // namespace zero
