// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>

#include "zero/base/message_probe.h"
#include "zero/base/own_process.h"
#include "zero/base/periodic_call.h"
#include "zero/comm/backends/nccl.h"
#include "zero/comm/exchange/collective_order.h"
#include "zero/comm/exchange/operation.h"
#include "zero/comm/exchange/row_exchange.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr const char* kFailedAdvice = ". The rank that failed first has the reason in its output";

std::string late_advice(milliseconds timeout) {
  return c10::str(
      ". It may be stuck, have ended, or have skipped this call: see its output. If it is only "
      "slow, raise the group's timeout of ",
      timeout.count(), " ms");
}

void check_rows(const Rows& rows, int world_size, const std::string& what) {
  const at::Tensor& values = rows.values();
  if (rows.equal()) {
    TORCH_CHECK(values.defined() && values.dim() == 2 && values.size(0) == world_size &&
                    values.is_contiguous(),
                what, ": expected a contiguous tensor [world_size = ", world_size, ", n], got ",
                values.defined() ? c10::str(values.sizes(), " with strides ", values.strides())
                                 : std::string("an undefined tensor"));
    return;
  }
  TORCH_CHECK(values.dim() == 1 && values.is_contiguous() && rows.lengths().count() == world_size &&
                  values.numel() == rows.lengths().total(),
              what, ": expected ", world_size, " rows of ", rows.lengths().total(),
              " elements in all, got ", rows.lengths().count(), " rows in ", values.sizes(),
              " with strides ", values.strides());
}

// Returns whether two contiguous tensors share memory; parts of one buffer need not.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

}  // namespace

struct Communicator::Impl {
  Impl(std::shared_ptr<RowExchange> exchange_in, int rank_in, int world_size_in, std::string name,
       milliseconds timeout)
      : rank(rank_in),
        world_size(world_size_in),
        exchange(std::move(exchange_in)),
        health(std::make_shared<GroupHealth>(rank, world_size, std::move(name), timeout)) {}

  // Runs issue(operation), which returns what leaves this rank, under the lock that orders
  // calls, and counts the operation. `values` are those that it sends or writes to; without
  // elements nothing is sent.
  template <typename Issue>
  Pending start(const std::string& what, const at::Tensor& values, int64_t Traffic::*calls,
                int64_t Traffic::*bytes, Issue issue);
  Pending gather(const Rows& rows, const at::Tensor& before, const std::string& what,
                 int64_t Traffic::*calls, int64_t Traffic::*bytes);
  Pending all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                     const std::string& what);
  // Refuses what would overtake queued reductions.
  void check_no_reductions(const std::string& what) const;

  const int rank;
  const int world_size;
  const std::shared_ptr<RowExchange> exchange;  // Null for one rank alone.
  int64_t operations = 0;                       // started; guarded by the exchange's mutex
  const std::shared_ptr<GroupHealth> health;
  // When the call of start() that is in issue() came to it; 0 for none.
  std::atomic<Clock::rep> issuing_since = 0;

  std::vector<int> newcomers;

  // Where streams wait and not the host, an error may come while no operation is waited for. What
  // connects holds the host, in a call that has no timeout.
  void watch_for_errors();
  void look_at_first_call();
  // See RowCommunicator.
  void watch_peers();

  // Between begin_reductions() and end_reductions().
  std::atomic<bool> reducing = false;

  std::mutex traffic_mutex;
  Traffic traffic;

  // The last members: they use the others.
  std::string seen_error;  // of the watch's last look
  std::optional<PeriodicCall> watch;
  std::set<int> seen_ended;  // of the last look at peers
  std::optional<PeriodicCall> peer_watch;
};

void Communicator::Impl::watch_for_errors() {
  constexpr milliseconds kPeriod{250};
  watch.emplace(kPeriod, "errors", [this] {
    const RowExchange::Error error = exchange->error();
    // An operation that waits for the rank itself knows more: it has a period's time.
    if (!error.text.empty() && !seen_error.empty() && health->first_failure().empty()) {
      health->fail(c10::str(error.text, health->where(),
                            error.timed_out ? late_advice(health->timeout()) : kFailedAdvice));
    }
    seen_error = error.text;
    look_at_first_call();
  });
}

void Communicator::Impl::look_at_first_call() {
  const Clock::rep since = issuing_since;
  const milliseconds limit = nccl_timeout(health->timeout());
  if (since == 0 || Clock::now() - Clock::time_point(Clock::duration(since)) < limit) return;
  const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  health->fail(c10::str(
      "a collective, as the first of its kind does",
      blocking == nullptr ? ""
                          : ", and each one under CUDA_LAUNCH_BLOCKING=" + std::string(blocking),
      ", holds the host for more than ", limit.count(), " ms: another rank does not come to it",
      health->where(), late_advice(health->timeout())));
}

