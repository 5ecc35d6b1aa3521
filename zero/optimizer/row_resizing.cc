// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Replanning::resize_rows(): the engine is made anew over the communicators that are there, and
// masters and state move between the shards of both.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/layout.h"
#include "zero/agreement/fingerprint.h"
#include "zero/base/plain_text.h"
#include "zero/comm/row_communicator.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/row_copies.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/optimizer/replanning.h"
#include "zero/training/group_layouts.h"

namespace zero {
namespace {

constexpr const char* kMaster = "master";
constexpr size_t kMostKinds = 31;  // bits of the flags that ranks put together

// ---- What is asked for

// Throws unless rows of the parameter follow each other in memory. Returns their elements.
int64_t row_numel(const Parameter& p) {
  TORCH_CHECK(!p.sizes.empty() && p.sizes[0] > 0, "parameter ", p.name,
              ": expected a dimension of rows, got shape ", at::IntArrayRef(p.sizes));
  int64_t numel = 1, reach = 1;
  for (size_t d = 1; d < p.sizes.size(); ++d) {
    numel *= p.sizes[d];
    reach += (p.sizes[d] - 1) * p.strides[d];
  }
  TORCH_CHECK(numel > 0 && reach == numel && (p.sizes[0] == 1 || p.strides[0] == numel),
              "parameter ", p.name, ": expected rows that follow each other in memory, got shape ",
              at::IntArrayRef(p.sizes), " with strides ", at::IntArrayRef(p.strides));
  return numel;
}

// In host memory.
at::Tensor rows_of(const ResizedRows& change, const Parameter& p) {
  const at::Tensor& rows = change.rows;
  TORCH_CHECK(rows.defined() && rows.dim() == 1 && rows.scalar_type() == at::kLong, "parameter ",
              p.name, ": rows: expected a 1-D int64 tensor, got ",
              rows.defined() ? c10::str(rows.scalar_type(), " of shape ", rows.sizes()) : "none");
  TORCH_CHECK(rows.numel() > 0, "parameter ", p.name,
              ": rows: expected at least one row to stay or come, got none; freeze() a parameter "
              "that is not needed any more");
  at::Tensor here = rows.detach().to(at::kCPU).contiguous();
  const auto lowest = here.min().item<int64_t>();
  const auto highest = here.max().item<int64_t>();
  TORCH_CHECK(lowest >= -1 && highest < p.sizes[0], "parameter ", p.name,
              ": rows: expected numbers from -1 to ", p.sizes[0] - 1, ", got ",
              lowest < -1 ? lowest : highest);
  if (change.values.defined()) {
    std::vector<int64_t> sizes = p.sizes;
    sizes[0] = here.numel();
    TORCH_CHECK(change.values.sizes() == at::IntArrayRef(sizes) &&
                    at::isFloatingType(change.values.scalar_type()),
                "parameter ", p.name, ": values: expected floating-point ones of shape ",
                at::IntArrayRef(sizes), ", one row for each of `rows`, got ",
                change.values.scalar_type(), " of shape ", change.values.sizes());
  } else {
    TORCH_CHECK(lowest >= 0, "parameter ", p.name,
                ": values: expected those of all rows, since rows has -1, got none");
  }
  return here;
}

// Per parameter of the present engine.
std::vector<RowSources> sources_of(const Engine& engine, const std::vector<ResizedRows>& changes) {
  TORCH_CHECK(!changes.empty(), "resize_rows(): expected parameters, got none");
  std::vector<RowSources> sources(engine.table.parameters().size());
  for (const ResizedRows& change : changes) {
    TORCH_CHECK(change.parameter.defined(), "expected parameters, got an undefined tensor");
    const int64_t index = engine.table.index_or_throw(change.parameter);
    const Parameter& p = engine.table.parameters()[index];
    TORCH_CHECK(!sources[index].rows.defined(), "parameter ", p.name,
                ": expected it once, got it twice");
    sources[index].row_numel = row_numel(p);
    sources[index].rows = rows_of(change, p);
  }
  return sources;
}

// The parameter as it will be, in its order in memory, on `device`.
Parameter resized(const Parameter& p, const RowSources& sources, c10::Device device) {
  Parameter result = p;
  result.sizes[0] = sources.rows.numel();
  result.strides[0] = sources.row_numel;
  result.tensor =
      at::empty_strided(result.sizes, result.strides,
                        at::TensorOptions().dtype(p.tensor.scalar_type()).device(device));
  return result;
}

// Throws for what the constructor of the engine would throw after the parameters have changed:
// another list of parameters than the present one, and what the class refuses.
void check_new(const Engine& engine, const std::vector<RowSources>& sources,
               const Engine::ParamGroups& groups) {
  const torch::optim::Optimizer& inner = engine.shards.raw_inner();
  const ParameterTable now(engine.module, groups, engine.table.managed_or({}));
  const std::vector<Parameter>& before = engine.table.parameters();
  for (size_t i = 0; i < std::max(before.size(), now.parameters().size()); ++i) {
    TORCH_CHECK(i < before.size() && i < now.parameters().size() &&
                    before[i].tensor.is_same(now.parameters()[i].tensor),
                "parameter ", (i < now.parameters().size() ? now.parameters() : before)[i].name,
                ": expected the parameters of the last step in their order, got another one in the "
                "module; freeze() and unfreeze() change which are trained");
    if (!sources[i].rows.defined()) continue;
    check_parameter(inner, before[i].group, groups[before[i].group].options(),
                    resized(before[i], sources[i], at::kMeta).tensor, before[i].name);
  }
}

std::string description_of_change(const Engine& engine, const std::vector<RowSources>& sources) {
  const torch::optim::Optimizer& inner = engine.shards.raw_inner();
  std::string text;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& rows = sources[i].rows;
    if (!rows.defined()) continue;
    const auto hash =
        fingerprint_of(std::string(static_cast<const char*>(rows.const_data_ptr()), rows.nbytes()));
    const Parameter& p = engine.table.parameters()[i];
    text += plain_text(text.empty() ? "" : ", ", p.name, " to ", rows.numel(), " rows with hash ",
                       hash[0], " ", hash[2]);
    if (engine.plan.arenas[engine.plan.parameter_arena[i]].layout->is_whole()) {
      text += plain_text(" and cost ",
                         cost_of(resized(p, sources[i], at::kMeta), inner, engine.options));
    }
  }
  return text;
}

// ---- What moves

// What parameters may have beside their values: a master, an average, a tensor of state with a
// value for each element, or one number of state. Ordered, so that all ranks number the same ones
// alike.
struct KindName {
  bool is_value = false;  // one number
  c10::ScalarType dtype = at::kFloat;
  std::string name;

