// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/normal_tensors.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/memory/device_stream.h"
#include "zero/training/engine.h"
#include "zero/training/pass_under_way.h"

namespace zero {
namespace {

// A graph of which only some gradients are wanted, as by torch::autograd::grad(), calls the hooks
// of tensors too, and accumulates none or few of them.
bool wants_all_gradients() {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

// Returns whether this pass adds to the gradient of `leaf`: torch::autograd::grad() captures what
// it is asked for instead, and backward() with a list of inputs adds to those alone.
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
    // Autograd accumulates no undefined gradient.
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

// The gradient of an output of one element: the loss scale. Where its dtype cannot hold that it is
// infinite, as a product would be, so that the step is skipped and a dynamic scale shrinks. A fill
// by such a number throws: std::runtime_error, in fp16 on a GPU alone.
at::Tensor scale_of(const at::Tensor& output, double scale) {
  const at::Scalar held = at::scalar_tensor(scale, at::kDouble).to(output.scalar_type()).item();
  return at::full_like(output, held, output.options().requires_grad(false));
}

constexpr const char* kTwoThreads =
    "backward passes: expected one at a time, got those of two threads at once; add up the losses "
    "of all threads before one backward(), or start a rank for each of them. On a GPU a pass "
    "inside of backward() under an at::ThreadLocalStateGuard of before it counts as that of "
    "another thread";

// What to do about incomplete gradients.
std::string remedy(const Engine& engine) {
  return engine.options.update_in_backward()
             ? "with update_in_backward(true) some parameters may be updated already; go on from a "
               "checkpoint with a new optimizer, or by recover() with protect()"
             : "call zero_grad() on all ranks, of every optimizer that the loss reaches, and "
               "repeat the batch";
}

}  // namespace

BackwardPasses::BackwardPasses(Engine& engine) : engine_(engine) {
  try {
    install_hooks();
  } catch (...) {  // no destructor runs, and the hooks have a pointer to this
    remove_hooks();
    throw;
  }
}

void BackwardPasses::install_hooks() {
  const std::vector<Parameter>& parameters = engine_.table.parameters();
  for (int64_t index = 0; index < std::ssize(parameters); ++index) {
    const at::Tensor& tensor = parameters[index].tensor;
    tensor.mutable_grad().reset();
    auto after = std::make_unique<AfterAccumulation>([this, index] { after_accumulation(index); });
    after_hooks_.push_back(after.get());
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(after));
    // All hooks of register_hook(), added at any time, belong to one entry. Its first call makes
    // that entry and drops all others, so it is made here: before ours, which sees what the user's
    // hooks made of a gradient. Only once: a hook that is removed keeps its place in the entry.
    if (!torch::autograd::impl::get_autograd_meta(tensor)->cpp_hooks_list_) {
      tensor.remove_hook(tensor.register_hook([](const at::Tensor&) {}));
    }
    auto before = std::make_unique<BeforeAccumulation>(
        [this, index](const at::Tensor& gradient) { return before_accumulation(index, gradient); });
    before_hooks_.push_back(before.get());
    torch::autograd::impl::hooks(tensor).push_back(std::move(before));
  }
}

void BackwardPasses::remove_hooks() noexcept {
  try {
    for (size_t i = 0; i < after_hooks_.size(); ++i) {
      const at::Tensor& tensor = engine_.table.parameters()[i].tensor;
      // Not one that took the place of ours.
      if (torch::autograd::impl::post_acc_grad_hooks(tensor).get() == after_hooks_[i]) {
        torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
      }
      if (i >= before_hooks_.size()) break;
      std::erase_if(torch::autograd::impl::hooks(tensor),
                    [&](const auto& hook) { return hook.get() == before_hooks_[i]; });
    }
  } catch (...) {  // a tensor that lost its autograd state has no hooks either
  }
  before_hooks_.clear();
  after_hooks_.clear();
}

bool BackwardPasses::takes_own_passes_only() const {
  return engine_.reducer.micro_batches() != nullptr || engine_.options.update_in_backward();
}

std::string BackwardPasses::unscaled_problem() const {
  return any_ || engine_.record.scaler().scale() == 1.0 ? std::string() : unscaled_text();
}

std::string BackwardPasses::unscaled_text() const {
  return "gradients of a loss that was not scaled: expected optimizer.backward(loss), or "
         "optimizer.scale_loss(loss).backward(), with a loss scale of " +
         exact_text(engine_.record.scaler().scale()) +
         ", got gradients of neither; they would be divided by that scale. Call "
         "requires_grad_(false) on parameters whose gradients of the pass are not wanted. Multiply "
         "gradients that the program makes itself by optimizer.scale_loss(torch::ones({}))";
}

std::string BackwardPasses::untimely_problem() const {
  if (engine_.clipping.has_clips()) {
    return "backward() between a clip and step(): expected step() next, or zero_grad() of the "
           "ZeroOptimizer to begin the step anew; clip after the last backward pass";
  }
  if (engine_.protocol.ema_in_use()) return std::string("a backward pass: ") + kEmaInUseProblem;
  return {};
}

std::string BackwardPasses::gradient_problem() const {
  std::string problem = untimely_problem();
  if (!problem.empty()) return problem;
  if (takes_own_passes_only() && !running_) {
    const std::string of_others =
        ". Call requires_grad_(false) on parameters that the pass of another optimizer reaches, as "
        "that of a GAN's generator does, or make one optimizer of all that one loss trains";
    return "a gradient outside of backward(): expected optimizer.backward(loss) " +
           (engine_.options.update_in_backward()
                ? "with update_in_backward(true), got another pass, whose gradients would update "
                  "parameters at once"
                : std::string("for each number of micro_batches(), got another pass, of which no "
                              "micro-batch is known")) +
           of_others;
  }
  const double scale = engine_.record.scaler().scale();
  if (const PassUnderWay* const pass = PassUnderWay::current()) {
    if (pass->scale() == scale) return {};
    return "gradients of backward() of another optimizer: expected this optimizer's loss scale "
           "of " +
           exact_text(scale) + ", by which they would be divided, got a loss multiplied by " +
           exact_text(pass->scale()) +
           ". Give both optimizers one constant loss scale with ZeroOptions::loss_scaler, make one "
           "optimizer of all that the loss trains, or call requires_grad_(false) on parameters "
           "whose gradients of that pass are not wanted, as on a GAN's discriminator";
  }
  return running_ || scaled_ || scale == 1.0 ? std::string() : unscaled_text();
}

bool BackwardPasses::before_accumulation(int64_t parameter, const at::Tensor& gradient) {
  const at::Tensor& tensor = engine_.table.parameters()[parameter].tensor;
  // Of one that was frozen since the forward pass, autograd accumulates no gradient.
  if (!tensor.requires_grad() || !accumulates_into(tensor)) return false;
  bool taken = false;
  run_in_hook(parameter, [&] {
    check_waited_for(parameter);
    engine_.reducer.before_gradient(parameter);
    taken = !keeps_gradients() && wants_all_gradients() &&
            engine_.reducer.take_gradient(parameter, gradient);
  });
  return taken;
}

void BackwardPasses::after_accumulation(int64_t parameter) {
  const Parameter& p = engine_.table.parameters()[parameter];
  // Autograd calls this hook also where before_accumulation() took the gradient, and for a
  // parameter that was frozen since the forward pass.
  if (!p.tensor.grad().defined() || !p.tensor.requires_grad()) return;
  if (engine_.reducer.is_marked(parameter)) return;
  run_in_hook(parameter, [&] {
    if (keeps_gradients()) {
      engine_.reducer.gradient_kept(parameter);
    } else {
      engine_.reducer.gradient_ready(parameter);
    }
  });
}

bool BackwardPasses::keeps_gradients() const {
  return engine_.protocol.in_no_sync() || engine_.reducer.keeps_gradients();
}

std::string BackwardPasses::micro_batch_problem(const std::string& call) const {
  const MicroBatchSums* const micro_batches = engine_.reducer.micro_batches();
  if (!micro_batches || !micro_batches->is_begun() || micro_batches->is_complete()) return {};
  return c10::str(call, ": expected all backward passes of this rank's micro-batches, ",
                  micro_batches->begin(), " to ", micro_batches->end() - 1, ", or none, got ",
                  micro_batches->done(), " of ", micro_batches->own(),
                  " since the last step() or zero_grad(); run backward(loss) for each number of "
                  "micro_batches(), or call zero_grad() on all ranks");
}

void BackwardPasses::run_in_hook(int64_t parameter, const std::function<void()>& hand_over) {
  engine_.protocol.check_usable();
  const std::unique_lock<std::mutex> lock = lock_hooks();
  const c10::OptionalDeviceGuard guard(engine_.protocol.device());
  const NormalTensors normal;  // buckets outlive the pass
  check_capture();
  engine_.record.follow_loss_scale();
  throw_if(engine_.shards.take_problem());
  // Before anything is accumulated, so that what is in p.grad() stays.
  if (const std::string problem = gradient_problem(); !problem.empty()) {
    engine_.protocol.throw_misuse("gradient of " + engine_.table.parameters()[parameter].name +
                                  ": " + problem);
  }
  if (scaled_) any_ = true;  // zero_grad() has forgotten it
  if (PassUnderWay* const pass = PassUnderWay::current()) {
    any_ = true;
    pass->reach(*this);
  }
  try {
    hand_over();
  } catch (const std::exception& error) {
    // A failed communicator is final, as in a collective call.
    if (is_of_communication(error)) engine_.protocol.run_call([] { throw; });
    break_and_throw(error_text(error));
  }
}

bool BackwardPasses::is_of_the_pass() const {
  // Autograd takes a pass of backward() along to all of its hooks, and to passes that begin there,
  // unless they begin under the thread state of before. On a CPU those are on its thread.
  return PassUnderWay::current() != nullptr || runs_in_.load() == std::this_thread::get_id();
}

std::unique_lock<std::mutex> BackwardPasses::lock_hooks() {
  if (engine_.protocol.is_called_elsewhere()) engine_.protocol.refuse_second_thread();
  std::unique_lock<std::mutex> lock(hooks_mutex_, std::try_to_lock);
  const bool free = lock.owns_lock();
  if (!free || run_elsewhere()) {
    if (!free) lock.lock();  // the other thread uses what is changed here
    break_and_throw(kTwoThreads);
  }
  return lock;
}

void BackwardPasses::break_pass(const std::string& reason) {
  if (engine_.options.update_in_backward()) {
    engine_.protocol.fail_on_all_ranks(reason);
  } else {
    engine_.protocol.break_backward(reason);
  }
}

void BackwardPasses::break_and_throw(const std::string& problem) {
  const std::string text = problem + ". Gradients are incomplete: " + remedy(engine_);
  break_pass(text);
  TORCH_CHECK(false, "rank ", engine_.protocol.rank(), ": ", text);
}

void BackwardPasses::break_by(const std::string& pass, const std::string& error) {
  const std::lock_guard<std::mutex> lock(hooks_mutex_);
  // Else a hook of ours has said it already, with what to do.
  if (engine_.protocol.is_backward_broken() || engine_.protocol.has_failed()) return;
  break_pass(pass + " ended with an exception, so gradients are incomplete; " + remedy(engine_) +
             ". It was: " + error);
}

void BackwardPasses::check_waited_for(int64_t parameter) const {
  const bool was_under_way = !unwaited_.empty() && unwaited_[parameter] != 0;
  TORCH_CHECK(!was_under_way && !engine_.gathers.is_under_way(parameter), "parameter ",
              engine_.table.parameters()[parameter].name,
              ": expected wait_for(module) before the module computes, since overlap_gather lets "
              "step() return while new values are received, got a gradient of a forward pass that "
              "did not wait for this one");
}

// Before anything runs: a capture that is refused later has a part of a step already.
void BackwardPasses::check_capture() const {
  if (!is_capturing(engine_.protocol.device())) return;
  const std::string problem = engine_.capture_problem(Call::kStep);
  TORCH_CHECK(problem.empty(), "rank ", engine_.protocol.rank(), ": ", problem);
}

void BackwardPasses::throw_if(const std::string& problem) const {
  if (!problem.empty()) engine_.protocol.throw_misuse(problem);
}

void BackwardPasses::begin() {
  const NormalTensors normal;
  check_capture();
  note_gathers_under_way();
  engine_.protocol.run_call([this] { engine_.gathers.finish(); });
  engine_.record.follow_loss_scale();
  any_ = true;
  throw_if(engine_.shards.take_problem());
  throw_if(engine_.gathers.take_problem());
  throw_if(untimely_problem());
  throw_if(one_more_pass_problem());
  prepare_gradients();
  throw_if(one_more_micro_batch_problem());
}

void BackwardPasses::note_gathers_under_way() {
  const int64_t count = std::ssize(engine_.table.parameters());
  for (int64_t p = 0; p < count; ++p) {
    if (!engine_.gathers.is_under_way(p)) continue;
    unwaited_.resize(count);
    unwaited_[p] = 1;
  }
}

void BackwardPasses::prepare_gradients() {
  try {
    // Also where this pass uses none of the parameters that were reset.
    engine_.reducer.drop_resets();
    // Nobody looks again before the first update. Parameters that require no gradients have none,
    // and are step()'s.
    if (engine_.options.update_in_backward()) {
      engine_.table.verify_values();
      engine_.early.take_options();
    }
  } catch (const std::exception& error) {
    engine_.protocol.throw_misuse(error_text(error));
  }
}

std::string BackwardPasses::one_more_pass_problem() const {
  if (!engine_.options.update_in_backward() || !engine_.reducer.has_packed()) return {};
  return "backward(): expected step() after each backward pass with update_in_backward(true), got "
         "one more pass; add up the losses before one backward(), or make the optimizer without "
         "that option";
}

std::string BackwardPasses::one_more_micro_batch_problem() const {
  const MicroBatchSums* const micro_batches = engine_.reducer.micro_batches();
  if (micro_batches == nullptr || !micro_batches->is_complete()) return {};
  return c10::str(
      "backward(): expected step() after the passes of this rank's micro-batches, ",
      micro_batches->begin(), " to ", micro_batches->end() - 1,
      ", got one more pass; run backward(loss) once for each number of micro_batches(), and "
      "begin a step anew by zero_grad() of the ZeroOptimizer");
}

void BackwardPasses::check_outputs(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& output_gradients) {
  if (output_gradients.size() > outputs.size()) {
    engine_.protocol.throw_misuse(
        c10::str("backward(): expected at most one output gradient for each output, got ",
                 output_gradients.size(), " for ", outputs.size(),
                 "; give outputs and gradients in one order"));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    const bool given = i < output_gradients.size() && output_gradients[i].defined();
    if (output.defined() && output.requires_grad() && (given || output.numel() == 1)) continue;
    engine_.protocol.throw_misuse(
        c10::str("backward(): output ", i, ": expected ",
                 !output.defined() ? "a tensor, got an undefined one"
                 : !output.requires_grad()
                     ? "one that requires gradients, got one without a graph; make it without a "
                       "NoGradGuard, from parameters of the module"
                     : c10::str("an output gradient for shape ", output.sizes(), ", got none")));
  }
}

std::vector<at::Tensor> BackwardPasses::scaled_gradients(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& output_gradients) const {
  const double scale = engine_.record.scaler().scale();
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i < output_gradients.size() && output_gradients[i].defined()) {
      gradients.push_back(scale == 1.0 ? output_gradients[i] : output_gradients[i] * scale);
      continue;
    }
    gradients.push_back(scale_of(outputs[i], scale));
  }
  return gradients;
}

