// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What happens in backward passes: hooks, rounds, and passes that fail.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "zero/optimizer/impl.h"

namespace zero {
namespace {

// A graph of which only some gradients are wanted, as by torch::autograd::grad(), calls the hooks
// of tensors too, and accumulates none or few of them.
bool wants_all_gradients() {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

// Whether this pass adds to the gradient of `leaf`: torch::autograd::grad() captures what it is
// asked for instead, and backward() with a list of inputs adds to those alone.
bool accumulates_into(const at::Tensor& leaf) {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(torch::autograd::impl::grad_accumulator(leaf).get());
  return found != chosen->end() && found->second.needed_;
}

class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(std::function<bool(const at::Tensor&)> taken)
      : taken_(std::move(taken)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const bool taken = gradients.at(0).defined() && taken_(gradients[0]);
    // Of an undefined gradient nothing is accumulated, and AfterAccumulation is not called.
    return taken ? torch::autograd::variable_list(1) : gradients;
  }

 private:
  std::function<bool(const at::Tensor&)> taken_;
};

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
    // What register_hook() adds, at whatever time, belongs to one entry. Its first call makes that
    // entry and drops all others, so it is made here: before ours, which sees what the user's hooks
    // made of a gradient.
    tensor.remove_hook(tensor.register_hook([](const at::Tensor&) {}));
    auto before = std::make_unique<BeforeAccumulation>(
        [this, index](const at::Tensor& gradient) { return before_accumulation(index, gradient); });
    before_hooks.push_back(before.get());
    torch::autograd::impl::hooks(tensor).push_back(std::move(before));
  }
}

void ZeroOptimizer::Impl::remove_hooks() noexcept {
  try {
    for (size_t i = 0; i < table.parameters().size(); ++i) {
      const at::Tensor& tensor = table.parameters()[i].tensor;
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
      std::erase_if(torch::autograd::impl::hooks(tensor),
                    [&](const auto& hook) { return hook.get() == before_hooks[i]; });
    }
  } catch (...) {  // a tensor that lost its autograd state has no hooks either
  }
}

bool ZeroOptimizer::Impl::before_accumulation(int64_t parameter, const at::Tensor& gradient) {
  if (!accumulates_into(table.parameters()[parameter].tensor)) return false;
  reducer.set_average_aside(parameter);
  if (*no_sync_active || !wants_all_gradients() || !takes_gradients()) return false;
  bool taken = false;
  accept([&] { taken = reducer.take_gradient(parameter, gradient); });
  return taken;
}

void ZeroOptimizer::Impl::after_accumulation(int64_t parameter) {
  if (!table.parameters()[parameter].tensor.grad().defined()) return;
  check_usable();
  if (!takes_gradients()) {
    // It must not be sent with other gradients after the error.
    table.parameters()[parameter].tensor.mutable_grad().reset();
    report("gradient of " + table.parameters()[parameter].name + ": " + untimely_gradient());
  }
  accept([&] {
    if (*no_sync_active) {
      reducer.gradient_kept(parameter);
    } else {
      reducer.gradient_ready(parameter);
    }
  });
}

std::string ZeroOptimizer::Impl::untimely_gradient() const {
  if (!clips.empty()) {
    return "backward() between clip_grad_norm_() and step(): expected step() next; clip after the "
           "last backward pass";
  }
  return unscaled_problem();
}

void ZeroOptimizer::Impl::accept(const std::function<void()>& gradient) {
  check_usable();
  settle();
  if (shards.inner_was_stepped()) report(kInnerStep);
  try {
    gradient();
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
  guarded([this] { finish_gathers(); });
  settle();
  scaled = true;
  if (shards.inner_was_stepped()) report(kInnerStep);
  if (!takes_gradients()) report(untimely_gradient());
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
