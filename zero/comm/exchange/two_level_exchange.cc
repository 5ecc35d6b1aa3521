// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/exchange/two_level_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <future>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/base/streams.h"

namespace zero {
namespace {

// With more machines rows are copied, so that each rank gets one message and not one for each.
constexpr int kFewMachines = 4;
// Buffers of a reduction begin at multiples of this.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

const at::Tensor& matrix(const Rows& rows) {
  TORCH_INTERNAL_ASSERT(rows.equal(), "rows of different lengths have one level");
  return rows.values();
}

int64_t row_bytes(const at::Tensor& rows) {
  return static_cast<int64_t>(rows.nbytes()) / rows.size(0);
}

// Holds the mutex of an exchange for one call: Locked(*inside_)->gather(...).
class Locked {
 public:
  explicit Locked(RowExchange& exchange) : lock_(exchange.mutex()), exchange_(exchange) {}
  RowExchange* operator->() const { return &exchange_; }

 private:
  const std::lock_guard<std::mutex> lock_;
  RowExchange& exchange_;
};

// The current stream uses memory that was allocated on the stream of the levels.
void use_here(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) tensor.record_stream(current_torch_stream(tensor.device()));
}

void add(const SentBytes& sent, SentBytes& to) {
  to.all += sent.all;
  to.links += sent.links;
}

}  // namespace

TwoLevelExchange::TwoLevelExchange(std::shared_ptr<RowExchange> inside,
                                   std::shared_ptr<RowExchange> between, const RankInLevels& place,
                                   bool in_call_order)
    : inside_(std::move(inside)),
      between_(std::move(between)),
      place_(place),
      in_call_order_(in_call_order),
      packs_(in_call_order || place.machines > kFewMachines) {
  // Before anything is sent: what an operation cannot do without must not fail in one.
  if (!in_call_order_) second_levels_.start();
  if (in_call_order_) TwoLevelExchange::follow(std::make_shared<CollectiveOrder>());
}

void TwoLevelExchange::follow(const std::shared_ptr<CollectiveOrder>& order) {
  if (!in_call_order_) return;
  order_ = order;
  inside_->follow(order);
  between_->follow(order);
}

at::Tensor TwoLevelExchange::of_machine(const at::Tensor& rows, int machine) const {
  return rows.narrow(0, int64_t{machine} * place_.ranks_per_machine, place_.ranks_per_machine);
}

at::Tensor TwoLevelExchange::by_machine(const at::Tensor& rows) const {
  return rows.view({place_.machines, place_.ranks_per_machine, rows.size(1)});
}

at::Tensor TwoLevelExchange::of_place(const at::Tensor& rows) const {
  return by_machine(rows).select(1, place_.local);
}

std::optional<c10::Stream> TwoLevelExchange::stream_for(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  const c10::Stream current = current_torch_stream(device);
  // The host waits for transfers, in whatever thread, so the stream of the caller need not.
  if (!in_call_order_) return current;
  const c10::Stream stream = order_->stream(device);
  make_wait(stream, current);
  return stream;
}

// The two levels of an operation are two parts of it, with tags of their own.
//   1. The calling thread starts the first level.
//   2. When that has received, the second level starts: in this call where the backends match
//      operations by the order of calls, else on the thread of this object. That thread takes the
//      operations in the order of their calls, on every rank, so that no second level waits for one
//      which its peers have not come to.
//   3. wait() of the operation waits until the second level has started, then for all of it, and
//      then for the sends of the first. An error of the thread is thrown there.
void TwoLevelExchange::in_two_levels(c10::Device device, Operation& operation,
                                     const LevelStart& first, LevelStart second) {
  const std::optional<c10::Stream> stream = stream_for(device);
  const c10::OptionalStreamGuard guard(stream);
  std::shared_ptr<Operation> first_part = operation.part();
  std::shared_ptr<Operation> second_part = operation.part();
  auto started = std::make_shared<std::promise<void>>();
  // 1
  try {
    first(*first_part);
  } catch (...) {
    first_part->cancel();  // The caller knows the reason.
    throw;
  }
  // 2
  auto start_second_level = [tried = second_levels_tried_, first_part, second_part, started, stream,
                             second = std::move(second)]() mutable {
    const c10::OptionalStreamGuard guard(stream);
    const auto at_end = c10::make_scope_exit([&] { ++*tried; });
    try {
      first_part->receive();
      try {
        second(*second_part);
      } catch (...) {
        second_part->fail_to_start(std::current_exception());
      }
      // What the parts keep alive ends with the caller's wait(), not later on this thread.
      second = nullptr;
      first_part.reset();
      second_part.reset();
      started->set_value();
    } catch (...) {
      started->set_exception(std::current_exception());
    }
  };
  // 3
  operation.wait_by([tried = second_levels_tried_, first_part, second_part, started,
                     &operation](Operation::Clock::time_point start) {
    std::future<void> future = started->get_future();
    operation.wait_for_thread(future, *tried);
    future.get();
    second_part->wait(start);
    first_part->wait(start);
  });
  if (in_call_order_) {
    start_second_level();
  } else {
    second_levels_.push(std::move(start_second_level));
  }
}

