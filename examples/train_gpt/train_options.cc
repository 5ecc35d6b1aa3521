// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/train_options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint.h"

namespace zero::examples {

namespace {

const std::map<std::string, c10::ScalarType> kDtypes = {
    {"float32", c10::kFloat}, {"bfloat16", c10::kBFloat16}, {"float16", c10::kHalf}};
const std::map<std::string, Moments> kMoments = {
    {"float32", Moments::kFloat32}, {"bfloat16", Moments::kBFloat16}, {"int8", Moments::kInt8}};

// Peak learning rates that suit the default model.
const std::map<std::string, double> kLearningRates = {
    {"adamw", 3e-3}, {"muon", 3e-3}, {"lion", 3e-4}, {"lamb", 1e-2}, {"adafactor", 1e-2}};

// CLI11's own range check prints the limits as reals.
CLI::Validator whole_number(int64_t low, int64_t high = 1'000'000'000) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        int64_t value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return {};
        return "expected a whole number from " + std::to_string(low) + " to " +
               std::to_string(high) + ", got " + text;
      },
      "");
}

// CLI11 would take "nan" and "inf" for numbers.
CLI::Validator number(double low, double high, const std::string& expected) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double value = 0.0;
        const bool parsed = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
        return parsed && value >= low && value <= high ? ""
                                                       : "expected " + expected + ", got " + text;
      },
      "");
}

// An empty one, as of a variable that is not set, would switch its option off.
CLI::Validator path_that_is_not_empty() {
  return CLI::Validator(
      [](std::string& text) { return text.empty() ? "expected a path, got an empty text" : ""; },
      "");
}

CLI::Validator positive() { return number(1e-30, 1e30, "a number above 0"); }

// The options under one heading of the help.
class Heading {
 public:
  Heading(CLI::App& app, std::string name) : app_(app), name_(std::move(name)) {}

  template <typename T>
  CLI::Option* add(const char* name, T& value, const char* type, const std::string& help) {
    return app_.add_option(name, value, help)->type_name(type)->group(name_);
  }
  CLI::Option* flag(const char* name, bool& value, const std::string& help) {
    return app_.add_flag(name, value, help)->group(name_);
  }
  template <typename T>
  CLI::Option* count(const char* name, T& value, const std::string& help, int64_t low = 1,
                     int64_t high = 1'000'000'000) {
    return add(name, value, "N", help)->check(whole_number(low, high));
  }
  CLI::Option* real(const char* name, double& value, const std::string& help,
                    const CLI::Validator& range) {
    return add(name, value, "X", help)->check(range);
  }
  // `values`: a container of them.
  template <typename T, typename Values>
  CLI::Option* choice(const char* name, T& value, const std::string& help, const Values& values) {
    return add(name, value, "", help)->check(CLI::IsMember(values));
  }
  CLI::Option* path(const char* name, std::string& value, const char* type,
                    const std::string& help) {
    return add(name, value, type, help)->check(path_that_is_not_empty());
  }

 private:
  CLI::App& app_;
  const std::string name_;
};

using Texts = std::vector<std::string>;

void add_model_options(CLI::App& app, TrainOptions& options) {
  Heading model(app, "Text and model");
  CLI::Validator existing = CLI::ExistingPath;
  existing.description("");
  model
      .add("--data", options.data, "PATH",
           "Files, and folders whose text files are read (default: libtorch's headers)")
      ->default_str("")
      ->check(existing);
  model
      .add("--init", options.init, "FILE",
           "Safetensors file, or the index of several, with the weights that the model starts "
           "from (default: random ones)")
      ->default_str("")
      ->check(existing);
  model.count("--context", options.context, "Bytes in a sequence");
  model.count("--layers", options.layers, "Transformer blocks");
  model.count("--width", options.width, "Width of the model, a multiple of --heads");
  model.count("--heads", options.heads, "Attention heads of a block");
  model.real("--dropout", options.dropout, "Part of the units that training drops",
             number(0.0, 0.99, "a number from 0 to 0.99"));
  model.choice("--device", options.device, "Where the model is; cuda needs --config=cuda",
               Texts{"cpu", "cuda"});
  model.choice("--dtype", options.dtype_name, "Of parameters and gradients", kDtypes);
}

