// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint_options.h"

#include <c10/util/Exception.h>

#include <thread>
#include <utility>

#include "zero/base/own_process.h"
#include "zero/base/thread_priority.h"

namespace zero {

// A forked child keeps it: destroyed there, the writer would remove the parent's files.
struct PendingCheckpoint::State {
  OwnProcess process;
  Write write;
  std::function<void()> finish;
  std::atomic<bool> pause = false;
  std::thread thread;
  ~State() { stop(); }
  void stop() {
    pause = true;
    if (thread.joinable()) thread.join();
    pause = false;
  }
};

PendingCheckpoint::PendingCheckpoint(std::function<void()> copy, Write write,
                                     std::function<void()> finish)
    : state_(make_owned<State>()) {
  state_->write = std::move(write);
  state_->finish = std::move(finish);
  state_->thread = std::thread([state = state_.get(), copy = std::move(copy)]() mutable {
    std::exchange(copy, nullptr)();
    lower_thread_priority();
    state->write(state->pause);
  });
}

PendingCheckpoint::~PendingCheckpoint() = default;

void PendingCheckpoint::finish() {
  state_->process.check("finish() of a checkpoint");
  TORCH_CHECK(state_->finish != nullptr, "finish(): expected one call for each save, got another");
  // The thread may not get a core for long, and all ranks would wait.
  state_->stop();
  std::exchange(state_->write, nullptr)(state_->pause);
  std::exchange(state_->finish, nullptr)();
}

}  // namespace zero
