// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Fits Gaussian splats to a picture on any number of ranks. Splats split where the picture needs
// more of them, and go where they are hardly seen: parameters whose rows come and go, with state.
//
// Usage:
//   ./bazelw run //examples:splats -- [--ranks 2] [--steps 400] [--picture splats.ppm]
//
// Expected output (the last digits differ between machines, and hardly between numbers of ranks):
//   step   0   32 splats, 12.7 dB
//   step 100   45 splats, 17.3 dB
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "examples/callers_folder.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int64_t kSide = 48;  // of the picture, in pixels
constexpr int64_t kFirstSplats = 32;
constexpr int64_t kMostSplats = 160;
constexpr int kDensifyEvery = 50;
constexpr double kGrownPerTime = 0.2;    // so many of the splats are divided, those that pull most
constexpr double kLowestOpacity = 0.02;  // splats below it go
constexpr double kSmallScale = 0.06;     // a splat below it is copied, one above it is split
constexpr double kSplitScale = 1.0 / 1.6;  // of the two that a split leaves

struct Arguments {
  int ranks = 2;
  int steps = 400;
  std::string picture;
  bool help = false;
};

// [kSide * kSide, 2], each from 0 to 1.
at::Tensor pixels() {
  const at::Tensor line = (at::arange(kSide).to(at::kFloat) + 0.5) / kSide;
  return at::stack({line.repeat({kSide}), line.repeat_interleave(kSide)}, 1);
}

// A disk, a ring and a stripe: [pixels, 3].
at::Tensor target(const at::Tensor& points) {
  const at::Tensor x = points.select(1, 0);
  const at::Tensor y = points.select(1, 1);
  const at::Tensor radius = ((x - 0.62).square() + (y - 0.4).square()).sqrt();
  const at::Tensor disk = radius.lt(0.16).to(at::kFloat);
  const at::Tensor ring = radius.gt(0.24).logical_and(radius.lt(0.3)).to(at::kFloat);
  const at::Tensor stripe = (x - y + 0.35).abs().lt(0.07).to(at::kFloat);
  return at::stack({0.1 + 0.85 * disk, 0.15 + 0.75 * ring, 0.2 + 0.7 * stripe}, 1).clamp(0, 1);
}

// Each parameter has one row for each splat.
struct Splats {
  Splats() {
    torch::manual_seed(1);  // rank 0's are sent anyway
    means = at::rand({kFirstSplats, 2});
    log_scales = at::full({kFirstSplats, 2}, std::log(0.1));
    angles = at::rand({kFirstSplats}) * 3;
    colors = at::rand({kFirstSplats, 3}) - 0.5;
    opacities = at::full({kFirstSplats}, -1.0);
    for (const at::Tensor& p : all()) p.requires_grad_();
  }
  std::vector<at::Tensor> all() const { return {means, log_scales, angles, colors, opacities}; }
  zero::NamedTensors list() const {
    zero::NamedTensors result;
    const char* const names[] = {"means", "log_scales", "angles", "colors", "opacities"};
    for (size_t i = 0; i < all().size(); ++i) result.insert(names[i], all()[i]);
    return result;
  }

  // The colors at these points: [points, 3].
  at::Tensor colors_at(const at::Tensor& points) const {
    const at::Tensor d = points.unsqueeze(1) - means.unsqueeze(0);  // [points, splats, 2]
    const at::Tensor c = angles.cos();
    const at::Tensor s = angles.sin();
    const at::Tensor inverse = log_scales.neg().exp();
    const at::Tensor u = (c * d.select(2, 0) + s * d.select(2, 1)) * inverse.select(1, 0);
    const at::Tensor v = (c * d.select(2, 1) - s * d.select(2, 0)) * inverse.select(1, 1);
    const at::Tensor weight = opacities.sigmoid() * (-0.5 * (u.square() + v.square())).exp();
    return 0.15 + weight.matmul(colors);
  }

  at::Tensor means, log_scales, angles, colors, opacities;
};

std::unique_ptr<torch::optim::Adam> make_adam(const Splats& splats) {
  const double rates[] = {1e-3, 5e-3, 1e-2, 1e-2, 1e-2};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < splats.all().size(); ++i) {
    groups.emplace_back(std::vector<at::Tensor>{splats.all()[i]},
                        std::make_unique<torch::optim::AdamOptions>(rates[i]));
  }
  return std::make_unique<torch::optim::Adam>(std::move(groups), torch::optim::AdamOptions());
}

