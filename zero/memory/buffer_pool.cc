// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>

#include "zero/base/streams.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes());
}

at::Tensor as_flat(const at::Tensor& bytes, int64_t numel, c10::ScalarType dtype) {
  const auto used = numel * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, used).view(dtype);
}

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kLargeBuffer = 64 << 10;

// A mapping of its own, so that freeing it gives the memory back to the system: malloc keeps what
// lies between other blocks. In huge pages, since a trimmed buffer is touched anew in the next
// step, and 4 KiB at a time that would cost as much as sending it.
at::Tensor map_buffer(int64_t bytes) {
  const int64_t length = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* const mapped = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, mapped != MAP_FAILED, "bucket buffer: expected ", length,
                   " bytes of memory, got none; choose smaller buckets or a smaller model");
  void* const aligned = reinterpret_cast<void*>(
      (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) / kHugePage * kHugePage);
  madvise(aligned, length, MADV_HUGEPAGE);  // without it the buffer works all the same
  return at::from_blob(
      aligned, {bytes}, [mapped, length](void*) { munmap(mapped, length + kHugePage); },
      at::TensorOptions().dtype(at::kByte));
}

}  // namespace

// Small ones would waste most of a page.
at::Tensor BufferPool::allocate(int64_t bytes) const {
  if (allocate_ && bytes >= kLargeBuffer) {
    if (at::Tensor buffer = allocate_(bytes); buffer.defined()) return buffer;
  }
  if (device_.is_cpu() && bytes >= kHugePage) return map_buffer(bytes);
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

bool BufferPool::is_free(const Free& free) const {
  return !free.given || *free.stream == current_torch_stream(device_) || is_complete(*free.given);
}

at::Tensor BufferPool::acquire(int64_t numel, c10::ScalarType dtype, Order order) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  // All ranks of a captured step run the same passes, so that any stream may wait.
  const uint64_t capture = current_capture(device_);
  const bool may_wait = order == Order::kWait || capture != 0;
  std::unique_lock<std::mutex> lock(mutex_);
  captured_ = captured_ || capture != 0;
  // The smallest that fits; one far too large is left for a larger bucket.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t size = storage_bytes(it->buffer);
    if (size < bytes || size > 2 * bytes) continue;
    if (best != free_.end() && size >= storage_bytes(best->buffer)) continue;
    if (may_wait || it->capture != capture || is_free(*it)) best = it;
  }
  if (best != free_.end()) {
    const Free found = std::move(*best);
    free_.erase(best);
    // Released on another stream: waits for the event there; behind joined(), which leaves none,
    // for all that the stream has to do.
    if (found.capture == capture) {
      if (found.given && may_wait) found.given->block(current_torch_stream(device_));
      if (found.stream && !found.given) make_wait(current_torch_stream(device_), *found.stream);
    }
    return as_flat(found.buffer, numel, dtype);
  }
  lock.unlock();
  const at::Tensor buffer = allocate(bytes);  // which may throw
  lock.lock();
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  return as_flat(buffer, numel, dtype);
}

void BufferPool::release(const at::Tensor& buffer) {
  const int64_t bytes = storage_bytes(buffer);
  Free free{buffer.view(at::kByte).as_strided({bytes}, {1}, 0)};
  if (!device_.is_cpu()) {
    free.stream = current_torch_stream(device_);
    free.given.emplace(device_.type());
    free.given->record(*free.stream);
    free.capture = current_capture(device_);
    // For the day on which the memory goes back to libtorch.
    free.buffer.record_stream(*free.stream);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(free));
}

void BufferPool::joined() {
  if (device_.is_cpu()) return;
  const c10::Stream current = current_torch_stream(device_);
  const uint64_t capture = current_capture(device_);
  std::lock_guard<std::mutex> lock(mutex_);
  for (Free& free : free_) {
    if (free.capture != capture) continue;
    free.stream = current;
    free.given.reset();
  }
}

void BufferPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!captured_ && !free_.empty() && held_bytes_ > keep_bytes_) {
    held_bytes_ -= storage_bytes(free_.back().buffer);
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
