// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/stop_signal.h"

#include <csignal>

namespace zero::examples {
namespace {

volatile std::sig_atomic_t requested = 0;

void request(int) { requested = 1; }

}  // namespace

void watch_stop_signal() { std::signal(SIGTERM, request); }

bool stop_requested() { return requested != 0; }

}  // namespace zero::examples
