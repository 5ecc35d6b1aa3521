// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A training run as one HTML page that needs no other file, no script and no network: curves,
// memory beside that of a process alone, who owns what, a time line of one step if there is a
// trace, samples, options and versions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "examples/train_gpt/step_metrics.h"

namespace zero::examples {

struct NamedSize {
  std::string name;
  int64_t numel = 0;
};

struct RunReport {
  std::string heading;
  std::vector<std::pair<std::string, std::string>> facts;  // such as the versions
  std::string options;                                     // lines of name=value
  std::vector<StepMetrics> steps;                          // of this start, the first one included
  std::vector<std::pair<int64_t, std::string>> samples;    // after how many steps, and the text
  std::vector<NamedSize> parameters;                       // in the order of the plan
  Plan plan;                                               // of one domain
  MemoryOptions memory_options;
  MemoryReport memory;     // of this rank
  MemoryReport unsharded;  // of a process alone
  std::string trace;       // a file of StepTrace; empty: none
};

// Writes `report` to `path`. Throws c10::Error when that fails.
void write_report(const RunReport& report, const std::string& path);

}  // namespace zero::examples