void add_optimisation_options(CLI::App& app, TrainOptions& options) {
  Heading optimisation(app, "Optimisation");
  const CLI::Validator least_0 = number(0.0, 1e30, "a number of at least 0");
  optimisation.count("--steps", options.steps, "Optimizer steps");
  optimisation
      .count("--batch", options.batch,
             "Sequences in a step, over all ranks and micro-batches together (default: with "
             "--resume that of the run, else 16, or the next multiple of ranks times "
             "--accumulate, or of --micro-batches)")
      ->default_str("");
  optimisation.count("--accumulate", options.accumulate,
                     "Micro-batches a rank computes one after another in a step");
  auto* same_bits = optimisation.flag(
      "--same-bits", options.same_bits,
      "Train the same bits on any number of ranks, and log hashes of the masters");
  optimisation
      .count("--micro-batches", options.micro_batches,
             "Into which the ranks cut a step's batch, at least one each (default: 12, or the "
             "largest divisor of --batch up to 12)")
      ->default_str("")
      ->needs(same_bits);
  optimisation
      .choice("--optimizer", options.optimizer,
              "muon trains the matrices of the blocks, and AdamW the rest", kLearningRates)
      ->type_name("NAME");
  optimisation.real("--lr", options.learning_rate,
                    "Peak learning rate, with muon that of AdamW; 0: the optimizer's own", least_0);
  optimisation.real("--muon-lr", options.muon_lr,
                    "Peak learning rate of the blocks' matrices by Muon", positive());
  optimisation.real("--warmup", options.warmup,
                    "Part of the steps in which the learning rate rises",
                    number(0.0, 1.0, "a number from 0 to 1"));
  optimisation.real("--weight-decay", options.weight_decay, "Of the matrices; vectors have none",
                    least_0);
  auto* max_norm = optimisation.real("--max-norm", options.max_norm,
                                     "Gradients are clipped to this norm", positive());
  optimisation.choice("--moments", options.moments_name,
                      "How averages of gradients are stored, with adamw, lion and muon", kMoments);
  optimisation.flag(
      "--split-masters", options.split_masters,
      "Keep masters of bfloat16 parameters in 2 bytes, without loss; with adamw and lion");
  optimisation.choice("--gradient-shards", options.gradient_shards,
                      "Dtype of gradients between their reduction and the update",
                      Texts{"float32", "bfloat16"});
  optimisation
      .flag("--update-in-backward", options.update_in_backward,
            "Update parameters during the backward pass, without gradient shards and clips; with "
            "adamw and lion")
      ->excludes(max_norm);
  optimisation.real("--ema", options.ema,
                    "Keep an average of the parameters with this decay, and validate it too; 0: "
                    "none",
                    number(0.0, 0.999999999, "a number from 0 on, below 1"));
  optimisation.count("--seed", options.seed,
                     "Of the initial model, the order of the data and dropout", 0);
}

void add_rank_options(CLI::App& app, TrainOptions& options) {
  Heading ranks(app, "Ranks");
  ranks.count("--nproc", options.nproc,
              "Ranks to start here, unless torchrun, mpirun or srun started this one", 1, 1024);
  ranks.count("--threads", options.threads, "Threads of every rank");
  ranks.choice("--stage", options.stage,
               "What is split over the ranks: 1 optimizer state, 2 gradients as well",
               std::vector<int64_t>{1, 2});
  ranks.choice("--gather-wire", options.gather_wire,
               "What ranks send of updated parameters to other machines: all of them, or what "
               "has changed, which is less and takes longer to make",
               Texts{"whole", "changes"});
  ranks.choice("--transport", options.transport, "Between GPUs; gloo also where ranks share a GPU",
               Texts{"nccl", "gloo"});
}

