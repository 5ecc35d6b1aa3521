// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/call_sequence.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <sstream>

#include "tests/training/draws.h"

namespace zero {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter,
                               Layout::kWholeParameters};

// Gradients of a pass are multiples of 1/4 of at most 16 such units, and a 16-bit float holds 256.
constexpr int kPassesAStep = 12;

class Generator : Draws {
 public:
  explicit Generator(uint64_t seed)
      : Draws(seed * 0x9E3779B97F4A7C15u),
        of_average_(seed),
        of_formats_(~seed),
        of_moments_(seed * 7 + 1),
        of_early_updates_(seed * 11 + 5) {
    s_.seed = seed;
    if (!of_average_.percent(40)) return;
    s_.ema = EmaOptions()
                 .decay(0.1 * static_cast<double>(of_average_.below(10)))
                 .warm_up(of_average_.below(2) == 0);
  }

  CallSequence draw() {
    draw_group();
    draw_early_updates();
    draw_moments();
    s_.options = draw_options();
    static_graph_ = percent(8);
    s_.options.static_graph(static_graph_);
    if (updates_early_) {
      draw_steps_of_a_pass();
    } else if (static_graph_) {
      draw_equal_steps();
    } else {
      const int64_t count = 5 + below(9);
      for (int64_t i = 0; i < count; ++i) s_.events.push_back(draw_event());
      s_.events.push_back(event(Action::kStep));
    }
    if (percent(50)) s_.events.push_back(event(Action::kAllMasters));
    if (static_graph_) {
      for (Event& e : s_.events) e.average = e.action == Action::kStep && looks_at_average();
    }
    return std::move(s_);
  }

 private:
  int rank() { return static_cast<int>(below(s_.world_size)); }
  int unit() { return static_cast<int>(below(static_cast<int64_t>(s_.layers.size()) + 1)); }

  bool looks_at_average() { return s_.ema && of_average_.below(2) == 0; }

