// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/stream_reductions.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "zero/base/streams.h"
#include "zero/memory/device_stream.h"

namespace zero {

StreamReductions::~StreamReductions() {
  try {
    join();
  } catch (...) {  // The device has failed: there is nothing left to order.
  }
}

const c10::Stream& StreamReductions::sums(c10::Device device) {
  if (!exchange_stream_) {
    exchange_stream_ = new_stream(device);
    sum_stream_ = new_stream(device);
  }
  return *sum_stream_;
}

void StreamReductions::enqueue(BucketReduction reduction) {
  const c10::Device device = reduction.shard.device();
  const c10::Stream sum_stream = sums(device);
  const auto bytes = static_cast<int64_t>(reduction.rows.values().nbytes());
  make_wait(*exchange_stream_, current_torch_stream(device));
  Exchange exchange;
  {
    const c10::StreamGuard guard(*exchange_stream_);
    exchange = start_exchange(std::move(reduction), pool_);
  }
  const c10::StreamGuard guard(sum_stream);
  finish_exchange(exchange, pool_);
  // A capture can ask no event whether it is complete. It reuses buffers in stream order.
  if (is_capturing(device)) return;
  c10::Event done(device.type());
  done.record(sum_stream);
  under_way_.push_back({std::move(done), bytes});
  bytes_under_way_ += bytes;
}

int64_t StreamReductions::retire_completed() {
  for (; !under_way_.empty() && is_complete(under_way_.front().done); ++done_) {
    bytes_under_way_ -= under_way_.front().bytes;
    under_way_.pop_front();
  }
  return done_;
}

void StreamReductions::join() {
  if (!sum_stream_) return;
  const c10::Stream current = current_torch_stream(sum_stream_->device());
  make_wait(current, *exchange_stream_);
  make_wait(current, *sum_stream_);
}

void StreamReductions::leave_capture() {
  if (!sum_stream_) return;
  const c10::Stream current = current_torch_stream(sum_stream_->device());
  for (const c10::Stream& stream : {*exchange_stream_, *sum_stream_}) {
    const c10::StreamGuard guard(stream);
    if (is_capturing(stream.device())) make_wait(current, stream);
  }
}

}  // namespace zero
