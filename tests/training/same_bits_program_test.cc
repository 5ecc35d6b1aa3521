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
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/fuzz_seeds.h"
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
  int number = 0;        // of the step
  size_t parameter = 0;  // of kFreeze, kUnfreeze and kResize
  int64_t rows = 0;      // of kResize: how many
  double norm_type = 0;  // of kStep: of the clip; 0: none
  double largest = 0;    // of kStep: of clip_grad_value_(); 0: none
  double rate = 0.01;    // of kStep
  bool reads = false;    // of kStep: all gradients, before the clip
  int64_t passes = 1;    // of kDropped and kModuleDropped: of each rank, where it has so many
  bool has_values = false;
};

// How events from `first` on are run; the ones before are loaded from a checkpoint.
struct Part {
  size_t first = 0;
  int world_size = 1;
  int ranks_per_machine = 0;
  Wire wire = Wire::kMemory;
  int64_t stage = 2;
  Layout layout = Layout::kContiguous;
  int64_t bucket_bytes = 8192;
  bool overlap = false;
};

struct Program {
  SameBitsCase c;
  std::vector<Event> events;
  std::vector<std::vector<Part>> ways;
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

Program draw(uint64_t seed) {
  std::mt19937_64 generator(seed * 0x9E3779B97F4A7C15u + 5);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
  };
  const auto chance = [&](int64_t percent) { return below(100) < percent; };
  Program p;
  SameBitsCase& c = p.c;
  c.micro_batches = 1 + below(9);
  const Inner inners[] = {Inner::kAdamW, Inner::kAdamW, Inner::kSgdMomentum, Inner::kLion,
                          Inner::kMuon,  Inner::kLamb,  Inner::kAdafactor};
  c.inner = inners[below(7)];
  const c10::ScalarType dtypes[] = {at::kFloat, at::kFloat, at::kBFloat16, at::kHalf};
  c.dtype = dtypes[below(4)];
  const bool fused =
      c.inner == Inner::kAdamW || c.inner == Inner::kSgdMomentum || c.inner == Inner::kLion;
  const bool split = fused && c.dtype == at::kBFloat16 && chance(40);
  const bool stores_moments = fused || c.inner == Inner::kMuon;
  if (stores_moments && chance(25))
    c.options.moments(chance(50) ? Moments::kInt8 : Moments::kBFloat16);
  c.options.split_masters(split);
  if (chance(30)) c.options.ema(EmaOptions().decay(0.7));
  if (chance(25)) c.options.reduction(Reduction::kSum);
  if (c.dtype == at::kHalf) c.options.loss_scaler(LossScalerOptions().initial_scale(256));
  if (chance(20)) c.options.protect(1 + below(2));

  std::vector<size_t> frozen;
  int number = 0;
  const size_t count = 6 + static_cast<size_t>(below(6));
  while (p.events.size() < count) {
    Event e;
    const bool must_step = !p.events.empty() && p.events.back().action == Action::kModuleDropped;
    const int64_t kind = must_step ? 99 : below(100);
    if (kind < 10) {
      e.action = Action::kDropped;
      e.passes = 1 + below(3);
      e.number = 20;  // where no rank drops all
    } else if (kind < 16) {
      e.action = Action::kModuleDropped;
      e.passes = c.micro_batches;
      e.number = 20;
    } else if (kind < 24 && fused) {
      if (frozen.empty()) {
        e.action = Action::kFreeze;
        e.parameter = static_cast<size_t>(1 + below(5));
        frozen.push_back(e.parameter);
      } else {
        e.action = Action::kUnfreeze;
        e.parameter = frozen.back();
        frozen.pop_back();
      }
    } else if (kind < 30 && fused) {
      e.action = Action::kResize;
      e.parameter = static_cast<size_t>(below(4));
      if (std::count(frozen.begin(), frozen.end(), e.parameter) > 0) continue;
      e.rows = 13 + below(100);
      e.has_values = chance(60);
    } else if (kind < 36 && c.options.ema()) {
      e.action = Action::kAverage;
    } else {
      e.number = number++;
      if (chance(50)) e.norm_type = chance(80) ? 2.0 : std::numeric_limits<double>::infinity();
      if (chance(20)) e.largest = 0.05;
      if (chance(30)) e.rate = 0.005;
      e.reads = chance(40);
      if (chance(10) && c.bad_step < 0) c.bad_step = e.number;
    }
    p.events.push_back(e);
  }

