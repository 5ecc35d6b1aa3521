// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Real text as training data: the bytes of files and folders, split into a
// training and a held-out part, and cut into sequences on demand.
//
//   ByteDataset data({.paths = {"docs", "notes.txt"}, .context = 128, .seed = 1});
//   Sequences batch = data.training_sequences(step, first, count);
//
// Which text a training sequence holds depends only on (seed, step, index in
// the global batch). Ranks can therefore draw their own share of a batch
// without asking each other, any number of them sees the same global batch,
// and a resumed run needs no position in the data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zero::examples {

// Next-byte prediction: targets[i][t] is the byte that follows inputs[i][t].
struct Sequences {
  at::Tensor inputs;   // [count, context], int64
  at::Tensor targets;  // [count, context], int64
};

struct ByteDatasetOptions {
  std::vector<std::string> paths;  // files as they are; of folders, the text files in them
  int64_t context = 128;           // bytes a sequence
  uint64_t seed = 0;               // of the order of training sequences
};

class ByteDataset {
 public:
  // Reads everything into memory. Throws c10::Error for a path that cannot be
  // read and for less text than one sequence in either part.
  explicit ByteDataset(const ByteDatasetOptions& options);

  // Sequences `first` to `first + count - 1` of the global batch of step `step`.
  Sequences training_sequences(int64_t step, int64_t first, int64_t count) const;

  // Sequences `first` to `first + count - 1` of `total` that lie evenly spread
  // over the held-out text: the same ones whenever it is called.
  Sequences validation_sequences(int64_t total, int64_t first, int64_t count) const;

  int64_t files() const { return files_; }
  int64_t training_bytes() const { return static_cast<int64_t>(training_.size()); }
  int64_t validation_bytes() const { return static_cast<int64_t>(validation_.size()); }

 private:
  void read_files();

  ByteDatasetOptions options_;
  int64_t files_ = 0;
  std::string training_;
  std::string validation_;
};

}  // namespace zero::examples
