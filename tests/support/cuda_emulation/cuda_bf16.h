// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// bfloat16 of the emulation. Conversions round to nearest even, as those of a GPU do; the bits of a
// NaN differ.
#pragma once

#include <c10/util/BFloat16.h>

using __nv_bfloat16 = c10::BFloat16;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