  auto operator<=>(const KindName&) const = default;

  // A line of letter, dtype and name.
  std::string to_text() const {
    return plain_text(is_value ? "v" : "t", static_cast<int>(dtype), " ", name, "\n");
  }
  // Of a line without its end.
  static KindName from_text(const std::string& line) {
    const size_t space = line.find(' ');
    return {line[0] == 'v', static_cast<c10::ScalarType>(std::stoi(line.substr(1, space - 1))),
            line.substr(space + 1)};
  }
};

// One tensor, or one number, of each parameter that has it.
struct Kind : KindName {
  std::vector<uint8_t> of;    // per parameter
  std::vector<int64_t> bits;  // of numbers: per parameter, as bits_of()
};

int64_t bits_of(const at::Tensor& value) {
  if (value.scalar_type() == at::kLong) return value.item<int64_t>();
  return std::bit_cast<int64_t>(value.item<double>());
}

at::Tensor value_of(int64_t bits, c10::ScalarType dtype) {
  return dtype == at::kLong ? at::full({1}, bits, dtype)
                            : at::full({1}, std::bit_cast<double>(bits), dtype);
}

// A segment of this rank, with the memory of its tensors.
struct HeldSegment {
  Segment segment;
  std::map<KindName, at::Tensor> tensors;  // 1-D; given away kind by kind, but for numbers
};

// This rank's shard and what ranks have agreed to be in the shards of all.
struct HeldShards {
  Plan plan;
  std::vector<HeldSegment> segments;
  std::vector<Kind> kinds;
  StepCounts::Values counts;
  LossScaler::State scale;
};

// Of the state of this rank's segments. Throws for state that is no row's.
void check_state(Engine& engine) {
  const torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  for (const SegmentTensors& s : engine.shards.segments()) {
    const auto state = read_inner_state(inner, s.group, s.master);
    TORCH_CHECK(!state || state->uncut.empty(), "parameter ",
                engine.table.parameters()[s.segment.parameter].name,
                ": expected state with one value for each element, got ",
                state ? state->uncut.front().first : "", ", which no single row has");
  }
}

// What this rank has of its segments.
std::vector<HeldSegment> collect_segments(Engine& engine) {
  const torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  std::vector<HeldSegment> segments;
  for (const SegmentTensors& s : engine.shards.segments()) {
    HeldSegment h{s.segment, {}};
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      h.tensors[{false, tensor.scalar_type(), name}] = elements_of(tensor, s.master);
    };
    if (!engine.arena.is_master(s.segment.bucket)) add(kMaster, engine.shards.masters().values(s));
    if (s.ema.defined()) add(kEmaKind, s.ema);
    if (auto state = read_inner_state(inner, s.group, s.master)) {
      for (const auto& [name, tensor] : state->tensors) add(name, tensor);
      for (auto& [name, value] : state->values) {
        h.tensors[{true, value.scalar_type(), name}] = std::move(value);
      }
    }
    segments.push_back(std::move(h));
  }
  return segments;
}

