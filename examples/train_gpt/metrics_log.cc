// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/metrics_log.h"

#include <c10/util/Exception.h>

#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

namespace zero::examples {

namespace {

nlohmann::ordered_json by_kind(const MemoryReport& memory) {
  return {{"working_parameters", memory.working_parameters},
          {"master_parameters", memory.master_parameters},
          {"ema", memory.ema},
          {"optimizer_state", memory.optimizer_state},
          {"gradient_shards", memory.gradient_shards},
          {"full_gradients", memory.full_gradients},
          {"buckets", memory.buckets}};
}

// Cuts what a run that was killed, or whose disk was full, left of a line.
void cut_half_line(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.tellg();
  std::streamoff whole = size;
  while (whole > 0 && file.seekg(whole - 1).get() != '\n') --whole;
  if (whole != size) std::filesystem::resize_file(path, static_cast<uintmax_t>(whole));
}

}  // namespace

MetricsLog::MetricsLog(const std::string& path, bool append) : path_(path) {
  if (append) cut_half_line(path);
  file_.open(path, append ? std::ios::app : std::ios::trunc);
  TORCH_CHECK(file_.good(), "cannot write ", path);
}

void MetricsLog::put(const std::string& line) {
  file_ << line + "\n" << std::flush;  // in one piece
  if (!file_.good() && !std::exchange(failed_, true)) {
    std::fprintf(stderr, "train_gpt: cannot write %s; nothing more is logged there\n",
                 path_.c_str());
  }
}

void MetricsLog::write_run(const TrainOptions& options, int world_size, int64_t first_step) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  nlohmann::ordered_json run = {
      {"started", std::chrono::duration<double>(now).count()},  // seconds since 1970
      {"world_size", world_size},
      {"first_step", first_step},
      {"steps", options.steps},
      {"stage", options.stage},
      {"device", options.device},
      {"dtype", options.dtype_name},
      {"batch", options.batch},
      {"accumulate", options.accumulate},
      {"micro_batches", options.micro_batches},
      {"context", options.context},
      {"layers", options.layers},
      {"width", options.width},
      {"heads", options.heads},
      {"dropout", options.dropout},
      {"optimizer", options.optimizer},
      {"learning_rate", options.learning_rate},
      {"muon_lr", options.muon_lr},
      {"warmup", options.warmup},
      {"weight_decay", options.weight_decay},
      {"max_norm", options.max_norm},
      {"seed", options.seed},
      {"moments", options.moments_name},
      {"split_masters", options.split_masters},
      {"gradient_shards", options.gradient_shards},
      {"update_in_backward", options.update_in_backward},
      {"ema", options.ema},
      {"libtorch", TORCH_VERSION},
  };
  put(nlohmann::ordered_json({{"run", run}}).dump());
}

void MetricsLog::write(const StepMetrics& metrics) {
  // JSON has no NaN and no infinity: nlohmann writes null for them.
  nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"gradient_norm", metrics.gradient_norm},
      {"learning_rate", metrics.learning_rate},
      {"loss_scale", metrics.loss_scale},
      {"skipped", metrics.skipped},
      {"tokens", metrics.tokens},
      {"seconds", metrics.seconds},
      {"tokens_per_second", static_cast<double>(metrics.tokens) / metrics.seconds},
      {"memory", by_kind(metrics.memory)},
  };
  if (metrics.validation_loss) line["validation_loss"] = *metrics.validation_loss;
  if (metrics.ema_loss) line["ema_validation_loss"] = *metrics.ema_loss;
  if (metrics.masters) {
    line["masters_hash"] = metrics.masters->all;
    for (const auto& [name, hash] : metrics.masters->parameters) line["masters"][name] = hash;
  }
  put(line.dump());
}

}  // namespace zero::examples
