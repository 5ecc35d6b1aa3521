// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Backward passes: the hooks that hand each gradient to the reducer, the round that a pass opens
// and closes, and passes that fail.
//
// A gradient goes from autograd to its bucket in this order: the user's hooks, then
// before_accumulation(), which writes it into the bucket where that is possible; otherwise autograd
// accumulates it into p.grad(), and after_accumulation() hands over the sum.
//
// On a CPU torch adds up gradients of passes that run on several threads at once, by a mutex
// outside of which it calls hooks. Here they are refused: a gradient that is put into a bucket
// leaves its marker in p.grad(), to which another thread may be about to add.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace torch::autograd {
struct FunctionPreHook;
struct PostAccumulateGradHook;
}  // namespace torch::autograd

namespace zero {

struct Agreement;
struct Engine;

class BackwardPasses {
 public:
  // Adds hooks to every managed parameter of `engine`, which must outlive this; the destructor
  // removes them.
  explicit BackwardPasses(Engine& engine);
  ~BackwardPasses() { remove_hooks(); }
  BackwardPasses(const BackwardPasses&) = delete;
  BackwardPasses& operator=(const BackwardPasses&) = delete;

  // See ZeroOptimizer::backward() and scale_loss().
  void run(const at::Tensor& loss);
  void run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& output_gradients,
           bool retain_graph);
  at::Tensor scale_loss(const at::Tensor& loss);

  // To be called by each step. Where passes ran and no rank used any parameter it warns once, and
  // after kUnusedSteps such steps in a row, if `all_ranks` agree on that, it throws c10::Error on
  // all of them. torch refuses such a loss at once, but with dropped layers it may be meant.
  void check_used(const Agreement& agreement, bool all_ranks);
  static constexpr int kUnusedSteps = 10;
  // To be called by each step. Warns once where a gradient was put into p.grad() by hand before the
  // last step, which has taken it out, and is not there now: torch would use it again.
  void check_by_hand();
  // The program has taken out of p.grad() itself what torch would use again.
  void forget_by_hand() { by_hand_.clear(); }
  // Returns whether a pass began, or that of another optimizer arrived, or a loss was scaled since
  // the last step.
  bool any() const { return any_; }
  // Clears what any() returns, and at the end of a step, which may change the loss scale, scaled
  // losses too.
  void clear(bool end_of_step) {
    any_ = false;
    if (end_of_step) scaled_ = false;
  }
  // The problem of gradients whose loss was not multiplied by the loss scale, or nothing.
  std::string unscaled_problem() const;
  // Returns whether another thread is in run().
  bool run_elsewhere() const { return running_ && !is_of_the_pass(); }
  // With ZeroOptions::micro_batches: the problem of a `call` between the passes of a step, or
  // nothing.
  std::string micro_batch_problem(const std::string& call) const;
  void remove_hooks() noexcept;

 private:
  void install_hooks();
  // Returns true when the gradient is on its way and is not to be accumulated.
  bool before_accumulation(int64_t parameter, const at::Tensor& gradient);
  void after_accumulation(int64_t parameter);
  // Returns whether gradients of this pass stay on this rank for now.
  bool keeps_gradients() const;
  // Returns whether only passes of backward() may give gradients.
  bool takes_own_passes_only() const;
  // Why no pass may run at present, or nothing.
  std::string untimely_problem() const;
  // Why the pass under way may not give gradients, or nothing. Asked for each gradient.
  std::string gradient_problem() const;
  std::string unscaled_text() const;
  // Runs `hand_over` for a gradient of `parameter`, unless the gradient is refused; an error leaves
  // the pass broken on all ranks.
  void run_in_hook(int64_t parameter, const std::function<void()>& hand_over);
  // While it is held, this thread alone hands over gradients. Throws c10::Error, which leaves the
  // pass broken on all ranks, where another thread has it, or runs a pass that this one does not
  // belong to.
  std::unique_lock<std::mutex> lock_hooks();
  // Returns whether this thread belongs to the pass that run() makes.
  bool is_of_the_pass() const;
  void check_capture() const;
  // Throws `problem`, unless it is empty, as CallProtocol::throw_misuse() does.
  void throw_if(const std::string& problem) const;
  // All that comes before a pass: ends what the last step left, and throws where no pass may begin.
  void begin();
  // Of parameters that the forward pass did not wait for, to tell their gradients by.
  void note_gathers_under_way();
  // Drops the gradients that were reset in p.grad(). With update_in_backward also verifies the
  // parameters and takes the options of the updates.
  void prepare_gradients();
  // Why a step has no more passes, or nothing: with update_in_backward, and with micro_batches.
  std::string one_more_pass_problem() const;
  std::string one_more_micro_batch_problem() const;
  // Gradients are incomplete for `reason`.
  void break_pass(const std::string& reason);
  // The same for a `problem`, which is thrown.
  [[noreturn]] void break_and_throw(const std::string& problem);
  // The same, unless they are already, for a `pass` that ended with `error`.
  void break_by(const std::string& pass, const std::string& error);
  // Throws c10::Error for a gradient of a graph that was made of values which a step with
  // overlap_gather is still replacing. Torch's own check sees those alone that the graph saved.
  void check_waited_for(int64_t parameter) const;
  // Throws misuse for arguments of run() that no pass can begin with.
  void check_outputs(const std::vector<at::Tensor>& outputs,
                     const std::vector<at::Tensor>& output_gradients);
  std::vector<at::Tensor> scaled_gradients(const std::vector<at::Tensor>& outputs,
                                           const std::vector<at::Tensor>& output_gradients) const;
  // Opens and closes the round around `differentiate`.
  void run_pass(const std::function<void()>& differentiate);

  Engine& engine_;
  // Per parameter; fewer while they are installed.
  std::vector<const torch::autograd::FunctionPreHook*> before_hooks_;
  std::vector<const torch::autograd::PostAccumulateGradHook*> after_hooks_;
  bool any_ = false;
  std::atomic<bool> running_ = false;  // run() is under way: it scales the gradients that arrive
  std::atomic<std::thread::id> runs_in_ = {};  // the thread that has called it
  std::mutex hooks_mutex_;                     // see lock_hooks()
  bool warned_ = false;
  std::vector<uint8_t> by_hand_;  // GradientReducer::by_hand() of the last step
  bool warned_of_by_hand_ = false;
  int unused_steps_ = 0;           // in a row
  std::vector<uint8_t> unwaited_;  // per parameter: under way when run() began; or empty
  bool scaled_ = false;            // scale_loss() was called since the last step
};

}  // namespace zero
