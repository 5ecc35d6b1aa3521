// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/step_trace.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <utility>

namespace zero::examples {
namespace {

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ExperimentalConfig;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

}  // namespace

StepTrace::StepTrace(std::string path, int64_t first, int64_t steps, Device device)
    : path_(std::move(path)), first_(first), end_(first + steps), device_(device) {
  // Else the profiler complains on standard error about a machine without a GPU.
  if (!path_.empty()) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
}

StepTrace::~StepTrace() {
  if (!recording_) return;
  try {
    finish();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trace: %s\n", error.what());
  }
}

void StepTrace::before_step(int64_t step) {
  if (path_.empty()) return;
  if (recording_ && step >= end_) finish();
  if (step != first_) return;
  ExperimentalConfig details;
  // The optimizer sums received gradients on a thread of its own.
  details.profile_all_threads = true;
  const ProfilerConfig config(ProfilerState::KINETO, /*report_input_shapes=*/false,
                              /*profile_memory=*/false, /*with_stack=*/false, /*with_flops=*/false,
                              /*with_modules=*/false, details);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device_ == Device::kCuda) activities.insert(ActivityType::CUDA);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  recording_ = has_begun_ = true;
}

void StepTrace::finish() {
  recording_ = false;
  torch::autograd::profiler::disableProfiler()->save(path_);
  // The profiler itself only logs what goes wrong.
  TORCH_CHECK(std::ifstream(path_).good(), "cannot write --trace ", path_);
}

}  // namespace zero::examples
