// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a function on every rank; if it throws on any, throws on all.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "zero/communicator.h"

namespace zero {

// Collective. Runs `body` on every rank and returns what it returned on each, by
// rank. Where it threw on any rank, throws on all: the lowest of those ranks and what it said. Only
// where each of them threw CommunicationError this does too; else it names the lowest that threw
// something else. What only ranks that join the job threw is CommunicationError on the others.
std::vector<std::string> run_on_all_ranks(Communicator& control, const std::string& what,
                                          const std::function<std::string()>& body);
// The same where `body` returns nothing.
template <typename Body>
requires std::is_void_v<std::invoke_result_t<const Body&>>
void run_on_all_ranks(Communicator& control, const std::string& what, const Body& body) {
  run_on_all_ranks(control, what, [&] {
    body();
    return std::string();
  });
}

}  // namespace zero
