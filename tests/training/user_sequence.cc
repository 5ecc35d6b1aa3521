// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/user_sequence.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <limits>
#include <sstream>
#include <utility>

#include "tests/training/draws.h"
#include "tests/training/plain_sequence.h"

namespace zero {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter,
                               Layout::kWholeParameters};
// A 16-bit sum of gradients is exact up to 256 quarters. One pass adds up to 16 of them.
constexpr int kPassesAStep = 6;

class Generator : Draws {
 public:
  explicit Generator(uint64_t seed) : Draws(seed * 0x9E3779B97F4A7C15u + 17) { p_.seed = seed; }

  UserProgram draw() {
    draw_configuration();
    p_.recovers = p_.seed % 4 == 0;
    if (p_.recovers) p_.options.protect(1000);
    const int64_t count = 6 + below(14);
    for (int64_t i = 0; i < count; ++i) p_.events.push_back(draw_event());
    for (int net = 0; net < p_.net_count(); ++net) {
      UserEvent last = event(p_.is_foreign(net) ? UserCall::kForeignStep : UserCall::kStep);
      last.net = net;
      last.look = true;
      p_.events.push_back(last);
    }
    return std::move(p_);
  }

 private:
  void draw_configuration() {
    p_.world_size = pick<int>({{1, 30}, {2, 45}, {3, 20}, {4, 5}});
    p_.wire = pick<Wire>(
        {{Wire::kMemory, 80}, {Wire::kNative, 14}, {Wire::kShared, 5}, {Wire::kGloo, 1}});
    p_.nets =
        pick<Nets>({{Nets::kOne, 50}, {Nets::kGan, 22}, {Nets::kParts, 14}, {Nets::kForeign, 14}});
    p_.dtype = pick<c10::ScalarType>({{c10::ScalarType::Float, 60},
                                      {c10::ScalarType::BFloat16, 32},
                                      {c10::ScalarType::Half, 8}});
    p_.inner = pick<Inner>(
        {{Inner::kSgd, 30}, {Inner::kSgdMomentum, 25}, {Inner::kAdam, 15}, {Inner::kAdamW, 30}});
    p_.frozen_in_groups = percent(50);
    // An optimizer of torch would take scaled gradients for gradients.
    if (p_.nets != Nets::kForeign && percent(15)) p_.loss_scale = 8.0;
    p_.options.stage(1 + below(2))
        .layout(kLayouts[below(3)])
        .bucket_bytes(percent(50) ? 16 + below(120) : 1 << 20)
        .fused(percent(70))
        .overlap_gather(percent(35))
        .no_sync_fp32(percent(35))
        .loss_scaler(LossScalerOptions()
                         .initial_scale(p_.loss_scale)
                         .min_scale(p_.loss_scale)
                         .max_scale(p_.loss_scale));
  }

  unsigned draw_units() {
    unsigned units = 0;
    for (unsigned unit = 1; unit <= UserModelImpl::kTwin; unit *= 2) {
      if (percent(70)) units |= unit;
    }
    if (p_.dtype == at::kFloat && percent(15)) units |= UserModelImpl::kSquare;
    return units;
  }

  void draw_pass(UserEvent& e) {
    const int nets = p_.net_count();
    e.form = pick<PassForm>({{PassForm::kOnce, 60},
                             {PassForm::kTwice, 8},
                             {PassForm::kCreateGraph, 4},
                             {PassForm::kAfterGrad, 6},
                             {PassForm::kPenalty, 6},
                             {PassForm::kFrozenForward, 8},
                             {PassForm::kFrozenBetween, 4},
                             {PassForm::kUnwaited, p_.options.overlap_gather() ? 8 : 0}});
    e.driver = percent(60) ? static_cast<int>(below(nets)) : -1;
    if (e.driver >= 0 && p_.is_foreign(e.driver)) e.driver = -1;
    if (e.form == PassForm::kCreateGraph) e.driver = -1;
    for (int net = 0; net < nets; ++net) {
      if (!p_.is_foreign(net) && percent(22)) e.no_sync |= 1U << net;
    }
    e.nonfinite = percent(4);
    // A loss of one net, or of one that goes through the other.
    const bool across = nets > 1 && percent(45);
    e.net = e.driver >= 0 ? e.driver : e.net;
    const bool alike = percent(65);
    for (int r = 0; r < p_.world_size; ++r) {
      std::vector<unsigned> units(nets, 0);
      for (int net = 0; net < nets; ++net) {
        if (net == e.net || across) units[net] = draw_units();
      }
      e.units.push_back(alike && r > 0 ? e.units[0] : units);
    }
    if (percent(15)) e.ranks = static_cast<unsigned>(number());
  }

