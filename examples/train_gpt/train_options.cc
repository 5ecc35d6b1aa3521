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
#include <utility>

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
CLI::Validator path() {
  return CLI::Validator(
      [](std::string& text) { return text.empty() ? "expected a path, got an empty text" : ""; },
      "");
}

CLI::Validator positive() { return number(1e-30, 1e30, "a number above 0"); }

void add_model_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Text and model";
  CLI::Validator existing = CLI::ExistingPath;
  existing.description("");
  app.add_option("--data", options.data,
                 "Files, and folders whose text files are read (default: libtorch's headers)")
      ->default_str("")
      ->type_name("PATH")
      ->check(existing)
      ->group(group);
  app.add_option(
         "--init", options.init,
         "Safetensors file, or the index of several, with the weights that the model starts "
         "from (default: random ones)")
      ->default_str("")
      ->type_name("FILE")
      ->check(existing)
      ->group(group);
  app.add_option("--context", options.context, "Bytes in a sequence")->group(group);
  app.add_option("--layers", options.layers, "Transformer blocks")->group(group);
  app.add_option("--width", options.width, "Width of the model, a multiple of --heads")
      ->group(group);
  app.add_option("--heads", options.heads, "Attention heads of a block")->group(group);
  app.add_option("--dropout", options.dropout, "Part of the units that training drops")
      ->check(number(0.0, 0.99, "a number from 0 to 0.99"))
      ->type_name("X")
      ->group(group);
  for (const char* name : {"--context", "--layers", "--width", "--heads"}) {
    app.get_option(name)->check(whole_number(1))->type_name("N");
  }
  app.add_option("--device", options.device, "Where the model is; cuda needs --config=cuda")
      ->type_name("")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->group(group);
  app.add_option("--dtype", options.dtype_name, "Of parameters and gradients")
      ->type_name("")
      ->check(CLI::IsMember(kDtypes))
      ->group(group);
}

void add_optimisation_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Optimisation";
  app.add_option("--steps", options.steps, "Optimizer steps")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--batch", options.batch,
                 "Sequences in a step, over all ranks and micro-batches together (default: with "
                 "--resume that of the run, else 16, or the next multiple of ranks times "
                 "--accumulate, or of --micro-batches)")
      ->default_str("")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--accumulate", options.accumulate,
                 "Micro-batches a rank computes one after another in a step")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  auto* same_bits =
      app.add_flag("--same-bits", options.same_bits,
                   "Train the same bits on any number of ranks, and log hashes of the masters")
          ->group(group);
  app.add_option("--micro-batches", options.micro_batches,
                 "Into which the ranks cut a step's batch, at least one each (default: 12, or the "
                 "largest divisor of --batch up to 12)")
      ->default_str("")
      ->check(whole_number(1))
      ->needs(same_bits)
      ->type_name("N")
      ->group(group);
  app.add_option("--optimizer", options.optimizer,
                 "muon trains the matrices of the blocks, and AdamW the rest")
      ->check(CLI::IsMember(kLearningRates))
      ->type_name("NAME")
      ->group(group);
  app.add_option("--lr", options.learning_rate,
                 "Peak learning rate, with muon that of AdamW; 0: the optimizer's own")
      ->check(number(0.0, 1e30, "a number of at least 0"))
      ->type_name("X")
      ->group(group);
  app.add_option("--muon-lr", options.muon_lr, "Peak learning rate of the blocks' matrices by Muon")
      ->check(positive())
      ->type_name("X")
      ->group(group);
  app.add_option("--warmup", options.warmup, "Part of the steps in which the learning rate rises")
      ->check(number(0.0, 1.0, "a number from 0 to 1"))
      ->type_name("X")
      ->group(group);
  app.add_option("--weight-decay", options.weight_decay, "Of the matrices; vectors have none")
      ->check(number(0.0, 1e30, "a number of at least 0"))
      ->type_name("X")
      ->group(group);
  auto* max_norm =
      app.add_option("--max-norm", options.max_norm, "Gradients are clipped to this norm")
          ->check(positive())
          ->type_name("X")
          ->group(group);
  app.add_option("--moments", options.moments_name,
                 "How averages of gradients are stored, with adamw, lion and muon")
      ->check(CLI::IsMember(kMoments))
      ->type_name("")
      ->group(group);
  app.add_flag("--split-masters", options.split_masters,
               "Keep masters of bfloat16 parameters in 2 bytes, without loss; with adamw and lion")
      ->group(group);
  app.add_option("--gradient-shards", options.gradient_shards,
                 "Dtype of gradients between their reduction and the update")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->type_name("")
      ->group(group);
  app.add_flag(
         "--update-in-backward", options.update_in_backward,
         "Update parameters during the backward pass, without gradient shards and clips; with "
         "adamw and lion")
      ->excludes(max_norm)
      ->group(group);
  app.add_option("--ema", options.ema,
                 "Keep an average of the parameters with this decay, and validate it too; 0: none")
      ->check(number(0.0, 0.999999999, "a number from 0 on, below 1"))
      ->type_name("X")
      ->group(group);
  app.add_option("--seed", options.seed, "Of the initial model, the order of the data and dropout")
      ->check(whole_number(0))
      ->type_name("N")
      ->group(group);
}

