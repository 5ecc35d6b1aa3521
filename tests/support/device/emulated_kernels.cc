// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the emulated device: those of the CPU, enqueued on a stream. They take the place
// of kernels/cuda/no_cuda.cc, whose functions are weak.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/bias_correction.h"
#include "kernels/detail/element_type.h"
#include "kernels/detail/exact_sum.h"
#include "tests/support/device/emulated_device.h"

namespace zero::kernels::cuda {
namespace {

// Those that are not empty: nothing is launched for the others.
template <class T>
std::vector<T> copied(const T* items, int64_t count) {
  std::vector<T> result;
  std::copy_if(items, items + count, std::back_inserter(result),
               [](const T& item) { return item.numel > 0; });
  return result;
}

bool skips(const double* nonfinite) { return nonfinite != nullptr && *nonfinite != 0.0; }
float factor_of(const float* coefficient) { return coefficient != nullptr ? *coefficient : 1.0F; }

// Memory of the device that an update writes.
template <class Segment>
const void* master_of(const Segment& segment) {
  return segment.remainder != nullptr ? static_cast<const void*>(segment.remainder)
                                      : segment.master;
}

// Drops `working` where nothing is to be written.
template <class Segment>
Segment with_working(Segment segment) {
  if (segment.working == static_cast<void*>(segment.master)) segment.working = nullptr;
  return segment;
}

// Enqueues `update` of each segment, with the factor of its gradient, unless values are not finite.
template <class Segment, class Update>
const char* launch_updates(const Segment* segments, int64_t count,
                           const float* gradient_coefficient, const double* nonfinite, void* stream,
                           const Update& update) {
  const std::vector<Segment> filled = copied(segments, count);
  if (filled.empty()) return nullptr;
  const auto update_all = [filled, gradient_coefficient, nonfinite, update] {
    if (skips(nonfinite)) return;
    for (const Segment& s : filled) update(with_working(s), factor_of(gradient_coefficient));
  };
  return emulated::launch(stream, master_of(filled[0]), update_all);
}

}  // namespace

const char* cast_copy_spans(const CopySpan* spans, int64_t count, ElementType source_type,
                            ElementType destination_type, bool with_addend, void* stream) {
  const std::vector<CopySpan> filled = copied(spans, count);
  if (filled.empty()) return nullptr;
  std::vector<emulated::MemoryUse> used;
  for (const CopySpan& s : filled) {
    used.push_back({s.source, s.numel * element_size(source_type), false});
    used.push_back({s.destination, s.numel * element_size(destination_type), true});
  }
  return emulated::launch(
      stream, filled[0].destination,
      [spans = filled, source_type, destination_type, with_addend] {
        for (const CopySpan& s : spans) {
          range_kernels().cast_copy(s.source, source_type, s.destination, destination_type, s.numel,
                                    with_addend ? s.addend : nullptr);
        }
      },
      used);
}

const char* fill_zero(void* destination, int64_t bytes, void* stream) {
  if (bytes == 0) return nullptr;
  return emulated::launch(
      stream, destination,
      [destination, bytes] { std::fill_n(static_cast<char*>(destination), bytes, char{0}); },
      {{destination, bytes, true}});
}

const char* join_halves(const uint16_t* upper, const int16_t* lower, int64_t numel, float* master,
                        void* stream) {
  if (numel == 0) return nullptr;
  return emulated::launch(stream, master, [upper, lower, numel, master] {
    range_kernels().join_halves(upper, lower, numel, master);
  });
}

const char* split_halves(const float* master, int64_t numel, uint16_t* upper, int16_t* lower,
                         void* stream) {
  if (numel == 0) return nullptr;
  return emulated::launch(stream, lower, [master, numel, upper, lower] {
    range_kernels().split_halves(master, numel, upper, lower);
  });
}

const char* sum_rows(const SumRowsRange& range, void* stream) {
  if (range.numel == 0) return nullptr;
  const int64_t row = range.numel * element_size(range.type);
  std::vector<emulated::MemoryUse> used{{range.own, row, false}, {range.shard, row, true}};
  for (int64_t r = 0; range.received != nullptr && r < range.world_size; ++r) {
    if (r == range.own_rank) continue;
    const char* received = static_cast<const char*>(range.received);
    used.push_back({received + r * range.row_stride * element_size(range.type), row, false});
  }
  return emulated::launch(
      stream, range.shard, [range] { range_kernels().sum_rows(range); }, used);
}

const char* sum_of_abs_powers(const ConstSpan* spans, int64_t count, double p, double* result,
                              double* workspace, int64_t workspace_numel, void* stream) {
  return emulated::launch(
      stream, result, [spans = copied(spans, count), p, result, workspace, workspace_numel] {
        std::fill_n(workspace, workspace_numel, 0.0);
        for (const ConstSpan& s : spans) {
          for (int64_t i = 0; i < s.numel; ++i) {
            const double x = std::fabs(static_cast<double>(s.data[i]));
            workspace[0] += p == 2.0 ? x * x : std::pow(x, p);
          }
          workspace[1] += static_cast<double>(range_kernels().count_nonfinite(s.data, s.numel));
        }
        result[0] += workspace[0];
        result[1] += workspace[1];
      });
}

const char* max_abs_bits(const ConstSpan* spans, int64_t count, int64_t* result, void* stream) {
  return emulated::launch(stream, result, [spans = copied(spans, count), result] {
    for (const ConstSpan& s : spans) {
      *result = std::max<int64_t>(*result, range_kernels().max_abs_bits(s.data, s.numel));
    }
  });
}

const char* add_squares_exactly(const ConstSpan* spans, int64_t count, int64_t* sum, void* stream) {
  return emulated::launch(stream, sum, [spans = copied(spans, count), sum] {
    for (const ConstSpan& s : spans) {
      range_kernels().add_squares_exactly(s.data, s.numel, sum);
      carry_limbs(sum);
    }
  });
}

const char* value_of_exact_sum(const int64_t* sum, double* value, void* stream) {
  return emulated::launch(stream, value, [sum, value] { *value = rounded_sum(sum); });
}

const char* adam_step(const AdamSegment* segments, int64_t count,
                      const AdamCoefficients& coefficients, const AdamPowers& powers,
                      const DeviceRate& rate, const float* gradient_coefficient,
                      const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                      void* stream) {
  const auto update = [=](const AdamSegment& s, float factor) {
    AdamCoefficients c = coefficients;
    AdamPowers of_step = powers;
    if (rate.lr != nullptr) {
      of_step.lr = *rate.lr;
      c.decay = decay_of(*rate.lr, rate.weight_decay);
    }
    set_bias_correction(of_step,
                        s.device_step != nullptr ? *s.device_step : static_cast<double>(s.step), c);
    if (s.state_type != StateType::kFloat) {
      range_kernels().stored_adam(s, 0, s.numel, noise, c, factor, working_type);
    } else {
      range_kernels().adam(s, c, factor, working_type);
    }
  };
  return launch_updates(segments, count, gradient_coefficient, nonfinite, stream, update);
}

const char* sgd_step(const SgdSegment* segments, int64_t count, const SgdCoefficients& coefficients,
                     const double* device_lr, const float* gradient_coefficient,
                     const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                     void* stream) {
  const auto update = [=](SgdSegment s, float factor) {
    SgdCoefficients c = coefficients;
    if (device_lr != nullptr) c.negative_lr = static_cast<float>(-*device_lr);
    if (s.device_step != nullptr) s.first_step = *s.device_step == 1.0F;
    if (s.state_type != StateType::kFloat && c.momentum != 0.0F) {
      range_kernels().stored_sgd(s, 0, s.numel, noise, c, factor, working_type);
    } else {
      range_kernels().sgd(s, c, factor, working_type);
    }
  };
  return launch_updates(segments, count, gradient_coefficient, nonfinite, stream, update);
}

const char* lion_step(const LionSegment* segments, int64_t count,
                      const LionCoefficients& coefficients, const DeviceRate& rate,
                      const float* gradient_coefficient, const double* nonfinite,
                      const NoiseStep& noise, ElementType working_type, void* stream) {
  const auto update = [=](const LionSegment& s, float factor) {
    LionCoefficients c = coefficients;
    if (rate.lr != nullptr) set_rate(*rate.lr, rate.weight_decay, c);
    if (s.state_type != StateType::kFloat) {
      range_kernels().stored_lion(s, 0, s.numel, noise, c, factor, working_type);
    } else {
      range_kernels().lion(s, c, factor, working_type);
    }
  };
  return launch_updates(segments, count, gradient_coefficient, nonfinite, stream, update);
}

const char* ema_step(const EmaSegment* segments, int64_t count, float weight,
                     const float* device_weight, void* stream) {
  const std::vector<EmaSegment> filled = copied(segments, count);
  if (filled.empty()) return nullptr;
  return emulated::launch(stream, filled[0].average, [segments = filled, weight, device_weight] {
    const float read = device_weight != nullptr ? *device_weight : weight;
    if (read == 0.0F) return;
    for (const EmaSegment& s : segments) range_kernels().ema(s, read);
  });
}

}  // namespace zero::kernels::cuda