// Collective. The kinds that any rank has, in one order.
std::vector<KindName> names_on_all_ranks(Communicator& control, const HeldShards& held) {
  std::set<KindName> names;
  for (const HeldSegment& h : held.segments) {
    for (const auto& [name, tensor] : h.tensors) names.insert(name);
  }
  std::string own;
  for (const KindName& name : names) own += name.to_text();
  for (const std::string& text : control.all_gather_text(own, "names of state")) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) names.insert(KindName::from_text(line));
  }
  TORCH_CHECK(names.size() <= kMostKinds, "expected at most ", kMostKinds, " kinds of state, got ",
              names.size());
  return {names.begin(), names.end()};
}

// Collective. Per parameter: bit k says that a rank has names[k] of it.
at::Tensor flags_on_all_ranks(Communicator& control, int64_t parameters,
                              const std::vector<KindName>& names, const HeldShards& held) {
  const at::Tensor flags = at::zeros({parameters}, at::kInt);
  auto* const flag = flags.mutable_data_ptr<int32_t>();
  for (const HeldSegment& h : held.segments) {
    for (size_t k = 0; k < names.size(); ++k) {
      if (h.tensors.contains(names[k])) flag[h.segment.parameter] |= 1 << k;
    }
  }
  control.all_reduce_or(flags, "state of parameters").wait();
  return flags;
}

// Collective. Per parameter: its number of this name, as bits_of().
std::vector<int64_t> values_on_all_ranks(Communicator& control, int64_t parameters,
                                         const KindName& name, const HeldShards& held) {
  const at::Tensor bits =
      at::full({parameters}, std::numeric_limits<int64_t>::min(), at::TensorOptions(at::kLong));
  auto* const bit = bits.mutable_data_ptr<int64_t>();
  for (const HeldSegment& h : held.segments) {
    const auto value = h.tensors.find(name);
    if (value != h.tensors.end()) bit[h.segment.parameter] = bits_of(value->second);
  }
  control.all_reduce_max(bits, "counts of parameters").wait();
  return {bit, bit + parameters};
}

// Collective. A rank may hold nothing of a parameter, and none of its state is then there.
void agree_on_kinds(Communicator& control, int64_t parameters, HeldShards& held) {
  const std::vector<KindName> names = names_on_all_ranks(control, held);
  const at::Tensor flags = flags_on_all_ranks(control, parameters, names, held);
  const auto* const flag = flags.const_data_ptr<int32_t>();
  for (size_t k = 0; k < names.size(); ++k) {
    Kind kind{names[k], {}, {}};
    for (int64_t p = 0; p < parameters; ++p) kind.of.push_back(flag[p] >> k & 1);
    if (kind.is_value) kind.bits = values_on_all_ranks(control, parameters, names[k], held);
    held.kinds.push_back(std::move(kind));
  }
}