  const auto draw_part = [&](size_t first) {
    Part part;
    const auto dropped = [&](size_t i) {
      return i > 0 && i <= p.events.size() && p.events[i - 1].action == Action::kModuleDropped;
    };
    part.first = dropped(first) ? first + 1 : first;
    part.world_size = static_cast<int>(1 + below(std::min<int64_t>(c.micro_batches, 5)));
    if (part.world_size == 4 && chance(60)) part.ranks_per_machine = chance(70) ? 2 : 1;
    const Wire wires[] = {Wire::kMemory, Wire::kMemory, Wire::kShared, Wire::kNative};
    part.wire = wires[below(4)];
    part.stage = 1 + below(2);
    const Layout layouts[] = {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters};
    part.layout = layouts[below(3)];
    if (split && part.layout == Layout::kPerParameter) part.layout = Layout::kContiguous;
    part.bucket_bytes = chance(70) ? 4096 + 512 * below(30) : int64_t{1} << 20;
    part.overlap = chance(25);
    return part;
  };
  p.ways.push_back({draw_part(0)});
  p.ways.push_back({draw_part(0), draw_part(1 + static_cast<size_t>(below(3)))});
  if (chance(50)) p.ways[1].push_back(draw_part(p.ways[1].back().first + 2));
  return p;
}

std::string describe(const Program& p) {
  std::ostringstream text;
  text << p.c.micro_batches << " micro-batches, inner " << static_cast<int>(p.c.inner) << ", "
       << p.c.dtype << ", moments " << static_cast<int>(p.c.options.moments()) << ", split "
       << p.c.options.split_masters() << ", average " << p.c.options.ema().has_value() << ", sum "
       << (p.c.options.reduction() == Reduction::kSum) << ", protect " << p.c.options.protect()
       << ", bad step " << p.c.bad_step << "\n";
  for (const Event& e : p.events) {
    text << "  action " << static_cast<int>(e.action) << " number " << e.number << " parameter "
         << e.parameter << " rows " << e.rows << " norm " << e.norm_type << " largest " << e.largest
         << " rate " << e.rate << " reads " << e.reads << " passes " << e.passes << "\n";
  }
  for (const auto& way : p.ways) {
    text << "  way";
    for (const Part& part : way) {
      text << " (from " << part.first << ": " << part.world_size << " ranks, "
           << part.ranks_per_machine << " on a machine, " << wire_name(part.wire) << ", stage "
           << part.stage << ", layout " << static_cast<int>(part.layout) << ", "
           << part.bucket_bytes << " bytes, overlap " << part.overlap << ")";
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

Record run(const Program& program, const std::vector<Part>& way, const std::string& folder) {
  Record result;
  for (size_t k = 0; k < way.size(); ++k) {
    const Part& part = way[k];
    const size_t events = program.events.size();
    const size_t first = std::min(part.first, events);
    const size_t end = k + 1 < way.size() ? std::min(way[k + 1].first, events) : events;
    SameBitsCase c = program.c;
    c.options.stage(part.stage).bucket_bytes(part.bucket_bytes).overlap_gather(part.overlap);
    c.options.layout(part.layout);
    const Shapes shapes(program, first);
    std::vector<at::Tensor> initial = same_bits_values(c.dtype);
    for (size_t i = 0; i < initial.size(); ++i) {
      if (initial[i].sizes() != at::IntArrayRef(shapes.sizes[i])) {
        initial[i] = at::zeros(shapes.sizes[i], c.dtype);
      }
    }
    JoinedState state;
    run_ranks(
        part.world_size,
        [&](const Group& group) {
          SameBitsRun r(group, c, initial, shapes.frozen);
          if (k > 0) r.optimizer->load_checkpoint(folder);
          for (size_t i = first; i < end; ++i) run_event(r, program.events[i]);
          r.optimizer->check_replicas();
          if (k + 1 < way.size()) {
            r.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
          } else if (c.options.moments() == Moments::kFloat32) {
            state.add(r);
          }
          if (group.rank() == 0) result.insert(result.end(), r.record.begin(), r.record.end());
        },
        on(part.wire, std::chrono::seconds(30), part.ranks_per_machine));
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
    const Program program = draw(seed);
    const std::string text = describe(program);
    if (seeds.count == 1) std::cout << text << std::flush;
    print_if_aborted(&text, std::chrono::seconds(60));
    try {
      const Record one = run(program, {Part()}, folder);
      for (const auto& way : program.ways) {
        const std::string difference = first_difference(one, run(program, way, folder));
        EXPECT_EQ(difference, "") << "way " << &way - program.ways.data() << " in " << text
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
