// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "zero/checkpoint/format/manifest.h"

namespace zero {

// Views with the same elements: first of `part`, of shape about.shape, then of the tensor `whole`
// that it is a part of, of shape about.whole. One pair, or one for each section of a fused tensor.
std::vector<std::pair<at::Tensor, at::Tensor>> part_views(const ManifestParameter& about,
                                                          const at::Tensor& part,
                                                          const at::Tensor& whole);

}  // namespace zero
