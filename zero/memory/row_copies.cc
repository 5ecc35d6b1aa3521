// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/row_copies.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/nonzero.h>

#include <algorithm>
#include <set>

namespace zero {
namespace {

int64_t end_of(const ElementRange& range) { return range.begin + range.values.numel(); }

// The columns [begin, end) of rows: a band that no end of a piece cuts.
struct Band {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t row_numel = 0;

  // The rows whose band is in `range`: from the first one to behind the last.
  int64_t first_row(const ElementRange& range) const {
    return (std::max<int64_t>(range.begin - begin, 0) + row_numel - 1) / row_numel;
  }
  int64_t end_row(const ElementRange& range) const {
    const int64_t behind = end_of(range) - end;
    return behind < 0 ? 0 : behind / row_numel + 1;
  }
  // [rows, columns] of those rows.
  at::Tensor of(const ElementRange& range, int64_t first, int64_t rows) const {
    return range.values.as_strided(
        {rows, end - begin}, {row_numel, 1},
        range.values.storage_offset() + first * row_numel + begin - range.begin);
  }
};

void copy_band(const ElementRange& from, const ElementRange& to, const at::Tensor& sources,
               const Band& band) {
  const int64_t first = band.first_row(to);
  const int64_t count = band.end_row(to) - first;
  const int64_t first_from = band.first_row(from);
  const int64_t count_from = band.end_row(from) - first_from;
  if (count <= 0 || count_from <= 0) return;
  const at::Tensor wanted = sources.narrow(0, first, count).sub(first_from);
  const at::Tensor rows = wanted.ge(0).logical_and_(wanted.lt(count_from)).nonzero().squeeze(1);
  if (rows.numel() == 0) return;
  const at::Device device = to.values.device();
  const at::Tensor values = band.of(from, first_from, count_from)
                                .index_select(0, wanted.index_select(0, rows).to(device));
  band.of(to, first, count).index_copy_(0, rows.to(device), values);
}

}  // namespace

void copy_rows(const ElementRange& from, const ElementRange& to, const RowSources& sources) {
  if (!sources.rows.defined()) {
    const int64_t begin = std::max(from.begin, to.begin);
    const int64_t numel = std::min(end_of(from), end_of(to)) - begin;
    if (numel <= 0) return;
    to.values.narrow(0, begin - to.begin, numel)
        .copy_(from.values.narrow(0, begin - from.begin, numel));
    return;
  }
  const int64_t n = sources.row_numel;
  std::set<int64_t> cuts{0, n};
  for (const ElementRange* range : {&from, &to}) {
    cuts.insert(range->begin % n);
    cuts.insert(end_of(*range) % n);
  }
  for (auto cut = cuts.begin(); *cut < n; ++cut) {
    copy_band(from, to, sources.rows, {*cut, *std::next(cut), n});
  }
}

}  // namespace zero
