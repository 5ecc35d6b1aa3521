// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Protected steps: each rank keeps a copy of another rank's shard, and the survivors of a failure,
// with processes that join, go on from the newest step of which all shards are left. Internal.
//
//   construction   start(), or join() of a process that joins
//   a step         before_step(), the step with check_step(), after_step()
//   a failure      recover(): leave_group(), make_again(), restore()
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/folder.h"
#include "zero/checkpoint/writer.h"
#include "zero/recovery/protection.h"
#include "zero/recovery/roll_call.h"
#include "zero/training/engine.h"
#include "zero/zero_optimizer.h"

namespace zero {

class Recovery {
 public:
  using ParamGroups = Engine::ParamGroups;

  // Of the optimizer whose present engine is `engine`, and whose checkpoints are of `run`. Both
  // must outlive this.
  Recovery(std::shared_ptr<Engine>& engine, RunIdentity& run) : engine_(engine), run_(run) {}

  // Collective, at construction. Protects the first state, if steps are protected.
  void start(const ParamGroups& groups);
  // Collective over those that recover, in place of Engine::make() and start() on a process that
  // joins them. `groups` have the options of construction, which stay.
  void join(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
            const Group& group, const ZeroOptions& options, const ParamGroups& groups);

  // If the next step is to be protected, waits for the copies of the last one that was, and looks
  // at the module. Returns what ranks must then have alike for recover() to make the optimizer
  // again.
  std::string before_step();
  // To be called within the agreement of a step. Throws where the step is to be protected and the
  // module holds another tensor in the place of one; and CommunicationError if a process waits to
  // join, right after a protected step, so that the fewest are repeated.
  void check_step() const;
  // Begins the copies of a protected step.
  void after_step(const ParamGroups& groups);
  // Collective, after finish(). Protects the present state, and returns when all ranks have it
  // whole. `call` is for errors: if it throws, the communicators are closed. Does nothing if steps
  // are not protected.
  void protect_at_once(const ParamGroups& groups, const std::string& call);
  // Waits for the copies of the last protected step: before an agreement after which another
  // begins. Closes the communicators if they failed.
  void finish();

  // Collective over the ranks that are left. See ZeroOptimizer::recover().
  RecoveryReport recover(const std::string& checkpoints, ParamGroups& groups);

  // For changes of parameters: ends the copies to another rank.
  void stop_protection() { protection_.reset(); }
  // The content of a protected step: this rank's file, and the manifest without files.
  std::pair<FileToSave, Manifest> protected_shard(const ParamGroups& groups) const;
  // Collective. Everything as at the protected step, which is protected here, if steps are. Returns
  // its step() calls. `call` is for errors. If it throws, the communicators are closed.
  int64_t restore(const Snapshots& from, const CompleteSnapshot& step, ParamGroups& groups,
                  const std::string& call);

  int64_t held_bytes() const { return protection_ ? protection_->held_bytes() : 0; }
  Traffic traffic() const { return protection_ ? protection_->traffic() : Traffic(); }

 private:
  struct Lifeline;  // what outlives a group

  // Collective, if steps are protected: connects to the ranks that copies go to and come from.
  void connect();
  void protect(const ParamGroups& groups);
  bool protects_next() const;
  // Ends this group here. The survivors, with what each of them holds. Collective over them.
  RollCall::Present leave_group();
  // Collective. The same optimizer over another group. If it throws, the present engine has the
  // inner optimizer back.
  std::unique_ptr<Engine> make_again(const Group& over);

  std::shared_ptr<Engine>& engine_;
  RunIdentity& run_;
  std::shared_ptr<Lifeline> lifeline_;  // null unless steps are protected
  std::string replaced_;                // the problem that before_step() has found, or nothing
  int64_t failures_before_ = 0;         // of the present group
  int64_t protected_calls_ = 0;         // step() calls before the last protected state
  std::unique_ptr<Protection> protection_;
};

}  // namespace zero
