// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a communicator does for an optimizer beside what every user may ask of it: rows of different
// lengths, sums of rows, changes of rows, and the marks of groups that grow.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/exchange/row_format.h"
#include "zero/communicator.h"
#include "zero/memory/rows.h"

namespace zero {

class RowExchange;

// A view of a Communicator, which must outlive it. Its operations are numbered, ordered and counted
// with those of the communicator.
class RowCommunicator {
 public:
  RowCommunicator(Communicator& communicator)  // not explicit: each is one
      : all_(communicator) {}

  // Makes a communicator of ranks that `exchange` connects (zero/comm/exchange/row_exchange.h);
  // null for one rank alone.
  static std::unique_ptr<Communicator> over(std::shared_ptr<RowExchange> exchange, int rank,
                                            int world_size, std::string name,
                                            std::chrono::milliseconds timeout);

  // Returns whether wait() of operations on memory of this device blocks the host, and not the
  // current stream.
  bool waits_on_host(c10::Device device) const;

  // [bytes] of kByte in host memory with unspecified contents, where this transport sends from
  // without a copy; undefined when any memory will do. For buffers that are used again and again.
  at::Tensor allocate(int64_t bytes) const;

  // Collective. wait() calls use(summands) once, unless the own row is empty: with rows that add
  // up to the sum over ranks of row `rank()` of their `rows`. These rows are valid within that
  // call, and on a GPU for the work that it enqueues on the current stream. On one machine the rows
  // of all ranks arrive in rank order, without a copy if the ranks share memory; but NCCL adds fp32
  // rows of one length itself and leaves one row, without sum_in_rank_order(). Sends (W-1)/W of
  // `rows`. Ranks must wait in one order, as with exchange_rows(). In two levels (H machines of L
  // ranks) the rows of a machine are added up first, in rank order, as `values` says, and the sums
  // of the machines arrive in the order of machines. Sends (L-1)/L of `rows` within the machine and
  // H-1 sums of a row to others.
  //   rows    of any dtype; unchanged. Of different lengths: not in two levels
  //   buffer  [reduction_bytes(rows)] of kByte on the device of `rows`, for this call to work in;
  //           undefined for 0 bytes
  Pending reduce_rows(const Rows& rows, const at::Tensor& buffer, UseRows use,
                      const std::string& label, const RowValues& values = {});
  // Returns the size of the buffer that reduce_rows() needs.
  int64_t reduction_bytes(const Rows& rows, const RowValues& values = {}) const;

  // Collective. Fills row r of `rows` with rank r's row r, in place: the own
  // row is input and keeps its value, the others are output. Sends W-1 times a
  // row; in two levels H-1 times a row to other machines and H times L-1 within its own.
  // With `before` a message to another machine has what has changed in the row, without loss
  // (kernels/row_changes.h), and is a row long at most, but for 16 bytes. A rank whose row differs
  // from what it held on the sender throws.
  //   rows    of any dtype. Of different lengths: not in two levels
  //   before  like the own row: what it held when all ranks had the same `rows`. Defined on all
  //           ranks, which sends_changes() permits, or on none; unchanged
  Pending gather_rows(const Rows& rows, const std::string& label, const at::Tensor& before = {});
  // Returns whether gather_rows() of rows of this kind may be given `before`; equal on all ranks.
  bool sends_changes(c10::ScalarType dtype, c10::Device device) const;

  // Returns whether all of `ranks` are of processes that joined the job with the group of this
  // communicator, while this rank was there before: then what they did wrong is no fault of this
  // program, which may go on without them.
  bool are_newcomers(const std::vector<int>& ranks) const;
  // Returns whether any rank of this communicator is one of those, which is the same on all ranks.
  bool has_newcomers() const;

  // Between these two calls only exchange_rows() and reduce_rows() may be started; every other
  // operation throws. While reductions are queued, ranks stand at different
  // buckets, so another operation would take the messages of one. Local; calls do not nest.
  void begin_reductions();
  void end_reductions();

  // From now on the collectives of all of these on a GPU run there one after the other, in the
  // order in which they are started, which must be the same on all ranks. The host does not wait.
  // See zero/comm/exchange/collective_order.h; the two levels of one communicator have an order
  // anyway. To be called before the first operation of each.
  static void put_in_one_order(const std::vector<Communicator*>& communicators);

  // From now on reduce_rows() leaves no sum to NCCL: rows arrive in rank order. To be called before
  // the first operation, on all ranks.
  void sum_in_rank_order();

  // From now on the communicator also fails when a connection ends while no operation waits for
  // that rank, within about two seconds: a replay of a CUDA graph waits on the device alone, and
  // NCCL reports no error of it. Sees no rank that stands still.
  void watch_peers();

  // The communicator's first failure is counted there too.
  void count_failure_in(std::shared_ptr<std::atomic<int64_t>> failures);
  // For are_newcomers(). The same on all ranks.
  void set_newcomers(std::vector<int> ranks);

 private:
  Communicator& all_;
};

}  // namespace zero
