// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/trainer.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "examples/train_gpt/inner_optimizer.h"
#include "examples/train_gpt/sample_text.h"
#include "examples/train_gpt/step_trace.h"
#include "examples/train_gpt/stop_signal.h"
#include "zero/checkpoint.h"
#include "zero/weights.h"

namespace zero::examples {

namespace {

// Held-out sequences in one forward pass: enough to keep a core busy, few
// enough not to decide the peak of memory.
constexpr int64_t kValidationBatch = 16;

// The library's default suits models a hundred times larger; this one would fit
// into one bucket, and buffers for it would outweigh what sharding saves.
constexpr int64_t kBucketBytes = 256 << 10;

// The same initial values on every device and rank.
Gpt make_model(const TrainOptions& options, at::Device device) {
  torch::manual_seed(options.seed);
  Gpt model(GptOptions{.context = options.context,
                       .layers = options.layers,
                       .width = options.width,
                       .heads = options.heads});
  model->to(device, options.dtype);
  if (!options.init.empty()) load_weights(*model, options.init);
  return model;
}

// Reaches its end in the last step.
LrFactor make_schedule(const TrainOptions& options) {
  const int64_t warmup = std::llround(options.warmup * static_cast<double>(options.steps));
  const int64_t falling = std::max<int64_t>(options.steps - 1 - warmup, 1);
  return linear_warmup(warmup, cosine_decay(falling, 0.1));
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const ByteDataset& data, const Group& group)
    : options_(options),
      data_(data),
      device_(group.device()),
      model_(make_model(options, device_)),
      optimizer_(
          *model_, make_inner_optimizer(model_, options), group,
          ZeroOptions()
              .stage(options.stage)
              .bucket_bytes(kBucketBytes)
              .gather_wire(options.gather_wire == "changes" ? GatherWire::kChanges
                                                            : GatherWire::kWhole)
              .ema(options.ema > 0 ? std::optional<EmaOptions>(EmaOptions().decay(options.ema))
                                   : std::nullopt)
              .moments(options.moments)
              .split_masters(options.split_masters)
              .protect(options.elastic ? options.protect_every : 0)),
      schedule_(optimizer_, make_schedule(options)),
      metrics_(optimizer_.group().make_communicator("metrics", Purpose::kControl)) {}

int64_t Trainer::parameter_count() const {
  int64_t count = 0;
  for (const at::Tensor& parameter : model_->parameters()) count += parameter.numel();
  return count;
}

at::Tensor Trainer::loss(const Sequences& sequences) {
  RECORD_FUNCTION("train_gpt::forward", std::vector<c10::IValue>());
  const at::Tensor logits = model_(sequences.inputs.to(device_));
  return at::cross_entropy_loss(logits.flatten(0, 1), sequences.targets.to(device_).flatten());
}

double Trainer::mean_over_ranks(double value) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  metrics_->all_reduce_sum(sum, "mean of a loss").wait();
  return sum.item<double>() / metrics_->world_size();
}

StepMetrics Trainer::train_step(int64_t step) {
  const auto start = std::chrono::steady_clock::now();
  RECORD_FUNCTION("train_gpt::step", std::vector<c10::IValue>());
  StepMetrics metrics;
  // The micro-batches of all ranks follow one another. After a death they may differ by a sequence,
  // so each counts as much as it has; a factor of 1 changes no bit.
  const int64_t parts = metrics_->world_size() * options_.accumulate;
  double local_loss = 0.0;
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    // All but the last micro-batch only add to p.grad(); the last one sends.
    const auto guard = optimizer_.no_sync(micro + 1 < options_.accumulate);
    const int64_t place = metrics_->rank() * options_.accumulate + micro;
    const int64_t first = options_.batch * place / parts;
    const int64_t count = options_.batch * (place + 1) / parts - first;
    if (count == 0) continue;
    const double weight = static_cast<double>(count * parts) / static_cast<double>(options_.batch);
    const at::Tensor part =
        loss(data_.training_sequences(step, first, count)) / options_.accumulate * weight;
    optimizer_.backward(part);
    local_loss += part.item<double>();
  }
  metrics.loss_scale = optimizer_.loss_scale();
  const at::Tensor norm = optimizer_.clip_grad_norm_(options_.max_norm);
  const bool stop_here = stop_requested();
  metrics.memory = memory_ = optimizer_.memory();
  metrics.learning_rate = optimizer_.param_groups()[0].options().get_lr();
  optimizer_.step();
  schedule_.step();
  metrics.step = step + 1;
  metrics.loss = mean_over_ranks(local_loss);
  // Signals come to ranks at different times; only together may they stop.
  if (!options_.checkpoints.empty()) stop_ = mean_over_ranks(stop_here ? 1.0 : 0.0) > 0;
  metrics.gradient_norm = norm.item<double>();
  metrics.skipped = optimizer_.step_skipped();
  metrics.tokens = options_.batch * options_.context;
  metrics.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return metrics;
}

