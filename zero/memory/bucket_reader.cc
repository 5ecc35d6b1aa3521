// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/bucket_reader.h"

namespace zero {

void BucketReaders::add(std::shared_ptr<BucketReader> reader) {
  readers_.push_back(std::move(reader));
  if (replays_) wait(0);
}

void BucketReaders::wait(int64_t bucket) {
  if (readers_.empty()) return;
  OwnThreadWait limit(
      rank_ + " waits for its thread that copies the shard for a save or a protected step", limit_);
  for (const auto& reader : readers_) reader->wait(bucket, limit);
  if (bucket == 0) forget();
}

}  // namespace zero
