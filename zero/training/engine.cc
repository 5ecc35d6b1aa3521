// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/engine.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/plain_text.h"
#include "zero/comm/row_communicator.h"
#include "zero/memory/device_stream.h"
#include "zero/training/broadcasts.h"
#include "zero/training/group_layouts.h"

namespace zero {
namespace {

std::vector<int64_t> parameter_domains(const ParameterTable& table, const ShardDomains& domains) {
  std::vector<int64_t> result;
  for (const Parameter& p : table.parameters()) result.push_back(domains.of_group[p.group]);
  return result;
}

Plan make_plan_of(const ParameterTable& table, const ShardDomains& domains,
                  const torch::optim::Optimizer& inner, const ZeroOptions& options) {
  const std::vector<Layout> layouts = group_layouts(inner, options);
  const std::vector<Moments> moments = parameter_moments(table, options);
  std::vector<ParameterInfo> infos;
  for (const Parameter& p : table.parameters()) {
    ParameterInfo info{p.tensor.numel(), p.tensor.scalar_type(), domains.of_group[p.group]};
    info.layout = layouts[p.group];
    if (is_whole(layouts[p.group])) info.cost = cost_of(p, inner, options);
    // The one scale of a block that is sent is that of its parameter alone: ranks that hold copies
    // of it have other parameters beside it.
    if (options.gradient_wire() == GradientWire::kBlockInt8) info.block = kMomentBlock;
    // A norm over micro-batches is added up by blocks, too.
    const bool blocks = moments[infos.size()] != Moments::kFloat32 || options.micro_batches() > 0;
    // A smaller parameter is one block, and need not be filled up to a whole one.
    if (blocks && info.block == 1) {
      const auto whole = std::bit_ceil(static_cast<uint64_t>(p.tensor.numel()));
      info.block = std::min<int64_t>(kMomentBlock, static_cast<int64_t>(whole));
    }
    infos.push_back(info);
  }
  std::vector<int64_t> world_sizes;
  for (const ShardDomain& d : domains.list) world_sizes.push_back(d.group.world_size());
  const bool on_gpu = !table.parameters().front().tensor.is_cpu();
  PlanOptions plan{options.layout(), options.bucket_bytes(), on_gpu};
  // Not with replicas: they need the same plan, and may be on machines with other numbers of ranks.
  if (!domains.has_parameter_groups(1) && !domains.list.front().replicas) {
    const int local = domains.list.front().group.topology().ranks_per_machine();
    plan.ranks_per_machine = std::max(local, 1);
  }
  return make_plan(infos, world_sizes, plan);
}

// This rank's number in each domain: the shards it owns.
std::vector<int64_t> ranks_in(const ShardDomains& domains) {
  std::vector<int64_t> ranks;
  for (const ShardDomain& d : domains.list) ranks.push_back(d.group.rank());
  return ranks;
}

// Any domain's communicator can send these buffers: memory that ranks of a machine share is the
// same for all of them. It is host memory.
BufferPool::Allocate allocator_of(const OptimizerCommunicators& comms, at::Device device) {
  if (!device.is_cpu()) return nullptr;
  return [&comms](int64_t bytes) {
    for (const DomainCommunicators& domain : comms.domains) {
      if (at::Tensor buffer = RowCommunicator(*domain.data).allocate(bytes); buffer.defined())
        return buffer;
    }
    return at::Tensor();
  };
}

WireFormats wires_of(const Plan& plan, const ShardDomains& domains, const ZeroOptions& options) {
  const Group& first = domains.list.front().group;
  const int machines = domains.has_two_levels(first) ? first.topology().machines() : 1;
  return make_wire_formats(plan, options, {first.rank(), machines});
}

int64_t pool_bytes(const Plan& plan, const WireFormats& wires, const ShardDomains& domains,
                   const ZeroOptions& options) {
  const size_t buffers = ReductionQueue::buffers_kept(buffer_bytes(plan, wires, 1));
  const int64_t bytes = buffer_bytes(plan, wires, buffers);
  std::vector<int64_t> rows;  // elements of this rank's row of each bucket
  const std::vector<int64_t> ranks = ranks_in(domains);
  for (const Bucket& bucket : plan.buckets) {
    rows.push_back(bucket.rows.numel(ranks[plan.arena_of(bucket).domain]));
  }
  // A row of another dtype is converted, and those of buckets that are reduced wait for their
  // update.
  const size_t converted = options.gradient_shard_dtype() == at::kFloat ? 0 : 1;
  const size_t waiting = options.update_in_backward() ? buffers / 2 : 0;
  const int64_t numel = sum_of_largest(std::move(rows), converted + waiting);
  return bytes + numel * static_cast<int64_t>(sizeof(float));
}

// Collective. Sends rank 0's values to all ranks, and then makes the masters from them. The members
// of `engine` before its shards are there. Takes `inner` when everything is sent.
ShardOptimizer send_values_and_make_shards(Engine& engine,
                                           std::unique_ptr<torch::optim::Optimizer>& inner,
                                           Engine::Frozen sent) {
  const ParameterTable& table = engine.table;
  engine.comms->with_peer_reports([&] {
    engine.reducer.connect();
    broadcast_parameters(engine);
    if (sent == Engine::Frozen::kNone) return;
    broadcast_over_home(engine, sent == Engine::Frozen::kAll ? table.frozen() : table.unmanaged(),
                        "frozen parameters and buffers");
    broadcast_over_home(engine, table.buffers(), "frozen parameters and buffers");
  });
  return ShardOptimizer(
      {engine.plan, engine.table, ranks_in(engine.domains), engine.arena, engine.reducer,
       engine.pool},
      std::move(inner),
      {engine.options.fused(), !engine.arena.device().is_cpu() || engine.options.static_graph(),
       engine.options.static_graph(), engine.options.ema(),
       parameter_moments(engine.table, engine.options), engine.options.split_masters()});
}

// The deviation of this rank from the promise of static_graph, or nothing.
std::string static_problem(const Engine& engine) {
  const std::vector<uint8_t>& used = engine.reducer.used();
  if (engine.reducer.rounds_dropped() > 0) {
    return "zero_grad() of the module or of a base class after a backward pass: expected every "
           "gradient to be used, as static_graph(true) promises; call zero_grad() of the "
           "ZeroOptimizer on all ranks, or make it without that option";
  }
  if (!engine.reducer.any_used()) {
    return "gradients: expected one of every parameter in every step, as static_graph(true) "
           "promises, got none at all; call backward() first. Replays of a CUDA graph that has "
           "backward() and not step() give none, since they run no code of the host: capture both";
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] != 0) continue;
    return "parameter " + engine.table.parameters()[i].name +
           ": expected a gradient in every step on every rank, as static_graph(true) promises, got "
           "none; make the optimizer without that option";
  }
  const int64_t rounds = engine.reducer.rounds_needed();
  const int64_t expected = engine.protocol.expected_rounds();
  if (expected > 0 && rounds != expected) {
    return "backward passes since the last step: expected as many as in the first one, which "
           "needed " +
           std::to_string(expected) + " reductions, got " + std::to_string(rounds) +
           "; static_graph(true) promises that all steps are alike";
  }
  return {};
}

