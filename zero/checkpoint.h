// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints as folders: finding, thinning out, describing, checking and exporting them.
// Saving and loading are methods of ZeroOptimizer.
//
//   optimizer.save_checkpoint("run/step-100", SaveOptions().metadata({{"epoch", "3"}}));
//   if (group.rank() == 0) zero::keep_last("run", 2);
//   ...
//   if (auto newest = zero::latest("run")) optimizer.load_checkpoint(*newest);
//
// A checkpoint holds, with an XXH3 for each 32 KiB of a tensor:
//   rank-00000.safetensors ...       pieces "<name>[<begin>:<end>].<kind>" of parameters in their
//                                    memory order; kind: master, exp_avg, step and so on;
//                                    ".<name>": the state of an object that the save includes
//                                    "<name>{<dimension>:<from>:<to>}" stands for <name> in a
//                                    tensor-parallel part, see ZeroOptions::tensor_parts()
//   frozen.safetensors, buffers.safetensors
//                                    by name, from rank 0; on meshes others have such files too
//   manifest.json                    the rest; written last. describe_checkpoint() reads it
//
// A save that dies leaves at most a hidden folder ".<name>.<random>.saving", which is
// never taken for a checkpoint and which the next save into the same folder removes. Nothing here
// is collective: call it on one rank, or, to read, on any number. Everything throws c10::Error with
// the path and errno.
//
// After a save with SaveOptions::shared_folder(false) each disk has a folder with the files of its
// ranks and a manifest, which names the files of all disks. What finds, lists and removes
// checkpoints works on the folders of one disk, and what reads all of the model needs the files of
// all disks in one folder. ZeroOptimizer::latest_checkpoint() finds what all ranks can load.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace zero {

// The checkpoint in the folder `parent` that was saved last, of whatever run. None if there is
// none, or no such folder. Checkpoints that do not say when they were saved, because an earlier
// version of this library wrote them, are older than all others; of them, the one with the most
// steps, skipped ones included, and then the last by name. A folder without a valid manifest does
// not count, with a warning if it has a damaged one, nor does a checkpoint that lacks one of its
// files or has one of another size; verify_checkpoint() looks into the files. Throws where a
// manifest or the size of a file cannot be read, and for a manifest of a later version of this
// library: it may be the newest. Links to checkpoints do not count either: they may be given to
// load_checkpoint(), but are neither found nor removed.
std::optional<std::string> latest(const std::string& parent);

// Removes all checkpoints in `parent` but the `count` that were saved last, of whatever run, and
// what dead saves left there. Checkpoints that latest() passes over do not count, and are removed
// only once `count` others are newer. Returns the paths removed: what cannot be renamed is a
// warning and stays, and what cannot be removed then, such as files of another user, is a warning
// and stays under a hidden name, which later calls try again. Hidden folders are removed only if
// their names are of this library. A save by this process that is under way is left alone; so is
// one of another process, where the file system has locks. Throws for a count below 1.
//
// If each machine has a disk of its own, call it on every rank, or on one of each machine, right
// after a save has returned: several calls for one folder may overlap. A checkpoint that a crash
// left on some disks only counts on those, so keep 2 at least.
std::vector<std::string> keep_last(const std::string& parent, int64_t count);

// A parameter, a frozen parameter or a buffer of the model.
struct CheckpointTensor {
  std::string name;
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t group = 0;  // the parameter group; 0 for frozen parameters and buffers
  int64_t parts = 1;  // of tensor parallelism, in which it is stored; `shape` is that of the whole
  // How the run kept its moments, "bfloat16" or "int8", and its master, "split", see
  // ZeroOptions::moments and split_masters; empty: in fp32, as the checkpoint has all masters.
  std::string moments;
  std::string master;
};

// A file of a checkpoint, as the manifest names it.
struct CheckpointFile {
  std::string name;  // in the folder
  uint64_t bytes = 0;
  // XXH3, 64 bits, of its header and the hashes of its blocks, which are in the file. Of all of it
  // where format version 4 or an earlier one wrote it.
  uint64_t xxh3 = 0;
  int64_t tensors = 0;
  int64_t disk = 0;  // it was written to; see CheckpointFacts::disk
};

// The state of an object that the save included.
struct CheckpointState {
  std::string name;
  int64_t bytes = 0;  // of all ranks together
  // How many ranks have a state of their own; 0 where one state is that of all ranks.
  int64_t ranks = 0;
};

// Facts about a checkpoint, and how it was saved.
struct CheckpointFacts {
  int64_t version = 0;          // of the format
  std::string library_version;  // of zero, which wrote it
  std::string torch_version;
  std::string id;  // random; another one for each save
  // The run's random id, and when it was saved: microseconds since 1970, more for each later save
  // of the run. Empty and 0 where an earlier version of this library wrote the checkpoint.
  std::string run;
  int64_t saved = 0;
  std::map<std::string, std::string> metadata;  // as given to save_checkpoint()

  int64_t world_size = 0;  // that saved it
  int64_t stage = 0;
  std::string layout;  // "contiguous", "per parameter", "whole parameters", or some joined by " + "
  int64_t bucket_bytes = 0;

