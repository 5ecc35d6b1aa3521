// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Times training steps of a fixed workload on local ranks and reports what they
// cost, with checksums that show that the same training was done.
//
// Usage:
//   ./bazelw run //examples:benchmark -- --workload mlp25m --nproc 2 --stage 2
//
// The numbers: a step's time is the difference of consecutive step starts, the
// median over steps and the largest over ranks; fb is forward and backward,
// clip and opt the calls of that name; cpu is user and system time of one rank
// per step; anon growth is resident anonymous memory after the last step, pages
// that ranks share counted in equal parts; peak growth is the process's high-water
// mark, in which they count in every rank; both minus their value before the
// optimizer was made; host bytes are what the interface GLOO_SOCKET_IFNAME, else lo, sent per step,
// headers included, so it is right only while nothing else talks over it. One thread a rank unless
// OMP_NUM_THREADS says otherwise.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "examples/benchmark/workload.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace zero::examples {
namespace {

struct Options {
  std::string workload = "mlp25m";
  int nproc = 2;
  int64_t stage = 2;
  std::string layout = "contiguous";
  double bucket_mb = 0;
  int steps = 12;
  bool no_sync = false;
  bool full_gradients = true;
  bool static_graph = false;
  bool overlap_gather = false;
  std::string reduce_dtype;  // empty: the library's default
  std::string wire = "dtype";
  bool flat = false;
  bool encoded_sums = false;
  bool sockets = false;
  bool json = false;
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A field of a file of /proc/self, in MB.
double proc_mb(const std::string& name, const std::string& field) {
  std::ifstream file("/proc/self/" + name);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

// Resident memory that belongs to no file on a disk; what several ranks see counts in equal parts.
double anonymous_mb() {
  return proc_mb("smaps_rollup", "Pss_Anon") + proc_mb("smaps_rollup", "Pss_Shmem");
}

// What the interface that connects ranks has sent, for whichever program.
double interface_bytes() {
  const char* const named = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string interface = named != nullptr && *named != '\0' ? named : "lo";
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    const size_t name = line.find_first_not_of(' ');
    if (colon == std::string::npos || line.substr(name, colon - name) != interface) continue;
    std::istringstream counts(line.substr(colon + 1));
    double value = 0;
    for (int field = 0; field < 9; ++field) counts >> value;
    return value;
  }
  return 0;
}

double cpu_ms() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& t) { return 1e3 * t.tv_sec + 1e-3 * t.tv_usec; };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Run {
 public:
  Run(const Options& options, const Group& group)
      : options_(options),
        info_(workload_info(options.workload)),
        model_(make_workload(options.workload)),
        metrics_(group.make_communicator("benchmark", Purpose::kControl)) {
    model_->make_data(group.rank(), info_.micro_batches);
    anon_before_ = anonymous_mb();
    peak_before_ = proc_mb("status", "VmHWM");
    ZeroOptions zero_options;
    zero_options.stage(options.stage).stage1_full_gradients(options.full_gradients);
    zero_options.static_graph(options.static_graph);
    zero_options.layout(options.layout == "contiguous" ? Layout::kContiguous
                                                       : Layout::kPerParameter);
    zero_options.overlap_gather(options.overlap_gather);
    zero_options.two_level(!options.flat).fp32_machine_sums(!options.encoded_sums);
    if (!options.reduce_dtype.empty()) {
      zero_options.reduce_dtype(options.reduce_dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    }
    if (options.wire == "int8") zero_options.gradient_wire(GradientWire::kBlockInt8);
    if (options.bucket_mb > 0) {
      zero_options.bucket_bytes(static_cast<int64_t>(options.bucket_mb * 1024 * 1024));
    }
    optimizer_ = std::make_unique<ZeroOptimizer>(
        *model_,
        std::make_unique<torch::optim::AdamW>(model_->parameters(),
                                              torch::optim::AdamWOptions(1e-3).weight_decay(0.01)),
        group, zero_options);
    // Without overlap_gather it returns at once.
    model_->before_layer = [this](const auto& layer) { optimizer_->wait_for(layer); };
  }

  nlohmann::json measure() {
    for (int step = 0; step < kWarmUp + options_.steps; ++step) one_step(step);
    optimizer_->wait_for(*model_);
    starts_.push_back(now_ms());
    const double host_bytes = (interface_bytes() - host_bytes_before_) / options_.steps;
    std::vector<double> times;
    for (size_t i = kWarmUp; i + 1 < starts_.size(); ++i) {
      times.push_back(starts_[i + 1] - starts_[i]);
    }
    nlohmann::json line;
    line["system"] = "zero";
    line["workload"] = options_.workload;
    line["world"] = optimizer_->group().world_size();
    line["stage"] = options_.stage;
    line["steps"] = options_.steps;
    line["median_ms"] = largest(median(times));
    line["min_ms"] = largest(*std::min_element(times.begin(), times.end()));
    for (const auto& [name, values] : phases_) line[name] = largest(median(values));
    line["cpu_ms"] = largest((cpu_ms() - cpu_before_) / options_.steps);
    line["anon_growth_mb"] = largest(anonymous_mb() - anon_before_);
    line["rss_growth_mb"] = largest(proc_mb("status", "VmHWM") - peak_before_);
    line["bytes_sent"] = bytes_last_step_;
    line["host_bytes"] = mean(host_bytes);
    line["loss_first"] = loss_first_;
    line["loss_last"] = loss_last_;
    line["norm_first"] = norm_first_;
    line["norm_last"] = norm_last_;
    for (const auto& [name, value] : sums_) line[name] = value;
    const auto [l2, dot] = checksums();
    line["param_l2"] = l2;
    line["param_dot"] = dot;
    return line;
  }

 private:
  static constexpr int kWarmUp = 3;

  void one_step(int step) {
    if (step == kWarmUp) {
      cpu_before_ = cpu_ms();
      host_bytes_before_ = interface_bytes();
    }
    const int64_t sent_before = sent();
    starts_.push_back(now_ms());
    double loss = 0;
    for (int m = 0; m < info_.micro_batches; ++m) {
      auto guard = optimizer_->no_sync(options_.no_sync && m + 1 < info_.micro_batches);
      const at::Tensor part = model_->loss(m) / info_.micro_batches;
      optimizer_->backward(part);
      loss += part.item<double>();
    }
    const double backward_end = now_ms();
    const double norm = optimizer_->clip_grad_norm_(1.0).item<double>();
    const double clip_end = now_ms();
    optimizer_->step();
    if (step >= kWarmUp) {
      phases_["fb_ms"].push_back(backward_end - starts_.back());
      phases_["clip_ms"].push_back(clip_end - backward_end);
      phases_["opt_ms"].push_back(now_ms() - clip_end);
    }
    bytes_last_step_ = sent() - sent_before;
    if (step == 0 || step == kWarmUp + options_.steps - 1) report(step, loss, norm);
    if (step == 0 || step == 2) {
      const auto [l2, dot] = checksums();
      sums_["l2_" + std::to_string(step + 1)] = l2;
      sums_["dot_" + std::to_string(step + 1)] = dot;
    }
  }

  // l2 norm of all parameters, and their dot product with fixed numbers.
  std::pair<double, double> checksums() const {
    optimizer_->wait_for(*model_);
    double square = 0, dot = 0;
    for (size_t t = 0; t < model_->numbered().size(); ++t) {
      const at::Tensor p = model_->numbered()[t].detach().to(at::kFloat).contiguous();
      const float* data = p.const_data_ptr<float>();
      for (int64_t i = 0; i < p.numel(); ++i) {
        square += static_cast<double>(data[i]) * data[i];
        dot += static_cast<double>(data[i]) *
               workload_value(static_cast<uint32_t>(900000 + t), static_cast<uint32_t>(i));
      }
    }
    return {std::sqrt(square), dot};
  }

  void report(int step, double loss, double norm) {
    (step == 0 ? loss_first_ : loss_last_) = mean(loss);
    (step == 0 ? norm_first_ : norm_last_) = norm;
  }

  int64_t sent() const {
    const Stats stats = optimizer_->stats();
    return stats.data.exchange_bytes_sent + stats.data.gather_bytes_sent +
           stats.data.small_bytes_sent + stats.control.small_bytes_sent;
  }

  double mean(double value) {
    at::Tensor sum = at::scalar_tensor(value, at::kDouble).reshape({1});
    metrics_->all_reduce_sum(sum, "mean over ranks").wait();
    return sum.item<double>() / metrics_->world_size();
  }

  // The maximum over ranks of a number that is not negative: its bits, as an
  // integer, have the same order.
  double largest(double value) {
    at::Tensor bits =
        at::scalar_tensor(std::max(value, 0.0), at::kDouble).reshape({1}).view(at::kLong);
    metrics_->all_reduce_max(bits, "largest over ranks").wait();
    return bits.view(at::kDouble).item<double>();
  }

  const Options options_;
  const WorkloadInfo info_;
  const std::shared_ptr<Workload> model_;
  const std::unique_ptr<Communicator> metrics_;
  std::unique_ptr<ZeroOptimizer> optimizer_;
  double anon_before_ = 0, peak_before_ = 0, cpu_before_ = 0, host_bytes_before_ = 0;
  double loss_first_ = 0, loss_last_ = 0, norm_first_ = 0, norm_last_ = 0;
  int64_t bytes_last_step_ = 0;
  std::vector<double> starts_;
  std::map<std::string, std::vector<double>> phases_;
  std::map<std::string, double> sums_;
};

void print_table(const nlohmann::json& line) {
  for (const auto& [name, value] : line.items()) {
    std::printf("  %-16s %s\n", name.c_str(), value.dump().c_str());
  }
}

int run(const Options& options) {
  const Group group = init_process_group({.device = at::kCPU, .shared_memory = !options.sockets});
  Run benchmark(options, group);
  const nlohmann::json line = benchmark.measure();
  if (group.rank() != 0) return 0;
  if (options.json) {
    std::cout << line.dump() << "\n";
  } else {
    print_table(line);
  }
  return 0;
}

}  // namespace
}  // namespace zero::examples

