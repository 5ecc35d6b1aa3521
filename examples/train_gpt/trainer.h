// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The training loop of train_gpt: one model, one ZeroOptimizer, and the steps
// that join them. Every method is called by all ranks.
//
//   Trainer trainer(options, data, zero::init_process_group());
//   trainer.train(/*first_step=*/0);
//
// What a step computes depends on (options, data, step) and on the model it
// starts from, not on how many ranks share the global batch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/train_gpt/byte_dataset.h"
#include "examples/train_gpt/gpt.h"
#include "examples/train_gpt/metrics_log.h"
#include "examples/train_gpt/progress.h"
#include "examples/train_gpt/step_metrics.h"
#include "examples/train_gpt/train_options.h"
#include "zero/lr_schedule.h"
#include "zero/process_group.h"
#include "zero/zero_optimizer.h"

namespace zero::examples {

class Trainer {
 public:
  // Collective. Builds the model from options.init or options.seed. `data` must outlive the
  // trainer.
  Trainer(const TrainOptions& options, const ByteDataset& data, const Group& group);

  // Collective. With options.resume loads the newest checkpoint in options.checkpoints and
  // returns the step to go on with; 0 if there is none. Throws when it was made with
  // other fixed_options() or learning rates; and without options.resume when there is one, which a
  // new run would overwrite.
  int64_t begin();
  // On a process that joined the job: sets the schedule, and returns the step to go on with.
  int64_t join();

  // Collective. Trains steps first_step to options.steps - 1, and saves every
  // options.save_every of them. Rank 0 reports each on standard output and in
  // options.log and options.metrics, writes options.trace, and prints samples on the way. False
  // when SIGTERM or SIGINT reached any rank: then all have saved and stopped after the same step.
  // With options.elastic the survivors go on when a rank dies, from the last protected step, whose
  // validation and save they repeat. Prints the validation loss of the model that it begins with.
  bool train(int64_t first_step);

  // Collective. Nats per byte over the held-out text, the same on every rank and on any number of
  // ranks.
  double validation_loss();

  Gpt& model() { return model_; }
  ZeroOptimizer& optimizer() { return optimizer_; }
  int64_t parameter_count() const;
  int world_size() const { return metrics_->world_size(); }
  // Text that the model writes behind options.prompt. Sends nothing.
  std::string sample();

  // The steps that train() made, and the samples that it printed after how many of them: for
  // options.report, on rank 0; empty otherwise.
  const std::vector<StepMetrics>& history() const { return history_; }
  const std::vector<std::pair<int64_t, std::string>>& samples() const { return samples_; }

  // With options.same_bits, what train() trained or found trained, as a hash; else empty.
  const std::string& masters_hash() const { return masters_hash_; }

  // Bytes this rank held in the last step, when gradients were complete and
  // not yet used: the most it holds at any time outside the backward pass.
  const MemoryReport& memory() const { return memory_; }
  // Bytes of the optimizer's state on all ranks together, at the end.
  int64_t state_bytes() const { return state_bytes_; }
  // Whether this rank wrote options.trace.
  bool traced() const { return traced_; }

 private:
  // What a run does not change on its way, by its option: else it would train another function, or
  // go on with other data, decay or bits.
  std::map<std::string, std::string> fixed_options() const;
  // Collective. The step to go on with.
  int64_t resume(const std::string& checkpoint);
  // The losses of this rank's parts of step `step`'s batch, times their sequences, and 0 for those
  // of other ranks; on the device, with one element more for a signal.
  at::Tensor backward(int64_t step);
  // Collective. Step `step`, counted from 0. The result lacks the validation loss.
  StepMetrics train_step(int64_t step);
  // Collective. The rest of step `metrics.step`: what is reported and saved.
  void report_step(StepMetrics metrics);
  // Collective. Prints the validation loss after `steps` steps.
  void measure_beginning(int64_t steps);
  // Collective. The protected step itself is not made again; its validation or save may have
  // failed.
  void report_protected_step(int64_t steps);
  // Collective. A hash of the masters, if none was made, and state_bytes().
  void measure_end();
  // Rank 0, unless it has: opens what it reports to, `recovered` after another rank 0 that died.
  void begin_reports(int64_t first_step, bool recovered);
  // Collective over the survivors, where `error` is being handled. The step to go on with.
  int64_t recover(const c10::Error& error);
  // Prints a sample after `steps` steps.
  void print_sample(int64_t steps);
  // The files of options.log and options.metrics, on rank 0.
  std::vector<MetricsLog> open_logs(int64_t first_step, bool append) const;
  // Collective. A folder "step-<steps>", or "step-<steps>-2" and so on, where no rank has one.
  std::string new_checkpoint(int64_t steps);
  // Collective. After `steps` steps.
  void save(int64_t steps);
  // The mean loss over `sequences`, and over its graph the gradient.
  at::Tensor loss(const Sequences& sequences);
  // Collective. The sum of each of `values`, in double. Of a value that is 0 on all ranks but one
  // it has the same bits on any number of ranks.
  std::vector<double> sum_over_ranks(const at::Tensor& values);
  // Collective. Keeps the hash of all.
  MastersHash hash_masters();

  TrainOptions options_;
  const ByteDataset& data_;
  const at::Device device_;
  Gpt model_;
  ZeroOptimizer optimizer_;
  LrSchedule schedule_;
  std::unique_ptr<Communicator> metrics_;  // losses are sent apart from gradients
  MemoryReport memory_;
  int64_t state_bytes_ = 0;
  std::string masters_hash_;
  std::vector<StepMetrics> history_;
  std::vector<std::pair<int64_t, std::string>> samples_;
  std::optional<Progress> progress_;  // on rank 0, like the logs
  std::vector<MetricsLog> logs_;
  int64_t furthest_ = 0;    // the most steps that were done before a recovery
  int recoveries_ = 0;      // since then
  bool stop_ = false;       // some rank got a signal; the same on all
  bool measured_ = false;   // the model that train() begins with
  bool goes_back_ = false;  // the next step is the first after a recovery, or after joining
  bool traced_ = false;
  StepMetrics latest_;  // of the last step that was made, or the number of one that was not
};

}  // namespace zero::examples
