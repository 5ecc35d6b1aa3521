// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/metrics_log.h"

#include <c10/util/Exception.h>

#include <torch/version.h>

#include <nlohmann/json.hpp>

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

}  // namespace

MetricsLog::MetricsLog(const std::string& path, bool append)
    : path_(path), file_(path, append ? std::ios::app : std::ios::trunc) {
  TORCH_CHECK(file_.good(), "cannot write ", path);
}

void MetricsLog::write_run(const TrainOptions& options, int world_size, int64_t first_step) {
  nlohmann::ordered_json run = {
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
  file_ << nlohmann::ordered_json({{"run", run}}).dump() << std::endl;
  TORCH_CHECK(file_.good(), "cannot write ", path_);
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
  file_ << line.dump() << std::endl;
  TORCH_CHECK(file_.good(), "cannot write ", path_);
}

}  // namespace zero::examples
