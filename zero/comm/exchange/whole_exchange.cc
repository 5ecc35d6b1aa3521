// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Maps each operation to one collective of the backend, which is best on NCCL.
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <utility>

#include "zero/base/detached_call.h"
#include "zero/base/own_process.h"
#include "zero/comm/exchange/collective_order.h"
#include "zero/comm/exchange/row_exchange.h"

namespace zero {
namespace {

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// The destructor waits so long at most for the end of a backend.
constexpr std::chrono::milliseconds kEnd{10000};

// The current stream waits for operations on tensors of a GPU, never the host.
class WholeExchange : public BackendExchange {
 public:
  using BackendExchange::BackendExchange;

  ~WholeExchange() override {
    const auto limit = std::min(kEnd, timeout());
    if (!end_.valid() || end_.wait_for(limit) == std::future_status::ready) return;
    // Nor may it be destroyed when that thread lets it go: the process may be ending by then.
    static_cast<void>(new BackendPtr(backend_ptr()));
    TORCH_WARN("a communicator of rank ", rank(), " of ", world_size(), " does not end within ",
               limit.count(),
               " ms and is left behind. Does a CUDA graph live that captured its "
               "operations? Let graphs end before their optimizer");
  }

  SentBytes exchange(const at::Tensor& rows, const at::Tensor& received,
                     Operation& operation) override {
    start_all_to_all(rows, received, operation);
    return sent_rows(rows);
  }

  int64_t reduction_bytes(const Rows& rows, const RowValues& /*values*/) const override {
    return (summed_by_backend(rows) ? 1 : world_size()) * own_bytes(rows);
  }

  // Passes one row to `use` for fp32 rows of one length: the result of the backend's
  // reduce-scatter, unless sum_in_rank_order() was called. For other dtypes, whose partial sums the
  // backend would round, and for rows of different lengths, passes the rows of all ranks in rank
  // order.
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& /*values*/,
                   UseRows use, Operation& operation) override {
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

  // Rows of different lengths are broadcast, those that are not empty: in one section of a backend
  // that has sections, which is one launch on NCCL, else one after the other.
  SentBytes gather(const Rows& rows, const at::Tensor& /*before*/, Operation& operation) override {
    if (rows.equal()) {
      const at::Tensor& values = rows.values();
      at::Tensor all = values.contiguous();
      at::Tensor own = values.select(0, rank());
      if (!all.is_same(values)) operation.after_receiving([values, all] { values.copy_(all); });
      operation.at_end([values, all] {});
      start({all, own}, operation, [&] { return backend()._allgather_base(all, own); });
    } else {
      gather_by_broadcasts(rows, operation);
    }
    return sent_to_each(own_bytes(rows));
  }

  int64_t all_reduce_bytes(const at::Tensor& values) const override {
    return 2 * (world_size() - 1) * bytes_of(values) / world_size();
  }

  SentBytes all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                       Operation& operation) override {
    std::vector<at::Tensor> tensors{values};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    operation.at_end([values] {});
    start({values}, operation, [&] { return backend().allreduce(tensors, options); });
    const SentBytes one = sent_to_each(1);
    const int64_t bytes = all_reduce_bytes(values);
    return {bytes, one.all == 0 ? 0 : bytes * one.links / one.all};  // one rank sends nothing
  }

  SentBytes broadcast(const at::Tensor& tensor, int source, Operation& operation) override {
    operation.at_end([tensor] {});
    start({tensor}, operation, [&] { return start_broadcast(tensor, source); });
    return rank() == source ? sent_to_each(bytes_of(tensor)) : SentBytes();
  }

  bool waits_on_host(c10::Device device) const override { return device.is_cpu(); }
  void follow(const std::shared_ptr<CollectiveOrder>& order) override { order_ = order; }
  void sum_in_rank_order() override { in_rank_order_ = true; }

  Error error() noexcept override {
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

  // The ends of NCCL wait for kernels on the device, also for those of other communicators, and for
  // as long as a CUDA graph lives that captured an operation. So they run on a thread of their own,
  // which the destructor leaves behind in the end.
  void hang_up() noexcept override {
    try {
      end(&c10d::Backend::abort);
    } catch (...) {  // no thread is left
      BackendExchange::hang_up();
    }
  }
  void shutdown() override { end(&c10d::Backend::shutdown); }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Starts a collective that uses this memory, as a transfer of `operation`.
  void start(const std::vector<at::Tensor>& used, Operation& operation,
             const std::function<WorkPtr()>& collective) {
    const bool stream = !used.front().is_cpu();
    operation.add_whole(stream && order_ ? order_->run(used, collective) : collective(), stream);
  }

  void start_all_to_all(const Rows& rows, const at::Tensor& received, Operation& operation) {
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

  WorkPtr start_broadcast(const at::Tensor& tensor, int64_t source) {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return backend().broadcast(tensors, options);
  }

  void gather_by_broadcasts(const Rows& rows, Operation& operation) {
    const std::vector<int64_t>& sources = rows.lengths().filled();
    operation.at_end([rows] {});
    if (sources.size() < 2 || !backend().supportsCoalescing()) {
      for (const int64_t r : sources) {
        start({rows.values()}, operation, [&] { return start_broadcast(rows.row(r), r); });
      }
      return;
    }
    start({rows.values()}, operation, [&] {
      backend().startCoalescing();
      // An exception ends the section too: what the backend is asked for next would else wait in
      // it.
      auto at_error = c10::make_scope_exit([this] {
        try {
          backend().endCoalescing();
        } catch (...) {  // The exception before says more.
        }
      });
      for (const int64_t r : sources) start_broadcast(rows.row(r), r);
      at_error.release();
      return backend().endCoalescing();  // whose Work alone may be waited for
    });
  }

  void end(void (c10d::Backend::*how)()) {
    if (end_.valid()) return;
    end_ = start_detached([backend = backend_ptr(), how] { (*backend.*how)(); });
  }

  bool summed_by_backend(const Rows& rows) const {
    return !in_rank_order_ && rows.equal() && rows.values().scalar_type() == at::kFloat;
  }

  // Null: the backend alone orders its collectives.
  std::shared_ptr<CollectiveOrder> order_;
  bool in_rank_order_ = false;
  std::future<void> end_;  // valid from the first end on
};

}  // namespace

std::shared_ptr<RowExchange> make_whole_exchange(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                 std::chrono::milliseconds timeout,
                                                 BackendRanks ranks) {
  return make_owned<WholeExchange>(backend, timeout, std::move(ranks));
}

}  // namespace zero
