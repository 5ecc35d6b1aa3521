// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sends rank 0's values of parameters and buffers to the other ranks, and to replicas.
#pragma once

#include <string>
#include <vector>

#include "zero/memory/parameter_table.h"

namespace zero {

struct Engine;

// Collective. All managed parameters, each within its domain; those of a domain whose ranks have
// equal values already are not sent, on a CPU.
void broadcast_parameters(const Engine& engine);
// Collective over the home group. `what` is named in errors. Small tensors, of which a model has
// many, travel together. A rank on which another optimizer manages a tensor keeps what it has.
void broadcast_over_home(const Engine& engine, const std::vector<NamedTensor>& tensors,
                         const char* what);

// Names, shapes and dtypes, which must be equal on all ranks before tensors are sent: a transport
// that is given different sizes aborts or hangs.
std::string shapes_of(const std::vector<NamedTensor>& tensors);

}  // namespace zero
