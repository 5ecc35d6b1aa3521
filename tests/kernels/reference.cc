// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Conversions are libtorch's own scalar ones, arithmetic is float without fused
// operations (compile with -ffp-contract=off).
#include "tests/kernels/reference.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace zero::kernels::reference {
namespace {

float load(const void* values, c10::ScalarType dtype, int64_t i) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return static_cast<const float*>(values)[i];
    case c10::ScalarType::BFloat16:
      return static_cast<const c10::BFloat16*>(values)[i];
    case c10::ScalarType::Half:
      return static_cast<const c10::Half*>(values)[i];
    default:
      TORCH_CHECK(false, "unsupported dtype ", dtype);
  }
}

void store(float value, void* values, c10::ScalarType dtype, int64_t i) {
  switch (dtype) {
    case c10::ScalarType::Float:
      static_cast<float*>(values)[i] = value;
      return;
    case c10::ScalarType::BFloat16:
      static_cast<c10::BFloat16*>(values)[i] = value;
      return;
    case c10::ScalarType::Half:
      static_cast<c10::Half*>(values)[i] = value;
      return;
    default:
      TORCH_CHECK(false, "unsupported dtype ", dtype);
  }
}

bool writes_working(const void* working, const float* master) {
  return working != nullptr && working != static_cast<const void*>(master);
}

// The bytes of a row of `numel` values at which the scale and the encoded value of element i begin.
int64_t scale_at(int64_t i) { return 4 * (i / 256); }
int64_t value_at(int64_t numel, int64_t i) { return 4 * ((numel + 255) / 256) + i; }

}  // namespace

void cast_copy(const void* source, c10::ScalarType source_dtype, void* destination,
               c10::ScalarType destination_dtype, int64_t numel, const void* addend) {
  for (int64_t i = 0; i < numel; ++i) {
    float value = load(source, source_dtype, i);
    if (addend != nullptr) {
      value = load(addend, destination_dtype, i) + value;
    }
    store(value, destination, destination_dtype, i);
  }
}

void sum_rows(const SumRowsArgs& args) {
  for (int64_t i = 0; i < args.numel; ++i) {
    float sum = 0.0F;
    for (int64_t r = 0; r < args.world_size; ++r) {
      const float value = r == args.own_rank ? load(args.own, args.dtype, i)
                                             : load(args.received, args.dtype, r * args.numel + i);
      sum = r == 0 ? value : sum + value;
    }
    const float product = args.scale * sum;
    args.shard[i] = args.accumulate ? args.shard[i] + product : product;
  }
}

void encode_block_int8(const void* source, c10::ScalarType source_dtype, int64_t rows,
                       int64_t numel, void* destination) {
  const int64_t bytes = (numel + 255) / 256 * 4 + (numel + 3) / 4 * 4;
  std::memset(destination, 0, static_cast<size_t>(rows * bytes));
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = static_cast<char*>(destination) + r * bytes;
    for (int64_t first = 0; first < numel; first += 256) {
      const int64_t end = std::min(first + 256, numel);
      float largest = 0.0F;
      bool finite = true;
      for (int64_t i = first; i < end; ++i) {
        const float x = load(source, source_dtype, r * numel + i);
        finite = finite && std::isfinite(x);
        largest = std::max(largest, std::fabs(x));
      }
      float scale = finite ? largest / 127.0F : std::numeric_limits<float>::quiet_NaN();
      if (std::isinf(127.0F * scale)) scale = std::nextafter(scale, 0.0F);
      std::memcpy(row + scale_at(first), &scale, sizeof(scale));
      for (int64_t i = first; i < end; ++i) {
        const float x = load(source, source_dtype, r * numel + i);
        const float q = finite && scale > 0.0F ? std::nearbyint(x / scale) : 0.0F;
        row[value_at(numel, i)] =
            static_cast<char>(static_cast<signed char>(std::clamp(q, -127.0F, 127.0F)));
      }
    }
  }
}

void sum_block_int8(const SumBlockInt8Args& args) {
  const int64_t bytes = (args.numel + 255) / 256 * 4 + (args.numel + 3) / 4 * 4;
  for (int64_t i = 0; i < args.numel; ++i) {
    float sum = 0.0F;
    for (int64_t r = 0; r < args.world_size; ++r) {
      const char* row = args.rows != nullptr ? static_cast<const char*>(args.rows[r])
                        : r == args.own_rank ? static_cast<const char*>(args.own)
                                             : static_cast<const char*>(args.received) + r * bytes;
      float scale = 0.0F;
      std::memcpy(&scale, row + scale_at(i), sizeof(scale));
      const auto q = static_cast<signed char>(row[value_at(args.numel, i)]);
      const float decoded = scale * static_cast<float>(q);
      sum = r == 0 ? decoded : sum + decoded;
    }
    const float product = args.scale * sum;
    args.shard[i] = args.accumulate ? args.shard[i] + product : product;
  }
}

