// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/nccl.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <iomanip>
#include <sstream>
#endif

namespace zero {
namespace {

constexpr const char* kErrorHandling = "TORCH_NCCL_ASYNC_ERROR_HANDLING";

// As libtorch reads a switch. It refuses other values than these and those for off by itself.
bool is_on(std::string value) {
  std::ranges::transform(value, value.begin(), [](unsigned char c) { return std::tolower(c); });
  return value == "1" || value == "y" || value == "yes" || value == "t" || value == "true";
}

}  // namespace

std::string nccl_environment_problem(const std::function<const char*(const char*)>& variable) {
  const auto text = [](const char* name, const char* value, const char* reason) {
    return c10::str("NCCL: expected ", name, " to be off, got \"", value, "\": ", reason,
                    "; unset it on all ranks");
  };
  // The newer name counts where both are set.
  for (const char* name : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
    const char* value = variable(name);
    if (value == nullptr) continue;
    if (!is_on(value)) break;
    return text(name, value,
                "each wait would hold the host until the other ranks have come, so ranks with "
                "different numbers of backward passes would wait for each other for ever, and "
                "libtorch would watch no operation");
  }
  const char* name = "TORCH_NCCL_NAN_CHECK";
  const char* value = variable(name);
  if (value != nullptr && is_on(value)) {
    return text(
        name, value,
        "a gradient with a NaN, for which a step is skipped on all ranks, would fail on the "
        "device, and the process could not use its GPU again");
  }
  return {};
}

std::chrono::milliseconds nccl_timeout(std::chrono::milliseconds timeout) {
  constexpr std::chrono::seconds kAfterControl{1};
  return timeout + kAfterControl;
}

bool torchrun_chose_error_handling(const std::function<const char*(const char*)>& variable) {
  const char* const value = variable(kErrorHandling);
  // launch_local() sets other variables of torchrun's, and not this one.
  return value != nullptr && std::string_view(value) == "1" &&
         variable("TORCHELASTIC_MAX_RESTARTS") != nullptr;
}

#ifdef USE_C10D_NCCL

namespace {

void leave_errors_to_us() {
  static const bool done = [] {
    if (torchrun_chose_error_handling()) unsetenv(kErrorHandling);
    for (const char* name :
         {kErrorHandling, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"}) {
      setenv(name, "0", /*overwrite=*/0);
    }
    // The watchdog waits four times as long after an error, with a lock that abort() needs.
    setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "10", 0);
    return true;
  }();
  static_cast<void>(done);
}

// Objects of libtorch have a ncclConfig_t in them, which grows with versions of NCCL.
void check_version() {
  constexpr uint64_t kHere = uint64_t{NCCL_MAJOR} << 32 | uint64_t{NCCL_MINOR} << 16;
  const uint64_t libtorch = torch::cuda::nccl::version() >> 16 << 16;
  TORCH_CHECK(libtorch == kHere, "NCCL: expected the headers of version ", libtorch >> 32, ".",
              libtorch >> 16 & 0xffff, ", for which libtorch was compiled, got ", NCCL_MAJOR, ".",
              NCCL_MINOR, "; build zero with the nccl.h of that version");
}

}  // namespace

int cuda_device_count() { return c10::cuda::device_count(); }

std::string gpu_name(c10::Device device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  std::ostringstream text;
  text << "GPU-" << std::hex << std::setfill('0');
  for (const char byte : properties.uuid.bytes) {
    text << std::setw(2) << static_cast<int>(static_cast<unsigned char>(byte));
  }
  const char* host = std::getenv("NCCL_HOSTID");
  if (host != nullptr) text << " of " << host;
  return text.str();
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds timeout) {
  TORCH_CHECK(device.is_cuda() && device.has_index(),
              "NCCL: expected a GPU with its number, such as cuda:0, got ", device, " on rank ",
              rank, " of ", world_size);
  const std::string problem = nccl_environment_problem();
  TORCH_CHECK(problem.empty(), problem);
  leave_errors_to_us();
  check_version();
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = nccl_timeout(timeout);
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, std::move(options));
  backend->setBoundDeviceId(device);
  backend->eagerConnectSingleDevice(device);
  return backend;
}

#else

int cuda_device_count() { return 0; }

std::string gpu_name(c10::Device device) { return c10::str(device); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds) {
  TORCH_CHECK(
      false, "NCCL: this program was built without it, so rank ", rank, " of ", world_size,
      " cannot use ", device,
      ": build with --config=cuda (Bazel) or -DZERO_CUDA=ON (CMake), or keep the model on the CPU");
}

#endif

}  // namespace zero