  void draw_group() {
    s_.world_size = pick<int>({{1, 8}, {2, 46}, {3, 30}, {4, 16}});
    s_.mesh_kind =
        s_.world_size == 1
            ? MeshKind::kFlat
            : pick<MeshKind>(
                  {{MeshKind::kFlat, 76}, {MeshKind::kReplicas, 12}, {MeshKind::kExperts, 12}});
    s_.wire = pick<Wire>(
        {{Wire::kMemory, 30}, {Wire::kNative, 15}, {Wire::kGloo, 30}, {Wire::kShared, 25}});
    // Over a backend with collectives of its own, the first level of two blocks the caller on the
    // host, who may be in a pass that other ranks do not run. On a GPU it blocks a stream.
    if (s_.world_size == 4 && s_.wire != Wire::kNative) {
      s_.ranks_per_machine = pick<int>({{0, 4}, {2, 12}});
    }
    s_.dtype = pick<c10::ScalarType>({{c10::ScalarType::Float, 60},
                                      {c10::ScalarType::BFloat16, 30},
                                      {c10::ScalarType::Half, 10}});
    s_.inner = pick<Inner>(
        {{Inner::kSgd, 25}, {Inner::kSgdMomentum, 25}, {Inner::kAdam, 20}, {Inner::kAdamW, 30}});
    const int64_t count = 2 + below(5);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t inputs = 1 + below(13);
      s_.layers.emplace_back(inputs, 1 + below(9));
    }
    // Between optimizers that hand over a checkpoint these stay.
    if (percent(35)) s_.reduction = Reduction::kSum;
    // No norm of such gradients is near one of them.
    if (percent(25)) s_.largest_norm = pick<double>({{1.137, 1}, {4.519, 2}, {12.731, 1}});
    const bool half = s_.dtype == c10::ScalarType::Half;
    if (half || percent(25)) {
      scaler_ = LossScalerOptions()
                    .initial_scale(static_cast<double>(int64_t{1} << below(6)))
                    .growth_interval(1 + below(3))
                    .max_scale(64);
    }
  }

  // Nothing may need the whole gradient before an update.
  void draw_early_updates() {
    updates_early_ = of_early_updates_.below(8) == 0;
    if (!updates_early_) return;
    scaler_.reset();
    s_.largest_norm.reset();
    if (s_.mesh_kind == MeshKind::kReplicas) s_.mesh_kind = MeshKind::kFlat;
  }

  // Every bit of such a sequence must be known, so that its gradients are no thirds, and it clips
  // by one value, whose norm has an exact sum of powers.
  void draw_moments() {
    const bool exact =
        s_.world_size != 3 || (s_.reduction == Reduction::kSum && s_.mesh_kind == MeshKind::kFlat);
    s_.has_moments = exact && s_.inner != Inner::kSgd && of_moments_.below(6) == 0;
    if (!s_.has_moments) return;
    s_.layers[0] = {640 + of_moments_.below(200), 5 + of_moments_.below(5)};
  }

  ZeroOptions draw_options() {
    ZeroOptions options;
    options.stage(1 + below(2))
        .layout(kLayouts[below(3)])
        .bucket_bytes(draw_bucket_bytes())
        .fused(percent(70))
        .overlap_gather(percent(40))
        .no_sync_fp32(percent(25))
        .reduction(s_.reduction)
        .loss_scaler(scaler_);
    if (percent(25)) options.reduce_dtype(c10::ScalarType::Float);
    if (percent(15)) options.reduce_dtype(c10::ScalarType::BFloat16);
    if (s_.ranks_per_machine > 0 && percent(50)) options.gather_wire(GatherWire::kChanges);
    if (s_.has_moments) {
      options.fused(true).moments(of_moments_.pick<Moments>(
          {{Moments::kInt8, 2}, {Moments::kBFloat16, 1}, {Moments::kFloat32, 1}}));
      // Its first layer is 50 times as large as others, and would be in thousands of buckets.
      if (const int64_t bytes = *options.bucket_bytes(); bytes > 0) {
        options.bucket_bytes(std::max<int64_t>(bytes, 500));
      }
    }
    if (updates_early_) {
      options.fused(true).skip_nonfinite(false).gather_wire(GatherWire::kWhole);
      options.update_in_backward(of_early_updates_.below(5) != 0);
    }
    draw_formats(options);
    return options;
  }

  // Those that lose nothing: sums of these gradients are bf16 numbers, unless they are thirds.
  void draw_formats(ZeroOptions& options) {
    const bool rare = of_formats_.below(4) == 0, rarer = of_formats_.below(3) == 0;
    const bool thirds = s_.world_size == 3 && s_.reduction == Reduction::kMean;
    if (rare && !thirds) options.gradient_shard_dtype(c10::ScalarType::BFloat16);
    options.split_masters(rarer && s_.dtype == c10::ScalarType::BFloat16 && options.fused() &&
                          options.layout() != Layout::kPerParameter);
  }

  int64_t draw_bucket_bytes() {
    switch (below(4)) {
      case 0:
        return below(2) * 16;
      case 1:
        return 16 + below(100);
      case 2:
        return 64 + below(800);
      default:
        return 1 << 20;
    }
  }

  PassKind draw_kind(bool first) {
    return pick<PassKind>({{PassKind::kOwn, 34},
                           {PassKind::kPlain, 22},
                           {PassKind::kNoSync, 14},
                           {PassKind::kPlainNoSync, 5},
                           {PassKind::kWithGrad, 10},
                           {PassKind::kOnlyGrad, 4},
                           {PassKind::kNoGraph, 6},
                           {first ? PassKind::kByHand : PassKind::kOwn, 5}});
  }

  Pass draw_pass(PassKind kind) {
    Pass pass;
    pass.kind = kind;
    pass.seed = number();
    if (pass.kind == PassKind::kNoGraph) return pass;
    const int64_t share = 30 + below(71);
    for (size_t u = 0; u <= s_.layers.size(); ++u) {
      if (percent(share)) pass.units |= 1U << u;
    }
    if (pass.units == 0) pass.units = 1U << unit();
    const int special = unit();
    if ((pass.units >> special & 1) != 0) {
      if (percent(15)) pass.again = special;
      if (pass.kind != PassKind::kOnlyGrad && percent(6)) pass.nonfinite = special;
    }
    return pass;
  }

  std::vector<std::vector<Pass>> draw_passes() {
    std::vector<std::vector<Pass>> passes(s_.world_size);
    if (step_.passes + 2 > kPassesAStep || step_.clipped) return passes;
    enum class Who { kAnyNumber, kOneEach, kOneRank, kNone };
    const Who who = pick<Who>(
        {{Who::kAnyNumber, 30}, {Who::kOneEach, 25}, {Who::kOneRank, 20}, {Who::kNone, 25}});
    const int only = rank();
    for (int r = 0; r < s_.world_size && who != Who::kNone; ++r) {
      if (who == Who::kOneRank && r != only) continue;
      const int64_t count = who == Who::kAnyNumber ? below(3) : 1;
      for (int64_t i = 0; i < count; ++i) {
        passes[r].push_back(draw_pass(draw_kind(i == 0 && !step_.pending)));
      }
    }
    return passes;
  }

  Action draw_action() {
    if (percent(4)) return draw_misuse();
    const bool pending = step_.pending, clipped = step_.clipped;
    const bool clips = pending && !step_.dropped && !(s_.has_moments && clipped);
    // Ranks drop as many rounds each where a call has completed them and every rank had gradients.
    const bool drops =
        step_.completed && !clipped && std::ranges::all_of(step_.has_gradients, std::identity());
    // The names of experts would meet in one folder.
    const bool saves = !pending && s_.mesh_kind != MeshKind::kExperts;
    return pick<Action>(
        {{Action::kNothing, clipped ? 0 : 8},
         {Action::kReduce, 8},
         {Action::kNorm, 14},
         {Action::kGradient, 8},
         {Action::kMaster, 10},
         {Action::kCheckReplicas, 5},
         {Action::kRefreshWorking, 5},
         {Action::kRefreshMasters, 4},
         {Action::kBroadcastBuffers, 4},
         {Action::kStep, clipped ? 40 : 25},
         {Action::kClip, clips ? 9 : 0},
         {Action::kClipValue, clips ? 5 : 0},
         {Action::kModuleZeroGrad, drops ? 8 : 0},
         {Action::kZeroGrad, !pending || step_.everywhere || step_.refused ? 4 : 0},
         {Action::kCheckpoint, saves ? 2 : 0},
         {Action::kCheckpointAsync, saves ? 1 : 0},
         {Action::kResizeRows, !pending && s_.mesh_kind == MeshKind::kFlat ? 12 : 0}});
  }

  Action draw_misuse() {
    const int several = s_.world_size > 1 ? 1 : 0;
    // Of experts each rank may ask for another parameter.
    const int one_model = s_.mesh_kind != MeshKind::kExperts ? several : 0;
    const bool uneven = first_on_some_ranks_ && !step_.refused;
    return pick<Action>({{Action::kInvalidNorm, 1},
                         {Action::kInsideNoSync, 1},
                         {Action::kDifferentNorms, several},
                         {Action::kDifferentClips, several},
                         {Action::kDifferentRates, several},
                         {Action::kDifferentCalls, several},
                         {Action::kDifferentParameters, one_model},
                         {Action::kBackwardAfterClip, step_.clipped ? 4 : 0},
                         {Action::kBrokenBackward, step_.clipped ? 0 : 1},
                         // Those that zero_grad() of the module dropped are no reason to refuse.
                         {Action::kSaveWithGradients, step_.pending && !step_.dropped ? 1 : 0},
                         {Action::kUnevenZeroGrad, uneven ? 3 : 0}});
  }

  Event event(Action action) {
    Event e;
    e.passes.resize(s_.world_size);
    e.action = action;
    e.seed = number();
    e.odd = rank();
    if (percent(20)) e.late = rank();
    e.norm_type =
        pick<double>({{2.0, 50}, {std::numeric_limits<double>::infinity(), 30}, {1.0, 20}});
    e.parameter = below(2 * static_cast<int64_t>(s_.layers.size()) + 3);
    if (action == Action::kClip) e.max_norm = pick<double>({{0.05, 1}, {1.0, 1}, {30.0, 1}});
    if (action == Action::kClipValue) e.max_norm = pick<double>({{0.01, 1}, {0.2, 1}, {4.0, 1}});
    if (action == Action::kResizeRows) draw_rows(e);
    if (action == Action::kStep && percent(30)) e.rate = 0.01 * static_cast<double>(1 + below(8));
    // Of 16-bit parameters those that are not edited would round their masters.
    e.units = s_.all_units();
    if (s_.dtype == c10::ScalarType::Float) e.units &= static_cast<unsigned>(number());
    e.look = percent(50) ? s_.all_units() : static_cast<unsigned>(number()) & s_.all_units();
    e.options = draw_options();
    return e;
  }

  void draw_rows(Event& e) {
    e.layer = below(static_cast<int64_t>(s_.layers.size()));
    rows_.resize(s_.layers.size());
    int64_t& rows = rows_[e.layer];
    if (rows == 0) rows = s_.layers[e.layer].second;
    e.has_values = percent(60);
    const int64_t count = 1 + below(12);
    for (int64_t i = 0; i < count; ++i) {
      e.rows.push_back(e.has_values && percent(30) ? -1 : below(rows));
    }
    rows = count;
  }

  Event draw_event() {
    auto passes = draw_passes();
    size_t most = 0, with = 0;
    step_.has_gradients.resize(passes.size(), false);
    for (size_t r = 0; r < passes.size(); ++r) {
      const auto& of_rank = passes[r];
      for (const Pass& pass : of_rank) {
        step_.completed = false;
        if (!needs_round(pass) || pass.kind == PassKind::kNoGraph) continue;
        step_.has_gradients[r] = true;
        step_.dropped = false;
      }
      most = std::max(most, of_rank.size());
      with += std::any_of(of_rank.begin(), of_rank.end(), needs_round) ? 1 : 0;
    }
    first_on_some_ranks_ = !step_.pending && with > 0 && !step_.everywhere && with < passes.size();
    step_.everywhere = step_.everywhere || with == passes.size();
    step_.pending = step_.pending || with > 0;
    step_.passes += static_cast<int>(most);
    Event e = event(draw_action());
    e.passes = std::move(passes);
    follow(e.action);
    e.average = !step_.pending && !is_misuse(e.action) && looks_at_average();
    return e;
  }

  // What later draws must know.
  void follow(Action action) {
    switch (action) {
      case Action::kNothing:
        return;
      case Action::kModuleZeroGrad:
        step_.has_gradients.clear();
        step_.dropped = true;
        return;
      case Action::kStep:
      case Action::kZeroGrad:
      case Action::kBrokenBackward:
        step_ = {};
        return;
      case Action::kClip:
      case Action::kClipValue:
        step_.clipped = true;
        [[fallthrough]];
      case Action::kReduce:
      case Action::kNorm:
      case Action::kGradient:
        step_.everywhere = step_.pending;
        break;
      default:
        break;
    }
    step_.refused = is_misuse(action);
    if (!step_.refused) step_.completed = true;
  }

  // With update_in_backward: a pass before each step on some ranks or all, and learning rates that
  // change where there is none. Between steps come other calls.
  void draw_steps_of_a_pass() {
    const int64_t count = 6 + below(9);
    for (int64_t i = 0; i < count; ++i) {
      s_.events.push_back(event(percent(70) ? Action::kStep : draw_call_between_steps()));
      Event& e = s_.events.back();
      if (e.action == Action::kStep) draw_a_pass(e);
      e.average = looks_at_average();
    }
  }

  Action draw_call_between_steps() {
    if (static_graph_) return Action::kMaster;
    const int saves = s_.mesh_kind != MeshKind::kExperts ? 1 : 0;
    return pick<Action>({{Action::kMaster, 3},
                         {Action::kCheckReplicas, 1},
                         {Action::kRefreshWorking, 2},
                         {Action::kRefreshMasters, 2},
                         {Action::kBroadcastBuffers, 1},
                         {Action::kZeroGrad, 1},
                         {Action::kResizeRows, s_.mesh_kind == MeshKind::kFlat ? 3 : 0},
                         {Action::kCheckpoint, saves},
                         {Action::kCheckpointAsync, saves}});
  }

  void draw_a_pass(Event& e) {
    const bool all = static_graph_ || percent(60);
    bool any = false;
    for (auto& of_rank : e.passes) {
      if (!all && percent(40)) continue;
      any = true;
      if (static_graph_) {
        of_rank.push_back({.units = s_.all_units(), .seed = number()});
        continue;
      }
      if (percent(10)) of_rank.push_back(draw_pass(PassKind::kByHand));
      of_rank.push_back(draw_pass(pick<PassKind>({{PassKind::kOwn, 14},
                                                  {PassKind::kWithGrad, 2},
                                                  {PassKind::kOnlyGrad, 1},
                                                  {PassKind::kNoGraph, 2}})));
      for (Pass& pass : of_rank) pass.nonfinite = -1;  // it would be stepped with
    }
    if (any) e.rate.reset();
  }

  // As static_graph promises: every step like the first, with all parameters on all ranks.
  void draw_equal_steps() {
    const auto passes = draw_equal_passes();
    std::vector<Event> step;
    for (const Action call : draw_calls_of_a_step()) step.push_back(event(call));
    step.front().passes = passes;
    for (int64_t i = 0; i < 4; ++i) {
      for (Event e : step) {
        for (auto& of_rank : e.passes) {
          for (Pass& pass : of_rank) {
            pass.seed = number();
            if (percent(3)) pass.nonfinite = unit();
          }
        }
        s_.events.push_back(std::move(e));
      }
      if (percent(20)) s_.events.push_back(event(Action::kMaster));
    }
  }

  std::vector<std::vector<Pass>> draw_equal_passes() {
    std::vector<Pass> of_rank;
    const int64_t count = 1 + below(2);
    for (int64_t i = 0; i < count; ++i) {
      const auto kind = pick<PassKind>(
          {{PassKind::kOwn, 3}, {PassKind::kPlain, 2}, {PassKind::kNoSync, i + 1 < count ? 2 : 0}});
      of_rank.push_back({.kind = kind, .units = s_.all_units()});
    }
    return std::vector<std::vector<Pass>>(s_.world_size, of_rank);
  }

  std::vector<Action> draw_calls_of_a_step() {
    std::vector<Action> calls;
    while (percent(50)) {
      calls.push_back(pick<Action>({{Action::kReduce, 1},
                                    {Action::kNorm, 2},
                                    {Action::kGradient, 1},
                                    {Action::kMaster, 1},
                                    {Action::kCheckReplicas, 1}}));
    }
    if (percent(40)) calls.push_back(Action::kClip);
    if (percent(20) && !(s_.has_moments && !calls.empty() && calls.back() == Action::kClip)) {
      calls.push_back(Action::kClipValue);
    }
    calls.push_back(Action::kStep);
    return calls;
  }

  // Draws of their own, so that the rest of a program does not depend on them.
  Draws of_average_, of_formats_, of_moments_, of_early_updates_;
  CallSequence s_;
  std::optional<LossScalerOptions> scaler_;
  bool static_graph_ = false;
  bool updates_early_ = false;  // ZeroOptions::update_in_backward, of most of its optimizers
  std::vector<int64_t> rows_;   // by layer, where they were resized
  // Since the last step.
  struct Step {
    bool pending = false;     // some rank needs a round
    bool everywhere = false;  // all ranks do, as far as each of them knows
    bool clipped = false;
    bool refused = false;             // the last collective call
    int passes = 0;                   // at most, of a rank
    std::vector<bool> has_gradients;  // by rank
    bool completed = true;            // a call has reduced all of them
    bool dropped = false;  // zero_grad() of the module was the last to do something with them
  } step_;
  bool first_on_some_ranks_ = false;  // the passes of this event need the first round since then
};

