// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Trainers as people write them, with ZeroOptions::micro_batches: two optimizers at once (a GAN),
// and layers that keep something from one pass to the next.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adam.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/training/same_bits_run.h"

namespace zero {
namespace {

constexpr int64_t kMicroBatches = 6;
constexpr int kSteps = 4;

void fill(torch::nn::Module& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& p : module.parameters()) p.copy_(random_tensor(p.sizes(), seed++) * 0.3);
}

std::unique_ptr<ZeroOptimizer> adam(torch::nn::Module& module, const Group& group) {
  return std::make_unique<ZeroOptimizer>(
      module, std::make_unique<torch::optim::Adam>(module.parameters(), 0.01), group,
      ZeroOptions().bucket_bytes(2000).micro_batches(kMicroBatches));
}

void add_masters(Record& record, ZeroOptimizer& optimizer, const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    record.push_back({item.key(), optimizer.master(item.value())});
  }
}

// The generator has running statistics.
struct Gan {
  explicit Gan(const Group& group) {
    fill(*generator, 1);
    fill(*discriminator, 50);
    g = adam(*generator, group);
    d = adam(*discriminator, group);
  }
  at::Tensor fake(int step, int64_t number) {
    return generator->forward(random_tensor({8, 5}, 100 * step + number));
  }
  void train_discriminator(int step) {
    for (const int64_t number : d->micro_batches()) {
      const at::Tensor real = random_tensor({8, 7}, 5000 + 100 * step + number);
      d->backward(at::softplus(discriminator->forward(fake(step, number).detach())).mean() +
                  at::softplus(-discriminator->forward(real)).mean());
    }
    d->step();
  }
  void train_generator(int step) {
    for (const int64_t number : g->micro_batches()) {
      g->backward(at::softplus(-discriminator->forward(fake(step, number))).mean());
    }
    g->step();
  }
  void freeze_discriminator(bool frozen) {
    for (at::Tensor& p : discriminator->parameters()) p.requires_grad_(!frozen);
  }

  torch::nn::Sequential generator{torch::nn::Linear(5, 40), torch::nn::BatchNorm1d(40),
                                  torch::nn::Linear(40, 7)};
  torch::nn::Sequential discriminator{torch::nn::Linear(7, 30), torch::nn::BatchNorm1d(30),
                                      torch::nn::Linear(30, 1)};
  std::unique_ptr<ZeroOptimizer> g, d;
};

TEST(SameBitsModelsTest, AGanThatFreezesItsDiscriminator) {
  std::vector<Record> records;
  for (const int world_size : {1, 2, 3, 4}) {
    Record record;
    run_ranks(world_size, [&](const Group& group) {
      Gan gan(group);
      Record own;
      for (int step = 0; step < kSteps; ++step) {
        gan.train_discriminator(step);
        gan.freeze_discriminator(true);
        gan.train_generator(step);
        gan.freeze_discriminator(false);
        add_masters(own, *gan.d, *gan.discriminator);
        add_masters(own, *gan.g, *gan.generator);
      }
      if (group.rank() == 0) record = own;
    });
    records.push_back(record);
    EXPECT_EQ(first_difference(records[0], record), "") << world_size << " ranks";
  }
}

TEST(SameBitsModelsTest, AGanThatDoesNotIsToldToAndGoesOn) {
  run_ranks(2, [](const Group& group) {
    Gan gan(group);
    gan.train_discriminator(0);
    expect_words(error_of([&] { gan.train_generator(0); }),
                 {"gradient of ", "requires_grad_(false)", "rank "});
    // The gradient was one of the discriminator's optimizer, whose next call says so once.
    expect_words(error_of([&] { gan.d->step(); }), {"requires_grad_(false)"});
    gan.d->zero_grad();
    gan.g->zero_grad();
    gan.freeze_discriminator(true);
    gan.train_generator(0);
    gan.freeze_discriminator(false);
    gan.train_discriminator(1);
    EXPECT_EQ(gan.d->stats().steps, 2);
    EXPECT_EQ(gan.g->stats().steps, 1);
  });
}

// Blocks of the norm, of 256 elements, do not fill up parameters that are smaller.
TEST(SameBitsModelsTest, SmallParametersSendAsManyBytesAsWithoutMicroBatches) {
  const auto sent = [](int64_t micro_batches) {
    int64_t bytes = 0;
    run_ranks(2, [&](const Group& group) {
      torch::nn::Sequential model;
      for (int i = 0; i < 50; ++i) {
        model->push_back(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
      }
      ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::Adam>(model->parameters()),
                              group, ZeroOptions().micro_batches(micro_batches));
      optimizer.backward(model->forward(at::ones({2, 8})).sum());
      optimizer.step();
      const Stats stats = optimizer.stats();
      if (group.rank() == 0) {
        bytes = stats.data.exchange_bytes_sent + stats.data.gather_bytes_sent;
      }
    });
    return bytes;
  };
  EXPECT_LE(sent(2), sent(0) * 11 / 10);
}

// A language model whose state goes from each step to the next, apart for each number.
struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(23, 9))),
        lstm(register_module("lstm",
                             torch::nn::LSTM(torch::nn::LSTMOptions(9, 14).batch_first(true)))),
        head(register_module("head", torch::nn::Linear(14, 23))) {
    fill(*this, 7);
  }
  torch::nn::Embedding embedding;
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};
TORCH_MODULE(Recurrent);

TEST(SameBitsModelsTest, ARecurrentModelWithAStateForEachNumber) {
  std::vector<Record> records;
  for (const int world_size : {1, 2, 3, 4}) {
    Record record;
    run_ranks(world_size, [&](const Group& group) {
      Recurrent model;
      const auto optimizer = adam(*model, group);
      std::vector<std::tuple<at::Tensor, at::Tensor>> states(
          kMicroBatches, {at::zeros({1, 3, 14}), at::zeros({1, 3, 14})});
      Record own;
      for (int step = 0; step < kSteps; ++step) {
        for (const int64_t number : optimizer->micro_batches()) {
          const at::Tensor words =
              at::remainder(at::arange(24).view({3, 8}) * (number + 2) + step, 23);
          auto [output, state] =
              model->lstm(model->embedding(words.narrow(1, 0, 7)), states[number]);
          states[number] = {std::get<0>(state).detach(), std::get<1>(state).detach()};
          optimizer->backward(at::cross_entropy_loss(model->head(output).reshape({-1, 23}),
                                                     words.narrow(1, 1, 7).reshape({-1})));
        }
        own.push_back({"norm", optimizer->clip_grad_norm_(0.5)});
        optimizer->step();
        add_masters(own, *optimizer, *model);
      }
      if (group.rank() == 0) record = own;
    });
    records.push_back(record);
    EXPECT_EQ(first_difference(records[0], record), "") << world_size << " ranks";
  }
}

}  // namespace
}  // namespace zero