void add_rank_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Ranks";
  app.add_option("--nproc", options.nproc,
                 "Ranks to start here, unless torchrun, mpirun or srun started this one")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->group(group);
  app.add_option("--threads", options.threads, "Threads of every rank")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--stage", options.stage,
                 "What is split over the ranks: 1 optimizer state, 2 gradients as well")
      ->check(CLI::IsMember({1, 2}))
      ->type_name("")
      ->group(group);
  app.add_option("--gather-wire", options.gather_wire,
                 "What ranks send of updated parameters to other machines: all of them, or what "
                 "has changed, which is less and takes longer to make")
      ->check(CLI::IsMember({"whole", "changes"}))
      ->type_name("")
      ->group(group);
  app.add_option("--transport", options.transport,
                 "Between GPUs; gloo also where ranks share a GPU")
      ->check(CLI::IsMember({"nccl", "gloo"}))
      ->type_name("")
      ->group(group);
}

void add_checkpoint_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Checkpoints";
  auto* folder =
      app.add_option("--checkpoints", options.checkpoints,
                     "Folder that all ranks share; SIGTERM and Ctrl-C save there and end")
          ->check(path())
          ->type_name("DIR")
          ->group(group);
  app.add_option("--save-every", options.save_every, "Steps between two checkpoints")
      ->check(whole_number(1))
      ->needs(folder)
      ->type_name("N")
      ->group(group);
  app.add_option("--keep", options.keep, "Checkpoints to keep, the newest ones")
      ->check(whole_number(1))
      ->needs(folder)
      ->type_name("N")
      ->group(group);
  app.add_flag("--resume", options.resume,
               "Go on from the newest one, on any number of ranks; without one begin")
      ->needs(folder)
      ->group(group);
  app.add_flag("--own-disks", options.own_disks,
               "The folder is on a disk of each machine, and holds the shards of its ranks")
      ->needs(folder)
      ->group(group);
}

void add_recovery_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Recovery";
  auto* elastic = app.add_flag("--elastic", options.elastic,
                               "Go on with the other ranks when one dies; ranks started by --nproc")
                      ->group(group);
  app.add_option("--replacements", options.replacements,
                 "Start a process in place of each of the first so many ranks that die")
      ->check(whole_number(0))
      ->needs(elastic)
      ->type_name("N")
      ->group(group);
  app.add_option("--protect-every", options.protect_every,
                 "Steps between two copies of each shard in another rank's memory")
      ->check(whole_number(1))
      ->needs(elastic)
      ->type_name("N")
      ->group(group);
}

void add_report_options(CLI::App& app, TrainOptions& options) {
  const std::string group = "Reports";
  app.add_option("--log", options.log,
                 "Write one JSON object a step to this file; a run that goes on adds to it")
      ->check(path())
      ->type_name("FILE")
      ->group(group);
  app.add_option("--metrics", options.metrics,
                 "Write the same to steps-<first step>.jsonl in this folder, for plot_metrics.py")
      ->check(path())
      ->type_name("DIR")
      ->group(group);
  auto* trace = app.add_option("--trace", options.trace,
                               "Write a Chrome trace of some steps of rank 0 to this file")
                    ->check(path())
                    ->type_name("FILE")
                    ->group(group);
  app.add_option("--trace-steps", options.trace_steps, "Steps in it, from the third of the run on")
      ->check(whole_number(1, 1000))
      ->needs(trace)
      ->type_name("N")
      ->group(group);
  app.add_option("--report", options.report,
                 "Write a page with curves, memory, owners, a traced step and samples to this file")
      ->check(path())
      ->type_name("FILE.html")
      ->group(group);
  app.add_option("--validate-every", options.validate_every,
                 "Steps between measurements of the validation loss")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--validation-sequences", options.validation_sequences,
                 "Held-out sequences in one such measurement")
      ->check(whole_number(1))
      ->type_name("N")
      ->group(group);
  app.add_option("--prompt", options.prompt,
                 "Where the text sampled after 10, 50 and 100 % of the steps begins")
      ->type_name("TEXT")
      ->group(group);
  app.add_option("--sample-bytes", options.sample_bytes, "Bytes of text to sample; 0: none")
      ->check(whole_number(0))
      ->type_name("N")
      ->group(group);
  app.add_option("--temperature", options.temperature,
                 "Of the sampling: below 1 likelier text, above 1 wilder text")
      ->check(positive())
      ->type_name("X")
      ->group(group);
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
