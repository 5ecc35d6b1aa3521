// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/row_resizing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/agreement/fingerprint.h"
#include "zero/comm/row_communicator.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/inner_optimizers/state.h"
#include "zero/memory/row_copies.h"
#include "zero/optimizer/mesh_description.h"
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

// The parameter as it will be, without memory.
Parameter resized(const Parameter& p, const RowSources& sources) {
  Parameter result = p;
  result.sizes[0] = sources.rows.numel();
  result.tensor =
      at::empty(result.sizes, at::TensorOptions().dtype(p.tensor.scalar_type()).device(at::kMeta));
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
                    resized(before[i], sources[i]).tensor, before[i].name);
  }
}

std::string text_of(const Engine& engine, const std::vector<RowSources>& sources) {
  const torch::optim::Optimizer& inner = engine.shards.raw_inner();
  std::string text;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& rows = sources[i].rows;
    if (!rows.defined()) continue;
    const auto hash =
        fingerprint_of(std::string(static_cast<const char*>(rows.const_data_ptr()), rows.nbytes()));
    const Parameter& p = engine.table.parameters()[i];
    text += c10::str(text.empty() ? "" : ", ", p.name, " to ", rows.numel(), " rows with hash ",
                     hash[0], " ", hash[2]);
    if (engine.plan.arenas[engine.plan.parameter_arena[i]].layout->is_whole()) {
      text += c10::str(" and cost ", cost_of(resized(p, sources[i]), inner, engine.options));
    }
  }
  return text;
}

// ---- What moves

// One tensor of each parameter that has it: its master, or one of its state.
struct Kind {
  std::string name;
  c10::ScalarType dtype = at::kFloat;
  std::vector<uint8_t> of;  // per parameter
};
// One number of each parameter that has it.
struct ValueKind : Kind {
  std::vector<int64_t> bits;  // per parameter, as bits_of()
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
  // 1-D, by name and dtype; given away kind by kind.
  std::map<std::pair<std::string, c10::ScalarType>, at::Tensor> tensors;
  std::vector<std::pair<std::string, at::Tensor>> values;
};

// This rank's shard and what ranks have agreed to be in the shards of all.
struct HeldShards {
  Plan plan;
  std::vector<HeldSegment> segments;
  std::vector<Kind> kinds;
  std::vector<ValueKind> values;
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

void hold(Engine& engine, HeldShards& held) {
  const torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  for (const SegmentTensors& s : engine.shards.segments()) {
    HeldSegment h{s.segment, {}, {}};
    if (!engine.arena.is_master(s.segment.bucket)) {
      h.tensors[{kMaster, at::kFloat}] = elements_of(engine.shards.masters().values(s), s.master);
    }
    if (s.ema.defined()) h.tensors[{kEmaKind, at::kFloat}] = elements_of(s.ema, s.master);
    if (auto state = read_inner_state(inner, s.group, s.master)) {
      for (const auto& [name, tensor] : state->tensors) {
        h.tensors[{name, tensor.scalar_type()}] = elements_of(tensor, s.master);
      }
      h.values = std::move(state->values);
    }
    held.segments.push_back(std::move(h));
  }
}

// Collective. A rank may hold nothing of a parameter, and none of its state is then there.
void agree_on_kinds(Communicator& control, size_t parameters, HeldShards& held) {
  // 1. The names that any rank has, in one order: "t" of tensors and "v" of values.
  std::set<std::string> names;
  const auto name = [](char which, const std::string& kind, const at::Tensor& tensor) {
    return c10::str(which, static_cast<int>(tensor.scalar_type()), " ", kind, "\n");
  };
  for (const HeldSegment& h : held.segments) {
    for (const auto& [kind, tensor] : h.tensors) names.insert(name('t', kind.first, tensor));
    for (const auto& [kind, tensor] : h.values) names.insert(name('v', kind, tensor));
  }
  std::string own;
  for (const std::string& n : names) own += n;
  for (const std::string& text : control.all_gather_text(own, "names of state")) {
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
      end = text.find('\n', begin);
      names.insert(text.substr(begin, end + 1 - begin));
    }
  }
  TORCH_CHECK(names.size() <= kMostKinds, "expected at most ", kMostKinds, " kinds of state, got ",
              names.size());
  // 2. Which parameters have them.
  std::map<std::string, size_t> number;
  for (const std::string& n : names) number.emplace(n, number.size());
  const auto count = static_cast<int64_t>(parameters);
  const at::Tensor flags = at::zeros({count}, at::kInt);
  const at::Tensor bits = at::full({static_cast<int64_t>(names.size()), count},
                                   std::numeric_limits<int64_t>::min(), at::kLong);
  auto* const flag = flags.mutable_data_ptr<int32_t>();
  auto* const bit = bits.mutable_data_ptr<int64_t>();
  for (const HeldSegment& h : held.segments) {
    const int64_t p = h.segment.parameter;
    for (const auto& [kind, tensor] : h.tensors) {
      flag[p] |= 1 << number[name('t', kind.first, tensor)];
    }
    for (const auto& [kind, tensor] : h.values) {
      const size_t n = number[name('v', kind, tensor)];
      flag[p] |= 1 << n;
      bit[static_cast<int64_t>(n) * count + p] = bits_of(tensor);
    }
  }
  control.all_reduce_or(flags, "state of parameters").wait();
  for (const auto& [n, k] : number) {
    const size_t space = n.find(' ');
    const auto dtype = static_cast<c10::ScalarType>(std::stoi(n.substr(1, space - 1)));
    Kind kind{n.substr(space + 1, n.size() - space - 2), dtype, {}};
    for (size_t p = 0; p < parameters; ++p) kind.of.push_back(flag[p] >> k & 1);
    if (n[0] == 't') {
      held.kinds.push_back(std::move(kind));
      continue;
    }
    const at::Tensor row = bits[static_cast<int64_t>(k)];
    control.all_reduce_max(row, "counts of parameters").wait();
    const auto* const values = row.const_data_ptr<int64_t>();
    held.values.push_back({std::move(kind), {values, values + count}});
  }
}

