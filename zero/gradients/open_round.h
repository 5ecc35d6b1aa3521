// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The round that is open: which gradients are in its buckets, and which bucket is sent next.
//
//   (pack*  (fill_next  take_next)*)*  restart
//
// A bucket is encoded at once when it is full: it may have to wait for the buckets before it, and
// encoded it may be smaller.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/gradients/micro_batch_sums.h"
#include "zero/gradients/wire_format.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/rows.h"

namespace zero {

class OpenRound {
 public:
  // Of that many `parameters` on `device`. References must outlive this.
  OpenRound(const Plan& plan, const WireFormats& wires, BufferPool& pool, size_t parameters,
            c10::Device device);

  // Returns whether the gradient of the parameter is in this round, sent or not.
  bool has(int64_t parameter) const { return packed_[parameter] != 0; }
  bool has_any() const;

  // The dtype in which a gradient is packed; nothing for a parameter without elements.
  std::optional<c10::ScalarType> packed_dtype(int64_t parameter) const;
  // Copies a gradient into its buckets: with micro-batches the sums of this rank's nodes, one for
  // each of WireFormat::matrices().
  void pack(int64_t parameter, c10::ArrayRef<MicroBatchSums::NodeSum> sums);

  // The bucket that is sent next, unless all were taken.
  int64_t next() const { return order_[next_]; }
  bool next_is_full() const { return !all_taken() && open_[next()].missing == 0; }
  bool any_taken() const { return next_ > 0; }
  bool all_taken() const { return next_ == order_.size(); }
  // Packs zeros for what is missing in the next bucket, and makes the current stream wait for
  // others that packed into it.
  void fill_next();
  // Hands over the encoded rows of the next bucket, which is full. They are from the pool.
  Rows take_next();

  // Begins the next round.
  void restart();
  // Sends buckets with a parameter that is not `used` last from now on. Requires a round that has
  // no gradient yet.
  void expect_unused(const std::vector<uint8_t>& used);

  // Bytes of gradients that are packed and not taken.
  int64_t unsent_bytes() const { return unsent_bytes_; }

 private:
  struct BucketSlot {
    int64_t bucket = 0;
    size_t slot = 0;  // in the bucket
  };
  struct OpenBucket {
    Rows packed;   // undefined until its first gradient arrives, and when encoded
    Rows encoded;  // from when it is full until it is taken
    std::optional<c10::Stream> stream = std::nullopt;  // on a GPU: the last that packed
    int64_t missing = 0;                               // parameters not yet packed
    int64_t unsent_bytes = 0;                          // of those that are
  };

  const WireFormat& wire_of(const Bucket& bucket) const { return *wires_[bucket.arena]; }
  const at::Tensor& open(int64_t bucket);
  // Matrix `i` of those that the open bucket has: see WireFormat::matrices().
  at::Tensor matrix(int64_t bucket, int64_t i) const;
  // Makes the current stream wait for others that packed into the bucket: a model may use several.
  void wait_for_packing(int64_t bucket);
  void encode(int64_t bucket);

  const Plan& plan_;
  const WireFormats& wires_;
  BufferPool& pool_;
  const c10::Device device_;
  std::vector<std::vector<BucketSlot>> slots_;  // per parameter
  std::vector<uint8_t> packed_;                 // per parameter
  std::vector<OpenBucket> open_;                // per bucket
  std::vector<uint8_t> expected_;               // what order_ was made from
  std::vector<int64_t> order_;                  // buckets, as they are sent
  size_t next_ = 0;                             // position in order_
  int64_t unsent_bytes_ = 0;
};

}  // namespace zero
