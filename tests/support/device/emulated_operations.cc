// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ATen operations of the emulated device: memory, views and copies are its own, and everything else
// runs on the host over the same memory.
#include "tests/support/device/emulated_operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_streams.h"

namespace zero::emulated {
namespace {

c10::Device device_or_current(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return c10::impl::getDeviceGuardImpl(kEmulated)->getDevice();
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kEmulated),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kEmulated),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Returns a tensor of the host over the same memory; keeps nothing alive.
at::Tensor view_of(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kEmulated ? view_of(tensor) : tensor;
}

bool is_captured(c10::Device device) {
  return capture_of(current_stream(device.index())) != nullptr;
}

void note_tensor(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.device().type() != kEmulated || tensor.numel() == 0) return;
  // Of strided memory the first elements alone: what is between may be another's.
  const bool whole = tensor.is_contiguous();
  const auto bytes = static_cast<int64_t>(whole ? tensor.nbytes() : tensor.element_size());
  note_use(current_stream(tensor.device().index()), {tensor.const_data_ptr(), bytes, writes});
}

// A copy as CUDA makes it: it runs on the current stream between memory of one device, and on
// request with pinned host memory. To other host memory CUDA then copies at once, on which a
// caller may not rely. So here such a copy runs late, too.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool to_device = to.device().type() == kEmulated;
  const bool from_device = from.device().type() == kEmulated;
  const int device = to_device ? to.device().index() : from.device().index();
  const at::Tensor& host = to_device ? from : to;
  if (!to_device) count_to_host(device, static_cast<int64_t>(from.nbytes()));
  note_tensor(from, false);
  note_tensor(to, true);
  const bool on_stream = (to_device && from_device) || (non_blocking && host.device().is_cpu() &&
                                                        (from_device || host.is_pinned()));
  TORCH_CHECK(!to_device || !from_device || from.device() == to.device(),
              "the emulated devices do not copy between each other");
  if (on_stream && is_captured(c10::Device(kEmulated, static_cast<c10::DeviceIndex>(device)))) {
    // Each replay copies. Nothing keeps the memory of the host alive for it.
    using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    std::optional<WeakStorage> used;
    if (host.is_cpu()) used.emplace(host.storage().getWeakStorageImpl());
    enqueue(current_stream(device), [from = view_of(from), to = view_of(to), used] {
      const auto living = used ? used->lock() : c10::intrusive_ptr<c10::StorageImpl>();
      if (used && !living) return report("a replay copies memory of the host that was freed");
      to.copy_(from);
    });
    return to;
  }
  if (on_stream) {
    // A host tensor is kept, as CUDA's host allocator does. Device memory is not.
    const at::Tensor kept = host.is_cpu() ? host : at::Tensor();
    if (!to_device) count_under_way(device, 1);
    enqueue(current_stream(device),
            [from = on_host(from), to = on_host(to), kept, to_device, device] {
              if (!to_device) std::this_thread::sleep_for(copy_time());
              to.copy_(from);
              if (!to_device) count_under_way(device, -1);
            });
    return to;
  }
  await(current_stream(device), "the host copies and waits for");
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  note_tensor(tensor, false);
  await(current_stream(tensor.device().index()), "the host reads a value of");
  return on_host(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (tensor.storage().nbytes() > 0) record_on_stream(tensor.storage().data(), stream);
}

// ---- Everything else ----

struct Argument {
  at::Tensor device;
  at::Tensor host;
  bool out = false;  // written as a whole, and perhaps resized
};

class HostCall {
 public:
  // Of a replay: it uses memory of the device, and notes no use.
  explicit HostCall(bool of_replay = false) : of_replay_(of_replay) {}

  c10::IValue take_argument(const c10::OperatorHandle& operation, size_t number,
                            const c10::IValue& value) {
    const c10::Argument& argument = operation.schema().arguments()[number];
    if (argument.is_out() && value.isTensor()) return take_out(value.toTensor());
    return take_value(value, argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }

  at::Tensor take(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || tensor.device().type() != kEmulated) return tensor;
    device_ = tensor.device();
    if (!of_replay_) note_tensor(tensor, writes);
    // A capture changes nothing.
    const at::Tensor host = on_host(tensor);
    const bool kept = writes && !of_replay_ && is_captured(*device_);
    arguments_.push_back({tensor, kept ? host.clone() : host});
    return arguments_.back().host;
  }