// Collective. This rank's shard, and what those of all ranks have.
HeldShards collect_shards(Engine& engine) {
  engine.record.follow_loss_scale();
  HeldShards held;
  held.plan = engine.plan;
  held.counts = engine.record.counts();
  held.scale = engine.record.scaler().state();
  held.segments = collect_segments(engine);
  agree_on_kinds(*engine.comms->control, std::ssize(engine.table.parameters()), held);
  return held;
}

// The elements [begin, end) of a parameter of before between which those are that a segment of now
// goes on with.
struct SourceRange {
  int64_t begin = 0;
  int64_t end = 0;
};

SourceRange source_of(const Segment& segment, const RowSources& sources) {
  const int64_t end = segment.begin + segment.numel;
  if (!sources.rows.defined()) return {segment.begin, end};
  const int64_t n = sources.row_numel;
  const int64_t first = segment.begin / n;
  const at::Tensor rows = sources.rows.narrow(0, first, (end + n - 1) / n - first);
  const at::Tensor continued = rows.masked_select(rows.ge(0));
  if (continued.numel() == 0) return {};
  return {continued.min().item<int64_t>() * n, (continued.max().item<int64_t>() + 1) * n};
}

// A segment of now, and what it goes on with.
struct Target {
  SourceRange source;
  ElementRange elements;
};
using Targets = std::vector<std::vector<Target>>;  // per parameter

// Of the segments of `engine` that `into` has memory for.
Targets targets_of(const Engine& engine, const std::vector<RowSources>& sources,
                   const std::vector<at::Tensor>& into) {
  Targets targets(sources.size());
  for (size_t i = 0; i < into.size(); ++i) {
    if (!into[i].defined()) continue;
    const Segment& s = engine.shards.segments()[i].segment;
    targets[s.parameter].push_back({source_of(s, sources[s.parameter]), {s.begin, into[i]}});
  }
  return targets;
}

// Collective. All that ranks held of `kind` in bucket `b` of before. The memory is of engine.pool.
Rows gather_bucket(Engine& engine, const HeldShards& from, const Kind& kind, size_t b,
                   const std::vector<const HeldSegment*>& own) {
  const Bucket& bucket = from.plan.buckets[b];
  Communicator& ranks = *engine.comms->domains.front().data;
  const Rows rows(engine.pool.acquire(from.plan.bucket_numel(bucket), kind.dtype), bucket.rows);
  for (const HeldSegment* h : own) {
    const auto tensor = h->tensors.find(kind);
    if (tensor == h->tensors.end()) continue;
    rows.row(ranks.rank()).narrow(0, h->segment.offset, h->segment.numel).copy_(tensor->second);
  }
  if (ranks.world_size() > 1) {
    // As bytes, since not every transport knows every dtype.
    const at::Tensor bytes = rows.values().view({-1}).view(at::kByte);
    RowCommunicator(ranks)
        .gather_rows(Rows(bytes, bucket.rows.times(rows.values().element_size())),
                     c10::str(kind.name, " of bucket ", b, " before resize_rows()"))
        .wait();
  }
  return rows;
}

// Copies to the segments of now what they continue of a bucket of before.
void copy_bucket(const Plan& plan, const Bucket& bucket, const at::Tensor& values,
                 const std::vector<RowSources>& sources, const Targets& targets) {
  for (const Slot& slot : bucket.slots) {
    if (targets[slot.parameter].empty()) continue;
    for (const Span& span : plan.spans(bucket, slot)) {
      const ElementRange before{span.parameter_begin,
                                values.narrow(0, span.bucket_begin, span.numel)};
      for (const Target& target : targets[slot.parameter]) {
        const bool overlaps = target.source.begin < span.parameter_begin + span.numel &&
                              span.parameter_begin < target.source.end;
        if (overlaps) copy_rows(before, target.elements, sources[slot.parameter]);
      }
    }
  }
}

