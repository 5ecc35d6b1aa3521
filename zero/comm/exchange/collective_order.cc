// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/exchange/collective_order.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include "zero/base/streams.h"

namespace zero {

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
  // The stream waits, not the host. The operation waits once more, on the stream of its caller. The
  // first wait is that up to which ProcessGroupNCCL keeps the tensors alive.
  if (work) work->wait();
  for (const at::Tensor& tensor : used) tensor.record_stream(stream);
  return work;
}

}  // namespace zero
