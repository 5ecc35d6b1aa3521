// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The checks before construction: each rank by itself, then all ranks together.
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <locale>
#include <sstream>
#include <unordered_set>

#include "bookkeeping/layout.h"
#include "zero/agreement/group_memberships.h"
#include "zero/agreement/same_on_all_ranks.h"
#include "zero/base/error_text.h"
#include "zero/gradients/wire_format.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/training/broadcasts.h"
#include "zero/training/engine.h"
#include "zero/training/group_layouts.h"

namespace zero {
namespace {

// What update_in_backward cannot be with.
void check_update_in_backward(const ZeroOptions& options) {
  if (!options.update_in_backward()) return;
  const auto check = [](bool good, const char* expected, const char* why) {
    TORCH_CHECK(good, "update_in_backward: expected ", expected, ", since ", why,
                "; change that, or update_in_backward(false)");
  };
  constexpr const char* kWhole = "parameters are updated before the whole gradient is known";
  check(!options.loss_scaler(), "no loss_scaler", kWhole);
  check(!options.skip_nonfinite(), "skip_nonfinite(false)", kWhole);
  check(!options.skip_if(), "no skip_if", kWhole);
  check(options.micro_batches() == 0, "micro_batches(0)", "a step has one backward pass");
  check(options.gather_wire() == GatherWire::kWhole, "gather_wire(GatherWire::kWhole)",
        "changes would need a copy of all rows from before the update");
  for (const auto& [group, placement] : options.placements()) {
    check(!placement.replicated_over() || placement.replicated_over()->world_size() == 1,
          "no placement with replicated_over",
          "shards are averaged over replicas in collective calls");
  }
}

void check_options(const ZeroOptions& options) {
  TORCH_CHECK(options.stage() == 1 || options.stage() == 2, "stage: expected 1 or 2, got ",
              options.stage(),
              "; stage 0 is plain data parallelism, and stage 3 (sharded working parameters) is "
              "not what this library does");
  TORCH_CHECK(options.bucket_bytes().value_or(0) >= 0, "bucket_bytes: expected 0 or more, got ",
              *options.bucket_bytes());
  TORCH_CHECK(options.max_skipped_in_a_row() >= 0, "max_skipped_in_a_row: expected 0 or more, got ",
              options.max_skipped_in_a_row(), "; 0 accepts any number");
  TORCH_CHECK(options.protect() >= 0, "protect: expected 0 or more, got ", options.protect());
  constexpr int64_t kMost = int64_t{1} << 31;
  TORCH_CHECK(options.micro_batches() >= 0 && options.micro_batches() <= kMost,
              "micro_batches: expected from 0 to ", kMost, ", got ", options.micro_batches());
  const bool plain = !options.mesh_group() && options.placements().empty();
  TORCH_CHECK(options.micro_batches() == 0 || plain,
              "micro_batches: expected plain data parallelism, got a mesh or placements; sums over "
              "other groups have an order of their own");
  TORCH_CHECK(
      options.protect() == 0 || plain,
      "protect: expected plain data parallelism, got a mesh or placements; save checkpoints "
      "instead");
  TORCH_CHECK(options.protect() == 0 || !options.static_graph(),
              "protect: expected static_graph(false), got true; a protected step is agreed on by "
              "the messages that static_graph leaves out");
  TORCH_CHECK(options.gradient_shard_dtype() == at::kFloat ||
                  options.gradient_shard_dtype() == at::kBFloat16,
              "gradient_shard_dtype: expected kFloat or kBFloat16, got ",
              options.gradient_shard_dtype(), "; other dtypes have not the range of gradients");
  check_update_in_backward(options);
  if (const auto& ema = options.ema()) {
    TORCH_CHECK(ema->decay() >= 0 && ema->decay() < 1,
                "ema: expected a decay from 0 on and below 1, got ", ema->decay(),
                "; 0.999 averages over about a thousand steps");
  }
  TORCH_CHECK(!options.loss_scaler() || options.skip_nonfinite(),
              "loss_scaler: expected skip_nonfinite(true) with a dynamic loss scale, got false; "
              "the scale can only follow overflows that are noticed");
}

// Throws c10::Error for parameters that this optimizer cannot manage.
void check_parameters(const ParameterTable& table, const Group& group,
                      const torch::optim::Optimizer& inner, const std::vector<Layout>& layouts) {
  const at::Device device = table.parameters().front().tensor.device();
  TORCH_CHECK(group.device().is_cpu() || device == group.device(), "parameters: expected them on ",
              group.device(), ", where the group's data travels, got ", device,
              "; call to(group.device()) on the model first, or set InitOptions::device");
  for (const Parameter& p : table.parameters()) {
    TORCH_CHECK(!is_managed(p.tensor), "parameter ", p.name,
                ": expected no post-accumulate hook, got one; a parameter can belong to "
                "one ZeroOptimizer at a time. End the other one first: where a new one is assigned "
                "to its std::unique_ptr, call reset() before");
    check_dense(layout_of(layouts[p.group]), p);
    check_parameter(inner, p.group, inner.param_groups()[p.group].options(), p.tensor, p.name);
  }
  table.check_overlaps([&](const Parameter& p) { return layout_of(layouts[p.group]).in_place(); });
}

// The facts that all ranks must agree on.
std::vector<std::string> describe(const ZeroOptions& options, const torch::optim::Optimizer& inner,
                                  const ShardDomains& domains) {
  std::vector<std::string> lines;
  std::ostringstream line;
  line.imbue(std::locale::classic());  // as in plain_text()
  line << "options stage " << options.stage() << " bucket_bytes "
       << (options.bucket_bytes() ? std::to_string(*options.bucket_bytes()) : "by default")
       << " layout " << static_cast<int>(options.layout()) << " fused " << options.fused()
       << " reduction " << (options.reduction() == Reduction::kSum ? "sum" : "mean")
       << " skip_nonfinite " << options.skip_nonfinite() << " skip_if "
       << (options.skip_if() ? "given" : "none") << " no_sync_fp32 " << options.no_sync_fp32()
       << " overlap_gather " << options.overlap_gather() << " two_level " << options.two_level()
       << " static_graph " << options.static_graph() << " max_skipped_in_a_row "
       << options.max_skipped_in_a_row() << " protect " << options.protect()
       << describe_wire_options(options);
  if (const auto& s = options.loss_scaler()) {
    line << " loss scaler " << exact_text(s->initial_scale()) << " "
         << exact_text(s->growth_factor()) << " " << exact_text(s->backoff_factor()) << " "
         << s->growth_interval() << " " << s->hysteresis() << " " << exact_text(s->min_scale())
         << " " << exact_text(s->max_scale());
  }
  if (const auto& ema = options.ema()) {
    line << " ema " << exact_text(ema->decay()) << " warm-up " << ema->warm_up();
  }
  line << " split_masters " << options.split_masters() << " moments "
       << static_cast<int>(options.moments()) << " gradient_shard_dtype "
       << options.gradient_shard_dtype() << " update_in_backward " << options.update_in_backward();
  for (const auto& [group, moments] : options.group_moments()) {
    line << " of group " << group << " " << static_cast<int>(moments);
  }
  line << " ranks " << domains.mesh.world_size() << (domains.uniform ? "" : " in domains")
       << (key_of(domains.home) == key_of(domains.mesh) ? "" : ", optimizers of parts of them");
  lines.push_back(line.str());
  lines.push_back("inner optimizer " + optimizer_name(inner));
  return lines;
}

// What ranks must agree on besides the options: layouts of groups, and costs of the parameters that
// `here` is true for.
std::vector<std::string> describe_layouts(const std::vector<Layout>& layouts,
                                          const ParameterTable& table,
                                          const torch::optim::Optimizer& inner,
                                          const ZeroOptions& options,
                                          const std::function<bool(const Parameter&)>& here) {
  std::vector<std::string> lines;
  for (size_t g = 0; g < layouts.size(); ++g) {
    lines.push_back("layout of parameter group " + std::to_string(g) + " " +
                    std::to_string(static_cast<int>(layouts[g])));
  }
  for (const Parameter& p : table.parameters()) {
    if (!is_whole(layouts[p.group]) || !here(p)) continue;
    lines.push_back("cost of parameter " + p.name + " " +
                    std::to_string(cost_of(p, inner, options)));
  }
  return lines;
}

// The facts that ranks with the same parameters must agree on: of domain `domain`, or -1 for all.
std::vector<std::string> describe_parameters(const torch::optim::Optimizer& inner,
                                             const ParameterTable& table,
                                             const ShardDomains& domains, int64_t domain) {
  std::vector<std::string> lines = domains.describe(domain);
  const at::Device device = table.parameters().front().tensor.device();
  for (size_t g = 0; g < inner.param_groups().size(); ++g) {
    const torch::optim::OptimizerOptions& options = inner.param_groups()[g].options();
    const std::string number = std::to_string(g);
    lines.push_back("options of parameter group " + number + " " + options_text(options));
    lines.push_back("arithmetic of parameter group " + number + " " +
                    adapter_of(options).arithmetic(options, device));
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

// Where parameters are compared by domain: what that of the home group receives from its rank 0.
std::vector<std::string> describe_home(const ParameterTable& table, const ShardDomains& domains,
                                       int64_t domain) {
  if (domain != domains.home_domain) return {};
  std::vector<std::string> lines;
  const auto add = [&](const char* kind, const std::vector<NamedTensor>& list) {
    for (const NamedTensor& item : list) {
      lines.push_back(kind + shapes_of({item}) +
                      " (give the constructor the group of the ranks that hold the same frozen "
                      "parameters and buffers, and dense parameter groups sharded_over())");
    }
  };
  add("frozen parameter ", table.unmanaged());
  add("buffer ", table.buffers());
  return lines;
}

// Runs `make`, which sends. Where it throws on this rank only, as for lack of memory, the others
// wait for something that is not sent: this reports why, closes the connections and throws
// c10::DistBackendError. After a failure of the communication it throws CommunicationError.
// `agreed`: a c10::Error is the same on all ranks, unless it is for lack of memory.
void construct(OptimizerCommunicators& comms, bool agreed, const std::function<void()>& make) {
  try {
    make();
  } catch (const std::exception& error) {
    const bool local = comms.failed().empty();
    const bool same =
        dynamic_cast<const c10::Error*>(&error) != nullptr && !is_out_of_memory(error);
    if (local && agreed && same) throw;
    const std::string text = "the optimizer could not be made: " + error_text(error);
    if (local) comms.abort(text);
    if (is_of_communication(error)) {
      throw_communication_error(c10::str("rank ", comms.rank(), ": ", text));
    }
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", comms.rank(), ": ", text);
  } catch (...) {  // whatever a function of the user throws
    const std::string text = c10::str("the optimizer could not be made: ", kNoStdException);
    comms.abort(text);
    TORCH_CHECK_WITH(DistBackendError, false, "rank ", comms.rank(), ": ", text);
  }
}

// Plain libtorch has no list of what it has updated in a step already.
void warn_of_parameters_twice(const ParameterTable& table, const torch::optim::Optimizer& inner) {
  for (const auto& group : inner.param_groups()) {
    std::unordered_set<const void*> known;
    if (each_once(group.params()).size() == group.params().size()) continue;
    for (const at::Tensor& tensor : group.params()) {
      const int64_t index = table.find(tensor);
      if (index < 0) continue;
      if (!known.insert(tensor.unsafeGetTensorImpl()).second) {
        TORCH_WARN("parameter ", table.parameters()[index].name,
                   " is listed twice in its parameter group, as parameters() of libtorch does for "
                   "one with two names. Plain libtorch updates such a parameter twice in a step, "
                   "which is about twice the learning rate; a ZeroOptimizer updates it once");
        return;
      }
    }
  }
}

// What one rank finds out by itself about an optimizer, before ranks agree.
struct Candidate {
  const torch::optim::Optimizer* const inner;
  const ZeroOptions& options;
  const Engine::Frozen sent;
  std::vector<Layout> layouts = {};
  std::unique_ptr<ParameterTable> table = nullptr;
  std::optional<ShardDomains> domains = std::nullopt;
  std::vector<std::string> lines = {};  // what must be equal on all ranks
  std::string problem = {};  // why this rank cannot go on: table or domains may be missing then
};

// What must be equal on the ranks of domain `domain`, or on all for -1.
std::vector<std::string> lines_of_domain(const Candidate& c, int64_t domain) {
  std::vector<std::string> lines;
  const auto add = [&](std::vector<std::string> more) {
    std::ranges::move(more, std::back_inserter(lines));
  };
  if (domain < 0 || c.domains->has_parameter_groups(domain)) {
    const auto here = [&](const Parameter& p) {
      return domain < 0 || c.domains->of_group[p.group] == domain;
    };
    add(describe_layouts(c.layouts, *c.table, *c.inner, c.options, here));
    add(describe_parameters(*c.inner, *c.table, *c.domains, domain));
  }
  add(describe_home(*c.table, *c.domains, domain));
  if (domain < 0 && c.sent == Engine::Frozen::kUnmanaged) {
    for (const NamedTensor& item : c.table->unmanaged()) {
      if (item.trainable) lines.push_back("parameter " + item.name + " of no ZeroOptimizer");
    }
  }
  return lines;
}

// Sends nothing, and puts an error into `problem` of what it returns.
Candidate examine(const torch::nn::Module& module, const torch::optim::Optimizer* inner,
                  const Group& group, const ZeroOptions& options, Engine::Frozen sent,
                  const std::function<bool(const at::Tensor&)>& trained) {
  Candidate c{inner, options, sent};
  try {
    check_options(options);
    TORCH_CHECK(inner != nullptr, "inner optimizer: expected one, got a null pointer");
    c.layouts = group_layouts(*inner, options);
    check_moments(*inner, options);
    c.table = std::make_unique<ParameterTable>(module, inner->param_groups(), trained);
    check_layouts(c.layouts, *c.table, *inner, group.world_size(), options);
    check_parameters(*c.table, group, *inner, c.layouts);
    const at::Device device = c.table->parameters().front().tensor.device();
    check_wire_options(options, device);
    c.domains = make_domains(group, options, static_cast<int64_t>(inner->param_groups().size()));
    // On a GPU two levels add up the rows for all machines in one call, which a tree cannot.
    const bool one_level = options.micro_batches() > 0 && !device.is_cpu();
    for (size_t g = 0; g < c.layouts.size(); ++g) {
      if (!is_whole(c.layouts[g]) && !one_level) continue;
      c.domains->list[c.domains->of_group[g]].one_level = true;
    }
    c.lines = describe(options, *inner, *c.domains);
    if (c.domains->uniform) std::ranges::move(lines_of_domain(c, -1), std::back_inserter(c.lines));
  } catch (...) {  // whatever an object of the user throws
    c.problem = text_of_caught();
  }
  return c;
}

// Collective. Throws where any rank has a problem, or ranks have different lines, and connects.
void agree_on(OptimizerCommunicators& comms, const Candidate& c) {
  // First, since it throws where this rank lacks what the rest reads.
  check_same_on_all_ranks(*comms.control, c.problem, c.lines);
  check_groups(*comms.control, *c.domains);
  comms.connect(*c.domains);
  comms.check_domains(*c.domains, [&](int64_t domain) { return lines_of_domain(c, domain); });
  comms.agree_on_half(*c.domains,
                      std::ranges::any_of(c.table->parameters(), [](const Parameter& p) {
                        return p.tensor.scalar_type() == at::kHalf;
                      }));
}

// Makes the groups of an inner optimizer those that users see.
void set_groups(torch::optim::Optimizer& inner, const Engine::ParamGroups& groups) {
  auto& own = inner.param_groups();
  while (own.size() > groups.size()) own.pop_back();
  for (size_t g = 0; g < groups.size(); ++g) {
    if (g == own.size()) own.emplace_back(groups[g].params(), groups[g].options().clone());
    own[g].params() = groups[g].params();
    own[g].set_options(groups[g].options().clone());
  }
}

}  // namespace

std::unique_ptr<Engine> Engine::make(torch::nn::Module& module,
                                     std::unique_ptr<torch::optim::Optimizer>& inner,
                                     const Group& group, const ZeroOptions& options, Frozen sent,
                                     const std::function<bool(const at::Tensor&)>& trained) {
  auto comms = std::make_shared<OptimizerCommunicators>(options.mesh_group().value_or(group));
  Candidate c = examine(module, inner.get(), group, options, sent, trained);
  construct(*comms, /*agreed=*/true,
            [&] { comms->with_peer_reports([&] { agree_on(*comms, c); }); });
  if (comms->rank() == 0) warn_of_parameters_twice(*c.table, *inner);
  std::unique_ptr<Engine> engine;
  construct(*comms, /*agreed=*/false, [&] {
    const c10::OptionalDeviceGuard guard(c.table->parameters().front().tensor.device());
    engine = std::make_unique<Engine>(module, inner, std::move(*c.domains), options, comms,
                                      std::move(*c.table), sent);
  });
  return engine;
}

std::unique_ptr<Engine> Engine::make_again(std::unique_ptr<torch::optim::Optimizer>& inner,
                                           const Group& over, const ParamGroups& groups,
                                           Frozen sent,
                                           const std::vector<at::Tensor>& added) const {
  set_groups(*inner, groups);
  std::unique_ptr<Engine> engine =
      make(module, inner, over, options, sent, table.managed_or(added));
  engine->early.read_options_of(early.groups());
  return engine;
}

std::unique_ptr<Engine> Engine::make_over_same_ranks(
    std::unique_ptr<torch::optim::Optimizer>& inner, const ParamGroups& groups) const {
  set_groups(*inner, groups);
  std::unique_ptr<Engine> engine;
  construct(*comms, /*agreed=*/false, [&] {
    engine = std::make_unique<Engine>(
        module, inner, domains, options, comms,
        ParameterTable(module, inner->param_groups(), table.managed_or({})), Frozen::kNone);
  });
  engine->early.read_options_of(early.groups());
  return engine;
}

}  // namespace zero
