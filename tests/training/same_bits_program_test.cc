// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Random programs with ZeroOptions::micro_batches have the same bits on one rank and on any other
// number of ranks, also where that number, layouts and buckets change at a checkpoint.
//
//   ZERO_FUZZ_SEED=<seed>                     one program, printed
//   ZERO_FUZZ_FIRST=<seed> ZERO_FUZZ_COUNT=n  others than the default, or more
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fuzz_seeds.h"
#include "tests/training/draws.h"
#include "tests/training/same_bits_run.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

constexpr uint64_t kPrograms = 20;

enum class Action {
  kStep,
  kDropped,        // some micro-batches, and zero_grad()
  kModuleDropped,  // all micro-batches, and zero_grad() of the module; then a step
  kFreeze,
  kUnfreeze,
  kResize,
  kAverage,  // is looked at
};

struct Event {
  Action action = Action::kStep;
  int number = 0;           // of the step
  size_t parameter = 0;     // of kFreeze, kUnfreeze and kResize
  int64_t rows = 0;         // of kResize: how many
  bool has_values = false;  // of kResize
  double norm_type = 0;     // of kStep: of the clip; 0: none
  double largest = 0;       // of kStep: of clip_grad_value_(); 0: none
  double rate = 0.01;       // of kStep
  bool reads = false;       // of kStep: all gradients, before the clip
  int64_t passes = 1;       // of kDropped and kModuleDropped: of each rank, where it has so many
};

// How events from `first` on are run; the ones before are loaded from a checkpoint.
struct Attempt {
  size_t first = 0;
  int world_size = 1;
  int ranks_per_machine = 0;
  Wire wire = Wire::kMemory;
  int64_t stage = 2;
  Layout layout = Layout::kContiguous;
  int64_t bucket_bytes = 8192;
  bool overlap = false;
};
using Job = std::vector<Attempt>;

struct Program {
  SameBitsCase c;
  std::vector<Event> events;
  std::vector<Job> jobs;  // each makes all events
};

// What events have made of the parameters before one of them.
struct Shapes {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<bool> frozen;

  explicit Shapes(const Program& program, size_t before) {
    for (const at::Tensor& v : same_bits_values(at::kFloat)) sizes.push_back(v.sizes().vec());
    frozen.resize(sizes.size(), false);
    for (size_t i = 0; i < before; ++i) {
      const Event& e = program.events[i];
      if (e.action == Action::kFreeze) frozen[e.parameter] = true;
      if (e.action == Action::kUnfreeze) frozen[e.parameter] = false;
      if (e.action == Action::kResize) sizes[e.parameter][0] = e.rows;
    }
  }
};

class Generator : Draws {
 public:
  explicit Generator(uint64_t seed) : Draws(seed * 0x9E3779B97F4A7C15u + 5) {}

  Program draw() {
    draw_case();
    const size_t count = 6 + static_cast<size_t>(below(6));
    while (p_.events.size() < count) p_.events.push_back(draw_event());
    p_.jobs.push_back({draw_attempt(0)});
    p_.jobs.push_back({draw_attempt(0), draw_attempt(1 + static_cast<size_t>(below(3)))});
    if (percent(50)) p_.jobs[1].push_back(draw_attempt(p_.jobs[1].back().first + 2));
    return std::move(p_);
  }

