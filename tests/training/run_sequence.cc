// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/run_sequence.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <thread>

#include "tests/support/error_of.h"
#include "tests/training/plain_sequence.h"
#include "zero/checkpoint_options.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

void expect_equal(double got, double expected, const char* what) {
  TORCH_CHECK(got == expected, what, ": expected ", expected, ", got ", got);
}

void expect_refusal(const char* what, const std::function<void()>& call) {
  TORCH_CHECK(!error_of(call).empty(), what, ": expected an error, got none");
}

class NormLimit final : public SkipRule {
 public:
  explicit NormLimit(double largest) : largest_(largest) {}
  at::Tensor leaves_out(const at::Tensor& norm) override { return norm > largest_; }
  std::string state() const override { return {}; }
  void set_state(const std::string&) override {}

 private:
  const double largest_;
};

class SequenceRank {
 public:
  SequenceRank(const CallSequence& sequence, const Group& group, std::string folder)
      : s_(sequence), group_(group), folder_(std::move(folder)) {
    make(s_.options, 0);
  }

  void run(const Event& event, const Expected& expected) {
    for (const Pass& pass : event.passes[group_.rank()]) run_pass(pass);
    if (is(event.late)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    act(event, expected);
    compare(event, expected);
    if (event.average) look_at_average(event, expected);
  }

 private:
  bool is(int rank) const { return group_.rank() == rank; }

  // Only rank 0's values may matter.
  void make(ZeroOptions options, uint64_t generation) {
    optimizer_.reset();
    if (s_.largest_norm) options.skip_if(std::make_shared<NormLimit>(*s_.largest_norm));
    options.ema(s_.ema);
    place(options);
    model_ =
        SequenceModel(s_, model_seed(s_, group_.rank()) + 100000 * generation, group_.device());
    for (const auto& [layer, rows] : rows_) model_->set_rows(layer, rows);
    optimizer_ = std::make_unique<ZeroOptimizer>(
        *model_, make_optimizer(s_.inner, model_->tensors()), group_, options);
  }

  void place(ZeroOptions& options) const {
    const int rank = group_.rank(), size = s_.world_size;
    if (s_.mesh_kind == MeshKind::kExperts) {
      options.placement(1, GroupPlacement().sharded_over(group_.subgroup({rank}, "own")));
    }
    if (s_.mesh_kind != MeshKind::kReplicas) return;
    const int shards = size % 2 == 0 ? size / 2 : 1;
    std::vector<int> shared, copies;
    for (int r = 0; r < size; ++r) {
      if (r / shards == rank / shards) shared.push_back(r);
      if (r % shards == rank % shards) copies.push_back(r);
    }
    const auto placement = GroupPlacement()
                               .sharded_over(group_.subgroup(shared, "shared"))
                               .replicated_over(group_.subgroup(copies, "copies"));
    options.placement(0, placement);
    if (s_.seed % 2 == 0) options.placement(1, placement);
  }

  void wait_for(unsigned units) {
    if (!optimizer_->options().overlap_gather()) return;
    for (size_t i = 0; i < model_->layers.size(); ++i) {
      if ((units >> i & 1) != 0) optimizer_->wait_for(*model_->layers[i]);
    }
    if ((units >> model_->layers.size() & 1) != 0) optimizer_->wait_for(*model_);
  }

  void run_pass(const Pass& pass) {
    if (pass.kind == PassKind::kNoGraph) {
      optimizer_->backward(at::ones({}));
      return;
    }
    if (pass.kind == PassKind::kByHand) {
      const auto gradients = model_->gradients_by_hand(pass);
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!gradients[i].defined()) continue;
        const at::Tensor p = model_->managed()[i].tensor;
        // One that a refused call left there stays.
        const at::Tensor gradient = optimizer_->scale_loss(gradients[i]);
        p.mutable_grad() = p.grad().defined() ? p.grad() + gradient : gradient;
      }
      return;
    }
    wait_for(pass.units);
    const at::Tensor loss = model_->loss(pass);
    if (pass.kind == PassKind::kWithGrad || pass.kind == PassKind::kOnlyGrad) {
      torch::autograd::grad({loss}, model_->tensors(), {}, /*retain_graph=*/true,
                            /*create_graph=*/false, /*allow_unused=*/true);
    }
    if (pass.kind == PassKind::kOnlyGrad) return;
    const auto guard =
        optimizer_->no_sync(pass.kind == PassKind::kNoSync || pass.kind == PassKind::kPlainNoSync);
    if (pass.kind == PassKind::kPlain || pass.kind == PassKind::kPlainNoSync) {
      optimizer_->scale_loss(loss).backward();
    } else {
      optimizer_->backward(loss);
    }
  }

  void act(const Event& event, const Expected& expected) {
    ZeroOptimizer& o = *optimizer_;
    switch (event.action) {
      case Action::kNothing:
        break;
      case Action::kReduce:
        o.reduce_gradients();
        break;
      case Action::kNorm:
      case Action::kClip: {
        const at::Tensor norm = o.clip_grad_norm_(event.max_norm, event.norm_type);
        expect_close(norm, at::full({}, *expected.norm, at::kDouble), "norm");
        break;
      }
      case Action::kClipValue:
        o.clip_grad_value_(*event.max_norm);
        break;
      case Action::kStep:
        for (auto& group : o.param_groups()) {
          if (event.rate) group.options().set_lr(*event.rate);
        }
        o.step();
        expect_equal(o.step_skipped(), expected.skipped, "step_skipped()");
        break;
      case Action::kZeroGrad:
        o.zero_grad();
        break;
      case Action::kModuleZeroGrad:
        model_->zero_grad();
        break;
      case Action::kGradient: {
        const auto& p = model_->managed()[event.parameter];
        expect_close(o.gradient(p.tensor), expected.gradients[event.parameter],
                     "gradient() of " + p.name);
        break;
      }
      case Action::kMaster:
        expect_master(event.parameter, expected);
        break;
      case Action::kAllMasters:
        for (size_t i = 0; i < expected.parameters.size(); ++i) expect_master(i, expected);
        break;
      case Action::kCheckReplicas:
        o.check_replicas();
        break;
      case Action::kRefreshWorking:
      case Action::kRefreshMasters:
      case Action::kBroadcastBuffers:
        refresh(event);
        break;
      case Action::kCheckpoint:
      case Action::kCheckpointAsync:
        pass_on(event);
        break;
      case Action::kResizeRows:
        resize(event);
        break;
      default:
        misuse(event);
    }
  }

  // As working parameters are: a tie away from zero where masters are split, else to even.
  at::Tensor rounded(const at::Tensor& master) const {
    if (!optimizer_->options().split_masters()) return master.to(s_.dtype);
    const at::Tensor high = master.view(at::kInt).add(0x8000).bitwise_right_shift(16);
    return high.to(at::kShort).view(at::kBFloat16);
  }

  void expect_master(size_t index, const Expected& expected) {
    const auto& p = model_->managed()[index];
    const at::Tensor master = optimizer_->master(p.tensor);
    expect_close(master, expected.parameters[index], "master() of " + p.name);
    TORCH_CHECK(at::equal(rounded(master), p.tensor), "master() of ", p.name,
                ": expected what rounds to the parameter, got ", master, " for ", p.tensor);
  }

  // Each rank changes its own copy; what the call brings back must win.
  void refresh(const Event& event) {
    ZeroOptimizer& o = *optimizer_;
    const uint64_t seed = event.seed + static_cast<uint64_t>(group_.rank());
    if (event.action == Action::kBroadcastBuffers) {
      model_->buffer.copy_(grid({3}, seed, 8, 8));
      o.broadcast_buffers();
      return;
    }
    const bool from_masters = event.action == Action::kRefreshWorking;
    // An edit is one of the masters where the working parameters hold them, or their upper halves.
    const bool holds_masters =
        o.options().split_masters() ||
        (s_.dtype == at::kFloat && o.options().layout() != Layout::kPerParameter);
    if (!from_masters || !holds_masters) {
      if (o.options().overlap_gather()) o.wait_for(*model_);
      const auto values = model_->edited(event, group_.rank() + (from_masters ? 50 : 0));
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].defined()) model_->managed()[i].tensor.copy_(values[i]);
      }
    }
    if (from_masters) {
      o.refresh_working_parameters();
    } else {
      model_->frozen.copy_(grid({5}, seed, 8, 8));
      o.refresh_master_parameters();
    }
  }

  // A new optimizer of other options goes on from a checkpoint.
  void pass_on(const Event& event) {
    const std::string folder = folder_ + "/" + std::to_string(++generation_);
    if (event.action == Action::kCheckpoint) {
      optimizer_->save_checkpoint(folder);
    } else {
      const auto save = optimizer_->save_checkpoint_async(folder);
      optimizer_->check_replicas();
      save->finish();
    }
    make(event.options, generation_);
    optimizer_->load_checkpoint(folder);
  }

  void resize(const Event& event) {
    const at::Tensor rows = at::tensor(event.rows, at::kLong);
    std::vector<ResizedRows> changes;
    for (const size_t i : SequenceModelImpl::resized(event)) {
      changes.push_back({model_->managed()[i].tensor, rows, model_->resized_value(event, i)});
    }
    optimizer_->resize_rows(changes);
    rows_[static_cast<size_t>(event.layer)] = static_cast<int64_t>(event.rows.size());
  }

  void misuse(const Event& event) {
    ZeroOptimizer& o = *optimizer_;
    const bool odd = is(event.odd);
    const char* const name = name_of(event.action);
    const auto refused = [&](const std::function<void()>& call) { expect_refusal(name, call); };
    switch (event.action) {
      case Action::kDifferentNorms:
        return refused([&] { o.grad_norm(odd ? 3.0 : event.norm_type); });
      case Action::kDifferentClips:
        return refused([&] { o.clip_grad_norm_(odd ? 0.5 : 0.25, event.norm_type); });
      case Action::kDifferentParameters:
        return refused([&] { o.gradient(odd ? model_->odd : model_->gain); });
      case Action::kDifferentCalls:
        return refused([&] { odd ? o.reduce_gradients() : o.check_replicas(); });
      case Action::kInvalidNorm:
        return refused([&] { o.grad_norm(odd ? -1.0 : event.norm_type); });
      case Action::kDifferentRates: {
        auto& options = o.param_groups().front().options();
        const double rate = options.get_lr();
        if (odd) options.set_lr(2 * rate);
        refused([&] { o.step(); });
        options.set_lr(rate);
        return;
      }
      case Action::kInsideNoSync: {
        const auto guard = o.no_sync(odd);
        return refused([&] { o.reduce_gradients(); });
      }
      case Action::kBackwardAfterClip:
        if (odd) refused([&] { o.backward(model_->loss({.units = 1, .seed = 1})); });
        return refused([&] { o.step(); });
      case Action::kBrokenBackward:
        if (odd) break_backward();
        refused([&] { o.grad_norm(); });
        return o.zero_grad();
      case Action::kSaveWithGradients:
        return refused([&] { o.save_checkpoint(folder_ + "/refused"); });
      case Action::kUnevenZeroGrad: {
        const auto& passes = event.passes[group_.rank()];
        const bool some = std::any_of(passes.begin(), passes.end(), needs_round);
        if (!some) o.zero_grad();
        return refused([&] { some ? o.zero_grad() : void(o.grad_norm()); });
      }
      default:
        TORCH_CHECK(false, "unknown action");
    }
  }

  void break_backward() {
    if (optimizer_->options().overlap_gather()) optimizer_->wait_for(*model_);
    const unsigned hook = model_->layers[0]->bias.register_hook(
        [](const at::Tensor&) { throw std::runtime_error("a hook that throws"); });
    bool threw = false;
    try {
      optimizer_->backward(model_->loss({.units = s_.all_units(), .seed = 1}));
    } catch (const std::exception&) {
      threw = true;
    }
    model_->layers[0]->bias.remove_hook(hook);
    TORCH_CHECK(threw, "backward(): expected the error of a hook, got none");
  }

  void compare(const Event& event, const Expected& expected) {
    expect_gradients(event, expected);
    const bool overlaps = optimizer_->options().overlap_gather();
    const unsigned look = overlaps ? event.look : s_.all_units();
    wait_for(look);
    const auto& managed = model_->managed();
    for (size_t i = 0; i < managed.size(); ++i) {
      if ((look >> managed[i].unit & 1) == 0) continue;
      expect_close(managed[i].tensor, expected.parameters[i], managed[i].name);
    }
    expect_close(model_->frozen, expected.frozen.to(at::kDouble), "frozen parameter");
    expect_close(model_->buffer, expected.buffer.to(at::kDouble), "buffer");
    expect_equal(optimizer_->loss_scale(), expected.loss_scale, "loss_scale()");
  }

  void look_at_average(const Event& event, const Expected& expected) {
    const auto& managed = model_->managed();
    auto guard = optimizer_->use_ema();
    for (size_t i = 0; i < managed.size(); ++i) {
      expect_close(managed[i].tensor, expected.averages[i], "average of " + managed[i].name);
    }
    if (event.seed % 2 == 0) expect_refusal("a second guard", [&] { optimizer_->use_ema().end(); });
    guard.end();
    for (size_t i = 0; i < managed.size(); ++i) {
      expect_close(managed[i].tensor, expected.parameters[i], managed[i].name + " after the guard");
    }
  }

  // What p.grad() reads after calls that say so.
  void expect_gradients(const Event& event, const Expected& expected) {
    std::vector<at::Tensor> averages(expected.gradients.size());
    switch (event.action) {
      case Action::kStep:
      case Action::kZeroGrad:
      case Action::kModuleZeroGrad:
      case Action::kBrokenBackward:
        break;  // nothing
      case Action::kReduce:
      case Action::kNorm:
      case Action::kClip:
      case Action::kGradient:
        if (optimizer_->options().stage() == 2) return expect_markers();
        averages = expected.gradients;
        break;
      default:
        return;
    }
    for (size_t i = 0; i < averages.size(); ++i) {
      const auto& p = model_->managed()[i];
      expect_close(p.tensor.grad(), averages[i], p.name + ".grad()");
    }
  }

  void expect_markers() {
    for (const auto& p : model_->managed()) {
      const at::Tensor& grad = p.tensor.grad();
      TORCH_CHECK(!grad.defined() || grad.isnan().all().item<bool>(), p.name,
                  ": expected NaN in p.grad(), or nothing, got ", grad);
    }
  }

  const CallSequence& s_;
  const Group group_;
  const std::string folder_;
  uint64_t generation_ = 0;
  std::map<size_t, int64_t> rows_;  // of layers that were resized
  SequenceModel model_{nullptr};
  std::unique_ptr<ZeroOptimizer> optimizer_;
};

}  // namespace

void run_sequence(const CallSequence& sequence, const Group& group, const std::string& folder) {
  const std::vector<Expected> expected = run_plain(sequence, group.rank());
  SequenceRank rank(sequence, group, folder);
  for (size_t i = 0; i < sequence.events.size(); ++i) {
    try {
      rank.run(sequence.events[i], expected[i]);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "event ", i, " (", name_of(sequence.events[i].action), ") on rank ",
                  group.rank(), ": ", error.what_without_backtrace());
    }
  }
}

}  // namespace zero
