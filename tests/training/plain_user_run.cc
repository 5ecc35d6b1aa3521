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

bool is_collective(UserCall call) {
  switch (call) {
    case UserCall::kZeroGrad:
    case UserCall::kReduce:
    case UserCall::kNorm:
    case UserCall::kClip:
    case UserCall::kGradient:
    case UserCall::kMaster:
    case UserCall::kCheckReplicas:
    case UserCall::kRefreshMasters:
    case UserCall::kRefreshWorking:
    case UserCall::kStep:
    case UserCall::kClosureStep:
      return true;
    default:
      return false;
  }
}

bool gathers_averages(UserCall call) {
  return call == UserCall::kReduce || call == UserCall::kNorm || call == UserCall::kClip ||
         call == UserCall::kGradient || call == UserCall::kStep;
}

bool checks_parameters(UserCall call) {
  return gathers_averages(call) || call == UserCall::kMaster;
}

}  // namespace

bool PlainUserRun::Net::is_moved() const {
  return std::find(moved.begin(), moved.end(), true) != moved.end();
}

PlainUserRun::PlainUserRun(const UserProgram& program) : p_(program) {
  for (int rank = 0; rank < p_.world_size; ++rank) {
    std::vector<UserModel>& of_rank = replicas_.emplace_back();
    for (int net = 0; net < p_.net_count(); ++net) {
      const int from = p_.is_foreign(net) ? rank : 0;
      of_rank.emplace_back(p_.dtype, p_.seed + static_cast<uint64_t>(1000 * from + 100 * net));
    }
  }
  for (int n = 0; n < p_.net_count(); ++n) {
    Net& net = nets_.emplace_back();
    net.ranks.resize(p_.world_size);
    for (int rank = 0; rank < p_.world_size && p_.is_foreign(n); ++rank) {
      net.foreign.push_back(std::make_unique<torch::optim::SGD>(replicas_[rank][n]->parameters(),
                                                                torch::optim::SGDOptions(0.125)));
    }
    if (p_.is_foreign(n)) continue;
    for (const auto& p : replicas_[0][n]->managed()) {
      net.masters.push_back(p.tensor.detach().to(at::kDouble).requires_grad_());
    }
    net.optimizer = make_optimizer(p_.inner, net.masters);
  }
  queue_.assign(p_.events.begin(), p_.events.end());
  choose();
}

bool PlainUserRun::has_own_masters() const {
  return p_.dtype != at::kFloat || p_.options.layout() == Layout::kPerParameter;
}

void PlainUserRun::choose() {
  while (!queue_.empty()) {
    const UserEvent event = queue_.front();
    queue_.pop_front();
    task_ = {event, std::vector<Expectation>(p_.world_size, Expectation::kNotCalled)};
    if (!plan(event)) continue;
    const auto& all = task_.by_rank;
    const auto called = [](Expectation e) { return e != Expectation::kNotCalled; };
    if (std::none_of(all.begin(), all.end(), called)) continue;
    log_ += "  " + describe(event, p_.world_size) + " [";
    for (const Expectation e : all) log_ += "-wr?"[static_cast<size_t>(e)];
    log_ += "]\n";
    return;
  }
  over_ = true;
}

// --- What is promised

bool PlainUserRun::plan(const UserEvent& event) {
  Net& net = nets_[event.net];
  if (is_collective(event.call) && event.call != UserCall::kClosureStep) {
    return plan_collective(event);
  }
  const bool dirty = net.edited || net.is_moved() || net.tied || net.reshaped;
  for (int rank = 0; rank < p_.world_size; ++rank) {
    Expectation& e = task_.by_rank[rank];
    if (!does(event, rank)) continue;
    e = Expectation::kWorks;
    switch (event.call) {
      case UserCall::kPass:
        e = expect_pass(event, rank);
        break;
      case UserCall::kPartZeroGrad:
      case UserCall::kResetGrad:
        if (is_ambiguous(event.net)) e = Expectation::kNotCalled;
        break;
      case UserCall::kModuleZeroValues:
      case UserCall::kNegateGrad:
      case UserCall::kClampGrad:
      case UserCall::kPutGrad:
      case UserCall::kRestoreGrad:
        e = expect_gradient_edit(event, rank);
        break;
      case UserCall::kSetData:
        // One of no elements has no memory that could be another.
        if (event.parameter == kEmpty) e = Expectation::kNotCalled;
        break;
      case UserCall::kSetDataShape:
      case UserCall::kTie:
        if (dirty || net.broken) e = Expectation::kNotCalled;
        break;
      case UserCall::kForeignStep:
        if (net.foreign.empty()) e = Expectation::kNotCalled;
        break;
      case UserCall::kClosureStep: {
        e = expect_pass(event, rank);
        const bool calm = !dirty && !has_frozen(event.net) && !has_thawed_gradient(event.net) &&
                          !is_refused_for_gradients(event.net);
        // The frozen parameter may have been thawed.
        for (const unsigned units : event.units[rank]) {
          if ((units & UserModelImpl::kDirect) != 0) return false;
        }
        if (!calm) return false;
        if (e != Expectation::kWorks) return false;
        break;
      }
      default:
        break;
    }
  }
  return true;
}

