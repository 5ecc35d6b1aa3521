// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads the rows of a reduction in the memory of the peers, which ranks of one machine share. All
// other operations are pairwise, and so are reductions with a peer that shares no memory.
#pragma once

#include <utility>

#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/exchange/pairwise_exchange.h"

namespace zero {

class InPlaceExchange : public PairwiseExchange {
 public:
  InPlaceExchange(const c10::intrusive_ptr<SharedMemoryBackend>& backend,
                  std::chrono::milliseconds timeout, BackendRanks ranks)
      : PairwiseExchange(backend, timeout, std::move(ranks)), shared_(*backend) {}

  // Passes the rows of all ranks to `use`, in rank order. A rank whose peers do not all share
  // memory may receive the same rows pairwise.
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values, UseRows use,
                   Operation& operation) override;
  // Returns 0 if the rows of all other ranks can be read in place.
  int64_t reduction_bytes(const Rows& rows, const RowValues& values) const override;
  at::Tensor allocate(int64_t bytes) const override;

 protected:
  // False for peers that share memory: they expect a row of the length that they receive.
  bool may_be_shorter(int peer) const override;

 private:
  bool reads(const Rows& rows) const;

  SharedMemoryBackend& shared_;  // The backend.
};

}  // namespace zero
