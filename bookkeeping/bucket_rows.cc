// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/bucket_rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace zero {

BucketRows::BucketRows(const std::vector<int64_t>& ends) {
  count_ = static_cast<int64_t>(ends.size());
  std::vector<int64_t> filled, ends_of_filled;
  for (int64_t r = 0; r < count_; ++r) {
    const int64_t begin = r == 0 ? 0 : ends[r - 1];
    TORCH_CHECK(ends[r] >= begin, "row ", r, ": expected an end of ", begin, " or more, got ",
                ends[r]);
    if (ends[r] == begin) continue;
    filled.push_back(r);
    ends_of_filled.push_back(ends[r]);
  }
  set(std::move(filled), std::move(ends_of_filled));
}

BucketRows::BucketRows(int64_t count, std::vector<int64_t> filled, std::vector<int64_t> ends)
    : count_(count) {
  TORCH_CHECK(filled.size() == ends.size(), "rows: expected an end for each of ", filled.size(),
              " filled rows, got ", ends.size());
  for (size_t i = 0; i < filled.size(); ++i) {
    const int64_t row = i == 0 ? 0 : filled[i - 1] + 1, begin = i == 0 ? 0 : ends[i - 1];
    TORCH_CHECK(row <= filled[i] && filled[i] < count, "filled row ", i, ": expected one from ",
                row, " to ", count - 1, ", got ", filled[i]);
    TORCH_CHECK(ends[i] > begin, "row ", filled[i], ": expected an end above ", begin, ", got ",
                ends[i]);
  }
  set(std::move(filled), std::move(ends));
}

void BucketRows::set(std::vector<int64_t> filled, std::vector<int64_t> ends) {
  bool equal = static_cast<int64_t>(filled.size()) == count_;
  for (size_t i = 1; i < ends.size() && equal; ++i) equal = ends[i] - ends[i - 1] == ends[0];
  if (equal || ends.empty()) {
    numel_ = ends.empty() ? 0 : ends[0];
  } else {
    filled_ = std::move(filled);
    ends_ = std::move(ends);
  }
}

int64_t BucketRows::end_of_filled_below(int64_t row) const {
  const auto next = std::lower_bound(filled_.begin(), filled_.end(), row);
  return next == filled_.begin() ? 0 : ends_[next - filled_.begin() - 1];
}

int64_t BucketRows::equal_numel() const {
  TORCH_INTERNAL_ASSERT(equal(),
                        "transports exchange the rows of a bucket as one [world_size, row] tensor, "
                        "so all rows of it must be equally long");
  return numel_;
}

BucketRows BucketRows::times(int64_t factor) const {
  BucketRows result = *this;
  result.numel_ *= factor;
  for (int64_t& end : result.ends_) end *= factor;
  return result;
}

}  // namespace zero