  c10::IValue take_out(const at::Tensor& tensor) {
    if (tensor.device().type() != kEmulated) return tensor;
    device_ = tensor.device();
    if (!of_replay_) note_tensor(tensor, true);
    const at::Tensor host = at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()));
    arguments_.push_back({tensor, host, true});
    return host;
  }

  c10::IValue take_value(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return take(value.toTensor(), writes);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor, writes));
      return c10::List<at::Tensor>(list);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(take(*tensor, writes)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kEmulated) {
      device_ = value.toDevice();
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  at::Tensor give(const at::Tensor& result) const {
    if (!result.defined() || !device_) return result;
    for (const Argument& argument : arguments_) {
      if (result.is_same(argument.host)) {
        if (argument.out) write(argument);
        return argument.device;
      }
      if (result.storage().data() == argument.host.storage().data() && result.numel() > 0) {
        const auto bytes = static_cast<const char*>(result.const_data_ptr()) -
                           static_cast<const char*>(argument.host.const_data_ptr());
        return argument.device.as_strided(
            result.sizes(), result.strides(),
            argument.device.storage_offset() + bytes / static_cast<int64_t>(result.element_size()));
      }
    }
    const at::Tensor copy = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(*device_).pinned_memory(false));
    if (result.numel() > 0 && !is_captured(*device_)) on_host(copy).copy_(result);
    return copy;
  }

  c10::IValue give_value(const c10::IValue& value) const {
    if (value.isTensor()) return give(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give(tensor));
      return c10::List<at::Tensor>(list);
    }
    return value;
  }

  const std::optional<c10::Device>& device() const { return device_; }

 private:
  static void write(const Argument& argument) {
    if (argument.device.sizes() != argument.host.sizes()) {
      at::native::resize_(argument.device, argument.host.sizes());
    }
    if (!is_captured(argument.device.device())) on_host(argument.device).copy_(argument.host);
  }

  const bool of_replay_;
  std::optional<c10::Device> device_;
  std::vector<Argument> arguments_;
};

// Returns what each replay does. `given` are the arguments, over memory of the device; what goes to
// a result that is not one of them is copied there.
std::function<void()> captured_operation(const c10::OperatorHandle& operation,
                                         torch::jit::Stack given,
                                         const torch::jit::Stack& results) {
  const auto tensors_of = [](const torch::jit::Stack& stack) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) tensors.push_back(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
    return tensors;
  };
  std::vector<at::Tensor> into;
  for (const at::Tensor& tensor : tensors_of(results)) into.push_back(on_host(tensor));
  HostCall views(/*of_replay=*/true);
  for (size_t i = 0; i < given.size(); ++i) given[i] = views.take_argument(operation, i, given[i]);
  return [operation, given = std::move(given), into, tensors_of] {
    const at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack = given;
    operation.callBoxed(&stack);
    const std::vector<at::Tensor> made = tensors_of(stack);
    for (size_t i = 0; i < into.size(); ++i) {
      if (!into[i].defined() || into[i].const_data_ptr() == made[i].const_data_ptr()) continue;
      into[i].copy_(made[i]);
    }
  };
}

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  HostCall call;
  const size_t begin = stack->size() - count;
  torch::jit::Stack given(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    value = call.take_argument(operation, i - begin, value);
  }
  TORCH_CHECK(call.device(), "no argument of ", operation.schema().name(), " is on the device");
  const c10::Stream stream = current_stream(call.device()->index());
  const bool captured = is_captured(*call.device());
  if (!captured) catch_up(call.device()->index());
  operation.callBoxed(stack);
  for (size_t i = begin; i < stack->size(); ++i) (*stack)[i] = call.give_value((*stack)[i]);
  if (captured) {
    const torch::jit::Stack results(stack->begin() + static_cast<std::ptrdiff_t>(begin),
                                    stack->end());
    enqueue(stream, captured_operation(operation, std::move(given), results));
  } else {
    check_outside(stream);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace zero::emulated