  UserEvent event(UserCall call) {
    UserEvent e;
    e.call = call;
    e.net = static_cast<int>(below(p_.net_count()));
    e.parameter = static_cast<int>(below(kUserParameters));
    e.seed = number();
    e.look = percent(60);
    e.norm_type = percent(60) ? 2.0 : percent(50) ? 1.0 : std::numeric_limits<double>::infinity();
    e.max_norm = percent(50) ? 0.5 : 8.0;
    return e;
  }

  UserEvent draw_event() {
    const bool unscaled = p_.loss_scale == 1.0;
    const int by_hand = unscaled ? 1 : 0;
    std::vector<Choice<UserCall>> choices = {
        {UserCall::kPass, passes_ < kPassesAStep ? 120 : 0},
        {UserCall::kStep, 45},
        {UserCall::kClosureStep, passes_ < kPassesAStep ? 6 : 0},
        {UserCall::kZeroGrad, 7},
        {UserCall::kModuleZeroGrad, 18},
        {UserCall::kBaseZeroGrad, 7},
        {UserCall::kPartZeroGrad, 3},
        {UserCall::kModuleZeroValues, 2},
        {UserCall::kPutGrad, 10 * by_hand},
        {UserCall::kNegateGrad, 5},
        {UserCall::kClampGrad, 3 * by_hand},
        {UserCall::kResetGrad, 4},
        {UserCall::kRestoreGrad, 3},
        {UserCall::kEditData, 6},
        {UserCall::kEditRaw, 3},
        {UserCall::kEditInPlace, 4},
        {UserCall::kSetData, 4},
        {UserCall::kSetDataBack, 3},
        {UserCall::kSetDataShape, 2},
        {UserCall::kTie, 2},
        {UserCall::kEditFrozen, 2},
        {UserCall::kFreeze, 4},
        {UserCall::kThaw, 4},
        {UserCall::kThawFrozen, 3},
        {UserCall::kForeignStep, p_.nets == Nets::kForeign ? 10 : 0},
        {UserCall::kReduce, 6},
        {UserCall::kNorm, 8},
        {UserCall::kClip, 6},
        {UserCall::kGradient, 5},
        {UserCall::kMaster, 5},
        {UserCall::kCheckReplicas, 4},
        {UserCall::kRefreshMasters, 4},
        {UserCall::kRefreshWorking, 4}};
    UserEvent e = event(pick(choices));
    switch (e.call) {
      case UserCall::kClosureStep:
      case UserCall::kPass:
        draw_pass(e);
        ++passes_;
        if (e.form == PassForm::kTwice) ++passes_;
        break;
      case UserCall::kForeignStep:
        e.net = 1;
        break;
      case UserCall::kModuleZeroGrad:
      case UserCall::kBaseZeroGrad:
      case UserCall::kPartZeroGrad:
        if (percent(8)) e.ranks = static_cast<unsigned>(number());
        break;
      case UserCall::kPutGrad:
      case UserCall::kNegateGrad:
      case UserCall::kClampGrad:
      case UserCall::kResetGrad:
      case UserCall::kRestoreGrad:
      case UserCall::kModuleZeroValues:
      case UserCall::kFreeze:
        if (percent(40)) e.ranks = static_cast<unsigned>(number());
        break;
      default:
        break;
    }
    if (e.call == UserCall::kClosureStep) {
      if (e.driver < 0) e.driver = 0;
      e.net = e.driver;
      e.ranks = ~0U;
      e.no_sync = 0;
      e.form = PassForm::kOnce;
    }
    if (p_.is_foreign(e.net) && e.call != UserCall::kPass && e.call != UserCall::kForeignStep) {
      e.net = 0;
    }
    if (e.call == UserCall::kStep || e.call == UserCall::kClosureStep) passes_ = 0;
    e.made_anew = e.call == UserCall::kStep && e.seed % 3 == 0;
    return e;
  }

  UserProgram p_;
  int passes_ = 0;  // since the last step
};