// ---- Reduce ----

struct TwoLevelExchange::Buffers {
  at::Tensor packed;  // [ranks_per_machine, machines * row], in the order of places; if packs_
  std::vector<at::Tensor> inside;  // for each exchange within the machine, what inside_ needs
  at::Tensor sums;                 // [machines, numel] fp32
  at::Tensor encoded;              // [machines, row]; the memory of `sums` if they are sent in fp32
  at::Tensor between;              // what between_ needs
  int64_t bytes = 0;
};

// Without a `buffer`, finds its size.
TwoLevelExchange::Buffers TwoLevelExchange::split(const at::Tensor& rows, const at::Tensor& buffer,
                                                  const RowValues& values) const {
  Buffers result;
  const auto options = rows.options();
  const auto take = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    // Sizes are all that is asked of a tensor before there is a buffer, so that it has no memory.
    const at::Tensor shape = at::empty(sizes, options.dtype(dtype).device(at::kMeta));
    const auto bytes = static_cast<int64_t>(shape.nbytes());
    const int64_t begin = std::exchange(result.bytes, result.bytes + aligned(bytes));
    if (!buffer.defined()) return shape;
    return buffer.narrow(0, begin, bytes).view(dtype).view(sizes);
  };
  if (packs_) {
    result.packed =
        take({place_.ranks_per_machine, place_.machines * rows.size(1)}, rows.scalar_type());
  }
  // As large as `packed`, and on the device of the rows, which decides what is read in place.
  const at::Tensor block =
      packs_ ? rows.view({place_.ranks_per_machine, place_.machines * rows.size(1)})
             : of_machine(rows, 0);
  const int64_t inside = inside_->reduction_bytes(block, {});
  for (int i = 0; i < (packs_ ? 1 : place_.machines); ++i) {
    result.inside.push_back(inside > 0 ? take({inside}, at::kByte) : at::Tensor());
  }
  const RowFormat* format = values.format;
  const int64_t numel = format != nullptr ? values.numel : rows.size(1);
  result.sums = take({place_.machines, numel}, at::kFloat);
  result.encoded = result.sums;
  if (format != nullptr && format->encodes_sums()) {
    result.encoded = take({place_.machines, rows.size(1)}, rows.scalar_type());
  } else if (format != nullptr && format->keeps_sums_apart()) {
    result.encoded = result.sums.view(at::kByte);
  }
  const int64_t between = between_->reduction_bytes(result.encoded, {});
  if (between > 0) result.between = take({between}, at::kByte);
  return result;
}

int64_t TwoLevelExchange::reduction_bytes(const Rows& rows, const RowValues& values) const {
  return split(matrix(rows), {}, values).bytes;
}

namespace {

// Adds up rows that are numbers of their dtype.
void sum_numbers(const SummandRows& rows, const at::Tensor& sum) {
  const auto options = sum.options().dtype(rows.dtype);
  const auto bytes = sum.numel() * static_cast<int64_t>(c10::elementSize(rows.dtype));
  for (int64_t i = 0; i < rows.count; ++i) {
    const void* row = rows.row(i, bytes);
    const at::Tensor numbers = at::from_blob(const_cast<void*>(row), {sum.numel()}, options);
    i == 0 ? sum.copy_(numbers) : sum.add_(numbers.to(at::kFloat));
  }
}

void sum_rows_of(const RowFormat* format, const SummandRows& rows, const at::Tensor& sum) {
  format != nullptr ? format->sum(rows, sum) : sum_numbers(rows, sum);
}

// Adds up rows of which each holds one row for every machine, one after the other.
//   sums  [machines, numel]
void sum_packed(const RowFormat* format, const SummandRows& places, int64_t row_bytes,
                const at::Tensor& sums) {
  // Numbers may be added all at once; on a GPU all rows are numbers.
  if (format == nullptr || !sums.is_cpu()) {
    sum_rows_of(format, places, sums.view({-1}));
    return;
  }
  const int64_t machines = sums.size(0);
  std::vector<const void*> addresses(static_cast<size_t>(places.count));
  for (int64_t g = 0; g < machines; ++g) {
    for (int64_t i = 0; i < places.count; ++i) {
      addresses[i] = static_cast<const char*>(places.row(i, machines * row_bytes)) + g * row_bytes;
    }
    SummandRows rows;
    rows.dtype = places.dtype;
    rows.count = places.count;
    rows.addresses = addresses.data();
    format->sum(rows, sums.select(0, g));
  }
}

}  // namespace