constexpr std::array<const char*, 3> kMeshNames = {"", " with replicas", " with experts"};
constexpr std::array<const char*, 8> kPassNames = {
    "own", "plain", "no_sync", "plain_no_sync", "with_grad", "only_grad", "no_graph", "by_hand"};
constexpr std::array<const char*, 29> kActionNames = {"nothing",
                                                      "reduce_gradients",
                                                      "grad_norm",
                                                      "clip_grad_norm_",
                                                      "clip_grad_value_",
                                                      "step",
                                                      "zero_grad",
                                                      "zero_grad of the module",
                                                      "gradient",
                                                      "master",
                                                      "master of all",
                                                      "check_replicas",
                                                      "refresh_working_parameters",
                                                      "refresh_master_parameters",
                                                      "broadcast_buffers",
                                                      "save_checkpoint, load_checkpoint",
                                                      "save_checkpoint_async, load_checkpoint",
                                                      "resize_rows",
                                                      "misuse: different norm types",
                                                      "misuse: different max_norm",
                                                      "misuse: gradient of different parameters",
                                                      "misuse: different learning rates",
                                                      "misuse: different calls",
                                                      "misuse: an invalid norm type",
                                                      "misuse: a call inside no_sync",
                                                      "misuse: a hook throws",
                                                      "misuse: backward after clipping",
                                                      "misuse: zero_grad on some ranks only",
                                                      "misuse: save with gradients"};

