// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/shard_copies.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace zero {

void ShardCopies::set_first_copied(int64_t bucket) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    first_copied_ = bucket;
  }
  changed_.notify_all();
}

void ShardCopies::copy(FileToSave& file, const std::vector<int64_t>& bucket_of) {
  TORCH_INTERNAL_ASSERT(bucket_of.size() == file.tensors.size(), "a bucket for every tensor");
  copy_each(bucket_of, [&](size_t i) {
    at::Tensor& tensor = file.tensors[i].tensor;
    tensor = tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  });
}

void ShardCopies::copy_each(const std::vector<int64_t>& bucket_of,
                            const std::function<void(size_t tensor)>& copy_tensor) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> order(bucket_of.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bucket_of[a] > bucket_of[b]; });
  try {
    for (size_t i = 0; i < order.size(); ++i) {
      const int64_t bucket = bucket_of[order[i]];
      if (bucket != kOfNone) copy_tensor(order[i]);
      const int64_t next = i + 1 < order.size() ? bucket_of[order[i + 1]] : kOfNone;
      if (next != bucket) set_first_copied(next + 1);
    }
  } catch (...) {
    set_first_copied(0);
    throw;
  }
  set_first_copied(0);
}

void ShardCopies::wait(int64_t bucket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return first_copied_ <= bucket; });
}

}  // namespace zero
