// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/match/part_views.h"

namespace zero {

std::vector<std::pair<at::Tensor, at::Tensor>> part_views(const ManifestParameter& about,
                                                          const at::Tensor& part,
                                                          const at::Tensor& whole) {
  std::vector<std::pair<at::Tensor, at::Tensor>> views;
  const TensorPart place = part_of(about);
  int64_t begin = 0;  // of the box in the part
  for (const TensorBox& box : place.boxes) {
    const int64_t size = box.sizes[place.along];
    views.emplace_back(part.narrow(about.dimension, begin, size),
                       whole.narrow(about.dimension, box.from[place.along], size));
    begin += size;
  }
  return views;
}

}  // namespace zero
