// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads the rows of a reduction in the memory of the peers, which ranks of one machine share. All
// other operations are pairwise, and so are reductions with a peer that shares no memory.
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "zero/base/own_process.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/exchange/pairwise_exchange.h"

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

class InPlaceExchange : public PairwiseExchange {
 public:
  InPlaceExchange(const c10::intrusive_ptr<SharedMemoryBackend>& backend,
                  std::chrono::milliseconds timeout, BackendRanks ranks)
      : PairwiseExchange(backend, timeout, std::move(ranks)), shared_(*backend) {}

  // Passes the rows of all ranks to `use`, in rank order. A rank whose peers do not all share
  // memory may receive the same rows pairwise.
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values, UseRows use,
                   Operation& operation) override {
    const int64_t bytes = own_bytes(rows);
    if (bytes == 0 || !reads(rows))
      return PairwiseExchange::reduce(rows, buffer, values, std::move(use), operation);
    auto received = std::make_shared<std::vector<Row>>(world_size());
    const int tag = operation.take_tags();
    send(tag, operation, [&](int peer) { return rows.row(peer); });
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

  // Returns 0 if the rows of all other ranks can be read in place.
  int64_t reduction_bytes(const Rows& rows, const RowValues& values) const override {
    return reads(rows) ? 0 : PairwiseExchange::reduction_bytes(rows, values);
  }

  at::Tensor allocate(int64_t bytes) const override {
    return shared_.allocateTensor(bytes, at::kByte);
  }

 protected:
  // False for peers that share memory: they expect a row of the length that they receive.
  bool may_be_shorter(int peer) const override {
    return !shared_.reads(peer, std::numeric_limits<int64_t>::max());
  }

 private:
  bool reads(const Rows& rows) const {
    if (!rows.values().is_cpu()) return false;
    const int64_t bytes = own_bytes(rows);
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank() && !shared_.reads(peer, bytes)) return false;
    }
    return true;
  }

  SharedMemoryBackend& shared_;  // The backend.
};

}  // namespace

std::shared_ptr<RowExchange> make_in_place_exchange(
    const c10::intrusive_ptr<SharedMemoryBackend>& backend, std::chrono::milliseconds timeout,
    BackendRanks ranks) {
  return make_owned<InPlaceExchange>(backend, timeout, std::move(ranks));
}

}  // namespace zero