 private:
  void draw_case() {
    SameBitsCase& c = p_.c;
    c.micro_batches = 1 + below(9);
    c.inner = pick<Inner>({{Inner::kAdamW, 2},
                           {Inner::kSgdMomentum, 1},
                           {Inner::kLion, 1},
                           {Inner::kMuon, 1},
                           {Inner::kLamb, 1},
                           {Inner::kAdafactor, 1}});
    c.dtype = pick<c10::ScalarType>({{at::kFloat, 2}, {at::kBFloat16, 1}, {at::kHalf, 1}});
    fused_ = c.inner == Inner::kAdamW || c.inner == Inner::kSgdMomentum || c.inner == Inner::kLion;
    c.options.split_masters(fused_ && c.dtype == at::kBFloat16 && percent(40));
    if ((fused_ || c.inner == Inner::kMuon) && percent(25)) {
      c.options.moments(percent(50) ? Moments::kInt8 : Moments::kBFloat16);
    }
    if (percent(30)) c.options.ema(EmaOptions().decay(0.7));
    if (percent(25)) c.options.reduction(Reduction::kSum);
    if (c.dtype == at::kHalf) c.options.loss_scaler(LossScalerOptions().initial_scale(256));
    if (percent(20)) c.options.protect(1 + below(2));
  }

  // A step follows where all of one was dropped.
  bool is_dropped_before(size_t event) const {
    return event > 0 && event <= p_.events.size() &&
           p_.events[event - 1].action == Action::kModuleDropped;
  }

  Action draw_action() {
    if (is_dropped_before(p_.events.size())) return Action::kStep;
    // Of 100.
    const int freeze = fused_ ? 8 : 0, resize = fused_ ? 6 : 0;
    const int average = !p_.c.options.ema() ? 0 : fused_ ? 6 : 20;
    return pick<Action>({{Action::kDropped, 10},
                         {Action::kModuleDropped, 6},
                         {frozen_ ? Action::kUnfreeze : Action::kFreeze, freeze},
                         {Action::kResize, resize},
                         {Action::kAverage, average},
                         {Action::kStep, 84 - freeze - resize - average}});
  }

  Event draw_event() {
    Event e;
    e.action = draw_action();
    switch (e.action) {
      case Action::kDropped:
      case Action::kModuleDropped:
        e.passes = e.action == Action::kDropped ? 1 + below(3) : p_.c.micro_batches;
        e.number = 20;  // where no rank drops all
        break;
      case Action::kFreeze:
        frozen_ = e.parameter = static_cast<size_t>(1 + below(5));
        break;
      case Action::kUnfreeze:
        e.parameter = *std::exchange(frozen_, std::nullopt);
        break;
      case Action::kResize:
        do {
          e.parameter = static_cast<size_t>(below(4));
        } while (e.parameter == frozen_);
        e.rows = 13 + below(100);
        e.has_values = percent(60);
        break;
      case Action::kAverage:
        break;
      case Action::kStep:
        draw_step(e);
        break;
    }
    return e;
  }

  void draw_step(Event& e) {
    e.number = steps_++;
    if (percent(50)) e.norm_type = percent(80) ? 2.0 : std::numeric_limits<double>::infinity();
    if (percent(20)) e.largest = 0.05;
    if (percent(30)) e.rate = 0.005;
    e.reads = percent(40);
    if (percent(10) && p_.c.bad_step < 0) p_.c.bad_step = e.number;
  }

  Attempt draw_attempt(size_t first) {
    Attempt a;
    a.first = is_dropped_before(first) ? first + 1 : first;
    a.world_size = static_cast<int>(1 + below(std::min<int64_t>(p_.c.micro_batches, 5)));
    if (a.world_size == 4 && percent(60)) a.ranks_per_machine = percent(70) ? 2 : 1;
    a.wire = pick<Wire>({{Wire::kMemory, 2}, {Wire::kShared, 1}, {Wire::kNative, 1}});
    a.stage = 1 + below(2);
    const bool split = p_.c.options.split_masters();
    a.layout = pick<Layout>({{Layout::kContiguous, split ? 2 : 1},
                             {Layout::kPerParameter, split ? 0 : 1},
                             {Layout::kWholeParameters, 1}});
    a.bucket_bytes = percent(70) ? 4096 + 512 * below(30) : int64_t{1} << 20;
    a.overlap = percent(25);
    return a;
  }

  Program p_;
  bool fused_ = false;            // and may so freeze and resize parameters
  std::optional<size_t> frozen_;  // this parameter
  int steps_ = 0;
};

