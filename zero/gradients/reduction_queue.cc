// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/reduction_queue.h"

#include <algorithm>
#include <string>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/memory/trace_range.h"

namespace zero {
namespace {

// shard (+)= scale * the sum of these rows.
void sum(const Reduction& reduction, const SummandRows& rows) {
  reduction.wire->decode_and_sum(rows, reduction.shard, reduction.scale, reduction.accumulate);
}

// An error of this rank alone, for want of memory perhaps: the peers wait for what will not come.
void end_group(Communicator& group, const std::exception_ptr& error) {
  if (!group.failed().empty()) return;
  std::string text = "unknown exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    text = error_text(known);
  } catch (...) {
  }
  group.abort(c10::str("a reduction failed on rank ", group.rank(), " of group \"", group.name(),
                       "\": ", text));
}

}  // namespace

ReductionQueue::~ReductionQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

void ReductionQueue::push(Reduction reduction) {
  if (reduction.group != nullptr && reduction.group->world_size() == 1) reduction.group = nullptr;
  if (reduction.group == nullptr) {
    SummandRows own;
    own.dtype = reduction.rows.scalar_type();
    own.own_row = reduction.rows.const_data_ptr();
    sum(reduction, own);
    pool_.give(reduction.rows);
    return;
  }
  const bool on_stream = reduction.shard.is_cuda();
  Lock lock(mutex_);
  if (error_) return;  // drain() reports it; nothing more is sent
  waiting_.push_back(std::move(reduction));
  if (on_stream && !has_room()) finish_front(lock);
  start_waiting(lock);
  if (on_stream) return;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  using Clock = std::chrono::steady_clock;
  if (std::exchange(done_at_push_, done_) != done_) patience_ = kPatience;
  const auto may_go = [this] { return error_ || waiting_.size() <= static_cast<size_t>(kWaiting); };
  const Clock::time_point begin = Clock::now();
  if (changed_.wait_for(lock, patience_, may_go)) return;
  patience_ = std::max(patience_ - (Clock::now() - begin), patience_.zero());
}

size_t ReductionQueue::buffers_kept(int64_t bucket_bytes) {
  const int64_t bytes = std::max<int64_t>(bucket_bytes, 1);
  const int64_t under_way =
      std::max<int64_t>(kExchangesInFlight, (kBytesInFlight + bytes - 1) / bytes);
  return static_cast<size_t>(2 * under_way + kWaiting + 2);
}

bool ReductionQueue::has_room() const {
  return under_way_.size() < static_cast<size_t>(kExchangesInFlight) ||
         bytes_under_way_ < kBytesInFlight;
}

// One thread at a time, so that exchanges start in order. Another that arrives meanwhile returns:
// the first looks again.
void ReductionQueue::start_waiting(Lock& lock) {
  if (starting_) return;
  starting_ = true;
  while (!error_ && !stop_ && !waiting_.empty() && has_room()) {
    Reduction reduction = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    Exchange exchange;
    std::exception_ptr error;
    Communicator& group = *reduction.group;
    try {
      exchange = start(std::move(reduction));
    } catch (...) {
      error = std::current_exception();
      end_group(group, error);
    }
    lock.lock();
    if (error) {
      if (!error_) error_ = error;
      waiting_.clear();
    } else {
      bytes_under_way_ += static_cast<int64_t>(exchange.reduction.rows.nbytes());
      under_way_.push_back(std::move(exchange));
    }
    changed_.notify_all();
  }
  starting_ = false;
  changed_.notify_all();
}

ReductionQueue::Exchange ReductionQueue::start(Reduction reduction) {
  Exchange exchange{std::move(reduction), {}, {}};
  const Reduction& r = exchange.reduction;
  const std::string label = "gradient bucket " + std::to_string(r.bucket);
  const RowValues values{r.wire, r.shard.numel()};
  const int64_t bytes = r.group->reduction_bytes(r.rows, values);
  if (bytes > 0) exchange.buffer = pool_.take(bytes, at::kByte);
  exchange.pending = r.group->reduce_rows(
      r.rows, exchange.buffer, [r](const SummandRows& rows) { sum(r, rows); }, label, values);
  return exchange;
}

void ReductionQueue::finish(Exchange& exchange) {
  const TraceRange range("reduce", exchange.reduction.bucket);
  exchange.pending.wait();  // And adds up.
  if (exchange.buffer.defined()) pool_.give(exchange.buffer);
  pool_.give(exchange.reduction.rows);
}

void ReductionQueue::finish_front(Lock& lock) {
  // References into a deque stay valid while others push at its end.
  Exchange& exchange = under_way_.front();
  const auto bytes = static_cast<int64_t>(exchange.reduction.rows.nbytes());
  lock.unlock();
  std::exception_ptr error;
  try {
    finish(exchange);
  } catch (...) {
    error = std::current_exception();
    end_group(*exchange.reduction.group, error);
  }
  lock.lock();
  ++done_;
  bytes_under_way_ -= bytes;
  if (error && !error_) error_ = error;
  under_way_.pop_front();
  // After an error the transport is gone: what is left can never arrive.
  if (error_) waiting_.clear();
}

void ReductionQueue::work() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !under_way_.empty(); });
    if (under_way_.empty()) return;
    finish_front(lock);
    start_waiting(lock);
    changed_.notify_all();
  }
}

void ReductionQueue::check() {
  const Lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void ReductionQueue::drain() {
  Lock lock(mutex_);
  while (!worker_.joinable() && !under_way_.empty()) {
    finish_front(lock);
    start_waiting(lock);
  }
  changed_.wait(
      lock, [this] { return error_ || (waiting_.empty() && under_way_.empty() && !starting_); });
  if (error_) std::rethrow_exception(error_);
}

}  // namespace zero
