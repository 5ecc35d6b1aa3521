// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/broadcasts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "zero/agreement/fingerprint.h"
#include "zero/base/plain_text.h"
#include "zero/comm/row_communicator.h"
#include "zero/memory/whole_tensor.h"
#include "zero/training/engine.h"

namespace zero {
namespace {

// The most that one operation sends.
constexpr int64_t kBroadcastBytes = int64_t{64} << 20;

// A message takes as long as copying this much.
constexpr int64_t kSmallBytes = int64_t{256} << 10;
constexpr int64_t kTogetherBytes = int64_t{4} << 20;

// Where every dtype may begin.
int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

bool is_alone(const DomainCommunicators& comms) {
  return comms.data->world_size() == 1 && comms.replicas == nullptr;
}

void send(const at::Tensor& tensor, c10::Device device, const DomainCommunicators& comms,
          const char* what) {
  if (tensor.numel() == 0 || is_alone(comms)) return;
  at::NoGradGuard no_grad;
  // A transport between devices takes no host memory, such as a counter in a buffer.
  const bool moves =
      tensor.device() != device && !RowCommunicator(*comms.data).waits_on_host(device);
  const at::Tensor sent = moves ? tensor.detach().to(device) : tensor.detach();
  // As bytes, since not every transport knows every dtype.
  at::Tensor flat = sent.contiguous().reshape({-1}).view(at::kByte);
  // In pieces, since each operation has the timeout to itself.
  for (const at::Tensor& piece : flat.split(kBroadcastBytes)) {
    comms.data->broadcast(piece, 0, what).wait();
    if (comms.replicas != nullptr) comms.replicas->broadcast(piece, 0, what).wait();
  }
  if (moves || !tensor.is_contiguous()) {
    overwrite(tensor, flat.view(tensor.scalar_type()).view(tensor.sizes()));
  }
}

// The domains in which all ranks have the same bits.
std::set<int64_t> equal_domains(const std::vector<WorkingArena::Broadcast>& items,
                                const std::vector<DomainCommunicators>& domains) {
  std::map<int64_t, Fingerprint> hashes;  // of all tensors of a domain
  for (const WorkingArena::Broadcast& item : items) {
    if (is_alone(domains[item.domain])) continue;
    Fingerprint& all = hashes[item.domain];
    const Fingerprint own = fingerprint_of(item.tensor.const_data_ptr(), item.tensor.nbytes());
    all = fingerprint_of(plain_text(all[0], " ", all[2], " ", own[0], " ", own[2]));
  }
  std::set<int64_t> equal;
  for (const auto& [domain, hash] : hashes) {
    const at::Tensor words = at::empty({kFingerprintWords}, at::TensorOptions().dtype(at::kInt));
    std::ranges::copy(hash, words.mutable_data_ptr<int32_t>());
    const DomainCommunicators& comms = domains[domain];
    for (Communicator* ranks : {comms.data, comms.replicas}) {
      if (ranks != nullptr) ranks->all_reduce_max(words, "hash of parameters").wait();
    }
    if (all_equal(words.const_data_ptr<int32_t>())) equal.insert(domain);
  }
  return equal;
}

// In one message of `bytes`: tensors, each padded to what aligns the next.
void send_together(const std::vector<at::Tensor>& tensors, int64_t bytes, c10::Device device,
                   const DomainCommunicators& comms, const char* what) {
  if (bytes == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor all = at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte));
  std::vector<at::Tensor> parts;  // of `all`, each with the dtype and shape of its tensor
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    const auto needed = static_cast<int64_t>(tensor.nbytes());
    parts.push_back(all.narrow(0, begin, needed).view(tensor.scalar_type()).view(tensor.sizes()));
    parts.back().copy_(tensor.detach());
    begin += aligned(needed);
  }
  send(all, device, comms, what);
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (!tensors[t].is_contiguous()) {
      overwrite(tensors[t], parts[t]);
      continue;
    }
    // Versions stay, as when a tensor of its own is received: a graph may have saved it.
    const at::AutoDispatchBelowADInplaceOrView same_version;
    tensors[t].detach().copy_(parts[t]);
  }
}

}  // namespace

void broadcast_parameters(const Engine& engine) {
  std::vector<WorkingArena::Broadcast> items = engine.arena.broadcasts();
  // Ranks mostly begin with the values of one seed, or have had the same values before. On a GPU a
  // broadcast is as fast as a hash.
  if (engine.arena.device().is_cpu()) {
    const std::set<int64_t> equal = equal_domains(items, engine.comms->domains);
    std::erase_if(items, [&](const auto& item) { return equal.contains(item.domain); });
  }
  for (const WorkingArena::Broadcast& item : items) {
    send(item.tensor, engine.arena.device(), engine.comms->domains[item.domain], "parameters");
  }
}

void broadcast_over_home(const Engine& engine, const std::vector<NamedTensor>& tensors,
                         const char* what) {
  const DomainCommunicators& home = engine.comms->home;
  const c10::Device device = engine.arena.device();
  if (is_alone(home)) return;
  std::vector<at::Tensor> small;
  int64_t bytes = 0;
  const auto send_small = [&] {
    send_together(small, bytes, device, home, what);
    small.clear();
    bytes = 0;
  };
  for (const NamedTensor& item : tensors) {
    // What another optimizer manages here, whose rows rank 0 may not have yet, keeps its values and
    // its version. Another rank may need them: all send alike.
    const at::Tensor tensor = is_managed(item.tensor) ? item.tensor.detach().clone() : item.tensor;
    const auto needed = static_cast<int64_t>(tensor.nbytes());
    if (needed > kSmallBytes) {
      send(tensor, device, home, what);
      continue;
    }
    if (needed == 0) continue;
    if (bytes + aligned(needed) > kTogetherBytes) send_small();
    small.push_back(tensor);
    bytes += aligned(needed);
  }
  send_small();
}

std::string shapes_of(const std::vector<NamedTensor>& tensors) {
  std::string text;
  for (const NamedTensor& item : tensors) {
    text += plain_text(text.empty() ? "" : ", ", item.name, " ", item.tensor.sizes(), " ",
                       item.tensor.scalar_type());
  }
  return text;
}

}  // namespace zero