void sum_of_abs_powers(c10::ArrayRef<ConstSpan> spans, double p, double* result) {
  long double sum = 0.0L;
  int64_t nonfinite = 0;
  for (const ConstSpan& span : spans) {
    for (int64_t i = 0; i < span.numel; ++i) {
      sum += std::pow(std::fabs(static_cast<long double>(span.data[i])), p);
      nonfinite += std::isfinite(span.data[i]) ? 0 : 1;
    }
  }
  result[0] += static_cast<double>(sum);
  result[1] += static_cast<double>(nonfinite);
}

void max_abs_bits(c10::ArrayRef<ConstSpan> spans, int64_t* result) {
  for (const ConstSpan& span : spans) {
    for (int64_t i = 0; i < span.numel; ++i) {
      *result = std::max<int64_t>(*result, std::bit_cast<uint32_t>(std::fabs(span.data[i])));
    }
  }
}

void adam_step(c10::ArrayRef<AdamSegment> segments, const AdamOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  for (const AdamSegment& s : segments) {
    const double k = s.device_step != nullptr ? *s.device_step : static_cast<double>(s.step);
    const auto step_size = static_cast<float>(-(options.lr / (1.0 - std::pow(options.beta1, k))));
    const auto correction = static_cast<float>(std::sqrt(1.0 - std::pow(options.beta2, k)));
    for (int64_t i = 0; i < s.numel; ++i) {
      float g = s.gradient[i];
      if (gradient_coefficient != nullptr) {
        g *= *gradient_coefficient;
      }
      if (options.weight_decay != 0.0) {
        if (options.decoupled) {
          s.master[i] *= static_cast<float>(1.0 - options.lr * options.weight_decay);
        } else {
          g += static_cast<float>(options.weight_decay) * s.master[i];
        }
      }
      float& m = static_cast<float*>(s.exp_avg)[i];
      m *= static_cast<float>(options.beta1);
      m += static_cast<float>(1.0 - options.beta1) * g;
      float& v = static_cast<float*>(s.exp_avg_sq)[i];
      v *= static_cast<float>(options.beta2);
      v += static_cast<float>(1.0 - options.beta2) * g * g;
      float u = v;
      if (options.amsgrad) {
        s.max_exp_avg_sq[i] = std::max(s.max_exp_avg_sq[i], v);
        u = s.max_exp_avg_sq[i];
      }
      const float denominator = std::sqrt(u) / correction + static_cast<float>(options.eps);
      s.master[i] += step_size * m / denominator;
      if (writes_working(s.working, s.master)) {
        store(s.master[i], s.working, working_dtype, i);
      }
    }
  }
}

void sgd_step(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
              const float* gradient_coefficient, const double* nonfinite,
              c10::ScalarType working_dtype) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  for (const SgdSegment& s : segments) {
    const bool first_step = s.device_step != nullptr ? *s.device_step == 1.0F : s.first_step;
    for (int64_t i = 0; i < s.numel; ++i) {
      float d = s.gradient[i];
      if (gradient_coefficient != nullptr) {
        d *= *gradient_coefficient;
      }
      if (options.weight_decay != 0.0) {
        d += static_cast<float>(options.weight_decay) * s.master[i];
      }
      if (options.momentum != 0.0) {
        const auto momentum = static_cast<float>(options.momentum);
        float& b = static_cast<float*>(s.momentum)[i];
        if (first_step) {
          b = d;
        } else {
          b *= momentum;
          b += static_cast<float>(1.0 - options.dampening) * d;
        }
        d = options.nesterov ? d + momentum * b : b;
      }
      s.master[i] += static_cast<float>(-options.lr) * d;
      if (writes_working(s.working, s.master)) {
        store(s.master[i], s.working, working_dtype, i);
      }
    }
  }
}

void ema_step(const EmaSegment& segment, float weight) {
  for (int64_t i = 0; i < segment.numel; ++i) {
    const float difference = segment.values[i] - segment.average[i];
    const float product = weight * difference;
    segment.average[i] += product;
  }
}

void lion_step(c10::ArrayRef<LionSegment> segments, const LionOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  for (const LionSegment& s : segments) {
    for (int64_t i = 0; i < s.numel; ++i) {
      float g = s.gradient[i];
      if (gradient_coefficient != nullptr) {
        g *= *gradient_coefficient;
      }
      float& m = static_cast<float*>(s.exp_avg)[i];
      const auto beta1 = static_cast<float>(options.beta1);
      const float direction = beta1 * m + static_cast<float>(1.0 - options.beta1) * g;
      if (options.weight_decay != 0.0) {
        s.master[i] *= static_cast<float>(1.0 - options.lr * options.weight_decay);
      }
      if (direction > 0.0F) {
        s.master[i] -= static_cast<float>(options.lr);
      } else if (direction < 0.0F) {
        s.master[i] += static_cast<float>(options.lr);
      }
      m *= static_cast<float>(options.beta2);
      m += static_cast<float>(1.0 - options.beta2) * g;
      if (writes_working(s.working, s.master)) {
        store(s.master[i], s.working, working_dtype, i);
      }
    }
  }
}

}  // namespace zero::kernels::reference
