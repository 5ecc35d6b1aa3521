// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/impl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "zero/memory/device_stream.h"

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
  std::vector<int64_t> bytes;
  for (const Bucket& bucket : plan.buckets) {
    const auto dtype = options.reduce_dtype().value_or(plan.arena_of(bucket).dtype);
    bytes.push_back(plan.bucket_numel(bucket) * static_cast<int64_t>(c10::elementSize(dtype)));
  }
  // Those in use at one time are different buckets: at most the largest ones.
  const auto count = std::min<size_t>(bytes.size(), ReductionQueue::kBuffersKept);
  const auto end = bytes.begin() + static_cast<int64_t>(count);
  std::partial_sort(bytes.begin(), end, bytes.end(), std::greater<>());
  return std::accumulate(bytes.begin(), end, int64_t{0});
}

// Buffers may travel over the links of any domain, and those agree about memory: it is the
// machine's.
BufferPool::Allocate allocator_of(const OptimizerLinks& links) {
  return [&links](int64_t bytes) {
    for (const DomainLinks& domain : links.domains) {
      if (at::Tensor buffer = domain.data->allocate(bytes); buffer.defined()) return buffer;
    }
    return at::Tensor();
  };
}

bool is_of_a_step(Call call) {
  return call == Call::kReduceGradients || call == Call::kClipGradNorm || call == Call::kStep;
}

LossScaler make_scaler(bool any_half, const ZeroOptions& options) {
  if (options.loss_scaler()) return LossScaler(*options.loss_scaler());
  // A scale that is never told of an overflow would only grow.
  if (!options.skip_nonfinite()) return {};
  return any_half ? LossScaler(LossScalerOptions()) : LossScaler();
}

}  // namespace

ZeroOptimizer::Impl::Impl(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> inner,
                          Domains all_domains, const ZeroOptions& options,
                          std::shared_ptr<OptimizerLinks> links, ParameterTable parameter_table)
    : module(module),
      domains(std::move(all_domains)),
      group(domains.home),
      options(options),
      links(std::move(links)),
      table(std::move(parameter_table)),
      device(table.parameters().front().tensor.device()),
      domain_of(parameter_domains(table, domains)),
      plan(make_plan_of(table, domains, options)),
      pool(device, kept_bytes(plan, options), allocator_of(*this->links)),
      arena(plan, table, pool),
      reducer(plan, table, this->links->domains, pool,
              {options.reduce_dtype(), options.no_sync_fp32()}),
      full_gradients(plan, table, this->links->domains, pool),
      // The masters are read here, so rank 0's values must have arrived.
      shards((this->links->explained([this] { broadcast_parameters(); }),
              ShardOptimizer::Shards{plan, table, ranks_in(domains), arena, reducer}),
             std::move(inner), {options.fused(), device.is_cuda() || options.static_graph()}),
      scaler(make_scaler(this->links->any_half, options)),
      counts(shards.deferred() ? std::optional<at::Device>(device) : std::nullopt),
      gathers(plan.buckets.size()),
      coefficient(at::ones({}, at::TensorOptions().dtype(at::kDouble).device(device))),
      skip_watch(options.max_skipped_in_a_row(), this->links->rank()) {
  reducer.set_scale(1.0 / scaler.scale());
  std::vector<at::Tensor> others;
  for (const auto* list : {&table.frozen(), &table.buffers()}) {
    for (const NamedTensor& item : *list) others.push_back(item.tensor);
  }
  this->links->explained(
      [&] { broadcast_from_first(others, this->links->home, "frozen parameters and buffers"); });
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
    links->abort("its optimizer was destroyed with gradients on their way");
  }
}

void ZeroOptimizer::Impl::report(const std::string& text) {
  problem = text;
  links->channel.announce(text);
  TORCH_CHECK(false, "rank ", links->rank(), ": ", text);
}

void ZeroOptimizer::Impl::check_usable() const {
  // Each gradient comes here, so the text is made where it is needed only.
  if (!process.here()) process.check("rank " + std::to_string(links->rank()));
  TORCH_CHECK(failure.empty(), "rank ", links->rank(),
              ": expected a working optimizer, got one whose communication failed earlier; end "
              "all ranks and resume from a checkpoint. The first failure was: ",
              failure);
}

void ZeroOptimizer::Impl::guarded(const std::function<void()>& body) {
  check_usable();
  try {
    links->explained(body);
  } catch (const std::exception& error) {
    if (links->failed().empty()) throw;
    failure = error_text(error);
    TORCH_CHECK(false, "rank ", links->rank(), ": ", failure);
  }
}