// Each of H machines has L ranks. Rank (h, l) is on machine h at place l, and has a row for every
// rank (g, m). In the end it has the sum over all ranks of the rows for (h, l).
//
// First level, within machine h: rank (h, l) receives from each rank (h, k) the rows for its place
// on all machines, those for (0, l) ... (H-1, l), and adds each up over k, in fp32 and in rank
// order. This gives it H sums, of which one is for itself and the others for the ranks of its
// place.
//     (h, 0):   ... row for (g, l) ...  |
//     (h, 1):   ... row for (g, l) ...  |  added up to sum g on rank (h, l), for g = 0 ... H-1
//     (h, L-1): ... row for (g, l) ...  |
// Second level, between the ranks (0, l) ... (H-1, l): a reduction of these H sums as rows, sum g
// for machine g. It passes the H sums for (h, l), one of each machine, to `use`.
//
// The first level is H exchanges of [L, n], one for the rows to each machine, and copies nothing.
// With `packs_` it is one exchange of [L, H n]: rows are first copied into the order of places, so
// that the H rows of rank (h, k) for place l are one message. Many machines would otherwise need
// many small messages, and kernels many small launches.
//
// All buffers are parts of the caller's `buffer`. They are in use until the second level is
// complete.
SentBytes TwoLevelExchange::reduce(const Rows& rows, const at::Tensor& buffer,
                                   const RowValues& values, UseRows use, Operation& operation) {
  const at::Tensor& all = matrix(rows);
  const auto buffers = std::make_shared<const Buffers>(split(all, buffer, values));
  const RowFormat* format = values.format;
  SentBytes sent;
  const auto reduce_inside = [&](const at::Tensor& block, size_t i, const UseRows& add_up,
                                 Operation& part) {
    add(Locked(*inside_)->reduce(block, buffers->inside[i], {}, add_up, part), sent);
  };
  // 1. Add up the rows of this machine.
  const LevelStart first = [&](Operation& part) {
    if (packs_) {
      buffers->packed.view({place_.ranks_per_machine, place_.machines, all.size(1)})
          .copy_(by_machine(all).transpose(0, 1));
      reduce_inside(
          buffers->packed, 0,
          [format, buffers, bytes = row_bytes(all)](const SummandRows& places) {
            sum_packed(format, places, bytes, buffers->sums);
          },
          part);
      return;
    }
    for (int g = 0; g < place_.machines; ++g) {
      const at::Tensor sum = buffers->sums.select(0, g);
      reduce_inside(
          of_machine(all, g), static_cast<size_t>(g),
          [format, sum](const SummandRows& summands) { sum_rows_of(format, summands, sum); }, part);
    }
  };
  // 2. Encode the sums, if they are sent in another format than fp32, and exchange them.
  const auto second = [between = between_, all, buffer, buffers, format,
                       use = std::move(use)](Operation& part) {
    const at::Tensor& sums = buffers->encoded;
    if (format != nullptr && format->encodes_sums()) format->encode_sums(buffers->sums, sums);
    Locked(*between)->reduce(sums, buffers->between, {}, use, part);
    part.at_end([all, buffer] {});
  };
  in_two_levels(all.device(), operation, first, second);
  const int64_t bytes = (place_.machines - 1) * row_bytes(buffers->encoded);
  add({bytes, bytes}, sent);
  return sent;
}

// ---- Gather and exchange ----

namespace {

// Hands the rows of this rank's place to the ranks of its machine, and puts theirs into `rows`.
void gather_packed(RowExchange& inside, const at::Tensor& rows,
                   const TwoLevelExchange::RankInLevels& place, Operation& part) {
  const at::Tensor places =
      rows.view({place.machines, place.ranks_per_machine, rows.size(1)}).transpose(0, 1);
  const at::Tensor packed = at::empty(places.sizes(), rows.options());
  packed.select(0, place.local).copy_(places.select(0, place.local));
  Locked(inside)->gather(packed.view({place.ranks_per_machine, -1}), {}, part);
  part.after_receiving([places, packed] {
    use_here(packed);
    places.copy_(packed);
  });
}

}  // namespace

