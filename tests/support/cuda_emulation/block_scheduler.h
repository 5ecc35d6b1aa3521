// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the threads of a CUDA block one at a time on the calling thread, each on a stack of its own.
//
// Under ThreadSanitizer every CUDA thread is a fiber that only a barrier orders with the others of
// its block, so that a missing barrier is reported as a data race. Warp functions pass values and
// order no memory, as CUDA's do; __syncwarp() does. The blocks of a grid run one after the other
// and are ordered: they share the static variables that stand for __shared__ memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace cuda_emulation {

// Ends the process with this sentence.
[[noreturn]] void fail(const char* sentence);

// Calls body() once for every thread of every block. Any host thread may call; grids run one after
// the other.
void run_grid(unsigned grid, unsigned block, const std::function<void()>& body);

// Of the CUDA thread that is running.
unsigned thread_index();
unsigned block_index();
unsigned block_size();
unsigned grid_size();

// Returns when all threads of the block have called it at the same place. Ends the process where
// that cannot happen.
void wait_for_block(const char* file, int line);

// Returns when all 32 threads of the warp have called it, and orders their memory.
void wait_for_warp();

// Returns when all 32 threads of the warp have called it, with the values of all of them.
void exchange_in_warp(unsigned mask, uint64_t value, uint64_t (&values)[32]);

}  // namespace cuda_emulation
