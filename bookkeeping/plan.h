// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Who owns what: parameters -> arenas -> buckets -> rows -> segments. Pure
// arithmetic on sizes: no tensors, no streams, no process groups.
//
//   arena     | p9 | p8      | p7 |  ...  | p0 |pad|   one dtype, domain and layout
//   buckets   |   bucket 0      |   bucket 1       |
//   bucket 0  as [world_size, row]:  | row 0 | row 1 | ... |   rank r owns row r
//
// Invariants (each one is a test in tests/bookkeeping/plan_test.cc):
//   1. Every element of every parameter is in exactly one bucket and so in
//      exactly one row.
//   2. Rows of a bucket follow each other without a gap and begin and end on
//      kAlignmentBytes. They are equally long, but for kWholeParameters.
//   3. kContiguous, kWholeParameters: every parameter starts on kAlignmentBytes
//      in its arena, and buckets are consecutive ranges that cover the arena
//      exactly.
//   4. A unit is kAlignmentBytes, or a block of the parameter if that is longer.
//      Padding is less than one unit per parameter, plus less than world_size
//      of the longest units per arena (kContiguous) or, per parameter, less than
//      world_size units (kPerParameter). A rank may own nothing but padding.
//   5. Buckets are numbered so that the bucket complete first in reverse
//      registration order comes first, over all arenas.
//   6. The plan depends only on the arguments, never on the rank.
//   7. Rows cut a parameter at multiples of its block, counted from its first
//      element.
//   8. kWholeParameters: every parameter is in one bucket and in one row of it,
//      that of parameter_owner, and rows have no padding behind parameters.
//
// Sizes and offsets are in elements unless the name says bytes.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bookkeeping/bucket_rows.h"