SentBytes TwoLevelExchange::gather(const Rows& rows, const at::Tensor& before,
                                   Operation& operation) {
  const at::Tensor& all = matrix(rows);
  SentBytes sent;
  const int here = place_.machine;
  // 1. Get the rows of this rank's place from the other machines.
  const LevelStart first = [&](Operation& part) {
    add(Locked(*between_)->gather(of_place(all), before, part), sent);
  };
  // 2. Hand them on within the machine: packed, or in an exchange for the rows of each machine.
  //    Rows of the own machine wait for nothing, but are sent with the others, in one order
  //    everywhere.
  std::vector<at::Tensor> blocks;
  for (int g = 0; g < place_.machines && !packs_; ++g) {
    blocks.push_back(of_machine(all, (here + g) % place_.machines));
  }
  const auto second = [inside = inside_, blocks, all, place = place_](Operation& part) {
    if (blocks.empty()) gather_packed(*inside, all, place, part);
    for (const at::Tensor& block : blocks) {
      Locked(*inside)->gather(block, {}, part);
    }
  };
  in_two_levels(all.device(), operation, first, second);
  sent.all += (place_.ranks_per_machine - 1) * place_.machines * row_bytes(all);
  return sent;
}

// Rank (h, l) first hands its row for (g, m) to (h, m), which sends the rows of its whole machine
// for (g, m) there.
SentBytes TwoLevelExchange::exchange(const at::Tensor& rows, const at::Tensor& received,
                                     Operation& operation) {
  SentBytes sent;
  const at::Tensor routed = at::empty_like(rows);
  // 1. Within the machine, an exchange for the rows to each machine.
  const LevelStart first = [&](Operation& part) {
    for (int g = 0; g < place_.machines; ++g) {
      const at::Tensor from = of_machine(rows, g);
      const at::Tensor into = of_machine(routed, g);
      into.select(0, place_.local).copy_(from.select(0, place_.local));
      add(Locked(*inside_)->exchange(from, into, part), sent);
    }
  };
  const auto grouped = [this](const at::Tensor& matrix) {
    return matrix.view({place_.machines, place_.ranks_per_machine * matrix.size(1)});
  };
  // 2. Between machines, L rows at once: those of this machine for one rank of another.
  const auto second = [between = between_, from = grouped(routed), into = grouped(received),
                       here = place_.machine](Operation& part) {
    Locked(*between)->exchange(from, into, part);
    part.at_end([from, into, here] {
      use_here(from);
      into.select(0, here).copy_(from.select(0, here));
    });
  };
  in_two_levels(rows.device(), operation, first, second);
  const int64_t bytes = (place_.machines - 1) * int64_t{place_.ranks_per_machine} * row_bytes(rows);
  add({bytes, bytes}, sent);
  return sent;
}

// ---- Few values ----

int64_t TwoLevelExchange::all_reduce_bytes(const at::Tensor& values) const {
  return inside_->all_reduce_bytes(values) + between_->all_reduce_bytes(values);
}

SentBytes TwoLevelExchange::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                       Operation& operation) {
  // 1. Combine the values of this machine, on each of its ranks.
  const LevelStart first = [&](Operation& part) { Locked(*inside_)->all_reduce(values, op, part); };
  // 2. Combine those of all machines: every place does the same.
  const auto second = [between = between_, values, op](Operation& part) {
    Locked(*between)->all_reduce(values, op, part);
  };
  in_two_levels(values.device(), operation, first, second);
  return {all_reduce_bytes(values), between_->all_reduce_bytes(values)};
}

SentBytes TwoLevelExchange::broadcast(const at::Tensor& tensor, int source, Operation& operation) {
  SentBytes sent;
  const int machine = source / place_.ranks_per_machine;
  const int local = source % place_.ranks_per_machine;
  // 1. From the source to its place on every machine.
  const LevelStart first = [&](Operation& part) {
    if (local != place_.local) return;
    add(Locked(*between_)->broadcast(tensor, machine, part), sent);
  };
  // 2. From that place to the other ranks of the machine.
  const auto second = [inside = inside_, tensor, local](Operation& part) {
    Locked(*inside)->broadcast(tensor, local, part);
  };
  in_two_levels(tensor.device(), operation, first, second);
  if (local == place_.local) {
    sent.all += (place_.ranks_per_machine - 1) * static_cast<int64_t>(tensor.nbytes());
  }
  return sent;
}

RowExchange::Error TwoLevelExchange::error() noexcept {
  Error error = inside_->error();
  return error.text.empty() ? between_->error() : error;
}

void TwoLevelExchange::hang_up() noexcept {
  inside_->hang_up();
  between_->hang_up();
}

void TwoLevelExchange::shutdown() {
  inside_->shutdown();
  between_->shutdown();
}

}  // namespace zero