  int64_t steps = 0;  // without the skipped ones
  int64_t skipped_steps = 0;

  std::string optimizer;  // its class, "AdamW"
  // The options of each parameter group, by name.
  std::vector<std::vector<std::pair<std::string, double>>> groups;

  // The disk whose part of the checkpoint is in this folder, from 0 on: other folders have the
  // files of other disks. 0 for all files of a save with a shared folder.
  int64_t disk = 0;
};

// The contents of a checkpoint, by its manifest alone.
struct CheckpointDescription : CheckpointFacts {
  double loss_scale = 1.0;
  bool dynamic_loss_scale = false;
  bool ema = false;  // whether parameters have averages: ZeroOptions::ema
  std::vector<CheckpointTensor> parameters;
  std::vector<CheckpointTensor> frozen;
  std::vector<CheckpointTensor> buffers;
  std::vector<CheckpointState> states;  // by name
  std::vector<CheckpointFile> files;
};

// Says what the checkpoint in `folder` holds. Reads and checks the manifest alone: other files may
// be damaged or missing, see verify_checkpoint(). Throws when `folder` holds no checkpoint.
CheckpointDescription describe_checkpoint(const std::string& folder);

// Reads every byte. Throws when one is not as it was saved. For a checkpoint on several disks the
// folder must have the files of all of them: copied into one folder, whose manifest.json may be
// that of any disk, they are a complete checkpoint. With `one_disk` only the files of this folder's
// disk are read.
void verify_checkpoint(const std::string& folder, bool one_disk = false);

// Options of export_model().
struct ExportOptions {
  // The dtype of parameters, frozen ones with fractions included: a floating point one that
  // safetensors files of this library can have. Default: each one's own.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype) = std::nullopt;

  // True writes the averages of parameters (ZeroOptions::ema) in place of the masters.
  TORCH_ARG(bool, ema) = false;

  // The most bytes of tensors in a file, headers not counted; 0 for one file without a limit. A
  // larger tensor has a file of its own. Hugging Face's default is 5'000'000'000.
  TORCH_ARG(int64_t, max_file_bytes) = 0;

  // True leaves out frozen parameters and buffers of a dtype that safetensors files of this
  // library cannot have (8-bit floats, unsigned integers of 16 to 64 bits). False throws.
  TORCH_ARG(bool, skip_unsupported) = false;
};

// Writes the full masters, frozen parameters and buffers by name, row-major, for inference, Python
// and load_weights(). Tensors are in one safetensors file, `path`; or, where they have more than
// max_file_bytes together, in "model-00001-of-00003.safetensors" and so on beside
// "model.safetensors.index.json", for the path "model.safetensors", as Hugging Face names them.
// Returns the path for load_weights(): `path`, or that of the index. Parameters under several names
// (tied) appear once, under the first. A complex tensor of shape s has shape [s..., 2], as
// at::view_as_real() has it, since few readers know complex dtypes; load_weights() puts it back.
//
// Needs memory for the largest parameter twice. Files appear under their names when all are on
// disk, the index last; a call that is killed leaves hidden files ".<name>.<random>.saving", and
// between two renames also files without an index. Throws c10::Error, and leaves nothing, when one
// of the files exists, or `path`, or its index; for a checkpoint without averages with `ema`; for a
// dtype that a file cannot have, without `skip_unsupported`, and always for such a `dtype`; for a
// negative limit, a path that ends in ".json", an index above 100 MB and names in it that are not
// UTF-8; and when the folder lacks files of other disks, as verify_checkpoint().
std::string export_model(const std::string& folder, const std::string& path,
                         const ExportOptions& options = {});

// Writes the state of the inner optimizer under the names of plain torch, for a Python optimizer to
// go on with (docs/checkpoints.md has the function that loads it) and for
// ZeroOptimizer::load_plain_state(path). A tensor is called "state.<parameter>.<name of torch>",
// such as "state.h.0.weight.exp_avg", and has the parameter's shape, row-major; counts and numbers
// ("step", fp32 up to 2^24, else double) are 0-dim, and Adafactor's row_var and col_var have their
// own shapes. A parameter that was never updated has none. The __metadata__ of each file has
// "optimizer", the class without "zero::", and "param_groups", a JSON list of the groups: options
// by the names of Python and "params", the names of their parameters.
//
// Files, the limit `max_file_bytes`, errors and what is returned are those of export_model(). Needs
// memory for the largest state tensor twice, and for all counts and numbers. Throws c10::Error also
// for state of tensor-parallel parts that cannot be put together: Adafactor's row_var and col_var,
// and counts or numbers that differ. State of your own classes has the names of its serialize(),
// of which one with a dot, as members of a pair or a list get, is a c10::Error; options that torch
// lacks keep the names that describe_checkpoint() lists.
std::string export_optimizer_state(const std::string& folder, const std::string& path,
                                   int64_t max_file_bytes = 0);

// ---- Weights from outside ----
//
// load_weights() fills a model from safetensors files, of whatever framework:
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
// error is one on every rank. If all ranks hold the same model, rank 0 alone may call it, since the
// constructor sends its values. After the constructor, refresh_master_parameters() on all ranks has
// to follow.

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

// The result of load_weights().
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