const char* name_of(Action action) {
  constexpr const char* kNames[] = {"step",
                                    "drop some micro-batches",
                                    "drop all of them by the module",
                                    "freeze",
                                    "unfreeze",
                                    "resize_rows",
                                    "use_ema"};
  return kNames[static_cast<size_t>(action)];
}

std::string describe(const Program& p) {
  const ZeroOptions& o = p.c.options;
  std::ostringstream text;
  text << p.c.micro_batches << " micro-batches, " << name_of(p.c.inner) << ", " << p.c.dtype << ", "
       << name_of(o.moments()) << (o.split_masters() ? ", split masters" : "")
       << (o.ema() ? ", average" : "") << (o.reduction() == Reduction::kSum ? ", sum" : "")
       << ", protect " << o.protect() << ", bad step " << p.c.bad_step << "\n";
  for (const Event& e : p.events) {
    text << "  " << name_of(e.action) << ", number " << e.number << ", parameter " << e.parameter
         << ", rows " << e.rows << ", values " << e.has_values << ", norm " << e.norm_type
         << ", largest " << e.largest << ", rate " << e.rate << ", reads " << e.reads << ", passes "
         << e.passes << "\n";
  }
  for (const Job& job : p.jobs) {
    text << "  job";
    for (const Attempt& a : job) {
      text << " (from event " << a.first << ": " << a.world_size << " ranks, "
           << a.ranks_per_machine << " on a machine, " << wire_name(a.wire) << ", stage " << a.stage
           << ", " << name_of(a.layout) << ", " << a.bucket_bytes << " bytes"
           << (a.overlap ? ", overlap" : "") << ")";
    }
    text << "\n";
  }
  return text.str();
}

std::vector<at::Tensor> given_to(const SameBitsRun& r, int step, int64_t number) {
  auto result = same_bits_gradients(r.c, r.model.values, step, number);
  for (size_t i = 0; i < result.size(); ++i) {
    if (!r.model.values[i].requires_grad()) result[i] = at::Tensor();
  }
  return result;
}

void pass(SameBitsRun& r, int step, int64_t number) {
  r.optimizer->wait_for(r.model);
  r.optimizer->backward(r.model.loss(given_to(r, step, number), same_bits_scale(number)));
}

void record_values(SameBitsRun& r, const std::string& when) {
  r.optimizer->wait_for(r.model);
  for (size_t i = 0; i < r.model.values.size(); ++i) {
    const at::Tensor& v = r.model.values[i];
    r.add(when + " value " + std::to_string(i), v);
    if (v.requires_grad()) r.add(when + " master " + std::to_string(i), r.optimizer->master(v));
  }
}

void run_event(SameBitsRun& r, const Event& e) {
  ZeroOptimizer& optimizer = *r.optimizer;
  const auto& values = r.model.values;
  const std::string when = "step " + std::to_string(e.number);
  switch (e.action) {
    case Action::kDropped:
    case Action::kModuleDropped: {
      int64_t left = e.passes;
      for (const int64_t number : optimizer.micro_batches()) {
        if (left-- > 0) pass(r, e.number, number);
      }
      e.action == Action::kDropped ? optimizer.zero_grad() : r.model.zero_grad();
      break;
    }
    case Action::kFreeze:
      optimizer.freeze({values[e.parameter]});
      break;
    case Action::kUnfreeze:
      optimizer.unfreeze({values[e.parameter]});
      break;
    case Action::kResize: {
      const at::Tensor& v = values[e.parameter];
      at::Tensor rows = at::remainder(at::arange(e.rows, at::kLong) * 7, v.size(0));
      ResizedRows change{v, rows};
      if (e.has_values) {
        change.rows = at::where(rows.remainder(5).eq(3), at::full_like(rows, -1), rows);
        std::vector<int64_t> sizes = v.sizes().vec();
        sizes[0] = e.rows;
        change.values = random_tensor(sizes, 99);
      }
      optimizer.resize_rows({change});
      break;
    }
    case Action::kAverage: {
      const auto guard = optimizer.use_ema();
      for (const at::Tensor& v : values) r.add("average", v);
      break;
    }
    case Action::kStep:
      for (auto& g : optimizer.param_groups()) g.options().set_lr(e.rate);
      for (const int64_t number : optimizer.micro_batches()) pass(r, e.number, number);
      if (e.reads) {
        for (size_t i = 0; i < values.size(); ++i) {
          if (!values[i].requires_grad()) continue;
          r.add(when + " gradient " + std::to_string(i), optimizer.gradient(values[i]));
        }
        r.add(when + " norm", optimizer.grad_norm());
      }
      if (e.norm_type > 0) {
        r.add(when + " clip", optimizer.clip_grad_norm_(0.3, e.norm_type));
      }
      if (e.largest > 0) optimizer.clip_grad_value_(e.largest);
      optimizer.step();
      r.add(when + " skipped", at::full({}, optimizer.step_skipped() ? 1.0 : 0.0));
      break;
  }
  record_values(r, when);
}