void add_checkpoint_options(CLI::App& app, TrainOptions& options) {
  Heading checkpoints(app, "Checkpoints");
  auto* folder = checkpoints.path("--checkpoints", options.checkpoints, "DIR",
                                  "Folder that all ranks share; SIGTERM and Ctrl-C save there and "
                                  "end");
  checkpoints.count("--save-every", options.save_every, "Steps between two checkpoints")
      ->needs(folder);
  checkpoints.count("--keep", options.keep, "Checkpoints to keep, the newest ones")->needs(folder);
  checkpoints
      .flag("--resume", options.resume,
            "Go on from the newest one, on any number of ranks; without one begin")
      ->needs(folder);
  checkpoints
      .flag("--own-disks", options.own_disks,
            "The folder is on a disk of each machine, and holds the shards of its ranks")
      ->needs(folder);
}

void add_recovery_options(CLI::App& app, TrainOptions& options) {
  Heading recovery(app, "Recovery");
  auto* elastic = recovery.flag("--elastic", options.elastic,
                                "Go on with the other ranks when one dies; ranks started by "
                                "--nproc");
  recovery
      .count("--replacements", options.replacements,
             "Start a process in place of each of the first so many ranks that die", 0)
      ->needs(elastic);
  recovery
      .count("--protect-every", options.protect_every,
             "Steps between two copies of each shard in another rank's memory")
      ->needs(elastic);
}

void add_report_options(CLI::App& app, TrainOptions& options) {
  Heading reports(app, "Reports");
  reports.path("--log", options.log, "FILE",
               "Write one JSON object a step to this file; a run that goes on adds to it");
  reports.path("--metrics", options.metrics, "DIR",
               "Write the same to steps-<first step>.jsonl in this folder, for plot_metrics.py");
  auto* trace = reports.path("--trace", options.trace, "FILE",
                             "Write a Chrome trace of some steps of rank 0 to this file");
  reports
      .count("--trace-steps", options.trace_steps, "Steps in it, from the third of the run on", 1,
             1000)
      ->needs(trace);
  reports.path("--report", options.report, "FILE.html",
               "Write a page with curves, memory, owners, a traced step and samples to this file");
  reports.count("--validate-every", options.validate_every,
                "Steps between measurements of the validation loss");
  reports.count("--validation-sequences", options.validation_sequences,
                "Held-out sequences in one such measurement");
  reports.add("--prompt", options.prompt, "TEXT",
              "Where the text sampled after 10, 50 and 100 % of the steps begins");
  reports.count("--sample-bytes", options.sample_bytes, "Bytes of text to sample; 0: none", 0);
  reports.real("--temperature", options.temperature,
               "Of the sampling: below 1 likelier text, above 1 wilder text", positive());
}

int refuse(const std::string& reason) {
  std::fprintf(stderr, "train_gpt: %s\n", reason.c_str());
  return kUsageError;
}

}  // namespace

int64_t saved_batch(const TrainOptions& options) {
  if (options.batch > 0 || !options.resume) return options.batch;
  const auto newest = latest(options.checkpoints);
  if (!newest) return 0;
  const auto metadata = describe_checkpoint(*newest).metadata;
  const auto batch = metadata.find("batch");
  return batch == metadata.end() ? 0 : std::stoll(batch->second);
}

