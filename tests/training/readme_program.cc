// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The code of the documents as a program that readme_test runs and compares with them:
//   readme_program <ranks> loop <folder>        README.md's loop
//   readme_program <ranks> muon <folder>        the same with the optimizer of docs/training.md
//   readme_program <ranks> <batches> <folder>   that of docs/training.md and docs/checkpoints.md
//   readme_program 8 mesh <folder>              the optimizer of docs/parallelism.md
//   readme_program <ranks> data <folder>        the loop over examples of docs/training.md
//   readme_program <ranks> tokens <folder>      the loop over unequal batches of docs/training.md
//   readme_program <ranks> bits <folder>        the loop over micro-batches of docs/training.md
//   readme_program <ranks> groups <folder>      the parameter groups of docs/training.md
//
// The second trains up to batch <batches> and saves after every third one in <folder>/run. Where
// there are checkpoints, it goes on from the newest. Every rank writes its parameters and its next
// random numbers to <folder>/state-<rank>-<batches>, after a loop its parameters to
// <folder>/loop-<rank>. That over examples writes the numbers of a rank's examples to
// <folder>/seen-<rank>, and the losses that it shows to <folder>/shown-<rank>.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/data/samplers/distributed.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/forked_ranks.h"
#include "tests/support/random_tensors.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/combined_optimizer.h"
#include "zero/launch.h"
#include "zero/lr_schedule.h"
#include "zero/mesh.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int64_t accumulation = 2;
constexpr int64_t steps = 12;
constexpr int64_t warmup = 4;
constexpr int64_t epochs = 2;
constexpr size_t examples = 23;
constexpr size_t batch_size = 3;
constexpr size_t micro_batch_size = 1;

struct GptConfig {
  int64_t width = 13;
};

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& config)
      : first(register_module("first", torch::nn::Linear(config.width, 37))),
        dropout(register_module("dropout", torch::nn::Dropout(0.3))),
        second(register_module("second", torch::nn::Linear(37, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return second(dropout(first(x).relu())); }

  torch::nn::Linear first;
  torch::nn::Dropout dropout;
  torch::nn::Linear second;
};
TORCH_MODULE(Gpt);

struct Batch {
  int64_t number = 0;
  int rank = 0;
};

at::Tensor loss(Gpt& model, const Batch& batch, int64_t micro = 0) {
  const auto seed = static_cast<uint64_t>(1000 * batch.number + 10 * micro + batch.rank);
  const at::Tensor x = zero::random_tensor({3, 13}, seed),
                   y = zero::random_tensor({3, 5}, seed + 7);
  const at::Device device = model->parameters()[0].device();
  return at::mse_loss(model(x.to(device)), y.to(device));
}

at::Tensor loss(Gpt& model, const std::vector<size_t>& indices) {
  const at::Device device = model->parameters()[0].device();
  at::Tensor sum;
  for (const size_t index : indices) {
    const at::Tensor x = zero::random_tensor({13}, index), y = zero::random_tensor({5}, index + 99);
    const at::Tensor one = at::mse_loss(model(x.to(device)), y.to(device));
    sum = sum.defined() ? sum + one : one;
  }
  return sum / static_cast<double>(indices.size());
}

// A loader that goes on behind the last batch that it gave out.
class Batches : public zero::Stateful {
 public:
  explicit Batches(int64_t end) : end_(end) {}

  std::string state() const override { return std::to_string(given_); }
  void set_state(const std::string& state) override { given_ = std::stoll(state); }

  struct Iterator {
    Batches* batches;
    Batch& operator*() const { return batches->batch_; }
    void operator++() { batches->next(); }
    bool operator!=(const Iterator&) const { return batches->given_ <= batches->end_; }
  };
  Iterator begin() {
    next();
    return {this};
  }
  Iterator end() { return {this}; }

  void set_rank(int rank) { batch_.rank = rank; }

 private:
  void next() { batch_.number = given_++; }

  const int64_t end_;
  int64_t given_ = 0;
  Batch batch_;
};

void write_tensors(const std::vector<at::Tensor>& tensors, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor host = tensor.detach().cpu().contiguous();
    file.write(static_cast<const char*>(host.const_data_ptr()),
               static_cast<std::streamsize>(host.nbytes()));
  }
}

