// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reuses flat buffers for buckets that are being sent. The pool never refuses: a hook must not wait
// for a peer, so the pool allocates beyond what it keeps and frees the surplus in trim().
//
// On a GPU a buffer that was given back may still be read or written by the stream that was current
// then. It is free for that stream at once, and for others when that stream has come so far. A
// capture in a CUDA graph can wait for no work outside of it, and nothing outside can wait for
// captured work. So the pool makes neither wait: the caller orders a capture and each replay behind
// earlier work.
//
// Thread safety: every member.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace zero {

class BufferPool {
 public:
  // Returns [bytes] of kByte on the pool's device, or an undefined tensor to leave it to the pool.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;

  // `keep_bytes` is what trim() leaves allocated. `allocate` is asked first for large buffers.
  BufferPool(c10::Device device, int64_t keep_bytes, Allocate allocate = nullptr)
      : device_(device), keep_bytes_(keep_bytes), allocate_(std::move(allocate)) {}

  // How a stream may get a buffer that another stream uses still.
  enum class Order {
    kFree,  // Not at all: it gets another one. For a stream that must not wait for peers.
    kWait,  // It waits for the other.
  };

  // A 1-D tensor of `numel` elements of `dtype` with unspecified contents, for the current stream.
  at::Tensor acquire(int64_t numel, c10::ScalarType dtype, Order order = Order::kFree);
  // [bytes] of kByte that is not the pool's: where it keeps buffers of this size, for as long as
  // the tensor lives. Unspecified contents.
  at::Tensor allocate(int64_t bytes) const;
  // Gives back a buffer of acquire(), which only the current stream may use still.
  void release(const at::Tensor& buffer);
  // The current stream has waited for all streams to which buffers were given.
  void joined();
  // Frees buffers that are not in use until at most keep_bytes are held. Not once a CUDA graph has
  // been captured, since it writes to the buffers whenever it is replayed.
  void trim();

  int64_t held_bytes() const;
  int64_t peak_bytes() const;

 private:
  struct Free {
    at::Tensor buffer;  // of bytes
    // On a GPU the stream that may use it still, and until when. No event: that stream waits for no
    // peer, see joined().
    std::optional<c10::Stream> stream = std::nullopt;
    std::optional<c10::Event> given = std::nullopt;
    uint64_t capture = 0;  // in which it was given back
  };

  // Returns whether the current stream may use a buffer without waiting for peers.
  bool is_free(const Free& free) const;

  const c10::Device device_;
  const int64_t keep_bytes_;
  const Allocate allocate_;
  mutable std::mutex mutex_;
  std::vector<Free> free_;
  bool captured_ = false;
  int64_t held_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace zero