// Why `call` cannot be made with update_in_backward, or nothing.
std::string early_update_problem(const Engine& engine, Call call) {
  if (!engine.options.update_in_backward() || call == Call::kEndEma) return {};
  switch (call) {
    case Call::kReduceGradients:
    case Call::kClipGradNorm:
    case Call::kClipGradValue:
    case Call::kGradient:
      return std::string(call_name(call)) +
             ": expected no call that reads or clips gradients with update_in_backward(true), "
             "which keeps none of them; make the optimizer without that option";
    case Call::kStep:
      if (engine.reducer.rounds_needed() <= 1) return {};
      return "step(): expected gradients in p.grad() before backward() with "
             "update_in_backward(true), since a step has one reduction, got one that was put there "
             "after it; reset it, or make the optimizer without that option";
    default:
      // Any other call would send what is in p.grad(), and so update parameters.
      if (call == Call::kZeroGrad ? !engine.reducer.any_used() || !engine.reducer.has_packed()
                                  : engine.reducer.rounds_needed() == 0) {
        return {};
      }
      return c10::str(
          call_name(call),
          ": expected step() after backward() with update_in_backward(true), since parameters are "
          "updated before it, got gradients that are not stepped; call step() first, or ",
          engine.reducer.has_packed() ? "go on from a checkpoint with a new optimizer"
                                      : "zero_grad(), which drops what was put into p.grad()");
  }
}

// Returns whether `call` is about the gradients that there are: ranks must come to it with those of
// the same passes. zero_grad() drops them, and the end of use_ema() leaves them for the next call.
bool uses_gradients(Call call) { return call != Call::kZeroGrad && call != Call::kEndEma; }

