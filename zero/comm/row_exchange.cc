// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/row_exchange.h"

#include <utility>

#include "zero/base/own_process.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/in_place_exchange.h"
#include "zero/comm/pairwise_exchange.h"
#include "zero/comm/whole_exchange.h"

namespace zero {

RowExchange::RowExchange(BackendPtr backend, std::chrono::milliseconds timeout)
    : backend_(std::move(backend)), timeout_(timeout) {}

at::Tensor RowExchange::allocate(int64_t /*bytes*/) const { return {}; }

void RowExchange::hang_up() noexcept {
  try {
    backend_->abort();
  } catch (...) {  // A backend that cannot even stop leaves nothing to be done.
  }
}

std::shared_ptr<RowExchange> make_row_exchange(const RowExchange::BackendPtr& backend,
                                               RowTransport rows,
                                               std::chrono::milliseconds timeout) {
  if (!backend) return nullptr;
  // NCCL also does what one rank asks of it, so that one GPU is enough to try it.
  if (rows == RowTransport::kWhole) return make_owned<WholeExchange>(backend, timeout);
  if (backend->getSize() == 1) return nullptr;
  if (auto* shared = dynamic_cast<SharedMemoryBackend*>(backend.get())) {
    return make_owned<InPlaceExchange>(
        c10::intrusive_ptr<SharedMemoryBackend>::reclaim_copy(shared), timeout);
  }
  return make_owned<PairwiseExchange>(backend, timeout);
}

}  // namespace zero