void BackwardPasses::run_pass(const std::function<void()>& differentiate) {
  engine_.protocol.check_usable();
  const c10::OptionalDeviceGuard guard(engine_.protocol.device());
  std::unique_lock<std::mutex> lock = lock_hooks();
  const bool inside = running_.exchange(true);
  if (!inside) runs_in_ = std::this_thread::get_id();
  const auto ended = c10::make_scope_exit([this, inside] {
    running_ = inside;
    if (!inside) unwaited_.clear();
  });
  begin();
  if (inside && engine_.reducer.micro_batches() != nullptr) {
    engine_.protocol.throw_misuse(
        "backward() inside a backward pass: expected one pass for each number of micro_batches(), "
        "got a second one in a hook of the first; add up the losses before one backward()");
  }
  const bool kept = keeps_gradients();
  lock.unlock();
  std::shared_ptr<PassUnderWay> pass;
  const auto break_all = [&](const std::string& text) {
    break_by("a backward pass", text);
    if (!pass) return;
    for (BackwardPasses* const other : pass->reached()) {
      other->break_by("a backward pass of another optimizer", text);
    }
  };
  try {
    pass = std::make_shared<PassUnderWay>(*this, engine_.record.scaler().scale());
    const PassUnderWay::Guard under_way(pass);
    if (!kept) {
      const std::unique_lock<std::mutex> begins = lock_hooks();
      const NormalTensors normal;
      engine_.reducer.begin_pass();
    }
    differentiate();
    const std::unique_lock<std::mutex> ends = lock_hooks();
    const NormalTensors normal;
    engine_.reducer.end_pass(kept);
  } catch (const std::exception& error) {
    std::string text = error_text(error);
    // Torch's check of the values that a graph saved cannot say what has replaced them.
    const bool unwaited = engine_.gathers.overlap() &&
                          text.find("modified by an inplace operation") != std::string::npos;
    if (unwaited) {
      text += " With overlap_gather(true) a forward pass before wait_for(module) ends in this, too";
    }
    break_all(text);
    if (is_of_communication(error) && !engine_.protocol.has_failed()) {
      engine_.protocol.run_call([] { throw; });
    }
    TORCH_CHECK(!unwaited, "rank ", engine_.protocol.rank(), ": ", text);
    throw;
  } catch (...) {
    break_all(kNoStdException);
    throw;
  }
}

