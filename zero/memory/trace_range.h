// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Names a stretch of work for profilers: torch's own, and those that hook into it (NVTX). Costs a
// few nanoseconds while no profiler runs. Reductions are on a worker thread: a profiler sees them
// when it records all threads, as train_gpt --trace does.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace zero {

class TraceRange {
 public:
  // Recorded as "zero::<phase>", or "zero::<phase> bucket <bucket>".
  explicit TraceRange(const char* phase, int64_t bucket = -1)
      : range_(at::RecordScope::USER_SCOPE) {
    if (!range_.isActive()) return;
    std::string name = std::string("zero::") + phase;
    if (bucket >= 0) name += " bucket " + std::to_string(bucket);
    range_.before(name);
  }

 private:
  at::RecordFunction range_;
};

}  // namespace zero