int train_in_a_loop() {
  const GptConfig config;
  Batches batches(steps);

  zero::Group group = zero::init_process_group();
  Gpt model(config);
  model->to(group.device());
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), 3e-4);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group, zero::ZeroOptions().stage(2));

  batches.set_rank(group.rank());
  for (Batch& batch : batches) {
    optimizer.backward(loss(model, batch));
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
  }
  write_tensors(model->parameters(), "loop-" + std::to_string(group.rank()));
  return 0;
}

int train_by_muon() {
  const GptConfig config;
  Batches batches(steps);

  zero::Group group = zero::init_process_group();
  Gpt model(config);
  model->to(group.device());
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& p : model->parameters()) (p.dim() == 2 ? matrices : others).push_back(p);

  std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
  parts.push_back(std::make_unique<zero::Muon>(matrices, zero::MuonOptions(0.02)));
  parts.push_back(std::make_unique<torch::optim::AdamW>(others, torch::optim::AdamWOptions(3e-4)));
  auto inner = std::make_unique<zero::CombinedOptimizer>(std::move(parts));
  zero::ZeroOptimizer optimizer(*model, std::move(inner), group);

  batches.set_rank(group.rank());
  for (Batch& batch : batches) {
    optimizer.backward(loss(model, batch));
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
  }
  write_tensors(model->parameters(), "loop-" + std::to_string(group.rank()));
  return 0;
}

int64_t batches() { return 7; }

void add_batch(int64_t number, Gpt& model, at::Tensor& sums) {
  const std::vector<size_t> indices(static_cast<size_t>(number % 3 + 1),
                                    static_cast<size_t>(number));
  const auto count = static_cast<double>(indices.size());
  sums += at::tensor({loss(model, indices).item<double>() * count, count}, at::kDouble);
}

using Net = Gpt;

double validate(Net& model, const zero::Group& group, zero::Communicator& ranks) {
  const torch::NoGradGuard no_grad;
  model->eval();
  at::Tensor sums = at::zeros({2}, at::kDouble);
  for (int64_t i = group.rank(); i < batches(); i += group.world_size()) add_batch(i, model, sums);
  model->train();
  ranks.all_reduce_sum(sums, "validation").wait();
  return sums[0].item<double>() / sums[1].item<double>();
}

// Whether validate() is the mean over all examples.
bool validates(Gpt& model, const zero::Group& group) {
  auto ranks = group.make_communicator("validation", zero::Purpose::kControl);
  double mean = validate(model, group, *ranks);
  const at::NoGradGuard no_grad;
  model->eval();
  at::Tensor sums = at::zeros({2}, at::kDouble);
  for (int64_t i = 0; i < batches(); ++i) add_batch(i, model, sums);
  return std::abs(mean - (sums[0] / sums[1]).item<double>()) < 1e-9;
}

int train_over_examples() {
  zero::Group group = zero::init_process_group();
  Gpt model(GptConfig{});
  model->to(group.device());
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), 3e-4);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group);
  std::ofstream seen("seen-" + std::to_string(group.rank()));
  std::ofstream losses("shown-" + std::to_string(group.rank()));

  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    torch::data::samplers::DistributedRandomSampler sampler(examples, group.world_size(),
                                                            group.rank());
    sampler.set_epoch(epoch);
    sampler.reset();
    while (auto indices = sampler.next(batch_size)) {
      at::Tensor batch_loss = loss(model, *indices);
      optimizer.backward(batch_loss);
      optimizer.step();
      at::Tensor shown = zero::mean_over_ranks(batch_loss, group);
      for (const size_t index : *indices) seen << epoch << " " << index << "\n";
      losses << batch_loss.item<double>() << " " << shown.item<double>() << "\n";
    }
  }
  return validates(model, group) ? 0 : 1;
}

