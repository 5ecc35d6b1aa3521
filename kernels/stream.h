// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A Stream says on which processor a kernel runs. Every function of this folder takes a Stream
// last.
//
//   Stream{}             The memory is host memory. The work is done by the
//                        calling thread and its share of the CPU threads
//                        (at::get_num_threads()), and is finished on return.
//                        Any thread may call, also at the same time as others.
//   Stream{true, s}      The memory is device memory of the current CUDA device
//                        and s is a cudaStream_t of it (null: the legacy
//                        default stream). The work is enqueued on s; the host
//                        never waits, and tables given as arguments have been
//                        copied when the call returns. Scalars that are given
//                        by pointer are read on the device when the kernel runs.
//
// A program built without CUDA throws c10::Error, naming --config=cuda, when it
// is given Stream{true, ...}.
#pragma once

namespace zero::kernels {

// The processor on which a kernel runs.
struct Stream {
  bool cuda = false;
  void* handle = nullptr;
};

}  // namespace zero::kernels
