// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device/device_calls.h"

#include <torch/csrc/autograd/function.h>

#include <mutex>
#include <utility>

namespace zero {
namespace {

struct Record {
  std::mutex mutex;
  bool open = false;
  std::vector<DeviceCall> calls;
};

// Never destroyed: threads of streams run until the process ends.
Record& record() {
  static auto* const all = new Record;
  return *all;
}

}  // namespace

void DeviceCalls::begin() {
  const std::lock_guard<std::mutex> lock(record().mutex);
  record().open = true;
  record().calls.clear();
}

std::vector<DeviceCall> DeviceCalls::take() {
  const std::lock_guard<std::mutex> lock(record().mutex);
  record().open = false;
  return std::exchange(record().calls, {});
}

void DeviceCalls::add(DeviceCall call) {
  if (const auto node = torch::autograd::get_current_node()) {
    call.in_pass = true;
    if (const auto stream = node->stream()) call.model = stream->id();
  }
  const std::lock_guard<std::mutex> lock(record().mutex);
  if (record().open) record().calls.push_back(std::move(call));
}

}  // namespace zero
