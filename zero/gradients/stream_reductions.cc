// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/stream_reductions.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "zero/base/streams.h"
#include "zero/gradients/reduction_queue.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

constexpr std::chrono::microseconds kPoll{20};

}  // namespace

StreamReductions::~StreamReductions() {
  try {
    join();
  } catch (...) {  // The device has failed: there is nothing left to order.
  }
}

void StreamReductions::push(BucketReduction reduction) {
  if (error_) return;
  Communicator& group = *reduction.group;
  try {
    enqueue(std::move(reduction));
    bound_memory();
  } catch (...) {
    error_ = std::current_exception();
    end_group(group, error_);
  }
}

void StreamReductions::enqueue(BucketReduction reduction) {
  const c10::Device device = reduction.shard.device();
  if (!exchange_stream_) {
    exchange_stream_ = new_stream(device);
    sum_stream_ = new_stream(device);
  }
  const auto bytes = static_cast<int64_t>(reduction.rows.values().nbytes());
  make_wait(*exchange_stream_, current_torch_stream(device));
  Exchange exchange;
  {
    const c10::StreamGuard guard(*exchange_stream_);
    exchange = start_exchange(std::move(reduction), pool_);
  }
  const c10::StreamGuard guard(*sum_stream_);
  finish_exchange(exchange, pool_);
  // A capture can ask no event whether it is complete. It reuses buffers in stream order.
  if (is_capturing(device)) return;
  c10::Event done(device.type());
  done.record(*sum_stream_);
  under_way_.push_back({std::move(done), bytes});
  bytes_under_way_ += bytes;
}

void StreamReductions::bound_memory() {
  if (is_capturing(sum_stream_->device())) return;
  using Clock = std::chrono::steady_clock;
  const auto forget_done = [this] {
    bool any = false;
    while (!under_way_.empty() && under_way_.front().done.query()) {
      bytes_under_way_ -= under_way_.front().bytes;
      under_way_.pop_front();
      any = true;
    }
    if (any) patience_ = kPatience;
    return ReductionQueue::has_room(under_way_.size(), bytes_under_way_, ReductionQueue::kWaiting);
  };
  if (forget_done()) return;
  const Clock::time_point begin = Clock::now();
  const std::chrono::nanoseconds patience = patience_;
  while (Clock::now() - begin < patience) {
    std::this_thread::sleep_for(kPoll);
    if (forget_done()) return;
  }
  patience_ = std::chrono::nanoseconds::zero();
}

void StreamReductions::join() {
  if (!sum_stream_) return;
  const c10::Stream current = current_torch_stream(sum_stream_->device());
  make_wait(current, *exchange_stream_);
  make_wait(current, *sum_stream_);
}

void StreamReductions::drain() {
  join();
  check();
}

void StreamReductions::check() const {
  if (error_) std::rethrow_exception(error_);
}

}  // namespace zero
