// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/shard_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zero {
namespace {

// A step waits at most for one of them.
constexpr int64_t kPiece = int64_t{1} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

bool is_plain(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous(); }

}  // namespace

at::Tensor fresh_memory(int64_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (bytes < kHugePage) return at::empty({bytes}, options);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "not enough memory: expected ", bytes, " bytes for a copy");
  madvise(memory, bytes, MADV_HUGEPAGE);  // refused by systems without them
  return at::from_blob(
      memory, {bytes}, [bytes](void* begin) { munmap(begin, bytes); }, options);
}

ShardCopies::ShardCopies(const std::vector<Copy>& copies) {
  for (const Copy& c : copies) {
    const auto bytes = static_cast<int64_t>(c.from.nbytes());
    TORCH_INTERNAL_ASSERT(is_plain(c.to) && static_cast<int64_t>(c.to.nbytes()) == bytes);
    const int64_t piece = is_plain(c.from) ? kPiece : bytes;
    for (int64_t begin = 0; begin < bytes; begin += piece) {
      pieces_.push_back({c.from, c.to, begin, std::min(piece, bytes - begin), c.bucket});
    }
  }
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const Piece& a, const Piece& b) { return a.bucket > b.bucket; });
}

std::shared_ptr<ShardCopies> ShardCopies::of(FileToSave& file,
                                             const std::vector<int64_t>& bucket_of,
                                             at::Tensor& memory) {
  TORCH_INTERNAL_ASSERT(bucket_of.size() == file.tensors.size(), "a bucket for every tensor");
  int64_t bytes = 0;
  for (size_t i = 0; i < bucket_of.size(); ++i) {
    if (bucket_of[i] != kOfNone) bytes += aligned(file.tensors[i].tensor.nbytes());
  }
  const bool fits =
      memory.defined() && memory.numel() == bytes && memory.storage().use_count() == 1;
  if (!fits) memory = fresh_memory(bytes);
  std::vector<Copy> copies;
  int64_t at = 0;
  for (size_t i = 0; i < bucket_of.size(); ++i) {
    if (bucket_of[i] == kOfNone) continue;
    at::Tensor& tensor = file.tensors[i].tensor;
    const auto size = static_cast<int64_t>(tensor.nbytes());
    const at::Tensor to =
        memory.narrow(0, at, size).view(tensor.scalar_type()).view(tensor.sizes());
    at += aligned(size);
    copies.push_back({std::exchange(tensor, to), to, bucket_of[i]});
  }
  return std::make_shared<ShardCopies>(copies);
}

void ShardCopies::copy_next(std::unique_lock<std::mutex>& lock) {
  const size_t index = next_++;
  running_.insert(index);
  const Piece piece = pieces_[index];
  lock.unlock();
  std::exception_ptr problem;
  try {
    const at::NoGradGuard no_grad;
    const at::Tensor from = is_plain(piece.from) ? piece.from : piece.from.cpu().contiguous();
    std::memcpy(static_cast<char*>(piece.to.mutable_data_ptr()) + piece.begin,
                static_cast<const char*>(from.const_data_ptr()) + piece.begin, piece.bytes);
  } catch (...) {
    problem = std::current_exception();
  }
  lock.lock();
  running_.erase(index);
  if (problem) {
    problem_ = problem;
    next_ = pieces_.size();
  }
  changed_.notify_all();
}

void ShardCopies::copy_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (next_ < pieces_.size()) copy_next(lock);
  changed_.wait(lock, [&] { return running_.empty(); });
  pieces_.clear();  // and with them the last use of the memory, maybe
  next_ = 0;
  if (problem_) std::rethrow_exception(problem_);
}

void ShardCopies::wait(int64_t bucket) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_after = [&] { return next_ >= pieces_.size() || pieces_[next_].bucket < bucket; };
  while (!is_after()) copy_next(lock);
  changed_.wait(lock,
                [&] { return running_.empty() || pieces_[*running_.begin()].bucket < bucket; });
}

}  // namespace zero
