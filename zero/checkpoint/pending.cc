// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/pending.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "zero/base/own_process.h"
#include "zero/base/own_thread_wait.h"
#include "zero/base/thread_priority.h"
#include "zero/base/threads.h"

namespace zero {
namespace {

// What the thread uses, which may be left behind.
struct Work {
  std::function<void()> copy;
  std::function<void(const std::atomic<bool>& pause)> write;
  std::atomic<bool> pause = false;

  std::mutex mutex;
  std::condition_variable changed;
  bool has_ended = false;
};

void run(const std::shared_ptr<Work>& work) {
  std::exchange(work->copy, nullptr)();
  lower_thread_priority();
  work->write(work->pause);
  const std::lock_guard<std::mutex> lock(work->mutex);
  work->has_ended = true;
  work->changed.notify_all();
}

}  // namespace

// A forked child keeps it: destroyed there, the writer would remove the parent's files.
struct PendingCheckpoint::State {
  OwnProcess process;
  const std::shared_ptr<Work> work = std::make_shared<Work>();
  std::function<void(const std::function<void()>& write_rest)> finish;
  std::string wait;
  std::chrono::milliseconds limit{};
  std::thread thread;

  ~State() {
    try {
      stop();
    } catch (const std::exception&) {  // It has printed that the thread stands still.
    }
  }
  void stop() {
    if (!thread.joinable()) return;
    work->pause = true;
    std::unique_lock<std::mutex> lock(work->mutex);
    OwnThreadWait look(wait, limit,
                       "a call of the disk does not return; look at the disk or its server, and "
                       "start again from another checkpoint");
    const auto has_ended = [this] { return work->has_ended; };
    while (!work->changed.wait_for(lock, OwnThreadWait::kLook, has_ended)) {
      try {
        look.look(0);
      } catch (...) {
        thread.detach();
        throw;
      }
    }
    lock.unlock();
    thread.join();
    work->pause = false;
  }
};

std::unique_ptr<PendingCheckpoint> BackgroundSave::start() {
  const auto state = make_owned<PendingCheckpoint::State>();
  state->work->copy = std::move(copy);
  state->work->write = std::move(write);
  state->finish = std::move(finish);
  state->wait = std::move(wait);
  state->limit = limit;
  try {
    state->thread = start_thread([work = state->work] { run(work); }, "saves");
  } catch (const c10::Error&) {  // no thread is left
    std::exchange(state->work->copy, nullptr)();
  }
  return std::unique_ptr<PendingCheckpoint>(new PendingCheckpoint(state));
}

PendingCheckpoint::~PendingCheckpoint() = default;

void PendingCheckpoint::finish() {
  state_->process.check("finish() of a checkpoint");
  TORCH_CHECK(state_->finish != nullptr, "finish(): expected one call for each save, got another");
  // What refuses the call before anything is written leaves the save as it is.
  bool begun = false;
  const auto finish = std::exchange(state_->finish, nullptr);
  try {
    finish([this, &begun] {
      begun = true;
      // The thread may not get a core for long, and all ranks would wait.
      state_->stop();
      std::exchange(state_->work->write, nullptr)(state_->work->pause);
    });
  } catch (...) {
    if (!begun) state_->finish = finish;
    throw;
  }
}

}  // namespace zero