bool PlainUserRun::plan_collective(const UserEvent& event) {
  Net& net = nets_[event.net];
  const auto all = [&](Expectation e) {
    task_.by_rank.assign(p_.world_size, e);
    return true;
  };
  const auto before = [&](UserCall call) {
    UserEvent first = event;
    first.call = call;
    first.norm_type = 2.0;
    queue_.push_front(event);
    queue_.push_front(first);
    return false;
  };
  if (event.call == UserCall::kZeroGrad) {
    // It is collective where there are gradients: on all ranks alike after another call.
    if (event.retried) return all(Expectation::kWorks);
    if (net.broken && !net.refused) return before(UserCall::kNorm);
    int with = 0;
    for (int rank = 0; rank < p_.world_size; ++rank) with += needs(event.net, rank) ? 1 : 0;
    if (!net.refused && (net.unknown || (with != 0 && with != p_.world_size))) {
      return before(UserCall::kNorm);
    }
    return all(Expectation::kWorks);
  }
  if (event.call == UserCall::kClip) {
    bool any = false;
    for (int i = 0; i < kUserParameters; ++i) any = any || mean_of(event.net, i).defined();
    if (!any) return false;
  }
  if (event.call == UserCall::kRefreshWorking && !has_own_masters() && net.edited) return false;
  if (is_ambiguous(event.net) && !net.broken) {
    for (int rank = 0; rank < p_.world_size; ++rank) {
      if (is_dropped(event.net, rank) || net.ranks[rank].dropped > 0) {
        return all(Expectation::kEither);
      }
    }
  }
  if (is_refused_for_gradients(event.net)) return all(Expectation::kRefused);
  if (net.unknown) return all(Expectation::kEither);
  if (checks_parameters(event.call)) {
    return all(is_refused_for_parameters(event.net) ? Expectation::kRefused : Expectation::kWorks);
  }
  if (net.tied || net.reshaped) return all(Expectation::kRefused);
  if (event.call == UserCall::kCheckReplicas) {
    const bool stale = std::find(net.stale.begin(), net.stale.end(), true) != net.stale.end();
    if (stale || net.edited || net.is_moved()) return all(Expectation::kEither);
  }
  return all(Expectation::kWorks);
}

Expectation PlainUserRun::expect_pass(const UserEvent& event, int rank) const {
  const auto hits = touched(event, rank);
  bool any = false, either = event.form == PassForm::kUnwaited;
  for (int n = 0; n < p_.net_count(); ++n) {
    const bool here = std::find(hits[n].begin(), hits[n].end(), true) != hits[n].end();
    any = any || here;
    if (!is_zero(n)) continue;
    const Net& net = nets_[n];
    const bool own = event.driver == n;
    if (!here && !own) continue;
    if (net.broken || net.unknown || net.reshaped) return Expectation::kNotCalled;
    if (!net.clips.empty()) return Expectation::kRefused;
    if (own && is_partial(n, rank)) return Expectation::kRefused;
    if (here && is_partial(n, rank)) either = true;
    const bool no_sync = (event.no_sync >> n & 1) != 0;
    for (int i = 0; i < kUserParameters; ++i) {
      const Slot& slot = net.ranks[rank].slots[i];
      if (!slot.altered) continue;
      if (hits[n][i]) return Expectation::kRefused;
      // A round that closes sends what is left of a gradient.
      if ((slot.holds != Holds::kGradient && !slot.kept_apart) || no_sync) continue;
      if (own) return Expectation::kRefused;
      either = true;
    }
  }
  if (!any && event.driver < 0) return Expectation::kNotCalled;
  return either ? Expectation::kEither : Expectation::kWorks;
}

