// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/pairwise_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/row_changes.h"
#include "zero/base/error_text.h"
#include "zero/comm/exchange/changed_row.h"
#include "zero/comm/exchange/doubling_steps.h"

namespace zero {
namespace {

// No operation reaches this tag.
constexpr int kWatchTag = std::numeric_limits<int>::max() - 1;

// Returns the host memory that stands for `tensor`: these transports take no other.
at::Tensor staged(const at::Tensor& tensor, bool copy) {
  if (tensor.is_cpu()) return tensor;
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

PairwiseExchange::PairwiseExchange(BackendPtr backend, std::chrono::milliseconds timeout,
                                   BackendRanks ranks)
    : BackendExchange(std::move(backend), timeout, std::move(ranks)),
      watch_(this->backend(), mutex(), kWatchTag, timeout) {}

void PairwiseExchange::naming(int peer, c10::function_ref<void()> start) const {
  try {
    start();
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) throw;  // which says nothing about the peer
    throw_communication_error(c10::str("lost rank ", name_of(peer), ": ", error_line(error)));
  }
}

void PairwiseExchange::send_row(const at::Tensor& row, int peer, int tag, Operation& operation) {
  if (row.numel() == 0) return;
  naming(peer, [&] {
    std::vector<at::Tensor> tensors{row};
    operation.add_send(name_of(peer), backend().send(tensors, peer, tag));
  });
}

void PairwiseExchange::receive_row(const at::Tensor& into, int peer, int tag,
                                   Operation& operation) {
  if (into.numel() == 0) return;
  naming(peer, [&] {
    std::vector<at::Tensor> tensors{into};
    operation.add_receive(name_of(peer), backend().recv(tensors, peer, tag));
  });
}

// All sends are posted at once, so that no peer waits for another one, and rank r begins with r+1,
// so that not all ranks begin with the same one.
//
// Over links receives come first. Gloo sends data once the peer has a receive for it, and says so
// on the connection that data takes: behind a row of its own that is being sent, the peer would
// learn of it too late, and the link would be used in one direction at a time. On one machine sends
// come first: when a peer's receive reaches Gloo before the send for it, Gloo writes the data on
// the thread that called send(), and its event thread, which wants to read from that peer, spins
// meanwhile. A receive in wait() is seldom there before the peer's send at all: 3 to 6 % of a
// step's processor time on two cores.
void PairwiseExchange::send(int tag, Operation& operation,
                            c10::function_ref<at::Tensor(int peer)> row_to) {
  for (int k = 1; k < world_size(); ++k) {
    const int peer = (rank() + k) % world_size();
    send_row(row_to(peer), peer, tag, operation);
  }
}

void PairwiseExchange::for_each_sender(c10::function_ref<void(int peer)> start) const {
  for (int k = 1; k < world_size(); ++k) start((rank() + world_size() - k) % world_size());
}

void PairwiseExchange::receive(int tag, const Rows& into, Operation& operation) {
  for_each_sender([&](int peer) { receive_row(into.row(peer), peer, tag, operation); });
}

at::Tensor PairwiseExchange::start_exchange(const Rows& rows, const at::Tensor& received,
                                            Operation& operation) {
  const Rows from = rows.of(staged(rows.values(), /*copy=*/true));
  const at::Tensor into = staged(received, /*copy=*/false);
  const int tag = operation.take_tags();
  if (over_links()) receive(tag, into, operation);
  send(tag, operation, [&](int peer) { return from.row(peer); });
  if (!over_links()) {
    operation.before_receiving([self = shared_from_this(), this, tag, into, &operation] {
      const std::lock_guard<std::mutex> lock(mutex());
      receive(tag, into, operation);
    });
  }
  return into;
}

SentBytes PairwiseExchange::exchange(const at::Tensor& rows, const at::Tensor& received,
                                     Operation& operation) {
  const at::Tensor into = start_exchange(rows, received, operation);
  // Not after the sends: a second level begins with what was received.
  operation.after_receiving([received, into] { copy_back(received, into); });
  operation.at_end([rows] {});
  return sent_rows(rows);
}

int64_t PairwiseExchange::reduction_bytes(const Rows& rows, const RowValues& /*values*/) const {
  return world_size() * own_bytes(rows);
}

SentBytes PairwiseExchange::reduce(const Rows& rows, const at::Tensor& buffer,
                                   const RowValues& /*values*/, UseRows use, Operation& operation) {
  const at::Tensor received = received_in(buffer, rows);
  const at::Tensor into = start_exchange(rows, received, operation);
  operation.after_receiving(
      [row = rows.row(rank()), received, into, use = std::move(use), own = rank()] {
        if (row.numel() == 0) return;
        copy_back(received, into);
        SummandRows summands;
        summands.dtype = row.scalar_type();
        summands.count = received.size(0);
        summands.received = received.const_data_ptr();
        summands.own_row = row.const_data_ptr();
        summands.own = own;
        use(summands);
      });
  operation.at_end([rows, received] {});
  return sent_rows(rows);
}

bool PairwiseExchange::sends_changes(c10::ScalarType dtype, c10::Device device) const {
  return over_links() && device.is_cpu() && kernels::has_changes(dtype);
}

SentBytes PairwiseExchange::gather_changes(const Rows& rows, const at::Tensor& before,
                                           Operation& operation) {
  const int tag = operation.take_tags();
  std::vector<at::Tensor> received(world_size());
  for_each_sender([&](int peer) {
    const at::Tensor row = rows.row(peer);
    if (row.numel() == 0) return;
    received[peer] = at::empty({max_changed_row_bytes(row)}, at::kByte);
    receive_row(received[peer], peer, tag, operation);
  });
  const at::Tensor own = rows.row(rank());
  const ChangedRow message = own.numel() > 0 ? encode_changed_row(before, own) : ChangedRow{own};
  SentBytes sent;
  send(tag, operation, [&](int peer) {
    const int64_t bytes = may_be_shorter(peer) ? message.bytes : bytes_of(message.memory);
    add_sent(peer, bytes, sent);
    return message.memory.narrow(0, 0, bytes);
  });
  operation.after_receiving([self = shared_from_this(), this, rows, received] {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (!received[peer].defined()) continue;
      apply_changed_row(received[peer], c10::str("rank ", name_of(peer)), rows.row(peer));
    }
  });
  operation.at_end([message] {});
  return sent;
}

SentBytes PairwiseExchange::gather(const Rows& rows, const at::Tensor& before,
                                   Operation& operation) {
  if (before.defined()) return gather_changes(rows, before, operation);
  const Rows carrier = rows.of(staged(rows.values(), /*copy=*/false));
  const at::Tensor own = carrier.row(rank());
  if (!carrier.values().is_same(rows.values())) own.copy_(rows.row(rank()));
  operation.after_receiving([rows, carrier] { copy_back(rows.values(), carrier.values()); });
  operation.at_end([carrier] {});
  const int tag = operation.take_tags();
  if (over_links()) receive(tag, carrier, operation);
  send(tag, operation, [&](int) { return own; });
  if (!over_links()) receive(tag, carrier, operation);
  return sent_to_each(own_bytes(rows));
}

int64_t PairwiseExchange::all_reduce_bytes(const at::Tensor& values) const {
  if (world_size() <= kAllWithAll) return (world_size() - 1) * bytes_of(values);
  const auto steps = doubling_steps(rank(), world_size());
  const auto sends =
      std::count_if(steps.begin(), steps.end(), [](const DoublingStep& s) { return s.sends; });
  return sends * bytes_of(values);
}

SentBytes PairwiseExchange::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                       Operation& operation) {
  return world_size() <= kAllWithAll ? all_with_all(values, op, operation)
                                     : recursive_doubling(values, op, operation);
}

