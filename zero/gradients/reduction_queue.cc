// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/reduction_queue.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "zero/base/own_thread_wait.h"
#include "zero/base/streams.h"
#include "zero/base/threads.h"
#include "zero/comm/row_communicator.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

constexpr std::chrono::microseconds kPoll{20};

}  // namespace

ReductionQueue::~ReductionQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  if (worker_.joinable()) join_own_thread(worker_, "its thread that reduces gradients");
}

void ReductionQueue::push(BucketReduction reduction) {
  const c10::Device device = reduction.shard.device();
  Communicator& group = *reduction.group;
  Lock lock(mutex_);
  if (error_) return;  // drain() reports it; nothing more is sent
  try {
    if (RowCommunicator(group).waits_on_host(device)) {
      hand_to_worker(std::move(reduction), lock);
    } else {
      streams_.enqueue(std::move(reduction));
    }
    if (!is_capturing(device)) bound_memory(lock);
  } catch (...) {
    fail(group, lock);
  }
}

void ReductionQueue::hand_to_worker(BucketReduction reduction, Lock& lock) {
  const c10::Device device = reduction.shard.device();
  std::optional<c10::Event> packed;
  if (!device.is_cpu()) {
    packed.emplace(device.type());
    packed->record(current_torch_stream(device));
  }
  if (packed && !stream_) stream_ = new_stream(device);
  group_ = reduction.group;
  waiting_.push_back({std::move(reduction), std::move(packed)});
  start_worker();
  // From a GPU the exchange begins with a copy that waits for the device, which is for the worker.
  if (!stream_) start_exchanges(lock);
  changed_.notify_all();
}

void ReductionQueue::start_worker() {
  if (worker_.joinable()) return;
  try {
    worker_ = start_thread([this] { work(); });
  } catch (const c10::Error&) {  // drain() works instead
  }
}

void ReductionQueue::bound_memory(Lock& lock) {
  using Clock = std::chrono::steady_clock;
  int64_t on_streams = 0;
  const auto may_go = [this, &on_streams] {
    on_streams = streams_.retire_completed();
    return error_ || (waiting_.size() <= static_cast<size_t>(kWaiting) &&
                      has_room(streams_.count(), streams_.bytes(), kWaiting));
  };
  if (may_go()) return;
  const int64_t done = done_ + on_streams;
  if (std::exchange(done_at_push_, done) != done) patient_ = true;
  const Clock::time_point end = Clock::now() + kPatience;
  while (patient_ && !may_go()) {
    // The worker tells when it has done something, and streams do not.
    changed_.wait_until(lock, streams_.count() == 0 ? end : Clock::now() + kPoll);
    patient_ = Clock::now() < end;
  }
}

void ReductionQueue::fail(Communicator& group, Lock& lock) {
  if (lock.owns_lock()) lock.unlock();
  end_group(group);
  lock.lock();
  if (!error_) error_ = std::current_exception();
  // The transport is gone: what is left can never arrive.
  waiting_.clear();
}

size_t ReductionQueue::buffers_kept(int64_t bucket_bytes) {
  const int64_t bytes = std::max<int64_t>(bucket_bytes, 1);
  const int64_t under_way =
      std::max<int64_t>(kExchangesInFlight, (kBytesInFlight + bytes - 1) / bytes);
  return static_cast<size_t>(2 * under_way + kWaiting + 2);
}

// One thread at a time, so that exchanges start in order. Another that arrives meanwhile returns:
// the first looks again.
void ReductionQueue::start_exchanges(Lock& lock) {
  if (starting_) return;
  starting_ = true;
  while (!error_ && !stop_ && !waiting_.empty() && has_room(under_way_.size(), bytes_under_way_)) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    Communicator& group = *next.reduction.group;
    try {
      if (next.packed) next.packed->block(*stream_);
      Exchange exchange = start_exchange(std::move(next.reduction), pool_);
      const auto bytes = static_cast<int64_t>(exchange.reduction.rows.values().nbytes());
      lock.lock();
      under_way_.push_back(std::move(exchange));
      bytes_under_way_ += bytes;
    } catch (...) {
      fail(group, lock);
    }
    changed_.notify_all();
  }
  starting_ = false;
  changed_.notify_all();
}

void ReductionQueue::finish_oldest(Lock& lock) {
  // References into a deque stay valid while others push at its end.
  Exchange& exchange = under_way_.front();
  const auto bytes = static_cast<int64_t>(exchange.reduction.rows.values().nbytes());
  lock.unlock();
  try {
    finish_exchange(exchange, pool_);
    lock.lock();
  } catch (...) {
    fail(*exchange.reduction.group, lock);
  }
  ++done_;
  bytes_under_way_ -= bytes;
  under_way_.pop_front();
}

void ReductionQueue::work() {
  Lock lock(mutex_);
  std::optional<c10::StreamGuard> guard;
  if (stream_) guard.emplace(*stream_);
  const auto called = [this] {
    return stop_ || !under_way_.empty() || (!waiting_.empty() && !starting_);
  };
  while (true) {
    while (!changed_.wait_for(lock, OwnThreadWait::kLook, called)) {
    }
    if (stop_ && under_way_.empty()) return;
    work_once(lock);
  }
}

void ReductionQueue::work_once(Lock& lock) {
  start_exchanges(lock);
  if (!under_way_.empty()) finish_oldest(lock);
  changed_.notify_all();
}

void ReductionQueue::check() {
  const Lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

std::optional<c10::Stream> ReductionQueue::sums(Communicator& group, c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  if (!RowCommunicator(group).waits_on_host(device)) return streams_.sums(device);
  const Lock lock(mutex_);
  if (!stream_) stream_ = new_stream(device);
  return stream_;
}

int64_t ReductionQueue::done() {
  const Lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return done_;
}

void ReductionQueue::wait_for_worker(Lock& lock) {
  const auto done = [this] {
    return error_ || (waiting_.empty() && under_way_.empty() && !starting_);
  };
  if (done()) return;
  OwnThreadWait wait(c10::str("rank ", group_->rank(), " of ", group_->world_size(), " in group \"",
                              group_->name(), "\" waits for its thread that reduces gradients"),
                     group_->timeout());
  int64_t copies = 0;  // from a GPU: what waits for the device has no limit
  while (!changed_.wait_for(lock, OwnThreadWait::kLook, done)) {
    if (stream_ && starting_) ++copies;
    try {
      wait.look(done_ + copies);
    } catch (...) {
      fail(*group_, lock);
    }
  }
}

void ReductionQueue::drain() {
  Lock lock(mutex_);
  if (worker_.joinable()) {
    wait_for_worker(lock);
  } else {
    const c10::OptionalStreamGuard guard(stream_);
    while (!error_ && !(waiting_.empty() && under_way_.empty())) work_once(lock);
  }
  join();
  if (error_) std::rethrow_exception(error_);
}

void ReductionQueue::join() {
  if (stream_) make_wait(current_torch_stream(stream_->device()), *stream_);
  streams_.join();
}

}  // namespace zero
