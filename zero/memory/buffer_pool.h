// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reuses flat buffers for buckets that are being sent. The pool never refuses: a hook must not wait
// for a peer, so the pool allocates beyond what it keeps and frees the surplus in trim().
//
// Thread safety: every member.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <mutex>
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

  // A 1-D tensor of `numel` elements of `dtype` with unspecified contents.
  at::Tensor take(int64_t numel, c10::ScalarType dtype);
  // [bytes] of kByte that is not the pool's: where it keeps buffers of this size, for as long as
  // the tensor lives. Unspecified contents.
  at::Tensor allocate(int64_t bytes) const;
  // Gives back a buffer of take(), which must not be used afterwards.
  void give(const at::Tensor& buffer);
  // Frees buffers that are not in use until at most keep_bytes are held.
  void trim();

  int64_t held_bytes() const;
  int64_t peak_bytes() const;

 private:
  const c10::Device device_;
  const int64_t keep_bytes_;
  const Allocate allocate_;
  mutable std::mutex mutex_;
  std::vector<at::Tensor> free_;  // of bytes
  int64_t held_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace zero
