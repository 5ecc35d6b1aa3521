// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/memory_table.h"

#include <iomanip>
#include <sstream>

#include "bookkeeping/plan.h"

namespace zero::examples {

namespace {

void add_row(std::ostringstream& table, const std::string& kind, int64_t sharded,
             int64_t unsharded) {
  constexpr double kMegabyte = 1e6;
  table << "  " << std::left << std::setw(20) << kind << std::right << std::setw(12)
        << static_cast<double>(sharded) / kMegabyte << std::setw(12)
        << static_cast<double>(unsharded) / kMegabyte << "\n";
}

}  // namespace

MemoryReport unsharded_memory(int64_t parameters, c10::ScalarType dtype, int64_t all_states,
                              bool ema) {
  MemoryReport memory;
  memory.working_parameters = parameters * static_cast<int64_t>(c10::elementSize(dtype));
  memory.master_parameters = dtype == c10::kFloat ? 0 : 4 * parameters;
  memory.ema = ema ? 4 * parameters : 0;
  memory.optimizer_state = all_states;
  memory.full_gradients = memory.working_parameters;
  return memory;
}

std::string memory_table(const MemoryReport& sharded, int64_t parameters, c10::ScalarType dtype,
                         int64_t all_states) {
  const MemoryReport alone = unsharded_memory(parameters, dtype, all_states, sharded.ema > 0);
  std::ostringstream table;
  table << std::fixed << std::setprecision(2);
  table << "  MB                     this rank   unsharded\n";
  add_row(table, "parameters", sharded.working_parameters, alone.working_parameters);
  add_row(table, "master parameters", sharded.master_parameters, alone.master_parameters);
  if (sharded.ema > 0) add_row(table, "average", sharded.ema, alone.ema);
  add_row(table, "optimizer state", sharded.optimizer_state, alone.optimizer_state);
  add_row(table, "gradients", sharded.gradient_shards + sharded.full_gradients,
          alone.full_gradients);
  add_row(table, "buckets", sharded.buckets, 0);
  add_row(table, "total", sharded.total(), alone.total());
  return table.str();
}

std::string billion_line(int64_t world_size, const MemoryOptions& options) {
  constexpr int64_t kParameters = 1'000'000'000;
  constexpr double kGigabyte = 1e9;
  const Plan plan = make_plan({{kParameters, c10::kBFloat16}}, {world_size}, {});
  const MemoryReport sharded = expected_memory(plan, 0, options);
  std::ostringstream line;
  // Alone: parameters and gradients in bf16, masters and two moments in fp32.
  line << std::fixed << std::setprecision(1) << "  with a billion parameters in bf16: "
       << static_cast<double>(sharded.total()) / kGigabyte << " GB on each of " << world_size
       << " ranks, " << static_cast<double>(16 * kParameters) / kGigabyte << " GB unsharded\n";
  return line.str();
}

}  // namespace zero::examples
