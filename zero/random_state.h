// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state of random number generators, to be saved with a checkpoint: dropout goes on with the
// numbers that it would have drawn.
//
//   RandomState random(group.device());
//   optimizer.save_checkpoint(folder, SaveOptions().include_per_rank("random", random));
//   optimizer.load_checkpoint(folder, LoadOptions().include_per_rank("random", random));
//
// Ranks should draw different numbers: torch::manual_seed(seed + group.rank()).
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "zero/checkpoint_options.h"

namespace zero {

// The state of random number generators, saved with a checkpoint.
class RandomState final : public Stateful {
 public:
  // torch's default generator of the CPU and, where `device` is a GPU, that of the GPU.
  explicit RandomState(at::Device device);
  // Generators of your own.
  explicit RandomState(std::vector<at::Generator> generators);

  // About 5 kB for a generator of the CPU.
  std::string state() const override;
  // Throws c10::Error for the state of other kinds of generators.
  void set_state(const std::string& state) override;

 private:
  std::vector<at::Generator> generators_;
};

}  // namespace zero
