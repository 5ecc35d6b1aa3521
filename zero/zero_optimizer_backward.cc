// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What happens in backward passes: hooks, rounds, and passes that fail.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "zero/zero_optimizer_impl.h"

namespace zero {
namespace {

class AfterAccumulation final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterAccumulation(std::function<void()> call) : call_(std::move(call)) {}
  void operator()(const torch::autograd::Variable&) override { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace

void ZeroOptimizer::Impl::install_hooks() {
  for (size_t i = 0; i < table.parameters().size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor& tensor = table.parameters()[i].tensor;
    tensor.mutable_grad().reset();
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<AfterAccumulation>([this, index] { after_accumulation(index); }));
    if (options.stage() == 1 && options.stage1_full_gradients()) {
      accumulation_hooks.push_back(
          tensor.register_hook([this, index](const at::Tensor&) { before_accumulation(index); }));
    }
  }
}

void ZeroOptimizer::Impl::remove_hooks() noexcept {
  try {
    for (size_t i = 0; i < table.parameters().size(); ++i) {
      const at::Tensor& tensor = table.parameters()[i].tensor;
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
      if (i < accumulation_hooks.size()) tensor.remove_hook(accumulation_hooks[i]);
    }
  } catch (...) {  // a tensor that lost its autograd state has no hooks either
  }
}

void ZeroOptimizer::Impl::before_accumulation(int64_t parameter) {
  reducer.set_average_aside(parameter);
}

void ZeroOptimizer::Impl::after_accumulation(int64_t parameter) {
  if (!table.parameters()[parameter].tensor.grad().defined()) return;
  check_usable();
  settle();
  if (clipped) {
    // It must not travel with the clipped gradients after the error.
    table.parameters()[parameter].tensor.mutable_grad().reset();
    report(
        "backward() between clip_grad_norm_() and step(): expected step() next, got a gradient "
        "of " +
        table.parameters()[parameter].name + "; clip after the last backward pass");
  }
  measured.reset();
  try {
    if (*no_sync_active) {
      reducer.gradient_kept(parameter);
    } else {
      reducer.gradient_ready(parameter);
    }
  } catch (const std::exception& error) {
    broken_backward = error_text(error) +
                      ". Gradients are incomplete: call zero_grad() on all ranks and repeat the "
                      "batch";
    links->channel.announce(broken_backward);
    TORCH_CHECK(false, "rank ", links->rank(), ": ", broken_backward);
  }
}

void ZeroOptimizer::Impl::run_backward(const std::function<void()>& backward) {
  check_usable();
  if (clipped) {
    report(
        "backward() between clip_grad_norm_() and step(): expected step() next; clip after the "
        "last backward pass");
  }
  guarded([this] { finish_gathers(); });
  settle();
  const bool sync = !*no_sync_active;
  try {
    if (sync) reducer.begin_pass();
    backward();
    if (sync) reducer.close_round();
  } catch (const std::exception& error) {
    // A hook of ours has said it already, with what to do.
    if (broken_backward.empty()) {
      broken_backward =
          "a backward pass ended with an exception, so gradients are incomplete; call "
          "zero_grad() on all ranks and repeat the batch. It was: " +
          error_text(error);
    }
    links->channel.announce(broken_backward);
    throw;
  }
}

}  // namespace zero
