// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/zero_optimizer_impl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>

#include "kernels/cast.h"
#include "zero/device_stream.h"
#include "zero/replica_check.h"

namespace zero {
namespace {

// What a pool keeps between steps: the buckets of the exchanges in flight, both
// directions, and two that are being filled.
constexpr int64_t kBuffersKept = 6;

std::vector<ParameterInfo> infos(const ParameterTable& table) {
  std::vector<ParameterInfo> result;
  for (const Parameter& p : table.parameters()) {
    result.push_back({p.tensor.numel(), p.tensor.scalar_type(), 0});
  }
  return result;
}

int64_t kept_bytes(const Plan& plan) {
  int64_t largest = 0;
  for (const Bucket& bucket : plan.buckets) {
    largest = std::max<int64_t>(
        largest, plan.bucket_numel(bucket) *
                     static_cast<int64_t>(c10::elementSize(plan.arena_of(bucket).dtype)));
  }
  return kBuffersKept * largest;
}

LossScaler make_scaler(const ParameterTable& table, const ZeroOptions& options) {
  if (options.loss_scaler()) return LossScaler(*options.loss_scaler());
  for (const Parameter& p : table.parameters()) {
    if (p.tensor.scalar_type() == at::kHalf) return LossScaler(LossScalerOptions());
  }
  return {};
}

class AfterAccumulation final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterAccumulation(std::function<void()> call) : call_(std::move(call)) {}
  void operator()(const torch::autograd::Variable&) override { call_(); }

 private:
  std::function<void()> call_;
};

}  // namespace

std::string error_text(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours != nullptr ? ours->what_without_backtrace() : error.what();
}

OptimizerLinks::OptimizerLinks(const Group& group)
    : control(group.make_communicator("control", Purpose::kControl)),
      data(group.make_communicator("data", Purpose::kData)),
      channel(*control, group) {}

ZeroOptimizer::Impl::Impl(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> inner,
                          Group group, const ZeroOptions& options,
                          std::unique_ptr<OptimizerLinks> links, ParameterTable parameter_table)
    : module(module),
      group(std::move(group)),
      options(options),
      links(std::move(links)),
      table(std::move(parameter_table)),
      plan(make_plan(infos(table), {this->group.world_size()},
                     {options.layout(), options.bucket_bytes()})),
      pool(table.parameters().front().tensor.device(), kept_bytes(plan)),
      arena(plan, table, pool),
      reducer(plan, table, {{this->links->data.get(), nullptr}}, pool,
              {options.reduce_dtype(), options.no_sync_fp32()}),
      full_gradients(plan, table, {{this->links->data.get(), nullptr}}, pool),
      // The masters are read here, so rank 0's values must have arrived.
      shards((broadcast_from_first(arena.broadcast_tensors(), "parameters"),
              ShardOptimizer::Shards{plan, table, {this->group.rank()}, arena, reducer}),
             std::move(inner), options.fused()),
      scaler(make_scaler(table, options)) {
  norm_weights.assign(shards.inner().param_groups().size(), 1.0);
  reducer.set_scale(1.0 / scaler.scale());
  std::vector<at::Tensor> others;
  for (const auto* list : {&table.frozen(), &table.buffers()}) {
    for (const NamedTensor& item : *list) others.push_back(item.tensor);
  }
  broadcast_from_first(others, "frozen parameters and buffers");
  table.remember();
  install_hooks();
}

ZeroOptimizer::Impl::~Impl() {
  remove_hooks();
  // Without this the reducer's worker would wait for peers until the timeout.
  if (!failure.empty() || reducer.rounds_needed() > 0) {
    links->channel.announce("its optimizer was destroyed with gradients on their way");
    links->data->abort();
    links->control->abort();
  }
}

void ZeroOptimizer::Impl::report(const std::string& text) {
  problem = text;
  links->channel.announce(text);
  TORCH_CHECK(false, "rank ", group.rank(), ": ", text);
}

