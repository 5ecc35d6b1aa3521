// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint_options.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace zero {
namespace {

std::vector<at::Generator> default_generators(at::Device device) {
  std::vector<at::Generator> result{at::globalContext().defaultGenerator(at::kCPU)};
  if (device.is_cpu()) return result;
  TORCH_CHECK(at::hasCUDA(), "RandomState: expected the CPU, since this libtorch has no CUDA, got ",
              device);
  result.push_back(at::globalContext().defaultGenerator(device));
  return result;
}

at::Tensor bytes_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// Precedes the bytes of a generator: "cpu 5056".
std::string title(const at::Generator& generator, const at::Tensor& bytes) {
  return c10::DeviceTypeName(generator.device().type(), /*lower_case=*/true) + " " +
         std::to_string(bytes.numel()) + "\n";
}

}  // namespace

RandomState::RandomState(at::Device device) : generators_(default_generators(device)) {}

RandomState::RandomState(std::vector<at::Generator> generators)
    : generators_(std::move(generators)) {
  for (const at::Generator& generator : generators_) {
    TORCH_CHECK(generator.defined(), "RandomState: expected generators, got an undefined one");
  }
}

std::string RandomState::state() const {
  std::string result;
  for (const at::Generator& generator : generators_) {
    const at::Tensor bytes = bytes_of(generator);
    result += title(generator, bytes);
    result.append(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  return result;
}

void RandomState::set_state(const std::string& state) {
  std::vector<at::Tensor> found;
  size_t next = 0;
  bool fits = true;
  for (const at::Generator& generator : generators_) {
    const at::Tensor bytes = at::empty_like(bytes_of(generator));
    const std::string expected = title(generator, bytes);
    fits = fits && state.compare(next, expected.size(), expected) == 0 &&
           state.size() - next - expected.size() >= bytes.nbytes();
    if (!fits) break;
    next += expected.size();
    std::memcpy(bytes.mutable_data_ptr(), state.data() + next, bytes.nbytes());
    next += bytes.nbytes();
    found.push_back(bytes);
  }
  TORCH_CHECK(fits && next == state.size(), "RandomState: expected the state of ",
              generators_.size(), " generators of the same kinds, got ", state.size(),
              " bytes of other ones; it was saved with other devices");
  for (size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard<std::mutex> lock(generators_[i].mutex());
    generators_[i].set_state(found[i]);
  }
}

}  // namespace zero