// Torch itself refuses to write where all elements share one memory.
Expectation PlainUserRun::expect_gradient_edit(const UserEvent& event, int rank) const {
  if (!is_zero(event.net)) return Expectation::kNotCalled;
  const Net& net = nets_[event.net];
  if (net.unknown || is_ambiguous(event.net)) return Expectation::kNotCalled;
  const auto refuses = [&](int index) {
    const Slot& slot = net.ranks[rank].slots[index];
    return slot.holds == Holds::kMarker && slot.present && !slot.altered &&
           parameter(rank, event.net, index).tensor.numel() > 1;
  };
  const Slot& slot = net.ranks[rank].slots[event.parameter];
  const bool none = slot.holds == Holds::kNothing || !slot.present
                        ? !parameter(rank, event.net, event.parameter).tensor.grad().defined()
                        : false;
  switch (event.call) {
    case UserCall::kNegateGrad:
      if (none || slot.altered) return Expectation::kNotCalled;
      return refuses(event.parameter) ? Expectation::kRefused : Expectation::kWorks;
    case UserCall::kRestoreGrad:
      return none ? Expectation::kNotCalled : Expectation::kWorks;
    case UserCall::kClampGrad:
      // It changes what data() gives, so that a later part of a gradient is changed unnoticed.
      for (const Slot& s : net.ranks[rank].slots) {
        if (s.altered || (s.holds == Holds::kGradient && s.sent)) return Expectation::kNotCalled;
      }
      for (int i = 0; i < kUserParameters; ++i) {
        if (refuses(i)) return Expectation::kRefused;
      }
      return Expectation::kWorks;
    default:
      return Expectation::kWorks;
  }
}

bool PlainUserRun::is_refused_for_gradients(int n) const {
  const Net& net = nets_[n];
  if (net.broken) return true;
  for (int rank = 0; rank < p_.world_size; ++rank) {
    if (is_partial(n, rank)) return true;
    for (const Slot& slot : net.ranks[rank].slots) {
      if (slot.altered) return true;
    }
    if (rounds_dropped(n, rank) != rounds_dropped(n, 0)) return true;
  }
  return false;
}

bool PlainUserRun::has_thawed_gradient(int n) const {
  for (int rank = 0; rank < p_.world_size; ++rank) {
    for (int other = 0; other < p_.net_count(); ++other) {
      if (other != n && p_.nets != Nets::kParts) continue;
      const at::Tensor& frozen = replicas_[rank][other]->frozen;
      if (frozen.requires_grad() && frozen.grad().defined()) return true;
    }
  }
  return false;
}

bool PlainUserRun::has_frozen(int n) const {
  for (int rank = 0; rank < p_.world_size; ++rank) {
    for (const auto& p : replicas_[rank][n]->managed()) {
      if (!p.tensor.requires_grad()) return true;
    }
  }
  return false;
}

bool PlainUserRun::is_refused_for_parameters(int n) const {
  const Net& net = nets_[n];
  return net.edited || net.is_moved() || net.tied || net.reshaped || has_frozen(n) ||
         has_thawed_gradient(n);
}

// --- The gradients of a rank

std::vector<std::vector<bool>> PlainUserRun::touched(const UserEvent& event, int rank) const {
  std::vector<std::vector<bool>> result;
  for (int n = 0; n < p_.net_count(); ++n) {
    std::vector<bool>& of_net = result.emplace_back(kUserParameters, false);
    if (event.form == PassForm::kFrozenForward && n + 1 == p_.net_count()) continue;
    const unsigned units = event.units[rank][n];
    for (int i = 0; i < kUserParameters; ++i) {
      const auto& p = parameter(rank, n, i);
      of_net[i] = (units & p.units) != 0 && p.tensor.requires_grad();
    }
    if (event.form == PassForm::kFrozenBetween && n == event.net) of_net[event.parameter] = false;
  }
  return result;
}