int decay_matrices() {
  zero::Group group = zero::init_process_group();
  Gpt model(GptConfig{});

  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& p : model->parameters()) (p.dim() < 2 ? vectors : matrices).push_back(p);
  std::vector<torch::optim::OptimizerParamGroup> groups{matrices, vectors};
  auto adamw = std::make_unique<torch::optim::AdamW>(
      groups, torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
  static_cast<torch::optim::AdamWOptions&>(adamw->param_groups()[1].options()).weight_decay(0.0);

  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group);
  const auto before = [](const at::Tensor& p) { return p.detach().clone(); };
  const at::Tensor weight = before(model->first->weight), bias = before(model->first->bias);
  optimizer.backward(0 * (model->first->weight.sum() + model->first->bias.sum()));
  optimizer.step();
  const at::NoGradGuard no_grad;
  return !model->first->weight.equal(weight) && model->first->bias.equal(bias) ? 0 : 1;
}

// A rank's part of a batch of 24 tokens, which is another part of it for each rank and batch.
class Texts {
 public:
  Texts(int64_t number, int rank, int ranks) : micro_(accumulation) {
    for (int64_t token = 0; token < 24; ++token) {
      const bool all_on_one = number % 4 == 1;
      const auto owner = all_on_one ? number % ranks : token * token * ranks / (24 * 24);
      const auto micro = static_cast<size_t>(token % 5 == 0 ? 0 : accumulation - 1);
      if (owner == rank) micro_[micro].push_back(static_cast<uint64_t>(100 * number + token));
    }
  }

  double tokens() const {
    double sum = 0;
    for (const auto& of_micro : micro_) sum += static_cast<double>(of_micro.size());
    return sum;
  }
  const std::vector<uint64_t>& in(int64_t micro) const {
    return micro_[static_cast<size_t>(micro)];
  }

 private:
  std::vector<std::vector<uint64_t>> micro_;
};

at::Tensor loss_sum(Gpt& model, const Texts& texts, int64_t micro) {
  const at::Device device = model->parameters()[0].device();
  at::Tensor sum = at::zeros({}, device);
  for (const uint64_t token : texts.in(micro)) {
    const at::Tensor x = zero::random_tensor({13}, token), y = zero::random_tensor({5}, token + 50);
    sum = sum + at::mse_loss(model(x.to(device)), y.to(device));
  }
  return sum;
}

int train_on_unequal_batches() {
  zero::Group group = zero::init_process_group();
  torch::manual_seed(1);  // of the parameters, with any number of ranks
  Gpt model(GptConfig{});
  model->eval();
  model->to(group.device());
  write_tensors(model->parameters(), "begin-" + std::to_string(group.rank()));
  std::vector<Texts> batches;
  for (int64_t b = 0; b < steps; ++b) batches.emplace_back(b, group.rank(), group.world_size());
  auto sgd = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);

  zero::ZeroOptimizer optimizer(*model, std::move(sgd), group,
                                zero::ZeroOptions().reduction(zero::Reduction::kSum));
  auto counts = group.make_communicator("counts", zero::Purpose::kControl);
  for (Texts& texts : batches) {
    at::Tensor tokens = at::full({1}, texts.tokens(), at::kDouble);
    counts->all_reduce_sum(tokens, "tokens").wait();
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      auto guard = optimizer.no_sync(micro + 1 < accumulation);
      optimizer.backward(loss_sum(model, texts, micro) / tokens.item<double>());
    }
    optimizer.step();
  }
  write_tensors(model->parameters(), "loop-" + std::to_string(group.rank()));
  return 0;
}

Batch micro_batch(int64_t step, int64_t number) {
  return {.number = step, .rank = static_cast<int>(number)};
}

int train_micro_batches() {
  zero::Group group = zero::init_process_group();
  torch::manual_seed(1);
  Gpt model(GptConfig{});
  model->to(group.device());
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), 3e-4);

  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group,
                                zero::ZeroOptions().micro_batches(12));
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t number : optimizer.micro_batches()) {
      torch::manual_seed(12 * step + number);
      optimizer.backward(loss(model, micro_batch(step, number)));
    }
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
  }

  const int64_t step = steps;
  torch::data::samplers::DistributedRandomSampler sampler(examples, 1, 0);
  std::vector<std::vector<size_t>> parts;
  for (int64_t part = 0; part < 12; ++part) parts.push_back(*sampler.next(micro_batch_size));
  for (int64_t number : optimizer.micro_batches()) {
    torch::manual_seed(12 * step + number);
    optimizer.backward(loss(model, parts[number]));
  }
  optimizer.step();
  write_tensors(model->parameters(), "loop-" + std::to_string(group.rank()));
  return 0;
}

