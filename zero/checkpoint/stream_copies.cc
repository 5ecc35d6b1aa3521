// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/stream_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "zero/base/own_thread_wait.h"
#include "zero/base/streams.h"
#include "zero/memory/device_stream.h"

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
  std::stable_sort(under_way_.begin(), under_way_.end(),
                   [](const ShardCopy& a, const ShardCopy& b) { return a.bucket > b.bucket; });
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

}  // namespace zero
