// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>

#include "zero/base/own_process.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/operation.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// How the rows of a matrix travel.
enum class Style {
  kAlone,     // One rank: not at all.
  kPairwise,  // A send and a receive per peer. Fastest on Gloo, and a failed wait names its peer.
  kWhole,     // One collective of the backend: what NCCL does best.
};

// Tags of operations are below this, as zero/comm/backends/shared_rows.h asks.
constexpr int kTags = 1 << 30;
// No operation reaches this tag: see hang_up().
constexpr int kHangUpTag = std::numeric_limits<int>::max();

// The last two belong to tests/support/in_memory_backend.h: thousands of ranks in one thread, which
// no number of sends would suit, and threads that stand for NCCL.
Style style_of(const BackendPtr& backend) {
  if (!backend) return Style::kAlone;
  const std::string name = backend->getBackendName();
  // NCCL also does what one rank asks of it, so that one GPU is enough to try it.
  if (backend->getSize() == 1 && name != "nccl") return Style::kAlone;
  const bool whole = name == "nccl" || name == "zero-simulated" || name == "zero-memory-native";
  return whole ? Style::kWhole : Style::kPairwise;
}

void check_rows(const at::Tensor& rows, int world_size, const std::string& what) {
  TORCH_CHECK(
      rows.defined() && rows.dim() == 2 && rows.size(0) == world_size && rows.is_contiguous(), what,
      ": expected a contiguous tensor [world_size = ", world_size, ", n], got ",
      rows.defined() ? c10::str(rows.sizes(), " with strides ", rows.strides())
                     : std::string("an undefined tensor"));
}

// Where the bytes of `tensor` are while they travel: pairwise transports take host memory only.
at::Tensor staged(const at::Tensor& tensor, Style style, bool copy) {
  if (style != Style::kPairwise || !tensor.is_cuda()) return tensor;
  at::Tensor host = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  if (copy) host.copy_(tensor);
  return host;
}

// What to do when `carrier` has travelled for `tensor`: keeps both alive until then.
std::function<void()> settle(const at::Tensor& tensor, const at::Tensor& carrier) {
  return [tensor, carrier] {
    if (!carrier.is_same(tensor)) tensor.copy_(carrier, /*non_blocking=*/true);
  };
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

// Whether two contiguous tensors share memory; parts of one buffer need not.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

struct Communicator::Impl : std::enable_shared_from_this<Communicator::Impl> {
  Impl(BackendPtr backend_in, std::string name, milliseconds timeout);

  // Runs issue(backend, operation) under the lock that orders calls.
  template <typename Issue>
  Pending start(const std::string& what, Issue issue);
  // Sends row_to(peer) of the own data to each peer; returns the tag.
  template <typename RowTo>
  int send(c10d::Backend& transport, RowTo row_to, Operation& operation);
  // Calls start(peer) for each peer, in the order in which their rows arrive.
  template <typename Start>
  void for_each_sender(Start start);
  // Receives row `peer` of `into` from each peer.
  void receive(c10d::Backend& transport, int tag, const at::Tensor& into, Operation& operation);
  Pending gather(const at::Tensor& rows, const std::string& what, int64_t Traffic::*calls,
                 int64_t Traffic::*bytes);
  Pending all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                     const std::string& what);

  void hang_up() noexcept;
  // Refuses what would overtake queued reductions.
  void check_no_reductions(const std::string& what) const;
  void count(int64_t Traffic::*calls, int64_t Traffic::*bytes, int64_t sent);
  bool waits_on_stream(const at::Tensor& tensor) const {
    return style == Style::kWhole && tensor.is_cuda();
  }

  const Style style;
  const bool native_reduce_scatter;
  const int rank;
  const int world_size;
  const BackendPtr backend;           // Null for one rank alone.
  SharedMemoryBackend* const shared;  // The backend, if it is one.
  const std::shared_ptr<GroupHealth> health;
  milliseconds timeout() const { return health->timeout(); }

  // Between begin_reductions() and end_reductions().
  std::atomic<bool> reducing = false;

  // Held while an operation is handed to the backend: backends number their calls without locks,
  // and tags must be given out in the order of the calls.
  std::mutex issue_mutex;
  int next_tag = 0;

  std::mutex traffic_mutex;
  Traffic traffic;

  std::function<void(const std::string& reason)> on_failure;
};

Communicator::Impl::Impl(BackendPtr backend_in, std::string name, milliseconds timeout)
    : style(style_of(backend_in)),
      native_reduce_scatter(style == Style::kWhole),
      rank(backend_in ? backend_in->getRank() : 0),
      world_size(backend_in ? backend_in->getSize() : 1),
      backend(std::move(backend_in)),
      shared(dynamic_cast<SharedMemoryBackend*>(backend.get())),
      health(std::make_shared<GroupHealth>(rank, world_size, std::move(name), timeout)) {}