Problem problem_of(const std::function<void()>& check) {
  try {
    if (check) check();
  } catch (const std::exception& error) {
    return {error_text(error), is_of_communication(error)};
  } catch (...) {  // whatever an object of the user throws
    return kNoStdException;
  }
  return {};
}

// Why `call` cannot be made whatever gradients there are, or nothing.
Problem problem_before_gradients(Engine& engine, Call call) {
  Problem problem(engine.protocol.take_problem(call));
  if (problem.empty() && is_capturing(engine.protocol.device())) {
    problem = engine.capture_problem(call);
  }
  if (problem.empty() && call != Call::kZeroGrad) problem = early_update_problem(engine, call);
  return problem;
}

// Why `call` cannot be made with the gradients that this rank has, or nothing.
Problem problem_of_gradients(const Engine& engine, Call call) {
  if (call == Call::kZeroGrad) return early_update_problem(engine, call);
  Problem problem;
  if (engine.reducer.any_used()) problem = engine.passes.unscaled_problem();
  if (problem.empty()) problem = engine.passes.micro_batch_problem(call_name(call));
  if (problem.empty() && engine.options.static_graph() && is_of_a_step(call)) {
    problem = static_problem(engine);
  }
  return problem;
}

// The first problem of this rank that `call` must throw, or nothing.
Problem first_problem(Engine& engine, Call call, const std::function<void()>& check) {
  Problem problem = problem_before_gradients(engine, call);
  // The guard's destructor may run because training threw: that error is left for the next call.
  if (call == Call::kEndEma) return problem.empty() ? problem_of(check) : problem;
  if (problem.empty()) problem = engine.gathers.take_problem();
  const std::string of_inner = engine.shards.take_problem();  // forgotten, whether thrown or not
  if (problem.empty()) problem = of_inner;
  // All calls but this one, which drops gradients, complete rounds, and so send what is in
  // p.grad().
  if (problem.empty() && call != Call::kZeroGrad) {
    problem = problem_of([&] {
      engine.reducer.drop_resets();
      if (check) check();
      engine.reducer.verify();
      engine.full_gradients.verify(engine.reducer);
    });
  }
  engine.reducer.claim_gradients();  // in any case: the message says which parameters are used
  return problem.empty() ? problem_of_gradients(engine, call) : problem;
}

// Adds to the arguments of `call` what led to this rank's gradients, where ranks must agree on it.
void add_history(const GradientReducer& reducer, Call call, AgreedArguments& arguments) {
  if (call != Call::kZeroGrad && reducer.rounds_dropped() > 0) {
    // Sums are of the same passes only where all ranks dropped the same ones.
    arguments.add(plain_text(
        "the gradients of ", reducer.rounds_dropped(),
        " reductions dropped, as zero_grad() of the module or of a base class asked for (call "
        "zero_grad() of the ZeroOptimizer on all ranks instead)"));
  }
  const MicroBatchSums* const micro_batches = reducer.micro_batches();
  if (micro_batches != nullptr && uses_gradients(call)) {
    // One rank's passes may not stand for those that another left out.
    arguments.add(micro_batches->is_begun() ? "backward() of all micro-batches"
                                            : "backward() of no micro-batch");
  }
}

}  // namespace

Engine::Engine(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer>& inner,
               ShardDomains all_domains, const ZeroOptions& asked,
               std::shared_ptr<OptimizerCommunicators> connected, ParameterTable parameter_table,
               Frozen sent)
    : module(module),
      domains(std::move(all_domains)),
      options(asked),
      comms(std::move(connected)),
      table(std::move(parameter_table)),
      plan(make_plan_of(table, domains, *inner, options)),
      wires(wires_of(plan, domains, options)),
      protocol(domains, parameter_domains(table, domains), *comms,
               table.parameters().front().tensor.device()),
      pool(protocol.device(), pool_bytes(plan, wires, domains, options),
           allocator_of(*comms, protocol.device())),
      arena(plan, table, pool),
      reducer(plan, table, comms->domains, pool,
              {wires, options.no_sync_fp32(), options.micro_batches(),
               options.gradient_shard_dtype(), options.update_in_backward()}),
      full_gradients(plan, table, comms->domains, pool),
      shards(send_values_and_make_shards(*this, inner, sent)),
      clipping(shards.segments(), domains.norm_weights, protocol.device(), *comms->norm,
               options.micro_batches() > 0),
      gathers(plan, table, arena, *comms, options),
      record(options, comms->any_half, shards.deferred(), protocol.device(), comms->rank(),
             reducer),
      readers(c10::str("rank ", comms->rank(), " of ", group().world_size()), group().timeout()),
      early(*this),
      passes(*this) {
  if (options.update_in_backward()) reducer.update_with(early);
  table.remember();
}

