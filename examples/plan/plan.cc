// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Prints the costs of training a large model, from its shapes alone: no tensor is made, so that a
// laptop plans a job of any size in seconds.
//
// Usage:
//   ./bazelw run //examples:plan -- --model llama3_405b --world 16384 --stage 2
//   ./bazelw run //examples:plan -- --model mixtral_8x7b --world 512 --expert-parallel 8
//   ./bazelw run //examples:plan -- --model mlp25m --dtype float32 --world 4
//       --ranks-per-machine 2 --link-gbit 1 --local-gbit 80 --latency-us 50 --compute-ms 98
//   ./bazelw run //examples:plan -- --model llama_70b --worlds 8,64,512,4096 --device-memory 80
//   ./bazelw run //examples:plan -- --shapes model.txt --world 64
//
// The file of --shapes has a line for each parameter, such as "layers.0.weight 4096 1024". PyTorch
// writes it with
//
//   for name, p in model.named_parameters(): print(name, *p.shape)
//
// The figures are arithmetic over the plan that a ZeroOptimizer with AdamW would use,
// not measurements.
#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/callers_folder.h"
#include "examples/plan/plan_figures.h"

namespace zero::examples {
namespace {

struct Options {
  std::string model = "llama3_405b";
  std::string shapes;  // a file; empty: `model` is known
  JobOptions job;
  std::string dtype = "bfloat16";
  std::string layout = "contiguous";
  std::string device = "cuda";
  bool ema = false;
  std::string moments = "float32";
  bool split_masters = false;
  std::string gradient_shards = "float32";
  bool update_in_backward = false;
  std::optional<double> bucket_mb;
  std::optional<int64_t> ranks_per_machine;
  double link_gbit = Machines{}.link_bytes_per_second * 8e-9;
  double local_gbit = Machines{}.local_bytes_per_second * 8e-9;
  double latency_us = Machines{}.link_latency_seconds * 1e6;
  double local_latency_us = Machines{}.local_latency_seconds * 1e6;
  std::optional<double> compute_ms;
  std::vector<int64_t> worlds;          // a line for each; empty: all about job.world_size
  std::optional<double> device_memory;  // GB
  bool json = false;
};

const std::map<std::string, c10::ScalarType> kDtypes = {
    {"float32", c10::kFloat}, {"bfloat16", c10::kBFloat16}, {"float16", c10::kHalf}};
const std::map<std::string, Moments> kMoments = {
    {"float32", Moments::kFloat32}, {"bfloat16", Moments::kBFloat16}, {"int8", Moments::kInt8}};
const std::map<std::string, Layout> kLayouts = {{"contiguous", Layout::kContiguous},
                                                {"per_parameter", Layout::kPerParameter},
                                                {"whole_parameters", Layout::kWholeParameters}};

const std::vector<std::pair<std::string, ExchangeAlgorithm>> kAlgorithms = {
    {"flat pairwise", ExchangeAlgorithm::kPairwise},
    {"ring over all ranks", ExchangeAlgorithm::kRing},
    {"two levels", ExchangeAlgorithm::kTwoLevels},
    {"two levels, log2 steps *", ExchangeAlgorithm::kTwoLevelsLog2Steps}};
constexpr double kLatencyShare = 0.2;  // that the last column of the table allows

int64_t ranks_per_machine(const Options& options) {
  const int64_t world_size = options.job.world_size;
  if (options.ranks_per_machine) {
    const int64_t asked = std::min(*options.ranks_per_machine, world_size);
    TORCH_CHECK(world_size % asked == 0, "--ranks-per-machine: expected a divisor of ", world_size,
                " ranks, got ", asked);
    return asked;
  }
  int64_t chosen = std::min(Machines{}.ranks_per_machine, world_size);
  while (world_size % chosen != 0) --chosen;
  return chosen;
}

Machines machines(const Options& options) {
  return {ranks_per_machine(options), options.link_gbit / 8e-9, options.local_gbit / 8e-9,
          options.latency_us * 1e-6, options.local_latency_us * 1e-6};
}

nlohmann::ordered_json exchange_json(const Communication& sent, const Options& options) {
  const ExchangeCost total = sent.total();
  nlohmann::ordered_json result = {
      {"machine_bytes", total.machine_bytes},
      {"link_messages", total.link_messages},
      {"local_messages", total.local_messages},
      {"wire_seconds", total.wire_seconds},
      {"seconds", total.seconds()},
      {"bucket_bytes_for_latency", bucket_bytes_for_latency(sent, kLatencyShare)}};
  if (options.compute_ms) {
    const Compute compute = split_compute(*options.compute_ms * 1e-3);
    result["step_seconds"] = step_seconds(sent, compute, false);
    result["step_seconds_overlap_gather"] = step_seconds(sent, compute, true);
  }
  return result;
}

nlohmann::ordered_json memory_json(const MemoryReport& memory) {
  return {{"working_parameters", memory.working_parameters},
          {"master_parameters", memory.master_parameters},
          {"ema", memory.ema},
          {"optimizer_state", memory.optimizer_state},
          {"gradient_shards", memory.gradient_shards},
          {"full_gradients", memory.full_gradients},
          {"total", memory.total()}};
}

nlohmann::ordered_json report(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const ModelShape model =
      options.shapes.empty() ? model_shape(options.model) : read_shapes(options.shapes);
  const Plan plan = plan_job(model, options.job);
  const PlanFigures figures =
      plan_figures(plan, {.stage = options.job.stage,
                          .state_bytes = adam_state_bytes(kMoments.at(options.moments)),
                          .ema = options.ema,
                          .split_masters = options.split_masters,
                          .gradient_shard_dtype = kDtypes.at(options.gradient_shards),
                          .update_in_backward = options.update_in_backward});
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  nlohmann::ordered_json exchanges;
  for (const auto& [name, algorithm] : kAlgorithms) {
    exchanges[name] = exchange_json(communication(plan, options.job.stage, machines(options),
                                                  algorithm, options.update_in_backward),
                                    options);
  }
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
          {"kept_bucket_bytes", figures.kept_bucket_bytes},
          {"collective_calls", figures.collective_calls},
          {"bytes_sent", figures.bytes_sent},
          {"exchanges", exchanges},
          {"plan_seconds", elapsed.count()},
          {"plan_peak_mb", static_cast<double>(usage.ru_maxrss) / 1024}};
}

void line(const char* name, double value, const char* unit) {
  std::printf("  %-34s %14.4f %s\n", name, value, unit);
}

// In a unit in which a small model is not nothing.
void bytes_line(const char* name, double bytes) {
  const bool small = bytes < 1e7;
  line(name, bytes * (small ? 1e-6 : 1e-9), small ? "MB" : "GB");
}

void count(const char* name, const nlohmann::ordered_json& value) {
  std::printf("  %-34s %14lld\n", name, value.get<long long>());
}

void print_exchanges(const nlohmann::ordered_json& exchanges, const Options& options) {
  const int64_t local = machines(options).ranks_per_machine;
  std::printf("exchanges of the step, machines x ranks: %lld x %lld\n",
              static_cast<long long>(options.job.world_size / local),
              static_cast<long long>(local));
  std::printf("  between machines: %g Gbit/s a machine, %g us a message\n", options.link_gbit,
              options.latency_us);
  std::printf("  inside: %g Gbit/s a rank, %g us a message\n", options.local_gbit,
              options.local_latency_us);
  std::printf("  %-25s %10s %12s %12s %9s %10s %11s", "", "machine", "messages", "messages", "wire",
              "with", "bucket MiB");
  std::printf("%s\n", options.compute_ms ? "      step    overlap" : "");
  std::printf("  %-25s %10s %12s %12s %9s %10s %11s", "", "sends GB", "between", "inside", "s",
              "latency s", "for 20 %");
  std::printf("%s\n", options.compute_ms ? "        ms  gather ms" : "");
  for (const auto& [name, e] : exchanges.items()) {
    std::printf("  %-25s %10.4f %12lld %12lld %9.4f %10.4f %11.1f", name.c_str(),
                e["machine_bytes"].get<double>() * 1e-9, e["link_messages"].get<long long>(),
                e["local_messages"].get<long long>(), e["wire_seconds"].get<double>(),
                e["seconds"].get<double>(),
                e["bucket_bytes_for_latency"].get<double>() / (1024 * 1024));
    if (options.compute_ms) {
      std::printf(" %9.1f %10.1f", e["step_seconds"].get<double>() * 1e3,
                  e["step_seconds_overlap_gather"].get<double>() * 1e3);
    }
    std::printf("\n");
  }
  std::printf("  * as of NCCL between machines, where it chooses PAT; Gloo sends rows pairwise\n");
}

double total_gigabytes(const nlohmann::ordered_json& r) {
  return (r["memory"]["total"].get<double>() + r["kept_bucket_bytes"].get<double>()) * 1e-9;
}

void print_room(const nlohmann::ordered_json& r, double device_memory) {
  const double left = device_memory - total_gigabytes(r);
  if (left < 0) {
    std::printf("does not fit in %g GB: %.2f GB are missing, and activations are not counted\n",
                device_memory, -left);
  } else {
    std::printf("fits in %g GB: %.2f GB are left for activations\n", device_memory, left);
  }
}

// One line for each number of ranks.
void print_worlds(const std::vector<nlohmann::ordered_json>& reports, const Options& options) {
  std::printf("%s, stage %lld, %s, AdamW; GB of a rank, without activations\n",
              options.model.c_str(), static_cast<long long>(options.job.stage),
              options.dtype.c_str());
  std::printf("%8s %11s %11s %11s %11s %9s %9s", "ranks", "parameters", "masters,", "gradients",
              "buckets", "total", "exchanges");
  std::printf("%s\n%8s %11s %11s %11s %11s %9s %9s", options.device_memory ? "   left of" : "", "",
              "", "state", "", "", "", "s a step");
  if (options.device_memory) std::printf("%7g GB", *options.device_memory);
  std::printf("\n");
  for (const nlohmann::ordered_json& r : reports) {
    const auto& m = r["memory"];
    const auto gb = [](double bytes) { return bytes * 1e-9; };
    std::printf("%8lld %11.2f %11.2f %11.2f %11.2f %9.2f %9.4f", r["world"].get<long long>(),
                gb(m["working_parameters"].get<double>()),
                gb(m["master_parameters"].get<double>() + m["ema"].get<double>() +
                   m["optimizer_state"].get<double>()),
                gb(m["gradient_shards"].get<double>() + m["full_gradients"].get<double>()),
                gb(r["kept_bucket_bytes"].get<double>()), total_gigabytes(r),
                r["exchanges"]["two levels"]["seconds"].get<double>());
    if (options.device_memory) {
      const double left = *options.device_memory - total_gigabytes(r);
      std::printf("%10.2f%s", left, left < 0 ? "  does not fit" : "");
    }
    std::printf("\n");
  }
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
    bytes_line(kind.c_str(), bytes.get<double>());
  }
  bytes_line("buffers of buckets, at most", r["kept_bucket_bytes"].get<double>());
  if (options.device_memory) print_room(r, *options.device_memory);
  std::printf("balance\n");
  line("padding", r["padding_share"].get<double>() * 100, "% of the parameters");
  line("fullest rank above the mean", r["imbalance"].get<double>() * 100, "%");
  std::printf("one step with one backward pass\n");
  count("buckets", r["buckets"]);
  line("largest bucket", r["largest_bucket_bytes"].get<double>() * 1e-6, "MB");
  count("collective calls", r["collective_calls"]);
  bytes_line("sent by a rank in one level", r["bytes_sent"].get<double>());
  print_exchanges(r["exchanges"], options);
  std::printf("planned in %.2f s with %.0f MB\n", r["plan_seconds"].get<double>(),
              r["plan_peak_mb"].get<double>());
}