// Gloo closes the connections of the whole group when one wait times out, and has no other call
// for that: its abort() does nothing. So wait for something that nobody sends.
void Communicator::Impl::hang_up() noexcept {
  if (style == Style::kAlone) return;
  try {
    if (style == Style::kPairwise) {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      c10::intrusive_ptr<c10d::Work> work;
      {
        const std::lock_guard<std::mutex> lock(issue_mutex);
        work = backend->recv(nothing, (rank + 1) % world_size, kHangUpTag);
      }
      work->wait(milliseconds(1));
    }
  } catch (...) {  // This is how it succeeds.
  }
  try {
    backend->abort();
  } catch (...) {  // A backend that cannot even stop leaves nothing to be done.
  }
}

void Communicator::Impl::check_no_reductions(const std::string& what) const {
  TORCH_INTERNAL_ASSERT(!reducing, what,
                        ": started while gradient reductions are queued; complete them first",
                        health->where());
}

void Communicator::Impl::count(int64_t Traffic::*calls, int64_t Traffic::*bytes, int64_t sent) {
  const std::lock_guard<std::mutex> lock(traffic_mutex);
  traffic.*calls += 1;
  traffic.*bytes += sent;
}

template <typename Issue>
Pending Communicator::Impl::start(const std::string& what, Issue issue) {
  const at::NoGradGuard no_grad;
  health->check(what);
  auto operation = make_owned<Operation>(health, what);
  std::exception_ptr thrown;
  {
    const std::lock_guard<std::mutex> lock(issue_mutex);
    try {
      issue(*backend, *operation);
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown) {
    operation->cancel();
    const std::string message =
        c10::str(what, ": could not start: ", reason_of(thrown), health->where());
    health->fail(message);
    TORCH_CHECK(false, message);
  }
  return Pending([operation] { operation->wait(); });
}

// All sends are posted at once, so that no peer waits for another one, and rank r begins with r+1,
// so that not everybody begins with the same rank. Sends come first: when a peer's receive reaches
// Gloo before the send for it, Gloo writes the data on the thread that called send(), and its event
// thread, which wants to read from that peer, spins meanwhile. A receive in wait() is seldom there
// before the peer's send at all: 3 to 6 % of a step's processor time on two cores.
template <typename RowTo>
int Communicator::Impl::send(c10d::Backend& transport, RowTo row_to, Operation& operation) {
  const int tag = next_tag;
  next_tag = (next_tag + 1) % kTags;
  int peer = rank;
  try {
    for (int k = 1; k < world_size; ++k) {
      peer = (rank + k) % world_size;
      std::vector<at::Tensor> row{row_to(peer)};
      operation.add_send(peer, transport.send(row, peer, tag));
    }
  } catch (...) {
    TORCH_CHECK(false, "lost rank ", peer, ": ", reason_of(std::current_exception()));
  }
  return tag;
}

template <typename Start>
void Communicator::Impl::for_each_sender(Start start) {
  int peer = rank;
  try {
    for (int k = 1; k < world_size; ++k) {
      peer = (rank + world_size - k) % world_size;
      start(peer);
    }
  } catch (...) {
    TORCH_CHECK(false, "lost rank ", peer, ": ", reason_of(std::current_exception()));
  }
}

void Communicator::Impl::receive(c10d::Backend& transport, int tag, const at::Tensor& into,
                                 Operation& operation) {
  for_each_sender([&](int peer) {
    std::vector<at::Tensor> row{into.select(0, peer)};
    operation.add_receive(peer, transport.recv(row, peer, tag));
  });
}

Pending Communicator::Impl::gather(const at::Tensor& rows, const std::string& what,
                                   int64_t Traffic::*calls, int64_t Traffic::*bytes) {
  check_rows(rows, world_size, what);
  check_no_reductions(what);
  if (style == Style::kAlone) return Pending([] {});
  Pending pending = start(what, [&](c10d::Backend& transport, Operation& operation) {
    if (rows.numel() == 0) return;
    at::Tensor carrier = staged(rows, style, /*copy=*/true);
    at::Tensor own = carrier.select(0, rank);
    operation.then(settle(rows, carrier));
    if (style == Style::kPairwise) {
      const int tag = send(
          transport, [&](int) { return own; }, operation);
      return receive(transport, tag, carrier, operation);
    }
    c10d::AllgatherOptions options;
    options.timeout = timeout();
    operation.add_whole(transport._allgather_base(carrier, own, options), waits_on_stream(rows));
  });
  count(calls, bytes, (world_size - 1) * bytes_of(rows) / world_size);
  return pending;
}

// Pairwise as an exchange of all values with all ranks: they are few, a ring would take 2(W-1)
// delays one after the other instead of one, and a rank that is missing is named.
Pending Communicator::Impl::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                       const std::string& what) {
  TORCH_CHECK(values.dim() == 1 && values.is_contiguous(), what,
              ": expected a contiguous 1-D tensor, got ", values.sizes());
  check_no_reductions(what);
  if (style == Style::kAlone) return Pending([] {});
  Pending pending = start(what, [&](c10d::Backend& transport, Operation& operation) {
    if (values.numel() == 0) return;
    if (style == Style::kPairwise) {
      at::Tensor all = at::empty({world_size, values.numel()}, values.options().device(at::kCPU));
      at::Tensor own = all.select(0, rank);
      own.copy_(values);
      operation.then([values, all, op] { values.copy_(reduced(all, op)); });
      const int tag = send(
          transport, [&](int) { return own; }, operation);
      return receive(transport, tag, all, operation);
    }
    std::vector<at::Tensor> tensors{values};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    options.timeout = timeout();
    operation.then(settle(values, values));
    operation.add_whole(transport.allreduce(tensors, options), waits_on_stream(values));
  });
  const int64_t sent = style == Style::kPairwise
                           ? (world_size - 1) * bytes_of(values)
                           : 2 * (world_size - 1) * bytes_of(values) / world_size;
  count(&Traffic::small_calls, &Traffic::small_bytes_sent, sent);
  return pending;
}

