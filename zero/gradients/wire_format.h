// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A WireFormat decides how the gradients of a bucket are sent: it makes the memory that gradients
// are packed into, encodes it into one row for each rank, and adds the encoded rows of all ranks up
// into a gradient shard. Exchanges see encoded rows as bytes. A new format is one more class, an
// option that asks for it, and a line in wire_format.cc.
//
//   open() -> packed rows, gradients are copied into it -> encode() -> exchange
//   -> the row of every rank -> decode_and_sum() -> shard (+)= scale * sum, in fp32
//
// Formats hold no state. Their functions may be called from several threads at a time; they run on
// the current stream of the tensors' device and do not wait for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/comm/row_communicator.h"
#include "zero/memory/buffer_pool.h"

namespace zero {

struct ZeroOptions;

class WireFormat : public RowFormat {
 public:
  // Bytes of the encoded row of `numel` gradients. Each row is encoded by itself, so that its owner
  // can decode it without the others.
  virtual int64_t bytes(int64_t numel) const = 0;

  // The dtype in which gradients are packed.
  virtual c10::ScalarType packed_dtype() const = 0;
  // The number of matrices that gradients are packed into, one behind the other in what open()
  // returns: see tree_wire.h.
  virtual int64_t matrices() const { return 1; }
  // True when gradients are packed straight into the encoded rows, so that encode() copies nothing
  // and a bucket needs no second buffer.
  virtual bool packs_in_place() const { return true; }

  // Takes memory from `pool` to pack a bucket into: rows of these lengths, of packed_dtype(). The
  // caller writes a gradient, or zeros, for every parameter of the bucket, and leaves padding as it
  // is: open() clears the memory in formats whose padding has an effect on other values.
  virtual Rows open(const BucketRows& lengths, BufferPool& pool) const {
    return {pool.acquire(lengths.total(), packed_dtype()), lengths};
  }

  // Takes over what open() returned, once it is full. Returns the encoded rows, where one of n
  // gradients has bytes(n) bytes; the caller gives their values back to `pool`. Their dtype is that
  // of their elements if adding up rows element by element is the same as decode_and_sum(), so that
  // an exchange may add some of them in fp32; else kByte.
  virtual Rows encode(Rows packed, BufferPool& /*pool*/) const { return packed; }

  // shard = scale * (row 0 + row 1 + ...), or shard += that product with `accumulate`. `rows` are
  // encoded rows or, unless those are kByte, partial sums of them in fp32. Decoded values are added
  // up in the order of the rows; each addition and product is rounded to fp32, so that the bits
  // depend on the rows alone; TreeWire has another order. A gradient that is not finite makes an
  // element of the shard that is not finite. Gradients of 0 add 0.
  //   shard  [row_numel] fp32
  virtual void decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                              bool accumulate) const = 0;

  void sum(const SummandRows& rows, const at::Tensor& sum) const override {
    decode_and_sum(rows, sum, 1.0F, /*accumulate=*/false);
  }
  // The elements of the sum of a machine's rows of `numel` gradients.
  virtual int64_t sum_numel(int64_t numel) const { return numel; }
};

// What kernels that add rows up element by element have in common: shard (+)= scale * sum of
// `rows`.
template <typename Args>
Args sum_arguments(const SummandRows& rows, const at::Tensor& shard, float scale, bool accumulate) {
  Args args;
  args.rows = rows.addresses;
  args.received = rows.received;
  args.own = rows.own_row;
  args.world_size = rows.count;
  args.own_rank = rows.own;
  args.numel = shard.numel();
  args.scale = scale;
  args.shard = shard.mutable_data_ptr<float>();
  args.accumulate = accumulate;
  return args;
}

// Throws c10::Error when `options` ask for a format that there is not, or not for gradients on
// `device`.
void check_wire_options(const ZeroOptions& options, c10::Device device);
// Returns the part of the options on which all ranks must agree, as text.
std::string describe_wire_options(const ZeroOptions& options);

using WireFormats = std::vector<std::shared_ptr<const WireFormat>>;

// Where a rank is, for formats that depend on it.
struct WirePlace {
  int64_t rank = 0;
  int64_t machines = 1;  // of equally many ranks; 1 where rows are exchanged in one level
};

// The format of each arena of `plan`. The same on all ranks for equal options, but for the rank.
WireFormats make_wire_formats(const Plan& plan, const ZeroOptions& options,
                              const WirePlace& place = {});

// Returns the bytes that a pool should keep between steps for `buffers` buckets in use at a time,
// those of the largest ones; and for two more that are being filled, in formats that do not pack in
// place.
int64_t buffer_bytes(const Plan& plan, const WireFormats& wires, size_t buffers);
// The sum of the largest `count` of `sizes`, or of all if there are fewer.
int64_t sum_of_largest(std::vector<int64_t> sizes, size_t count);

}  // namespace zero
