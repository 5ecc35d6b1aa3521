// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace zero {

inline constexpr double kMiB = 1024.0 * 1024.0;

// The most that `work` adds to the anonymous memory of this process, in MiB: without
// pages of files, which the kernel takes back when it needs them. Sampled.
double peak_growth(const std::function<void()>& work);

}  // namespace zero