void BackwardPasses::run(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1) {
    engine_.protocol.throw_misuse(
        "loss: expected a tensor of one element, got " +
        (loss.defined() ? "shape " + c10::str(loss.sizes()) : std::string("undefined")) +
        "; use backward(outputs, output_gradients)");
  }
  if (!loss.requires_grad() && (!at::GradMode::is_enabled() || loss.is_inference())) {
    engine_.protocol.throw_misuse(
        "loss: expected one that was computed with a graph, got one of a NoGradGuard or an "
        "InferenceMode, which has no gradient; end their scope before the forward pass");
  }
  run_pass([&] {
    // A loss that touches nothing trainable has no graph; its gradient is zero.
    if (!loss.requires_grad()) return;
    loss.backward(scale_of(loss, engine_.record.scaler().scale()));
  });
}

void BackwardPasses::run(const std::vector<at::Tensor>& outputs,
                         const std::vector<at::Tensor>& output_gradients, bool retain_graph) {
  check_outputs(outputs, output_gradients);
  run_pass([&] {
    torch::autograd::backward(outputs, scaled_gradients(outputs, output_gradients), retain_graph);
  });
}

void BackwardPasses::check_used(const Agreement& agreement, bool all_ranks) {
  const std::vector<uint8_t>& used = agreement.used;
  if (!agreement.passes || std::find(used.begin(), used.end(), 1) != used.end()) {
    unused_steps_ = 0;
    return;
  }
  if (all_ranks && ++unused_steps_ == kUnusedSteps) {
    unused_steps_ = 0;
    TORCH_CHECK(false, "rank ", engine_.protocol.rank(),
                ": step(): expected a gradient from backward passes, got none for any parameter on "
                "any rank in ",
                kUnusedSteps,
                " steps in a row, so that nothing is trained. Compute the loss without a "
                "NoGradGuard and from tensors that are not detached; call zero_grad() on all ranks "
                "to go on");
  }
  if (!any_ || warned_) return;
  warned_ = true;
  TORCH_WARN("rank ", engine_.protocol.rank(),
             ": step(): expected a gradient from the backward passes since the last step, got none "
             "for any parameter on any rank, so that nothing is updated. Was the loss computed "
             "under a NoGradGuard, or from detached tensors?");
}