double Trainer::validation_loss() {
  const c10::NoGradGuard no_grad;
  const int64_t total = options_.validation_sequences;
  const int64_t world_size = metrics_->world_size();
  // This rank's share; ranks may have one sequence more or less than others, or none.
  int64_t next = total * metrics_->rank() / world_size;
  const int64_t end = total * (metrics_->rank() + 1) / world_size;
  double sum = 0.0;
  while (next < end) {
    const int64_t count = std::min(end - next, kValidationBatch);
    sum += loss(data_.validation_sequences(total, next, count)).item<double>() *
           static_cast<double>(count);
    next += count;
  }
  return mean_over_ranks(sum) * static_cast<double>(world_size) / static_cast<double>(total);
}

void Trainer::save(int64_t steps) {
  // What a step draws from the text depends on these alone.
  optimizer_.save_checkpoint(options_.checkpoints + "/step-" + std::to_string(steps),
                             SaveOptions()
                                 .overwrite(true)
                                 .shared_folder(!options_.own_disks)
                                 .include("schedule", schedule_)
                                 .metadata({{"step", std::to_string(steps)},
                                            {"batch", std::to_string(options_.batch)},
                                            {"seed", std::to_string(options_.seed)}}));
  if (options_.own_disks || metrics_->rank() == 0) keep_last(options_.checkpoints, options_.keep);
}

int64_t Trainer::begin() {
  if (options_.checkpoints.empty()) return 0;
  const auto newest = options_.own_disks ? optimizer_.latest_checkpoint(options_.checkpoints)
                                         : latest(options_.checkpoints);
  // All ranks must find the same one.
  const auto found = metrics_->all_gather_text(newest.value_or("none"), "newest checkpoint");
  for (const std::string& path : found) {
    TORCH_CHECK(path == found[0],
                "--checkpoints: expected the same newest checkpoint on all ranks, got ", found[0],
                " and ", path);
  }
  if (!newest) return 0;
  // Steps have the same names in every run: this one would write over the other's.
  TORCH_CHECK(options_.resume, "--checkpoints: expected a folder without checkpoints for a new ",
              "run, got ", *newest, " of an earlier one; add --resume to go on from it, or choose ",
              "another folder");
  return resume(*newest);
}

int64_t Trainer::join() {
  const Stats stats = optimizer_.stats();
  const int64_t steps = stats.steps + stats.skipped_steps;
  schedule_.set_step(steps);
  return steps;
}

int64_t Trainer::resume(const std::string& checkpoint) {
  const LoadReport report =
      optimizer_.load_checkpoint(checkpoint, LoadOptions().include("schedule", schedule_));
  const auto expect = [&](const char* name, const std::string& value) {
    const auto saved = report.metadata.find(name);
    TORCH_CHECK(saved != report.metadata.end() && saved->second == value, "--", name, ": expected ",
                saved == report.metadata.end() ? "one" : saved->second, " as in ", checkpoint,
                ", got ", value);
  };
  expect("batch", std::to_string(options_.batch));
  expect("seed", std::to_string(options_.seed));
  return std::stoll(report.metadata.at("step"));
}

std::string Trainer::sample() {
  return printable(sample_text(model_, options_.prompt,
                               {.bytes = options_.sample_bytes,
                                .temperature = options_.temperature,
                                .seed = options_.seed}));
}

void Trainer::print_sample(int64_t steps) {
  const std::string text = sample();
  std::printf("\nsample after %lld steps\n%s\n\n", static_cast<long long>(steps), text.c_str());
  if (!options_.report.empty()) samples_.emplace_back(steps, text);
}

