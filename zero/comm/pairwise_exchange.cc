// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/pairwise_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <limits>
#include <utility>
#include <vector>

namespace zero {
namespace {

// Tags of operations are below this, as zero/comm/backends/shared_rows.h asks.
constexpr int kTags = 1 << 30;
// No operation reaches this tag: see hang_up().
constexpr int kHangUpTag = std::numeric_limits<int>::max();

// Returns the host memory that stands for `tensor`: these transports take no other.
at::Tensor staged(const at::Tensor& tensor, bool copy) {
  if (!tensor.is_cuda()) return tensor;
  at::Tensor host = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  if (copy) host.copy_(tensor);
  return host;
}

// Copies received data from `carrier` to the tensor that it was staged for.
void copy_back(const at::Tensor& tensor, const at::Tensor& carrier) {
  if (!carrier.is_same(tensor)) tensor.copy_(carrier, /*non_blocking=*/true);
}

// In rank order on every rank, so that all get the same bits at every run.
at::Tensor reduced(const at::Tensor& rows, c10d::ReduceOp::RedOpType op) {
  if (op == c10d::ReduceOp::MAX) return rows.amax(0);
  at::Tensor result = rows.select(0, 0).clone();
  for (int64_t r = 1; r < rows.size(0); ++r) {
    op == c10d::ReduceOp::BOR ? result.bitwise_or_(rows.select(0, r))
                              : result.add_(rows.select(0, r));
  }
  return result;
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

int64_t PairwiseExchange::bytes_to_peers(const at::Tensor& rows) const {
  return (world_size() - 1) * bytes_of(rows) / world_size();
}

int PairwiseExchange::new_tag() {
  const int tag = next_tag_;
  next_tag_ = (next_tag_ + 1) % kTags;
  return tag;
}

void PairwiseExchange::naming(int peer, c10::function_ref<void()> start) {
  try {
    start();
  } catch (...) {
    TORCH_CHECK(false, "lost rank ", peer, ": ", reason_of(std::current_exception()));
  }
}

void PairwiseExchange::send_row(const at::Tensor& row, int peer, int tag, Operation& operation) {
  naming(peer, [&] {
    std::vector<at::Tensor> tensors{row};
    operation.add_send(peer, backend().send(tensors, peer, tag));
  });
}

void PairwiseExchange::receive_row(const at::Tensor& into, int peer, int tag,
                                   Operation& operation) {
  naming(peer, [&] {
    std::vector<at::Tensor> tensors{into};
    operation.add_receive(peer, backend().recv(tensors, peer, tag));
  });
}

// All sends are posted at once, so that no peer waits for another one, and rank r begins with r+1,
// so that not all ranks begin with the same one. Sends come first: when a peer's receive reaches
// Gloo before the send for it, Gloo writes the data on the thread that called send(), and its event
// thread, which wants to read from that peer, spins meanwhile. A receive in wait() is seldom there
// before the peer's send at all: 3 to 6 % of a step's processor time on two cores.
int PairwiseExchange::send(c10::function_ref<at::Tensor(int peer)> row_to, Operation& operation) {
  const int tag = new_tag();
  for (int k = 1; k < world_size(); ++k) {
    const int peer = (rank() + k) % world_size();
    send_row(row_to(peer), peer, tag, operation);
  }
  return tag;
}

void PairwiseExchange::for_each_sender(c10::function_ref<void(int peer)> start) const {
  for (int k = 1; k < world_size(); ++k) start((rank() + world_size() - k) % world_size());
}

void PairwiseExchange::receive(int tag, const at::Tensor& into, Operation& operation) {
  for_each_sender([&](int peer) { receive_row(into.select(0, peer), peer, tag, operation); });
}

at::Tensor PairwiseExchange::start_exchange(const at::Tensor& rows, const at::Tensor& received,
                                            Operation& operation) {
  const at::Tensor from = staged(rows, /*copy=*/true);
  const at::Tensor into = staged(received, /*copy=*/false);
  const int tag = send([&](int peer) { return from.select(0, peer); }, operation);
  operation.on_wait([self = shared_from_this(), this, tag, into, &operation] {
    const at::NoGradGuard no_grad;
    const std::lock_guard<std::mutex> lock(mutex());
    receive(tag, into, operation);
  });
  return into;
}

int64_t PairwiseExchange::exchange(const at::Tensor& rows, const at::Tensor& received,
                                   Operation& operation) {
  const at::Tensor into = start_exchange(rows, received, operation);
  operation.on_success([rows, received, into] { copy_back(received, into); });
  return bytes_to_peers(rows);
}

int64_t PairwiseExchange::reduction_bytes(const at::Tensor& rows) const { return bytes_of(rows); }

int64_t PairwiseExchange::reduce(const at::Tensor& rows, const at::Tensor& buffer, UseRows use,
                                 Operation& operation) {
  const at::Tensor received = buffer.view(rows.scalar_type()).view(rows.sizes());
  const at::Tensor into = start_exchange(rows, received, operation);
  operation.on_received([rows, received, into, use = std::move(use), own = rank()] {
    copy_back(received, into);
    SummandRows summands;
    summands.dtype = rows.scalar_type();
    summands.count = rows.size(0);
    summands.received = received.const_data_ptr();
    summands.own_row = rows.select(0, own).const_data_ptr();
    summands.own = own;
    use(summands);
  });
  operation.on_success([rows, received] {});
  return bytes_to_peers(rows);
}

int64_t PairwiseExchange::gather(const at::Tensor& rows, Operation& operation) {
  const at::Tensor carrier = staged(rows, /*copy=*/true);
  const at::Tensor own = carrier.select(0, rank());
  operation.on_success([rows, carrier] { copy_back(rows, carrier); });
  const int tag = send([&](int) { return own; }, operation);
  receive(tag, carrier, operation);
  return bytes_to_peers(rows);
}

int64_t PairwiseExchange::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                     Operation& operation) {
  at::Tensor all = at::empty({world_size(), values.numel()}, values.options().device(at::kCPU));
  at::Tensor own = all.select(0, rank());
  own.copy_(values);
  operation.on_success([values, all, op] { values.copy_(reduced(all, op)); });
  const int tag = send([&](int) { return own; }, operation);
  receive(tag, all, operation);
  return (world_size() - 1) * bytes_of(values);
}

int64_t PairwiseExchange::broadcast(const at::Tensor& tensor, int source, Operation& operation) {
  std::vector<at::Tensor> carrier{staged(tensor, rank() == source)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.timeout = timeout();
  operation.on_success([tensor, carrier = carrier[0]] { copy_back(tensor, carrier); });
  operation.add_whole(backend().broadcast(carrier, options), /*stream=*/false);
  return rank() == source ? (world_size() - 1) * bytes_of(tensor) : 0;
}

// Gloo closes the connections of the whole group when one wait times out, and has no other call
// for that: its abort() does nothing. So wait for a message that is never sent.
void PairwiseExchange::hang_up() noexcept {
  try {
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    c10::intrusive_ptr<c10d::Work> work;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      work = backend().recv(nothing, (rank() + 1) % world_size(), kHangUpTag);
    }
    work->wait(std::chrono::milliseconds(1));
  } catch (...) {  // This is how it succeeds.
  }
  RowExchange::hang_up();
}

}  // namespace zero
