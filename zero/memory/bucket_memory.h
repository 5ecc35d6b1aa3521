// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory seen as the buckets of a plan, and the copies between a bucket and the
// parameters it holds.
//
// An arena whose layout is in place has one flat tensor, and a bucket is a part of it. With other
// layouts a bucket is a pool buffer until it is published.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "bookkeeping/plan.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/rows.h"

namespace zero {

class BucketMemory {
 public:
  // References must outlive it. Allocates nothing.
  BucketMemory(const Plan& plan, BufferPool& pool) : plan_(plan), pool_(pool) {}

  // In place: makes the flat tensor of an arena, zeros in their arena's dtype, in memory like the
  // pool's, unless they are there.
  void allocate();

  // The rows of a bucket in the arena's dtype, to be ended with publish(). In place: a view of the
  // flat tensor. Else: unspecified contents.
  Rows rows(int64_t bucket);
  // Copies `rows` to the tensors of the bucket's parameters, as copy_out_of_bucket() does, those
  // that are undefined left out, and gives their buffer back. In place: does nothing, since the
  // places hold them already.
  void publish(int64_t bucket, const Rows& rows,
               c10::function_ref<at::Tensor(int64_t parameter)> tensor_of);

  // In place: the part of the flat tensor that holds one parameter. Else: undefined.
  at::Tensor place(int64_t parameter, at::IntArrayRef sizes, at::IntArrayRef strides) const;
  // Per arena in place: [arena.numel]. Else: undefined. Empty before allocate().
  const std::vector<at::Tensor>& flat() const { return flat_; }
  int64_t bytes() const;  // of the flat tensors
  // Drops the flat tensors, which live as long as a view of them does.
  void release() { flat_.clear(); }

 private:
  const Plan& plan_;
  BufferPool& pool_;
  std::vector<at::Tensor> flat_;
};

// The copies below run on the current stream.

// Sets `to` to the elements of `from`, both contiguous and of any working dtype, rounded to nearest
// even.
void convert(const at::Tensor& from, const at::Tensor& to);

// `rows` is the whole bucket, contiguous; a tensor holds a whole parameter in its memory order.

// Writes the part of one parameter, with a cast where dtypes differ; zeros for an undefined tensor.
// `added`, which has the dtype of `rows`, is added to the tensor unless it is undefined.
// Padding is left as it is, since no gradient depends on it, or zero/gradients/wire_format.h has
// cleared it: to clear it here would cost a small model on many ranks more than all the rest.
void copy_into_bucket(const Plan& plan, const Bucket& bucket, const Slot& slot,
                      const at::Tensor& tensor, const at::Tensor& rows,
                      const at::Tensor& added = {});
// tensors[i] belongs to bucket.slots[i] and has the dtype of `rows`. Of an undefined one nothing is
// copied.
void copy_out_of_bucket(const Plan& plan, const Bucket& bucket, const at::Tensor& rows,
                        c10::ArrayRef<at::Tensor> tensors);

}  // namespace zero