struct CallTraits {
  const char* name;
  UserCallKind kind;
};
constexpr CallTraits kCalls[] = {
    {"pass", UserCallKind::kPass},
    {"zero_grad()", UserCallKind::kCollective},
    {"module->zero_grad()", UserCallKind::kEditsGradients},
    {"submodule->zero_grad()", UserCallKind::kEditsGradients},
    {"Optimizer::zero_grad()", UserCallKind::kEditsGradients},
    {"module->zero_grad(false)", UserCallKind::kEditsGradients},
    {"p.grad() put", UserCallKind::kEditsGradients},
    {"p.grad().neg_()", UserCallKind::kEditsGradients},
    {"clip_grad_value_", UserCallKind::kEditsGradients},
    {"p.grad().reset()", UserCallKind::kEditsGradients},
    {"p.grad() out and back", UserCallKind::kEditsGradients},
    {"p.data() edited", UserCallKind::kEditsParameters},
    {"data_ptr() edited", UserCallKind::kEditsParameters},
    {"p edited in place", UserCallKind::kEditsParameters},
    {"set_data", UserCallKind::kEditsParameters},
    {"set_data and back", UserCallKind::kEditsParameters},
    {"set_data of another shape", UserCallKind::kEditsParameters},
    {"set_data ties twin to gain", UserCallKind::kEditsParameters},
    {"frozen parameter edited", UserCallKind::kEditsParameters},
    {"requires_grad_(false)", UserCallKind::kEditsParameters},
    {"requires_grad_(true)", UserCallKind::kEditsParameters},
    {"requires_grad_(true) of the frozen", UserCallKind::kEditsParameters},
    {"step() of torch's optimizer", UserCallKind::kEditsParameters},
    {"reduce_gradients", UserCallKind::kGathersAverages},
    {"grad_norm", UserCallKind::kGathersAverages},
    {"clip_grad_norm_", UserCallKind::kGathersAverages},
    {"gradient", UserCallKind::kGathersAverages},
    {"master", UserCallKind::kChecksParameters},
    {"check_replicas", UserCallKind::kCollective},
    {"refresh_master_parameters", UserCallKind::kCollective},
    {"refresh_working_parameters", UserCallKind::kCollective},
    {"step", UserCallKind::kGathersAverages},
    {"step(closure)", UserCallKind::kCollective},
    {"shape restored", UserCallKind::kEditsParameters},
    {"twin untied", UserCallKind::kEditsParameters},
    {"gradient of the frozen dropped", UserCallKind::kEditsParameters}};
constexpr std::array kFormNames = {
    "",         " twice over one graph",    " create_graph",           " after grad()",
    " penalty", " frozen until it is over", " frozen before backward", " without wait_for"};

}  // namespace

UserCallKind kind_of(UserCall call) { return kCalls[static_cast<size_t>(call)].kind; }

UserProgram draw_user_program(uint64_t seed) { return Generator(seed).draw(); }

std::string describe(const UserEvent& e, int ranks) {
  std::ostringstream text;
  text << kCalls[static_cast<size_t>(e.call)].name << " net " << e.net;
  const unsigned all = (1U << ranks) - 1;
  if ((e.ranks & all) != all) text << " ranks 0x" << std::hex << (e.ranks & all) << std::dec;
  if (e.call == UserCall::kPass || e.call == UserCall::kClosureStep) {
    text << kFormNames[static_cast<size_t>(e.form)]
         << (e.driver < 0 ? " loss.backward()" : " optimizer.backward(loss)");
    if (e.no_sync != 0) text << " no_sync of nets 0x" << std::hex << e.no_sync << std::dec;
    if (e.nonfinite) text << " nonfinite";
    text << " units";
    for (const auto& nets : e.units) {
      text << (&nets == &e.units.front() ? " " : " | ");
      for (const unsigned units : nets) text << std::hex << "0x" << units << std::dec << " ";
    }
  } else if (e.call >= UserCall::kPutGrad && e.call <= UserCall::kThaw) {
    text << " parameter " << e.parameter;
  } else if (e.call == UserCall::kGradient || e.call == UserCall::kMaster) {
    text << " parameter " << e.parameter;
  }
  if (e.call == UserCall::kNorm || e.call == UserCall::kClip) text << " type " << e.norm_type;
  if (e.call == UserCall::kClip) text << " max " << e.max_norm;
  if (e.retried) text << " (again)";
  if (e.made_anew) text << " and resize_rows";
  return text.str();
}

