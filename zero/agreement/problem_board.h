// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Exchanges texts between ranks through their store: why a rank refuses a call, and how it failed.
// If the store does not answer, no function blocks for longer than its comment says.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/rendezvous/bounded_store.h"

namespace zero {

class ProblemBoard {
 public:
  // `store` is this board's alone; `timeout` bounds text_of().
  ProblemBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
               std::chrono::milliseconds timeout);

  // Leaves this rank's text under `topic`, which is used once. Gives up after 500 ms without an
  // error: the calls after it wait for the ranks, and their errors say more.
  void leave(const std::string& topic, const std::string& text) noexcept;
  // Returns the text that `rank` has left under `topic`. Waits for it up to the timeout, and then
  // returns a text that says so.
  std::string text_of(const std::string& topic, int rank) noexcept;

  // Replaces what this rank announces to all; empty: nothing. Takes at most 200 ms.
  void announce(const std::string& problem) noexcept;
  // Returns what other ranks announce, one line each; empty if nothing. Of those behind the first
  // 64 only the one that announced first. Takes at most 300 ms.
  std::string announced() noexcept;
  // The same after a failure that all ranks notice: gives them 300 ms to announce it, and names
  // those that do not. A rank that serves the store stays that long for the others to read it.
  std::string announced_after_failure() noexcept;

 private:
  // One line for each of the first 64 ranks, and one for the first of all others that announced
  // something; empty for this rank, and where there is nothing.
  std::vector<std::string> announcements(BoundedStore& store) const;
  int texts() const;

  const c10::intrusive_ptr<BoundedStore> store_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace zero
