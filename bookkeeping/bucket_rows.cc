// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/bucket_rows.h"

#include <c10/util/Exception.h>

#include <utility>

namespace zero {

BucketRows::BucketRows(std::vector<int64_t> ends) {
  count_ = static_cast<int64_t>(ends.size());
  bool equal = true;
  for (size_t r = 0; r < ends.size(); ++r) {
    const int64_t begin = r == 0 ? 0 : ends[r - 1];
    TORCH_CHECK(ends[r] >= begin, "row ", r, ": expected an end of ", begin, " or more, got ",
                ends[r]);
    equal = equal && ends[r] - begin == ends[0];
  }
  if (equal) {
    numel_ = ends.empty() ? 0 : ends[0];
  } else {
    ends_ = std::move(ends);
  }
}

int64_t BucketRows::equal_numel() const {
  TORCH_INTERNAL_ASSERT(equal(),
                        "transports exchange the rows of a bucket as one [world_size, row] tensor, "
                        "so all rows of it must be equally long");
  return numel_;
}

}  // namespace zero