void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("--model", options.model, "What to plan")->check(CLI::IsMember(model_names()));
  app.add_option(
         "--shapes", options.shapes,
         "Instead of a model: a file with a line for each parameter, its name and its sizes")
      ->excludes("--model");
  app.add_option("--world", options.job.world_size, "Ranks")->check(CLI::Range(1, 1 << 24));
  app.add_option("--worlds", options.worlds,
                 "A line for each of these numbers of ranks, instead of all about one: 8,64,512")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24))
      ->excludes("--world");
  app.add_option("--device-memory", options.device_memory,
                 "GB of a rank's device; says whether the job fits, without activations")
      ->check(CLI::PositiveNumber);
  app.add_option("--stage", options.job.stage, "ZeRO stage")->check(CLI::Range(1, 2));
  app.add_option("--dtype", options.dtype, "Of working parameters and gradients")
      ->check(CLI::IsMember(kDtypes));
  app.add_flag("--ema", options.ema, "With an average of the parameters in fp32");
  app.add_option("--moments", options.moments, "How Adam's averages are stored")
      ->check(CLI::IsMember(kMoments));
  app.add_flag("--split-masters", options.split_masters,
               "Keep masters of bfloat16 parameters in 2 bytes");
  app.add_option("--gradient-shards", options.gradient_shards, "Dtype of gradient shards")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_flag("--update-in-backward", options.update_in_backward,
               "Update each bucket when it is reduced, without gradient shards");
  app.add_option("--layout", options.layout, "Layout of buckets")->check(CLI::IsMember(kLayouts));
  app.add_option("--device", options.device, "Of the ranks: the default size of buckets")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--bucket-mb", options.bucket_mb,
                 "Bucket size in MiB; default: by the number of ranks and the device")
      ->check(CLI::PositiveNumber);
  app.add_option("--expert-parallel", options.job.expert_parallel,
                 "Ranks over which the experts of a layer are dealt out")
      ->check(CLI::PositiveNumber);
  app.add_option("--ranks-per-machine", options.ranks_per_machine,
                 "Ranks that share a machine and its link (default: the largest divisor of all "
                 "ranks up to 8)")
      ->default_str("")
      ->check(CLI::PositiveNumber);
  app.add_option("--link-gbit", options.link_gbit, "Gbit/s that a machine can send to others")
      ->check(CLI::PositiveNumber);
  app.add_option("--local-gbit", options.local_gbit, "Gbit/s that a rank can send within a machine")
      ->check(CLI::PositiveNumber);
  app.add_option("--latency-us", options.latency_us, "Microseconds of a message between machines")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--local-latency-us", options.local_latency_us,
                 "Microseconds of a message within a machine")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--compute-ms", options.compute_ms,
                 "Milliseconds of forward and backward together; adds the time of a step")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--json", options.json,
               "JSON lines instead of tables, one for each number of ranks");
}