std::optional<int> parse_train_options(int argc, char** argv, TrainOptions& options) {
  CLI::App app(
      "Trains a byte-level GPT on text, with the optimizer's state (stage 1) and the\n"
      "gradients (stage 2) split over the ranks.");
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(32);
  add_model_options(app, options);
  add_optimisation_options(app, options);
  add_rank_options(app, options);
  add_checkpoint_options(app, options);
  add_recovery_options(app, options);
  add_report_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return refuse(std::string(error.what()) + " (--help lists the options)");
  }
  options.dtype = kDtypes.at(options.dtype_name);
  options.moments = kMoments.at(options.moments_name);
  options.gradient_shard_dtype = kDtypes.at(options.gradient_shards);
  const bool fused = options.optimizer == "adamw" || options.optimizer == "lion";
  if (options.moments != Moments::kFloat32 && !fused && options.optimizer != "muon") {
    return refuse("--moments: expected --optimizer adamw, lion or muon, got " + options.optimizer);
  }
  if (app.count("--muon-lr") > 0 && options.optimizer != "muon") {
    return refuse("--muon-lr: expected --optimizer muon, got " + options.optimizer);
  }
  if (options.split_masters && !fused) {
    return refuse(
        "--split-masters: expected --optimizer adamw or lion, which have fused kernels, got " +
        options.optimizer);
  }
  const bool whole = options.same_bits || options.accumulate > 1 || options.gather_wire != "whole";
  if (options.update_in_backward && (whole || !fused || options.dtype == c10::kHalf)) {
    return refuse(
        "--update-in-backward: expected --optimizer adamw or lion, --dtype float32 or bfloat16, "
        "one micro-batch a rank, --gather-wire whole and no --same-bits, got --optimizer " +
        options.optimizer + ", --dtype " + options.dtype_name + ", --accumulate " +
        std::to_string(options.accumulate) + ", --gather-wire " + options.gather_wire +
        (options.same_bits ? " and --same-bits" : ""));
  }
  if (options.split_masters && options.dtype != c10::kBFloat16) {
    return refuse("--split-masters: expected --dtype bfloat16, got " + options.dtype_name);
  }
  if (options.same_bits && options.accumulate > 1) {
    return refuse(
        "--accumulate: expected 1 with --same-bits, where --micro-batches cuts the batch, got " +
        std::to_string(options.accumulate));
  }
  if (options.learning_rate == 0) options.learning_rate = kLearningRates.at(options.optimizer);
  if (options.width % options.heads != 0) {
    return refuse("--width: expected a multiple of --heads " + std::to_string(options.heads) +
                  ", got " + std::to_string(options.width));
  }
  options.listing = app.config_to_str(/*default_also=*/true);
  std::map<std::string, std::string> option_of;
  for (const auto& [name, file] : {std::pair("--log", options.log),
                                   {"--trace", options.trace},
                                   {"--report", options.report}}) {
    if (file.empty()) continue;
    if (const auto [other, is_new] = option_of.emplace(file, name); !is_new) {
      return refuse(std::string(name) + ": expected another file than that of " + other->second +
                    ", got " + file);
    }
    if (!std::ofstream(file, std::ios::app)) {
      return refuse(std::string(name) + ": cannot write " + file);
    }
  }
  for (const auto& [name, folder] :
       {std::pair("--metrics", options.metrics), {"--checkpoints", options.checkpoints}}) {
    if (folder.empty()) continue;
    std::error_code ignored;
    std::filesystem::create_directories(folder, ignored);
    if (access(folder.c_str(), W_OK | X_OK) != 0) {
      return refuse(std::string(name) + ": cannot make or write to the folder " + folder);
    }
  }
  if (options.sample_bytes > 0 && options.prompt.empty()) {
    return refuse("--prompt: expected some text to begin with; --sample-bytes 0 samples none");
  }
  return std::nullopt;
}

void choose_batch(TrainOptions& options, int world_size) {
  constexpr int64_t kBatch = 16;
  constexpr int64_t kMicroBatches = 12;  // suits 1, 2, 3, 4, 6 and 12 ranks
  if (options.same_bits && options.micro_batches == 0) {
    options.micro_batches = kMicroBatches;
    while (options.batch % options.micro_batches != 0) --options.micro_batches;
  }
  const int64_t parts = options.same_bits ? options.micro_batches : world_size * options.accumulate;
  if (options.batch == 0) options.batch = (kBatch + parts - 1) / parts * parts;
}

std::string batch_problem(const TrainOptions& options, int world_size) {
  if (options.same_bits) {
    if (options.batch % options.micro_batches != 0) {
      return "--batch: expected a multiple of --micro-batches " +
             std::to_string(options.micro_batches) + ", got " + std::to_string(options.batch);
    }
    if (world_size <= options.micro_batches) return {};
    return "--micro-batches: expected at least one for each of " + std::to_string(world_size) +
           " ranks, got " + std::to_string(options.micro_batches);
  }
  const int64_t parts = world_size * options.accumulate;
  if (options.batch % parts == 0 || options.elastic) return {};
  return "--batch: expected a multiple of " + std::to_string(parts) + " (" +
         std::to_string(world_size) + " ranks times --accumulate " +
         std::to_string(options.accumulate) + "), got " + std::to_string(options.batch);
}

}  // namespace zero::examples
