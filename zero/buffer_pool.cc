// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace zero {
namespace {

int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes());
}

at::Tensor as_flat(const at::Tensor& bytes, int64_t numel, c10::ScalarType dtype) {
  const auto used = numel * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, used).view(dtype);
}

}  // namespace

at::Tensor BufferPool::take(int64_t numel, c10::ScalarType dtype) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  std::unique_lock<std::mutex> lock(mutex_);
  // The smallest that fits; one far too large is left for a larger bucket.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t size = storage_bytes(*it);
    if (size < bytes || size > 2 * bytes) continue;
    if (best == free_.end() || size < storage_bytes(*best)) best = it;
  }
  if (best != free_.end()) {
    at::Tensor found = std::move(*best);
    free_.erase(best);
    return as_flat(found, numel, dtype);
  }
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  lock.unlock();
  return as_flat(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_)), numel,
                 dtype);
}

void BufferPool::give(const at::Tensor& buffer) {
  const int64_t bytes = storage_bytes(buffer);
  at::Tensor whole = buffer.view(at::kByte).as_strided({bytes}, {1}, 0);
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(whole));
}

void BufferPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!free_.empty() && held_bytes_ > keep_bytes_) {
    held_bytes_ -= storage_bytes(free_.back());
    free_.pop_back();
  }
}

int64_t BufferPool::held_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

int64_t BufferPool::peak_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_bytes_;
}

}  // namespace zero
