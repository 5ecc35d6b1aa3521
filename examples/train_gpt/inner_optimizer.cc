// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/inner_optimizer.h"

#include <c10/util/Exception.h>
#include <torch/optim/adamw.h>

#include <utility>

#include "zero/adafactor.h"
#include "zero/combined_optimizer.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"

namespace zero::examples {
namespace {

using torch::optim::OptimizerParamGroup;

struct Parameters {
  std::vector<at::Tensor> query_key_values;  // of the blocks, three matrices in one
  std::vector<at::Tensor> hidden;            // other matrices of the blocks
  std::vector<at::Tensor> tables;            // embeddings and head
  std::vector<at::Tensor> vectors;           // biases and layer norms
};

Parameters parameters_of(Gpt& model) {
  Parameters result;
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    auto& list = item.value().dim() < 2                              ? result.vectors
                 : name.rfind("blocks.", 0) != 0                     ? result.tables
                 : name.find("query_key_value") != std::string::npos ? result.query_key_values
                                                                     : result.hidden;
    list.push_back(item.value());
  }
  return result;
}

// Two groups: `matrices`, which decay, and `vectors`, which do not.
template <typename Optimizer, typename Options>
std::unique_ptr<Optimizer> make(std::vector<at::Tensor> matrices, std::vector<at::Tensor> vectors,
                                const Options& options) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices));
  groups.emplace_back(std::move(vectors));
  auto optimizer = std::make_unique<Optimizer>(groups, options);
  // Set here and not on the group above: torch takes a group's option that
  // happens to equal the class's own default for one that was not given.
  static_cast<Options&>(optimizer->param_groups()[1].options()).weight_decay(0.0);
  return optimizer;
}

// Some true gradients are zero, such as those of the keys' biases, which cancel
// in the softmax. With AdamW's usual 1e-8 their rounding errors would become
// steps of full size, and runs on different numbers of ranks would drift apart.
torch::optim::AdamWOptions adamw_options(const TrainOptions& options) {
  return torch::optim::AdamWOptions(options.learning_rate)
      .betas({0.9, 0.95})
      .eps(1e-6)
      .weight_decay(options.weight_decay);
}

std::unique_ptr<torch::optim::Optimizer> make_muon(Parameters parameters,
                                                   const TrainOptions& options) {
  const auto muon = MuonOptions(options.muon_lr).weight_decay(options.weight_decay);
  auto split = MuonOptions(muon).split(split_rows({options.width, options.width, options.width}));
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::move(parameters.hidden));
  groups.emplace_back(std::move(parameters.query_key_values),
                      std::make_unique<MuonOptions>(std::move(split)));
  std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
  parts.push_back(std::make_unique<Muon>(groups, muon));
  parts.push_back(make<torch::optim::AdamW>(std::move(parameters.tables),
                                            std::move(parameters.vectors), adamw_options(options)));
  return std::make_unique<CombinedOptimizer>(std::move(parts));
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> make_inner_optimizer(Gpt& model,
                                                              const TrainOptions& options) {
  Parameters parameters = parameters_of(model);
  if (options.optimizer == "muon") return make_muon(std::move(parameters), options);
  std::vector<at::Tensor> matrices;
  for (auto* list : {&parameters.tables, &parameters.query_key_values, &parameters.hidden}) {
    matrices.insert(matrices.end(), list->begin(), list->end());
  }
  std::vector<at::Tensor> vectors = std::move(parameters.vectors);
  const double lr = options.learning_rate, decay = options.weight_decay;
  if (options.optimizer == "adamw") {
    return make<torch::optim::AdamW>(matrices, vectors, adamw_options(options));
  }
  if (options.optimizer == "lion") {
    return make<Lion>(matrices, vectors, LionOptions(lr).weight_decay(decay));
  }
  if (options.optimizer == "lamb") {
    return make<Lamb>(matrices, vectors, LambOptions(lr).weight_decay(decay));
  }
  TORCH_CHECK(options.optimizer == "adafactor", "--optimizer: expected one of the list, got ",
              options.optimizer);
  return make<Adafactor>(matrices, vectors, AdafactorOptions(lr).weight_decay(decay));
}

}  // namespace zero::examples