struct ExpertModel : torch::nn::Module {
  ExpertModel()
      : dense(register_module("dense", torch::nn::Linear(13, 7))),
        expert(register_module("expert", torch::nn::Linear(7, 5))) {}

  torch::nn::Linear dense;
  torch::nn::Linear expert;
};

int step_over_a_mesh() {
  zero::Group world = zero::init_process_group();
  auto model = std::make_shared<ExpertModel>();
  std::vector<torch::optim::OptimizerParamGroup> groups{model->dense->parameters(),
                                                        model->expert->parameters()};
  auto adamw = std::make_unique<torch::optim::AdamW>(std::move(groups));

  zero::Mesh mesh(world, {{"rep", 2}, {"edp", 2}, {"ep", 2}});
  auto copies = zero::GroupPlacement().replicated_over(mesh.group({"rep"}));
  auto experts = zero::GroupPlacement(copies).sharded_over(mesh.group({"edp"})).averaged_over(8);
  zero::ZeroOptimizer optimizer(
      *model, std::move(adamw), mesh.group({"edp", "ep"}),
      zero::ZeroOptions().mesh_group(world).placement(0, copies).placement(1, experts));

  const at::Tensor x = zero::random_tensor({3, 13}, static_cast<uint64_t>(world.rank()));
  optimizer.backward(model->expert(model->dense(x.to(world.device()))).square().mean());
  optimizer.step();
  return optimizer.stats().steps == 1 ? 0 : 1;
}

struct HeadedModel : torch::nn::Module {
  HeadedModel()
      : encoder(register_module("encoder", torch::nn::Linear(13, 7))),
        body(register_module("body", torch::nn::Linear(7, 7))) {}

  torch::nn::Linear encoder;
  torch::nn::Linear body;
  torch::nn::Linear head{nullptr};
};

int freeze_and_add() {
  zero::Group group = zero::init_process_group();
  auto model = std::make_shared<HeadedModel>();
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), 3e-4);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group);
  model->head = model->register_module("head", torch::nn::Linear(7, 5));

  optimizer.freeze(model->encoder->parameters());
  optimizer.unfreeze({model->encoder->weight});
  optimizer.add_param_group(
      {model->head->parameters(), std::make_unique<torch::optim::AdamWOptions>(1e-3)});

  const std::vector<at::Tensor> before = {model->encoder->bias.clone(), model->head->bias.clone()};
  const at::Tensor x = zero::random_tensor({3, 13}, static_cast<uint64_t>(group.rank()));
  optimizer.backward(model->head(model->body(model->encoder(x))).square().mean());
  optimizer.step();
  const bool frozen = model->encoder->bias.equal(before[0]);
  return frozen && !model->head->bias.equal(before[1]) ? 0 : 1;
}

constexpr auto kDevice = at::kCPU;
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(kDevice, true);
    at::autocast::set_autocast_dtype(kDevice, at::kBFloat16);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(kDevice, false);
    at::autocast::clear_cache();
  }
};

int train_under_autocast() {
  zero::Group group = zero::init_process_group();
  torch::nn::Sequential model(torch::nn::Linear(13, 7), torch::nn::Linear(7, 5));
  zero::ZeroOptimizer optimizer(
      *model, std::make_unique<torch::optim::SGD>(model->parameters(), 0.1), group);
  std::vector<at::Tensor> inputs;
  for (uint64_t step = 0; step < 9; ++step) inputs.push_back(zero::random_tensor({3, 13}, 5));
  std::vector<double> losses;

  for (const at::Tensor& x : inputs) {
    at::Tensor output;
    {
      const Autocast forward_only;
      output = model->forward(x);
    }
    optimizer.backward(output.to(at::kFloat).square().mean());
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    if (output.scalar_type() != at::kBFloat16) return 1;
    losses.push_back(output.to(at::kFloat).square().mean().item<double>());
  }
  // A pass that computes with stale copies of the parameters has the loss of before.
  return losses.back() < 0.8 * losses.front() ? 0 : 1;
}