Engine::~Engine() {
  const c10::OptionalDeviceGuard guard(protocol.device());
  await_readers();  // the module outlives this, and may change its parameters
  passes.remove_hooks();
  try {
    reducer.join();    // updates use memory that is freed now
    gathers.finish();  // the module may outlive this
  } catch (...) {      // reported by the communicator's failure
  }
  // Without this the reducer's worker would wait for peers until the timeout.
  if (protocol.has_failed() || reducer.rounds_needed() > 0) {
    comms->abort("its optimizer was destroyed with gradients on their way");
  }
}

void Engine::await_readers() {
  try {
    readers.wait(0);
  } catch (...) {  // it has printed that the thread that reads stands still
  }
}

std::unique_ptr<torch::optim::Optimizer> Engine::release() {
  await_readers();
  reducer.join();  // updates use memory that is freed now
  passes.remove_hooks();
  protocol.set_ema_in_use(false);
  std::unique_ptr<torch::optim::Optimizer> inner = shards.release_inner();
  reducer.release_shards();
  full_gradients.release();
  arena.release();
  return inner;
}

Agreement Engine::agree(Call call, const std::function<void()>& check, AgreedArguments arguments) {
  if (passes.run_elsewhere()) protocol.refuse_second_thread();
  gathers.finish();
  record.follow_loss_scale();
  // A failed reduction is known here; the control message would wait for its timeout.
  reducer.check();
  // A step waits bucket by bucket. Other calls may change any of them.
  if (!is_of_a_step(call)) comms->close_on_error([this] { readers.wait(0); });
  const Problem problem = first_problem(*this, call, check);
  if (!problem.empty() && is_capturing(protocol.device())) reducer.leave_capture();
  add_history(reducer, call, arguments);
  // Gradients that came under the guard of use_ema() are not sent with its end, and a round of
  // zeros would be an update.
  const bool sends_none =
      call == Call::kEndEma ||
      (call == Call::kZeroGrad && options.update_in_backward() && !reducer.has_packed());
  const int64_t rounds = sends_none ? 0 : reducer.rounds_needed();
  Agreement agreement = protocol.agree_on_call(call, problem, std::move(arguments),
                                               {rounds, passes.any(), reducer.used()});
  comms->close_on_error([&] {
    // First: a gradient that cannot be sent, a sparse one for example, must not be tried again.
    if (call == Call::kZeroGrad) reducer.discard();
    reducer.complete(agreement.rounds);
  });
  // All ranks have dropped all that there was. That there were passes is still known.
  if (uses_gradients(call) && agreement.rounds > 0 &&
      agreement.rounds == reducer.rounds_dropped() && !clipping.has_clips()) {
    reducer.consume();
    full_gradients.forget_rounds();
    clipping.reset();
    agreement.rounds = 0;
  }
  return agreement;
}

std::string Engine::capture_problem(Call call) const {
  const auto refuse = [](const std::string& got) {
    return "CUDA graph capture: expected a training step with static_graph(true), fused kernels, "
           "a constant loss scale and NCCL between ranks, after one that was not captured, got " +
           got + "; end the capture and run it without";
  };
  // Updates are on streams beside the backward pass then, which was tried in no graph.
  if (options.update_in_backward()) return refuse("update_in_backward(true)");
  if (!options.static_graph()) return refuse("an optimizer without that option");
  if (!is_of_a_step(call)) return refuse(call_name(call));
  if (protocol.expected_rounds() == 0) return refuse("the first step");
  if (!shards.deferred()) return refuse("an optimizer that runs its own step()");
  if (record.scaler().dynamic()) return refuse("a dynamic loss scale");
  if (comms->waits_on_host(protocol.device())) {
    return refuse("a transport on which the host waits for other ranks");
  }
  // Its gathers would not be joined when the capture ends.
  if (options.overlap_gather()) return refuse("overlap_gather(true)");
  return {};
}

void Engine::check_no_gradients() const {
  TORCH_CHECK(reducer.rounds_needed() == reducer.rounds_dropped() && !reducer.any_used() &&
                  !clipping.has_clips(),
              "expected no gradients since the last step, got some, which this call does not take "
              "along: call step() first, or zero_grad() to drop them");
}

}  // namespace zero
