// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What has happened before some point of a stream: for each stream of a device how many of its
// calls.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <map>

namespace zero {

class Past {
 public:
  void join(const Past& other) {
    for (const auto& [stream, count] : other.counts_) {
      int64_t& own = counts_[stream];
      own = std::max(own, count);
    }
  }
  int64_t add_call(c10::StreamId stream) { return ++counts_[stream]; }
  bool has(c10::StreamId stream, int64_t number) const { return count(stream) >= number; }
  int64_t count(c10::StreamId stream) const {
    const auto found = counts_.find(stream);
    return found == counts_.end() ? 0 : found->second;
  }

 private:
  std::map<c10::StreamId, int64_t> counts_;
};

}  // namespace zero
