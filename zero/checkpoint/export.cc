// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/checkpoint.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/format/safetensors_files.h"
#include "zero/checkpoint/match/part_views.h"

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

// All elements of a tensor with one value per element, in the parameter's shape.
at::Tensor read_elements(CheckpointReader& reader, const ManifestParameter& about,
                         const std::string& kind) {
  const WantedRange all{stored_name(about), 0, numel(about)};
  const c10::ScalarType dtype = all.numel == 0 ? at::kFloat : reader.dtype(kind, all);
  at::Tensor flat;
  if (dtype == at::kFloat) {
    flat = reader.read_all(about, kind);
  } else {
    flat = at::empty({all.numel}, at::TensorOptions().dtype(dtype));
    reader.read(kind, {all}, {flat});
  }
  return flat.as_strided(about.shape, about.strides);
}

at::Tensor read_part(CheckpointReader& reader, const ManifestParameter& about,
                     const std::string& kind) {
  const bool whole = kind == "frozen" || kind == "buffer";
  return whole ? reader.read_whole(about, kind) : read_elements(reader, about, kind);
}

at::Tensor read(CheckpointReader& reader, const Parts& parts, const std::string& kind) {
  const ManifestParameter& first = *parts.front();
  if (!is_part(first)) return read_part(reader, first, kind);
  at::Tensor whole;
  int64_t elements = 0;
  for (const ManifestParameter* about : parts) {
    const at::Tensor part = read_part(reader, *about, kind);
    if (!whole.defined()) whole = at::empty(first.whole, part.options());
    TORCH_CHECK(about->whole == first.whole && part.scalar_type() == whole.scalar_type(),
                "parameter ", first.name, ": expected parts of one tensor, got others");
    for (const auto& [from, to] : part_views(*about, part, whole)) to.copy_(from);
    elements += part.numel();
  }
  TORCH_CHECK(elements == whole.numel(), "parameter ", first.name, ": expected parts of ",
              whole.numel(), " elements together, got ", elements);
  return whole;
}

// The tensors of a model for one call of export_model().
class ModelTensors {
 public:
  ModelTensors(CheckpointReader& reader, const ExportOptions& options)
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
        const at::Tensor whole = zero::read(reader, parts, kind).to(dtype);
        return whole.is_complex() ? at::view_as_real(whole) : whole;
      };
      result.push_back(std::move(tensor));
    }
  }

  std::vector<TensorToWrite> result;

 private:
  CheckpointReader& reader_;
  const ExportOptions& options_;
};

}  // namespace

std::string export_model(const std::string& folder, const std::string& path,
                         const ExportOptions& options) {
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  TORCH_CHECK(!options.ema() || has_ema(manifest), folder,
              ": expected averages of the parameters, got a checkpoint without; make the optimizer "
              "with ZeroOptions::ema before it is saved");
  ModelTensors tensors(reader, options);
  tensors.add(manifest.parameters, options.ema() ? kEmaKind : "master");
  tensors.add(manifest.frozen, "frozen");
  tensors.add(manifest.buffers, "buffer");
  return write_safetensors_files(path, tensors.result, {{"format", "pt"}},
                                 options.max_file_bytes());
}

}  // namespace zero