int main(int argc, char** argv) {
  using zero::examples::Options;
  Options options;
  CLI::App app("Times training steps of a fixed workload on local ranks.");
  app.option_defaults()->always_capture_default();
  app.add_option("--workload", options.workload, "What to train")
      ->check(CLI::IsMember({"mlp25m", "mlp25m_accum4", "gpt10m", "gpt10m_bf16"}));
  app.add_option("--nproc", options.nproc, "Local ranks")->check(CLI::Range(1, 64));
  app.add_option("--stage", options.stage, "ZeRO stage")->check(CLI::Range(1, 2));
  app.add_option("--layout", options.layout, "Layout of buckets")
      ->check(CLI::IsMember({"contiguous", "per_parameter"}));
  app.add_option("--bucket-mb", options.bucket_mb, "Bucket size in MiB; 0: the library's default")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--steps", options.steps, "Timed steps, after 3 that are not")
      ->check(CLI::Range(1, 100000));
  app.add_flag("--no-sync", options.no_sync, "Send only in the last micro batch of a step");
  app.add_flag("!--no-full-gradients", options.full_gradients,
               "Stage 1 without the gather of averaged gradients");
  app.add_flag("--static-graph", options.static_graph, "Without control messages");
  app.add_flag("--overlap-gather", options.overlap_gather,
               "Gather parameters during the next forward pass");
  app.add_flag("--flat", options.flat, "Exchange with every rank, whatever its machine");
  app.add_flag("--encoded-sums", options.encoded_sums,
               "Send the sums of a machine in the dtype of the gradients");
  app.add_option("--reduce-dtype", options.reduce_dtype, "Send gradients in this dtype")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--wire", options.wire, "Format of gradients on the wire")
      ->check(CLI::IsMember({"dtype", "int8"}));
  app.add_flag("--sockets", options.sockets, "Without shared memory between the ranks");
  app.add_flag("--json", options.json, "One JSON line instead of a table");
  CLI11_PARSE(app, argc, argv);
  try {
    return zero::launch_local(options.nproc, [&] { return zero::examples::run(options); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "benchmark: %s\n", error.what_without_backtrace());
    return 1;
  }
}
