// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sends rank 0's values of parameters and buffers to the other ranks, and to replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "zero/agreement/communicators.h"
#include "zero/comm/domain_communicators.h"
#include "zero/memory/parameter_table.h"
#include "zero/memory/working_arena.h"

namespace zero {

class Broadcasts {
 public:
  // The most that one operation sends.
  static constexpr int64_t kBroadcastBytes = int64_t{64} << 20;

  // References must outlive this.
  Broadcasts(const WorkingArena& arena, OptimizerCommunicators& comms)
      : arena_(arena), comms_(comms) {}

  // Collective. All managed parameters, each within its domain; those of a domain whose ranks have
  // equal values already are not sent, on a CPU.
  void parameters() const;
  // Collective over the home group. `what` is named in errors. Small tensors, of which a model has
  // many, travel together. A rank on which another optimizer manages a tensor keeps what it has.
  void over_home(const std::vector<NamedTensor>& tensors, const char* what) const;

 private:
  // The domains in which all ranks have the same bits.
  std::set<int64_t> equal_domains(const std::vector<WorkingArena::Broadcast>& items) const;
  void send(const at::Tensor& tensor, const DomainCommunicators& comms, const char* what) const;
  // Over the home group, in one message of `bytes`: tensors, each padded to what aligns the next.
  void send_together(const std::vector<at::Tensor>& tensors, int64_t bytes, const char* what) const;

  const WorkingArena& arena_;
  OptimizerCommunicators& comms_;
};

// Names, shapes and dtypes, which must be equal on all ranks before tensors are sent: a transport
// that is given different sizes aborts or hangs.
std::string shapes_of(const std::vector<NamedTensor>& tensors);

}  // namespace zero
