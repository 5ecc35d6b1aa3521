// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Step counters in device memory, so that the host need not wait to learn whether a step was
// skipped. Work enqueued on the current stream writes them; a call that needs them waits for the
// device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

namespace zero {

// Counts the updates of each segment of a rank, for kernels that read the count themselves.
class SegmentCounts {
 public:
  SegmentCounts(int64_t segments, at::Device device);

  // One more for every segment with updated[i] != 0, unless `nonfinite`, 0-dim on the device, is
  // not 0. Undefined counts as 0. Moves memory to the device only where `updated` changes.
  void add(const std::vector<uint8_t>& updated, const at::Tensor& nonfinite);
  // One more for the segments from `begin` on and before `end`.
  void add(size_t begin, size_t end) { of_range(begin, end).add_(1); }
  // Begins again for one segment.
  void reset(size_t segment) { of_range(segment, segment + 1).zero_(); }
  // [1] fp32 on the device, valid for the lifetime of this. Exact up to 2^24 updates.
  const float* of(size_t segment) const { return counts_.const_data_ptr<float>() + segment; }

  // These wait for the device.
  std::vector<int64_t> read() const;
  void write(const std::vector<int64_t>& counts);

 private:
  at::Tensor of_range(size_t begin, size_t end) const {
    return counts_.slice(0, static_cast<int64_t>(begin), static_cast<int64_t>(end));
  }

  at::Tensor counts_;             // [segments] fp32
  at::Tensor increment_;          // [segments] fp32: 1 where updated_ is not 0
  std::vector<uint8_t> updated_;  // what increment_ was made from
};

// Counts steps that updated parameters and steps that were skipped.
class StepCounts {
 public:
  struct Values {
    int64_t steps = 0;
    int64_t skipped_steps = 0;
    bool skipped = false;        // the last one
    bool nonfinite = false;      // the last one was skipped for that
    int64_t left_out_steps = 0;  // skipped ones that were left out by a rule
  };

  // Without a device the host learns of every step at once, and these are plain numbers.
  explicit StepCounts(std::optional<at::Device> device);

  // Not both.
  void add(bool nonfinite, bool left_out = false);
  // Flags as above; `nonfinite` comes first. Only with a device.
  void add(const at::Tensor& nonfinite, const at::Tensor& left_out = {});
  // A step without gradients is not counted, but is the last one.
  void add_nothing();

  // Waits for the device, if there is one.
  Values read() const;
  // Values::steps, without a wait: 0-dim double on the device, if there is one.
  std::variant<int64_t, at::Tensor> steps() const;
  void write(const Values& values);

  // In two parts, for a caller that goes on meanwhile: fetch() starts a copy behind what is
  // enqueued now, and fetched() waits for no more than that.
  void fetch();
  Values fetched();

 private:
  Values values_;
  at::Tensor on_device_;  // [5] double, in the order of Values; undefined without a device
  at::Tensor on_host_;    // the same as fetched
  std::optional<c10::Event> fetched_;
};

}  // namespace zero