namespace zero {

// 64 bytes: a cache line and a full AVX-512 vector. A Linear weight off by one
// float measured 1.27x slower.
inline constexpr int64_t kAlignmentBytes = 64;

// How parameters are placed in buckets; bookkeeping/layout.h answers what depends on it.
enum class Layout {
  // Parameters lie one after another; a bucket is a range of the arena and may
  // cut through a parameter. Working parameters can be views of the arena.
  kContiguous,
  // Every parameter is padded to [world_size, ceil(numel / world_size)]; row r
  // of a bucket is the concatenation of its parameters' rows r.
  kPerParameter,
  // Every parameter belongs to one rank as a whole; row r of a bucket is the
  // parameters of rank r. bookkeeping/whole_parameters.h chooses the owners.
  kWholeParameters,
};

// The facts about one parameter that the plan needs.
struct ParameterInfo {
  int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  // Parameters of different domains are never mixed: a domain is one device and
  // one reduce group, numbered by the caller, with its own world size.
  int64_t domain = 0;
  // kWholeParameters: what a step of this parameter costs its owner, in units of
  // the caller, 0 or more. Default: numel, padding included.
  std::optional<int64_t> cost = std::nullopt;
  std::optional<Layout> layout = std::nullopt;  // default: PlanOptions::layout
  // Elements that stay on one rank, a power of two: what is stored for each block of so many
  // elements of the parameter then does not depend on the number of ranks.
  int64_t block = 1;
};

// 256 KiB a row, so that messages stay large when ranks are many; at least 4 MiB and at most 64 MiB
// for host memory. On a GPU each bucket costs several launches and its links are faster: at least
// 32 MiB and at most 128 MiB.
int64_t default_bucket_bytes(int64_t world_size, bool on_gpu = false);

// How a plan cuts parameters into buckets.
struct PlanOptions {
  Layout layout = Layout::kContiguous;  // of parameters that name none
  // A bucket holds about this many bytes of its arena's dtype, at least one
  // aligned row per rank. 0: one bucket per arena. Default: default_bucket_bytes()
  // of the ranks that share the arena.
  // kWholeParameters cuts no parameter, and a bucket ends behind the one that
  // makes it this large.
  std::optional<int64_t> bucket_bytes = std::nullopt;
  bool on_gpu = false;  // where parameters are; for that default
  // kWholeParameters: ranks [m * n, (m + 1) * n) of a domain share machine m.
  int64_t ranks_per_machine = 1;
};

// The place of one parameter, or of a part of it, in one bucket.
struct Slot {
  int64_t parameter = 0;
  int64_t begin = 0;    // first element of the parameter, in its memory order
  int64_t numel = 0;    // elements of the parameter in this bucket
  int64_t offset = 0;   // where `begin` is in the flat bucket; kPerParameter: where the parameter's
                        // columns begin in every row
  int64_t columns = 0;  // kPerParameter: elements of the parameter in one row, padding included
};

// Elements that are contiguous both in a parameter and in a flat bucket.
struct Span {
  int64_t parameter_begin = 0;
  int64_t bucket_begin = 0;
  int64_t numel = 0;
};

// The part of one parameter inside one row.
struct Segment {
  int64_t parameter = 0;
  int64_t begin = 0;  // in the parameter
  int64_t numel = 0;
  int64_t bucket = 0;
  int64_t offset = 0;  // in the row
};

// The elements that are reduced and gathered at once: a row for each rank, and the parameters in
// it.
struct Bucket {
  int64_t arena = 0;
  int64_t begin = 0;  // in the arena: of element 0 of the flat bucket
  BucketRows rows;    // one for each rank of the arena
  std::vector<Slot> slots;
};

class ParameterLayout;
const ParameterLayout& layout_of(Layout layout);

// The parameters of one dtype, domain and layout, which share flat memory.
struct Arena {
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t domain = 0;
  int64_t world_size = 1;
  int64_t numel = 0;                                                // padding included
  int64_t parameter_numel = 0;                                      // padding excluded
  std::vector<int64_t> parameters;                                  // in arena order
  const ParameterLayout* layout = &layout_of(Layout::kContiguous);  // never null
};

// The place of each element of each parameter, and the rank that owns it.
struct Plan {
  std::vector<Arena> arenas;
  std::vector<Bucket> buckets;  // in the order they are reduced
  // Per parameter: its arena, its first element there (undefined meaning in
  // kPerParameter), and the buckets that hold it.
  std::vector<int64_t> parameter_arena;
  std::vector<int64_t> parameter_offset;
  std::vector<std::vector<int64_t>> parameter_buckets;
  // kWholeParameters: the rank of its domain that owns it, and -1 for parameters
  // of other layouts. Empty if all are.
  std::vector<int64_t> parameter_owner;

  const Arena& arena_of(const Bucket& bucket) const { return arenas[bucket.arena]; }
  int64_t domain_of(int64_t bucket) const { return arena_of(buckets[bucket]).domain; }
  const ParameterLayout& layout_of(const Bucket& bucket) const { return *arena_of(bucket).layout; }
  int64_t bucket_numel(const Bucket& bucket) const { return bucket.rows.total(); }
  // The spans of `slot` in its flat bucket, in the parameter's order: at most world_size for
  // kPerParameter, else one.
  std::vector<Span> spans(const Bucket& bucket, const Slot& slot) const;
  // The segments of `rank`'s row of bucket `bucket`, by offset.
  std::vector<Segment> segments(int64_t bucket, int64_t rank) const;
  // Equal plans have equal fingerprints. The manifest of a checkpoint holds it; no load compares
  // it, since a checkpoint fits every plan of the same parameters.
  uint64_t fingerprint() const;
};

// Packs `parameters` (registration order) in reverse, because backward produces
// gradients in about that order. `world_sizes[d]` is the number of ranks of
// domain d. O(parameters + buckets); kWholeParameters O(parameters *
// log(parameters * ranks) + ranks). Throws c10::Error for a negative size or
// cost, costs that add up to 2^62 or more, a domain without a world size, a
// world size or ranks_per_machine below 1, a block that is no power of two, or a
// dtype that is not float, bfloat16 or half.
Plan make_plan(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
               const PlanOptions& options);

}  // namespace zero
