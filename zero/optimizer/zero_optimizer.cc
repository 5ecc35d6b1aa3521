// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/zero_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <functional>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/base/error_text.h"
#include "zero/base/normal_tensors.h"
#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/listed_module.h"
#include "zero/optimizer/recovery.h"
#include "zero/optimizer/replanning.h"
#include "zero/training/repair.h"

namespace zero {
namespace {

// The groups that users see: the inner optimizer's, tied parameters once.
std::vector<torch::optim::OptimizerParamGroup> visible_groups(
    const torch::optim::Optimizer* inner) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (inner == nullptr) return groups;
  for (const auto& group : inner->param_groups()) {
    groups.emplace_back(each_once(group.params()), group.options().clone());
  }
  return groups;
}

// Returns what lives as long as an optimizer asks `rule`. Throws for one that another asks: it
// would judge the norms of either by those of both.
std::shared_ptr<const void> used_alone(const std::shared_ptr<SkipRule>& rule, int rank) {
  // Never destroyed: an optimizer may end with the process.
  static auto& mutex = *new std::mutex;
  static auto& used = *new std::set<const SkipRule*>;
  if (rule == nullptr) return nullptr;
  const std::lock_guard lock(mutex);
  TORCH_CHECK(used.insert(rule.get()).second, "rank ", rank,
              ": skip_if: expected a rule of its own for each optimizer, got one that another "
              "ZeroOptimizer asks; make one for each");
  return {rule.get(), [rule](const void*) {
            const std::lock_guard lock(mutex);
            used.erase(rule.get());
          }};
}

// Runs a part of a `call` that each rank makes alone. Its errors say which, as those of calls on
// which ranks agree do.
void run_alone(const Engine& engine, const char* call, const std::function<void()>& part) {
  try {
    part();
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) throw;
    TORCH_CHECK(false, "rank ", engine.protocol.rank(), ": ", call, "(): ", error_text(error));
  }
}

}  // namespace

struct ZeroOptimizer::Impl {
  // Runs a call of the present engine, and returns what it returns.
  template <typename Body>
  auto run(const Body& body) {
    const at::NoGradGuard no_grad;
    Engine& now = *engine;
    using Result = decltype(body(now));
    if constexpr (std::is_void_v<Result>) {
      now.protocol.run_call([&] { body(now); });
    } else {
      Result result;
      now.protocol.run_call([&] { result = body(now); });
      return result;
    }
  }

  std::shared_ptr<torch::nn::Module> listed;  // null where the module is the caller's
  std::shared_ptr<const void> rule_use;       // of ZeroOptions::skip_if()
  std::shared_ptr<Engine> engine;  // recover() and changes of parameters put another one here
  Checkpoints checkpoints{engine};
  Recovery recovery{engine, checkpoints.run()};
  Replanning replanning{engine, recovery, checkpoints};
};

ZeroOptimizer::ZeroOptimizer(torch::nn::Module& module,
                             std::unique_ptr<torch::optim::Optimizer> inner, Group group,
                             ZeroOptions options)
    : torch::optim::Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(),
          inner ? inner->defaults().clone() : std::make_unique<torch::optim::OptimizerOptions>()),
      impl_(std::make_unique<Impl>()) {
  const NormalTensors normal;
  impl_->rule_use = used_alone(options.skip_if(), group.rank());
  // Before the inner optimizer gets masters instead.
  auto visible = visible_groups(inner.get());
  if (group.joins()) {
    impl_->recovery.join(module, inner, group, options, visible);
  } else {
    impl_->engine = Engine::make(module, inner, group, options, Engine::Frozen::kUnmanaged);
    impl_->engine->protocol.run_call([&] { impl_->recovery.start(visible); });
  }
  param_groups_ = std::move(visible);
  impl_->engine->early.read_options_of(&param_groups_);
}

ZeroOptimizer::ZeroOptimizer(std::shared_ptr<torch::nn::Module> module,
                             std::unique_ptr<torch::optim::Optimizer> inner, Group group,
                             ZeroOptions options)
    : ZeroOptimizer(*module, std::move(inner), std::move(group), std::move(options)) {
  impl_->listed = std::move(module);
}

ZeroOptimizer::ZeroOptimizer(const NamedTensors& parameters,
                             std::unique_ptr<torch::optim::Optimizer> inner, Group group,
                             ZeroOptions options, const NamedTensors& buffers)
    : ZeroOptimizer(listed_module(parameters, buffers), std::move(inner), std::move(group),
                    std::move(options)) {}

ZeroOptimizer::~ZeroOptimizer() {
  // See own_process.h: a forked child keeps what is its parent's.
  if (impl_ && !impl_->engine->protocol.in_own_process()) static_cast<void>(impl_.release());
}

void ZeroOptimizer::backward(const at::Tensor& loss) { impl_->engine->passes.run(loss); }

void ZeroOptimizer::backward(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& output_gradients, bool retain_graph) {
  impl_->engine->passes.run(outputs, output_gradients, retain_graph);
}

