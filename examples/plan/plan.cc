// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What training a large model would cost a rank, from its shapes alone: no
// tensor is made, so that a laptop plans a job of any size in seconds.
//
// Usage:
//   ./bazelw run //examples:plan -- --model llama3_405b --world 16384 --stage 2
//   ./bazelw run //examples:plan -- --model mixtral_8x7b --world 512 --expert-parallel 8
//
// The figures are arithmetic over the plan that a ZeroOptimizer with AdamW would use,
// not measurements.
#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "examples/plan/plan_figures.h"

namespace zero::examples {
namespace {

struct Options {
  std::string model = "llama3_405b";
  JobOptions job;
  std::string dtype = "bfloat16";
  std::string layout = "contiguous";
  std::optional<double> bucket_mb;
  double bandwidth = 50;
  double latency = 10;
  bool json = false;
};

const std::map<std::string, c10::ScalarType> kDtypes = {
    {"float32", c10::kFloat}, {"bfloat16", c10::kBFloat16}, {"float16", c10::kHalf}};

nlohmann::ordered_json memory_json(const MemoryReport& memory) {
  return {{"working_parameters", memory.working_parameters},
          {"master_parameters", memory.master_parameters},
          {"optimizer_state", memory.optimizer_state},
          {"gradient_shards", memory.gradient_shards},
          {"full_gradients", memory.full_gradients},
          {"total", memory.total()}};
}

nlohmann::ordered_json report(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const ModelShape model = model_shape(options.model);
  const PlanFigures figures = plan_figures(plan_job(model, options.job), options.job.stage);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [&](int64_t messages) {
    return communication_seconds(messages, figures.bytes_sent, options.latency * 1e-6,
                                 options.bandwidth * 1e9);
  };
  return {{"model", options.model},
          {"world", options.job.world_size},
          {"stage", options.job.stage},
          {"expert_parallel", options.job.expert_parallel},
          {"model_parameters", model.numel()},
          {"parameters", figures.parameters},
          {"memory", memory_json(figures.memory)},
          {"padding", figures.padding},
          {"padding_share", figures.padding_share},
          {"least_owned", figures.least_owned},
          {"most_owned", figures.most_owned},
          {"imbalance", figures.imbalance},
          {"buckets", figures.buckets},
          {"largest_bucket_bytes", figures.largest_bucket_bytes},
          {"collective_calls", figures.collective_calls},
          {"pair_messages", figures.pair_messages},
          {"bytes_sent", figures.bytes_sent},
          {"ring_seconds", seconds(figures.ring_messages)},
          {"tree_seconds", seconds(figures.tree_messages)},
          {"plan_seconds", elapsed.count()},
          {"plan_peak_mb", static_cast<double>(usage.ru_maxrss) / 1024}};
}

void line(const char* name, double value, const char* unit) {
  std::printf("  %-34s %14.4f %s\n", name, value, unit);
}

void count(const char* name, const nlohmann::ordered_json& value) {
  std::printf("  %-34s %14lld\n", name, value.get<long long>());
}

void print(const nlohmann::ordered_json& r, const Options& options) {
  std::printf("%s, %lld ranks, stage %lld, %s, AdamW\n", options.model.c_str(),
              r["world"].get<long long>(), r["stage"].get<long long>(), options.dtype.c_str());
  line("parameters of the model", r["model_parameters"].get<double>() * 1e-9, "billion");
  if (options.job.expert_parallel > 1) {
    line("parameters on a rank", r["parameters"].get<double>() * 1e-9, "billion");
  }
  std::printf("memory of a rank between steps, without buckets\n");
  for (const auto& [kind, bytes] : r["memory"].items()) {
    line(kind.c_str(), bytes.get<double>() * 1e-9, "GB");
  }
  std::printf("balance\n");
  line("padding", r["padding_share"].get<double>() * 100, "% of the parameters");
  line("fullest rank above the mean", r["imbalance"].get<double>() * 100, "%");
  std::printf("one step with one backward pass\n");
  count("buckets", r["buckets"]);
  line("largest bucket", r["largest_bucket_bytes"].get<double>() * 1e-6, "MB");
  count("collective calls", r["collective_calls"]);
  count("messages of a rank, pairwise", r["pair_messages"]);
  line("sent by a rank", r["bytes_sent"].get<double>() * 1e-9, "GB");
  std::printf("communication at %g GB/s and %g us a message, nothing hidden\n", options.bandwidth,
              options.latency);
  line("rings (ranks - 1 messages a call)", r["ring_seconds"].get<double>(), "s");
  line("trees (log2 of ranks)", r["tree_seconds"].get<double>(), "s");
  std::printf("planned in %.2f s with %.0f MB\n", r["plan_seconds"].get<double>(),
              r["plan_peak_mb"].get<double>());
}

void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("--model", options.model, "What to plan")->check(CLI::IsMember(model_names()));
  app.add_option("--world", options.job.world_size, "Ranks")->check(CLI::Range(1, 1 << 24));
  app.add_option("--stage", options.job.stage, "ZeRO stage")->check(CLI::Range(1, 2));
  app.add_option("--dtype", options.dtype, "Of working parameters and gradients")
      ->check(CLI::IsMember(kDtypes));
  app.add_option("--layout", options.layout, "Layout of buckets")
      ->check(CLI::IsMember({"contiguous", "per_parameter"}));
  app.add_option("--bucket-mb", options.bucket_mb,
                 "Bucket size in MiB; default: by the number of ranks")
      ->check(CLI::PositiveNumber);
  app.add_option("--expert-parallel", options.job.expert_parallel,
                 "Ranks over which the experts of a layer are dealt out")
      ->check(CLI::PositiveNumber);
  app.add_option("--bandwidth", options.bandwidth, "GB/s that a rank can send")
      ->check(CLI::PositiveNumber);
  app.add_option("--latency", options.latency, "Microseconds of one message")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--json", options.json, "One JSON line instead of a table");
}

int run(Options options) {
  options.job.dtype = kDtypes.at(options.dtype);
  options.job.plan.layout =
      options.layout == "contiguous" ? Layout::kContiguous : Layout::kPerParameter;
  if (options.bucket_mb) {
    options.job.plan.bucket_bytes = static_cast<int64_t>(*options.bucket_mb * 1024 * 1024);
  }
  const nlohmann::ordered_json result = report(options);
  if (options.json) {
    std::cout << result.dump() << "\n";
  } else {
    print(result, options);
  }
  return 0;
}

}  // namespace
}  // namespace zero::examples

int main(int argc, char** argv) {
  zero::examples::Options options;
  CLI::App app("Plans a training job from the shapes of its model alone.");
  zero::examples::add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    return zero::examples::run(options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "plan: %s\n", error.what_without_backtrace());
    return 2;
  }
}
