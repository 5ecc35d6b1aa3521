// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Weights from outside: fills a model from safetensors files, of whatever framework.
//
//   Net model;
//   zero::load_weights(*model, "pretrained/model.safetensors",
//                      zero::WeightOptions().name_in_files([](const std::string& name) {
//                        return "transformer." + name;
//                      }));
//   zero::ZeroOptimizer optimizer(*model, ...);
//
// Nothing here is collective. Call it on all ranks before a ZeroOptimizer is made: each reads what
// its own model has, also where ranks hold different parameters (experts, pipeline stages), and an
// error is one on every rank. Where all ranks hold the same, rank 0 alone may call it, since the
// constructor sends its values. After the constructor, refresh_master_parameters() on all ranks
// has to follow.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace zero {

// Which tensors load_weights() takes, and what may be missing.
struct WeightOptions {
  // Returns the name in the files of a tensor of the model; null: the same name. Several tensors
  // may come from one of the files. An empty name leaves a tensor as it is.
  TORCH_ARG(std::function<std::string(const std::string& name)>, name_in_files) = nullptr;

  // True leaves tensors of the model as they are that the files lack. False throws.
  TORCH_ARG(bool, allow_missing) = false;

  // True skips tensors of the files that the model did not ask for, such as those of other pipeline
  // stages or causal masks. False throws. Of a skipped tensor neither dtype nor bytes are looked
  // at.
  TORCH_ARG(bool, allow_unexpected) = false;
};

// What load_weights() has found.
struct WeightReport {
  std::vector<std::string> missing;     // tensors of the model that the files lack
  std::vector<std::string> unexpected;  // tensors of the files that the model did not ask for
  // Names of the model for a tensor that it has under an earlier name, too, and which was loaded
  // by that name: the files may lack these names.
  std::vector<std::string> tied;
  uint64_t bytes_read = 0;  // headers included
};

// Copies tensors of safetensors files into the parameters and buffers of `module` with the same
// names. `path` is one file, or an index (*.json, as Hugging Face's model.safetensors.index.json)
// of files in its folder, of which those are opened that have a tensor of the model. Shapes must be
// equal. Values (F64, F32, F16, BF16, I64, I32, I16, BOOL) are converted to the model's dtype as
// copy_() does; I8 and U8 must be its dtype, since quantized weights mean nothing without their
// scales. A complex tensor of shape s takes a real one of shape [s..., 2], as export_model() writes
// it. Needs memory on the host for one tensor of the files, and for two where the files have
// two names of a tied one.
//
// Throws c10::Error, and has changed nothing, for names that are missing or unexpected unless
// `options` allow them, other shapes and dtypes, different values in the files for the names of one
// tied tensor, and files that are not what the format says: places that overlap, overflow or leave
// the file, a name given twice, an index that leaves its folder. The first ten differences are
// listed. A disk that fails after these checks leaves a part of the model loaded.
WeightReport load_weights(torch::nn::Module& module, const std::string& path,
                          const WeightOptions& options = {});

// The same for tensors by name (zero::NamedTensors), which may be views of parameters. GPT-2's
// Conv1D stores what a Linear needs transposed, and files with separate queries, keys and values
// fill the rows of a fused matrix:
//
//   zero::NamedTensors tensors;
//   tensors.insert("h.0.attn.c_attn.weight", model->attention->weight.t());
//   tensors.insert("h.1.attn.q_proj.weight", model->fused->weight.narrow(0, 0, width));
//
// A square matrix does not show by its shape that it is transposed.
WeightReport load_weights(const torch::OrderedDict<std::string, at::Tensor>& tensors,
                          const std::string& path, const WeightOptions& options = {});

}  // namespace zero
