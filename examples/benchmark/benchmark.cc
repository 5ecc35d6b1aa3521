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
//
// With --save-every n or --protect n, cycle is the median time of each of n steps, beginning with
// the one that begins a save, or that is protected: by how much it slows which of them. save is the
// time until save_checkpoint_async() returns; finish, the end of a save, is called before the next.
//
// With --device cuda, in a program built with --config=cuda, a step's time is the device's, between
// events. fb, clip and opt are then the time that the host takes to enqueue that work, since it
// reads nothing of the device in a step; device growth is the most memory that tensors took in a
// timed step, minus what they took before the optimizer was made. Ranks that share a GPU need
// --transport gloo.
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "examples/benchmark/meters.h"
#include "examples/benchmark/workload.h"
#include "examples/callers_folder.h"
#include "examples/train_gpt/step_trace.h"
#include "zero/checkpoint_options.h"
#include "zero/combined_optimizer.h"
#include "zero/launch.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero::examples {
namespace {

const std::map<std::string, Moments> kMoments = {
    {"float32", Moments::kFloat32}, {"bfloat16", Moments::kBFloat16}, {"int8", Moments::kInt8}};

struct Options {
  std::string workload = "mlp25m";
  std::string device = "cpu";
  std::string transport = "nccl";
  int nproc = 2;
  int64_t stage = 2;
  std::string layout = "contiguous";
  double bucket_mb = 0;
  int steps = 12;
  bool no_sync = false;
  bool static_graph = false;
  bool same_bits = false;
  bool ema = false;
  std::string moments = "float32";
  bool split_masters = false;
  bool bf16_shards = false;
  bool update_in_backward = false;
  bool no_clip = false;
  bool overlap_gather = false;
  std::string reduce_dtype;  // empty: the library's default
  std::string wire = "dtype";
  std::string gather_wire = "whole";
  bool flat = false;
  bool encoded_sums = false;
  bool sockets = false;
  int protect = 0;
  int save_every = 0;
  std::string save_folder;
  std::string trace;
  bool json = false;
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::unique_ptr<torch::optim::Optimizer> make_inner_optimizer(const Workload& model, bool muon) {
  using torch::optim::AdamW;
  const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.01);
  if (!muon) return std::make_unique<AdamW>(model.parameters(), options);
  const std::vector<at::Tensor> hidden = model.hidden_matrices();
  std::vector<at::Tensor> others;
  for (const at::Tensor& p : model.parameters()) {
    const bool is_hidden = std::any_of(hidden.begin(), hidden.end(),
                                       [&](const at::Tensor& h) { return h.is_same(p); });
    if (!is_hidden) others.push_back(p);
  }
  std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
  parts.push_back(std::make_unique<Muon>(hidden, MuonOptions(0.02)));
  parts.push_back(std::make_unique<AdamW>(others, options));
  return std::make_unique<CombinedOptimizer>(std::move(parts));
}

class Run {
 public:
  Run(const Options& options, const Group& group)
      : options_(options),
        info_(workload_info(options.workload)),
        model_(make_workload(options.workload)),
        metrics_(group.make_communicator("benchmark", Purpose::kControl)),
        clock_(group.device()),
        trace_(group.rank() == 0 ? options.trace : "", kWarmUp, kTraced,
               group.device().is_cpu() ? StepTrace::Device::kCpu : StepTrace::Device::kCuda) {
    model_->to(group.device());
    model_->make_data(group.rank(), info_.micro_batches, group.device());
    anon_before_ = anonymous_mb();
    peak_before_ = peak_mb();
    device_peak_ = std::make_unique<DevicePeak>(group.device());
    ZeroOptions zero_options;
    zero_options.stage(options.stage);
    zero_options.static_graph(options.static_graph);
    if (options.same_bits) zero_options.micro_batches(info_.micro_batches * group.world_size());
    if (options.ema) zero_options.ema(EmaOptions());
    zero_options.moments(kMoments.at(options.moments)).split_masters(options.split_masters);
    if (options.bf16_shards) zero_options.gradient_shard_dtype(at::kBFloat16);
    zero_options.update_in_backward(options.update_in_backward).skip_nonfinite(clips());
    zero_options.layout(options.layout == "contiguous" ? Layout::kContiguous
                                                       : Layout::kPerParameter);
    zero_options.overlap_gather(options.overlap_gather);
    zero_options.two_level(!options.flat).fp32_machine_sums(!options.encoded_sums);
    if (!options.reduce_dtype.empty()) {
      zero_options.reduce_dtype(options.reduce_dtype == "bf16" ? at::kBFloat16 : at::kFloat);
    }
    if (options.protect > 0) zero_options.protect(options.protect);
    if (options.gather_wire == "changes") zero_options.gather_wire(GatherWire::kChanges);
    if (options.wire == "int8") zero_options.gradient_wire(GradientWire::kBlockInt8);
    if (options.bucket_mb > 0) {
      zero_options.bucket_bytes(static_cast<int64_t>(options.bucket_mb * 1024 * 1024));
    }
    optimizer_ = std::make_unique<ZeroOptimizer>(*model_, make_inner_optimizer(*model_, info_.muon),
                                                 group, zero_options);
    // Without overlap_gather it returns at once.
    model_->before_layer = [this](const auto& layer) { optimizer_->wait_for(layer); };
  }