// Collective. Fills into[i], of segment i of `engine`, with what `kind` is in `from`, where rows go
// on with others. Frees it in `from`.
void move_rows(HeldShards& from, const Kind& kind, const std::vector<RowSources>& sources,
               Engine& engine, const std::vector<at::Tensor>& into) {
  const Targets targets = targets_of(engine, sources, into);
  std::vector<std::vector<const HeldSegment*>> own(from.plan.buckets.size());
  for (const HeldSegment& h : from.segments) own[h.segment.bucket].push_back(&h);
  for (size_t b = 0; b < from.plan.buckets.size(); ++b) {
    const Bucket& bucket = from.plan.buckets[b];
    const bool has_kind =
        std::ranges::any_of(bucket.slots, [&](const Slot& s) { return kind.of[s.parameter] != 0; });
    if (!has_kind) continue;
    const Rows rows = gather_bucket(engine, from, kind, b, own[b]);
    copy_bucket(from.plan, bucket, rows.values().view({-1}), sources, targets);
    engine.pool.release(rows.values());
  }
  for (HeldSegment& h : from.segments) h.tensors.erase(kind);
}

// Collective. A master whose working value is still the same goes on; the other ones, which were
// given, are in the masters of `engine` already.
void move_masters(HeldShards& from, const Kind& kind, const std::vector<RowSources>& sources,
                  Engine& engine) {
  std::vector<at::Tensor> into;
  for (const SegmentTensors& s : engine.shards.segments()) {
    const bool moves =
        kind.of[s.segment.parameter] != 0 && !engine.arena.is_master(s.segment.bucket);
    into.push_back(moves ? elements_of(engine.shards.masters().values(s), s.master).clone()
                         : at::Tensor());
  }
  move_rows(from, kind, sources, engine, into);
  for (size_t i = 0; i < into.size(); ++i) {
    if (!into[i].defined()) continue;
    const SegmentTensors& s = engine.shards.segments()[i];
    MasterRows& masters = engine.shards.masters();
    const at::Tensor given = elements_of(masters.values(s), s.master);
    masters.set(s, at::where(masters.rounded(s, into[i]).eq(given), into[i], given));
  }
}

// Collective. The average of a row that comes begins as its master, as all averages of `engine` do.
void move_averages(HeldShards& from, const Kind& kind, const std::vector<RowSources>& sources,
                   Engine& engine) {
  std::vector<at::Tensor> into;
  for (const SegmentTensors& s : engine.shards.segments()) {
    into.push_back(kind.of[s.segment.parameter] != 0 ? elements_of(s.ema, s.master) : at::Tensor());
  }
  move_rows(from, kind, sources, engine, into);
}

// Collective.
void move_state(HeldShards& from, const std::vector<RowSources>& sources, Engine& engine) {
  torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  const std::vector<SegmentTensors>& segments = engine.shards.segments();
  std::vector<InnerState> states(segments.size());
  for (const Kind& kind : from.kinds) {
    if (kind.is_value || kind.name == kMaster || kind.name == kEmaKind) continue;
    std::vector<at::Tensor> into;
    for (const SegmentTensors& s : segments) {
      into.emplace_back();
      if (kind.of[s.segment.parameter] == 0) continue;
      into.back() = at::zeros({s.segment.numel}, s.master.options().dtype(kind.dtype));
      // As Adagrad has it for what no step has used.
      if (const auto initial = read_inner_state(inner, s.group, s.master)) {
        for (const auto& [name, tensor] : initial->tensors) {
          if (name == kind.name) into.back().copy_(elements_of(tensor, s.master));
        }
      }
    }
    move_rows(from, kind, sources, engine, into);
    for (size_t i = 0; i < segments.size(); ++i) {
      if (!into[i].defined()) continue;
      states[i].tensors.emplace_back(kind.name, in_shape_of(into[i], segments[i].master));
    }
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const SegmentTensors& s = segments[i];
    for (const Kind& kind : from.kinds) {
      const int64_t p = s.segment.parameter;
      if (!kind.is_value || kind.of[p] == 0) continue;
      states[i].values.emplace_back(kind.name, value_of(kind.bits[p], kind.dtype));
    }
    if (states[i].tensors.empty() && states[i].values.empty()) continue;
    inner.state()[s.master.unsafeGetTensorImpl()] =
        adapter_of(inner, s.group).make_state(inner, s.group, s.master, states[i], s.moments);
  }
  engine.shards.adopt_inner_state();
}

// ---- The parameters

