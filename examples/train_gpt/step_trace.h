// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A few steps as a Chrome trace, by libtorch's own profiler: operations, the
// backward pass and the optimizer's ranges, on all threads of this process. Open
// the file at https://ui.perfetto.dev or chrome://tracing.
#pragma once

#include <cstdint>
#include <string>

namespace zero::examples {

class StepTrace {
 public:
  // kCuda also records kernels, copies and the calls of the CUDA runtime.
  enum class Device { kCpu, kCuda };

  // Records `steps` steps beginning with step `first`. An empty `path` records none.
  StepTrace(std::string path, int64_t first, int64_t steps, Device device = Device::kCpu);
  // A recording under way is written, too.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  // Before every step, and once after the last one. Throws c10::Error when the file cannot be
  // written.
  void before_step(int64_t step);
  // Whether a step was recorded.
  bool has_begun() const { return has_begun_; }

 private:
  void finish();

  const std::string path_;
  const int64_t first_;
  const int64_t end_;
  const Device device_;
  bool recording_ = false;
  bool has_begun_ = false;
};

}  // namespace zero::examples
