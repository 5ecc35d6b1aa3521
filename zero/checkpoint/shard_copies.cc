// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/shard_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <thread>
#include <unordered_map>
#include <utility>

#include "zero/base/streams.h"
#include "zero/checkpoint/format/stored_file.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/locked_pages.h"

namespace zero {
namespace {

// All copies from a device run on one stream: libtorch's pool is small, and with a new stream for
// each save some would share that of an exchange.
c10::Stream copy_stream(c10::Device device) {
  static std::mutex mutex;
  static auto* const streams = new std::unordered_map<c10::Device, c10::Stream>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams->find(device);
  if (found != streams->end()) return found->second;
  return streams->emplace(device, new_stream(device)).first->second;
}

// cudaEventSynchronize() would take a core while it waits.
void wait_on_host(const c10::Event& event, OwnThreadWait* limit = nullptr) {
  constexpr std::chrono::microseconds kPoll{200};
  const c10::DeviceGuard guard(event.device());
  auto next_look = std::chrono::steady_clock::now() + OwnThreadWait::kLook;
  while (!is_complete(event)) {
    std::this_thread::sleep_for(kPoll);
    if (limit == nullptr || std::chrono::steady_clock::now() < next_look) continue;
    limit->look(0);
    next_look += OwnThreadWait::kLook;
  }
}

}  // namespace

StreamCopies::StreamCopies(c10::Device device) : stream_(copy_stream(device)) {}

// If this throws, the destructor runs: the constructor above has ended.
StreamCopies::StreamCopies(const std::vector<ShardCopy>& copies)
    : StreamCopies(copies.front().from.device()) {
  under_way_ = copies;
  std::ranges::stable_sort(under_way_, std::ranges::greater(), &ShardCopy::bucket);
  const auto first_of_buckets =
      std::partition_point(under_way_.begin(), under_way_.end(),
                           [](const ShardCopy& c) { return c.bucket == kOfNoBucket; });
  const c10::Stream current = current_torch_stream(stream_.device());
  enqueue(under_way_.begin(), first_of_buckets, current);
  make_wait(stream_, current);
  enqueue(first_of_buckets, under_way_.end(), stream_);
}

void StreamCopies::enqueue(Iterator begin, Iterator end, const c10::Stream& stream) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream);
  for (auto it = begin; it != end; ++it) {
    const auto& [from, to, bucket] = *it;
    at::from_blob(to.mutable_data_ptr(), from.sizes(), from.options().device(at::kCPU))
        .copy_(from, /*non_blocking=*/true);
    if (std::next(it) != end && std::next(it)->bucket == bucket) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    copied_.push_back({bucket, std::move(event)});
  }
}

StreamCopies::~StreamCopies() {
  if (under_way_.empty()) return;
  try {
    // An error of the constructor may have come before this. A capture must not have the copies.
    if (!is_capturing(stream_.device())) {
      make_wait(stream_, current_torch_stream(stream_.device()));
    }
    c10::Event last(stream_.device_type());
    last.record(stream_);
    wait_on_host(last);
  } catch (...) {  // The device has failed: it copies nothing any more.
  }
}

void StreamCopies::wait(int64_t bucket, OwnThreadWait& limit) const {
  const auto end = std::partition_point(copied_.begin(), copied_.end(), [&](const Copied& copied) {
    return copied.bucket >= bucket;
  });
  if (end == copied_.begin()) return;
  const c10::Event& event = std::prev(end)->event;
  if (is_capturing(stream_.device())) {
    wait_on_host(event, &limit);
  } else {
    event.block(current_torch_stream(stream_.device()));
  }
}

void StreamCopies::finish() {
  if (under_way_.empty()) return;
  wait_on_host(copied_.back().event);
  under_way_.clear();
}