std::string text_of(const ZeroOptions& o) {
  std::ostringstream text;
  text << "stage " << o.stage() << " " << name_of(o.layout()) << " bucket_bytes "
       << o.bucket_bytes().value_or(0) << (o.fused() ? " fused" : "")
       << (o.overlap_gather() ? " overlap_gather" : "") << (o.static_graph() ? " static_graph" : "")
       << (o.no_sync_fp32() ? " no_sync_fp32" : "") << (o.split_masters() ? " split_masters" : "")
       << (o.update_in_backward() ? " update_in_backward" : "");
  if (o.gradient_shard_dtype() != c10::ScalarType::Float) text << " bf16 shards";
  if (o.moments() != Moments::kFloat32) text << " " << name_of(o.moments());
  if (o.reduction() == Reduction::kSum) text << " sum";
  if (o.gather_wire() == GatherWire::kChanges) text << " changes";
  if (o.reduce_dtype()) text << " reduce_dtype " << c10::toString(*o.reduce_dtype());
  if (o.loss_scaler()) {
    text << " loss_scale " << o.loss_scaler()->initial_scale() << " grows after "
         << o.loss_scaler()->growth_interval();
  }
  return text.str();
}

std::string text_of(const Event& e) {
  std::ostringstream text;
  for (size_t r = 0; r < e.passes.size(); ++r) {
    for (const Pass& p : e.passes[r]) {
      text << " rank " << r << " " << kPassNames[static_cast<size_t>(p.kind)] << " units 0x"
           << std::hex << p.units << std::dec;
      if (p.again >= 0) text << " again " << p.again;
      if (p.nonfinite >= 0) text << " nonfinite " << p.nonfinite;
      text << ";";
    }
  }
  text << " " << name_of(e.action);
  if (e.action == Action::kNorm || e.action == Action::kClip) text << " type " << e.norm_type;
  if (e.max_norm) text << " max " << *e.max_norm;
  if (e.rate) text << " rate " << *e.rate;
  if (e.action == Action::kGradient || e.action == Action::kMaster) text << " " << e.parameter;
  if (e.action == Action::kResizeRows) {
    text << " of layer " << e.layer << (e.has_values ? " with values from" : " from");
    for (const int64_t row : e.rows) text << " " << row;
  }
  if (e.average) text << " and use_ema";
  if (e.late >= 0) text << " late on rank " << e.late;
  if (is_misuse(e.action)) text << " on rank " << e.odd;
  if (e.action == Action::kCheckpoint || e.action == Action::kCheckpointAsync) {
    text << " into " << text_of(e.options);
  }
  return text.str();
}

}  // namespace

bool needs_round(const Pass& pass) { return pass.kind != PassKind::kOnlyGrad; }

CallSequence draw_sequence(uint64_t seed) { return Generator(seed).draw(); }

const char* name_of(Action action) { return kActionNames[static_cast<size_t>(action)]; }

std::string describe(const CallSequence& s) {
  std::ostringstream text;
  text << "seed " << s.seed << ": W " << s.world_size
       << (s.ranks_per_machine > 0 ? " on 2 machines" : "")
       << kMeshNames[static_cast<size_t>(s.mesh_kind)] << " over " << wire_name(s.wire) << ", "
       << c10::toString(s.dtype) << ", " << name_of(s.inner) << ", " << text_of(s.options);
  if (s.ema) text << " average " << s.ema->decay() << (s.ema->warm_up() ? " with warm-up" : "");
  if (s.largest_norm) text << " norms up to " << *s.largest_norm;
  text << ", layers";
  for (const auto& [in, out] : s.layers) text << " " << in << "x" << out;
  for (size_t i = 0; i < s.events.size(); ++i) text << "\n  " << i << ":" << text_of(s.events[i]);
  text << "\n";
  return text.str();
}

}  // namespace zero
