// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A save that goes on while training does.
//
//   auto save = optimizer.save_checkpoint_async("run/step-100");
//   ...                                  // steps as usual, on all ranks
//   save->finish();                      // at the same place on all ranks
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace zero {

// A save of ZeroOptimizer::save_checkpoint_async() that is under way.
class PendingCheckpoint {
 public:
  // Made by ZeroOptimizer::save_checkpoint_async(). A thread runs `copy`, for which a step may
  // wait, and then, with a low priority, `write`, which returns early when `pause` becomes true,
  // and called again goes on. Neither throws. `finish` runs the collective end.
  using Write = std::function<void(const std::atomic<bool>& pause)>;
  PendingCheckpoint(std::function<void()> copy, Write write, std::function<void()> finish);
  // Stops the thread. Without finish() no checkpoint appears. As long as rank
  // 0's object lives and was not finished (without a shared folder: that of any rank), no other
  // save to the folder can begin.
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  // Collective, once, while the optimizer lives. Writes what the thread has not written yet of this
  // rank's files, waits for all ranks, and gives the checkpoint its name. Throws what
  // save_checkpoint() would throw.
  void finish();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace zero