namespace {

// A step waits at most for one of them.
constexpr int64_t kPiece = int64_t{1} << 20;

bool is_plain(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous(); }

// Stores past the caches where the processor can: nothing reads the copy soon, and such a store
// need not read the line that it replaces. That takes three quarters of the time of memcpy().
void copy_past_caches(char* to, const char* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  const char* const end = from + head + (bytes - head) / kLine * kLine;
  for (to += head, from += head; from < end; to += kLine, from += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from);
    auto* const line = reinterpret_cast<__m128i*>(to);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(line + i, _mm_loadu_si128(source + i));
  }
  _mm_sfence();
  bytes = (bytes - head) % kLine;
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

c10::Device stream_device(const std::vector<ShardCopy>& copies) {
  c10::Device device = at::kCPU;
  for (const ShardCopy& c : copies) {
    const c10::Device own = c.from.device();
    if (!has_streams(own)) continue;
    if (c.bucket != kOfNoBucket) return own;
    if (device.is_cpu()) device = own;
  }
  return device;
}

ShardCopies::ShardCopies(const std::vector<ShardCopy>& copies) {
  const c10::Device device = stream_device(copies);
  std::vector<ShardCopy> of_device;
  for (const ShardCopy& c : copies) {
    const auto bytes = static_cast<int64_t>(c.from.nbytes());
    TORCH_INTERNAL_ASSERT(is_plain(c.to) && c.to.scalar_type() == at::kByte &&
                          c.to.numel() == bytes);
    if (has_streams(device) && c.from.device() == device) {
      of_device.push_back(c);
      continue;
    }
    const int64_t piece = is_plain(c.from) ? kPiece : bytes;
    for (int64_t begin = 0; begin < bytes; begin += piece) {
      pieces_.push_back({c.from, c.to, begin, std::min(piece, bytes - begin), c.bucket});
    }
  }
  std::ranges::stable_sort(pieces_, std::ranges::greater(), &Piece::bucket);
  if (!of_device.empty()) of_device_.emplace(of_device);
}

void ShardCopies::copy_next(std::unique_lock<std::mutex>& lock) {
  const size_t index = next_++;
  running_.insert(index);
  const Piece piece = pieces_[index];
  lock.unlock();
  std::exception_ptr problem;
  try {
    const at::NoGradGuard no_grad;
    void* const to = piece.to.mutable_data_ptr();
    if (is_plain(piece.from)) {
      copy_past_caches(static_cast<char*>(to) + piece.begin,
                       static_cast<const char*>(piece.from.const_data_ptr()) + piece.begin,
                       static_cast<size_t>(piece.bytes));
    } else {
      at::from_blob(to, piece.from.sizes(), piece.from.options().device(at::kCPU))
          .copy_(piece.from);
    }
  } catch (...) {
    problem = std::current_exception();
  }
  lock.lock();
  running_.erase(index);
  if (problem) {
    problem_ = problem;
    next_ = pieces_.size();
  }
  changed_.notify_all();
}

void ShardCopies::copy_all() {
  if (of_device_) of_device_->finish();
  std::unique_lock<std::mutex> lock(mutex_);
  while (next_ < pieces_.size()) copy_next(lock);
  // Only a step copies beside this. A lost wake-up costs a second.
  while (!changed_.wait_for(lock, OwnThreadWait::kLook, [&] { return running_.empty(); })) {
  }
  pieces_.clear();  // and with them the last use of the memory, maybe
  next_ = 0;
  if (problem_) std::rethrow_exception(problem_);
}

void ShardCopies::wait(int64_t bucket, OwnThreadWait& limit) {
  if (of_device_) of_device_->wait(bucket, limit);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_after = [&] { return next_ >= pieces_.size() || pieces_[next_].bucket < bucket; };
  while (!is_after()) copy_next(lock);
  const auto is_copied = [&] {
    return running_.empty() || pieces_[*running_.begin()].bucket < bucket;
  };
  while (!changed_.wait_for(lock, OwnThreadWait::kLook, is_copied)) {
    limit.look(static_cast<int64_t>(next_ - running_.size()));  // pieces that are done
  }
}

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

at::Tensor fresh_memory(int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  // A locked page must hold nothing else.
  if (bytes == 0 || (bytes < kHugePage && device.is_cpu())) return at::empty({bytes}, options);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "not enough memory: expected ", bytes,
                   " bytes for a copy");
  madvise(memory, bytes, MADV_HUGEPAGE);  // refused by systems without them
  const bool locked = lock_pages(memory, bytes, device);
  const auto free = [=](void* begin) {
    if (!locked || unlock_pages(begin, device)) munmap(begin, bytes);
  };
  return at::from_blob(memory, {bytes}, free, options);
}

at::Tensor KeptMemory::allocate(int64_t bytes, c10::Device device) {
  const bool fits = memory_.defined() && memory_.numel() == bytes && device_ == device &&
                    memory_.storage().use_count() == 1;
  if (!fits) memory_ = fresh_memory(bytes, device);
  device_ = device;
  // Not the same tensor: the storage counts who uses it.
  return memory_.narrow(0, 0, bytes);
}

}  // namespace zero
