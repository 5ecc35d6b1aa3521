// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a test can set and see of the emulated device.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/cuda_emulation/cuda_runtime_api.h"

namespace cuda_emulation {

// The order in which the blocks of a grid, the warps of a block and the threads of a warp run, each
// as far as it can without the others. Each order is as good as any other for a correct kernel; one
// that lacks a barrier gives other results in some of them.
enum class Order { kForward, kBackward, kShuffled };

// The value at the start is that of the environment variable ZERO_EMULATION_ORDER: forward,
// backward or shuffled.
void set_order(Order order);

// 2 at the start.
void set_processors(int processors);

// The next launch does nothing and returns this error.
void fail_next_launch(cudaError_t error);

// Every call that gives the device work does nothing and returns this error, and
// cudaGetLastError() does not clear it: what a kernel leaves behind that read memory which is not
// there. cudaSuccess ends it, which on a GPU only a new process does.
void break_device(cudaError_t error);

// The number of blocks of each launch since the last call.
std::vector<int64_t> take_grids();

}  // namespace cuda_emulation
