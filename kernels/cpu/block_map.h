// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how the work of one CPU call is cut up and given to threads.
//
// Every span is cut into blocks of kBlock elements, the last one shorter, and
// each thread takes consecutive blocks. Block borders depend on the spans alone,
// so whatever is computed per block does not depend on the number of threads.
// Threads are those of at::parallel_for: at::get_num_threads() of them, or only
// the calling one inside another parallel region. Includers need -fopenmp,
// without which parallel_for is serial in silence.
#pragma once

#ifndef _OPENMP
#error "zero: this file is compiled without -fopenmp, and at::parallel_for would use one thread"
#endif

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zero::kernels {

class BlockMap {
 public:
  static constexpr int64_t kBlock = 16384;

  // numel_of(i), for i in [0, count), is the length of span i.
  template <class NumelOf>
  BlockMap(int64_t count, const NumelOf& numel_of) : numel_(count), first_block_(count + 1, 0) {
    for (int64_t i = 0; i < count; ++i) {
      numel_[i] = numel_of(i);
      elements_ += numel_[i];
      first_block_[i + 1] = first_block_[i] + (numel_[i] + kBlock - 1) / kBlock;
    }
  }

  int64_t blocks() const { return first_block_.back(); }

  // Calls f(span, begin, end, block) on several threads until all elements were
  // covered once: elements [begin, end) of `span`, which start at block `block`.
  // Between begin and end there may be several blocks, which one thread does.
  template <class F>
  void parallel_for_each_run(const F& f) const {
    // Below the elements of two whole blocks a thread costs more to wake than it saves.
    const int64_t grain = 2 * kBlock * blocks() / std::max<int64_t>(elements_, 1);
    at::parallel_for(0, blocks(), grain, [&](int64_t begin, int64_t end) {
      auto after = std::upper_bound(first_block_.begin(), first_block_.end(), begin);
      for (int64_t span = after - first_block_.begin() - 1; begin < end; ++span) {
        const int64_t stop = std::min(end, first_block_[span + 1]);
        if (begin < stop) {
          f(span, (begin - first_block_[span]) * kBlock,
            std::min((stop - first_block_[span]) * kBlock, numel_[span]), begin);
          begin = stop;
        }
      }
    });
  }

 private:
  int64_t elements_ = 0;
  std::vector<int64_t> numel_;
  std::vector<int64_t> first_block_;  // of each span, and the number of blocks at the end
};

}  // namespace zero::kernels
