// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/in_place_exchange.h"

#include <memory>
#include <utility>
#include <vector>

namespace zero {
namespace {

using Row = c10::intrusive_ptr<SharedMemoryBackend::Row>;

// Calls `use` with the rows of all ranks, in rank order, and then releases those of the peers.
void use_in_place(const at::Tensor& rows, const std::vector<Row>& received, const UseRows& use) {
  std::vector<const void*> addresses;
  for (int64_t r = 0; r < rows.size(0); ++r) {
    const Row& row = received[r];
    addresses.push_back(row ? row->address() : rows.select(0, r).const_data_ptr());
  }
  SummandRows summands;
  summands.dtype = rows.scalar_type();
  summands.count = rows.size(0);
  summands.addresses = addresses.data();
  use(summands);
  for (const Row& row : received) {
    if (row) row->release();
  }
}

}  // namespace

bool InPlaceExchange::reads(const at::Tensor& rows) const {
  if (!rows.is_cpu()) return false;
  const auto bytes = static_cast<int64_t>(rows.nbytes()) / world_size();
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && !shared_.reads(peer, bytes)) return false;
  }
  return true;
}

int64_t InPlaceExchange::reduction_bytes(const at::Tensor& rows, const RowValues& values) const {
  return reads(rows) ? 0 : PairwiseExchange::reduction_bytes(rows, values);
}

SentBytes InPlaceExchange::reduce(const at::Tensor& rows, const at::Tensor& buffer,
                                  const RowValues& values, UseRows use, Operation& operation) {
  if (!reads(rows))
    return PairwiseExchange::reduce(rows, buffer, values, std::move(use), operation);
  auto received = std::make_shared<std::vector<Row>>(world_size());
  const int tag = operation.take_tags();
  send(
      tag, [&](int peer) { return rows.select(0, peer); }, operation);
  operation.on_wait([self = shared_from_this(), this, rows, received, tag, &operation] {
    const auto bytes = static_cast<int64_t>(rows.nbytes()) / world_size();
    const std::lock_guard<std::mutex> lock(mutex());
    for_each_sender([&](int peer) {
      Row& row = (*received)[peer];
      naming(peer, [&] { row = shared_.receive_in_place(bytes, peer, tag); });
      operation.add_receive(name_of(peer), row);
    });
  });
  operation.on_received(
      [rows, received, use = std::move(use)] { use_in_place(rows, *received, use); });
  operation.on_success([rows] {});
  return sent(bytes_to_peers(rows));
}

at::Tensor InPlaceExchange::allocate(int64_t bytes) const {
  return shared_.allocateTensor(bytes, at::kByte);
}

}  // namespace zero
