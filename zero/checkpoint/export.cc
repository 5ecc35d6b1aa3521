// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/checkpoint.h"
#include "zero/checkpoint/format/plain_state.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/format/safetensors_files.h"
#include "zero/checkpoint/match/part_reader.h"

namespace zero {
namespace {

// A tensor of the model: one entry of the manifest, or one for each part.
using Parts = std::vector<const ManifestParameter*>;

// In the order of the manifest.
std::vector<Parts> whole_tensors(const std::vector<ManifestParameter>& list) {
  std::vector<Parts> result;
  std::unordered_map<std::string, size_t> number;
  for (const ManifestParameter& p : list) {
    const auto [place, is_new] = number.emplace(p.name, result.size());
    if (is_new) result.emplace_back();
    result[place->second].push_back(&p);
  }
  return result;
}

// Reads tensors of the model in their shapes, whose parts are read as if they were held whole.
class WholeReader {
 public:
  explicit WholeReader(CheckpointReader& reader) : reader_(reader), parts_(reader) {}

  CheckpointReader& reader() { return reader_; }
  at::Tensor read(const Parts& parts, const std::string& kind);

 private:
  CheckpointReader& reader_;
  PartReader parts_;
};

at::Tensor WholeReader::read(const Parts& parts, const std::string& kind) {
  const ManifestParameter& about = *parts.front();
  const ManifestParameter whole{about.name, whole_shape(about), about.strides, about.dtype, 0};
  // The time to find ranges grows with what is promised, so that has to be in the files.
  std::set<std::string> names;  // each once, however often it is listed
  for (const ManifestParameter* part : parts) names.insert(stored_name(*part));
  int64_t there = 0;
  const std::optional<c10::ScalarType> dtype =
      is_held_whole(kind) ? std::optional(about.dtype) : std::nullopt;
  for (const std::string& name : names) there += reader_.count_stored(name, kind, dtype);
  TORCH_CHECK(there == numel(whole), "parameter ", about.name, ": expected parts of ", numel(whole),
              " elements together, got ", there);
  const std::vector<size_t> order = memory_order(whole);
  std::vector<int64_t> sizes, dimensions(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(whole.shape[order[i]]);
    dimensions[order[i]] = static_cast<int64_t>(i);
  }
  return parts_.read_all(whole, kind).view(sizes).permute(dimensions);
}

// The tensors of a model for one call of export_model().
class ModelTensors {
 public:
  ModelTensors(WholeReader& reader, const ExportOptions& options)
      : reader_(reader), options_(options) {}

  void add(const std::vector<ManifestParameter>& list, const std::string& kind) {
    for (Parts& parts : whole_tensors(list)) {
      const ManifestParameter& about = *parts.front();
      const bool converts = kind != "buffer" && c10::isFloatingType(about.dtype);
      const auto dtype = converts ? options_.dtype().value_or(about.dtype) : about.dtype;
      TensorToWrite tensor{about.name, dtype, whole_shape(about), nullptr};
      if (c10::isComplexType(dtype)) {
        tensor.dtype = c10::toRealValueType(dtype);
        tensor.shape.push_back(2);
      }
      if (!safetensors_knows(tensor.dtype)) {
        TORCH_CHECK(options_.skip_unsupported(), kind, " ", about.name,
                    ": expected a dtype that safetensors has, got ", dtype,
                    "; ExportOptions::dtype() converts parameters, skip_unsupported(true) leaves "
                    "such tensors out");
        continue;
      }
      tensor.read = [&reader = reader_, parts = std::move(parts), kind, dtype] {
        const at::Tensor whole = reader.read(parts, kind).to(dtype);
        return whole.is_complex() ? at::view_as_real(whole) : whole;
      };
      result.push_back(std::move(tensor));
    }
  }

  std::vector<TensorToWrite> result;

 private:
  WholeReader& reader_;
  const ExportOptions& options_;
};

// torch's count of updates is a number in fp32, as long as that is exact.
at::Tensor python_step(const at::Tensor& step) {
  constexpr int64_t kExact = int64_t{1} << 24;
  return step.to(step.item<int64_t>() <= kExact ? at::kFloat : at::kDouble);
}

// The value of all parts; undefined for a parameter without elements.
at::Tensor value_of(CheckpointReader& reader, const Parts& parts, const std::string& kind,
                    const std::string& name) {
  at::Tensor value;
  for (const ManifestParameter* about : parts) {
    const at::Tensor own =
        reader.read_values(kind, {{stored_name(*about), 0, numel(*about)}}).front();
    if (about == parts.front()) value = own;
    const bool same = own.defined() == value.defined() && (!own.defined() || own.equal(value));
    TORCH_CHECK(same, "parameter ", about->name, ": expected one ", name,
                " of the whole parameter, got tensor-parallel parts that differ, which cannot be "
                "put together; export the state of a run without tensor parallelism");
  }
  return value;
}

// The state of one parameter.
void add_state(WholeReader& whole, const Parts& parts, std::vector<TensorToWrite>& tensors) {
  CheckpointReader& reader = whole.reader();
  const ManifestParameter& first = *parts.front();
  const std::string owner = stored_name(first);
  for (const ManifestParameter* about : parts) {
    TORCH_CHECK(reader.kinds(stored_name(*about)) == reader.kinds(owner), "parameter ", first.name,
                ": expected the same state of all tensor-parallel parts, got parts that differ, "
                "which cannot be put together");
  }
  for (const std::string& kind : reader.kinds(owner)) {
    if (kind == "master" || kind == kEmaKind) continue;
    const std::string name = kind.substr(kind.find(':') + 1);  // npos + 1 is 0
    TensorToWrite tensor{plain_state_key(first.name, name), at::kFloat, {}, nullptr};
    if (is_value(kind)) {
      const at::Tensor value = value_of(reader, parts, kind, name);
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
      tensor.read = [&whole, parts, kind] { return whole.read(parts, kind); };
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
  WholeReader whole(reader);
  ModelTensors tensors(whole, options);
  tensors.add(manifest.parameters, options.ema() ? kEmaKind : "master");
  tensors.add(manifest.frozen, "frozen");
  tensors.add(manifest.buffers, "buffer");
  return write_safetensors_files(path, tensors.result, {{"format", "pt"}},
                                 options.max_file_bytes());
}

std::string export_optimizer_state(const std::string& folder, const std::string& path,
                                   int64_t max_file_bytes) {
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  std::vector<TensorToWrite> tensors;
  WholeReader whole(reader);
  for (const Parts& parts : whole_tensors(manifest.parameters)) add_state(whole, parts, tensors);
  return write_safetensors_files(path, tensors,
                                 {{"format", "pt"},
                                  {kPlainOptimizer, plain_class_name(manifest.optimizer)},
                                  {kPlainGroups, plain_groups_text(manifest)}},
                                 max_file_bytes);
}

}  // namespace zero
