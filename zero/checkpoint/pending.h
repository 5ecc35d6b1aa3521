// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a PendingCheckpoint runs, and where. Internal.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "zero/checkpoint_options.h"

namespace zero {

struct BackgroundSave {
  // Both run on a thread of the save, which may be left behind with them, and throw nothing. A step
  // may wait for `copy`. Then `write` runs with a low priority; it returns early when `pause`
  // becomes true, and called again goes on.
  std::function<void()> copy;
  std::function<void(const std::atomic<bool>& pause)> write;
  // Runs on the thread that calls PendingCheckpoint::finish(): the collective end. It calls
  // `write_rest` once, which stops the thread of the save and writes what that has not written.
  std::function<void(const std::function<void()>& write_rest)> finish;
  std::string wait;                    // the text of a wait for the thread of the save
  std::chrono::milliseconds limit{0};  // of that thread, where it stands still

  // Once. Starts the thread. If the system has none left, runs `copy` in this call, and
  // PendingCheckpoint::finish() writes everything.
  std::unique_ptr<PendingCheckpoint> start();
};

}  // namespace zero
