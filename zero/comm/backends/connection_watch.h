// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Asks whether connections have ended, without a wait.
//
// A receive that is never answered fails when its connection ends. Gloo's wait for it throws then,
// and returns at once if it was aborted before.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace zero {

// Thread safety: every member.
class ConnectionWatch {
 public:
  //   backend  outlives this
  //   calls    locked for calls of the backend
  //   tag      that nothing is sent with
  ConnectionWatch(c10d::Backend& backend, std::mutex& calls, int tag,
                  std::chrono::milliseconds timeout)
      : backend_(backend), calls_(calls), tag_(tag), timeout_(timeout) {}

  // Returns whether the connection to rank `peer` is known to have ended. False for a transport
  // whose receives cannot be aborted.
  bool has_ended(int peer) noexcept;

 private:
  c10d::Backend& backend_;
  std::mutex& calls_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<int, c10::intrusive_ptr<c10d::Work>> receives_;  // by peer
};

}  // namespace zero