// As in GroupHealth::look_at_waits(), one look is not enough: a message may still be read.
void Communicator::Impl::watch_peers() {
  constexpr milliseconds kPeriod{1000};
  if (peer_watch) return;
  peer_watch.emplace(kPeriod, "peers", [this] {
    const std::set<int> ended = health->ended_peers();
    std::string lost;
    for (const int peer : ended) {
      if (seen_ended.contains(peer)) lost += c10::str(lost.empty() ? "" : ", ", "rank ", peer);
    }
    if (!lost.empty()) {
      health->fail(c10::str("lost ", lost, health->where(), kFailedAdvice));
    }
    seen_ended = ended;
  });
}

void Communicator::Impl::check_no_reductions(const std::string& what) const {
  TORCH_INTERNAL_ASSERT(!reducing, what,
                        ": started while gradient reductions are queued; complete them first",
                        health->where());
}

template <typename Issue>
Pending Communicator::Impl::start(const std::string& what, const at::Tensor& values,
                                  int64_t Traffic::*calls, int64_t Traffic::*bytes, Issue issue) {
  if (!exchange) return Pending([] {});
  // What was made under InferenceMode can be written to only there, also in wait().
  std::optional<c10::InferenceMode> mode;
  if (values.is_inference()) mode.emplace();
  const at::NoGradGuard no_grad;
  // 1. Refuse what a failed group, or a forked child, would send.
  health->check(what);
  probe_message(what);
  // 2. Start under the lock of the exchange, with the next number: tags follow from it, so all
  //    ranks must number their operations alike. An operation without elements takes a number, too.
  SentBytes sent;
  std::shared_ptr<Operation> operation;
  std::exception_ptr thrown;
  {
    const std::lock_guard<std::mutex> lock(exchange->mutex());
    operation = make_owned<Operation>(health, what, operations++);
    issuing_since = Clock::now().time_since_epoch().count();
    try {
      if (values.numel() > 0) sent = issue(*operation);
    } catch (...) {
      thrown = std::current_exception();
    }
    issuing_since = 0;
  }
  // 3. An operation of which a part may have started is a failure of the group. Without the lock,
  //    which the end of the group takes.
  if (thrown) operation->fail_to_start(thrown);
  // 4. Count what leaves this rank.
  {
    const std::lock_guard<std::mutex> lock(traffic_mutex);
    traffic.*calls += 1;
    traffic.*bytes += sent.all;
    traffic.link_bytes_sent += sent.links;
  }
  return Pending([operation] { operation->wait(); });
}

Pending Communicator::Impl::gather(const Rows& rows, const at::Tensor& before,
                                   const std::string& what, int64_t Traffic::*calls,
                                   int64_t Traffic::*bytes) {
  check_rows(rows, world_size, what);
  check_no_reductions(what);
  return start(what, rows.values(), calls, bytes,
               [&](Operation& operation) { return exchange->gather(rows, before, operation); });
}

Pending Communicator::Impl::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                       const std::string& what) {
  TORCH_CHECK(values.dim() == 1 && values.is_contiguous(), what,
              ": expected a contiguous 1-D tensor, got ", values.sizes());
  check_no_reductions(what);
  return start(what, values, &Traffic::small_calls, &Traffic::small_bytes_sent,
               [&](Operation& operation) { return exchange->all_reduce(values, op, operation); });
}

Communicator::Communicator(BackendPtr backend, std::string name, milliseconds timeout,
                           RowTransport rows)
    : Communicator(make_owned<Impl>(make_row_exchange(backend, rows, timeout),
                                    backend ? backend->getRank() : 0,
                                    backend ? backend->getSize() : 1, std::move(name), timeout)) {}

Communicator::Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  // Neither keeps the exchange alive, which must not end on the thread that fails: the destructor
  // waits for both.
  RowExchange* const connections = impl_->exchange.get();
  if (connections == nullptr) return;
  impl_->health->hang_up_with([connections] { connections->hang_up(); });
  impl_->health->ask_for_ended([connections](int peer) { return connections->has_ended(peer); });
  if (!connections->device().is_cpu()) impl_->watch_for_errors();
}

Communicator::~Communicator() {
  if (!impl_->health->in_own_process()) return;
  // 1. An operation that nobody waits for any more ends here, and not at its timeout: Gloo's
  // destructor waits for its collectives, for as long as their timeouts say.
  if (impl_->health->operations_under_way() > 0) {
    impl_->health->fail("destroyed with operations under way" + impl_->health->where());
  }
  // 2. A failure that another thread reports uses the exchange until it has been dealt with.
  impl_->watch.reset();
  impl_->peer_watch.reset();
  impl_->health->forget_actions();
  // 3. After a failure the connections are closed already.
  if (!impl_->exchange || !failed().empty()) return;
  try {
    impl_->exchange->shutdown();  // NCCL complains about a group that ends without.
  } catch (...) {                 // A destructor cannot report it.
  }
}

