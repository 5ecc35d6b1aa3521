// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Exchanges rows in two levels, for H machines of L ranks each: within each machine, and between
// the ranks that have the same place on their machines. So a machine sends each sum and each row
// once over its link, and a rank has (L-1) + (H-1) connections.
//
//   reduce   rank (h, l) adds up the rows of its machine for the ranks (0, l) ... (H-1, l), in rank
//            order and in fp32, and sends each the sum; the owner gets the sums of all machines, in
//            the order of machines
//   gather   rank (h, l) sends its row to the ranks (g, l) of the other machines, which hand it on
//            within theirs
//
// Within a machine there is one exchange for each of a few machines, of rows as they are. For many
// machines, and for backends that launch kernels, rows are first copied into the order of places,
// so that one exchange serves all machines.
//
// Rows have one length here.
//
// The order of a sum depends on the topology alone: over every transport that hands on rows as they
// were sent, the bits are the same.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "zero/base/serial_thread.h"
#include "zero/comm/exchange/collective_order.h"
#include "zero/comm/exchange/row_exchange.h"

namespace zero {

class TwoLevelExchange : public RowExchange {
 public:
  // The place of this rank, which is rank machine * ranks_per_machine + local of the communicator.
  struct RankInLevels {
    int machines;
    int ranks_per_machine;
    int machine;
    int local;
  };

  // `inside` connects the ranks of a machine, by their place on it; `between` those with one place
  // on all machines, by machine. With `in_call_order` the backends match operations by the order of
  // calls, as NCCL does: then the second level starts in the call that starts the first, on the
  // stream of its order, which waits for the first (on the host the caller waits). Else a thread of
  // this object starts it as soon as the first is complete, whatever the caller does.
  TwoLevelExchange(std::shared_ptr<RowExchange> inside, std::shared_ptr<RowExchange> between,
                   const RankInLevels& place, bool in_call_order);

  SentBytes exchange(const at::Tensor& rows, const at::Tensor& received,
                     Operation& operation) override;
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values, UseRows use,
                   Operation& operation) override;
  int64_t reduction_bytes(const Rows& rows, const RowValues& values) const override;
  SentBytes gather(const Rows& rows, const at::Tensor& before, Operation& operation) override;
  bool sends_changes(c10::ScalarType dtype, c10::Device device) const override {
    return between_->sends_changes(dtype, device);
  }
  SentBytes all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                       Operation& operation) override;
  int64_t all_reduce_bytes(const at::Tensor& values) const override;
  SentBytes broadcast(const at::Tensor& tensor, int source, Operation& operation) override;
  at::Tensor allocate(int64_t bytes) const override { return inside_->allocate(bytes); }
  c10::Device device() const override { return inside_->device(); }
  bool waits_on_host(c10::Device device) const override { return inside_->waits_on_host(device); }
  void follow(const std::shared_ptr<CollectiveOrder>& order) override;
  bool has_ended(int rank) noexcept override {
    return inside_->has_ended(rank) || between_->has_ended(rank);
  }
  Error error() noexcept override;
  void hang_up() noexcept override;
  void shutdown() override;

 private:
  // The parts of a reduction's buffer.
  struct Buffers;

  // Returns the rows of, or for, the ranks of one machine: [ranks_per_machine, n].
  at::Tensor of_machine(const at::Tensor& rows, int machine) const;
  // Returns the rows [world_size, n] as [machines, ranks_per_machine, n].
  at::Tensor by_machine(const at::Tensor& rows) const;
  // Returns those of, or for, the ranks with this rank's place: [machines, n], each contiguous.
  at::Tensor of_place(const at::Tensor& rows) const;
  Buffers split(const at::Tensor& rows, const at::Tensor& buffer, const RowValues& values) const;

  // Runs `first` now, and `second` when the first has received; the operation consists of both.
  using LevelStart = std::function<void(Operation& part)>;
  void in_two_levels(c10::Device device, Operation& operation, const LevelStart& first,
                     LevelStart second);
  // Returns the stream for both levels, made to wait for the current one; nothing on the host.
  std::optional<c10::Stream> stream_for(c10::Device device);

  const std::shared_ptr<RowExchange> inside_;
  const std::shared_ptr<RowExchange> between_;
  const RankInLevels place_;
  const bool in_call_order_;
  const bool packs_;                        // rows are copied into the order of places
  std::shared_ptr<CollectiveOrder> order_;  // of both levels; with in_call_order_
  // Second levels that the thread has started, or could not.
  const std::shared_ptr<std::atomic<int64_t>> second_levels_tried_ =
      std::make_shared<std::atomic<int64_t>>(0);
  SerialThread second_levels_{"levels"};
};

}  // namespace zero
