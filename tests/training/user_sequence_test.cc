// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Whatever users do to gradients and parameters themselves is as in plain torch, or refused on all
// ranks: seeded random programs on ranks that are threads, compared after every call.
//
//   ZERO_FUZZ_SEED=<seed>                     one program, printed
//   ZERO_FUZZ_FIRST=<seed> ZERO_FUZZ_COUNT=n  others than the default, or more
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <iostream>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fuzz_seeds.h"
#include "tests/support/run_ranks.h"
#include "tests/support/warnings.h"
#include "tests/training/plain_sequence.h"
#include "tests/training/plain_user_run.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kOverGloo = false;
constexpr uint64_t kPrograms = 60;
#else
constexpr bool kOverGloo = true;
constexpr uint64_t kPrograms = 300;
#endif

// Where ranks meet after each call. The last to come runs `between`.
class Meeting {
 public:
  Meeting(int ranks, std::function<void()> between) : ranks_(ranks), between_(std::move(between)) {}

  void arrive() {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!failed_, reason_);
    const int64_t round = round_;
    if (++arrived_ == ranks_) {
      arrived_ = 0;
      try {
        between_();
      } catch (const c10::Error& error) {
        fail_locked(error.what_without_backtrace());
        throw;
      }
      ++round_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return failed_ || round_ != round; });
    TORCH_CHECK(round_ != round, reason_);
  }
  void fail(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(reason);
  }
  // The first failure of any rank.
  std::string reason() const { return reason_; }

 private:
  void fail_locked(const std::string& reason) {
    if (!std::exchange(failed_, true)) reason_ = reason;
    changed_.notify_all();
  }

  const int ranks_;
  const std::function<void()> between_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  int64_t round_ = 0;
  bool failed_ = false;
  std::string reason_;
};

std::vector<at::Tensor> tensors_of(const UserModel& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : model->managed()) tensors.push_back(each.tensor);
  return tensors;
}

std::unique_ptr<torch::optim::Optimizer> make_inner(const UserProgram& p, const UserModel& model) {
  std::vector<at::Tensor> parameters = tensors_of(model);
  if (p.frozen_in_groups) parameters.push_back(model->frozen);
  return make_optimizer(p.inner, parameters);
}

// A rank with its ZeroOptimizers.
class UserRank {
 public:
  UserRank(const UserProgram& program, const Group& group, std::latch& connected)
      : p_(program), rank_(group.rank()) {
    for (int n = 0; n < p_.net_count(); ++n) {
      models_.emplace_back(p_.dtype, p_.seed + static_cast<uint64_t>(1000 * rank_ + 100 * n));
      if (p_.nets == Nets::kParts) {
        whole_.register_module("part" + std::to_string(n), models_.back().ptr());
      }
    }
    for (int n = 0; n < p_.net_count(); ++n) {
      if (p_.is_foreign(n)) {
        foreign_ = std::make_unique<torch::optim::SGD>(models_[n]->parameters(),
                                                       torch::optim::SGDOptions(0.125));
        continue;
      }
      torch::nn::Module& part = *models_[n];
      torch::nn::Module& module = p_.nets == Nets::kParts ? whole_ : part;
      optimizers_.push_back(
          std::make_unique<ZeroOptimizer>(module, make_inner(p_, models_[n]), group, p_.options));
    }
    if (!p_.recovers || p_.world_size == 1) return;
    const auto failing = group.make_communicator("failing", Purpose::kControl);
    connected.arrive_and_wait();
    failing->abort("as in a test");
    for (auto& o : optimizers_) o->recover();
  }

  const std::vector<UserModel>& models() const { return models_; }
  void wait_for_all() {
    for (size_t n = 0; n < optimizers_.size(); ++n) optimizers_[n]->wait_for(*models_[n]);
  }

