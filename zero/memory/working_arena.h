// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The working parameters, seen as buckets.
//
// An arena whose layout is in place has one flat tensor; its working parameters become views of it,
// so that the rows of a bucket are the parameters' own memory. With other layouts the model keeps
// its storage; a bucket is assembled in a pool buffer and copied out to the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "bookkeeping/plan.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/parameter_table.h"

namespace zero {

// Throws c10::Error when `parameter` has holes in its memory and `layout` leaves it there.
void check_dense(const ParameterLayout& layout, const Parameter& parameter);

class WorkingArena {
 public:
  // References must outlive the arena. Calls attach().
  WorkingArena(const Plan& plan, const ParameterTable& table, BufferPool& pool);

  // In place: makes every parameter a view of its place, after copying its present values there if
  // `keep_values`. Idempotent; restores views that were replaced. Else: gives back their memory
  // order to parameters that were replaced; throws c10::Error when one is not dense.
  void attach(bool keep_values = true);

  // The rows of a bucket in the arena's dtype, to be ended with publish(). In place: the memory of
  // the parameters. Else: a pool buffer with unspecified contents.
  Rows rows(int64_t bucket) { return memory_.rows(bucket); }
  // Makes gathered rows visible in the working parameters. In place: they already are.
  // `only_remembered`: leaves out parameters that are not as the table remembers them.
  void publish(int64_t bucket, const Rows& rows, bool only_remembered = false);
  // Copies what `rank` owns of the working parameters into `row`: fp32, as long as that row of the
  // bucket; padding becomes zero.
  void read_row(int64_t bucket, int64_t rank, const at::Tensor& row) const;

  // The checks of calls that read or write parameters which may have been changed: throws
  // c10::Error for other shapes, dtypes or devices, and for memory with holes or in common.
  void verify_shapes() const;

  // The device of all managed parameters.
  at::Device device() const { return table_.parameters().front().tensor.device(); }

  struct Broadcast {
    at::Tensor tensor;
    int64_t domain = 0;  // the ranks that hold it
  };
  // The tensors that hold all managed parameters: flat arenas, or parameters one
  // by one.
  std::vector<Broadcast> broadcasts() const;

  // True where a bucket's rows are the parameters' memory in fp32: the own row
  // is then the master.
  bool is_master(int64_t bucket) const;

  // Leaves the memory to the parameters in it, which another arena is to take over: nothing but the
  // destructor may be called then.
  void release() { memory_.release(); }

 private:
  const Plan& plan_;
  const ParameterTable& table_;
  BucketMemory memory_;
};

}  // namespace zero
