// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A training run that tests can stop, save, load and look into: everything a
// checkpoint must bring back, gathered to full tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {

// Full tensors in logical order, by "kind/name": "working/", "master/", the kinds
// of state, "frozen/", "buffer/"; and "step/", "option/", "scaler/", "steps/" as numbers.
using Snapshot = std::map<std::string, at::Tensor>;

class CheckpointRun {
 public:
  // `seed` of the model: of every rank, so that nothing is right by chance.
  CheckpointRun(const Training& training, const Group& group, uint64_t seed);
  // Steps [first, last); gradients depend on (rank, step) only, the rank in optimizer->group().
  void train(int first, int last);
  // Collective.
  Snapshot snapshot();

  OddModel model;
  std::unique_ptr<ZeroOptimizer> optimizer;

 private:
  const Training training_;
};

// As a safetensors file; equal snapshots are equal files.
void write_snapshot(const Snapshot& snapshot, const std::string& path);

// How many values differ in any bit; entries that only one has count once.
int64_t differing(const Snapshot& a, const Snapshot& b);

// A new, empty folder of this test.
std::string fresh_folder(const std::string& name);

}  // namespace zero
