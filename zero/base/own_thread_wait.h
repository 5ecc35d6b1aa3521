// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Two waits for another thread of this process. One is for a thing that it does: it looks again
// every second, so that a lost wake-up costs a second, and ends when the thread stands still. The
// other is for its end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace zero {

class OwnThreadWait {
 public:
  // What one look waits.
  static constexpr std::chrono::seconds kLook{1};

  // `text` names the rank and the thread: "rank 1 of 4 waits for its thread that ...". `limit` is
  // that of the transfers for which the thread waits. `reason` ends the error: by default, that it
  // is a fault of the library.
  OwnThreadWait(std::string text, std::chrono::milliseconds limit, std::string reason = {});

  // To be called after each kLook. Prints a line to stderr when `progress` has not changed for
  // twice slow_wait_after(): a wait of the other thread for a peer has had its own line then.
  // When it has not changed for `limit` and 5 s, prints the states of all threads and throws
  // c10::Error. Looks are counted, not time, since a stopped process makes none.
  void look(int64_t progress);

 private:
  const std::string text_;
  const std::chrono::milliseconds limit_;
  const std::string reason_;
  int64_t progress_ = -1;
  int64_t looks_ = 0;  // since `progress_` changed
  bool printed_ = false;
};

// Joins a thread that was told to end, however long it takes, since it uses what its owner has.
// Prints a line after slow_wait_after(), and the states of all threads after six times that.
void join_own_thread(std::thread& thread, const std::string& what);

}  // namespace zero