bool PlainUserRun::is_dropped(int n, int rank) const {
  bool any = false;
  for (const Slot& slot : nets_[n].ranks[rank].slots) {
    if (slot.sent && slot.holds != Holds::kNothing) {
      if (slot.present) return false;
      any = true;
    }
  }
  return any;
}

bool PlainUserRun::is_partial(int n, int rank) const {
  bool reset = false, left = false;
  for (const Slot& slot : nets_[n].ranks[rank].slots) {
    if (slot.sent && slot.holds != Holds::kNothing) (slot.present ? left : reset) = true;
  }
  return reset && left;
}

bool PlainUserRun::has(int n, int rank, int index) const {
  const Slot& slot = nets_[n].ranks[rank].slots[index];
  if (slot.holds == Holds::kNothing) return parameter(rank, n, index).tensor.grad().defined();
  return slot.present && (slot.kept_apart || slot.holds == Holds::kGradient);
}

bool PlainUserRun::is_open(int n, int rank) const {
  const auto& slots = nets_[n].ranks[rank].slots;
  return std::any_of(slots.begin(), slots.end(), [](const Slot& s) { return s.packed; });
}

bool PlainUserRun::is_ambiguous(int n) const {
  const auto& ranks = nets_[n].ranks;
  return std::any_of(ranks.begin(), ranks.end(), [](const OfRank& r) { return r.ambiguous; });
}

bool PlainUserRun::needs(int n, int rank) const {
  const OfRank& state = nets_[n].ranks[rank];
  bool any = state.rounds > 0 || state.used || is_open(n, rank) || !nets_[n].clips.empty();
  for (int i = 0; i < kUserParameters; ++i) any = any || has(n, rank, i);
  return any;
}

int64_t PlainUserRun::rounds_dropped(int n, int rank) const {
  const OfRank& state = nets_[n].ranks[rank];
  return is_dropped(n, rank) ? state.rounds + (is_open(n, rank) ? 1 : 0) : state.dropped;
}

void PlainUserRun::drop(int n, int rank) {
  OfRank& state = nets_[n].ranks[rank];
  if (is_partial(n, rank)) return;
  if (is_dropped(n, rank)) {
    state.dropped = rounds_dropped(n, rank);
    state.rounds = state.dropped;
    for (Slot& slot : state.slots) slot.sent = slot.packed = false;
  }
  state.used = false;
  for (int i = 0; i < kUserParameters; ++i) {
    Slot& slot = state.slots[i];
    if (slot.holds != Holds::kNothing && !slot.present) slot = {.packed = slot.packed};
    state.used = state.used || slot.sent || has(n, rank, i);
  }
}

void PlainUserRun::close_round(int n, int rank) {
  OfRank& state = nets_[n].ranks[rank];
  for (int i = 0; i < kUserParameters; ++i) {
    Slot& slot = state.slots[i];
    // The second of a parameter in one round is sent in the next.
    if (has(n, rank, i) && !slot.packed) slot = {Holds::kMarker, true, false, true};
    slot.packed = false;
  }
  ++state.rounds;
}

void PlainUserRun::reset_grad(int n, int rank, int index) {
  parameter(rank, n, index).tensor.mutable_grad().reset();
  if (!is_zero(n)) return;
  nets_[n].averages = false;  // of the replicas, which were reset too
  Slot& slot = nets_[n].ranks[rank].slots[index];
  if (slot.holds == Holds::kNothing) return;
  slot.altered = false;
  slot.present = false;
  if (slot.holds == Holds::kGradient && !slot.sent) slot = {.packed = slot.packed};
}

// --- What the ranks do

