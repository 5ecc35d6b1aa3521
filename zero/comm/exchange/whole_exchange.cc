// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/whole_exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "zero/base/detached_call.h"

namespace zero {
namespace {

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// The destructor waits so long at most for the end of a backend.
constexpr std::chrono::milliseconds kEnd{10000};

// Collectives of a backend that start together, with one launch on NCCL. Only the Work of end() may
// be waited for. An exception before it ends the section too: what the backend is asked for next
// would else wait in it.
class Section {
 public:
  explicit Section(c10d::Backend& backend) : backend_(backend) { backend_.startCoalescing(); }
  ~Section() {
    if (ended_) return;
    try {
      backend_.endCoalescing();
    } catch (...) {  // The exception before says more.
    }
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  c10::intrusive_ptr<c10d::Work> end() {
    ended_ = true;
    return backend_.endCoalescing();
  }

 private:
  c10d::Backend& backend_;
  bool ended_ = false;
};

}  // namespace

WholeExchange::~WholeExchange() {
  const auto limit = std::min(kEnd, timeout());
  if (!end_.valid() || end_.wait_for(limit) == std::future_status::ready) return;
  // Nor may it be destroyed when that thread lets it go: the process may be ending by then.
  static_cast<void>(new BackendPtr(backend_ptr()));
  TORCH_WARN("a communicator of rank ", rank(), " of ", world_size(), " does not end within ",
             limit.count(),
             " ms and is left behind. Does a CUDA graph live that captured its "
             "operations? Let graphs end before their optimizer");
}

RowExchange::Error WholeExchange::error() noexcept {
  try {
    switch (backend().getError()) {
      case c10d::ErrorType::SUCCESS:
        return {};
      case c10d::ErrorType::TIMEOUT:
        return {"a collective was not done in time: another rank does not come to it", true};
      default:
        return {"a connection failed, or a rank has ended"};
    }
  } catch (...) {  // a backend that cannot say
    return {};
  }
}

void WholeExchange::end(void (c10d::Backend::*how)()) {
  if (end_.valid()) return;
  end_ = start_detached([backend = backend_ptr(), how] {
    (*backend.*how)();
    return true;
  });
}

void WholeExchange::hang_up() noexcept {
  try {
    end(&c10d::Backend::abort);
  } catch (...) {  // no thread is left
    BackendExchange::hang_up();
  }
}

void WholeExchange::shutdown() { end(&c10d::Backend::shutdown); }

void WholeExchange::start(const std::vector<at::Tensor>& used, Operation& operation,
                          const Start& collective) {
  const bool stream = !used.front().is_cpu();
  operation.add_whole(stream && order_ ? order_->run(used, collective) : collective(), stream);
}

void WholeExchange::start_all_to_all(const Rows& rows, const at::Tensor& received,
                                     Operation& operation) {
  at::Tensor from = rows.values();
  at::Tensor into = received;
  std::vector<int64_t> sent_sizes, received_sizes;  // empty: equal
  if (!rows.equal()) {
    for (int r = 0; r < world_size(); ++r) sent_sizes.push_back(rows.lengths().numel(r));
    received_sizes.assign(world_size(), sent_sizes[rank()]);
    into = received.view({-1});
  }
  operation.at_end([rows, received] {});
  start({from, into}, operation,
        [&] { return backend().alltoall_base(into, from, received_sizes, sent_sizes); });
}

SentBytes WholeExchange::exchange(const at::Tensor& rows, const at::Tensor& received,
                                  Operation& operation) {
  start_all_to_all(rows, received, operation);
  return sent_rows(rows);
}

bool WholeExchange::summed_by_backend(const Rows& rows) const {
  return !in_rank_order_ && rows.equal() && rows.values().scalar_type() == at::kFloat;
}

int64_t WholeExchange::reduction_bytes(const Rows& rows, const RowValues& /*values*/) const {
  return (summed_by_backend(rows) ? 1 : world_size()) * own_bytes(rows);
}

SentBytes WholeExchange::reduce(const Rows& rows, const at::Tensor& buffer,
                                const RowValues& /*values*/, UseRows use, Operation& operation) {
  at::Tensor from = rows.values();
  const at::Tensor own = rows.row(rank());
  SummandRows summands;
  summands.dtype = from.scalar_type();
  if (summed_by_backend(rows)) {
    at::Tensor received = buffer.view(from.scalar_type());
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    operation.at_end([from, received] {});
    start({from, received}, operation,
          [&] { return backend()._reduce_scatter_base(received, from, options); });
    summands.own_row = received.const_data_ptr();
  } else {
    const at::Tensor received = received_in(buffer, rows);
    start_all_to_all(rows, received, operation);
    summands.count = world_size();
    summands.received = received.const_data_ptr();
    summands.own_row = own.const_data_ptr();
    summands.own = rank();
  }
  if (own.numel() > 0) {
    operation.after_receiving([summands, use = std::move(use)] { use(summands); });
  }
  return sent_rows(rows);
}

SentBytes WholeExchange::gather(const Rows& rows, const at::Tensor& /*before*/,
                                Operation& operation) {
  if (!rows.equal()) {
    gather_by_broadcasts(rows, operation);
    return sent_to_each(own_bytes(rows));
  }
  const at::Tensor& values = rows.values();
  at::Tensor all = values.contiguous();
  at::Tensor own = values.select(0, rank());
  if (!all.is_same(values)) operation.after_receiving([values, all] { values.copy_(all); });
  operation.at_end([values, all] {});
  start({all, own}, operation, [&] { return backend()._allgather_base(all, own); });
  return sent_to_each(own_bytes(rows));
}

int64_t WholeExchange::all_reduce_bytes(const at::Tensor& values) const {
  return 2 * (world_size() - 1) * bytes_of(values) / world_size();
}

SentBytes WholeExchange::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                    Operation& operation) {
  std::vector<at::Tensor> tensors{values};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  operation.at_end([values] {});
  start({values}, operation, [&] { return backend().allreduce(tensors, options); });
  const SentBytes one = sent_to_each(1);
  const int64_t bytes = all_reduce_bytes(values);
  return {bytes, bytes * one.links / one.all};
}

c10::intrusive_ptr<c10d::Work> WholeExchange::start_broadcast(const at::Tensor& tensor,
                                                              int source) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return backend().broadcast(tensors, options);
}

void WholeExchange::gather_by_broadcasts(const Rows& rows, Operation& operation) {
  const std::vector<int64_t>& sources = rows.lengths().filled();
  operation.at_end([rows] {});
  if (sources.size() < 2 || !backend().supportsCoalescing()) {
    for (const int64_t r : sources) {
      start({rows.values()}, operation,
            [&] { return start_broadcast(rows.row(r), static_cast<int>(r)); });
    }
    return;
  }
  start({rows.values()}, operation, [&] {
    Section section(backend());
    for (const int64_t r : sources) start_broadcast(rows.row(r), static_cast<int>(r));
    return section.end();
  });
}

SentBytes WholeExchange::broadcast(const at::Tensor& tensor, int source, Operation& operation) {
  operation.at_end([tensor] {});
  start({tensor}, operation, [&] { return start_broadcast(tensor, source); });
  return rank() == source ? sent_to_each(bytes_of(tensor)) : SentBytes();
}

}  // namespace zero
