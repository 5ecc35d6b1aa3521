// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What save_checkpoint() and load_checkpoint() can be asked for, and what a load
// says it found.
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zero {

struct SaveOptions {
  // Replace a checkpoint that is there, atomically. False refuses.
  TORCH_ARG(bool, overwrite) = false;

  // The user's own text, given back by load_checkpoint(): epoch, data position,
  // random states. UTF-8; rank 0's counts.
  using Metadata = std::map<std::string, std::string>;
  TORCH_ARG(Metadata, metadata);
};

struct LoadOptions {
  // False loads the parameters whose name, shape and memory order match and
  // leaves the others as they are; LoadReport says which. State is loaded where
  // the optimizer's class matches.
  TORCH_ARG(bool, strict) = true;

  // Set param_groups()' options to the saved ones, learning rate included, as
  // torch does in Python. False keeps the present ones.
  TORCH_ARG(bool, restore_options) = true;
};

struct LoadReport {
  std::map<std::string, std::string> metadata;  // as given to save_checkpoint()
  int64_t world_size = 0;                       // that saved it
  std::vector<std::string> differences;         // empty after a strict load
  uint64_t bytes_read = 0;  // by this rank, its part of verifying files included
};

}  // namespace zero
