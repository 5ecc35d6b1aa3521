// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/exchange/row_exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace zero {

BackendExchange::BackendExchange(BackendPtr backend, std::chrono::milliseconds timeout,
                                 BackendRanks ranks)
    : backend_(std::move(backend)), timeout_(timeout), ranks_(std::move(ranks)) {
  SentBytes one;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) add_sent(peer, 1, one);
  }
  peers_on_links_ = one.links;
}

c10::Device BackendExchange::device() const {
  return backend_->getBoundDeviceId().value_or(at::kCPU);
}

int64_t BackendExchange::own_bytes(const Rows& rows) const {
  return static_cast<int64_t>(rows.row(rank()).nbytes());
}

void BackendExchange::add_sent(int peer, int64_t bytes, SentBytes& sent) const {
  const std::vector<int>& machines = ranks_.machines;
  const bool link = over_links() && (machines.empty() || machines[peer] != machines[rank()]);
  sent.all += bytes;
  if (link) sent.links += bytes;
}

SentBytes BackendExchange::sent_to_each(int64_t bytes) const {
  return {(world_size() - 1) * bytes, peers_on_links_ * bytes};
}

SentBytes BackendExchange::sent_rows(const Rows& rows) const {
  if (rows.equal()) return sent_to_each(own_bytes(rows));
  SentBytes sent;
  for (int peer = 0; peer < world_size(); ++peer) {
    const int64_t bytes = rows.lengths().numel(peer) * rows.values().element_size();
    if (peer != rank()) add_sent(peer, bytes, sent);
  }
  return sent;
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
