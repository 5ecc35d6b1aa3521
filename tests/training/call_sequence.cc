// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/call_sequence.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <sstream>

#include "tests/training/draws.h"

namespace zero {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter,
                               Layout::kWholeParameters};

constexpr Moments kMoments[] = {Moments::kInt8, Moments::kBFloat16, Moments::kInt8,
                                Moments::kFloat32};

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
    if (of_average_() % 100 >= 40) return;
    s_.ema = EmaOptions()
                 .decay(0.1 * static_cast<double>(of_average_() % 10))
                 .warm_up(of_average_() % 2 == 0);
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

  // By numbers of its own, so that the rest of a program does not depend on it.
  bool looks_at_average() { return s_.ema && of_average_() % 2 == 0; }

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

  // By numbers of their own. Nothing may need the whole gradient before an update.
  void draw_early_updates() {
    updates_early_ = of_early_updates_() % 8 == 0;
    if (!updates_early_) return;
    scaler_.reset();
    s_.largest_norm.reset();
    if (s_.mesh_kind == MeshKind::kReplicas) s_.mesh_kind = MeshKind::kFlat;
  }

  // By numbers of their own, too. Every bit of such a sequence must be known, so that its gradients
  // are no thirds, and it clips by one value, whose norm has an exact sum of powers.
  void draw_moments() {
    const bool exact =
        s_.world_size != 3 || (s_.reduction == Reduction::kSum && s_.mesh_kind == MeshKind::kFlat);
    s_.has_moments = exact && s_.inner != Inner::kSgd && of_moments_() % 6 == 0;
    if (!s_.has_moments) return;
    s_.layers[0] = {640 + static_cast<int64_t>(of_moments_() % 200),
                    5 + static_cast<int64_t>(of_moments_() % 5)};
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
      options.fused(true).moments(kMoments[of_moments_() % std::size(kMoments)]);
      // Its first layer is 50 times as large as others, and would be in thousands of buckets.
      if (const int64_t bytes = *options.bucket_bytes(); bytes > 0) {
        options.bucket_bytes(std::max<int64_t>(bytes, 500));
      }
    }
    if (updates_early_) {
      options.fused(true).skip_nonfinite(false).gather_wire(GatherWire::kWhole);
      options.update_in_backward(of_early_updates_() % 5 != 0);
    }
    draw_formats(options);
    return options;
  }

  // Those that lose nothing: sums of these gradients are bf16 numbers, unless they are thirds.
  void draw_formats(ZeroOptions& options) {
    const bool rare = of_formats_() % 4 == 0, rarer = of_formats_() % 3 == 0;
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
    pass.seed = random_();
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

  // Of all ranks, of one, or of none.
  std::vector<std::vector<Pass>> draw_passes() {
    std::vector<std::vector<Pass>> passes(s_.world_size);
    if (passes_ + 2 > kPassesAStep) return passes;
    if (clipped_) return passes;
    const int style = pick<int>({{0, 30}, {1, 25}, {2, 20}, {3, 25}});
    const int only = rank();
    for (int r = 0; r < s_.world_size; ++r) {
      const int64_t count = style == 0 ? below(3) : style == 1 ? 1 : style == 2 ? r == only : 0;
      for (int64_t i = 0; i < count; ++i)
        passes[r].push_back(draw_pass(draw_kind(i == 0 && !pending_)));
    }
    return passes;
  }

  bool may_clip() const { return pending_ && !dropped_ && !(s_.has_moments && clipped_); }

  Action draw_action() {
    if (percent(4)) return draw_misuse();
    std::vector<Choice<Action>> choices = {{Action::kNothing, clipped_ ? 0 : 8},
                                           {Action::kReduce, 8},
                                           {Action::kNorm, 14},
                                           {Action::kGradient, 8},
                                           {Action::kMaster, 10},
                                           {Action::kCheckReplicas, 5},
                                           {Action::kRefreshWorking, 5},
                                           {Action::kRefreshMasters, 4},
                                           {Action::kBroadcastBuffers, 4},
                                           {Action::kStep, clipped_ ? 40 : 25},
                                           {Action::kClip, may_clip() ? 9 : 0},
                                           {Action::kClipValue, may_clip() ? 5 : 0}};
    // Ranks drop as many rounds each where a call has completed them and every rank had gradients.
    if (completed_ && !clipped_ && std::all_of(own_.begin(), own_.end(), std::identity())) {
      choices.push_back({Action::kModuleZeroGrad, 8});
    }
    if (!pending_ || everywhere_ || refused_) choices.push_back({Action::kZeroGrad, 4});
    if (!pending_ && s_.mesh_kind != MeshKind::kExperts) {  // whose names would meet in one folder
      choices.push_back({Action::kCheckpoint, 2});
      choices.push_back({Action::kCheckpointAsync, 1});
    }
    if (!pending_ && s_.mesh_kind == MeshKind::kFlat) choices.push_back({Action::kResizeRows, 12});
    return pick(choices);
  }

  Action draw_misuse() {
    std::vector<Choice<Action>> choices = {{Action::kInvalidNorm, 1}, {Action::kInsideNoSync, 1}};
    if (s_.world_size > 1) {
      for (Action a : {Action::kDifferentNorms, Action::kDifferentClips, Action::kDifferentRates,
                       Action::kDifferentCalls}) {
        choices.push_back({a, 1});
      }
      // Of experts each rank may ask for another.
      if (s_.mesh_kind != MeshKind::kExperts) choices.push_back({Action::kDifferentParameters, 1});
    }
    if (clipped_) choices.push_back({Action::kBackwardAfterClip, 4});
    if (!clipped_) choices.push_back({Action::kBrokenBackward, 1});
    if (pending_) choices.push_back({Action::kSaveWithGradients, 1});
    if (only_now_ && some_ && !everywhere_ && !refused_) {
      choices.push_back({Action::kUnevenZeroGrad, 3});
    }
    return pick(choices);
  }

  Event event(Action action) {
    Event e;
    e.passes.resize(s_.world_size);
    e.action = action;
    e.seed = random_();
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
    if (s_.dtype == c10::ScalarType::Float) e.units &= static_cast<unsigned>(random_());
    e.look = percent(50) ? s_.all_units() : static_cast<unsigned>(random_()) & s_.all_units();
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
    own_.resize(passes.size(), false);
    for (size_t r = 0; r < passes.size(); ++r) {
      const auto& of_rank = passes[r];
      for (const Pass& pass : of_rank) {
        completed_ = false;
        if (!needs_round(pass) || pass.kind == PassKind::kNoGraph) continue;
        own_[r] = true;
        dropped_ = false;
      }
      most = std::max(most, of_rank.size());
      with += std::any_of(of_rank.begin(), of_rank.end(), needs_round) ? 1 : 0;
    }
    only_now_ = !pending_;
    some_ = with > 0;
    everywhere_ = everywhere_ || with == passes.size();
    pending_ = pending_ || some_;
    passes_ += static_cast<int>(most);
    Event e = event(draw_action());
    e.passes = std::move(passes);
    follow(e.action);
    e.average = !pending_ && e.action < Action::kDifferentNorms && looks_at_average();
    return e;
  }

  // What later draws must know.
  void follow(Action action) {
    switch (action) {
      case Action::kNothing:
        return;
      case Action::kModuleZeroGrad:
        own_.assign(own_.size(), false);
        dropped_ = true;
        return;
      case Action::kStep:
      case Action::kZeroGrad:
      case Action::kBrokenBackward:
        pending_ = everywhere_ = clipped_ = refused_ = false;
        passes_ = 0;
        own_.assign(own_.size(), false);
        dropped_ = false;
        completed_ = true;
        return;
      case Action::kClip:
      case Action::kClipValue:
        clipped_ = true;
        [[fallthrough]];
      case Action::kReduce:
      case Action::kNorm:
      case Action::kGradient:
        everywhere_ = pending_;
        break;
      default:
        break;
    }
    refused_ = action >= Action::kDifferentNorms;
    if (!refused_) completed_ = true;
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
    std::vector<Choice<Action>> choices = {
        {Action::kMaster, 3},         {Action::kCheckReplicas, 1},    {Action::kRefreshWorking, 2},
        {Action::kRefreshMasters, 2}, {Action::kBroadcastBuffers, 1}, {Action::kZeroGrad, 1}};
    if (static_graph_) return Action::kMaster;
    if (s_.mesh_kind == MeshKind::kFlat) choices.push_back({Action::kResizeRows, 3});
    if (s_.mesh_kind != MeshKind::kExperts) {
      choices.push_back({Action::kCheckpoint, 1});
      choices.push_back({Action::kCheckpointAsync, 1});
    }
    return pick(choices);
  }

  void draw_a_pass(Event& e) {
    const bool all = static_graph_ || percent(60);
    bool any = false;
    for (auto& of_rank : e.passes) {
      if (!all && percent(40)) continue;
      any = true;
      if (static_graph_) {
        of_rank.push_back({PassKind::kOwn, s_.all_units(), -1, -1, random_()});
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
    std::vector<std::vector<Pass>> passes(s_.world_size);
    const int64_t count = 1 + below(2);
    for (int64_t i = 0; i < count; ++i) {
      const auto kind = pick<PassKind>(
          {{PassKind::kOwn, 3}, {PassKind::kPlain, 2}, {PassKind::kNoSync, i + 1 < count ? 2 : 0}});
      for (auto& of_rank : passes) {
        of_rank.push_back({kind, s_.all_units(), -1, -1, 0});
      }
    }
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
    std::vector<Event> step;
    for (Action action : calls) step.push_back(event(action));
    step.front().passes = passes;
    for (int64_t i = 0; i < 4; ++i) {
      for (Event e : step) {
        for (auto& of_rank : e.passes) {
          for (Pass& pass : of_rank) {
            pass.seed = random_();
            if (percent(3)) pass.nonfinite = unit();
          }
        }
        s_.events.push_back(std::move(e));
      }
      if (percent(20)) s_.events.push_back(event(Action::kMaster));
    }
  }

  std::mt19937_64 of_average_, of_formats_, of_moments_, of_early_updates_;
  CallSequence s_;
  std::optional<LossScalerOptions> scaler_;
  bool static_graph_ = false;
  bool updates_early_ = false;  // ZeroOptions::update_in_backward, of most of its optimizers
  std::vector<int64_t> rows_;   // by layer, where they were resized
  // Since the last step:
  bool pending_ = false;     // some rank needs a round
  bool everywhere_ = false;  // all ranks do, as far as each of them knows
  bool some_ = false;        // some rank needs one for the passes of this event
  bool only_now_ = false;    // and there were none before it
  bool clipped_ = false;
  bool refused_ = false;    // the last collective call
  int passes_ = 0;          // at most, of a rank
  std::vector<bool> own_;   // by rank: it has gradients
  bool completed_ = false;  // a call has reduced all of them
  bool dropped_ = false;    // zero_grad() of the module was the last to do something with them
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
  text << "stage " << o.stage() << " layout " << static_cast<int>(o.layout()) << " bucket_bytes "
       << o.bucket_bytes().value_or(0) << (o.fused() ? " fused" : "")
       << (o.overlap_gather() ? " overlap_gather" : "") << (o.static_graph() ? " static_graph" : "")
       << (o.no_sync_fp32() ? " no_sync_fp32" : "") << (o.split_masters() ? " split_masters" : "")
       << (o.update_in_backward() ? " update_in_backward" : "");
  if (o.gradient_shard_dtype() != c10::ScalarType::Float) text << " bf16 shards";
  if (o.moments() == Moments::kBFloat16) text << " bf16 moments";
  if (o.moments() == Moments::kInt8) text << " 8-bit moments";
  if (o.reduction() == Reduction::kSum) text << " sum";
  if (o.gather_wire() == GatherWire::kChanges) text << " changes";
  if (o.reduce_dtype()) text << " reduce_dtype " << c10::toString(*o.reduce_dtype());
  if (o.loss_scaler()) {
    text << " loss_scale " << o.loss_scaler()->initial_scale() << " grows after "
         << o.loss_scaler()->growth_interval();
  }
  return text.str();
}

}  // namespace

bool needs_round(const Pass& pass) { return pass.kind != PassKind::kOnlyGrad; }

CallSequence draw_sequence(uint64_t seed) { return Generator(seed).draw(); }

const char* name_of(Action action) { return kActionNames[static_cast<size_t>(action)]; }

std::string describe(const CallSequence& s) {
  constexpr std::array<const char*, 4> kInners = {"SGD", "SGD with momentum", "AdamW", "Adam"};
  std::ostringstream text;
  text << "seed " << s.seed << ": W " << s.world_size
       << (s.ranks_per_machine > 0 ? " on 2 machines" : "")
       << kMeshNames[static_cast<size_t>(s.mesh_kind)] << " over " << wire_name(s.wire) << ", "
       << c10::toString(s.dtype) << ", " << kInners[static_cast<size_t>(s.inner)] << ", "
       << text_of(s.options);
  if (s.ema) text << " average " << s.ema->decay() << (s.ema->warm_up() ? " with warm-up" : "");
  if (s.largest_norm) text << " norms up to " << *s.largest_norm;
  text << ", layers";
  for (const auto& [in, out] : s.layers) text << " " << in << "x" << out;
  for (size_t i = 0; i < s.events.size(); ++i) {
    const Event& e = s.events[i];
    text << "\n  " << i << ":";
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
    if (e.action >= Action::kDifferentNorms) text << " on rank " << e.odd;
    if (e.action == Action::kCheckpoint || e.action == Action::kCheckpointAsync) {
      text << " into " << text_of(e.options);
    }
  }
  text << "\n";
  return text.str();
}

}  // namespace zero