void PlainUserRun::run_pass(const UserEvent& event, int rank) {
  const auto hits = touched(event, rank);
  run_user_pass(event, replicas_[rank], rank,
                [&](const at::Tensor& loss, bool retain, bool create) {
                  if (!loss.requires_grad()) return;
                  (loss * p_.loss_scale).backward({}, retain, create);
                });
  const bool kept_apart = p_.options.no_sync_fp32() && p_.dtype != at::kFloat;
  const int times = event.form == PassForm::kTwice ? 2 : 1;
  for (int n = 0; n < p_.net_count(); ++n) {
    if (!is_zero(n)) continue;
    const bool no_sync = (event.no_sync >> n & 1) != 0;
    const bool own = event.driver == n;
    const bool here = std::find(hits[n].begin(), hits[n].end(), true) != hits[n].end();
    if (!own && !here) continue;
    OfRank& state = nets_[n].ranks[rank];
    nets_[n].averages = false;
    drop(n, rank);
    const bool has_graph = [&] {
      for (const auto& of_net : hits) {
        if (std::find(of_net.begin(), of_net.end(), true) != of_net.end()) return true;
      }
      return false;
    }();
    for (int time = 0; time < (own && !has_graph ? 1 : times); ++time) {
      if (own && !no_sync && is_open(n, rank)) close_round(n, rank);
      const bool again = std::any_of(state.slots.begin(), state.slots.end(), [&](const Slot& s) {
        return s.packed && hits[n][&s - state.slots.data()];
      });
      if (!own && !no_sync && again) {
        for (int i = 0; i < kUserParameters; ++i) {
          state.ambiguous = state.ambiguous || (hits[n][i] && !state.slots[i].packed);
        }
        close_round(n, rank);
      }
      for (int i = 0; i < kUserParameters; ++i) {
        if (!hits[n][i]) continue;
        Slot& slot = state.slots[i];
        state.used = true;
        slot.present = true;
        if (no_sync) {
          slot.holds = kept_apart ? Holds::kMarker : Holds::kGradient;
          slot.kept_apart = kept_apart;
        } else {
          slot = {Holds::kMarker, true, false, true, false, true};
        }
      }
      if (own && !no_sync) close_round(n, rank);
    }
  }
}

void PlainUserRun::user_edit(const UserEvent& event, int rank) {
  at::NoGradGuard no_grad;
  Net& net = nets_[event.net];
  UserModel& model = replicas_[rank][event.net];
  const at::Tensor p = model->managed()[event.parameter].tensor;
  Slot& slot = net.ranks[rank].slots[event.parameter];
  const auto changes = [](const Slot& s) {
    return s.holds == Holds::kMarker || s.holds == Holds::kAverage || s.sent;
  };
  const auto change_grad = [&](int index, const std::function<void(at::Tensor&)>& change) {
    Slot& s = net.ranks[rank].slots[index];
    at::Tensor& grad = parameter(rank, event.net, index).tensor.mutable_grad();
    if (s.holds == Holds::kNothing || (s.holds == Holds::kGradient && !s.sent)) {
      if (grad.defined()) change(grad);
    } else if (s.present) {
      s.altered = true;
    }
  };
  const auto stops_at = [&](int index) {
    const Slot& s = net.ranks[rank].slots[index];
    return s.holds == Holds::kMarker && s.present && !s.altered &&
           parameter(rank, event.net, index).tensor.numel() > 1;
  };
  switch (event.call) {
    case UserCall::kModuleZeroGrad:
    case UserCall::kBaseZeroGrad:
      if (event.call == UserCall::kModuleZeroGrad || p_.frozen_in_groups) {
        model->frozen.mutable_grad().reset();
      }
      for (int i = 0; i < kUserParameters; ++i) reset_grad(event.net, rank, i);
      break;
    case UserCall::kPartZeroGrad:
      reset_grad(event.net, rank, 0);
      reset_grad(event.net, rank, 1);
      break;
    case UserCall::kResetGrad:
      reset_grad(event.net, rank, event.parameter);
      break;
    case UserCall::kPutGrad:
      if (slot.holds == Holds::kNothing || !changes(slot)) {
        p.mutable_grad() = put_gradient(event, *model, p_.loss_scale, rank);
      } else {
        slot.present = slot.altered = true;
      }
      break;
    case UserCall::kNegateGrad:
      if (!stops_at(event.parameter)) {
        change_grad(event.parameter, [](at::Tensor& g) { g.neg_(); });
      }
      break;
    case UserCall::kClampGrad:
      net.averages = false;  // which it changes unnoticed, and without effect
      for (int i = 0; i < kUserParameters && !stops_at(i); ++i) {
        const Slot& s = net.ranks[rank].slots[i];
        at::Tensor& grad = parameter(rank, event.net, i).tensor.mutable_grad();
        const bool own = s.holds == Holds::kNothing || s.holds == Holds::kGradient;
        if (own && grad.defined()) grad.clamp_(-0.25, 0.25);
      }
      break;
    case UserCall::kModuleZeroValues:
      for (int i = 0; i < kUserParameters; ++i) {
        change_grad(i, [](at::Tensor& g) { g.zero_(); });
      }
      break;
    case UserCall::kEditData:
    case UserCall::kEditRaw: {
      const at::Tensor value = edited_value(event, *model, event.parameter, 0);
      p.copy_(value);
      const bool is_master = !has_own_masters() && !net.moved[event.parameter];
      if (net.masters.empty()) break;
      if (is_master) {
        net.masters[event.parameter].copy_(value);
      } else {
        net.stale[event.parameter] = true;
      }
      break;
    }
    case UserCall::kEditInPlace:
      p.copy_(edited_value(event, *model, event.parameter, rank));
      net.edited = true;
      break;
    case UserCall::kSetData:
      p.set_data(edited_value(event, *model, event.parameter, rank).clone());
      net.moved[event.parameter] = true;
      if (event.parameter == kGain || event.parameter == kTwinIndex) net.tied = false;
      break;
    case UserCall::kSetDataShape:
      net.reshaped = true;
      break;
    case UserCall::kRestoreShape:
      net.reshaped = false;
      break;
    case UserCall::kTie:
      model->twin.set_data(model->gain.data());
      net.tied = net.moved[kTwinIndex] = true;
      break;
    case UserCall::kUntie:
      model->twin.set_data(model->twin.data().clone());
      net.tied = false;
      break;
    case UserCall::kEditFrozen:
      model->frozen.data().copy_(grid({4}, event.seed + static_cast<uint64_t>(rank), 8, 8));
      break;
    case UserCall::kFreeze:
      p.requires_grad_(false);
      break;
    case UserCall::kThaw:
      for (const auto& each : model->managed()) each.tensor.requires_grad_(true);
      break;
    case UserCall::kThawFrozen:
      model->frozen.requires_grad_(true);
      break;
    case UserCall::kDropFrozenGrad:
      for (int n = 0; n < p_.net_count(); ++n) {
        UserModel& each = replicas_[rank][n];
        if (!is_zero(n)) each->zero_grad();
        if (!is_zero(n)) nets_[n].unknown = false;
        each->frozen.mutable_grad().reset();
        each->frozen.requires_grad_(false);
      }
      break;
    case UserCall::kForeignStep:
      net.foreign[rank]->step();
      net.foreign[rank]->zero_grad();
      break;
    default:  // kRestoreGrad and kSetDataBack leave things as they were
      break;
  }
}

