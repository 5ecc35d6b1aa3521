// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// fp16 of the emulation. Conversions round to nearest even, as those of a GPU do; the bits of a NaN
// differ.
#pragma once

#include <c10/util/Half.h>

using __half = c10::Half;

inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return x; }
