// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// SIGTERM as a request that the training loop answers between two steps: job
// schedulers send it some time before they kill.
#pragma once

namespace zero::examples {

// From now on SIGTERM ends nothing by itself. Of this process.
void watch_stop_signal();

// Whether it has come.
bool stop_requested();

}  // namespace zero::examples