int prune_and_grow() {
  zero::Group group = zero::init_process_group();
  const at::Tensor means = zero::random_tensor({9, 3}, 1).requires_grad_();
  const at::Tensor opacity = at::full({9}, 1.0);
  opacity.slice(0, 2, 6).fill_(-9);
  opacity.requires_grad_();
  zero::NamedTensors list;
  list.insert("means", means);
  list.insert("opacity", opacity);
  zero::ZeroOptimizer optimizer(
      list, std::make_unique<torch::optim::Adam>(std::vector<at::Tensor>{means, opacity}, 1e-3),
      group);
  optimizer.backward(means.square().sum() + opacity.sum());
  optimizer.step();
  const at::Tensor new_means = at::ones({3, 3});
  const at::Tensor new_opacity = at::ones({3});
  const at::NoGradGuard no_grad;

  const at::Tensor kept = opacity.sigmoid().gt(0.01).nonzero().squeeze(1);
  const at::Tensor rows = at::cat({kept, at::full({3}, -1, at::kLong)});
  optimizer.resize_rows({{means, rows, at::cat({means.index_select(0, kept), new_means})},
                         {opacity, rows, at::cat({opacity.index_select(0, kept), new_opacity})}});

  return means.size(0) == 8 && opacity.sizes() == at::IntArrayRef({8}) ? 0 : 1;
}

int train(int64_t last) {
  const GptConfig config;
  Batches batches(last);

  zero::Group group = zero::init_process_group();
  torch::manual_seed(1234 + group.rank());
  Gpt model(config);
  model->to(group.device());
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), 3e-4);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group, zero::ZeroOptions().stage(2));
  zero::LrSchedule schedule(optimizer,
                            zero::linear_warmup(warmup, zero::cosine_decay(steps - warmup)));

  batches.set_rank(group.rank());
  zero::RandomState random(group.device());
  if (auto newest = zero::latest("run")) {
    optimizer.load_checkpoint(*newest, zero::LoadOptions()
                                           .include("schedule", schedule)
                                           .include("batches", batches)
                                           .include_per_rank("random", random));
  }
  for (Batch& batch : batches) {
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      auto guard = optimizer.no_sync(micro + 1 < accumulation);
      optimizer.backward(loss(model, batch, micro) / accumulation);
    }
    at::Tensor norm = optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    schedule.step();

    if (schedule.steps() % 3 != 0) continue;
    optimizer.save_checkpoint("run/step-" + std::to_string(schedule.steps()),
                              zero::SaveOptions()
                                  .include("schedule", schedule)
                                  .include("batches", batches)
                                  .include_per_rank("random", random));
    if (group.rank() == 0) zero::keep_last("run", 2);
  }
  std::vector<at::Tensor> tensors = model->parameters();
  tensors.push_back(at::randn({5}));
  write_tensors(tensors, "state-" + std::to_string(group.rank()) + "-" + std::to_string(last));
  return 0;
}

int program(int argc, char** argv) {
  if (argc != 4) return 2;
  return zero::launch_local(std::atoi(argv[1]), [&] {
    if (chdir(argv[3]) != 0) std::perror(argv[3]);
    const std::string what = argv[2];
    if (what == "loop") return train_in_a_loop();
    if (what == "muon") return train_by_muon();
    if (what == "mesh") return step_over_a_mesh();
    if (what == "groups") return decay_matrices();
    if (what == "freeze") return freeze_and_add();
    if (what == "autocast") return train_under_autocast();
    if (what == "rows") return prune_and_grow();
    if (what == "data") return train_over_examples();
    if (what == "bits") return train_micro_batches();
    if (what == "tokens") return train_on_unequal_batches();
    return train(std::atoll(argv[2]));
  });
}

}  // namespace

int main(int argc, char** argv) { zero::run_with_forked_ranks(program, argc, argv); }
