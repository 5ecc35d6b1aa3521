// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/in_place_exchange.h"

#include <limits>
#include <memory>
#include <vector>

namespace zero {
namespace {

using Row = c10::intrusive_ptr<SharedMemoryBackend::Row>;

// Calls `use` with the rows of all ranks, in rank order. The own row has not been received.
void use_in_place(const at::Tensor& own, const std::vector<Row>& received, const UseRows& use) {
  std::vector<const void*> addresses;
  for (const Row& row : received) addresses.push_back(row ? row->address() : own.const_data_ptr());
  SummandRows summands;
  summands.dtype = own.scalar_type();
  summands.count = static_cast<int64_t>(received.size());
  summands.addresses = addresses.data();
  use(summands);
}

}  // namespace

bool InPlaceExchange::reads(const Rows& rows) const {
  if (!rows.values().is_cpu()) return false;
  const int64_t bytes = own_bytes(rows);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && !shared_.reads(peer, bytes)) return false;
  }
  return true;
}

int64_t InPlaceExchange::reduction_bytes(const Rows& rows, const RowValues& values) const {
  return reads(rows) ? 0 : PairwiseExchange::reduction_bytes(rows, values);
}

SentBytes InPlaceExchange::reduce(const Rows& rows, const at::Tensor& buffer,
                                  const RowValues& values, UseRows use, Operation& operation) {
  const int64_t bytes = own_bytes(rows);
  if (bytes == 0 || !reads(rows))
    return PairwiseExchange::reduce(rows, buffer, values, std::move(use), operation);
  auto received = std::make_shared<std::vector<Row>>(world_size());
  const int tag = operation.take_tags();
  send(
      tag, [&](int peer) { return rows.row(peer); }, operation);
  operation.before_receiving([self = shared_from_this(), this, bytes, received, tag, &operation] {
    const std::lock_guard<std::mutex> lock(mutex());
    for_each_sender([&](int peer) {
      Row& row = (*received)[peer];
      naming(peer, [&] { row = shared_.receive_in_place(bytes, peer, tag); });
      operation.add_receive(name_of(peer), row);
    });
  });
  operation.after_receiving(
      [self = shared_from_this(), this, row = rows.row(rank()), received, use = std::move(use)] {
        use_in_place(row, *received, use);
        for_each_sender([&](int peer) { naming(peer, [&] { (*received)[peer]->release(); }); });
      });
  operation.at_end([rows] {});
  return sent_rows(rows);
}

bool InPlaceExchange::may_be_shorter(int peer) const {
  return !shared_.reads(peer, std::numeric_limits<int64_t>::max());
}

at::Tensor InPlaceExchange::allocate(int64_t bytes) const {
  return shared_.allocateTensor(bytes, at::kByte);
}

}  // namespace zero