at::Tensor PlainUserRun::mean_of(int n, int index) const {
  at::Tensor sum;
  for (int rank = 0; rank < p_.world_size; ++rank) {
    const at::Tensor& g = parameter(rank, n, index).tensor.grad();
    if (!g.defined()) continue;
    const at::Tensor exact = g.detach().to(at::kDouble) / p_.loss_scale;
    sum = sum.defined() ? sum + exact : exact;
  }
  return sum.defined() ? sum / p_.world_size : sum;
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
  int64_t rounds = 0, dropped = 0;
  std::array<bool, kUserParameters> used{};
  for (int rank = 0; rank < p_.world_size; ++rank) {
    drop(n, rank);
    OfRank& state = net.ranks[rank];
    bool open = is_open(n, rank), late = false;
    for (int i = 0; i < kUserParameters; ++i) {
      if (has(n, rank, i)) (state.slots[i].packed ? late : open) = true;
      used[i] = used[i] || state.slots[i].sent || has(n, rank, i);
    }
    rounds = std::max(rounds, state.rounds + (open ? 1 : 0) + (late ? 1 : 0));
    dropped = std::max(dropped, state.dropped);
  }
  for (int rank = 0; rank < p_.world_size; ++rank) {
    OfRank& state = net.ranks[rank];
    for (int i = 0; i < kUserParameters; ++i) {
      if (has(n, rank, i)) {
        state.slots[i] = {Holds::kMarker, true, false, true};
        state.used = true;
      }
      state.slots[i].packed = false;
    }
    state.rounds = rounds;
    // The call worked, so ranks have dropped the same number, also where it was ambiguous here.
    state.dropped = dropped;
    state.ambiguous = false;
  }
  const bool full = p_.options.stage() == 1;
  if (!gathers || !full || rounds <= std::max(net.gathered, dropped)) return;
  net.gathered = rounds;
  net.averages = true;
  for (OfRank& state : net.ranks) {
    for (int i = 0; i < kUserParameters; ++i) {
      if (used[i]) state.slots[i] = {Holds::kAverage, true, false, state.slots[i].sent};
    }
  }
}