SentBytes PairwiseExchange::all_with_all(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                         Operation& operation) {
  at::Tensor all = at::empty({world_size(), values.numel()}, values.options().device(at::kCPU));
  at::Tensor own = all.select(0, rank());
  own.copy_(values);
  const int tag = operation.take_tags();
  send(tag, operation, [&](int) { return own; });
  receive(tag, all, operation);
  operation.after_receiving([values, all, op] { values.copy_(reduced(all, op)); });
  operation.at_end([all] {});
  return sent_to_each(bytes_of(values));
}

struct PairwiseExchange::Doubling {
  std::vector<DoublingStep> steps;
  int tag;              // the first one
  at::Tensor known;     // [steps + 1, n]: before each step, since it may be sent until the end
  at::Tensor received;  // [n]
  at::Tensor result;    // [n]
  c10d::ReduceOp::RedOpType op;
};

SentBytes PairwiseExchange::recursive_doubling(const at::Tensor& values,
                                               c10d::ReduceOp::RedOpType op, Operation& operation) {
  auto doubling = std::make_shared<Doubling>();
  doubling->steps = doubling_steps(rank(), world_size());
  doubling->tag = operation.take_tags(kDoublingTags);
  const auto count = static_cast<int64_t>(doubling->steps.size());
  const auto options = values.options().device(at::kCPU);
  doubling->known = at::empty({count + 1, values.numel()}, options);
  doubling->received = at::empty({values.numel()}, options);
  doubling->result = values;
  doubling->op = op;
  doubling->known.select(0, 0).copy_(values);
  operation.before_receiving([self = shared_from_this(), this, doubling, &operation] {
    start_doubling_step(0, doubling, operation);
  });
  operation.at_end([doubling] {});
  SentBytes sent;
  for (const DoublingStep& step : doubling->steps) {
    if (step.sends) add_sent(step.peer, bytes_of(values), sent);
  }
  return sent;
}

