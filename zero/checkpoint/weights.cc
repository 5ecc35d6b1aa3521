// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {
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
  std::sort(found.copies.begin(), found.copies.end(), [](const Copy& a, const Copy& b) {
    return std::tie(a.from.file, a.from.tensor->begin) <
           std::tie(b.from.file, b.from.tensor->begin);
  });
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