c10::integer_range<int64_t> ZeroOptimizer::micro_batches() const {
  const MicroBatchSums* const micro_batches = impl_->engine->reducer.micro_batches();
  TORCH_CHECK(
      micro_batches != nullptr,
      "micro_batches(): expected ZeroOptions::micro_batches, which says how many there are, "
      "got 0; construct the optimizer with it");
  return c10::irange(micro_batches->begin(), micro_batches->end());
}

at::Tensor ZeroOptimizer::scale_loss(const at::Tensor& loss) const {
  return impl_->engine->passes.scale_loss(loss);
}

ZeroOptimizer::NoSync::NoSync(NoSync&& other) noexcept : active_(std::move(other.active_)) {
  other.active_ = nullptr;
}

ZeroOptimizer::NoSync::~NoSync() {
  if (active_) *active_ = false;
}

ZeroOptimizer::NoSync ZeroOptimizer::no_sync(bool enabled) {
  if (!enabled) return NoSync(nullptr);
  CallProtocol& protocol = impl_->engine->protocol;
  protocol.check_usable();
  if (impl_->engine->reducer.micro_batches() != nullptr) {
    protocol.throw_misuse(
        "no_sync with ZeroOptions::micro_batches: expected none, since gradients are sent after "
        "the last of this rank's micro-batches, got a guard; leave it out");
  }
  if (impl_->engine->options.update_in_backward()) {
    protocol.throw_misuse(
        "no_sync with update_in_backward(true): expected one backward pass in a step, got a guard; "
        "leave it out, or make the optimizer without that option");
  }
  if (protocol.in_no_sync()) {
    protocol.throw_misuse(
        "no_sync inside no_sync: expected one guard at a time, got a second one; "
        "let the first go out of scope");
  }
  *protocol.no_sync() = true;
  return NoSync(protocol.no_sync());
}

void ZeroOptimizer::reduce_gradients() {
  impl_->run([](Engine& engine) { engine.reduce_gradients(); });
}

at::Tensor ZeroOptimizer::clip_grad_norm_(std::optional<double> max_norm, double norm_type) {
  return impl_->run([&](Engine& engine) { return engine.clip(max_norm, norm_type); });
}

void ZeroOptimizer::clip_grad_value_(double clip_value) {
  impl_->run([&](Engine& engine) { engine.clip_value(clip_value); });
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable(true);
    loss = closure();
  }
  impl_->run([&](Engine& engine) {
    Recovery& recovery = impl_->recovery;
    const std::string whole = recovery.before_step();
    engine.step(
        param_groups_, [&] { recovery.check_step(); }, whole);
    recovery.after_step(param_groups_);
  });
  return loss;
}

void ZeroOptimizer::refresh_learning_rates() {
  impl_->run([&](Engine& engine) {
    // A replay runs on without an error when its collectives are aborted.
    engine.comms->check();
    run_alone(engine, "refresh_learning_rates",
              [&] { engine.shards.groups().refresh_rates(param_groups_); });
  });
}

void ZeroOptimizer::wait_for(const torch::nn::Module& module) {
  impl_->run([&](Engine& engine) { engine.gathers.finish_those_of(module); });
}

void ZeroOptimizer::wait_for(const at::Tensor& parameter) {
  impl_->run([&](Engine& engine) {
    run_alone(engine, "wait_for", [&] { engine.table.index_or_throw(parameter); });
    engine.gathers.finish_that_of(parameter);
  });
}

void ZeroOptimizer::zero_grad(bool set_to_none) {
  impl_->run([&](Engine& engine) { engine.zero_grad(set_to_none); });
}

bool ZeroOptimizer::step_skipped() const { return impl_->engine->record.counts().skipped; }

double ZeroOptimizer::loss_scale() const {
  impl_->engine->record.follow_loss_scale();
  return impl_->engine->record.scaler().scale();
}

at::Tensor ZeroOptimizer::gradient(const at::Tensor& parameter) {
  return impl_->run([&](Engine& engine) { return gather_parameter(engine, parameter, true); });
}

at::Tensor ZeroOptimizer::master(const at::Tensor& parameter) {
  return impl_->run([&](Engine& engine) { return gather_parameter(engine, parameter, false); });
}

struct ZeroOptimizer::EmaGuard::Use {
  std::weak_ptr<Engine> engine;  // none after recover()
};

ZeroOptimizer::EmaGuard ZeroOptimizer::use_ema() {
  impl_->run([](Engine& engine) { zero::use_ema(engine); });
  return EmaGuard(std::make_shared<EmaGuard::Use>(impl_->engine));
}

ZeroOptimizer::EmaGuard::~EmaGuard() {
  if (!use_) return;
  if (const auto engine = use_->engine.lock()) end_ema_or_close(*engine);
}

void ZeroOptimizer::EmaGuard::end() {
  const auto engine = use_ ? use_->engine.lock() : nullptr;
  if (!engine || !engine->protocol.ema_in_use()) return;
  at::NoGradGuard no_grad;
  engine->protocol.run_call([&] { end_ema(*engine); });
  use_.reset();
}

void ZeroOptimizer::freeze(const std::vector<at::Tensor>& parameters) {
  impl_->replanning.freeze(parameters, param_groups_);
}