Communicator::Communicator(BackendPtr backend, std::string name, milliseconds timeout)
    : impl_(make_owned<Impl>(std::move(backend), std::move(name), timeout)) {
  impl_->health->on_first_failure([impl = std::weak_ptr<Impl>(impl_)](const std::string& reason) {
    const auto alive = impl.lock();
    if (!alive) return;
    if (alive->on_failure) alive->on_failure(reason);
    alive->hang_up();
  });
}

Communicator::~Communicator() {
  if (!impl_->health->in_own_process()) return;
  // Gloo's destructor waits for its collectives, for as long as their timeouts say.
  if (impl_->health->operations_under_way() > 0) {
    impl_->health->fail("destroyed with operations under way" + impl_->health->where());
  }
  if (impl_->style == Style::kAlone || !failed().empty()) return;
  try {
    impl_->backend->shutdown();  // NCCL complains about a group that ends without.
  } catch (...) {                // A destructor has nobody to tell.
  }
}

int Communicator::rank() const { return impl_->rank; }
int Communicator::world_size() const { return impl_->world_size; }
const std::string& Communicator::name() const { return impl_->health->name(); }
std::string Communicator::failed() const { return impl_->health->first_failure(); }

Traffic Communicator::traffic() const {
  const std::lock_guard<std::mutex> lock(impl_->traffic_mutex);
  return impl_->traffic;
}

bool Communicator::has_native_reduce_scatter(c10::ScalarType dtype) const {
  return impl_->native_reduce_scatter && dtype == at::kFloat;
}

at::Tensor Communicator::allocate(int64_t bytes) const {
  const bool host = impl_->style == Style::kPairwise && impl_->backend->supportsTensorAlloc(0);
  return host ? impl_->backend->allocateTensor(bytes, at::kByte) : at::Tensor();
}

Pending Communicator::exchange_rows(const at::Tensor& rows, const at::Tensor& received,
                                    const std::string& label) {
  const std::string what = "exchange_rows of " + label;
  check_rows(rows, impl_->world_size, what);
  check_rows(received, impl_->world_size, what);
  TORCH_CHECK(rows.sizes() == received.sizes() && rows.dtype() == received.dtype() &&
                  rows.device() == received.device(),
              what, ": expected two tensors of one shape, dtype and device, got ", rows.sizes(),
              " ", rows.dtype(), " on ", rows.device(), " and ", received.sizes(), " ",
              received.dtype(), " on ", received.device());
  TORCH_CHECK(rows.numel() == 0 || !overlap(rows, received), what,
              ": `received` must not share memory with `rows`, which is still being sent");
  if (impl_->style == Style::kAlone) return Pending([] {});
  Pending pending = impl_->start(what, [&](c10d::Backend& transport, Operation& operation) {
    if (rows.numel() == 0) return;
    at::Tensor from = staged(rows, impl_->style, /*copy=*/true);
    at::Tensor into = staged(received, impl_->style, /*copy=*/false);
    operation.then([rows, done = settle(received, into)] { done(); });
    if (impl_->style == Style::kPairwise) {
      const int tag = impl_->send(
          transport, [&](int peer) { return from.select(0, peer); }, operation);
      operation.before([impl = impl_, tag, into, &operation] {
        const at::NoGradGuard no_grad;
        const std::lock_guard<std::mutex> lock(impl->issue_mutex);
        impl->receive(*impl->backend, tag, into, operation);
      });
      return;
    }
    std::vector<int64_t> equal_splits;
    c10d::AllToAllOptions options;
    options.timeout = impl_->timeout();
    operation.add_whole(transport.alltoall_base(into, from, equal_splits, equal_splits, options),
                        impl_->waits_on_stream(rows));
  });
  impl_->count(&Traffic::exchange_calls, &Traffic::exchange_bytes_sent,
               (impl_->world_size - 1) * bytes_of(rows) / impl_->world_size);
  return pending;
}

