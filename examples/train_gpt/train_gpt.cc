// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Trains a byte-level GPT on real text with several ranks.
//
// Usage:
//   ./bazelw run //examples:train_gpt
//   ./bazelw run //examples:train_gpt -- --nproc 4 --stage 1 --data ~/notes --log metrics.jsonl
//   ./bazelw run //examples:train_gpt -- --checkpoints run --save-every 100 --resume
//   torchrun --no-python --nproc-per-node 2 .bazel/bin/examples/train_gpt/train_gpt
//
// Without --data it reads the C++ headers of the libtorch it was built with.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <zero_libtorch_paths.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "examples/callers_folder.h"
#include "examples/train_gpt/byte_dataset.h"
#include "examples/train_gpt/memory_table.h"
#include "examples/train_gpt/run_report.h"
#include "examples/train_gpt/stop_signal.h"
#include "examples/train_gpt/train_options.h"
#include "examples/train_gpt/trainer.h"
#include "zero/launch.h"
#include "zero/muon.h"
#include "zero/process_group.h"
#include "zero/version.h"

namespace {

using zero::examples::ByteDataset;
using zero::examples::kUsageError;
using zero::examples::TrainOptions;

void print_beginning(const TrainOptions& options, const ByteDataset& data, int world_size,
                     int64_t parameters) {
  std::printf("text: %.1f MB in %lld files, %.1f MB of it held out\n",
              static_cast<double>(data.training_bytes() + data.validation_bytes()) / 1e6,
              static_cast<long long>(data.files()),
              static_cast<double>(data.validation_bytes()) / 1e6);
  std::printf("model: %lld parameters in %s on %s; %d ranks, stage %lld\n",
              static_cast<long long>(parameters), options.dtype_name.c_str(),
              options.device.c_str(), world_size, static_cast<long long>(options.stage));
  if (options.same_bits) {
    std::printf("the same bits on 1 to %lld ranks: %lld micro-batches of %lld sequences\n",
                static_cast<long long>(options.micro_batches),
                static_cast<long long>(options.micro_batches),
                static_cast<long long>(options.batch / options.micro_batches));
  }
  if (options.device == "cpu" && options.dtype == c10::kBFloat16 &&
      !zero::has_bf16_products(c10::kCPU)) {
    std::printf(
        "this processor has no products of bfloat16 matrices: the model is many times "
        "slower than with --dtype float32\n");
  }
  std::fflush(stdout);
}

// Writes options.report; `sample` is that of the end of training, empty where it did not end.
void write_report(const TrainOptions& options, zero::examples::Trainer& trainer,
                  const std::string& sample) {
  zero::examples::RunReport report;
  const int64_t parameters = trainer.parameter_count();
  report.heading = std::to_string(parameters) + " parameters in " + options.dtype_name + " on " +
                   options.device + ", " + std::to_string(trainer.world_size()) + " ranks, stage " +
                   std::to_string(options.stage);
  report.facts = {{"zero", ZERO_VERSION_TEXT},
                  {"libtorch", zero::kLibtorchVersion},
                  {"compiler", __VERSION__},
                  {"sequences in a step", std::to_string(options.batch)}};
  report.options = options.listing;
  report.steps = trainer.history();
  report.samples = trainer.samples();
  if (!sample.empty()) report.samples.emplace_back(options.steps, sample);
  for (const auto& item : trainer.model()->named_parameters()) {
    report.parameters.push_back({item.key(), item.value().numel()});
  }
  report.plan = trainer.optimizer().plan();
  report.memory_options.stage = options.stage;
  report.memory_options.split_masters = options.split_masters;
  report.memory_options.gradient_shard_dtype = options.gradient_shard_dtype;
  report.memory_options.update_in_backward = options.update_in_backward;
  report.memory_options.state_bytes = [parameters, all = trainer.state_bytes()](int64_t numel,
                                                                                int64_t) {
    return all * numel / parameters;  // on average, where not all groups have the same
  };
  report.memory = trainer.memory();
  report.unsharded = zero::examples::unsharded_memory(parameters, options.dtype,
                                                      trainer.state_bytes(), options.ema > 0);
  if (trainer.traced()) report.trace = options.trace;
  zero::examples::write_report(report, options.report);
  std::printf("report: %s\n", options.report.c_str());
}

// The sample that it prints, or an empty text.
std::string print_end(const TrainOptions& options, zero::examples::Trainer& trainer) {
  if (trainer.memory().total() > 0) {  // a step was made
    std::printf("\nmemory at the end of the last backward pass\n%s%s",
                zero::examples::memory_table(trainer.memory(), trainer.parameter_count(),
                                             options.dtype, trainer.state_bytes())
                    .c_str(),
                zero::examples::billion_line(
                    trainer.world_size(), {.stage = options.stage,
                                           .state_bytes = zero::adam_state_bytes(options.moments),
                                           .split_masters = options.split_masters,
                                           .gradient_shard_dtype = options.gradient_shard_dtype,
                                           .update_in_backward = options.update_in_backward})
                    .c_str());
  }
  if (options.same_bits) std::printf("\nhash of the masters: %s\n", trainer.masters_hash().c_str());
  if (options.sample_bytes == 0) return {};
  const std::string sample = trainer.sample();
  std::printf("\nsample\n%s\n", sample.c_str());
  return sample;
}

// False, after a line from one rank, when the global batch does not suit `world_size` ranks.
bool accepts_batch(const TrainOptions& options, int world_size, bool reports) {
  const std::string problem = zero::examples::batch_problem(options, world_size);
  if (!problem.empty() && reports) std::fprintf(stderr, "train_gpt: %s\n", problem.c_str());
  return problem.empty();
}

// The exit code of a rank that has saved and stopped, since a signal reached some rank.
int end_stopped(const TrainOptions& options, const zero::Group& group) {
  if (group.rank() == 0) {
    std::printf("stopped by a signal; --resume goes on from %s\n", options.checkpoints.c_str());
    std::fflush(stdout);
  }
  if (zero::examples::stop_requested_within(std::chrono::seconds(2))) return 0;
  std::fprintf(stderr,
               "train_gpt: rank %d of %d was not signalled itself; it ends with exit code %d, so "
               "that its launcher may restart it\n",
               group.rank(), group.world_size(), zero::examples::kStoppedForAnotherRank);
  return zero::examples::kStoppedForAnotherRank;
}

zero::Group make_group(const TrainOptions& options) {
  zero::InitOptions init;
  if (options.device == "cpu") init.device = at::kCPU;
  init.nccl = options.transport == "nccl";
  const zero::Group group = zero::init_process_group(init);
  TORCH_CHECK(group.device().str().starts_with(options.device), "--device ", options.device,
              ": expected a GPU, got ", group.device().str(), " on rank ", group.rank());
  return group;
}

// The same on all ranks: a machine may have lost the checkpoints of its own disk.
int64_t common_batch(const TrainOptions& options, const zero::Group& group) {
  const at::Tensor batch = at::full({1}, zero::examples::saved_batch(options), at::kInt);
  group.make_communicator("batch", zero::Purpose::kControl)->all_reduce_max(batch, "batch").wait();
  return batch.item<int32_t>();
}

int train(TrainOptions options, const ByteDataset& data) {
  at::set_num_threads(options.threads);
  const zero::Group group = make_group(options);
  const bool reports = group.rank() == 0;
  const int ranks = group.joins() ? options.nproc : group.world_size();
  // A process that joins has no communicator of its own: it looks at the checkpoints that it sees.
  options.batch =
      group.joins() ? zero::examples::saved_batch(options) : common_batch(options, group);
  zero::examples::choose_batch(options, ranks);
  if (!accepts_batch(options, ranks, reports)) return kUsageError;
  zero::examples::Trainer trainer(options, data, group);
  if (reports) {
    print_beginning(options, data, group.world_size(), trainer.parameter_count());
  }
  if (!options.checkpoints.empty()) zero::examples::watch_stop_signal();
  const int64_t first_step = group.joins() ? trainer.join() : trainer.begin();
  if (reports && first_step > 0) {
    std::printf("resumed after step %lld\n", static_cast<long long>(first_step));
  }
  const bool finished = trainer.train(first_step);
  // Rank 0 may have died.
  const bool reports_end = trainer.optimizer().group().rank() == 0;
  std::string sample;
  if (finished && reports_end) sample = print_end(options, trainer);
  if (reports_end && !options.report.empty()) write_report(options, trainer, sample);
  if (!finished) return end_stopped(options, trainer.optimizer().group());
  return 0;
}

// Whether a launcher decides the number of ranks, and not --nproc.
bool is_launched() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

// What can be wrong with the arguments is found here where possible, before
// there are several ranks to complain about it.
int run(int argc, char** argv) {
  TrainOptions options;
  if (const auto status = zero::examples::parse_train_options(argc, argv, options)) return *status;
  if (options.device == "cuda" && !at::hasCUDA()) {
    std::fprintf(stderr,
                 "train_gpt: --device cuda: this program sees no GPU. For GPUs build it with "
                 "--config=cuda: ./bazelw run --config=cuda //examples:train_gpt -- --device "
                 "cuda\n");
    return kUsageError;
  }
  if (!is_launched()) {
    options.batch = zero::examples::saved_batch(options);
    zero::examples::choose_batch(options, options.nproc);
    if (!accepts_batch(options, options.nproc, /*reports=*/true)) return kUsageError;
  }
  if (options.data.empty()) options.data.push_back(zero::kLibtorchIncludePath);
  const ByteDataset data({.paths = options.data, .context = options.context, .seed = options.seed});
  zero::LaunchOptions launch;
  launch.survivors_go_on = options.elastic;
  launch.replacements = options.replacements;
  // A step, a validation and a save come first.
  if (!options.checkpoints.empty()) launch.signal_grace = std::chrono::minutes(10);
  return zero::launch_local(
      options.nproc, [&] { return train(options, data); }, launch);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    zero::examples::enter_callers_folder();
    return run(argc, argv);
  } catch (const c10::Error& error) {
    // Not what(), which adds a C++ backtrace.
    std::fprintf(stderr, "train_gpt: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
  }
  return 1;
}