void PlainUserRun::forget(int n) {
  Net& net = nets_[n];
  for (int rank = 0; rank < p_.world_size; ++rank) {
    net.ranks[rank] = {};
    for (const auto& p : replicas_[rank][n]->managed()) p.tensor.mutable_grad().reset();
  }
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
  int64_t dropped = 0;
  for (const OfRank& state : net.ranks) dropped = std::max(dropped, state.dropped);
  if (net.ranks[0].rounds > dropped && !skipped) {
    net.optimizer->step();
    // Where a bucket's rows are parameters, a fused step writes those that it changes.
    const bool writes_all = p_.options.layout() == Layout::kPerParameter || !p_.options.fused();
    for (int i = 0; i < kUserParameters; ++i) {
      if (net.stale[i] && !used[i] && !writes_all) continue;
      net.stale[i] = false;
      for (int rank = 0; rank < p_.world_size; ++rank) {
        parameter(rank, event.net, i).tensor.data().copy_(net.masters[i]);
      }
    }
  }
  forget(event.net);
}

void PlainUserRun::edit_all(const UserEvent& event) {
  at::NoGradGuard no_grad;
  nets_[event.net].edited = true;
  for (int rank = 0; rank < p_.world_size; ++rank) {
    for (int i = 0; i < kUserParameters; ++i) {
      const UserModelImpl& model = *replicas_[rank][event.net];
      model.managed()[i].tensor.copy_(edited_value(event, model, i, rank));
    }
  }
}

void PlainUserRun::refresh_masters(const UserEvent& event) {
  Net& net = nets_[event.net];
  if (p_.dtype != at::kFloat) edit_all(event);
  for (int i = 0; i < kUserParameters; ++i) {
    const at::Tensor& first = parameter(0, event.net, i).tensor;
    for (int rank = 1; rank < p_.world_size; ++rank) {
      parameter(rank, event.net, i).tensor.copy_(first);
    }
    net.masters[i].copy_(first);
  }
  for (int n = 0; n < p_.net_count(); ++n) {
    if (n != event.net && p_.nets != Nets::kParts) continue;
    for (auto& of_rank : replicas_) of_rank[n]->frozen.data().copy_(replicas_[0][n]->frozen);
  }
  net.edited = false;
  net.moved = net.stale = {};
}

void PlainUserRun::collective(const UserEvent& event, const std::vector<UserOutcome>& outcomes) {
  at::NoGradGuard no_grad;
  Net& net = nets_[event.net];
  if (event.call == UserCall::kZeroGrad) {
    net.broken = net.unknown = false;
    forget(event.net);
    return;
  }
  complete(event.net, gathers_averages(event.call));
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
        for (int rank = 0; rank < p_.world_size; ++rank) {
          parameter(rank, event.net, i).tensor.copy_(net.masters[i]);
        }
      }
      net.edited = false;
      net.moved = net.stale = {};
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
  const UserEvent event = task_.event;
  bool refused = false, worked = false;
  for (int rank = 0; rank < p_.world_size; ++rank) {
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
  if (is_collective(event.call)) {
    TORCH_CHECK(!refused || !worked, "expected an error on all ranks or on none");
    if (event.call == UserCall::kClosureStep) {
      for (int rank = 0; rank < p_.world_size; ++rank) run_pass(event, rank);
    }
    nets_[event.net].refused = refused;
    if (refused) {
      for (int rank = 0; rank < p_.world_size; ++rank) {
        if (!nets_[event.net].broken) drop(event.net, rank);
      }
      if (event.call == UserCall::kCheckReplicas && !is_refused_for_gradients(event.net) &&
          !is_ambiguous(event.net) && !nets_[event.net].tied) {
        // It was agreed on, and what differs was found after that.
        complete(event.net, /*gathers=*/false);
        nets_[event.net].refused = false;
      }
      if (event.call == UserCall::kRefreshMasters && p_.dtype != at::kFloat) edit_all(event);
      remedy(event);
    } else {
      collective(event, outcomes);
    }
    return choose();
  }
  bool settles = false;
  for (int rank = 0; rank < p_.world_size; ++rank) {
    if (task_.by_rank[rank] == Expectation::kNotCalled) continue;
    const bool error = !outcomes[rank].error.empty();
    if (event.call != UserCall::kPass) {
      user_edit(event, rank);
    } else if (!error) {
      run_pass(event, rank);
    } else {
      settles = true;
    }
  }
  if (event.call == UserCall::kSetDataShape) {
    UserEvent restore = event, look = event;
    restore.call = UserCall::kRestoreShape;
    look.call = UserCall::kNorm;
    queue_.push_front(restore);
    queue_.push_front(look);
  }
  if (settles) remedy(event);
  choose();
}