// Gives the parameter other memory, of another size.
void set_rows(const Parameter& p, const ResizedRows& change, const RowSources& sources) {
  at::Tensor tensor = p.tensor;
  const at::Tensor before = tensor.detach();
  const at::Tensor now = resized(p, sources, tensor.device()).tensor;
  now.copy_(change.values.defined() ? change.values.detach()
                                    : before.index_select(0, sources.rows.to(before.device())));
  tensor.mutable_grad() = at::Tensor();
  tensor.set_data(now);
  // A graph that lives has an accumulator for the former shape, and the former values.
  torch::autograd::impl::set_grad_accumulator(tensor, {});
  torch::autograd::impl::bump_version(tensor);
}

// ---- The steps

// Collective. Throws on all ranks, with all as it was, where one of them cannot make the change.
// Returns where the rows of each parameter come from.
std::vector<RowSources> agree_to_resize(Engine& engine, const Checkpoints& checkpoints,
                                        const std::vector<ResizedRows>& changes,
                                        const Engine::ParamGroups& groups) {
  const std::string replaced = engine.table.refresh_lists(engine.module);
  std::vector<RowSources> sources;
  std::string text;
  std::exception_ptr problem;
  try {
    sources = sources_of(engine, changes);
    text = description_of_change(engine, sources);
  } catch (...) {  // whatever a function of the user throws
    problem = std::current_exception();
  }
  const auto check = [&] {
    TORCH_CHECK(!engine.options.mesh_group() && engine.options.placements().empty(),
                "expected plain data parallelism, got a mesh or placements; save a "
                "checkpoint and make a new optimizer");
    TORCH_CHECK(replaced.empty(), replaced);
    if (problem) std::rethrow_exception(problem);
    engine.check_no_gradients();
    checkpoints.check_none_pending();
    engine.shards.groups().check(groups);
    check_options(groups);
    engine.table.verify_unchanged();
    check_new(engine, sources, groups);
    check_state(engine);
  };
  engine.agree(Call::kResizeRows, check,
               {text, whole_arguments(engine, engine.options.protect() > 0)});
  return sources;
}

// Collective. The parameters get their new sizes, and an engine of their own, which sends rank 0's
// values. If it throws, `engine` has the inner optimizer back.
std::unique_ptr<Engine> change_parameters(Engine& engine, const std::vector<ResizedRows>& changes,
                                          const std::vector<RowSources>& sources,
                                          Engine::ParamGroups& groups) {
  std::unique_ptr<torch::optim::Optimizer> inner = engine.release();
  try {
    for (const ResizedRows& change : changes) {
      const int64_t index = engine.table.index_or_throw(change.parameter);
      set_rows(engine.table.parameters()[index], change, sources[index]);
    }
    return engine.make_over_same_ranks(inner, groups);
  } catch (...) {
    if (inner) engine.shards.give_back_inner(std::move(inner));
    throw;
  }
}

// Collective.
void move_everything(HeldShards& from, const std::vector<RowSources>& sources, Engine& engine) {
  for (const Kind& kind : from.kinds) {
    if (kind.name == kMaster) move_masters(from, kind, sources, engine);
    if (kind.name == kEmaKind) move_averages(from, kind, sources, engine);
  }
  move_state(from, sources, engine);
  engine.record.restore(from.counts, from.scale, engine.record.scaler().dynamic());
}

}  // namespace

//   1. Ranks agree on the change, which every rank has checked for itself.
//   2. This rank keeps what it holds of all parameters, and the engine lets go of the rest.
//   3. The parameters change, and an engine is made for them.
//   4. State and masters move, kind by kind.
void Replanning::resize_rows(const std::vector<ResizedRows>& changes, ParamGroups& groups) {
  const at::NoGradGuard no_grad;
  std::vector<RowSources> sources;
  HeldShards held;
  std::unique_ptr<Engine> made;
  Engine& old_engine = *engine_;
  old_engine.protocol.run_call([&] {
    recovery_.finish();
    sources = agree_to_resize(old_engine, checkpoints_, changes, groups);
    old_engine.comms->close_on_error([&] {
      held = collect_shards(old_engine);
      made = change_parameters(old_engine, changes, sources, groups);
    });
  });
  engine_ = std::move(made);
  Engine& new_engine = *engine_;
  new_engine.protocol.run_call([&] {
    new_engine.comms->close_on_error([&] { move_everything(held, sources, new_engine); });
    recovery_.protect_at_once(groups, call_name(Call::kResizeRows));
  });
}

}  // namespace zero
