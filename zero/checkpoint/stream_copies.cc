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
void wait_on_host(const c10::Event& event) {
  constexpr std::chrono::microseconds kPoll{200};
  const c10::DeviceGuard guard(event.device());
  while (!is_complete(event)) std::this_thread::sleep_for(kPoll);
}

}  // namespace

StreamCopies::StreamCopies(c10::Device device) : stream_(copy_stream(device)) {
  make_wait(stream_, current_torch_stream(device));
}

// If this throws, the destructor runs: the constructor above has ended.
StreamCopies::StreamCopies(const std::vector<ShardCopy>& copies)
    : StreamCopies(copies.front().from.device()) {
  under_way_ = copies;
  std::stable_sort(under_way_.begin(), under_way_.end(),
                   [](const ShardCopy& a, const ShardCopy& b) { return a.bucket > b.bucket; });
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(stream_);
  for (size_t i = 0; i < under_way_.size(); ++i) {
    const auto& [from, to, bucket] = under_way_[i];
    at::from_blob(to.mutable_data_ptr(), from.sizes(), from.options().device(at::kCPU))
        .copy_(from, /*non_blocking=*/true);
    if (i + 1 < under_way_.size() && under_way_[i + 1].bucket == bucket) continue;
    c10::Event event(stream_.device_type());
    event.record(stream_);
    copied_.push_back({bucket, std::move(event)});
  }
}

StreamCopies::~StreamCopies() {
  if (under_way_.empty()) return;
  try {
    c10::Event last(stream_.device_type());
    last.record(stream_);
    wait_on_host(last);
  } catch (...) {  // The device has failed: it copies nothing any more.
  }
}

void StreamCopies::wait(int64_t bucket) const {
  const auto end = std::partition_point(copied_.begin(), copied_.end(), [&](const Copied& copied) {
    return copied.bucket >= bucket;
  });
  if (end == copied_.begin()) return;
  const c10::Event& event = std::prev(end)->event;
  if (is_capturing(stream_.device())) {
    wait_on_host(event);
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
