// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/pending_checkpoint.h"

#include <c10/util/Exception.h>

#include <thread>
#include <utility>

#include "zero/base/own_process.h"

namespace zero {

// A forked child keeps it: destroyed there, the writer would remove the parent's files.
struct PendingCheckpoint::State {
  OwnProcess process;
  std::function<void()> finish;
  std::thread thread;
  ~State() { join(); }
  void join() {
    if (thread.joinable()) thread.join();
  }
};

PendingCheckpoint::PendingCheckpoint(std::function<void()> write, std::function<void()> finish)
    : state_(make_owned<State>()) {
  state_->finish = std::move(finish);
  state_->thread = std::thread(std::move(write));
}

PendingCheckpoint::~PendingCheckpoint() = default;

void PendingCheckpoint::finish() {
  state_->process.check("finish() of a checkpoint");
  TORCH_CHECK(state_->finish != nullptr, "finish(): expected one call for each save, got another");
  state_->join();
  std::exchange(state_->finish, nullptr)();
}

}  // namespace zero