std::string describe(const UserProgram& p) {
  constexpr std::array kNets = {"one net", "two nets", "two parts of one module", "a foreign net"};
  const ZeroOptions& o = p.options;
  std::ostringstream text;
  text << "seed " << p.seed << ": W " << p.world_size << " over " << wire_name(p.wire) << ", "
       << kNets[static_cast<size_t>(p.nets)] << ", " << c10::toString(p.dtype) << ", "
       << name_of(p.inner) << (p.frozen_in_groups ? " with the frozen parameter" : "") << ", scale "
       << p.loss_scale << ", stage " << o.stage() << " " << name_of(o.layout()) << " bucket_bytes "
       << o.bucket_bytes().value_or(0) << (o.fused() ? " fused" : "")
       << (o.overlap_gather() ? " overlap_gather" : "") << (o.no_sync_fp32() ? " no_sync_fp32" : "")
       << (p.recovers ? " after recover()" : "");
  for (size_t i = 0; i < p.events.size(); ++i) {
    text << "\n  " << i << ": " << describe(p.events[i], p.world_size);
  }
  return text.str() + "\n";
}

UserModelImpl::UserModelImpl(c10::ScalarType dtype, uint64_t seed) {
  first = register_module("first", Affine(5, 3, at::kCPU));
  second = register_module("second", Affine(2, 4, at::kCPU));
  first->to(dtype);
  second->to(dtype);
  gain = register_parameter("gain", at::zeros({1}, dtype));
  twin = register_parameter("twin", at::zeros({1}, dtype));
  odd = register_parameter(
      "odd", at::zeros({1, 3, 1, 2}, dtype).contiguous(at::MemoryFormat::ChannelsLast));
  empty = register_parameter("empty", at::zeros({0}, dtype));
  frozen = register_parameter("frozen", at::zeros({4}, dtype), /*requires_grad=*/false);
  managed_ = {{"first.weight", first->weight, kFirst | kSquare},
              {"first.bias", first->bias, kFirst | kSquare},
              {"second.weight", second->weight, kSecond},
              {"second.bias", second->bias, kSecond},
              {"gain", gain, kDirect},
              {"twin", twin, kTwin},
              {"odd", odd, kDirect},
              {"empty", empty, kDirect}};
  at::NoGradGuard no_grad;
  for (const Managed& p : managed_) p.tensor.copy_(grid(p.tensor.sizes(), ++seed, 8, 8));
  frozen.copy_(grid({4}, ++seed, 8, 8));
}

at::Tensor UserModelImpl::loss(unsigned units, uint64_t seed, bool nonfinite, bool penalty) {
  const auto constant = [&](at::IntArrayRef shape, double divisor) {
    at::Tensor values = grid(shape, ++seed, 2, divisor);
    if (divisor == 4 && std::exchange(nonfinite, false)) {
      values.view({-1})[0] = seed % 2 == 0 ? std::numeric_limits<float>::infinity()
                                           : std::numeric_limits<float>::quiet_NaN();
    }
    return values.to(gain.scalar_type());
  };
  at::Tensor sum = at::zeros({}, gain.options().requires_grad(false));
  for (const auto& [unit, layer] : {std::pair{kFirst, first}, {kSecond, second}}) {
    if ((units & unit) == 0) continue;
    Affine own = layer;
    at::Tensor x = constant({2, own->weight.size(1)}, 1);
    if (penalty) x.requires_grad_();
    const at::Tensor value = at::sum(own(x) * constant({2, own->weight.size(0)}, 4));
    sum = sum + value;
    if (!penalty) continue;
    const at::Tensor slope = torch::autograd::grad({value}, {x}, {}, /*retain_graph=*/true,
                                                   /*create_graph=*/true)[0];
    sum = sum + at::sum(slope * constant(x.sizes(), 1));
  }
  if ((units & kDirect) != 0) {
    sum = sum + at::sum(gain * constant({1}, 4)) + at::sum(odd * constant({1, 3, 1, 2}, 4)) +
          at::sum(empty) + at::sum(frozen * constant({4}, 4));
  }
  if ((units & kTwin) != 0) sum = sum + at::sum(twin * constant({1}, 4));
  if ((units & kSquare) != 0) {
    sum = sum + at::sum(at::pow(first(constant({2, first->weight.size(1)}, 2)), 2)) / 8;
  }
  return sum;
}

at::Tensor edited_value(const UserEvent& event, const UserModelImpl& model, int index, int rank) {
  const at::Tensor& p = model.managed()[index].tensor;
  const uint64_t seed = event.seed + static_cast<uint64_t>(index + 100 * rank);
  return grid(p.sizes(), seed, 16, 8).to(p.scalar_type());
}