void ZeroOptimizer::Impl::check_usable() const {
  TORCH_CHECK(failure.empty(), "rank ", group.rank(),
              ": expected a working optimizer, got one whose communication failed earlier; end "
              "all ranks and resume from a checkpoint. The first failure was: ",
              failure);
}

void ZeroOptimizer::Impl::guarded(const std::function<void()>& body) {
  check_usable();
  try {
    body();
  } catch (const std::exception& error) {
    if (links->data->failed().empty() && links->control->failed().empty()) throw;
    failure = error_text(error) + links->channel.announced();
    links->channel.announce("communication failed: " + error_text(error));
    TORCH_CHECK(false, "rank ", group.rank(), ": ", failure);
  }
}

Agreement ZeroOptimizer::Impl::agree(Call call, int32_t detail,
                                     const std::function<void()>& check) {
  std::string text;
  text.swap(problem);
  if (text.empty() && call != Call::kZeroGrad) text = broken_backward;
  if (text.empty() && *no_sync_active) {
    text = std::string(call_name(call)) +
           " inside no_sync: expected no guard to be alive, got an active one; end its scope first";
  }
  if (text.empty() && check) {
    try {
      check();
    } catch (const std::exception& error) {
      text = error_text(error);
    }
  }
  return links->channel.agree(call, detail, text, reducer.rounds_needed(), reducer.used());
}

void ZeroOptimizer::Impl::verify_untouched() const {
  table.verify(module);
  reducer.verify();
}

void ZeroOptimizer::Impl::install_hooks() {
  for (size_t i = 0; i < table.parameters().size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor& tensor = table.parameters()[i].tensor;
    tensor.mutable_grad().reset();
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<AfterAccumulation>([this, index] { after_accumulation(index); }));
    if (options.stage() == 1 && options.stage1_full_gradients()) {
      accumulation_hooks.push_back(
          tensor.register_hook([this, index](const at::Tensor&) { before_accumulation(index); }));
    }
  }
}

void ZeroOptimizer::Impl::remove_hooks() noexcept {
  try {
    for (size_t i = 0; i < table.parameters().size(); ++i) {
      const at::Tensor& tensor = table.parameters()[i].tensor;
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
      if (i < accumulation_hooks.size()) tensor.remove_hook(accumulation_hooks[i]);
    }
  } catch (...) {  // a tensor that lost its autograd state has no hooks either
  }
}

void ZeroOptimizer::Impl::before_accumulation(int64_t parameter) {
  reducer.set_average_aside(parameter);
}

void ZeroOptimizer::Impl::after_accumulation(int64_t parameter) {
  if (!table.parameters()[parameter].tensor.grad().defined()) return;
  check_usable();
  if (clipped) {
    report(
        "backward() between clip_grad_norm_() and step(): expected step() next, got a gradient "
        "of " +
        table.parameters()[parameter].name + "; clip after the last backward pass");
  }
  measured.reset();
  try {
    if (*no_sync_active) {
      reducer.gradient_kept(parameter);
    } else {
      reducer.gradient_ready(parameter);
    }
  } catch (const std::exception& error) {
    broken_backward = error_text(error);
    report(broken_backward);
  }
}

void ZeroOptimizer::Impl::run_backward(const std::function<void()>& backward) {
  check_usable();
  if (clipped) {
    report(
        "backward() between clip_grad_norm_() and step(): expected step() next; clip after the "
        "last backward pass");
  }
  const bool sync = !*no_sync_active;
  if (sync) reducer.begin_pass();
  try {
    backward();
  } catch (const std::exception& error) {
    broken_backward =
        "a backward pass ended with an exception, so gradients are incomplete; call "
        "zero_grad() on all ranks and repeat the batch. It was: " +
        error_text(error);
    links->channel.announce(broken_backward);
    throw;
  }
  if (sync) reducer.close_round();
}

void ZeroOptimizer::Impl::reduce(const Agreement& agreement) {
  reducer.complete(agreement.rounds);
  const bool gather = options.stage() == 1 && options.stage1_full_gradients();
  if (gather && agreement.rounds > gathered_rounds) {
    full_gradients.gather(reducer, agreement.used);
    gathered_rounds = agreement.rounds;
  }
}

