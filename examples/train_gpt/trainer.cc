// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/trainer.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/irange.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "examples/train_gpt/inner_optimizer.h"
#include "examples/train_gpt/masters_hash.h"
#include "examples/train_gpt/mix.h"
#include "examples/train_gpt/sample_text.h"
#include "examples/train_gpt/step_trace.h"
#include "examples/train_gpt/stop_signal.h"
#include "zero/checkpoint.h"

namespace zero::examples {

namespace {

// Held-out sequences in one forward pass: enough to keep a core busy, few
// enough not to decide the peak of memory and to occupy all ranks.
constexpr int64_t kValidationBatch = 8;

// Steps between two hashes of the masters.
constexpr int64_t kHashEvery = 10;

// The library's default suits models a hundred times larger; this one would fit
// into one bucket, and buffers for it would outweigh what sharding saves.
constexpr int64_t kBucketBytes = 256 << 10;

// The same initial values on every device and rank.
Gpt make_model(const TrainOptions& options, at::Device device) {
  torch::manual_seed(options.seed);
  Gpt model(GptOptions{.context = options.context,
                       .layers = options.layers,
                       .width = options.width,
                       .heads = options.heads,
                       .dropout = options.dropout});
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

// The seed of the random numbers that part `place` of a step's batch uses.
uint64_t seed_of(uint64_t seed, int64_t step, int64_t place) {
  constexpr uint64_t kDropout = 0x64726f706f7574;  // keeps it apart from the choice of sequences
  const uint64_t step_key = mix(mix(seed ^ kDropout) ^ static_cast<uint64_t>(step));
  return mix(step_key ^ static_cast<uint64_t>(place));
}

// While it lives, `model` drops nothing.
class Evaluation {
 public:
  explicit Evaluation(Gpt& model) : model_(model), training_(model->is_training()) {
    model_->eval();
  }
  ~Evaluation() { model_->train(training_); }
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

 private:
  Gpt& model_;
  const bool training_;
};

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
              .gradient_shard_dtype(options.gradient_shard_dtype)
              .update_in_backward(options.update_in_backward)
              .skip_nonfinite(!options.update_in_backward)
              .micro_batches(options.micro_batches)
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

std::vector<double> Trainer::sum_over_ranks(const at::Tensor& values) {
  const at::Tensor sums = values.cpu();  // which waits for the device
  metrics_->all_reduce_sum(sums, "sums over ranks").wait();
  const auto* first = sums.const_data_ptr<double>();
  return {first, first + sums.numel()};
}

MastersHash Trainer::hash_masters() {
  MastersHash hash = examples::hash_masters(*model_, optimizer_);
  masters_hash_ = hash.all;
  return hash;
}

at::Tensor Trainer::backward(int64_t step) {
  // The parts of the batch follow one another, those of this rank too.
  const int64_t parts =
      options_.same_bits ? options_.micro_batches : metrics_->world_size() * options_.accumulate;
  const int64_t own = metrics_->rank() * options_.accumulate;
  const auto places =
      options_.same_bits ? optimizer_.micro_batches() : c10::irange(own, own + options_.accumulate);
  const at::Tensor losses = at::zeros({parts + 1}, at::dtype(at::kDouble).device(device_));
  for (const int64_t place : places) {
    // All but the last part only add to p.grad(), and the last one sends; with same_bits each does.
    const auto guard =
        optimizer_.no_sync(!options_.same_bits && place + 1 < own + options_.accumulate);
    const int64_t first = options_.batch * place / parts;
    const int64_t count = options_.batch * (place + 1) / parts - first;
    if (count == 0) continue;
    // A part drops the same units on any rank.
    torch::manual_seed(seed_of(options_.seed, step, place));
    const at::Tensor mean = loss(data_.training_sequences(step, first, count));
    // With same_bits the optimizer makes the mean over parts. Without, parts may differ by a
    // sequence after a death, so each counts as much as it has; a factor of 1 changes no bit.
    const double weight = static_cast<double>(count * parts) / static_cast<double>(options_.batch);
    optimizer_.backward(options_.same_bits ? mean : mean / options_.accumulate * weight);
    losses[place].copy_(mean.detach().to(at::kDouble) * count);  // which waits for no device
  }
  return losses;
}

StepMetrics Trainer::train_step(int64_t step) {
  const auto start = std::chrono::steady_clock::now();
  RECORD_FUNCTION("train_gpt::step", std::vector<c10::IValue>());
  const at::Tensor losses = backward(step);
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.loss_scale = optimizer_.loss_scale();
  // Parameters that are updated already have no norm to be clipped by.
  const at::Tensor norm = options_.update_in_backward
                              ? at::full({}, std::nan(""), at::kDouble)
                              : optimizer_.clip_grad_norm_(options_.max_norm);
  metrics.memory = memory_ = optimizer_.memory();
  metrics.learning_rate = optimizer_.param_groups()[0].options().get_lr();
  optimizer_.step();
  schedule_.step();
  // Signals come to ranks at different times; only together may they stop.
  losses[-1].fill_(stop_requested() ? 1.0 : 0.0);
  const std::vector<double> sums = sum_over_ranks(losses);
  stop_ = sums.back() > 0;
  metrics.loss =
      std::accumulate(sums.begin(), sums.end() - 1, 0.0) / static_cast<double>(options_.batch);
  metrics.gradient_norm = norm.item<double>();
  metrics.skipped = optimizer_.step_skipped();
  metrics.tokens = options_.batch * options_.context;
  metrics.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return metrics;
}

double Trainer::validation_loss() {
  const c10::NoGradGuard no_grad;
  const Evaluation evaluation(model_);
  const int64_t total = options_.validation_sequences;
  const int64_t world_size = metrics_->world_size();
  // Parts do not depend on the ranks, of which each has its share, or none.
  const int64_t parts = (total + kValidationBatch - 1) / kValidationBatch;
  const at::Tensor losses = at::zeros({parts}, at::dtype(at::kDouble).device(device_));
  const int64_t end = parts * (metrics_->rank() + 1) / world_size;
  for (int64_t part = parts * metrics_->rank() / world_size; part < end; ++part) {
    const int64_t first = part * kValidationBatch;
    const int64_t count = std::min(total - first, kValidationBatch);
    const at::Tensor mean = loss(data_.validation_sequences(total, first, count));
    losses[part].copy_(mean.to(at::kDouble) * count);
  }
  const std::vector<double> sums = sum_over_ranks(losses);
  return std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(total);
}

// A step that is repeated may have a checkpoint, or half of one. It is not replaced, since not all
// file systems can do that.
std::string Trainer::new_checkpoint(int64_t steps) {
  const std::string name = options_.checkpoints + "/step-" + std::to_string(steps);
  const auto path = [&](int64_t time) {
    return time == 1 ? name : name + "-" + std::to_string(time);
  };
  int64_t time = 1;
  std::error_code ignored;
  while (std::filesystem::exists(path(time), ignored)) ++time;
  // Ranks may have disks of their own.
  for (const std::string& other :
       metrics_->all_gather_text(std::to_string(time), "name of a checkpoint")) {
    time = std::max<int64_t>(time, std::stoll(other));
  }
  return path(time);
}

std::map<std::string, std::string> Trainer::fixed_options() const {
  return {{"batch", std::to_string(options_.batch)},
          {"heads", std::to_string(options_.heads)},
          {"micro-batches",
           options_.same_bits ? std::to_string(options_.micro_batches) : "none (no --same-bits)"},
          {"seed", std::to_string(options_.seed)},
          {"weight-decay", c10::str(options_.weight_decay)}};
}

void Trainer::save(int64_t steps) {
  std::map<std::string, std::string> metadata = fixed_options();
  metadata["step"] = std::to_string(steps);
  metadata["text"] = std::to_string(data_.training_bytes());
  optimizer_.save_checkpoint(new_checkpoint(steps), SaveOptions()
                                                        .shared_folder(!options_.own_disks)
                                                        .include("schedule", schedule_)
                                                        .metadata(metadata));
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
  measured_ = true;  // the others may be beyond it
  goes_back_ = true;
  return steps;
}

int64_t Trainer::resume(const std::string& checkpoint) {
  const LoadReport report =
      optimizer_.load_checkpoint(checkpoint, LoadOptions().include("schedule", schedule_));
  // Files may have grown since; --init is for a run on another text.
  const auto text = report.metadata.find("text");
  const std::string bytes = std::to_string(data_.training_bytes());
  if (metrics_->rank() == 0 && text != report.metadata.end() && text->second != bytes) {
    std::printf("another text than that of %s: %s bytes to train on in place of %s\n",
                checkpoint.c_str(), bytes.c_str(), text->second.c_str());
  }
  for (const auto& [name, value] : fixed_options()) {
    const auto saved = report.metadata.find(name);
    TORCH_CHECK(saved == report.metadata.end() || saved->second == value, "--", name, ": expected ",
                saved->second, " as in ", checkpoint, ", got ", value,
                "; go on with the options of that run, or begin another in a folder of its own");
  }
  return std::stoll(report.metadata.at("step"));
}

std::string Trainer::sample() {
  const Evaluation evaluation(model_);
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
  // A run that goes on leaves what its beginning wrote.
  if (!options_.log.empty()) logs.emplace_back(options_.log, append || first_step > 0);
  if (!options_.metrics.empty()) {  // which may have a run that began at the same step
    logs.emplace_back(options_.metrics + "/steps-" + std::to_string(first_step) + ".jsonl", true);
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
  measured_ = true;
  goes_back_ = true;
  stop_ = false;  // a signal is seen again in the next step
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
  const bool last = stop_ || metrics.step == options_.steps;
  if (options_.same_bits && (last || metrics.step % kHashEvery == 0)) {
    metrics.masters = hash_masters();
  }
  const bool save_now = last || metrics.step % options_.save_every == 0;
  if (!options_.checkpoints.empty() && save_now) save(metrics.step);
  // Behind the save, which a report that fails must not cost. Rank 0 may have died in this step
  // before others, or have joined: all it knows is the number.
  const bool is_known = metrics.tokens > 0;
  if (progress_ && is_known) progress_->show(metrics);
  const bool half_way = metrics.step == options_.steps / 10 || metrics.step == options_.steps / 2;
  if (reports && half_way && options_.sample_bytes > 0) print_sample(metrics.step);
  if (reports && is_known && !options_.report.empty()) {
    // A step that was made again counts once.
    while (!history_.empty() && history_.back().step >= metrics.step) history_.pop_back();
    history_.push_back(metrics);
  }
  for (MetricsLog& log : logs_) {
    if (is_known) log.write(metrics);
  }
}

void Trainer::measure_beginning(int64_t steps) {
  const double loss = validation_loss();
  measured_ = true;
  if (metrics_->rank() == 0) {
    std::printf("validation loss before %s: %.4f nats per byte\n",
                steps > 0 ? "going on" : "training", loss);
    std::fflush(stdout);
  }
}

void Trainer::report_protected_step(int64_t steps) {
  if (latest_.step != steps) latest_ = {};
  latest_.step = steps;
  if (steps > 0) report_step(latest_);
}

void Trainer::measure_end() {
  if (options_.same_bits && masters_hash_.empty()) hash_masters();
  const int64_t own = optimizer_.memory().optimizer_state;
  state_bytes_ = std::llround(sum_over_ranks(at::full({1}, own, at::kDouble))[0]);
}

bool Trainer::train(int64_t first_step) {
  begin_reports(first_step, /*recovered=*/false);
  // The first steps make buffers and connections: not what one wants to see.
  const int64_t settled = std::min(first_step + 2, options_.steps - 1);
  StepTrace trace(progress_ ? options_.trace : "", settled, options_.trace_steps,
                  device_.is_cpu() ? StepTrace::Device::kCpu : StepTrace::Device::kCuda);
  for (int64_t step = first_step;;) {
    try {
      if (!measured_) measure_beginning(step);
      if (std::exchange(goes_back_, false)) report_protected_step(step);
      while (step < options_.steps && !stop_) {
        trace.before_step(step);
        latest_ = train_step(step);
        report_step(latest_);
        if (++step > furthest_) {
          furthest_ = step;
          recoveries_ = 0;
        }
      }
      measure_end();
      break;
    } catch (const CommunicationError& error) {
      step = recover(error);
    }
  }
  traced_ = trace.has_begun();
  if (stop_) return false;
  if (progress_ && progress_->skipped_steps() > 0) {
    std::printf("%lld of %lld steps were skipped, since gradients were not finite\n",
                static_cast<long long>(progress_->skipped_steps()),
                static_cast<long long>(options_.steps - first_step));
  }
  return true;
}

}  // namespace zero::examples