Record run(const Program& program, const Job& job, const std::string& folder) {
  Record result;
  for (size_t k = 0; k < job.size(); ++k) {
    const Attempt& attempt = job[k];
    const size_t events = program.events.size();
    const size_t first = std::min(attempt.first, events);
    const size_t end = k + 1 < job.size() ? std::min(job[k + 1].first, events) : events;
    SameBitsCase c = program.c;
    c.options.stage(attempt.stage)
        .bucket_bytes(attempt.bucket_bytes)
        .overlap_gather(attempt.overlap);
    c.options.layout(attempt.layout);
    const Shapes shapes(program, first);
    std::vector<at::Tensor> initial = same_bits_values(c.dtype);
    for (size_t i = 0; i < initial.size(); ++i) {
      if (initial[i].sizes() != at::IntArrayRef(shapes.sizes[i])) {
        initial[i] = at::zeros(shapes.sizes[i], c.dtype);
      }
    }
    JoinedState state;
    run_ranks(
        attempt.world_size,
        [&](const Group& group) {
          SameBitsRun r(group, c, initial, shapes.frozen);
          if (k > 0) r.optimizer->load_checkpoint(folder);
          for (size_t i = first; i < end; ++i) run_event(r, program.events[i]);
          r.optimizer->check_replicas();
          if (k + 1 < job.size()) {
            r.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
          } else if (c.options.moments() == Moments::kFloat32) {
            state.add(r);
          }
          if (group.rank() == 0) result.insert(result.end(), r.record.begin(), r.record.end());
        },
        on(attempt.wire, std::chrono::seconds(30), attempt.ranks_per_machine));
    const Record joined = state.record();
    result.insert(result.end(), joined.begin(), joined.end());
  }
  std::filesystem::remove_all(folder);
  return result;
}

TEST(SameBitsProgramTest, OnEveryNumberOfRanks) {
  const Seeds seeds = chosen_seeds({1, kPrograms});
  const std::string folder = ::testing::TempDir() + "same_bits_program";
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const Program program = Generator(seed).draw();
    const std::string text = describe(program);
    if (seeds.count == 1) std::cout << text << std::flush;
    print_if_aborted(&text, std::chrono::seconds(60));
    try {
      const Record one = run(program, {Attempt()}, folder);
      for (size_t j = 0; j < program.jobs.size(); ++j) {
        const std::string difference = first_difference(one, run(program, program.jobs[j], folder));
        EXPECT_EQ(difference, "") << "job " << j << " in " << text
                                  << "rerun with ZERO_FUZZ_SEED=" << seed;
      }
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      ADD_FAILURE() << (known != nullptr ? known->what_without_backtrace() : error.what())
                    << "\nin " << text << "rerun with ZERO_FUZZ_SEED=" << seed;
    }
    print_if_aborted(nullptr);
  }
}

}  // namespace
}  // namespace zero
