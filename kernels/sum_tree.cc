// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/sum_tree.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {
namespace {

constexpr int64_t kChunk = 1024;  // elements; sums and rows of one stay in the nearest cache

struct Row {
  const void* data;
  ElementType type;
};

void cast(const Row& from, float* to, int64_t numel, const float* addend, Stream stream) {
  if (stream.cuda) {
    const CopySpan span{from.data, to, numel, addend};
    check_launch("sum_tree", cuda::cast_copy_spans(&span, 1, from.type, ElementType::kFloat,
                                                   addend != nullptr, stream.handle));
    return;
  }
  range_kernels().cast_copy(from.data, from.type, to, ElementType::kFloat, numel, addend);
}

// shard (+)= scale * (a + b), for rows of one type, or of `b` alone without `a`.
void add_rows(const void* a, const Row& b, int64_t numel, float scale, float* shard,
              bool accumulate, Stream stream) {
  const int64_t count = a != nullptr ? 2 : 1;
  const SumRowsRange range{nullptr, 0,     a,         b.data, shard, numel,
                           numel,   count, count - 1, b.type, scale, accumulate};
  if (stream.cuda) {
    check_launch("sum_tree", cuda::sum_rows(range, stream.handle));
    return;
  }
  range_kernels().sum_rows(range);
}

// The elements of `args`. `sums` is [places + 1][numel]: one more for a row that is widened before
// it is added.
void add_up(const SumTreeArgs& args, std::vector<Row>& rows, float* sums, Stream stream) {
  const int64_t numel = args.numel;
  const auto sum_at = [&](int64_t place) { return sums + place * numel; };
  const auto widen = [&](Row& row, int64_t place) {
    if (row.type == ElementType::kFloat) return;
    cast(row, sum_at(place), numel, nullptr, stream);
    row = {sum_at(place), ElementType::kFloat};
  };
  for (const RowAddition& addition : args.additions) {
    Row& into = rows[addition.into];
    Row& from = rows[addition.from];
    if (into.type != from.type) {
      widen(into, addition.place);
      widen(from, addition.place + 1);
    }
    if (&addition == &args.additions.back()) {
      add_rows(into.data, from, numel, args.scale, args.shard, args.accumulate, stream);
      return;
    }
    float* const sum = sum_at(addition.place);
    if (into.data == sum) {
      cast(from, sum, numel, sum, stream);
    } else {
      add_rows(into.data, from, numel, 1.0F, sum, /*accumulate=*/false, stream);
    }
    into = {sum, ElementType::kFloat};
  }
  add_rows(nullptr, rows[0], numel, args.scale, args.shard, args.accumulate, stream);
}

void check(const SumTreeArgs& args, Stream stream) {
  element_type(args.dtype, "sum_tree", "dtype");
  TORCH_CHECK(args.numel >= 0, "zero::kernels::sum_tree: numel must be >= 0, got ", args.numel);
  const auto count = static_cast<int64_t>(args.rows.size());
  TORCH_CHECK(count >= 1 && static_cast<int64_t>(args.additions.size()) == count - 1,
              "zero::kernels::sum_tree: expected a row, and one addition less than rows, got ",
              count, " rows and ", args.additions.size(), " additions");
  std::vector<bool> used(static_cast<size_t>(count));
  for (const RowAddition& a : args.additions) {
    const auto is_row = [&](int64_t row) { return row >= 0 && row < count && !used[row]; };
    TORCH_CHECK(is_row(a.into) && is_row(a.from) && a.into != a.from && a.from != 0 &&
                    a.place >= 0 && a.place < args.places,
                "zero::kernels::sum_tree: expected additions of two rows that were not used, with "
                "a place below ",
                args.places, ", got ", a.into, " += ", a.from, " at ", a.place);
    used[a.from] = true;
  }
  const bool given = std::all_of(args.rows.begin(), args.rows.end(),
                                 [](const void* row) { return row != nullptr; });
  TORCH_CHECK(args.numel == 0 || (given && args.shard != nullptr &&
                                  (!stream.cuda || count == 1 || args.workspace != nullptr)),
              "zero::kernels::sum_tree: null pointer for ", args.numel, " elements");
}

}  // namespace

void sum_tree(const SumTreeArgs& args, Stream stream) {
  check(args, stream);
  if (args.numel == 0) return;
  const ElementType type = element_type(args.dtype, "sum_tree", "dtype");
  // The rows and the shard from element `begin` on. `rows` is to work in.
  const auto add_range = [&](int64_t begin, int64_t numel, float* sums, std::vector<Row>& rows) {
    rows.clear();
    for (const void* row : args.rows) {
      rows.push_back({static_cast<const char*>(row) + begin * element_size(type), type});
    }
    SumTreeArgs range = args;
    range.numel = numel;
    range.shard = args.shard + begin;
    add_up(range, rows, sums, stream);
  };
  if (stream.cuda) {
    std::vector<Row> rows;
    add_range(0, args.numel, args.workspace, rows);
    return;
  }
  const BlockMap map(1, [&](int64_t) { return args.numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    std::vector<float> sums(static_cast<size_t>((args.places + 1) * kChunk));
    std::vector<Row> rows;
    for (; begin < end; begin += kChunk) {
      add_range(begin, std::min(kChunk, end - begin), sums.data(), rows);
    }
  });
}

}  // namespace zero::kernels