at::Tensor put_gradient(const UserEvent& event, const UserModelImpl& model, double scale,
                        int rank) {
  const at::Tensor& p = model.managed()[event.parameter].tensor;
  return (grid(p.sizes(), event.seed + static_cast<uint64_t>(rank), 8, 4) * scale)
      .to(p.scalar_type());
}

void edit_all_parameters(const UserEvent& event, const UserModelImpl& model, int rank) {
  for (int i = 0; i < kUserParameters; ++i) {
    model.managed()[i].tensor.copy_(edited_value(event, model, i, rank));
  }
}

void edit_parameters(const UserProgram& program, const UserEvent& event,
                     std::vector<UserModel>& models, int rank) {
  UserModel& model = models[event.net];
  const at::Tensor p = model->managed()[event.parameter].tensor;
  const auto value = [&](int of) { return edited_value(event, *model, event.parameter, of); };
  switch (event.call) {
    case UserCall::kEditData:
      p.data().copy_(value(0));
      return;
    case UserCall::kEditRaw:
      at::from_blob(p.data_ptr(), p.sizes(), p.strides(), p.options().requires_grad(false))
          .copy_(value(0));
      return;
    case UserCall::kEditInPlace:
      p.copy_(value(rank));
      return;
    case UserCall::kSetData:
      return p.set_data(value(rank).clone());
    case UserCall::kSetDataBack: {
      const at::Tensor own = p.data();
      p.set_data(value(rank).clone());
      return p.set_data(own);
    }
    case UserCall::kTie:
      return model->twin.set_data(model->gain.data());
    case UserCall::kUntie:
      return model->twin.set_data(model->twin.data().clone());
    case UserCall::kEditFrozen:
      model->frozen.data().copy_(grid({4}, event.seed + static_cast<uint64_t>(rank), 8, 8));
      return;
    case UserCall::kFreeze:
      p.requires_grad_(false);
      return;
    case UserCall::kThaw:
      for (const auto& each : model->managed()) each.tensor.requires_grad_(true);
      return;
    case UserCall::kThawFrozen:
      model->frozen.requires_grad_(true);
      return;
    case UserCall::kDropFrozenGrad:
      for (size_t n = 0; n < models.size(); ++n) {
        if (program.is_foreign(static_cast<int>(n))) models[n]->zero_grad();
        models[n]->frozen.mutable_grad().reset();
        models[n]->frozen.requires_grad_(false);
      }
      return;
    default:
      return;
  }
}

void run_user_pass(
    const UserEvent& event, const std::vector<UserModel>& models, int rank,
    const std::function<void(const at::Tensor& loss, bool retain, bool create)>& backward) {
  std::vector<at::Tensor> switched;
  const auto freeze = [&](const UserModelImpl::Managed& p) {
    if (!p.tensor.requires_grad()) return;
    switched.push_back(p.tensor);
    p.tensor.requires_grad_(false);
  };
  const auto thaw = [&] {
    for (const at::Tensor& p : switched) p.requires_grad_(true);
  };
  if (event.form == PassForm::kFrozenForward) {
    // The net that is only a part of the way to the loss, or the one there is.
    for (const auto& p : models.back()->managed()) freeze(p);
  }
  at::Tensor loss;
  for (size_t net = 0; net < models.size(); ++net) {
    const unsigned units = event.units[rank][net];
    UserModel model = models[net];
    const uint64_t seed = event.seed + 1000 * static_cast<uint64_t>(rank) + 100 * net;
    const at::Tensor own =
        model->loss(units, seed, event.nonfinite && rank == 0, event.form == PassForm::kPenalty);
    loss = loss.defined() ? loss + own : own;
  }
  if (event.form == PassForm::kFrozenBetween) freeze(models[event.net]->managed()[event.parameter]);
  if (event.form == PassForm::kAfterGrad && loss.requires_grad()) {
    std::vector<at::Tensor> inputs;
    for (const UserModel& model : models) {
      for (const auto& p : model->managed()) {
        if (p.tensor.requires_grad()) inputs.push_back(p.tensor);
      }
    }
    torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, /*create_graph=*/false,
                          /*allow_unused=*/true);
  }
  try {
    const bool twice = event.form == PassForm::kTwice && loss.requires_grad();
    if (twice) backward(loss, /*retain=*/true, /*create=*/false);
    backward(loss, /*retain=*/false, event.form == PassForm::kCreateGraph);
  } catch (...) {
    thaw();
    throw;
  }
  thaw();
}

}  // namespace zero