void ZeroOptimizer::Impl::measure(double norm_type) {
  if (measured && measured_type == norm_type) return;
  measured = shard_norm(shards.segments(), norm_weights, norm_type, *links->data);
  measured_type = norm_type;
}

at::Tensor ZeroOptimizer::Impl::clip(std::optional<double> max_norm, double norm_type) {
  // Arguments must agree, since the coefficient is computed on every rank.
  const double key = max_norm.value_or(-1.0) * 1e3 + (std::isinf(norm_type) ? 7.0 : norm_type);
  const auto detail = static_cast<int32_t>(std::hash<double>()(key) & 0x7fffffff);
  const Agreement agreement = agree(Call::kClipGradNorm, detail, [&] {
    TORCH_CHECK(!max_norm || *max_norm > 0, "max_norm: expected a number above 0, got ", *max_norm,
                "; pass nullopt to measure only");
    TORCH_CHECK(norm_type > 0, "norm_type: expected a number above 0 or infinity, got ", norm_type);
    verify_untouched();
  });
  reduce(agreement);
  if (agreement.rounds == 0) return at::scalar_tensor(0.0, at::kDouble);
  measure(norm_type);
  const double norm = measured->norm * coefficient;
  if (max_norm) {
    clipped = true;
    // As torch's clamp: a NaN stays a NaN.
    const double factor = *max_norm / (norm + 1e-6);
    coefficient *= factor > 1.0 ? 1.0 : factor;
  }
  return at::scalar_tensor(norm,
                           shards.segments().empty()
                               ? at::TensorOptions().dtype(at::kDouble)
                               : shards.segments().front().master.options().dtype(at::kDouble));
}

void ZeroOptimizer::Impl::step(const ParamGroups& groups) {
  const Agreement agreement = agree(Call::kStep, 0, [&] {
    for (size_t g = 0; g < groups.size(); ++g) {
      TORCH_CHECK(g < group_sizes.size() && groups[g].params().size() == group_sizes[g],
                  "parameter group ", g,
                  ": expected the groups of construction, got one that was "
                  "added or changed afterwards (",
                  groups[g].params().size(), " parameters); make a new optimizer");
    }
    shards.push_options(groups);
    verify_untouched();
  });
  skipped = false;
  if (agreement.rounds == 0) {
    finish_step();
    return;
  }
  reduce(agreement);
  update(agreement);
  finish_step();
  ++(skipped ? skipped_steps : steps);
  scaler.update(skipped);
  reducer.set_scale(1.0 / scaler.scale());
  const int64_t every = options.check_replicas_every();
  if (every > 0 && (steps + skipped_steps) % every == 0) check_replicas_now();
}

void ZeroOptimizer::Impl::update(const Agreement& agreement) {
  if (options.skip_nonfinite()) {
    if (!measured) measure(2.0);
    skipped = measured->nonfinite;
    if (skipped) return;
  }
  gather_rows([&](const ShardOptimizer::RowWritten& written) {
    shards.update(agreement.used, static_cast<float>(coefficient), written);
  });
  for (size_t i = 0; i < agreement.used.size(); ++i) {
    // A graph that saved the old values must notice, as with any in-place update.
    if (agreement.used[i] != 0) torch::autograd::impl::bump_version(table.parameters()[i].tensor);
  }
  table.remember();
}

void ZeroOptimizer::Impl::gather_rows(
    const std::function<void(const ShardOptimizer::RowWritten&)>& write) {
  struct Gather {
    int64_t bucket;
    at::Tensor rows;
    Pending pending;
  };
  std::vector<Gather> gathers;
  write([&](int64_t bucket, const at::Tensor& rows) {
    gathers.push_back(
        {bucket, rows,
         links->data->gather_rows(rows, "parameter bucket " + std::to_string(bucket))});
  });
  for (Gather& g : gathers) {
    g.pending.wait();
    arena.publish(g.bucket, g.rows);
  }
}

