// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/reduction_queue.h"

#include <utility>

#include "kernels/sum_rows.h"
#include "zero/device_stream.h"

namespace zero {
namespace {

// shard (+)= scale * the sum over ranks, where `received` is [world_size, n] with
// the other ranks' rows, or [n] where the transport has summed them already.
void sum(const Reduction& reduction, const at::Tensor& received) {
  const bool summed = reduction.group == nullptr || received.dim() == 1;
  kernels::SumRowsArgs args;
  args.world_size = summed ? 1 : reduction.group->world_size();
  args.own_rank = summed ? 0 : reduction.group->rank();
  args.numel = reduction.shard.numel();
  args.dtype = reduction.rows.scalar_type();
  if (received.defined() && summed) {
    args.own = received.const_data_ptr();
  } else {
    args.received = received.defined() ? received.const_data_ptr() : nullptr;
    args.own = static_cast<const char*>(reduction.rows.const_data_ptr()) +
               args.own_rank * args.numel * reduction.rows.element_size();
  }
  args.scale = reduction.scale;
  args.shard = reduction.shard.mutable_data_ptr<float>();
  args.accumulate = reduction.accumulate;
  kernels::sum_rows(args, current_stream(reduction.shard.device()));
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
  if (reduction.group == nullptr || reduction.group->world_size() == 1) {
    reduction.group = nullptr;
    sum(reduction, at::Tensor());
    pool_.give(reduction.rows);
    return;
  }
  const bool on_stream = reduction.rows.is_cuda();
  std::unique_lock<std::mutex> lock(mutex_);
  if (error_) return;  // drain() reports it; nothing more is sent
  waiting_.push_back(std::move(reduction));
  if (on_stream && under_way_.size() == static_cast<size_t>(kExchangesInFlight)) finish_front(lock);
  start_waiting();
  if (on_stream) return;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void ReductionQueue::start_waiting() {
  while (!error_ && !stop_ && !waiting_.empty() &&
         under_way_.size() < static_cast<size_t>(kExchangesInFlight)) {
    Exchange exchange{std::move(waiting_.front()), {}, {}};
    waiting_.pop_front();
    const Reduction& r = exchange.reduction;
    try {
      if (r.group->has_native_reduce_scatter(r.rows.scalar_type())) {
        exchange.received = pool_.take(r.rows.size(1), r.rows.scalar_type());
        exchange.pending = r.group->reduce_scatter_rows(r.rows, exchange.received, r.label);
      } else {
        exchange.received =
            pool_.take(r.rows.numel(), r.rows.scalar_type()).view({r.rows.size(0), r.rows.size(1)});
        exchange.pending = r.group->exchange_rows(r.rows, exchange.received, r.label);
      }
      under_way_.push_back(std::move(exchange));
    } catch (...) {
      error_ = std::current_exception();
    }
  }
}

void ReductionQueue::finish(Exchange& exchange) {
  exchange.pending.wait();
  sum(exchange.reduction, exchange.received);
  pool_.give(exchange.reduction.rows);
  pool_.give(exchange.received);
}

void ReductionQueue::finish_front(std::unique_lock<std::mutex>& lock) {
  // References into a deque stay valid while others push at its end.
  Exchange& exchange = under_way_.front();
  lock.unlock();
  std::exception_ptr error;
  try {
    finish(exchange);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error && !error_) error_ = error;
  under_way_.pop_front();
  // After an error the transport is gone: what is left can never arrive.
  if (error_) waiting_.clear();
}

void ReductionQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !under_way_.empty(); });
    if (under_way_.empty()) return;
    finish_front(lock);
    start_waiting();
    changed_.notify_all();
  }
}

void ReductionQueue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!worker_.joinable() && !under_way_.empty()) {
    finish_front(lock);
    start_waiting();
  }
  changed_.wait(lock, [this] { return error_ || (waiting_.empty() && under_way_.empty()); });
  if (error_) std::rethrow_exception(error_);
}

}  // namespace zero
