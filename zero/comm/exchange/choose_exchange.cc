// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "zero/base/own_process.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/exchange/pairwise_exchange.h"

namespace zero {

std::shared_ptr<RowExchange> make_row_exchange(const c10::intrusive_ptr<c10d::Backend>& backend,
                                               RowTransport rows, std::chrono::milliseconds timeout,
                                               BackendRanks ranks) {
  if (!backend) return nullptr;
  // NCCL also does what one rank asks of it, so that one GPU is enough to try it.
  if (rows == RowTransport::kWhole) return make_whole_exchange(backend, timeout, std::move(ranks));
  if (backend->getSize() == 1) return nullptr;
  if (auto* shared = dynamic_cast<SharedMemoryBackend*>(backend.get())) {
    return make_in_place_exchange(c10::intrusive_ptr<SharedMemoryBackend>::reclaim_copy(shared),
                                  timeout, std::move(ranks));
  }
  return make_owned<PairwiseExchange>(backend, timeout, std::move(ranks));
}

}  // namespace zero