void PlainUserRun::remedy(const UserEvent& event) {
  std::vector<UserEvent> todo;
  const auto add = [&](UserCall call, int net) {
    UserEvent e = event;
    e.call = call;
    e.net = net;
    e.ranks = ~0U;
    e.norm_type = 2.0;
    e.look = true;
    todo.push_back(e);
  };
  const bool pass = event.call == UserCall::kPass;
  if (pass) {
    // Which of the nets have gradients of a part of the pass is not known.
    if (event.driver >= 0) nets_[event.driver].broken = true;
    for (int n = 0; n < p_.net_count(); ++n) {
      nets_[n].unknown = true;
      nets_[n].refused = false;
      if (!is_zero(n)) continue;
      add(UserCall::kNorm, n);
      add(UserCall::kZeroGrad, n);
      todo.back().retried = true;
    }
    add(UserCall::kDropFrozenGrad, 0);
  } else if (event.call == UserCall::kNorm && nets_[event.net].unknown) {
    return;  // zero_grad() is next
  } else {
    const int n = event.net;
    Net& net = nets_[n];
    const bool gradients = is_refused_for_gradients(n);
    const bool clean = !gradients && !is_ambiguous(n) && event.call != UserCall::kCheckReplicas;
    if (gradients || is_ambiguous(n)) add(UserCall::kZeroGrad, n);
    if (net.reshaped) return;  // restored next
    if (has_frozen(n)) add(UserCall::kThaw, n);
    if (has_thawed_gradient(n)) add(UserCall::kDropFrozenGrad, n);
    if (net.tied) add(UserCall::kUntie, n);
    const bool stale = std::find(net.stale.begin(), net.stale.end(), true) != net.stale.end();
    if (net.edited || net.is_moved() || (stale && event.call == UserCall::kCheckReplicas)) {
      add(UserCall::kRefreshMasters, n);
    }
    TORCH_CHECK(!event.retried, "expected the call to work after its remedy");
    if (clean && event.call != UserCall::kRefreshMasters) {
      todo.push_back(event);
      todo.back().retried = true;
    }
  }
  for (auto e = todo.rbegin(); e != todo.rend(); ++e) queue_.push_front(*e);
}

void PlainUserRun::compare(int rank, const std::vector<UserModel>& models) const {
  for (int n = 0; n < p_.net_count(); ++n) {
    const Net& net = nets_[n];
    const std::string prefix = "rank " + std::to_string(rank) + ": net " + std::to_string(n) + " ";
    for (int i = 0; i < kUserParameters && !net.reshaped; ++i) {
      const auto& own = models[n]->managed()[i];
      const auto& plain = parameter(rank, n, i);
      // A master beside the middle of two 16-bit numbers may round to either.
      const bool rounded = is_zero(n) && at::equal(plain.tensor, net.masters[i].to(p_.dtype));
      const at::Tensor& expected = rounded ? net.masters[i] : plain.tensor;
      if (!net.stale[i]) expect_close(own.tensor, expected, prefix + own.name, kTolerance);
      const std::string what = prefix + own.name + ".grad()";
      const at::Tensor& grad = own.tensor.grad();
      if (!is_zero(n)) {
        if (!net.unknown) expect_close(grad, plain.tensor.grad(), what, kTolerance);
        continue;
      }
      const Slot& slot = net.ranks[rank].slots[i];
      if (net.unknown || is_ambiguous(n) || slot.altered) continue;
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
