// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A random program of what users themselves do to a model between the calls of a ZeroOptimizer:
// gradients dropped, put or changed by hand, parameters edited, moved, frozen and tied, losses that
// reach the parameters of two optimizers. One seed decides all of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/options.h"

namespace zero {

// The models of a program and who trains them.
enum class Nets {
  kOne,      // one module, one ZeroOptimizer
  kGan,      // two modules with a ZeroOptimizer each
  kParts,    // two parts of one module with a ZeroOptimizer each, made over the whole module
  kForeign,  // the second module has an optimizer of torch on each rank
};

enum class UserCall {
  kPass,
  kZeroGrad,
  kModuleZeroGrad,
  kPartZeroGrad,      // of one submodule
  kBaseZeroGrad,      // of torch::optim::Optimizer, which is not virtual
  kModuleZeroValues,  // zero_grad(/*set_to_none=*/false)
  kPutGrad,           // p.grad() = a gradient
  kNegateGrad,        // p.grad().neg_()
  kClampGrad,         // torch::nn::utils::clip_grad_value_
  kResetGrad,         // p.grad().reset()
  kRestoreGrad,       // p.grad() taken out and put back
  kEditData,          // p.data().copy_()
  kEditRaw,           // through data_ptr()
  kEditInPlace,       // p.copy_() without gradients
  kSetData,           // p.set_data() of other memory
  kSetDataBack,       // the same and back again
  kSetDataShape,      // p.set_data() of another shape, which the next call must refuse
  kTie,               // p.set_data(q.data()), which the next call must refuse
  kEditFrozen,
  kFreeze,       // requires_grad_(false)
  kThaw,         // requires_grad_(true)
  kThawFrozen,   // requires_grad_(true) of the frozen parameter
  kForeignStep,  // step() of the optimizer of torch
  kReduce,
  kNorm,
  kClip,
  kGradient,
  kMaster,
  kCheckReplicas,
  kRefreshMasters,
  kRefreshWorking,
  kStep,
  kClosureStep,  // step(closure): a pass of all ranks and a step
  // Not drawn: what the test does after a refusal.
  kRestoreShape,
  kUntie,
  kDropFrozenGrad,
};

enum class UserCallKind {
  kPass,
  kEditsGradients,  // by hand
  kEditsParameters,
  kCollective,
  kChecksParameters,  // collective, and refuses parameters that users have changed
  kGathersAverages,   // such a call, and p.grad() has averages behind it in stage 1
};
UserCallKind kind_of(UserCall call);
inline bool is_collective(UserCall call) { return kind_of(call) >= UserCallKind::kCollective; }

enum class PassForm {
  kOnce,
  kTwice,          // two backward passes over one graph, the first with retain_graph
  kCreateGraph,    // backward() with create_graph
  kAfterGrad,      // torch::autograd::grad() of the same graph before
  kPenalty,        // the loss has a gradient in it, as that of WGAN-GP
  kFrozenForward,  // requires_grad_(false) until the pass is over
  kFrozenBetween,  // requires_grad_(false) between the forward and the backward pass
  kUnwaited,       // with overlap_gather, without wait_for()
};

struct UserEvent {
  UserCall call = UserCall::kPass;
  int net = 0;
  unsigned ranks = ~0U;  // those that do it
  int parameter = 0;     // its number in managed()
  uint64_t seed = 0;
  bool look = true;  // with overlap_gather: whether parameters are waited for and compared after it

  // Of passes.
  PassForm form = PassForm::kOnce;
  int driver = -1;       // the net whose optimizer's backward() is called; -1: that of the loss
  unsigned no_sync = 0;  // bits by net
  bool nonfinite = false;
  std::vector<std::vector<unsigned>> units;  // by rank and net, bits

  double norm_type = 2.0;  // of kNorm and kClip
  double max_norm = 1.0;   // of kClip
  bool retried = false;    // again after a refusal
  bool made_anew = false;  // of kStep: resize_rows() behind it, which changes nothing
};

struct UserProgram {
  uint64_t seed = 0;
  int world_size = 2;
  Wire wire = Wire::kMemory;
  Nets nets = Nets::kOne;
  c10::ScalarType dtype = c10::ScalarType::Float;
  Inner inner = Inner::kSgd;
  bool frozen_in_groups = false;  // the frozen parameter is in the inner optimizer's list
  bool recovers = false;          // recover() of each optimizer before the events
  double loss_scale = 1.0;        // constant
  ZeroOptions options;
  std::vector<UserEvent> events;

  int net_count() const { return nets == Nets::kOne ? 1 : 2; }
  bool is_foreign(int net) const { return nets == Nets::kForeign && net == 1; }
};

UserProgram draw_user_program(uint64_t seed);
std::string describe(const UserProgram& program);
std::string describe(const UserEvent& event, int ranks);

// Parameters of odd sizes, of one element, of none and in another memory order, one that is frozen.
struct UserModelImpl : torch::nn::Module {
  UserModelImpl(c10::ScalarType dtype, uint64_t seed);

  // Units of a loss, as bits.
  enum Unit : unsigned { kFirst = 1, kSecond = 2, kDirect = 4, kTwin = 8, kSquare = 16 };

  struct Managed {
    const char* name;
    at::Tensor tensor;
    unsigned units;
  };
  const std::vector<Managed>& managed() const { return managed_; }

  // Gradients are multiples of 1/4 that do not depend on parameters, except kSquare's.
  at::Tensor loss(unsigned units, uint64_t seed, bool nonfinite, bool penalty);

  Affine first{nullptr}, second{nullptr};
  at::Tensor gain, twin, odd, empty, frozen;

 private:
  std::vector<Managed> managed_;
};
TORCH_MODULE(UserModel);

constexpr int kUserParameters = 8;

// What `event` puts into parameter `index` on `rank`.
at::Tensor edited_value(const UserEvent& event, const UserModelImpl& model, int index, int rank);
at::Tensor put_gradient(const UserEvent& event, const UserModelImpl& model, double scale, int rank);
// Puts new values into all parameters of `model`.
void edit_all_parameters(const UserEvent& event, const UserModelImpl& model, int rank);
// What the user does to parameters of these models; nothing for other calls.
void edit_parameters(const UserProgram& program, const UserEvent& event,
                     std::vector<UserModel>& models, int rank);

// Makes the graph of a pass over `models`, and runs `backward` for each time that the event has a
// backward pass over it.
void run_user_pass(
    const UserEvent& event, const std::vector<UserModel>& models, int rank,
    const std::function<void(const at::Tensor& loss, bool retain, bool create)>& backward);

}  // namespace zero
