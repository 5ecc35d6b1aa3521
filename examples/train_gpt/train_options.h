// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What train_gpt can be asked for on its command line.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"

namespace zero::examples {

// The exit status for a command line that cannot be used.
inline constexpr int kUsageError = 2;

// The defaults train for about three minutes on two cores.
struct TrainOptions {
  // Text and model.
  std::vector<std::string> data;  // files and folders; empty: libtorch's own headers
  int64_t context = 128;          // bytes a sequence
  int64_t layers = 4;
  int64_t width = 128;
  int64_t heads = 4;
  double dropout = 0.0;        // part of the units that training drops
  std::string init;            // safetensors file of the initial model; empty: drawn from `seed`
  std::string device = "cpu";  // or "cuda"
  std::string dtype_name = "float32";
  c10::ScalarType dtype = c10::kFloat;  // what dtype_name says

  // Optimisation.
  int64_t steps = 1000;
  // Sequences a step over all ranks and micro-batches; 0: see saved_batch() and choose_batch().
  int64_t batch = 0;
  int64_t accumulate = 1;
  bool same_bits = false;           // on any number of ranks up to micro_batches
  int64_t micro_batches = 0;        // over all ranks, with same_bits; 0: see choose_batch()
  std::string optimizer = "adamw";  // or "muon", "lion", "lamb", "adafactor"
  double learning_rate = 0;         // 0: the optimizer's own, see parse_train_options()
  double muon_lr = 0.02;            // of the blocks' matrices, with "muon"
  double warmup = 0.2;  // part of the steps; a short one is unstable at this learning rate
  double weight_decay = 0.1;
  double max_norm = 1.0;
  std::string moments_name = "float32";
  Moments moments = Moments::kFloat32;  // what moments_name says
  bool split_masters = false;
  std::string gradient_shards = "float32";
  c10::ScalarType gradient_shard_dtype = c10::ScalarType::Float;  // its value
  bool update_in_backward = false;
  double ema = 0.0;  // decay of the average of the parameters; 0: none
  uint64_t seed = 1;

  // Ranks.
  int nproc = 2;
  int threads = 1;  // of every rank
  int64_t stage = 2;
  std::string transport = "nccl";     // between GPUs; or "gloo"
  std::string gather_wire = "whole";  // between machines; or "changes"

  // Checkpoints.
  std::string checkpoints;  // folder of them; empty: none
  int64_t save_every = 200;
  int64_t keep = 2;
  bool resume = false;
  bool own_disks = false;  // each machine saves to its own

  bool elastic = false;
  int replacements = 0;
  int64_t protect_every = 5;

  // Reports.
  std::string log;      // JSONL file; empty: none
  std::string metrics;  // folder for the same, one file a start; empty: none
  std::string trace;    // Chrome trace of rank 0; empty: none
  int64_t trace_steps = 3;
  std::string report;  // HTML page of rank 0; empty: none
  int64_t validate_every = 50;
  int64_t validation_sequences = 64;
  std::string prompt = "#include <";
  int64_t sample_bytes = 400;
  double temperature = 0.8;

  std::string listing;  // of all options, a line of name=value each
};

// Fills `options` from the command line. Returns the exit status when the
// program should end now: after --help, or after one line about what is wrong.
std::optional<int> parse_train_options(int argc, char** argv, TrainOptions& options);

// The batch that was asked for, or else with `resume` that of the newest checkpoint that this
// process sees: a run goes on with its batch, also on other ranks. 0 without either.
int64_t saved_batch(const TrainOptions& options);

// If there is no batch, chooses 16, or the next multiple of ranks times micro-batches. With
// same_bits both numbers are of `options` alone: 12 micro-batches, or the largest divisor of a
// given batch that is at most 12, and 16 sequences or the next multiple of the micro-batches.
void choose_batch(TrainOptions& options, int world_size);

// Why the global batch cannot be cut evenly into `world_size` ranks times
// `accumulate` micro-batches, or with same_bits into micro-batches for so many ranks; empty when it
// can, and with --elastic alone, which cuts any batch.
std::string batch_problem(const TrainOptions& options, int world_size);

}  // namespace zero::examples
