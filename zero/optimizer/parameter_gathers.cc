// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/parameter_gathers.h"

#include <c10/util/Exception.h>

#include <deque>
#include <string>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/base/error_text.h"
#include "zero/memory/trace_range.h"

namespace zero {

ParameterGathers::ParameterGathers(const Plan& plan, const ParameterTable& table,
                                   WorkingArena& arena, OptimizerCommunicators& comms)
    : plan_(plan), table_(table), arena_(arena), comms_(comms), gathers_(plan.buckets.size()) {}

void ParameterGathers::start(const std::function<void(const ShardOptimizer::RowWritten&)>& write) {
  std::deque<int64_t> under_way;
  const size_t most = max_gathers(plan_);
  try {
    write([&](int64_t bucket, const Rows& rows) {
      if (under_way.size() == most) {
        finish_one(under_way.front());
        under_way.pop_front();
      }
      under_way.push_back(bucket);
      Communicator& comm = *comms_.domains[plan_.domain_of(bucket)].data;
      gathers_[bucket] = {rows,
                          comm.gather_rows(rows, "parameter bucket " + std::to_string(bucket))};
    });
  } catch (const std::exception& error) {
    // The others wait for rows that are not sent, and some shards are updated while others are
    // not: there is no way back.
    if (!comms_.failed().empty()) throw;
    const std::string text = "the update of this rank's shard failed: " + error_text(error);
    comms_.abort(text);
    TORCH_CHECK(false, text);
  }
}

void ParameterGathers::finish_one(int64_t bucket) {
  Gather gather = std::exchange(gathers_[bucket], {});
  if (!gather.rows.defined()) return;
  const TraceRange range("gather", bucket);
  gather.pending.wait();
  arena_.publish(bucket, gather.rows);
}

void ParameterGathers::finish() {
  for (size_t b = 0; b < gathers_.size(); ++b) finish_one(static_cast<int64_t>(b));
}

void ParameterGathers::finish_those_of(const torch::nn::Module& module) {
  for (const int64_t parameter : table_.managed_by(module)) {
    for (const int64_t b : plan_.parameter_buckets[parameter]) finish_one(b);
  }
}

}  // namespace zero