bool Communicator::reads_in_place(const at::Tensor& rows) const {
  if (impl_->shared == nullptr || rows.is_cuda()) return false;
  for (int peer = 0; peer < impl_->world_size; ++peer) {
    const bool own = peer == impl_->rank;
    if (!own && !impl_->shared->reads(peer, bytes_of(rows) / impl_->world_size)) return false;
  }
  return true;
}

Pending Communicator::exchange_in_place(const at::Tensor& rows, UseRows use,
                                        const std::string& label) {
  const std::string what = "exchange_in_place of " + label;
  check_rows(rows, impl_->world_size, what);
  TORCH_CHECK(reads_in_place(rows), what, ": expected rows that every rank can read in place, got ",
              rows.sizes(), " ", rows.dtype(), "; use exchange_rows", impl_->health->where());
  using Row = c10::intrusive_ptr<SharedMemoryBackend::Row>;
  auto received = std::make_shared<std::vector<Row>>(impl_->world_size);
  Pending pending = impl_->start(what, [&](c10d::Backend& transport, Operation& operation) {
    const int tag = impl_->send(
        transport, [&](int peer) { return rows.select(0, peer); }, operation);
    operation.before([impl = impl_, rows, received, tag, &operation] {
      const std::lock_guard<std::mutex> lock(impl->issue_mutex);
      impl->for_each_sender([&](int peer) {
        Row& row = (*received)[peer];
        row = impl->shared->receive_in_place(bytes_of(rows) / impl->world_size, peer, tag);
        operation.add_receive(peer, row);
      });
    });
    operation.between([rows, received, use = std::move(use)] {
      std::vector<const void*> addresses;
      for (int64_t r = 0; r < rows.size(0); ++r) {
        const Row& row = (*received)[r];
        addresses.push_back(row ? row->address() : rows.select(0, r).const_data_ptr());
      }
      use(addresses);
      for (const Row& row : *received) {
        if (row) row->release();
      }
    });
  });
  impl_->count(&Traffic::exchange_calls, &Traffic::exchange_bytes_sent,
               (impl_->world_size - 1) * bytes_of(rows) / impl_->world_size);
  return pending;
}

Pending Communicator::reduce_scatter_rows(const at::Tensor& rows, const at::Tensor& row,
                                          const std::string& label) {
  const std::string what = "reduce_scatter_rows of " + label;
  check_rows(rows, impl_->world_size, what);
  TORCH_CHECK(row.dim() == 1 && row.is_contiguous() && row.numel() == rows.size(1) &&
                  row.dtype() == rows.dtype() && row.device() == rows.device(),
              what, ": expected a row of ", rows.size(1), " ", rows.dtype(), " on ", rows.device(),
              ", got ", row.sizes(), " ", row.dtype(), " on ", row.device());
  if (impl_->style == Style::kAlone) {
    const at::NoGradGuard no_grad;
    row.copy_(rows.select(0, 0));
    return Pending([] {});
  }
  TORCH_CHECK(has_native_reduce_scatter(rows.scalar_type()), what,
              ": this transport has no reduce-scatter of its own for ", rows.dtype(),
              "; use exchange_rows and add the rows", impl_->health->where());
  Pending pending = impl_->start(what, [&](c10d::Backend& transport, Operation& operation) {
    if (rows.numel() == 0) return;
    at::Tensor from = rows;
    at::Tensor into = row;
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    options.timeout = impl_->timeout();
    operation.then([rows, row] {});
    operation.add_whole(transport._reduce_scatter_base(into, from, options),
                        impl_->waits_on_stream(rows));
  });
  impl_->count(&Traffic::exchange_calls, &Traffic::exchange_bytes_sent,
               (impl_->world_size - 1) * bytes_of(row));
  return pending;
}

