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
#include <sstream>

#include "zero/bucket_memory.h"
#include "zero/inner_optimizer.h"
#include "zero/replica_check.h"
#include "zero/trace_range.h"

namespace zero {
namespace {

std::vector<int64_t> parameter_domains(const ParameterTable& table, const Domains& domains) {
  std::vector<int64_t> result;
  for (const Parameter& p : table.parameters()) result.push_back(domains.of_group[p.group]);
  return result;
}

Plan make_plan_of(const ParameterTable& table, const Domains& domains, const ZeroOptions& options) {
  std::vector<ParameterInfo> infos;
  for (const Parameter& p : table.parameters()) {
    infos.push_back({p.tensor.numel(), p.tensor.scalar_type(), domains.of_group[p.group]});
  }
  std::vector<int64_t> world_sizes;
  for (const Domain& d : domains.list) world_sizes.push_back(d.group.world_size());
  return make_plan(infos, world_sizes, {options.layout(), options.bucket_bytes()});
}

// This rank's number in each domain: the shards it owns.
std::vector<int64_t> ranks_in(const Domains& domains) {
  std::vector<int64_t> ranks;
  for (const Domain& d : domains.list) ranks.push_back(d.group.rank());
  return ranks;
}

// What a pool keeps between steps.
int64_t kept_bytes(const Plan& plan, const ZeroOptions& options) {
  int64_t largest = 0;
  for (const Bucket& bucket : plan.buckets) {
    const auto dtype = options.reduce_dtype().value_or(plan.arena_of(bucket).dtype);
    largest = std::max<int64_t>(
        largest, plan.bucket_numel(bucket) * static_cast<int64_t>(c10::elementSize(dtype)));
  }
  return ReductionQueue::kBuffersKept * largest;
}

LossScaler make_scaler(bool any_half, const ZeroOptions& options) {
  if (options.loss_scaler()) return LossScaler(*options.loss_scaler());
  // A scale that is never told of an overflow would only grow.
  if (!options.skip_nonfinite()) return {};
  return any_half ? LossScaler(LossScalerOptions()) : LossScaler();
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& list) {
  std::vector<at::Tensor> result;
  for (const NamedTensor& item : list) result.push_back(item.tensor);
  return result;
}

// What must be equal on all ranks before they are sent: a transport that is
// given different sizes aborts or hangs.
std::string shapes_of(const std::vector<NamedTensor>& list) {
  std::ostringstream text;
  for (const NamedTensor& item : list) {
    text << (item.tensor.is_same(list.front().tensor) ? "" : ", ") << item.name << " "
         << item.tensor.sizes() << " " << item.tensor.scalar_type();
  }
  return text.str();
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

ZeroOptimizer::Impl::Impl(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> inner,
                          Domains all_domains, const ZeroOptions& options,
                          std::unique_ptr<OptimizerLinks> links, ParameterTable parameter_table)
    : module(module),
      domains(std::move(all_domains)),
      group(domains.home),
      options(options),
      links(std::move(links)),
      table(std::move(parameter_table)),
      domain_of(parameter_domains(table, domains)),
      plan(make_plan_of(table, domains, options)),
      pool(table.parameters().front().tensor.device(), kept_bytes(plan, options)),
      arena(plan, table, pool),
      reducer(plan, table, this->links->domains, pool,
              {options.reduce_dtype(), options.no_sync_fp32()}),
      full_gradients(plan, table, this->links->domains, pool),
      // The masters are read here, so rank 0's values must have arrived.
      shards((broadcast_parameters(),
              ShardOptimizer::Shards{plan, table, ranks_in(domains), arena, reducer}),
             std::move(inner), options.fused()),
      scaler(make_scaler(this->links->any_half, options)),
      gathers(plan.buckets.size()) {
  reducer.set_scale(1.0 / scaler.scale());
  std::vector<at::Tensor> others;
  for (const auto* list : {&table.frozen(), &table.buffers()}) {
    for (const NamedTensor& item : *list) others.push_back(item.tensor);
  }
  broadcast_from_first(others, this->links->home, "frozen parameters and buffers");
  table.remember();
  install_hooks();
}

ZeroOptimizer::Impl::~Impl() {
  remove_hooks();
  try {
    finish_gathers();  // the module may outlive this
  } catch (...) {      // told by the communicator's failure
  }
  // Without this the reducer's worker would wait for peers until the timeout.
  if (!failure.empty() || reducer.rounds_needed() > 0) {
    if (failure.empty()) {
      links->channel.announce("its optimizer was destroyed with gradients on their way");
    }
    links->abort();
  }
}

void ZeroOptimizer::Impl::report(const std::string& text) {
  problem = text;
  links->channel.announce(text);
  TORCH_CHECK(false, "rank ", links->rank(), ": ", text);
}

void ZeroOptimizer::Impl::check_usable() const {
  TORCH_CHECK(failure.empty(), "rank ", links->rank(),
              ": expected a working optimizer, got one whose communication failed earlier; end "
              "all ranks and resume from a checkpoint. The first failure was: ",
              failure);
}

void ZeroOptimizer::Impl::guarded(const std::function<void()>& body) {
  check_usable();
  try {
    body();
  } catch (const std::exception& error) {
    if (links->failed().empty()) throw;
    failure = error_text(error) + links->channel.announced();
    links->channel.announce(error_text(error));
    TORCH_CHECK(false, "rank ", links->rank(), ": ", failure);
  }
}

Agreement ZeroOptimizer::Impl::agree(Call call, const std::function<void()>& check,
                                     const std::string& arguments) {
  finish_gathers();
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
  reducer.claim_gradients();
  refused = true;
  const std::vector<uint8_t>& used = reducer.used();
  if (domains.uniform) {
    Agreement agreement =
        links->channel.agree(call, arguments, text, reducer.rounds_needed(), used);
    refused = false;
    return agreement;
  }
  // The same number stands for different parameters on other ranks of the mesh.
  Agreement agreement = links->channel.agree(call, {}, text, reducer.rounds_needed(), {});
  refused = false;
  agreement.used = used;
  if (agreement.rounds > 0) links->agree_used(domain_of, agreement.used);
  return agreement;
}

void ZeroOptimizer::Impl::verify_untouched() const {
  table.verify();
  reducer.verify();
}

void ZeroOptimizer::Impl::verify_shapes() const {
  table.verify_shapes();
  if (options.layout() == Layout::kContiguous) return;
  for (const Parameter& p : table.parameters()) {
    TORCH_CHECK(p.tensor.is_non_overlapping_and_dense(), "parameter ", p.name,
                ": expected dense memory, got strides ", p.tensor.strides(), " for shape ",
                p.tensor.sizes(), "; make it contiguous");
  }
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
    // It must not travel with the clipped gradients after the error.
    table.parameters()[parameter].tensor.mutable_grad().reset();
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
    broken_backward = error_text(error) +
                      ". Gradients are incomplete: call zero_grad() on all ranks and repeat the "
                      "batch";
    links->channel.announce(broken_backward);
    TORCH_CHECK(false, "rank ", links->rank(), ": ", broken_backward);
  }
}

void ZeroOptimizer::Impl::run_backward(const std::function<void()>& backward) {
  check_usable();
  if (clipped) {
    report(
        "backward() between clip_grad_norm_() and step(): expected step() next; clip after the "
        "last backward pass");
  }
  guarded([this] { finish_gathers(); });
  const bool sync = !*no_sync_active;
  try {
    if (sync) reducer.begin_pass();
    backward();
    if (sync) reducer.close_round();
  } catch (const std::exception& error) {
    // A hook of ours has said it already, with what to do.
    if (broken_backward.empty()) {
      broken_backward =
          "a backward pass ended with an exception, so gradients are incomplete; call "
          "zero_grad() on all ranks and repeat the batch. It was: " +
          error_text(error);
    }
    links->channel.announce(broken_backward);
    throw;
  }
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
  const TraceRange range("norm");
  measured = shard_norm(shards.segments(), domains.norm_weights, norm_type, *links->norm);
  measured_type = norm_type;
}

at::Tensor ZeroOptimizer::Impl::clip(std::optional<double> max_norm, double norm_type) {
  const auto check = [&] {
    TORCH_CHECK(!max_norm || *max_norm > 0, "max_norm: expected a number above 0, got ", *max_norm,
                "; pass nullopt to measure only");
    TORCH_CHECK(norm_type > 0, "norm_type: expected a number above 0 or infinity, got ", norm_type,
                "; 2 is the usual one");
    verify_untouched();
  };
  // Arguments must agree, since the coefficient is computed on every rank.
  const TraceRange range("clip");
  const Agreement agreement =
      agree(Call::kClipGradNorm, check,
            "max_norm " + (max_norm ? exact_text(*max_norm) : std::string("nullopt")) +
                ", norm_type " + exact_text(norm_type));
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

void ZeroOptimizer::Impl::check_groups(const ParamGroups& groups) const {
  const auto& expected = group_members;
  for (size_t g = 0; g < std::max(groups.size(), expected.size()); ++g) {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
    TORCH_CHECK(
        g < expected.size() && g < groups.size() &&
            std::equal(groups[g].params().begin(), groups[g].params().end(), expected[g].begin(),
                       expected[g].end(), same),
        "parameter group ", g, ": expected the ", expected.size(), " groups of construction, got ",
        groups.size(), " of which this one was added, removed or changed afterwards (",
        g < groups.size() ? groups[g].params().size() : 0,
        " parameters); give all parameters to the inner optimizer and make a new optimizer");
  }
}

void ZeroOptimizer::Impl::step(const ParamGroups& groups) {
  const auto check = [&] {
    check_groups(groups);
    shards.push_options(groups);
    verify_untouched();
    table.verify_registered(module);
  };
  // A schedule that differs between ranks would tear the model apart shard by shard.
  std::string arguments;
  for (const auto& g : groups) {
    arguments += (arguments.empty() ? "options " : "; ") + options_text(g.options());
  }
  const Agreement agreement = agree(Call::kStep, check, arguments);
  skipped = false;
  const TraceRange range("step");
  if (agreement.rounds == 0) {
    finish_step();
    return;
  }
  reduce(agreement);
  update(agreement);
  finish_step();
  // Elsewhere ranks would not all have the same order.
  if (domains.uniform) reducer.expect_unused(agreement.used);
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
  if (!options.overlap_gather()) finish_gathers();
  for (size_t i = 0; i < agreement.used.size(); ++i) {
    // A graph that saved the old values must notice, as with any in-place update.
    if (agreement.used[i] != 0) torch::autograd::impl::bump_version(table.parameters()[i].tensor);
  }
  table.remember();
}

void ZeroOptimizer::Impl::gather_rows(
    const std::function<void(const ShardOptimizer::RowWritten&)>& write) {
  try {
    write([&](int64_t bucket, const at::Tensor& rows) {
      Communicator& ranks = *links->domains[plan.arena_of(plan.buckets[bucket]).domain].data;
      gathers[bucket] = {rows,
                         ranks.gather_rows(rows, "parameter bucket " + std::to_string(bucket))};
    });
  } catch (const std::exception& error) {
    // The others wait for rows that will not come, and some shards are updated
    // while others are not: no way back.
    links->channel.announce("the update of this rank's shard failed: " + error_text(error));
    if (!links->failed().empty()) throw;
    links->abort_data();
    TORCH_CHECK(false, "the update of this rank's shard failed: ", error_text(error));
  }
}

void ZeroOptimizer::Impl::finish_gather(int64_t bucket) {
  Gather gather = std::exchange(gathers[bucket], {});
  if (!gather.rows.defined()) return;
  const TraceRange range("gather", bucket);
  gather.pending.wait();
  arena.publish(bucket, gather.rows);
}

void ZeroOptimizer::Impl::finish_gathers() {
  for (size_t b = 0; b < gathers.size(); ++b) finish_gather(static_cast<int64_t>(b));
}

void ZeroOptimizer::Impl::wait_for(const torch::nn::Module& used) {
  for (const int64_t parameter : table.managed_by(used)) {
    for (const int64_t b : plan.parameter_buckets[parameter]) finish_gather(b);
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
                          broken_backward.empty() && problem.empty() && !refused;
  if (!local_only) {
    const Agreement agreement = agree(Call::kZeroGrad);
    // First: what cannot be sent, a sparse gradient for example, must not be tried again.
    reducer.discard();
    reducer.complete(agreement.rounds);
    broken_backward.clear();
  }
  finish_step();
  for (const Parameter& p : table.parameters()) p.tensor.mutable_grad().reset();
}

at::Tensor ZeroOptimizer::Impl::gather_parameter(const at::Tensor& parameter, bool gradient) {
  const int64_t index = table.find(parameter);
  const auto check = [&] {
    table.index_of(parameter);
    verify_untouched();
  };
  const Agreement agreement =
      agree(gradient ? Call::kGradient : Call::kMaster, check,
            index < 0 ? std::string() : "parameter " + table.parameters()[index].name);
  if (gradient) {
    reduce(agreement);
    if (agreement.used[index] == 0) return {};
  }
  const Parameter& p = table.parameters()[index];
  at::Tensor result = at::empty_strided(p.tensor.sizes(), p.strides,
                                        p.tensor.options().dtype(at::kFloat).requires_grad(false));
  for (int64_t b : plan.parameter_buckets[index]) {
    const Bucket& bucket = plan.buckets[b];
    Communicator& ranks = *links->domains[domain_of[index]].data;
    at::Tensor rows = pool.take(plan.bucket_numel(bucket), at::kFloat)
                          .view({ranks.world_size(), bucket.row_numel});
    rows.select(0, ranks.rank()).copy_(gradient ? reducer.shard(b) : shards.master_row(b));
    ranks.gather_rows(rows, std::string(gradient ? "gradient" : "master") + " of " + p.name).wait();
    std::vector<at::Tensor> tensors(bucket.slots.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (bucket.slots[i].parameter == index) tensors[i] = result;
    }
    copy_out_of_bucket(plan, bucket, rows, tensors);
    pool.give(rows);
  }
  return result;
}

void ZeroOptimizer::Impl::broadcast_from_first(const std::vector<at::Tensor>& tensors,
                                               const DomainLinks& domain, const char* what) {
  at::NoGradGuard no_grad;
  const bool alone = domain.data->world_size() == 1 && domain.replicas == nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || alone) continue;
    // As bytes, since not every transport knows every dtype.
    at::Tensor flat = tensor.detach().contiguous().reshape({-1}).view(at::kByte);
    domain.data->broadcast(flat, 0, what).wait();
    if (domain.replicas != nullptr) domain.replicas->broadcast(flat, 0, what).wait();
    if (!tensor.is_contiguous()) {
      tensor.detach().copy_(flat.view(tensor.scalar_type()).view(tensor.sizes()));
    }
  }
}

void ZeroOptimizer::Impl::broadcast_parameters() {
  const std::vector<at::Tensor> tensors = arena.broadcast_tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    // One tensor per arena, or per parameter.
    const int64_t domain =
        plan.layout == Layout::kContiguous ? plan.arenas[i].domain : domain_of[i];
    broadcast_from_first({tensors[i]}, links->domains[domain], "parameters");
  }
}

void ZeroOptimizer::Impl::check_replicas_now() {
  if (domains.uniform) {
    check_working_parameters(table, shards, links->rank(), *links->control,
                             [](int64_t) { return true; });
    return;
  }
  links->check_each_domain([&](int64_t domain, Communicator& ranks) {
    check_working_parameters(table, shards, ranks.rank(), ranks,
                             [&](int64_t p) { return domain_of[p] == domain; });
  });
}

void ZeroOptimizer::Impl::refresh_masters() {
  agree(
      Call::kRefreshMasters, [&] { verify_shapes(); }, shapes_of(table.frozen()));
  at::NoGradGuard no_grad;
  arena.attach();
  broadcast_parameters();
  broadcast_from_first(tensors_of(table.frozen()), links->home, "frozen parameters");
  shards.read_masters();
  table.remember();
}

void ZeroOptimizer::Impl::refresh_working() {
  agree(Call::kRefreshWorking, [&] { verify_shapes(); });
  // An fp32 arena is its masters' home: values from elsewhere must not get in.
  arena.attach(/*keep_values=*/false);
  gather_rows([&](const ShardOptimizer::RowWritten& written) { shards.write_working(written); });
  finish_gathers();
  for (const Parameter& p : table.parameters()) torch::autograd::impl::bump_version(p.tensor);
  table.remember();
}

void ZeroOptimizer::Impl::broadcast_buffers() {
  agree(Call::kBroadcastBuffers, nullptr, shapes_of(table.buffers()));
  broadcast_from_first(tensors_of(table.buffers()), links->home, "buffers");
}

}  // namespace zero