int run(Options options) {
  if (!options.shapes.empty()) {
    options.model = std::filesystem::path(options.shapes).filename();
  }
  options.job.dtype = kDtypes.at(options.dtype);
  TORCH_CHECK(
      !options.split_masters || (options.dtype == "bfloat16" && options.layout != "per_parameter"),
      "--split-masters: expected --dtype bfloat16 and a --layout of views, got ", options.dtype,
      " and ", options.layout);
  options.job.plan.layout = kLayouts.at(options.layout);
  options.job.plan.on_gpu = options.device == "cuda";
  if (options.bucket_mb) {
    options.job.plan.bucket_bytes = static_cast<int64_t>(*options.bucket_mb * 1024 * 1024);
  }
  std::vector<nlohmann::ordered_json> reports;
  for (const int64_t world : options.worlds) {
    options.job.world_size = world;
    reports.push_back(report(options));
  }
  if (reports.empty()) {
    reports.push_back(report(options));
    if (!options.json) print(reports[0], options);
  } else if (!options.json) {
    print_worlds(reports, options);
  }
  for (const nlohmann::ordered_json& result : reports) {
    if (options.json) std::cout << result.dump() << "\n";
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
    zero::examples::enter_callers_folder();
    return zero::examples::run(options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "plan: %s\n", error.what_without_backtrace());
    return 2;
  }
}