void ZeroOptimizer::Impl::finish_step() {
  for (size_t i = 0; i < table.parameters().size(); ++i) {
    reducer.set_average_aside(static_cast<int64_t>(i));
  }
  reducer.consume();
  gathered_rounds = 0;
  measured.reset();
  clipped = false;
  coefficient = 1.0;
}

void ZeroOptimizer::Impl::zero_grad() {
  const bool local_only = reducer.rounds_needed() == 0 && !reducer.any_used() && !clipped &&
                          broken_backward.empty() && problem.empty();
  if (!local_only) {
    const Agreement agreement = agree(Call::kZeroGrad, 0);
    reducer.complete(agreement.rounds);
    broken_backward.clear();
  }
  finish_step();
  for (const Parameter& p : table.parameters()) p.tensor.mutable_grad().reset();
}

at::Tensor ZeroOptimizer::Impl::gather_parameter(int64_t index, bool gradient) {
  const Agreement agreement = agree(gradient ? Call::kGradient : Call::kMaster,
                                    static_cast<int32_t>(index), [&] { verify_untouched(); });
  if (gradient) {
    reduce(agreement);
    if (agreement.used[index] == 0) return {};
  }
  const Parameter& p = table.parameters()[index];
  at::Tensor result = at::empty_strided(p.tensor.sizes(), p.strides,
                                        p.tensor.options().dtype(at::kFloat).requires_grad(false));
  for (int64_t b : plan.parameter_buckets[index]) {
    const Bucket& bucket = plan.buckets[b];
    at::Tensor rows = pool.take(plan.bucket_numel(bucket), at::kFloat)
                          .view({group.world_size(), bucket.row_numel});
    rows.select(0, group.rank()).copy_(gradient ? reducer.shard(b) : shards.master_row(b));
    links->data->gather_rows(rows, std::string(gradient ? "gradient" : "master") + " of " + p.name)
        .wait();
    for (const Slot& slot : bucket.slots) {
      if (slot.parameter != index) continue;
      for (const Piece& piece : plan.pieces(bucket, slot)) {
        kernels::cast_copy(rows.const_data_ptr<float>() + piece.bucket_begin, at::kFloat,
                           result.mutable_data_ptr<float>() + piece.parameter_begin, at::kFloat,
                           piece.numel, false, current_stream(rows.device()));
      }
    }
    pool.give(rows);
  }
  return result;
}

void ZeroOptimizer::Impl::broadcast_from_first(const std::vector<at::Tensor>& tensors,
                                               const char* what) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || group.world_size() == 1) continue;
    // As bytes, since not every transport knows every dtype.
    at::Tensor flat = tensor.detach().contiguous().reshape({-1}).view(at::kByte);
    links->data->broadcast(flat, 0, what).wait();
    if (!tensor.is_contiguous()) {
      tensor.detach().copy_(flat.view(tensor.scalar_type()).view(tensor.sizes()));
    }
  }
}

void ZeroOptimizer::Impl::check_replicas_now() {
  check_working_parameters(table, shards, group.rank(), *links->control);
}

void ZeroOptimizer::Impl::refresh_masters() {
  agree(Call::kRefreshMasters, 0, [&] {
    for (size_t i = 0; i < table.parameters().size(); ++i) {
      const Parameter& p = table.parameters()[i];
      const auto dtype = plan.arenas[plan.parameter_arena[i]].dtype;
      const at::Device device = reducer.shard(0).device();
      TORCH_CHECK(p.tensor.scalar_type() == dtype && p.tensor.device() == device, "parameter ",
                  p.name, ": expected dtype ", dtype, " on ", device, " as at construction, got ",
                  p.tensor.scalar_type(), " on ", p.tensor.device(),
                  "; move it back before refreshing, or make a new optimizer");
    }
  });
  at::NoGradGuard no_grad;
  arena.attach();
  broadcast_from_first(arena.broadcast_tensors(), "parameters");
  shards.read_masters();
  table.remember();
}

}  // namespace zero