// Every rank comes to the same rows, since parameters and averaged gradients are the same on all.
// `pull` says how much each splat was pulled since the last time.
void densify(zero::ZeroOptimizer& optimizer, const Splats& splats, const at::Tensor& pull,
             int step) {
  const at::NoGradGuard no_grad;
  const at::Tensor seen = splats.opacities.sigmoid().gt(kLowestOpacity);
  const at::Tensor kept = seen.nonzero().squeeze(1);
  const int64_t room = kMostSplats - kept.size(0);
  const auto wanted = static_cast<int64_t>(kGrownPerTime * static_cast<double>(kept.size(0)));
  const at::Tensor divided =
      std::get<1>(at::masked_fill(pull, seen.logical_not(), -1.0).topk(std::min(room, wanted)));

  // Kept rows go on with their state, and a new one begins without.
  const at::Tensor rows = at::cat({kept, at::full({divided.size(0)}, -1, at::kLong)});
  const at::Tensor from = at::cat({kept, divided});
  const at::Tensor is_new = rows.lt(0);
  const at::Tensor is_divided = at::isin(from, divided);
  const at::Tensor large = splats.log_scales.exp().amax(1).gt(kSmallScale).index_select(0, from);
  const at::Tensor split = is_divided.logical_and(large).unsqueeze(1);

  const at::Tensor scales = splats.log_scales.index_select(0, from);
  torch::manual_seed(step);
  const at::Tensor aside = at::randn({kMostSplats, 2}).narrow(0, 0, divided.size(0));
  at::Tensor offset = at::zeros_like(scales);
  offset.index_copy_(0, is_new.nonzero().squeeze(1), aside);
  const at::Tensor means = splats.means.index_select(0, from) + offset * scales.exp() * 0.7;
  optimizer.resize_rows(
      {{splats.means, rows, means},
       {splats.log_scales, rows, at::where(split, scales + std::log(kSplitScale), scales)},
       {splats.angles, rows, splats.angles.index_select(0, from)},
       {splats.colors, rows, splats.colors.index_select(0, from)},
       {splats.opacities, rows, splats.opacities.index_select(0, from)}});
}

void write_picture(const std::string& path, const at::Tensor& colors) {
  const at::Tensor bytes = (colors.clamp(0, 1) * 255).round().to(at::kByte).contiguous();
  std::ofstream file(path, std::ios::binary);
  file << "P6\n" << kSide << " " << kSide << "\n255\n";
  file.write(static_cast<const char*>(bytes.const_data_ptr()),
             static_cast<std::streamsize>(bytes.nbytes()));
  TORCH_CHECK(file.flush().good(), "cannot write ", path);
}

int train(const Arguments& arguments) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  const Splats splats;
  zero::ZeroOptimizer optimizer(splats.list(), make_adam(splats), group);

  // A rank looks at its part of the pixels: every n-th.
  const at::Tensor all = pixels();
  TORCH_CHECK(all.size(0) % group.world_size() == 0, "expected a divisor of the ", all.size(0),
              " pixels, got ", group.world_size(), " ranks");
  const at::Tensor mine = all.slice(0, group.rank(), c10::nullopt, group.world_size());
  const at::Tensor wanted = target(mine);
  at::Tensor pull = at::zeros({splats.means.size(0)});

  for (int step = 0; step <= arguments.steps; ++step) {
    if (step > 0 && step % kDensifyEvery == 0 && step + kDensifyEvery < arguments.steps) {
      densify(optimizer, splats, pull, step);
      pull = at::zeros({splats.means.size(0)});
    }
    if (step % 100 == 0 && group.rank() == 0) {
      const at::NoGradGuard no_grad;
      const auto error = (splats.colors_at(all) - target(all)).square().mean().item<double>();
      std::printf("step %3d  %3d splats, %.1f dB\n", step, static_cast<int>(splats.means.size(0)),
                  -10 * std::log10(error));
      std::fflush(stdout);
    }
    if (step == arguments.steps) break;
    optimizer.backward((splats.colors_at(mine) - wanted).square().mean());
    pull += optimizer.gradient(splats.means).norm(2, 1);
    optimizer.step();
  }
  if (group.rank() == 0 && !arguments.picture.empty()) {
    const at::NoGradGuard no_grad;
    write_picture(arguments.picture, splats.colors_at(all));
  }
  return 0;
}

int number(const std::string& name, const std::string& text) {
  int result = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, result);
  TORCH_CHECK(error == std::errc() && rest == end, name, ": expected a whole number, got ", text);
  return result;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    arguments.help = arguments.help || name == "--help";
    if (arguments.help) break;
    TORCH_CHECK(i + 1 < argc, "expected a value after ", name);
    if (name == "--ranks") {
      arguments.ranks = number(name, argv[i + 1]);
    } else if (name == "--steps") {
      arguments.steps = number(name, argv[i + 1]);
    } else if (name == "--picture") {
      arguments.picture = argv[i + 1];
    } else {
      TORCH_CHECK(false, "expected --ranks, --steps or --picture, got ", name);
    }
  }
  TORCH_CHECK(arguments.steps >= 0, "--steps: expected 0 or more, got ", arguments.steps);
  const int64_t count = kSide * kSide;
  TORCH_CHECK(arguments.ranks > 0 && count % arguments.ranks == 0,
              "--ranks: expected a divisor of the ", count, " pixels, got ", arguments.ranks);
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    zero::examples::enter_callers_folder();
    const Arguments arguments = parse(argc, argv);
    if (arguments.help) {
      std::puts("usage: splats [--ranks 2] [--steps 400] [--picture splats.ppm]");
      return 0;
    }
    return zero::launch_local(arguments.ranks, [&] { return train(arguments); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "splats: %s\n", error.what_without_backtrace());
    return 1;
  }
}