Pending Communicator::gather_rows(const at::Tensor& rows, const std::string& label) {
  return impl_->gather(rows, "gather_rows of " + label, &Traffic::gather_calls,
                       &Traffic::gather_bytes_sent);
}

Pending Communicator::all_reduce_sum(const at::Tensor& values, const std::string& label) {
  const std::string what = "all_reduce_sum of " + label;
  TORCH_CHECK(values.scalar_type() == at::kDouble, what, ": expected double, got ", values.dtype());
  return impl_->all_reduce(values, c10d::ReduceOp::SUM, what);
}

Pending Communicator::all_reduce_max(const at::Tensor& values, const std::string& label) {
  const std::string what = "all_reduce_max of " + label;
  TORCH_CHECK(values.scalar_type() == at::kLong || values.scalar_type() == at::kInt, what,
              ": expected int64 or int32, got ", values.dtype(),
              ". A maximum of floats would lose NaN on Gloo: send their bit patterns");
  return impl_->all_reduce(values, c10d::ReduceOp::MAX, what);
}

Pending Communicator::all_reduce_or(const at::Tensor& values, const std::string& label) {
  const std::string what = "all_reduce_or of " + label;
  TORCH_CHECK(values.scalar_type() == at::kInt, what, ": expected int32, got ", values.dtype());
  return impl_->all_reduce(values, c10d::ReduceOp::BOR, what);
}

Pending Communicator::broadcast(const at::Tensor& tensor, int source, const std::string& label) {
  const std::string what = "broadcast of " + label + " from rank " + std::to_string(source);
  TORCH_CHECK(tensor.is_contiguous(), what, ": expected a contiguous tensor, got strides ",
              tensor.strides(), " for ", tensor.sizes());
  TORCH_CHECK(0 <= source && source < impl_->world_size, what, ": expected a source in [0, ",
              impl_->world_size, "), got ", source, impl_->health->where());
  impl_->check_no_reductions(what);
  if (impl_->style == Style::kAlone) return Pending([] {});
  Pending pending = impl_->start(what, [&](c10d::Backend& transport, Operation& operation) {
    if (tensor.numel() == 0) return;
    std::vector<at::Tensor> carrier{staged(tensor, impl_->style, impl_->rank == source)};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    options.timeout = impl_->timeout();
    operation.then(settle(tensor, carrier[0]));
    operation.add_whole(transport.broadcast(carrier, options), impl_->waits_on_stream(tensor));
  });
  const int64_t sent = impl_->rank == source ? impl_->world_size - 1 : 0;
  impl_->count(&Traffic::small_calls, &Traffic::small_bytes_sent, sent * bytes_of(tensor));
  return pending;
}

// Both buffers start out with the own values in every row, so that a simulated transport, which
// moves no data, stands for ranks that all say the same.
std::vector<std::string> Communicator::all_gather_text(const std::string& text,
                                                       const std::string& label) {
  const std::string what = "all_gather_text of " + label;
  if (impl_->style == Style::kAlone) return {text};
  const int64_t world = impl_->world_size;
  const auto device = impl_->backend->getBoundDeviceId().value_or(at::kCPU);
  at::Tensor lengths = at::empty({world, 1}, at::TensorOptions(at::kLong).device(device));
  lengths.fill_(static_cast<int64_t>(text.size()));
  impl_->gather(lengths, what, &Traffic::small_calls, &Traffic::small_bytes_sent).wait();
  lengths = lengths.to(at::kCPU);
  const int64_t longest = lengths.max().item<int64_t>();

  at::Tensor own = at::zeros({1, longest}, at::kByte);
  std::copy(text.begin(), text.end(), own.mutable_data_ptr<uint8_t>());
  at::Tensor padded = own.expand({world, longest}).contiguous().to(device);
  impl_->gather(padded, what, &Traffic::small_calls, &Traffic::small_bytes_sent).wait();
  padded = padded.to(at::kCPU);

  std::vector<std::string> texts;
  for (int64_t r = 0; r < world; ++r) {
    const auto* begin =
        reinterpret_cast<const char*>(padded.const_data_ptr<uint8_t>()) + r * longest;
    texts.emplace_back(begin, static_cast<size_t>(lengths[r].item<int64_t>()));
  }
  return texts;
}

void Communicator::begin_reductions() { impl_->reducing = true; }
void Communicator::end_reductions() { impl_->reducing = false; }

void Communicator::abort(const std::string& reason) noexcept { impl_->health->fail(reason); }

void Communicator::on_failure(std::function<void(const std::string&)> action) {
  impl_->on_failure = std::move(action);
}

}  // namespace zero
