// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints as folders: finding, thinning out, checking and exporting them.
// Saving and loading are methods of ZeroOptimizer.
//
//   optimizer.save_checkpoint("run/step-100", SaveOptions().metadata({{"epoch", "3"}}));
//   if (group.rank() == 0) zero::keep_last("run", 2);
//   ...
//   if (auto newest = zero::latest("run")) optimizer.load_checkpoint(*newest);
//
// A checkpoint holds, each file with its size and XXH3 in the manifest, and each
// tensor with its XXH3:
//   rank-00000.safetensors ...       pieces "<name>[<begin>:<end>].<kind>" of parameters in their
//                                    memory order; kind: master, exp_avg, step and so on;
//                                    ".<name>": the state of an object that the save includes
//   frozen-and-buffers.safetensors   by name, from rank 0
//   manifest.json                    the rest; written last. See zero/checkpoint/manifest.h
//
// A save that dies leaves at most a hidden folder ".<name>.<random>.saving", which is
// never taken for a checkpoint and which the next save to <name> removes. On a file
// system that cannot exchange folders (NFS) it may also leave the previous checkpoint
// under the name ".<name>.replaced". Every function here and every load gives that its
// name back, where <name> is missing. Nothing here is collective: call it on one rank, or, to
// read, on any number. Everything throws c10::Error with the path and errno.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace zero {

// The checkpoint in the folder `parent` that was saved last, of whatever run. None if
// there is none, or no such folder. Checkpoints that do not say when they were
// saved, because an earlier version of this library wrote them, are older than all
// others; of them, the one with the most steps, skipped ones included, and then the last
// by name. What has no valid manifest does not count; other files are not looked at.
// Links to checkpoints do not count either: they may be given to load_checkpoint(), but are
// neither found nor removed.
std::optional<std::string> latest(const std::string& parent);

// Removes all checkpoints in `parent` but the `count` that were saved last, of whatever
// run, and what dead saves left there. Returns the paths removed. A save by this process
// that is under way is left alone; so is one of another process, where the file system has
// locks. Throws for a count below 1.
std::vector<std::string> keep_last(const std::string& parent, int64_t count);

// Reads every byte. Throws when one is not as it was saved.
void verify_checkpoint(const std::string& folder);

// Writes one safetensors file with the full masters, frozen parameters and buffers
// by name, row-major, for inference and for Python. `dtype` is that of the
// parameters; default: each one's own. Parameters under several names (tied)
// appear once, under the first. Needs memory for the largest parameter twice.
// Throws when `path` exists.
void export_model(const std::string& folder, const std::string& path,
                  std::optional<c10::ScalarType> dtype = std::nullopt);

// Copies the tensors of a safetensors file into the parameters and buffers of
// `module` with the same name, converting dtypes. Changes nothing and throws when
// names or shapes differ; with strict false returns those differences and
// copies the rest. Before a ZeroOptimizer is made, or followed by
// refresh_master_parameters() on all ranks.
std::vector<std::string> import_model(const std::string& path, torch::nn::Module& module,
                                      bool strict = true);

}  // namespace zero
