// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/plain_user_run.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/training/plain_sequence.h"

namespace zero {
namespace {

constexpr int kGain = 4, kTwinIndex = 5, kEmpty = 7;
constexpr double kTolerance = 2e-5;

// Whether a pass gives a gradient to a parameter of a net.
bool is_hit(const std::vector<bool>& of_net) {
  return std::find(of_net.begin(), of_net.end(), true) != of_net.end();
}

UserEvent on_all_ranks(UserEvent event, UserCall call, int net) {
  event.call = call;
  event.net = net;
  event.ranks = ~0U;
  event.norm_type = 2.0;
  event.look = true;
  return event;
}

}  // namespace

bool PlainUserRun::Edits::is_moved() const { return std::ranges::find(moved, true) != moved.end(); }

bool PlainUserRun::Edits::is_stale() const { return std::ranges::find(stale, true) != stale.end(); }

void PlainUserRun::Edits::refresh() {
  in_place = false;
  moved = stale = {};
}

bool PlainUserRun::Net::is_ambiguous() const {
  return std::ranges::any_of(gradients, &PromisedGradients::is_ambiguous);
}

int64_t PlainUserRun::Net::most_dropped() const {
  int64_t result = 0;
  for (const PromisedGradients& g : gradients) result = std::max(result, g.rounds_dropped());
  return result;
}

PlainUserRun::PlainUserRun(const UserProgram& program) : program_(program) {
  for (int rank = 0; rank < program_.world_size; ++rank) {
    std::vector<UserModel>& of_rank = replicas_.emplace_back();
    for (int net = 0; net < program_.net_count(); ++net) {
      const int from = program_.is_foreign(net) ? rank : 0;
      of_rank.emplace_back(program_.dtype,
                           program_.seed + static_cast<uint64_t>(1000 * from + 100 * net));
    }
  }
  const bool keeps_apart = program_.options.no_sync_fp32() && program_.dtype != at::kFloat;
  for (int n = 0; n < program_.net_count(); ++n) {
    Net& net = nets_.emplace_back();
    for (const auto& of_rank : replicas_) {
      net.gradients.emplace_back(of_rank[n], keeps_apart);
      if (!program_.is_foreign(n)) continue;
      net.foreign.push_back(std::make_unique<torch::optim::SGD>(of_rank[n]->parameters(),
                                                                torch::optim::SGDOptions(0.125)));
    }
    if (program_.is_foreign(n)) continue;
    for (const auto& p : replicas_[0][n]->managed()) {
      net.masters.push_back(p.tensor.detach().to(at::kDouble).requires_grad_());
    }
    net.optimizer = make_optimizer(program_.inner, net.masters);
  }
  queue_.assign(program_.events.begin(), program_.events.end());
  choose();
}

bool PlainUserRun::has_own_masters() const {
  return program_.dtype != at::kFloat || program_.options.layout() == Layout::kPerParameter;
}

void PlainUserRun::choose() {
  const auto called = [](Expectation e) { return e != Expectation::kNotCalled; };
  while (!queue_.empty()) {
    const UserEvent event = queue_.front();
    queue_.pop_front();
    task_ = {event, expect(event)};
    if (std::ranges::none_of(task_.by_rank, called)) continue;
    log_ += "  " + describe(event, program_.world_size) + " [";
    for (const Expectation e : task_.by_rank) log_ += "-wr?"[static_cast<size_t>(e)];
    log_ += "]\n";
    return;
  }
  over_ = true;
}

// --- What is promised

std::vector<Expectation> PlainUserRun::expect(const UserEvent& event) {
  if (is_collective(event.call)) {
    return std::vector<Expectation>(program_.world_size, expect_collective(event));
  }
  std::vector<Expectation> result(program_.world_size, Expectation::kNotCalled);
  for (int rank = 0; rank < program_.world_size; ++rank) {
    if ((event.ranks >> rank & 1) != 0) result[rank] = expect_on(event, rank);
  }
  return result;
}

Expectation PlainUserRun::expect_on(const UserEvent& event, int rank) const {
  const Net& net = nets_[event.net];
  const auto works_if = [](bool b) { return b ? Expectation::kWorks : Expectation::kNotCalled; };
  switch (event.call) {
    case UserCall::kPass:
      return expect_pass(event, rank);
    case UserCall::kPartZeroGrad:
    case UserCall::kResetGrad:
      return works_if(!net.is_ambiguous());
    case UserCall::kModuleZeroValues:
    case UserCall::kNegateGrad:
    case UserCall::kClampGrad:
    case UserCall::kPutGrad:
    case UserCall::kRestoreGrad:
      return expect_gradient_edit(event, rank);
    case UserCall::kSetData:
      // One of no elements has no memory that could be another.
      return works_if(event.parameter != kEmpty);
    case UserCall::kSetDataShape:
    case UserCall::kTie:
      return works_if(!net.edits.are_noticed() && !net.broken);
    case UserCall::kForeignStep:
      return works_if(!net.foreign.empty());
    default:
      return Expectation::kWorks;
  }
}

Expectation PlainUserRun::expect_collective(const UserEvent& event) {
  if (event.call == UserCall::kZeroGrad) return expect_zero_grad(event);
  if (event.call == UserCall::kClosureStep) return expect_closure_step(event);
  const Net& net = nets_[event.net];
  if (event.call == UserCall::kClip) {
    bool any = false;
    for (int i = 0; i < kUserParameters; ++i) any = any || mean_of(event.net, i).defined();
    if (!any) return Expectation::kNotCalled;
  }
  if (event.call == UserCall::kRefreshWorking && !has_own_masters() && net.edits.in_place) {
    return Expectation::kNotCalled;
  }
  if (net.is_ambiguous() && !net.broken && net.most_dropped() > 0) return Expectation::kEither;
  if (is_refused_for_gradients(event.net)) return Expectation::kRefused;
  if (net.unknown) return Expectation::kEither;
  if (kind_of(event.call) >= UserCallKind::kChecksParameters) {
    return is_refused_for_parameters(event.net) ? Expectation::kRefused : Expectation::kWorks;
  }
  if (net.edits.tied || net.edits.reshaped) return Expectation::kRefused;
  if (event.call == UserCall::kCheckReplicas && (net.edits.are_noticed() || net.edits.is_stale())) {
    return Expectation::kEither;
  }
  return Expectation::kWorks;
}

// It is collective where there are gradients: on all ranks alike after another call.
Expectation PlainUserRun::expect_zero_grad(const UserEvent& event) {
  const Net& net = nets_[event.net];
  if (event.retried || net.refused) return Expectation::kWorks;
  const auto with = std::ranges::count_if(
      net.gradients, [&](const PromisedGradients& g) { return g.any() || !net.clips.empty(); });
  const bool alike = with == 0 || with == program_.world_size;
  if (!net.broken && !net.unknown && alike) return Expectation::kWorks;
  UserEvent first = event;
  first.call = UserCall::kNorm;
  first.norm_type = 2.0;
  queue_.insert(queue_.begin(), {first, event});
  return Expectation::kNotCalled;
}

Expectation PlainUserRun::expect_closure_step(const UserEvent& event) const {
  if (is_refused_for_parameters(event.net) || is_refused_for_gradients(event.net)) {
    return Expectation::kNotCalled;
  }
  for (int rank = 0; rank < program_.world_size; ++rank) {
    if (expect_pass(event, rank) != Expectation::kWorks) return Expectation::kNotCalled;
    // The frozen parameter may have been thawed.
    for (const unsigned units : event.units[rank]) {
      if ((units & UserModelImpl::kDirect) != 0) return Expectation::kNotCalled;
    }
  }
  return Expectation::kWorks;
}

Expectation PlainUserRun::expect_pass(const UserEvent& event, int rank) const {
  const Hits hits = hits_of(event, rank);
  bool either = event.form == PassForm::kUnwaited;
  for (int n = 0; n < program_.net_count(); ++n) {
    const bool here = is_hit(hits[n]), own = event.driver == n;
    if (!is_zero(n) || (!here && !own)) continue;
    const Net& net = nets_[n];
    const PromisedGradients& gradients = net.gradients[rank];
    if (net.broken || net.unknown || net.edits.reshaped) return Expectation::kNotCalled;
    if (!net.clips.empty()) return Expectation::kRefused;
    if (gradients.is_partial()) {
      if (own) return Expectation::kRefused;
      either = true;
    }
    const bool no_sync = (event.no_sync >> n & 1) != 0;
    for (int i = 0; i < kUserParameters; ++i) {
      const Slot& slot = gradients.slot(i);
      if (!slot.altered) continue;
      if (hits[n][i]) return Expectation::kRefused;
      // A round that closes sends what is left of a gradient.
      if ((slot.holds != Holds::kGradient && !slot.kept_apart) || no_sync) continue;
      if (own) return Expectation::kRefused;
      either = true;
    }
  }
  if (std::ranges::none_of(hits, is_hit) && event.driver < 0) return Expectation::kNotCalled;
  return either ? Expectation::kEither : Expectation::kWorks;
}

Expectation PlainUserRun::expect_gradient_edit(const UserEvent& event, int rank) const {
  const Net& net = nets_[event.net];
  if (!is_zero(event.net) || net.unknown || net.is_ambiguous()) return Expectation::kNotCalled;
  const PromisedGradients& gradients = net.gradients[rank];
  const Slot& own = gradients.slot(event.parameter);
  const bool none = (own.holds == Holds::kNothing || !own.present) &&
                    !parameter(rank, event.net, event.parameter).tensor.grad().defined();
  switch (event.call) {
    case UserCall::kNegateGrad:
      if (none || own.altered) return Expectation::kNotCalled;
      return gradients.refuses_writes(event.parameter) ? Expectation::kRefused
                                                       : Expectation::kWorks;
    case UserCall::kRestoreGrad:
      return none ? Expectation::kNotCalled : Expectation::kWorks;
    case UserCall::kClampGrad: {
      // It changes what data() gives, so that a later part of a gradient is changed unnoticed.
      bool refused = false;
      for (int i = 0; i < kUserParameters; ++i) {
        const Slot& slot = gradients.slot(i);
        if (slot.altered || (slot.holds == Holds::kGradient && slot.sent)) {
          return Expectation::kNotCalled;
        }
        refused = refused || gradients.refuses_writes(i);
      }
      return refused ? Expectation::kRefused : Expectation::kWorks;
    }
    default:
      return Expectation::kWorks;
  }
}

bool PlainUserRun::is_refused_for_gradients(int n) const {
  const Net& net = nets_[n];
  return net.broken || std::ranges::any_of(net.gradients, [&](const PromisedGradients& g) {
           return g.is_partial() || g.is_altered() ||
                  g.rounds_dropped() != net.gradients[0].rounds_dropped();
         });
}

bool PlainUserRun::has_thawed_gradient(int n) const {
  for (int rank = 0; rank < program_.world_size; ++rank) {
    for (int other = 0; other < program_.net_count(); ++other) {
      if (other != n && program_.nets != Nets::kParts) continue;
      const at::Tensor& frozen = replicas_[rank][other]->frozen;
      if (frozen.requires_grad() && frozen.grad().defined()) return true;
    }
  }
  return false;
}

bool PlainUserRun::has_frozen(int n) const {
  for (int rank = 0; rank < program_.world_size; ++rank) {
    for (const auto& p : replicas_[rank][n]->managed()) {
      if (!p.tensor.requires_grad()) return true;
    }
  }
  return false;
}

bool PlainUserRun::is_refused_for_parameters(int n) const {
  return nets_[n].edits.are_noticed() || has_frozen(n) || has_thawed_gradient(n);
}

PlainUserRun::Hits PlainUserRun::hits_of(const UserEvent& event, int rank) const {
  Hits result;
  for (int n = 0; n < program_.net_count(); ++n) {
    std::vector<bool>& of_net = result.emplace_back(kUserParameters, false);
    if (event.form == PassForm::kFrozenForward && n + 1 == program_.net_count()) continue;
    const unsigned units = event.units[rank][n];
    for (int i = 0; i < kUserParameters; ++i) {
      const auto& p = parameter(rank, n, i);
      of_net[i] = (units & p.units) != 0 && p.tensor.requires_grad();
    }
    if (event.form == PassForm::kFrozenBetween && n == event.net) of_net[event.parameter] = false;
  }
  return result;
}

// --- What the ranks do

void PlainUserRun::run_pass(const UserEvent& event, int rank) {
  const Hits hits = hits_of(event, rank);
  run_user_pass(event, replicas_[rank], rank,
                [&](const at::Tensor& loss, bool retain, bool create) {
                  if (!loss.requires_grad()) return;
                  (loss * program_.loss_scale).backward({}, retain, create);
                });
  const bool has_graph = std::ranges::any_of(hits, is_hit);
  const int times = event.form == PassForm::kTwice && has_graph ? 2 : 1;
  for (int n = 0; n < program_.net_count(); ++n) {
    const bool own = event.driver == n;
    if (!is_zero(n) || (!own && !is_hit(hits[n]))) continue;
    nets_[n].averages = false;
    PromisedGradients& gradients = nets_[n].gradients[rank];
    gradients.drop();
    const bool no_sync = (event.no_sync >> n & 1) != 0;
    for (int time = 0; time < times; ++time) {
      own ? gradients.optimizer_backward(hits[n], no_sync)
          : gradients.loss_backward(hits[n], no_sync);
    }
  }
}

void PlainUserRun::edit_gradients(const UserEvent& event, int rank) {
  at::NoGradGuard no_grad;
  Net& net = nets_[event.net];
  UserModel& model = replicas_[rank][event.net];
  PromisedGradients& gradients = net.gradients[rank];
  const auto reset = [&](int first, int end) {
    net.averages = false;  // of the replicas, which were reset too
    for (int i = first; i < end; ++i) gradients.reset(i);
  };
  switch (event.call) {
    case UserCall::kModuleZeroGrad:
    case UserCall::kBaseZeroGrad:
      if (event.call == UserCall::kModuleZeroGrad || program_.frozen_in_groups) {
        model->frozen.mutable_grad().reset();
      }
      return reset(0, kUserParameters);
    case UserCall::kPartZeroGrad:
      return reset(0, 2);
    case UserCall::kResetGrad:
      return reset(event.parameter, event.parameter + 1);
    case UserCall::kPutGrad:
      return gradients.put(event.parameter, put_gradient(event, *model, program_.loss_scale, rank));
    case UserCall::kNegateGrad:
      if (gradients.refuses_writes(event.parameter)) return;
      return gradients.change(event.parameter, [](at::Tensor& g) { g.neg_(); });
    case UserCall::kClampGrad:
      net.averages = false;  // which it changes unnoticed, and without effect
      for (int i = 0; i < kUserParameters && !gradients.refuses_writes(i); ++i) {
        if (!gradients.is_local(i)) continue;
        gradients.change(i, [](at::Tensor& g) { g.clamp_(-0.25, 0.25); });
      }
      return;
    case UserCall::kModuleZeroValues:
      for (int i = 0; i < kUserParameters; ++i) {
        gradients.change(i, [](at::Tensor& g) { g.zero_(); });
      }
      return;
    default:  // kRestoreGrad leaves things as they were
      return;
  }
}

void PlainUserRun::edit_parameters(const UserEvent& event, int rank) {
  at::NoGradGuard no_grad;
  zero::edit_parameters(program_, event, replicas_[rank], rank);
  Net& net = nets_[event.net];
  const int index = event.parameter;
  switch (event.call) {
    case UserCall::kEditData:
    case UserCall::kEditRaw:
      if (net.masters.empty()) return;
      if (has_own_masters() || net.edits.moved[index]) {
        net.edits.stale[index] = true;
      } else {
        net.masters[index].copy_(parameter(rank, event.net, index).tensor);
      }
      return;
    case UserCall::kEditInPlace:
      net.edits.in_place = true;
      return;
    case UserCall::kSetData:
      net.edits.moved[index] = true;
      if (index == kGain || index == kTwinIndex) net.edits.tied = false;
      return;
    case UserCall::kSetDataShape:
    case UserCall::kRestoreShape:
      net.edits.reshaped = event.call == UserCall::kSetDataShape;
      return;
    case UserCall::kTie:
      net.edits.tied = net.edits.moved[kTwinIndex] = true;
      return;
    case UserCall::kUntie:
      net.edits.tied = false;
      return;
    case UserCall::kDropFrozenGrad:
      for (int n = 0; n < program_.net_count(); ++n) {
        if (!is_zero(n)) nets_[n].unknown = false;
      }
      return;
    case UserCall::kForeignStep:
      net.foreign[rank]->step();
      net.foreign[rank]->zero_grad();
      return;
    default:
      return;
  }
}

at::Tensor PlainUserRun::mean_of(int n, int index) const {
  at::Tensor sum;
  for (int rank = 0; rank < program_.world_size; ++rank) {
    const at::Tensor& g = parameter(rank, n, index).tensor.grad();
    if (!g.defined()) continue;
    const at::Tensor exact = g.detach().to(at::kDouble) / program_.loss_scale;
    sum = sum.defined() ? sum + exact : exact;
  }
  return sum.defined() ? sum / program_.world_size : sum;
}

double PlainUserRun::norm(int n, double type) const {
  std::vector<at::Tensor> flat = {at::zeros({1}, at::kDouble)};
  for (int i = 0; i < kUserParameters; ++i) {
    const at::Tensor g = mean_of(n, i);
    if (g.defined()) flat.push_back(g.reshape({-1}));
  }
  return at::norm(at::cat(flat), type).item<double>();
}

double PlainUserRun::coefficient(int n) const {
  double result = 1.0;
  for (const UserEvent& clip : nets_[n].clips) {
    result *= std::min(1.0, clip.max_norm / (norm(n, clip.norm_type) * result + 1e-6));
  }
  return result;
}

void PlainUserRun::complete(int n, bool gathers) {
  Net& net = nets_[n];
  int64_t rounds = 0;
  std::array<bool, kUserParameters> used{};
  for (PromisedGradients& gradients : net.gradients) {
    gradients.drop();
    rounds = std::max(rounds, gradients.rounds_when_complete());
    for (int i = 0; i < kUserParameters; ++i) used[i] = used[i] || gradients.has_or_sent(i);
  }
  const int64_t dropped = net.most_dropped();
  for (PromisedGradients& gradients : net.gradients) gradients.complete(rounds, dropped);
  const bool full = program_.options.stage() == 1;
  if (!gathers || !full || rounds <= std::max(net.gathered, dropped)) return;
  net.gathered = rounds;
  net.averages = true;
  for (PromisedGradients& gradients : net.gradients) {
    for (int i = 0; i < kUserParameters; ++i) {
      if (used[i]) gradients.average(i);
    }
  }
}

void PlainUserRun::clear_gradients(int n) {
  Net& net = nets_[n];
  for (PromisedGradients& gradients : net.gradients) gradients.clear();
  net.clips.clear();
  net.gathered = 0;
  net.averages = false;
}

void PlainUserRun::step(const UserEvent& event, const std::vector<UserOutcome>& outcomes) {
  Net& net = nets_[event.net];
  std::array<bool, kUserParameters> used{};
  const double sum = norm(event.net, 1.0), factor = coefficient(event.net);
  for (int i = 0; i < kUserParameters; ++i) {
    const at::Tensor g = mean_of(event.net, i);
    used[i] = g.defined();
    net.masters[i].mutable_grad() = g.defined() ? g * factor : at::Tensor();
  }
  const bool any = std::find(used.begin(), used.end(), true) != used.end();
  const bool skipped = !std::isfinite(sum);
  for (const UserOutcome& outcome : outcomes) {
    if (!any) break;
    TORCH_CHECK(outcome.value.item<bool>() == skipped, "step_skipped(): expected ", skipped,
                ", got ", !skipped);
  }
  // A pass that gave no gradient has sent a round of zeros: parameters are written all the same.
  if (net.gradients[0].rounds() > net.most_dropped() && !skipped) {
    net.optimizer->step();
    // Where a bucket's rows are parameters, a fused step writes those that it changes.
    const bool writes_all =
        program_.options.layout() == Layout::kPerParameter || !program_.options.fused();
    for (int i = 0; i < kUserParameters; ++i) {
      if (net.edits.stale[i] && !used[i] && !writes_all) continue;
      net.edits.stale[i] = false;
      for (int rank = 0; rank < program_.world_size; ++rank) {
        parameter(rank, event.net, i).tensor.data().copy_(net.masters[i]);
      }
    }
  }
  clear_gradients(event.net);
}

void PlainUserRun::edit_all(const UserEvent& event) {
  at::NoGradGuard no_grad;
  nets_[event.net].edits.in_place = true;
  for (int rank = 0; rank < program_.world_size; ++rank) {
    edit_all_parameters(event, *replicas_[rank][event.net], rank);
  }
}

void PlainUserRun::refresh_masters(const UserEvent& event) {
  Net& net = nets_[event.net];
  if (program_.dtype != at::kFloat) edit_all(event);
  for (int i = 0; i < kUserParameters; ++i) {
    const at::Tensor& first = parameter(0, event.net, i).tensor;
    for (int rank = 1; rank < program_.world_size; ++rank) {
      parameter(rank, event.net, i).tensor.copy_(first);
    }
    net.masters[i].copy_(first);
  }
  for (int n = 0; n < program_.net_count(); ++n) {
    if (n != event.net && program_.nets != Nets::kParts) continue;
    for (auto& of_rank : replicas_) of_rank[n]->frozen.data().copy_(replicas_[0][n]->frozen);
  }
  net.edits.refresh();
}

void PlainUserRun::collective(const UserEvent& event, const std::vector<UserOutcome>& outcomes) {
  at::NoGradGuard no_grad;
  Net& net = nets_[event.net];
  if (event.call == UserCall::kZeroGrad) {
    net.broken = net.unknown = false;
    clear_gradients(event.net);
    return;
  }
  complete(event.net, kind_of(event.call) == UserCallKind::kGathersAverages);
  switch (event.call) {
    case UserCall::kNorm:
    case UserCall::kClip: {
      const double expected = norm(event.net, event.norm_type) * coefficient(event.net);
      if (net.unknown) break;
      for (const UserOutcome& outcome : outcomes) {
        expect_close(outcome.value, at::full({}, expected, at::kDouble), "norm", kTolerance);
      }
      if (event.call == UserCall::kClip) net.clips.push_back(event);
      break;
    }
    case UserCall::kGradient:
    case UserCall::kMaster: {
      if (net.unknown) break;
      const bool master = event.call == UserCall::kMaster;
      const at::Tensor expected =
          master ? net.masters[event.parameter] : mean_of(event.net, event.parameter);
      for (const UserOutcome& outcome : outcomes) {
        expect_close(outcome.value, expected, master ? "master()" : "gradient()", kTolerance);
      }
      break;
    }
    case UserCall::kRefreshMasters:
      refresh_masters(event);
      break;
    case UserCall::kRefreshWorking:
      for (int i = 0; i < kUserParameters; ++i) {
        for (int rank = 0; rank < program_.world_size; ++rank) {
          parameter(rank, event.net, i).tensor.copy_(net.masters[i]);
        }
      }
      net.edits.refresh();
      break;
    case UserCall::kStep:
    case UserCall::kClosureStep:
      step(event, outcomes);
      break;
    default:
      break;
  }
}

// --- After a call

void PlainUserRun::follow(const std::vector<UserOutcome>& outcomes) {
  check_outcomes(outcomes);
  const UserEvent event = task_.event;
  const bool refused = std::ranges::any_of(
      outcomes, [](const UserOutcome& outcome) { return !outcome.error.empty(); });
  if (is_collective(event.call)) {
    for (int rank = 0; rank < program_.world_size; ++rank) {
      if (event.call == UserCall::kClosureStep) run_pass(event, rank);
    }
    nets_[event.net].refused = refused;
    refused ? follow_refusal(event) : collective(event, outcomes);
    return choose();
  }
  for (int rank = 0; rank < program_.world_size; ++rank) {
    if (task_.by_rank[rank] == Expectation::kNotCalled) continue;
    if (event.call == UserCall::kPass) {
      if (outcomes[rank].error.empty()) run_pass(event, rank);
    } else if (kind_of(event.call) == UserCallKind::kEditsGradients) {
      edit_gradients(event, rank);
    } else {
      edit_parameters(event, rank);
    }
  }
  if (event.call == UserCall::kSetDataShape) {
    UserEvent restore = event, look = event;
    restore.call = UserCall::kRestoreShape;
    look.call = UserCall::kNorm;
    queue_.insert(queue_.begin(), {look, restore});
  }
  if (event.call == UserCall::kPass && refused) remedy_pass(event);
  choose();
}

void PlainUserRun::check_outcomes(const std::vector<UserOutcome>& outcomes) const {
  bool refused = false, worked = false;
  for (int rank = 0; rank < program_.world_size; ++rank) {
    const Expectation e = task_.by_rank[rank];
    if (e == Expectation::kNotCalled) continue;
    const std::string& error = outcomes[rank].error;
    (error.empty() ? worked : refused) = true;
    TORCH_CHECK(error.empty() || e != Expectation::kWorks, "rank ", rank,
                ": expected it to work, got: ", error);
    TORCH_CHECK(!error.empty() || e != Expectation::kRefused, "rank ", rank,
                ": expected it to be refused, got no error");
    TORCH_CHECK(error.empty() || error.find("xpected") != std::string::npos ||
                    error.find("unsupported operation") != std::string::npos ||
                    error.find("modified by an inplace operation") != std::string::npos,
                "rank ", rank, ": expected an error that says what was expected, got: ", error);
  }
  TORCH_CHECK(!is_collective(task_.event.call) || !refused || !worked,
              "expected an error on all ranks or on none");
}

void PlainUserRun::follow_refusal(const UserEvent& event) {
  Net& net = nets_[event.net];
  for (PromisedGradients& gradients : net.gradients) {
    if (!net.broken) gradients.drop();
  }
  if (event.call == UserCall::kCheckReplicas && !is_refused_for_gradients(event.net) &&
      !net.is_ambiguous() && !net.edits.tied) {
    // It was agreed on, and what differs was found after that.
    complete(event.net, /*gathers=*/false);
    net.refused = false;
  }
  if (event.call == UserCall::kRefreshMasters && program_.dtype != at::kFloat) edit_all(event);
  remedy(event);
}

// Which of the nets have gradients of a part of the pass is not known.
void PlainUserRun::remedy_pass(const UserEvent& event) {
  std::vector<UserEvent> todo;
  if (event.driver >= 0) nets_[event.driver].broken = true;
  for (int n = 0; n < program_.net_count(); ++n) {
    nets_[n].unknown = true;
    nets_[n].refused = false;
    if (!is_zero(n)) continue;
    todo.push_back(on_all_ranks(event, UserCall::kNorm, n));
    todo.push_back(on_all_ranks(event, UserCall::kZeroGrad, n));
    todo.back().retried = true;
  }
  todo.push_back(on_all_ranks(event, UserCall::kDropFrozenGrad, 0));
  queue_.insert(queue_.begin(), todo.begin(), todo.end());
}

void PlainUserRun::remedy(const UserEvent& event) {
  const int n = event.net;
  const Net& net = nets_[n];
  // zero_grad(), or the shape that was before, is next.
  if ((event.call == UserCall::kNorm && net.unknown) || net.edits.reshaped) return;
  std::vector<UserEvent> todo;
  const auto add_if = [&](bool needed, UserCall call) {
    if (needed) todo.push_back(on_all_ranks(event, call, n));
  };
  const bool checks_replicas = event.call == UserCall::kCheckReplicas;
  const bool gradients = is_refused_for_gradients(n) || net.is_ambiguous();
  add_if(gradients, UserCall::kZeroGrad);
  add_if(has_frozen(n), UserCall::kThaw);
  add_if(has_thawed_gradient(n), UserCall::kDropFrozenGrad);
  add_if(net.edits.tied, UserCall::kUntie);
  add_if(net.edits.in_place || net.edits.is_moved() || (net.edits.is_stale() && checks_replicas),
         UserCall::kRefreshMasters);
  TORCH_CHECK(!event.retried, "expected the call to work after its remedy");
  if (!gradients && !checks_replicas && event.call != UserCall::kRefreshMasters) {
    todo.push_back(event);
    todo.back().retried = true;
  }
  queue_.insert(queue_.begin(), todo.begin(), todo.end());
}

void PlainUserRun::compare(int rank, const std::vector<UserModel>& models) const {
  for (int n = 0; n < program_.net_count(); ++n) {
    const Net& net = nets_[n];
    const std::string prefix = "rank " + std::to_string(rank) + ": net " + std::to_string(n) + " ";
    for (int i = 0; i < kUserParameters && !net.edits.reshaped; ++i) {
      const auto& own = models[n]->managed()[i];
      const auto& plain = parameter(rank, n, i);
      // A master beside the middle of two 16-bit numbers may round to either.
      const bool rounded = is_zero(n) && at::equal(plain.tensor, net.masters[i].to(program_.dtype));
      const at::Tensor& expected = rounded ? net.masters[i] : plain.tensor;
      if (!net.edits.stale[i]) expect_close(own.tensor, expected, prefix + own.name, kTolerance);
      const std::string what = prefix + own.name + ".grad()";
      const at::Tensor& grad = own.tensor.grad();
      if (!is_zero(n)) {
        if (!net.unknown) expect_close(grad, plain.tensor.grad(), what, kTolerance);
        continue;
      }
      const Slot& slot = net.gradients[rank].slot(i);
      if (net.unknown || net.is_ambiguous() || slot.altered) continue;
      if (slot.holds != Holds::kNothing && !slot.present) {
        TORCH_CHECK(!grad.defined(), what, ": expected none, got one");
      } else if (slot.holds == Holds::kMarker) {
        TORCH_CHECK(grad.defined() && grad.isnan().all().item<bool>(), what, ": expected NaN, got ",
                    grad);
      } else if (slot.holds == Holds::kAverage) {
        if (net.averages) expect_close(grad, mean_of(n, i), what, kTolerance);
      } else if (!slot.sent) {
        expect_close(grad, plain.tensor.grad(), what, kTolerance);
      }
    }
    expect_close(models[n]->frozen, replicas_[rank][n]->frozen, prefix + "frozen", kTolerance);
  }
}

}  // namespace zero