std::string ZeroOptimizer::Impl::static_problem() const {
  const std::vector<uint8_t>& used = reducer.used();
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] != 0) continue;
    return "parameter " + table.parameters()[i].name +
           ": expected a gradient in every step on every rank, as static_graph(true) promises, got "
           "none; make the optimizer without that option";
  }
  const int64_t rounds = reducer.rounds_needed();
  if (static_rounds > 0 && rounds != static_rounds) {
    return "backward passes since the last step: expected as many as in the first one, which "
           "needed " +
           std::to_string(static_rounds) + " reductions, got " + std::to_string(rounds) +
           "; static_graph(true) promises that all steps are alike";
  }
  return {};
}

std::string ZeroOptimizer::Impl::unscaled_problem() const {
  if (scaled || scaler.scale() == 1.0) return {};
  return "gradients of a loss that was not scaled: expected optimizer.backward(loss), or "
         "optimizer.scale_loss(loss).backward(), with a loss scale of " +
         std::to_string(scaler.scale()) +
         ", got gradients although neither was called since the last step; they would be divided "
         "by that scale";
}

std::string ZeroOptimizer::Impl::capture_problem(Call call) const {
  const auto refuse = [](const std::string& got) {
    return "CUDA graph capture: expected a training step with static_graph(true), fused kernels "
           "and "
           "a constant loss scale, after one that was not captured, got " +
           got + "; end the capture and run it without";
  };
  if (!options.static_graph()) return refuse("an optimizer without that option");
  if (!is_of_a_step(call)) return refuse(call_name(call));
  if (static_rounds == 0) return refuse("the first step");
  if (!shards.deferred()) return refuse("an optimizer that runs its own step()");
  if (scaler.dynamic()) return refuse("a dynamic loss scale");
  return {};
}

Agreement ZeroOptimizer::Impl::agree(Call call, const std::function<void()>& check,
                                     const std::string& arguments,
                                     std::vector<std::string> by_domain) {
  finish_gathers();
  settle();
  // What a failed reduction says is known now; the control message would wait for its timeout.
  reducer.check();
  std::string text;
  text.swap(problem);
  if (text.empty() && call != Call::kZeroGrad) text = broken_backward;
  if (text.empty() && *no_sync_active) {
    text = std::string(call_name(call)) +
           " inside no_sync: expected no guard to be alive, got an active one; end its scope first";
  }
  if (text.empty() && is_capturing(device)) text = capture_problem(call);
  if (shards.inner_was_stepped() && text.empty()) text = kInnerStep;
  if (text.empty() && check) {
    try {
      check();
    } catch (const std::exception& error) {
      text = error_text(error);
    }
  }
  reducer.claim_gradients();
  if (text.empty() && call != Call::kZeroGrad && reducer.any_used()) text = unscaled_problem();
  const Agreement agreement = exchange_calls(call, text, arguments, std::move(by_domain));
  // First: what cannot be sent, a sparse gradient for example, must not be tried again.
  if (call == Call::kZeroGrad) reducer.discard();
  reducer.complete(agreement.rounds);
  return agreement;
}

Agreement ZeroOptimizer::Impl::exchange_calls(Call call, const std::string& problem,
                                              const std::string& arguments,
                                              std::vector<std::string> by_domain) {
  refused = true;
  std::string text = problem;
  std::vector<uint8_t> used = reducer.used();
  if (options.static_graph() && is_of_a_step(call)) {
    if (text.empty()) text = static_problem();
    if (static_rounds > 0) {
      if (!text.empty()) links->channel.announce(text);
      TORCH_CHECK(text.empty(), "rank ", links->rank(), ": ", text);
      refused = false;
      return {static_rounds, true, used};
    }
  }
  by_domain.resize(domains.list.size());
  CallArguments all{arguments, {}, false};
  std::string& joined = domains.uniform ? all.of_all : all.of_some;
  for (const std::string& of_domain : by_domain) {
    if (!of_domain.empty()) joined += (joined.empty() ? "" : "; ") + of_domain;
  }
  // The same number stands for different parameters on other ranks of the mesh, so used flags and
  // what concerns parameters are compared where parameters are the same.
  if (!domains.uniform) all.differ = !links->agree_domains(by_domain, domain_of, used);
  Agreement own{reducer.rounds_needed(), scaled, {}};
  if (domains.uniform) own.used = used;
  Agreement agreement = links->channel.agree(call, all, text, own);
  if (!domains.uniform) agreement.used = std::move(used);
  refused = false;
  return agreement;
}

std::vector<std::string> ZeroOptimizer::Impl::at_home(const std::string& text) const {
  // Then arguments are compared over the mesh, of which home is a part.
  if (domains.uniform) return {text};
  std::vector<std::string> by_domain;
  for (const Domain& d : domains.list) {
    by_domain.push_back(key_of(d.group) == key_of(domains.home) ? text : std::string());
  }
  return by_domain;
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

}  // namespace zero