int Communicator::rank() const { return impl_->rank; }
int Communicator::world_size() const { return impl_->world_size; }
const std::string& Communicator::name() const { return impl_->health->name(); }
milliseconds Communicator::timeout() const { return impl_->health->timeout(); }
std::string Communicator::failed() const { return impl_->health->first_failure(); }

Traffic Communicator::traffic() const {
  const std::lock_guard<std::mutex> lock(impl_->traffic_mutex);
  return impl_->traffic;
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
  return impl_->start(
      what, received, &Traffic::exchange_calls, &Traffic::exchange_bytes_sent,
      [&](Operation& operation) { return impl_->exchange->exchange(rows, received, operation); });
}

Pending Communicator::gather_rows(const at::Tensor& rows, const std::string& label) {
  return impl_->gather(rows, {}, "gather_rows of " + label, &Traffic::gather_calls,
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
  return impl_->start(
      what, tensor, &Traffic::small_calls, &Traffic::small_bytes_sent,
      [&](Operation& operation) { return impl_->exchange->broadcast(tensor, source, operation); });
}

//   1. All ranks learn the length of each text.
//   2. They gather the texts, padded to the longest; where more than a quarter would be padding,
//      the first bytes of each.
//   3. Each rank that has more broadcasts the rest, all at once.
// The buffers of 1 and 2 start out with the own values in every row, so that a simulated transport,
// which moves no data, stands for ranks that all say the same.
std::vector<std::string> Communicator::all_gather_text(const std::string& text,
                                                       const std::string& label) {
  constexpr int64_t kFirst = 4096;
  const std::string what = "all_gather_text of " + label;
  if (!impl_->exchange) return {text};
  const int64_t world = impl_->world_size;
  const auto device = impl_->exchange->device();
  // 1
  at::Tensor lengths = at::empty({world, 1}, at::TensorOptions(at::kLong).device(device));
  lengths.fill_(static_cast<int64_t>(text.size()));
  impl_->gather(lengths, {}, what, &Traffic::small_calls, &Traffic::small_bytes_sent).wait();
  lengths = lengths.to(at::kCPU);
  const auto* const sizes = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(sizes, sizes + world);
  const bool alike = 4 * std::accumulate(sizes, sizes + world, int64_t{0}) >= 3 * world * longest;
  const int64_t padded = alike ? longest : std::min(longest, kFirst);
  // 2
  const auto first = std::min(padded, static_cast<int64_t>(text.size()));
  at::Tensor own = at::zeros({1, padded}, at::kByte);
  std::copy_n(text.begin(), first, own.mutable_data_ptr<uint8_t>());
  at::Tensor rows = own.expand({world, padded}).contiguous().to(device);
  impl_->gather(rows, {}, what, &Traffic::small_calls, &Traffic::small_bytes_sent).wait();
  rows = rows.to(at::kCPU);
  std::vector<std::string> texts;
  for (int64_t r = 0; r < world; ++r) {
    const auto* const begin = static_cast<const char*>(rows.const_data_ptr()) + r * padded;
    texts.emplace_back(begin, static_cast<size_t>(std::min(padded, sizes[r])));
  }
  // 3
  std::vector<std::pair<at::Tensor, Pending>> rests;
  for (int64_t r = 0; r < world; ++r) {
    if (sizes[r] <= padded) continue;
    at::Tensor rest = at::empty({sizes[r] - padded}, at::kByte);
    if (r == rank()) std::copy(text.begin() + padded, text.end(), rest.mutable_data_ptr<uint8_t>());
    rest = rest.to(device);
    rests.emplace_back(rest, broadcast(rest, static_cast<int>(r), what));
  }
  auto next = rests.begin();
  for (int64_t r = 0; r < world; ++r) {
    if (sizes[r] <= padded) continue;
    next->second.wait();
    const at::Tensor rest = next->first.to(at::kCPU);
    texts[r].append(static_cast<const char*>(rest.const_data_ptr()),
                    static_cast<size_t>(rest.numel()));
    ++next;
  }
  return texts;
}

void Communicator::abort(const std::string& reason) noexcept { impl_->health->fail(reason); }

void RowCommunicator::put_in_one_order(const std::vector<Communicator*>& communicators) {
  const auto order = std::make_shared<CollectiveOrder>();
  for (const Communicator* communicator : communicators) {
    RowExchange* const exchange = communicator->impl_->exchange.get();
    if (exchange != nullptr) exchange->follow(order);
  }
}

void RowCommunicator::sum_in_rank_order() {
  if (all_.impl_->exchange) all_.impl_->exchange->sum_in_rank_order();
}

void Communicator::on_failure(std::function<void(const std::string&)> action) {
  impl_->health->on_first_failure(std::move(action));
}

std::unique_ptr<Communicator> RowCommunicator::over(std::shared_ptr<RowExchange> exchange, int rank,
                                                    int world_size, std::string name,
                                                    milliseconds timeout) {
  return std::unique_ptr<Communicator>(new Communicator(make_owned<Communicator::Impl>(
      std::move(exchange), rank, world_size, std::move(name), timeout)));
}

bool RowCommunicator::waits_on_host(c10::Device device) const {
  return all_.impl_->exchange && all_.impl_->exchange->waits_on_host(device);
}

at::Tensor RowCommunicator::allocate(int64_t bytes) const {
  return all_.impl_->exchange ? all_.impl_->exchange->allocate(bytes) : at::Tensor();
}

int64_t RowCommunicator::reduction_bytes(const Rows& rows, const RowValues& values) const {
  return all_.impl_->exchange && rows.values().numel() > 0
             ? all_.impl_->exchange->reduction_bytes(rows, values)
             : 0;
}

Pending RowCommunicator::reduce_rows(const Rows& rows, const at::Tensor& buffer, UseRows use,
                                     const std::string& label, const RowValues& values) {
  const std::string what = "reduce_rows of " + label;
  check_rows(rows, all_.impl_->world_size, what);
  const at::Tensor& matrix = rows.values();
  const int64_t bytes = reduction_bytes(rows, values);
  TORCH_CHECK(bytes == 0 || (buffer.defined() && buffer.scalar_type() == at::kByte &&
                             buffer.dim() == 1 && buffer.numel() == bytes &&
                             buffer.is_contiguous() && buffer.device() == matrix.device()),
              what, ": expected a buffer of ", bytes, " bytes on ", matrix.device(), ", got ",
              buffer.defined()
                  ? c10::str(buffer.sizes(), " ", buffer.dtype(), " on ", buffer.device())
                  : std::string("an undefined tensor"),
              all_.impl_->health->where());
  if (!all_.impl_->exchange) {
    return Pending([matrix, use = std::move(use)] {
      SummandRows own;
      own.dtype = matrix.scalar_type();
      own.own_row = matrix.const_data_ptr();
      if (matrix.numel() > 0) use(own);
    });
  }
  return all_.impl_->start(what, matrix, &Traffic::exchange_calls, &Traffic::exchange_bytes_sent,
                           [&](Operation& operation) {
                             return all_.impl_->exchange->reduce(rows, buffer, values,
                                                                 std::move(use), operation);
                           });
}

Pending RowCommunicator::gather_rows(const Rows& rows, const std::string& label,
                                     const at::Tensor& before) {
  const std::string what = "gather_rows of " + label;
  if (before.defined() && all_.impl_->exchange) {
    const at::Tensor own = rows.row(all_.rank());
    TORCH_CHECK(sends_changes(own.scalar_type(), own.device()), what,
                ": expected no `before`, since this transport sends rows whole; see "
                "sends_changes()");
    TORCH_CHECK(before.sizes() == own.sizes() && before.dtype() == own.dtype() &&
                    before.device() == own.device() && before.is_contiguous(),
                what, ": expected `before` like the own row, ", own.sizes(), " ", own.dtype(),
                ", got ", before.sizes(), " ", before.dtype(), " on ", before.device());
  }
  return all_.impl_->gather(rows, before, what, &Traffic::gather_calls,
                            &Traffic::gather_bytes_sent);
}

bool RowCommunicator::sends_changes(c10::ScalarType dtype, c10::Device device) const {
  return all_.impl_->exchange && all_.impl_->exchange->sends_changes(dtype, device);
}

void RowCommunicator::watch_peers() {
  if (all_.impl_->exchange) all_.impl_->watch_peers();
}

void RowCommunicator::count_failure_in(std::shared_ptr<std::atomic<int64_t>> failures) {
  all_.impl_->health->count_failure_in(std::move(failures));
}

void RowCommunicator::set_newcomers(std::vector<int> ranks) {
  all_.impl_->newcomers = std::move(ranks);
}

bool RowCommunicator::has_newcomers() const { return !all_.impl_->newcomers.empty(); }

bool RowCommunicator::are_newcomers(const std::vector<int>& ranks) const {
  const auto is_new = [this](int rank) {
    return std::ranges::find(all_.impl_->newcomers, rank) != all_.impl_->newcomers.end();
  };
  return !ranks.empty() && !is_new(all_.rank()) && std::ranges::all_of(ranks, is_new);
}

void RowCommunicator::begin_reductions() { all_.impl_->reducing = true; }
void RowCommunicator::end_reductions() { all_.impl_->reducing = false; }

}  // namespace zero
