// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/exchange/collective_order.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <chrono>

#include "zero/base/streams.h"

namespace zero {
namespace {

// Of a collective for which the stream of its order waits. It lets the stream of the caller wait
// for that one: a capture in a CUDA graph does not end before each stream that it has is waited
// for.
class OrderedWork : public c10d::Work {
 public:
  explicit OrderedWork(const c10::Stream& order) : ended_(order.device_type()) {
    ended_.record(order);
  }
  bool wait(std::chrono::milliseconds) override {
    ended_.block(current_torch_stream(ended_.device()));
    return true;
  }

 private:
  c10::Event ended_;
};

}  // namespace

c10::Stream CollectiveOrder::stream_of(c10::Device device) {
  if (!stream_) stream_ = new_stream(device);
  TORCH_INTERNAL_ASSERT(stream_->device() == device, "an order of collectives on ",
                        stream_->device(), " got one on ", device);
  return *stream_;
}

c10::Stream CollectiveOrder::stream(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stream_of(device);
}

CollectiveOrder::WorkPtr CollectiveOrder::run(const std::vector<at::Tensor>& used,
                                              const std::function<WorkPtr()>& start) {
  // Held to the end: between the start of one and the wait for it no other may start.
  const std::lock_guard<std::mutex> lock(mutex_);
  const c10::Stream stream = stream_of(used.front().device());
  make_wait(stream, current_torch_stream(stream.device()));
  const c10::StreamGuard guard(stream);
  WorkPtr work = start();
  // The stream waits, not the host. Up to this wait ProcessGroupNCCL keeps the tensors alive.
  if (work) {
    work->wait();
    work = c10::make_intrusive<OrderedWork>(stream);
  }
  for (const at::Tensor& tensor : used) tensor.record_stream(stream);
  return work;
}

}  // namespace zero
