// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/row_exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

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

}  // namespace zero