std::vector<MetricsLog> Trainer::open_logs(int64_t first_step, bool append) const {
  std::vector<MetricsLog> logs;
  if (metrics_->rank() != 0) return logs;
  if (!options_.log.empty()) logs.emplace_back(options_.log, append);
  // A run that goes on leaves what its beginning wrote.
  if (!options_.metrics.empty()) {
    logs.emplace_back(options_.metrics + "/steps-" + std::to_string(first_step) + ".jsonl", append);
  }
  for (MetricsLog& log : logs) log.write_run(options_, metrics_->world_size(), first_step);
  return logs;
}

void Trainer::begin_reports(int64_t first_step, bool recovered) {
  if (metrics_->rank() != 0 || progress_) return;
  logs_ = open_logs(first_step, recovered);
  progress_.emplace(stdout, first_step, options_.steps);
}

int64_t Trainer::recover(const c10::Error& error) {
  metrics_->abort("the ranks change");
  RecoveryReport report;
  std::string problem = error.what_without_backtrace();
  for (bool connected = false; !connected;) {
    // An error that comes again and again, though nobody dies, would be recovered from for ever.
    if (!options_.elastic || ++recoveries_ > 3) throw;
    std::fprintf(stderr, "train_gpt: %s\n", problem.c_str());
    try {
      report = optimizer_.recover(options_.checkpoints);
      metrics_ = optimizer_.group().make_communicator("metrics", Purpose::kControl);
      connected = true;
    } catch (const CommunicationError& again) {  // another rank may have died meanwhile
      problem = again.what_without_backtrace();
    }
  }
  schedule_.set_step(report.steps);
  if (metrics_->rank() == 0) {
    std::printf("went on with %d ranks after step %lld\n", metrics_->world_size(),
                static_cast<long long>(report.steps));
    std::fflush(stdout);
  }
  begin_reports(report.steps, /*recovered=*/true);
  return report.steps;
}

void Trainer::report_step(StepMetrics metrics) {
  const bool reports = metrics_->rank() == 0;
  if (metrics.step % options_.validate_every == 0 || metrics.step == options_.steps) {
    metrics.validation_loss = validation_loss();
    if (options_.ema > 0) {
      const auto averaged = optimizer_.use_ema();
      metrics.ema_loss = validation_loss();
    }
  }
  if (progress_) progress_->show(metrics);
  const bool half_way = metrics.step == options_.steps / 10 || metrics.step == options_.steps / 2;
  if (reports && half_way && options_.sample_bytes > 0) print_sample(metrics.step);
  if (reports && !options_.report.empty()) history_.push_back(metrics);
  for (MetricsLog& log : logs_) log.write(metrics);
  const bool save_now =
      stop_ || metrics.step % options_.save_every == 0 || metrics.step == options_.steps;
  if (!options_.checkpoints.empty() && save_now) save(metrics.step);
}

bool Trainer::train(int64_t first_step) {
  begin_reports(first_step, /*recovered=*/false);
  // The first steps make buffers and connections: not what one wants to see.
  const int64_t settled = std::min(first_step + 2, options_.steps - 1);
  StepTrace trace(progress_ ? options_.trace : "", settled, options_.trace_steps,
                  device_.is_cpu() ? StepTrace::Device::kCpu : StepTrace::Device::kCuda);
  for (int64_t step = first_step; step < options_.steps;) {
    try {
      trace.before_step(step);
      report_step(train_step(step));
      if (++step > furthest_) {
        furthest_ = step;
        recoveries_ = 0;
      }
      if (stop_) return false;
      if (step < options_.steps) continue;
      state_bytes_ = std::llround(mean_over_ranks(static_cast<double>(memory_.optimizer_state)) *
                                  metrics_->world_size());
    } catch (const CommunicationError& error) {
      step = recover(error);
    }
  }
  if (progress_ && progress_->skipped_steps() > 0) {
    std::printf("%lld of %lld steps were skipped, since gradients were not finite\n",
                static_cast<long long>(progress_->skipped_steps()),
                static_cast<long long>(options_.steps - first_step));
  }
  return true;
}

}  // namespace zero::examples
