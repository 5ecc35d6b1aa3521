// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Figures of this process, its network interface and its GPU.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <vector>

namespace zero::examples {

// Returns user and system time of this process.
double cpu_ms();

// Returns the resident memory that belongs to no file on a disk, in MB; what several ranks see
// counts in equal parts.
double anonymous_mb();

// Returns the high-water mark of resident memory, in MB.
double peak_mb();

// Returns the bytes that the interface which connects ranks has sent, for any program.
double interface_bytes();

double median(std::vector<double> values);

// The times between the starts of steps: by the host's clock on the CPU, by events of the current
// stream on a GPU, which the host does not wait for.
class StepClock {
 public:
  explicit StepClock(c10::Device device);
  ~StepClock();

  // Marks the start of a step, and the end of the one before it.
  void mark();
  // Returns the time between each two marks, from mark `first` on. Waits for the device.
  std::vector<double> times_ms(size_t first) const;

 private:
  struct Marks;
  const std::unique_ptr<Marks> marks_;
};

// The most memory of a GPU that tensors took since restart(), beyond what they took at
// construction. 0 on the CPU.
class DevicePeak {
 public:
  explicit DevicePeak(c10::Device device);
  void restart();
  double growth_mb() const;

 private:
  const c10::Device device_;
  double before_mb_ = 0;
};

}  // namespace zero::examples
