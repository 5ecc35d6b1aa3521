// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <numeric>
#include <sstream>

namespace zero::examples {

namespace {

constexpr int64_t kBarWidth = 12;
constexpr size_t kSparks = 16;
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr double kSmoothing = 0.9;  // part of the old rate in the new one

std::string bar(int64_t done, int64_t total) {
  const int64_t filled =
      std::clamp<int64_t>(done * kBarWidth / std::max<int64_t>(total, 1), 0, kBarWidth);
  return "[" + std::string(static_cast<size_t>(filled), '=') +
         std::string(static_cast<size_t>(kBarWidth - filled), ' ') + "] ";
}

// The losses so far, each character the mean of as many steps, between the least and the largest.
std::string sparkline(const std::vector<double>& losses) {
  static constexpr const char* kLevels[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const size_t count = std::min(kSparks, losses.size());
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * losses.size() / count;
    const size_t end = (i + 1) * losses.size() / count;
    const double sum = std::accumulate(losses.begin() + static_cast<std::ptrdiff_t>(begin),
                                       losses.begin() + static_cast<std::ptrdiff_t>(end), 0.0);
    means.push_back(sum / static_cast<double>(end - begin));
  }
  if (means.empty()) return {};
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string text;
  for (const double mean : means) {
    const double height = *high > *low ? (mean - *low) / (*high - *low) : 0.0;
    text += kLevels[std::isfinite(height) ? std::min<int>(static_cast<int>(height * 8), 7) : 7];
  }
  return text;
}

bool is_terminal(std::FILE* out) {
  return isatty(fileno(out)) != 0 && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr;
}

// Columns of the terminal `out`, or 80 where it does not say.
size_t columns(std::FILE* out) {
  winsize size = {};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(std::FILE* out, int64_t first_step, int64_t steps)
    : out_(out), first_step_(first_step), steps_(steps), terminal_(is_terminal(out)) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\n", out_);
  std::fflush(out_);
}

std::string Progress::time_left(int64_t steps_done) const {
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  const auto done = static_cast<double>(std::max<int64_t>(steps_done - first_step_, 1));
  const auto left = static_cast<double>(steps_ - steps_done);
  const auto seconds = static_cast<int64_t>(std::llround(elapsed.count() / done * left));
  std::ostringstream text;
  if (seconds >= 3600) {
    text << seconds / 3600 << "h" << std::setw(2) << std::setfill('0') << seconds / 60 % 60 << "m";
  } else {
    text << seconds / 60 << "m" << std::setw(2) << std::setfill('0') << seconds % 60 << "s";
  }
  return text.str();
}

std::string Progress::line(const StepMetrics& metrics) const {
  std::ostringstream text;
  const auto digits = static_cast<int>(std::to_string(steps_).size());
  text << std::fixed << "step " << std::setw(digits) << metrics.step << "/" << steps_;
  // First, since the end of a long line is cut.
  if (metrics.skipped) text << "  SKIPPED: gradients are not finite";
  if (skipped_ > 0) text << "  " << skipped_ << " skipped";
  text << std::setprecision(4) << "  loss " << metrics.loss;
  if (metrics.validation_loss) text << "  validation " << *metrics.validation_loss;
  if (metrics.ema_loss) text << "  averaged " << *metrics.ema_loss;
  if (!std::isnan(metrics.gradient_norm)) {
    text << std::setprecision(2) << "  norm " << metrics.gradient_norm;
  }
  text << std::setprecision(0) << "  " << tokens_per_second_ << " tokens/s  "
       << time_left(metrics.step) << " left";
  return text.str();
}

void Progress::show(const StepMetrics& metrics) {
  const double rate = static_cast<double>(metrics.tokens) / std::max(metrics.seconds, 1e-9);
  tokens_per_second_ = tokens_per_second_ == 0.0
                           ? rate
                           : kSmoothing * tokens_per_second_ + (1.0 - kSmoothing) * rate;
  if (metrics.skipped) {
    ++skipped_;
  } else {
    losses_.push_back(metrics.loss);
  }
  const bool last = metrics.step >= steps_;
  const bool keep = metrics.validation_loss.has_value() || last;
  if (terminal_) {
    if (!keep && Clock::now() - last_drawn_ < kRedrawInterval) return;
    last_drawn_ = Clock::now();
    // \r returns to the start of the line and \33[K clears what it held. A line
    // that wraps could not be redrawn, so it is cut.
    std::string text = line(metrics);
    if (!keep) {
      const size_t sparks = std::min(kSparks, losses_.size()) + 1;  // in columns
      const size_t width = columns(out_) - 1;
      text = bar(metrics.step, steps_) +
             text.substr(0, width - std::min(width, kBarWidth + 3 + sparks));
      text += " " + sparkline(losses_);
    }
    std::fprintf(out_, "\r\33[K%s%s", text.c_str(), keep ? "\n" : "");
    drawn_ = !keep;
  } else if (keep || metrics.step == first_step_ + 1) {
    std::fprintf(out_, "%s\n", line(metrics).c_str());
  }
  std::fflush(out_);
}

}  // namespace zero::examples