  nlohmann::json measure() {
    const int steps = kWarmUp + options_.steps;
    for (int step = 0; step < steps; ++step) one_step(step);
    optimizer_->wait_for(*model_);
    clock_.mark();
    trace_.before_step(steps);
    finish_save();
    const std::vector<double> times = clock_.times_ms(kWarmUp);
    const double host_bytes = (interface_bytes() - host_bytes_before_) / options_.steps;
    nlohmann::json line;
    line["system"] = "zero";
    line["workload"] = options_.workload;
    line["device"] = options_.device;
    line["world"] = optimizer_->group().world_size();
    line["threads"] = at::get_num_threads();
    line["stage"] = options_.stage;
    line["steps"] = options_.steps;
    line["median_ms"] = largest(median(times));
    line["min_ms"] = largest(*std::min_element(times.begin(), times.end()));
    for (const auto& [name, values] : phases_) line[name] = largest(median(values));
    if (cycle() > 0) line["cycle_ms"] = cycle_times(times);
    line["cpu_ms"] = largest((cpu_ms() - cpu_before_) / options_.steps);
    line["anon_growth_mb"] = largest(anonymous_mb() - anon_before_);
    line["rss_growth_mb"] = largest(peak_mb() - peak_before_);
    if (options_.device == "cuda") line["device_growth_mb"] = largest(device_peak_->growth_mb());
    line["bytes_sent"] = (sent() - sent_before_) / options_.steps;
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
  static constexpr int kTraced = 3;

  bool clips() const { return !options_.no_clip && !options_.update_in_backward; }

  void one_step(int step) {
    if (step == kWarmUp) {
      cpu_before_ = cpu_ms();
      host_bytes_before_ = interface_bytes();
      sent_before_ = sent();  // which waits for the device
      device_peak_->restart();
    }
    trace_.before_step(step);
    clock_.mark();
    save(step);
    const auto [losses, norm] = train_step(step);
    if (step == 0 || step == kWarmUp + options_.steps - 1) report(step, losses, norm);
    if (step == 0 || step == 2) {
      const auto [l2, dot] = checksums();
      sums_["l2_" + std::to_string(step + 1)] = l2;
      sums_["dot_" + std::to_string(step + 1)] = dot;
    }
  }

  int cycle() const { return std::max(options_.protect, options_.save_every); }

  // The median of each place between two saves or protected steps; step() number n protects.
  std::vector<double> cycle_times(const std::vector<double>& times) {
    std::vector<std::vector<double>> places(static_cast<size_t>(cycle()));
    for (size_t i = 0; i < times.size(); ++i)
      places[(i + kWarmUp + 1) % places.size()].push_back(times[i]);
    std::vector<double> medians;
    for (const std::vector<double>& place : places) {
      TORCH_CHECK(!place.empty(), "--steps: expected at least ", cycle(), ", got ", times.size());
      medians.push_back(largest(median(place)));
    }
    return medians;
  }

  // In every n-th step: ends the save before, then begins one.
  void save(int step) {
    if (options_.save_every == 0 || (step + 1) % options_.save_every != 0) return;
    finish_save();
    const double begin = now_ms();
    const auto overwrite = SaveOptions().overwrite(true);
    pending_ = optimizer_->save_checkpoint_async(options_.save_folder, overwrite);
    if (step >= kWarmUp) phases_["save_ms"].push_back(now_ms() - begin);
  }

  void finish_save() {
    if (!pending_) return;
    const double begin = now_ms();
    pending_->finish();
    pending_.reset();
    phases_["finish_ms"].push_back(now_ms() - begin);
  }

  // Returns the losses of the micro batches and the norm, which the host has not read.
  std::pair<std::vector<at::Tensor>, at::Tensor> train_step(int step) {
    RECORD_FUNCTION("benchmark::step", std::vector<c10::IValue>());
    const double begin = now_ms();
    std::vector<at::Tensor> losses;
    for (int m = 0; m < info_.micro_batches; ++m) {
      auto guard = optimizer_->no_sync(options_.no_sync && m + 1 < info_.micro_batches);
      const at::Tensor loss = model_->loss(m);
      const at::Tensor part = loss / info_.micro_batches;
      optimizer_->backward(options_.same_bits ? loss : part);
      losses.push_back(part.detach());
    }
    const double backward_end = now_ms();
    const at::Tensor norm = clips() ? optimizer_->clip_grad_norm_(1.0) : at::zeros({});
    const double clip_end = now_ms();
    optimizer_->step();
    if (step >= kWarmUp) {
      phases_["fb_ms"].push_back(backward_end - begin);
      phases_["clip_ms"].push_back(clip_end - backward_end);
      phases_["opt_ms"].push_back(now_ms() - clip_end);
    }
    return {losses, norm};
  }

  // l2 norm of all parameters, and their dot product with fixed numbers.
  std::pair<double, double> checksums() const {
    optimizer_->wait_for(*model_);
    double square = 0, dot = 0;
    for (size_t t = 0; t < model_->numbered().size(); ++t) {
      const at::Tensor p = model_->numbered()[t].detach().to(at::kFloat).contiguous().to(at::kCPU);
      const float* data = p.const_data_ptr<float>();
      for (int64_t i = 0; i < p.numel(); ++i) {
        square += static_cast<double>(data[i]) * data[i];
        dot += static_cast<double>(data[i]) *
               workload_value(static_cast<uint32_t>(900000 + t), static_cast<uint32_t>(i));
      }
    }
    return {std::sqrt(square), dot};
  }

  void report(int step, const std::vector<at::Tensor>& losses, const at::Tensor& norm) {
    double loss = 0;
    for (const at::Tensor& part : losses) loss += part.item<double>();
    (step == 0 ? loss_first_ : loss_last_) = mean(loss);
    (step == 0 ? norm_first_ : norm_last_) = norm.item<double>();
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
  StepClock clock_;
  StepTrace trace_;
  std::unique_ptr<DevicePeak> device_peak_;
  std::unique_ptr<ZeroOptimizer> optimizer_;
  std::unique_ptr<PendingCheckpoint> pending_;
  double anon_before_ = 0, peak_before_ = 0, cpu_before_ = 0, host_bytes_before_ = 0;
  double loss_first_ = 0, loss_last_ = 0, norm_first_ = 0, norm_last_ = 0;
  int64_t sent_before_ = 0;
  std::map<std::string, std::vector<double>> phases_;
  std::map<std::string, double> sums_;
};

void print_table(const nlohmann::json& line) {
  for (const auto& [name, value] : line.items()) {
    std::printf("  %-16s %s\n", name.c_str(), value.dump().c_str());
  }
}

int run(const Options& options) {
  // A single rank is this process, whose OpenMP has read its environment before main().
  at::set_num_threads(std::max(1, std::atoi(std::getenv("OMP_NUM_THREADS"))));
  InitOptions init{.nccl = options.transport == "nccl", .shared_memory = !options.sockets};
  if (options.device == "cpu") init.device = at::kCPU;
  const Group group = init_process_group(init);
  TORCH_CHECK(group.device().str().starts_with(options.device), "--device ", options.device,
              ": expected a GPU and a program built with --config=cuda, got ", group.device().str(),
              " on rank ", group.rank());
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
      ->check(CLI::IsMember(zero::examples::workload_names()));
  app.add_option("--device", options.device, "Where the model is; cuda needs --config=cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--transport", options.transport,
                 "Between GPUs; gloo also where ranks share a GPU")
      ->check(CLI::IsMember({"nccl", "gloo"}));
  app.add_option("--nproc", options.nproc, "Local ranks")->check(CLI::Range(1, 64));
  app.add_option("--stage", options.stage, "ZeRO stage")->check(CLI::Range(1, 2));
  app.add_option("--layout", options.layout, "Layout of buckets")
      ->check(CLI::IsMember({"contiguous", "per_parameter"}));
  app.add_option("--bucket-mb", options.bucket_mb, "Bucket size in MiB; 0: the library's default")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--steps", options.steps, "Timed steps, after 3 that are not")
      ->check(CLI::Range(1, 100000));
  app.add_flag("--no-sync", options.no_sync, "Send only in the last micro batch of a step");
  app.add_flag("--static-graph", options.static_graph, "Without control messages");
  app.add_flag("--same-bits", options.same_bits,
               "The same bits on any number of ranks: ZeroOptions::micro_batches");
  app.add_flag("--ema", options.ema, "Keep an average of the parameters");
  app.add_option("--moments", options.moments, "How the averages of AdamW are stored")
      ->check(CLI::IsMember(zero::examples::kMoments));
  app.add_flag("--split-masters", options.split_masters,
               "Keep masters of bfloat16 parameters in 2 bytes");
  app.add_flag("--bf16-shards", options.bf16_shards, "Keep gradient shards in bfloat16");
  app.add_flag("--update-in-backward", options.update_in_backward,
               "Update each bucket as soon as it is reduced; implies --no-clip");
  app.add_flag("--no-clip", options.no_clip,
               "Steps without norm, clip and check of values; their norm is printed as 0");
  app.add_flag("--overlap-gather", options.overlap_gather,
               "Gather parameters during the next forward pass");
  app.add_flag("--flat", options.flat, "Exchange with every rank, whatever its machine");
  app.add_flag("--encoded-sums", options.encoded_sums,
               "Send the sums of a machine in the dtype of the gradients");
  app.add_option("--reduce-dtype", options.reduce_dtype, "Send gradients in this dtype")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--gather-wire", options.gather_wire,
                 "What of parameters is sent to other machines")
      ->check(CLI::IsMember({"whole", "changes"}))
      ->capture_default_str();
  app.add_option("--wire", options.wire, "Format of gradients on the wire")
      ->check(CLI::IsMember({"dtype", "int8"}));
  app.add_flag("--sockets", options.sockets, "Without shared memory between the ranks");
  app.add_option("--protect", options.protect, "Keep every n-th step in two memories; 0: none")
      ->check(CLI::NonNegativeNumber);
  auto* every = app.add_option("--save-every", options.save_every,
                               "Begin a save in the background in every n-th step; 0: never")
                    ->check(CLI::NonNegativeNumber);
  auto* folder =
      app.add_option("--save-folder", options.save_folder,
                     "Folder of the checkpoint, which each save replaces; its file system has "
                     "to exchange two folders, which NFS cannot");
  every->needs(folder);
  app.add_option("--trace", options.trace,
                 "Write a Chrome trace of three timed steps of rank 0 to this file");
  app.add_flag("--json", options.json, "One JSON line instead of a table");
  CLI11_PARSE(app, argc, argv);
  try {
    zero::examples::enter_callers_folder();
    setenv("OMP_NUM_THREADS", "1", /*overwrite=*/0);  // else every rank has its share of the cores
    return zero::launch_local(options.nproc, [&] { return zero::examples::run(options); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "benchmark: %s\n", error.what_without_backtrace());
    return 1;
  }
}
