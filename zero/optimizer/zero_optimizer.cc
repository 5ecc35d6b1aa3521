// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/zero_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <unordered_set>

#include "bookkeeping/layout.h"
#include "zero/agreement/construction_check.h"
#include "zero/base/error_text.h"
#include "zero/gradients/wire_format.h"
#include "zero/inner/classes.h"
#include "zero/optimizer/group_layouts.h"
#include "zero/optimizer/impl.h"

namespace zero {
namespace {

void check_options(const ZeroOptions& options) {
  TORCH_CHECK(options.stage() == 1 || options.stage() == 2, "stage: expected 1 or 2, got ",
              options.stage(),
              "; stage 0 is plain data parallelism, and stage 3 (sharded working parameters) is "
              "not what this library does");
  TORCH_CHECK(options.bucket_bytes().value_or(0) >= 0, "bucket_bytes: expected 0 or more, got ",
              *options.bucket_bytes());
  TORCH_CHECK(options.max_skipped_in_a_row() >= 0, "max_skipped_in_a_row: expected 0 or more, got ",
              options.max_skipped_in_a_row(), "; 0 accepts any number");
  TORCH_CHECK(options.check_replicas_every() >= 0, "check_replicas_every: expected 0 or more, got ",
              options.check_replicas_every());
  TORCH_CHECK(!options.loss_scaler() || options.skip_nonfinite(),
              "loss_scaler: expected skip_nonfinite(true) with a dynamic loss scale, got false; "
              "the scale can only follow overflows that are noticed");
}

// Throws c10::Error for parameters that this optimizer cannot manage.
void check_parameters(const ParameterTable& table, const Group& group,
                      const std::vector<Layout>& layouts) {
  const at::Device device = table.parameters().front().tensor.device();
  TORCH_CHECK(group.device().is_cpu() || device == group.device(), "parameters: expected them on ",
              group.device(), ", where the group's data travels, got ", device,
              "; call to(group.device()) on the model first, or set InitOptions::device");
  for (const Parameter& p : table.parameters()) {
    TORCH_CHECK(torch::autograd::impl::post_acc_grad_hooks(p.tensor) == nullptr, "parameter ",
                p.name,
                ": expected no post-accumulate hook, got one; a parameter can belong to "
                "one ZeroOptimizer at a time");
    check_dense(layout_of(layouts[p.group]), p);
  }
}

// The facts that all ranks must agree on.
std::vector<std::string> describe(const ZeroOptions& options, const torch::optim::Optimizer& inner,
                                  const ShardDomains& domains) {
  std::vector<std::string> lines;
  std::ostringstream line;
  line << "options stage " << options.stage() << " full gradients "
       << options.stage1_full_gradients() << " bucket_bytes "
       << (options.bucket_bytes() ? std::to_string(*options.bucket_bytes()) : "by default")
       << " layout " << static_cast<int>(options.layout()) << " fused " << options.fused()
       << " skip_nonfinite " << options.skip_nonfinite() << " no_sync_fp32 "
       << options.no_sync_fp32() << " overlap_gather " << options.overlap_gather() << " two_level "
       << options.two_level() << " static_graph " << options.static_graph()
       << " max_skipped_in_a_row " << options.max_skipped_in_a_row() << " check_replicas_every "
       << options.check_replicas_every() << describe_wire_options(options);
  if (const auto& s = options.loss_scaler()) {
    line << " loss scaler " << s->initial_scale() << " " << s->growth_factor() << " "
         << s->backoff_factor() << " " << s->growth_interval() << " " << s->hysteresis() << " "
         << s->min_scale() << " " << s->max_scale() << " " << s->max_skipped_at_min();
  }
  line << " ranks " << domains.mesh.world_size() << (domains.uniform ? "" : " in domains");
  lines.push_back(line.str());
  lines.push_back("inner optimizer " + optimizer_name(inner));
  return lines;
}

// The facts that ranks with the same parameters must agree on: of domain `domain`, or -1 for all.
std::vector<std::string> describe_parameters(const torch::optim::Optimizer& inner,
                                             const ParameterTable& table,
                                             const ShardDomains& domains, int64_t domain) {
  std::vector<std::string> lines = domains.describe();
  for (size_t g = 0; g < inner.param_groups().size(); ++g) {
    lines.push_back("options of parameter group " + std::to_string(g) + " " +
                    options_text(inner.param_groups()[g].options()));
  }
  const std::vector<std::string> texts = table.describe();
  for (size_t i = 0; i < texts.size(); ++i) {
    const bool managed = i < table.parameters().size();
    const bool here =
        domain < 0 || (managed && domains.of_group[table.parameters()[i].group] == domain);
    if (here) {
      lines.push_back(texts[i]);
    } else if (managed) {
      // Other ranks compare its values, but all ranks that share a group must send in one order.
      lines.push_back("parameter of another domain" + texts[i].substr(texts[i].find(" shape ")));
    }
  }
  return lines;
}

// Runs `make`, which sends. Where it throws on this rank only, as for lack of memory, the others
// wait for something that is not sent: this reports why and closes the connections. `agreed`: a
// c10::Error is the same on all ranks.
void construct(OptimizerCommunicators& comms, bool agreed, const std::function<void()>& make) {
  try {
    make();
  } catch (const std::exception& error) {
    const bool local = comms.failed().empty();
    if (local && agreed && dynamic_cast<const c10::Error*>(&error) != nullptr) throw;
    const std::string text = "the optimizer could not be made: " + error_text(error);
    if (local) comms.abort(text);
    TORCH_CHECK(false, "rank ", comms.rank(), ": ", text);
  }
}

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
  auto comms = std::make_shared<OptimizerCommunicators>(options.mesh_group().value_or(group));
  std::unique_ptr<ParameterTable> table;
  std::optional<ShardDomains> domains;
  std::string problem;
  std::vector<std::string> lines;
  std::vector<Layout> layouts;
  const auto described = [&](int64_t domain) {
    const auto here = [&](const Parameter& p) {
      return domain < 0 || domains->of_group[p.group] == domain;
    };
    std::vector<std::string> all = describe_layouts(layouts, *table, *inner, options, here);
    for (std::string& line : describe_parameters(*inner, *table, *domains, domain)) {
      all.push_back(std::move(line));
    }
    return all;
  };
  try {
    check_options(options);
    TORCH_CHECK(inner != nullptr, "inner optimizer: expected one, got a null pointer");
    layouts = group_layouts(*inner, options);
    table = std::make_unique<ParameterTable>(module, inner->param_groups());
    check_parameters(*table, group, layouts);
    check_wire_options(options, table->parameters().front().tensor.device());
    domains = make_domains(group, options, static_cast<int64_t>(inner->param_groups().size()));
    for (size_t g = 0; g < layouts.size(); ++g) {
      if (is_whole(layouts[g])) domains->list[domains->of_group[g]].one_level = true;
    }
    lines = describe(options, *inner, *domains);
    if (domains->uniform) {
      for (std::string& line : described(-1)) lines.push_back(std::move(line));
    }
  } catch (const std::exception& error) {
    problem = error_text(error);
  }
  const auto agree = [&] {
    check_construction(*comms->control, problem, lines);
    comms->connect(*domains, options.two_level());
    comms->check_domains(*domains, described);
    comms->agree_on_half(*domains, std::any_of(table->parameters().begin(),
                                               table->parameters().end(), [](const Parameter& p) {
                                                 return p.tensor.scalar_type() == at::kHalf;
                                               }));
  };
  construct(*comms, /*agreed=*/true, [&] { comms->explained(agree); });
  construct(*comms, /*agreed=*/false, [&] {
    const c10::OptionalDeviceGuard guard(table->parameters().front().tensor.device());
    param_groups_ = visible_groups(inner.get());
    impl_ = std::make_unique<Impl>(module, std::move(inner), std::move(*domains), options, comms,
                                   std::move(*table));
  });
  for (const auto& g : param_groups_) impl_->group_members.push_back(g.params());
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
  TORCH_CHECK(false, "rank ", impl_->comms->rank(),
              ": torch::load of a ZeroOptimizer: expected load_checkpoint()");
}

}  // namespace zero