  UserOutcome run(const UserEvent& event) {
    UserOutcome outcome;
    try {
      outcome.value = call(event);
    } catch (const c10::Error& error) {
      outcome.error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
    return outcome;
  }

 private:
  at::Tensor run_pass(const UserEvent& event) {
    if (event.form != PassForm::kUnwaited) wait_for_all();
    std::vector<ZeroOptimizer::NoSync> guards;
    for (size_t n = 0; n < optimizers_.size(); ++n) {
      guards.push_back(optimizers_[n]->no_sync((event.no_sync >> n & 1) != 0));
    }
    at::Tensor result;
    run_user_pass(event, models_, rank_, [&](const at::Tensor& loss, bool retain, bool create) {
      result = loss;
      if (event.driver < 0) {
        if (!loss.requires_grad()) return;
        const bool scaled = p_.loss_scale != 1.0 || event.seed % 2 == 0;
        at::Tensor own = loss;
        // All have one scale, and each must know that the loss has it.
        for (auto& o : optimizers_) {
          if (scaled) own = o->scale_loss(loss);
        }
        return own.backward({}, retain, create);
      }
      ZeroOptimizer& o = *optimizers_[event.driver];
      if (retain || (loss.requires_grad() && event.seed % 2 == 0)) {
        o.backward({loss}, {}, retain);
      } else {
        o.backward(loss);
      }
    });
    return result;
  }

  at::Tensor call(const UserEvent& event) {
    const int n = event.net;
    UserModel& model = models_[n];
    const at::Tensor p = model->managed()[event.parameter].tensor;
    if (p_.is_foreign(n) && event.call != UserCall::kPass) {
      foreign_->step();
      foreign_->zero_grad();
      return {};
    }
    if (event.call == UserCall::kPass) return run_pass(event);
    ZeroOptimizer& o = *optimizers_[n];
    switch (event.call) {
      case UserCall::kZeroGrad:
        o.zero_grad();
        return {};
      case UserCall::kReduce:
        o.reduce_gradients();
        return {};
      case UserCall::kNorm:
        return o.grad_norm(event.norm_type);
      case UserCall::kClip:
        return o.clip_grad_norm_(event.max_norm, event.norm_type);
      case UserCall::kGradient:
        return o.gradient(p);
      case UserCall::kMaster:
        return o.master(p);
      case UserCall::kCheckReplicas:
        o.check_replicas();
        return {};
      case UserCall::kRefreshWorking:
        o.refresh_working_parameters();
        return {};
      case UserCall::kStep:
        o.step();
        if (event.made_anew && p.numel() > 0 && values_are_masters()) {
          o.resize_rows({{p, at::arange(p.size(0))}});
        }
        return at::scalar_tensor(o.step_skipped(), at::kBool);
      case UserCall::kClosureStep: {
        const at::Tensor loss = o.step([&] { return run_pass(event); });
        TORCH_CHECK(loss.defined(), "step(closure): expected the closure's loss, got none");
        return at::scalar_tensor(o.step_skipped(), at::kBool);
      }
      default:
        edit(event, model, p);
        return {};
    }
  }

  // Else resize_rows() takes what was edited unseen for new values. What requires gradients without
  // an optimizer counts as another one's when an optimizer is made anew.
  bool values_are_masters() const {
    return p_.dtype == at::kFloat && p_.options.layout() != Layout::kPerParameter &&
           std::ranges::none_of(models_, [](auto& m) { return m->frozen.requires_grad(); });
  }

  void edit(const UserEvent& event, UserModel& model, const at::Tensor& p) {
    ZeroOptimizer& o = *optimizers_[event.net];
    wait_for_all();
    at::NoGradGuard no_grad;
    switch (event.call) {
      case UserCall::kModuleZeroGrad:
        return model->zero_grad();
      case UserCall::kPartZeroGrad:
        return model->first->zero_grad();
      case UserCall::kBaseZeroGrad:
        return static_cast<torch::optim::Optimizer&>(o).zero_grad();
      case UserCall::kModuleZeroValues:
        return model->zero_grad(/*set_to_none=*/false);
      case UserCall::kPutGrad:
        p.mutable_grad() = put_gradient(event, *model, p_.loss_scale, rank_);
        return;
      case UserCall::kNegateGrad:
        p.grad().neg_();
        return;
      case UserCall::kClampGrad:
        return torch::nn::utils::clip_grad_value_(tensors_of(model), 0.25);
      case UserCall::kResetGrad:
        return p.mutable_grad().reset();
      case UserCall::kRestoreGrad: {
        const at::Tensor grad = p.grad();
        p.mutable_grad().reset();
        p.mutable_grad() = grad;
        return;
      }
      case UserCall::kSetDataShape:
        own_data_ = p.data();
        return p.set_data(at::zeros({3, 7}, p.options().requires_grad(false)));
      case UserCall::kRestoreShape:
        return p.set_data(own_data_);
      case UserCall::kRefreshMasters:
        if (p_.dtype != at::kFloat) edit_all_parameters(event, *model, rank_);
        return o.refresh_master_parameters();
      default:
        return edit_parameters(p_, event, models_, rank_);
    }
  }

  const UserProgram& p_;
  const int rank_;
  std::vector<UserModel> models_;
  struct Whole : torch::nn::Module {
    using torch::nn::Module::register_module;
  } whole_;
  std::vector<std::unique_ptr<ZeroOptimizer>> optimizers_;
  std::unique_ptr<torch::optim::Optimizer> foreign_;
  at::Tensor own_data_;
};

// Empty, or what went wrong and after which calls.
std::string run_program(const UserProgram& program) {
  PlainUserRun plain(program);
  std::latch connected(program.world_size);
  std::vector<UserOutcome> outcomes(program.world_size);
  Meeting meeting(program.world_size, [&] { plain.follow(outcomes); });
  const bool overlaps = program.options.overlap_gather();
  const auto body = [&](const Group& group) {
    const int rank = group.rank();
    // Of passes without gradients and graphs of graphs, of which torch and the library warn.
    Warnings silent;
    try {
      UserRank own(program, group, connected);
      while (plain.task() != nullptr) {
        const UserTask& task = *plain.task();
        const bool look = task.event.look || !overlaps;
        outcomes[rank] = {};
        if (task.by_rank[rank] != Expectation::kNotCalled) outcomes[rank] = own.run(task.event);
        meeting.arrive();
        if (!look) continue;
        own.wait_for_all();
        plain.compare(rank, own.models());
      }
    } catch (const c10::Error& error) {
      meeting.fail(error.what_without_backtrace());
      throw;
    }
  };
  try {
    run_ranks(program.world_size, body, on(program.wire, std::chrono::seconds(20)));
  } catch (const std::exception& error) {
    const std::string reason = meeting.reason();
    return (reason.empty() ? std::string(error.what()) : reason) +
           "\nafter these calls (on each rank: w must work, r must be refused, ? either, - "
           "none)\n" +
           plain.log();
  }
  return {};
}

TEST(UserSequenceTest, EqualsPlainTorchOrIsRefusedOnAllRanks) {
  const Seeds seeds = chosen_seeds({1, kPrograms});
  std::cout << "seeds " << seeds.first << " to " << seeds.first + seeds.count - 1 << std::endl;
  std::string failed;
  int failures = 0;
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const UserProgram program = draw_user_program(seed);
    if (!kOverGloo && program.wire == Wire::kGloo) continue;
    const std::string text = describe(program);
    if (seeds.count == 1) std::cout << text << std::flush;
    print_if_aborted(&text, std::chrono::seconds(60));
    const std::string error = run_program(program);
    print_if_aborted(nullptr);
    if (error.empty()) continue;
    failed += " " + std::to_string(seed);
    if (++failures <= 10) {
      ADD_FAILURE() << error << "in " << text << "rerun with ZERO_FUZZ_SEED=" << seed;
    }
  }
  EXPECT_EQ(failed, "");
}

}  // namespace
}  // namespace zero
