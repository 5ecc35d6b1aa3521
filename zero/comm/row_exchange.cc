// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/row_exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "zero/base/own_process.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/in_place_exchange.h"
#include "zero/comm/pairwise_exchange.h"
#include "zero/comm/whole_exchange.h"

namespace zero {

BackendExchange::BackendExchange(BackendPtr backend, std::chrono::milliseconds timeout,
                                 BackendRanks ranks)
    : backend_(std::move(backend)), timeout_(timeout), ranks_(std::move(ranks)) {}

c10::Device BackendExchange::device() const {
  return backend_->getBoundDeviceId().value_or(at::kCPU);
}

int64_t BackendExchange::own_bytes(const Rows& rows) const {
  return static_cast<int64_t>(rows.row(rank()).nbytes());
}

int64_t BackendExchange::bytes_to_peers(const Rows& rows) const {
  return static_cast<int64_t>(rows.values().nbytes()) - own_bytes(rows);
}

at::Tensor BackendExchange::received_in(const at::Tensor& buffer, const Rows& rows) const {
  const int64_t numel = rows.row(rank()).numel();
  const at::Tensor memory = buffer.defined() ? buffer.view(rows.values().scalar_type())
                                             : at::empty({0}, rows.values().options());
  return memory.view({world_size(), numel});
}

void BackendExchange::hang_up() noexcept {
  try {
    backend_->abort();
  } catch (...) {  // A backend that cannot even stop leaves nothing to be done.
  }
}

std::shared_ptr<RowExchange> make_row_exchange(const c10::intrusive_ptr<c10d::Backend>& backend,
                                               RowTransport rows, std::chrono::milliseconds timeout,
                                               BackendRanks ranks) {
  if (!backend) return nullptr;
  // NCCL also does what one rank asks of it, so that one GPU is enough to try it.
  if (rows == RowTransport::kWhole)
    return make_owned<WholeExchange>(backend, timeout, std::move(ranks));
  if (backend->getSize() == 1) return nullptr;
  if (auto* shared = dynamic_cast<SharedMemoryBackend*>(backend.get())) {
    return make_owned<InPlaceExchange>(
        c10::intrusive_ptr<SharedMemoryBackend>::reclaim_copy(shared), timeout, std::move(ranks));
  }
  return make_owned<PairwiseExchange>(backend, timeout, std::move(ranks));
}

}  // namespace zero
