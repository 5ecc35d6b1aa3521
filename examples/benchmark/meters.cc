// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/benchmark/meters.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <sstream>

namespace zero::examples {
namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A field of a file of /proc/self, in MB.
double proc_mb(const std::string& name, const std::string& field) {
  std::ifstream file("/proc/self/" + name);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

c10::CachingAllocator::Stat tensor_bytes(c10::Device device) {
  using c10::CachingAllocator::StatType;
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
}

}  // namespace

double cpu_ms() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& t) { return 1e3 * t.tv_sec + 1e-3 * t.tv_usec; };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

double anonymous_mb() {
  return proc_mb("smaps_rollup", "Pss_Anon") + proc_mb("smaps_rollup", "Pss_Shmem");
}

double peak_mb() { return proc_mb("status", "VmHWM"); }

double interface_bytes() {
  const char* const named = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string interface = named != nullptr && *named != '\0' ? named : "lo";
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    const size_t name = line.find_first_not_of(' ');
    if (colon == std::string::npos || line.substr(name, colon - name) != interface) continue;
    std::istringstream counts(line.substr(colon + 1));
    double value = 0;
    for (int field = 0; field < 9; ++field) counts >> value;
    return value;
  }
  return 0;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct StepClock::Marks {
  c10::Device device;
  std::vector<double> host_ms;      // on the CPU
  std::deque<c10::Event> recorded;  // on a GPU
};

StepClock::StepClock(c10::Device device) : marks_(new Marks{device, {}, {}}) {}
StepClock::~StepClock() = default;

void StepClock::mark() {
  const c10::Device device = marks_->device;
  if (device.is_cpu()) {
    marks_->host_ms.push_back(now_ms());
    return;
  }
  marks_->recorded.emplace_back(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  marks_->recorded.back().record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

std::vector<double> StepClock::times_ms(size_t first) const {
  std::vector<double> times;
  for (size_t i = first; i + 1 < marks_->host_ms.size(); ++i) {
    times.push_back(marks_->host_ms[i + 1] - marks_->host_ms[i]);
  }
  if (!marks_->recorded.empty()) marks_->recorded.back().synchronize();
  for (size_t i = first; i + 1 < marks_->recorded.size(); ++i) {
    times.push_back(marks_->recorded[i].elapsedTime(marks_->recorded[i + 1]));
  }
  return times;
}

DevicePeak::DevicePeak(c10::Device device) : device_(device) {
  if (!device.is_cpu()) before_mb_ = static_cast<double>(tensor_bytes(device).current) / 1048576;
}

void DevicePeak::restart() {
  if (!device_.is_cpu()) c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
}

double DevicePeak::growth_mb() const {
  if (device_.is_cpu()) return 0;
  return static_cast<double>(tensor_bytes(device_).peak) / 1048576 - before_mb_;
}

}  // namespace zero::examples
