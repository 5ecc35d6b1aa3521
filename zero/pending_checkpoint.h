// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A save that goes on while training does.
//
//   auto save = optimizer.save_checkpoint_async("run/step-100");
//   ...                                  // steps as usual, on all ranks
//   save->finish();                      // at the same place on all ranks
#pragma once

#include <functional>
#include <memory>

namespace zero {

class PendingCheckpoint {
 public:
  // Made by ZeroOptimizer::save_checkpoint_async(). `write` writes this rank's files on a thread of
  // its own and does not throw; `finish` runs the collective end.
  PendingCheckpoint(std::function<void()> write, std::function<void()> finish);
  // Waits for this rank's files. Without finish() no checkpoint appears. As long as rank
  // 0's object lives and was not finished (without a shared folder: that of any rank), no other
  // save to the folder can begin.
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  // Collective, once, while the optimizer lives. Waits for this rank's files, then
  // for all ranks, and gives the checkpoint its name. Throws what save_checkpoint()
  // would throw.
  void finish();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace zero
