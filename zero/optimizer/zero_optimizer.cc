// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/zero_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <unordered_set>

#include "bookkeeping/layout.h"
#include "zero/base/normal_tensors.h"
#include "zero/optimizer/impl.h"

namespace zero {
namespace {

// The groups that users see: the inner optimizer's, tied parameters once.
std::vector<torch::optim::OptimizerParamGroup> visible_groups(
    const torch::optim::Optimizer* inner) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (inner == nullptr) return groups;
  for (const auto& group : inner->param_groups()) {
    std::vector<at::Tensor> unique;
    std::unordered_set<const void*> known;
    for (const at::Tensor& tensor : group.params()) {
      if (known.insert(tensor.unsafeGetTensorImpl()).second) unique.push_back(tensor);
    }
    groups.emplace_back(std::move(unique), group.options().clone());
  }
  return groups;
}

}  // namespace

ZeroOptimizer::ZeroOptimizer(torch::nn::Module& module,
                             std::unique_ptr<torch::optim::Optimizer> inner, Group group,
                             ZeroOptions options)
    : torch::optim::Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(),
          inner ? inner->defaults().clone() : std::make_unique<torch::optim::OptimizerOptions>()) {
  const NormalTensors normal;
  // Before the inner optimizer gets masters instead.
  auto visible = visible_groups(inner.get());
  if (group.joins()) {
    impl_ = Impl::join(module, inner, group, options, visible);
    param_groups_ = std::move(visible);
    return;
  }
  impl_ = Impl::make(module, inner, group, options, Impl::Frozen::kUnmanaged);
  param_groups_ = std::move(visible);
  for (const auto& g : param_groups_) impl_->group_members.push_back(g.params());
  impl_->protocol.fail_stop([&] {
    impl_->start_protection(nullptr);
    if (impl_->protection) impl_->protect_at_once(param_groups_, "the constructor");
  });
}

ZeroOptimizer::~ZeroOptimizer() {
  // See own_process.h: a forked child keeps what is its parent's.
  if (impl_ && !impl_->protocol.in_own_process()) static_cast<void>(impl_.release());
}

void ZeroOptimizer::backward(const at::Tensor& loss) { impl_->passes.run(loss); }

void ZeroOptimizer::backward(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& output_gradients, bool retain_graph) {
  impl_->passes.run(outputs, output_gradients, retain_graph);
}

at::Tensor ZeroOptimizer::scale_loss(const at::Tensor& loss) const {
  return impl_->passes.scale_loss(loss);
}

ZeroOptimizer::NoSync::NoSync(NoSync&& other) noexcept : active_(std::move(other.active_)) {
  other.active_ = nullptr;
}

ZeroOptimizer::NoSync::~NoSync() {
  if (active_) *active_ = false;
}

ZeroOptimizer::NoSync ZeroOptimizer::no_sync(bool enabled) {
  if (!enabled) return NoSync(nullptr);
  CallProtocol& protocol = impl_->protocol;
  protocol.check_usable();
  if (protocol.in_no_sync()) {
    protocol.throw_misuse(
        "no_sync inside no_sync: expected one guard at a time, got a second one; "
        "let the first go out of scope");
  }
  *protocol.no_sync() = true;
  return NoSync(protocol.no_sync());
}

void ZeroOptimizer::reduce_gradients() {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->reduce_gradients(); });
}

at::Tensor ZeroOptimizer::clip_grad_norm_(std::optional<double> max_norm, double norm_type) {
  at::NoGradGuard no_grad;
  at::Tensor norm;
  impl_->protocol.fail_stop([&] { norm = impl_->clip(max_norm, norm_type); });
  return norm;
}

void ZeroOptimizer::clip_grad_value_(double clip_value) {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->clip_value(clip_value); });
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->step(param_groups_); });
  return loss;
}

void ZeroOptimizer::wait_for(const torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->gathers.finish_those_of(module); });
}

void ZeroOptimizer::zero_grad(bool) {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->zero_grad(); });
}

bool ZeroOptimizer::step_skipped() const { return impl_->record.counts().skipped; }

double ZeroOptimizer::loss_scale() const {
  impl_->record.follow_loss_scale();
  return impl_->record.scaler().scale();
}

at::Tensor ZeroOptimizer::gradient(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  at::Tensor result;
  impl_->protocol.fail_stop([&] { result = impl_->gather_parameter(parameter, true); });
  return result;
}

at::Tensor ZeroOptimizer::master(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  at::Tensor result;
  impl_->protocol.fail_stop([&] { result = impl_->gather_parameter(parameter, false); });
  return result;
}

void ZeroOptimizer::refresh_master_parameters() {
  impl_->protocol.fail_stop([&] { impl_->refresh_masters(); });
}

void ZeroOptimizer::refresh_working_parameters() {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->refresh_working(); });
}

void ZeroOptimizer::broadcast_buffers() {
  impl_->protocol.fail_stop([&] { impl_->broadcast_buffers(); });
}

void ZeroOptimizer::check_replicas() {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] { impl_->check_replicas(); });
}

MemoryReport ZeroOptimizer::memory() const {
  MemoryReport report;
  const Impl& impl = *impl_;
  for (size_t a = 0; a < impl.plan.arenas.size(); ++a) {
    const Arena& arena = impl.plan.arenas[a];
    report.working_parameters +=
        arena.layout->full_numel(arena) * static_cast<int64_t>(c10::elementSize(arena.dtype));
  }
  report.master_parameters = impl.shards.master_bytes();
  report.optimizer_state = impl.shards.state_bytes();
  report.gradient_shards = impl.reducer.shard_bytes();
  report.full_gradients = impl.full_gradients.bytes() + impl.reducer.local_bytes();
  report.buckets = impl.pool.held_bytes();
  report.peak_buckets = impl.pool.peak_bytes();
  report.unsent_gradients = impl.reducer.unsent_bytes();
  if (impl.protection) report.protected_steps = impl.protection->held_bytes();
  return report;
}

Stats ZeroOptimizer::stats() const {
  Stats stats;
  stats.data = impl_->comms->data_traffic();
  stats.control = impl_->comms->control_traffic();
  const StepCounts::Values made = impl_->record.counts();
  stats.steps = made.steps;
  stats.skipped_steps = made.skipped_steps;
  stats.rounds = impl_->reducer.rounds_sent();
  if (impl_->protection) stats.copies = impl_->protection->traffic();
  return stats;
}

const Plan& ZeroOptimizer::plan() const { return impl_->plan; }
const Group& ZeroOptimizer::group() const { return impl_->group; }
const ZeroOptions& ZeroOptimizer::options() const { return impl_->options; }
const torch::optim::Optimizer& ZeroOptimizer::inner() const { return impl_->shards.inner(); }

void ZeroOptimizer::save(torch::serialize::OutputArchive&) const {
  TORCH_CHECK(false, "rank ", impl_->comms->rank(),
              ": torch::save of a ZeroOptimizer: expected save_checkpoint(), since a torch archive "
              "would hold one rank's segments by address, without a checksum");
}

void ZeroOptimizer::load(torch::serialize::InputArchive&) {
  TORCH_CHECK(
      false, "rank ", impl_->comms->rank(),
      ": torch::load of a ZeroOptimizer: expected load_checkpoint(), or for an archive of a plain "
      "optimizer torch::load into one and load_plain_state()");
}

}  // namespace zero
