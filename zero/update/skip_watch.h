// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Counts steps in a row that are skipped for non-finite gradients under a constant loss scale, so
// that training that makes no progress warns and then throws.
#pragma once

#include <cstdint>

namespace zero {

class SkipWatch {
 public:
  // `at_most` skipped steps in a row are accepted; 0: any number.
  SkipWatch(int64_t at_most, int rank) : at_most_(at_most), rank_(rank) {}

  // Goes on from the counts of a checkpoint, of which nothing is said.
  void resume_from(int64_t steps, int64_t skipped_steps) {
    steps_ = steps;
    skipped_steps_ = skipped_steps;
    in_a_row_ = 0;
  }

  // Takes the counts of steps so far; not every step need be seen. Warns once, on rank 0, at the
  // first skipped step, and throws c10::Error when more than `at_most` in a row were skipped; the
  // row then starts again.
  void record(int64_t steps, int64_t skipped_steps);

 private:
  const int64_t at_most_;
  const int rank_;
  bool warned_ = false;
  int64_t steps_ = 0;
  int64_t skipped_steps_ = 0;
  int64_t in_a_row_ = 0;
};

}  // namespace zero
