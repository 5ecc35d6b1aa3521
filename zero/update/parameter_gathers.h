// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The gathers of working parameters that are under way, one per bucket. With overlap_gather they
// outlive the step that started them; a call that reads parameters finishes them first.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/agreement/communicators.h"
#include "zero/comm/row_communicator.h"
#include "zero/memory/parameter_table.h"
#include "zero/memory/rows.h"
#include "zero/memory/working_arena.h"
#include "zero/options.h"

namespace torch::nn {
class Module;
}

namespace zero {

class ParameterGathers {
 public:
  // References must outlive this.
  ParameterGathers(const Plan& plan, ParameterTable& table, WorkingArena& arena,
                   OptimizerCommunicators& comms, const ZeroOptions& options);

  // A new update begins: forgets which gathers may be late, and who has waited for them.
  void begin();
  // Keeps what the own row of `bucket` holds, before it changes, if its gather can send changes.
  // All ranks had the same row.
  void keep(int64_t bucket);
  // Collective. Starts the gather of `rows`, of which this rank's own is complete. Waits for an
  // earlier one where many are under way.
  void start(int64_t bucket, const Rows& rows);
  // Lets the gathers that are still under way change the version of parameters with used[p] != 0
  // when they end. A graph that was made meanwhile from a part of the new values then notices, as
  // with any in-place update.
  void change_versions_at_end(const std::vector<uint8_t>& used) { changed_ = used; }
  // Returns whether they may outlive a step.
  bool overlap() const { return options_.overlap_gather(); }
  // Returns whether a parameter that a step has changed may not have its new values yet: nothing
  // has waited for it.
  bool is_under_way(int64_t parameter) const;
  // The problem of a parameter that was changed from outside while it could get rows of the last
  // step, or nothing. Its rows were left out where they are copied. Forgets it.
  std::string take_problem() { return std::exchange(problem_, {}); }
  // These wait for gathers of this rank and make their rows visible, on a device to the current
  // stream. Not collective.
  void finish();
  void finish_those_of(const torch::nn::Module& module);
  // Of one managed parameter; throws c10::Error for another tensor.
  void finish_that_of(const at::Tensor& parameter);

 private:
  // The first stream that waited for a bucket, and when it had its parameters. A forward pass on
  // stream 1 waits for the gather of a bucket, whose rows are copied to the parameters there; one
  // on stream 2 finds no gather any more, and has to wait until stream 1 is `done` with that.
  struct Waited {
    c10::Stream by;
    c10::Event done;
  };

  void wait(int64_t bucket);
  // Makes the gathered rows of a bucket visible.
  void publish(int64_t bucket, const Rows& rows);
  bool sends_changes(int64_t bucket);
  // Returns whether parameters of the bucket may get rows after the step. One rank alone has all
  // rows; they are in the parameters already, or published at the end.
  bool may_be_late(int64_t bucket) const;
  Communicator& ranks_of(int64_t bucket) { return *comms_.domains[plan_.domain_of(bucket)].data; }

  const Plan& plan_;
  ParameterTable& table_;
  WorkingArena& arena_;
  OptimizerCommunicators& comms_;
  const ZeroOptions& options_;
  std::vector<at::Tensor> before_;             // per bucket; undefined: sent whole
  std::vector<Pending> gathers_;               // per bucket; valid: not published yet
  std::vector<std::optional<Waited>> waited_;  // per bucket; with streams, of the last step
  std::deque<int64_t> under_way_;              // in the order in which they began
  size_t most_;                                // under way at a time
  std::vector<uint8_t> changed_;               // per parameter, or empty
  std::string problem_;
};

}  // namespace zero