// The elements [begin, end) of a parameter of before between which those are that a segment of now
// goes on with.
struct Reach {
  int64_t begin = 0;
  int64_t end = 0;
};

Reach reach_of(const Segment& segment, const RowSources& sources) {
  const int64_t end = segment.begin + segment.numel;
  if (!sources.rows.defined()) return {segment.begin, end};
  const int64_t n = sources.row_numel;
  const int64_t first = segment.begin / n;
  const at::Tensor rows = sources.rows.narrow(0, first, (end + n - 1) / n - first);
  const at::Tensor continued = rows.masked_select(rows.ge(0));
  if (continued.numel() == 0) return {};
  return {continued.min().item<int64_t>() * n, (continued.max().item<int64_t>() + 1) * n};
}

// Collective. Fills into[i], of segment i of `engine`, with what `kind` is in `from`, where rows go
// on with others. Frees it in `from`.
void move(HeldShards& from, const Kind& kind, const std::vector<RowSources>& sources,
          Engine& engine, const std::vector<at::Tensor>& into) {
  struct Target {
    Reach reach;
    ElementRange elements;
  };
  std::vector<std::vector<Target>> targets(sources.size());  // per parameter
  for (size_t i = 0; i < into.size(); ++i) {
    if (!into[i].defined()) continue;
    const Segment& s = engine.shards.segments()[i].segment;
    targets[s.parameter].push_back({reach_of(s, sources[s.parameter]), {s.begin, into[i]}});
  }
  std::vector<std::vector<const HeldSegment*>> own(from.plan.buckets.size());
  for (const HeldSegment& h : from.segments) own[h.segment.bucket].push_back(&h);
  Communicator& ranks = *engine.comms->domains.front().data;
  for (size_t b = 0; b < from.plan.buckets.size(); ++b) {
    const Bucket& bucket = from.plan.buckets[b];
    if (std::none_of(bucket.slots.begin(), bucket.slots.end(),
                     [&](const Slot& slot) { return kind.of[slot.parameter] != 0; })) {
      continue;
    }
    // 1. All ranks get the bucket.
    const Rows rows(engine.pool.acquire(from.plan.bucket_numel(bucket), kind.dtype), bucket.rows);
    for (const HeldSegment* h : own[b]) {
      const auto tensor = h->tensors.find({kind.name, kind.dtype});
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
    // 2. Each takes what its segments continue.
    const at::Tensor flat = rows.values().view({-1});
    for (const Slot& slot : bucket.slots) {
      if (kind.of[slot.parameter] == 0) continue;
      for (const Span& span : from.plan.spans(bucket, slot)) {
        const ElementRange before{span.parameter_begin,
                                  flat.narrow(0, span.bucket_begin, span.numel)};
        for (const Target& target : targets[slot.parameter]) {
          if (target.reach.end <= span.parameter_begin ||
              target.reach.begin >= span.parameter_begin + span.numel) {
            continue;
          }
          copy_rows(before, target.elements, sources[slot.parameter]);
        }
      }
    }
    engine.pool.release(rows.values());
  }
  for (HeldSegment& h : from.segments) h.tensors.erase({kind.name, kind.dtype});
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
  move(from, kind, sources, engine, into);
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
  move(from, kind, sources, engine, into);
}

// Collective.
void move_state(HeldShards& from, const std::vector<RowSources>& sources, Engine& engine) {
  torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  const std::vector<SegmentTensors>& segments = engine.shards.segments();
  std::vector<InnerState> states(segments.size());
  for (const Kind& kind : from.kinds) {
    if (kind.name == kMaster || kind.name == kEmaKind) continue;
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
    move(from, kind, sources, engine, into);
    for (size_t i = 0; i < segments.size(); ++i) {
      if (!into[i].defined()) continue;
      states[i].tensors.emplace_back(kind.name, in_shape_of(into[i], segments[i].master));
    }
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const SegmentTensors& s = segments[i];
    for (const ValueKind& kind : from.values) {
      const int64_t p = s.segment.parameter;
      if (kind.of[p] != 0) {
        states[i].values.emplace_back(kind.name, value_of(kind.bits[p], kind.dtype));
      }
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
  std::vector<int64_t> sizes = p.sizes;
  std::vector<int64_t> strides = p.strides;
  sizes[0] = sources.rows.numel();
  strides[0] = sources.row_numel;
  const at::Tensor now = at::empty_strided(sizes, strides, before.options());
  now.copy_(change.values.defined() ? change.values.detach()
                                    : before.index_select(0, sources.rows.to(before.device())));
  tensor.mutable_grad() = at::Tensor();
  tensor.set_data(now);
  // A graph that lives has an accumulator for the former shape, and the former values.
  torch::autograd::impl::set_grad_accumulator(tensor, {});
  torch::autograd::impl::bump_version(tensor);
}

}  // namespace

//   1. Ranks agree on the change, which every rank has checked for itself.
//   2. This rank keeps what it holds of all parameters, and the engine lets go of the rest.
//   3. The parameters change, and an engine is made for them, which sends rank 0's values.
//   4. State and masters move, kind by kind.
void resize_rows(std::shared_ptr<Engine>& present, Recovery& recovery,
                 const Checkpoints& checkpoints, const std::vector<ResizedRows>& changes,
                 Engine::ParamGroups& groups) {
  const at::NoGradGuard no_grad;
  const std::string call = call_name(Call::kResizeRows);
  std::vector<RowSources> sources;
  HeldShards held;
  std::unique_ptr<Engine> made;
  Engine& before = *present;
  before.protocol.fail_stop([&] {
    // 1
    recovery.finish();
    const std::string replaced = before.table.refresh_lists(before.module);
    std::string text;
    std::exception_ptr problem;
    try {
      sources = sources_of(before, changes);
      text = text_of(before, sources);
    } catch (...) {  // whatever a function of the user throws
      problem = std::current_exception();
    }
    before.agree(Call::kResizeRows,
                 [&] {
                   TORCH_CHECK(!before.options.mesh_group() && before.options.placements().empty(),
                               "expected plain data parallelism, got a mesh or placements; save a "
                               "checkpoint and make a new optimizer");
                   TORCH_CHECK(replaced.empty(), replaced);
                   if (problem) std::rethrow_exception(problem);
                   before.check_no_gradients();
                   checkpoints.check_none_pending();
                   before.shards.groups().check(groups);
                   check_options(groups);
                   before.table.verify_unchanged();
                   check_new(before, sources, groups);
                   check_state(before);
                 },
                 {text, whole_arguments(before, before.options.protect() > 0)});
    // 2
    before.comms->run_or_close([&] {
      before.record.follow_loss_scale();
      held.plan = before.plan;
      held.counts = before.record.counts();
      held.scale = before.record.scaler().state();
      hold(before, held);
      agree_on_kinds(*before.comms->control, sources.size(), held);
      std::unique_ptr<torch::optim::Optimizer> inner = before.release();
      // 3
      try {
        for (const ResizedRows& change : changes) {
          const int64_t index = before.table.index_or_throw(change.parameter);
          set_rows(before.table.parameters()[index], change, sources[index]);
        }
        made = before.make_over_same_ranks(inner, groups);
      } catch (...) {
        if (inner) before.shards.give_back_inner(std::move(inner));
        throw;
      }
    });
  });
  present = std::move(made);
  Engine& now = *present;
  now.protocol.fail_stop([&] {
    // 4
    now.comms->run_or_close([&] {
      for (const Kind& kind : held.kinds) {
        if (kind.name == kMaster) move_masters(held, kind, sources, now);
        if (kind.name == kEmaKind) move_averages(held, kind, sources, now);
      }
      move_state(held, sources, now);
      now.record.restore(held.counts, held.scale, now.record.scaler().dynamic());
    });
    recovery.protect_at_once(groups, call);
  });
}

}  // namespace zero