void ZeroOptimizer::unfreeze(const std::vector<at::Tensor>& parameters,
                             std::optional<size_t> param_group) {
  impl_->replanning.unfreeze(parameters, param_group, param_groups_);
}

void ZeroOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  impl_->replanning.add_param_group(param_group, param_groups_);
}

void ZeroOptimizer::resize_rows(const std::vector<ResizedRows>& changes) {
  const NormalTensors normal;
  impl_->replanning.resize_rows(changes, param_groups_);
}

void ZeroOptimizer::save_checkpoint(const std::string& folder, const SaveOptions& options) {
  impl_->run([&](Engine&) { impl_->checkpoints.save(folder, options, param_groups_); });
}

std::unique_ptr<PendingCheckpoint> ZeroOptimizer::save_checkpoint_async(
    const std::string& folder, const SaveOptions& options) {
  return impl_->run(
      [&](Engine&) { return impl_->checkpoints.save_async(folder, options, param_groups_); });
}

LoadReport ZeroOptimizer::load_checkpoint(const std::string& folder, const LoadOptions& options) {
  return impl_->run([&](Engine&) {
    impl_->recovery.finish();
    LoadReport report = impl_->checkpoints.load(folder, options, param_groups_);
    impl_->recovery.protect_at_once(param_groups_, "load_checkpoint(" + folder + ")");
    return report;
  });
}

std::optional<std::string> ZeroOptimizer::latest_checkpoint(const std::string& parent) {
  return impl_->run([&](Engine&) { return impl_->checkpoints.latest(parent); });
}

void ZeroOptimizer::load_plain_state(const torch::optim::Optimizer& plain) {
  impl_->run([&](Engine& engine) { zero::load_plain_state(engine, plain); });
}

void ZeroOptimizer::load_plain_state(const std::string& path) {
  impl_->run([&](Engine& engine) { zero::load_plain_state(engine, path, param_groups_); });
}

RecoveryReport ZeroOptimizer::recover(const std::string& checkpoints) {
  const NormalTensors normal;
  const at::NoGradGuard no_grad;
  return impl_->recovery.recover(checkpoints, param_groups_);
}

void ZeroOptimizer::refresh_master_parameters() { impl_->run(refresh_masters); }
void ZeroOptimizer::refresh_working_parameters() { impl_->run(refresh_working); }
void ZeroOptimizer::broadcast_buffers() { impl_->run(zero::broadcast_buffers); }
void ZeroOptimizer::check_replicas() { impl_->run(zero::check_replicas); }

MemoryReport ZeroOptimizer::memory() const {
  MemoryReport report;
  const Engine& engine = *impl_->engine;
  for (size_t a = 0; a < engine.plan.arenas.size(); ++a) {
    const Arena& arena = engine.plan.arenas[a];
    report.working_parameters +=
        arena.layout->full_numel(arena) * static_cast<int64_t>(c10::elementSize(arena.dtype));
  }
  report.master_parameters = engine.shards.master_bytes();
  report.ema = engine.shards.ema_bytes();
  report.optimizer_state = engine.shards.state_bytes();
  report.gradient_shards = engine.reducer.shard_bytes();
  report.full_gradients = engine.full_gradients.bytes() + engine.reducer.local_bytes();
  report.buckets = engine.pool.held_bytes();
  report.peak_buckets = engine.pool.peak_bytes();
  report.unsent_gradients = engine.reducer.unsent_bytes();
  report.protected_steps = impl_->recovery.held_bytes();
  return report;
}

Stats ZeroOptimizer::stats() const {
  const Engine& engine = *impl_->engine;
  Stats stats;
  stats.data = engine.comms->data_traffic();
  stats.control = engine.comms->control_traffic();
  const StepCounts::Values made = engine.record.counts();
  stats.steps = made.steps;
  stats.skipped_steps = made.skipped_steps;
  stats.rounds = engine.reducer.rounds_sent();
  stats.copies = impl_->recovery.traffic();
  return stats;
}

const Plan& ZeroOptimizer::plan() const { return impl_->engine->plan; }
const Group& ZeroOptimizer::group() const { return impl_->engine->group(); }
const ZeroOptions& ZeroOptimizer::options() const { return impl_->engine->options; }
const torch::optim::Optimizer& ZeroOptimizer::inner() const {
  return std::as_const(*impl_->engine).shards.inner_with_counts();
}

void ZeroOptimizer::save(torch::serialize::OutputArchive&) const {
  TORCH_CHECK(false, "rank ", impl_->engine->comms->rank(),
              ": torch::save of a ZeroOptimizer: expected save_checkpoint(), since a torch archive "
              "would hold one rank's segments by address, without a checksum");
}

void ZeroOptimizer::load(torch::serialize::InputArchive&) {
  TORCH_CHECK(
      false, "rank ", impl_->engine->comms->rank(),
      ": torch::load of a ZeroOptimizer: expected load_checkpoint(), or for an archive of a plain "
      "optimizer torch::load into one and load_plain_state()");
}

}  // namespace zero