void PairwiseExchange::start_doubling_step(size_t i, const std::shared_ptr<Doubling>& doubling,
                                           Operation& operation) {
  const at::Tensor before = doubling->known.select(0, static_cast<int64_t>(i));
  if (i == doubling->steps.size()) {
    doubling->result.copy_(before);
    return;
  }
  const DoublingStep& step = doubling->steps[i];
  {
    const std::lock_guard<std::mutex> lock(mutex());
    const int tag = doubling->tag + step.tag;
    if (step.sends) send_row(before, step.peer, tag, operation);
    if (step.receives) receive_row(doubling->received, step.peer, tag, operation);
  }
  operation.after_receiving(
      [self = shared_from_this(), this, i, before, step, doubling, &operation] {
        at::Tensor known = before;
        if (step.receives) known = doubling->received;
        if (step.combines) known = reduced(at::stack({before, doubling->received}), doubling->op);
        doubling->known.select(0, static_cast<int64_t>(i) + 1).copy_(known);
        start_doubling_step(i + 1, doubling, operation);
      });
}

SentBytes PairwiseExchange::broadcast(const at::Tensor& tensor, int source, Operation& operation) {
  const int world = world_size();
  // Not the tag of rows, so that a rank that calls another operation meanwhile waits: Gloo ends the
  // process when sizes differ.
  const int tag = operation.take_tags(2) + 1;
  const int place = (rank() - source + world) % world;
  // The lowest bit of this place is how far the rank that sends to it is from it, and twice as far
  // as the first that it sends to.
  int distance = 1;
  while (distance < world && (place & distance) == 0) distance *= 2;
  const at::Tensor carrier = staged(tensor, place == 0);
  const auto pass_on = [this, carrier, source, place, distance, world, tag, &operation] {
    for (int step = distance / 2; step > 0; step /= 2) {
      if (place + step < world) send_row(carrier, (source + place + step) % world, tag, operation);
    }
  };
  if (place == 0) {
    pass_on();
  } else {
    receive_row(carrier, (source + place - distance) % world, tag, operation);
    operation.after_receiving([self = shared_from_this(), this, pass_on] {
      const std::lock_guard<std::mutex> lock(mutex());
      pass_on();
    });
  }
  operation.after_receiving([tensor, carrier] { copy_back(tensor, carrier); });
  operation.at_end([carrier] {});
  return place == 0 ? sent_to_each(bytes_of(tensor)) : SentBytes();
}

bool PairwiseExchange::has_ended(int rank_name) noexcept {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && name_of(peer) == rank_name) return watch_.has_ended(peer);
  }
  return false;
}

}  // namespace zero
