// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/broadcasts.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <sstream>

#include "zero/comm/row_communicator.h"
#include "zero/memory/whole_tensor.h"

namespace zero {

void Broadcasts::send(const at::Tensor& tensor, const DomainCommunicators& comms,
                      const char* what) const {
  const bool alone = comms.data->world_size() == 1 && comms.replicas == nullptr;
  if (tensor.numel() == 0 || alone) return;
  at::NoGradGuard no_grad;
  // A transport between devices takes no host memory, such as a counter in a buffer.
  const c10::Device device = arena_.device();
  const bool moves =
      tensor.device() != device && !RowCommunicator(*comms.data).waits_on_host(device);
  const at::Tensor sent = moves ? tensor.detach().to(device) : tensor.detach();
  // As bytes, since not every transport knows every dtype.
  at::Tensor flat = sent.contiguous().reshape({-1}).view(at::kByte);
  // In pieces, since each operation has the timeout to itself.
  for (int64_t begin = 0; begin < flat.numel(); begin += kBroadcastBytes) {
    const at::Tensor piece = flat.narrow(0, begin, std::min(kBroadcastBytes, flat.numel() - begin));
    comms.data->broadcast(piece, 0, what).wait();
    if (comms.replicas != nullptr) comms.replicas->broadcast(piece, 0, what).wait();
  }
  if (moves || !tensor.is_contiguous()) {
    overwrite(tensor, flat.view(tensor.scalar_type()).view(tensor.sizes()));
  }
}

void Broadcasts::parameters() const {
  for (const WorkingArena::Broadcast& item : arena_.broadcasts()) {
    send(item.tensor, comms_.domains[item.domain], "parameters");
  }
}

void Broadcasts::over_home(const std::vector<NamedTensor>& tensors, const char* what) const {
  for (const NamedTensor& item : tensors) send(item.tensor, comms_.home, what);
}

std::string shapes_of(const std::vector<NamedTensor>& tensors) {
  std::ostringstream text;
  for (const NamedTensor& item : tensors) {
    text << (item.tensor.is_same(tensors.front().tensor) ? "" : ", ") << item.name << " "
         << item.tensor.sizes() << " " << item.tensor.scalar_type();
  }
  return text.str();
}

}  // namespace zero