void BackwardPasses::check_by_hand() {
  for (size_t p = 0; p < by_hand_.size() && !warned_of_by_hand_; ++p) {
    if (by_hand_[p] == 0 || engine_.reducer.used()[p] != 0) continue;
    warned_of_by_hand_ = true;
    TORCH_WARN("rank ", engine_.protocol.rank(), ": step(): parameter ",
               engine_.table.parameters()[p].name,
               ": expected a gradient in p.grad(), where the last step found one that no backward "
               "pass had made, got none, so that this rank has none for it. step() takes gradients "
               "out of p.grad(): put yours there again before each step");
  }
  by_hand_ = engine_.reducer.by_hand();
}

at::Tensor BackwardPasses::scale_loss(const at::Tensor& loss) {
  engine_.record.follow_loss_scale();
  any_ = scaled_ = true;
  const double scale = engine_.record.scaler().scale();
  if (scale == 1.0) return loss;
  const at::Tensor scaled = loss * scale;
  if (!scaled.requires_grad()) return scaled;
  // A graph may outlive this.
  scaled.register_hook([rank = engine_.protocol.rank()](const at::Tensor&) {
    TORCH_CHECK(PassUnderWay::current() == nullptr, "rank ", rank,
                ": backward(loss): expected a loss that scale_loss() has not multiplied, since "
                "backward() of any ZeroOptimizer multiplies it by a loss scale, got one that it "
                "has; call backward(loss), or scale_loss(loss).backward()");
  });
  return scaled;
}

}  // namespace zero
