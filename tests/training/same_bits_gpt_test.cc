// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The byte-level GPT of the examples, with dropout, dropped layers, clipping and a skipped step,
// has the same masters, working parameters and moments in every step whatever the optimizer, on
// every number of ranks and machines. ZERO_COMBINATIONS=all trains 40 steps on all of them, or as
// many as ZERO_STEPS says, and prints a hash of each run.
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "examples/train_gpt/byte_dataset.h"
#include "examples/train_gpt/gpt.h"
#include "tests/training/same_bits_run.h"

namespace zero {
namespace {

constexpr int64_t kMicroBatches = 12;
constexpr int64_t kSequences = 1;  // of a micro-batch
constexpr int64_t kContext = 24;
constexpr double kDropout = 0.2;

// The generator of random numbers is one for all ranks, which are threads.
std::mutex random_numbers;

const examples::ByteDataset& text() {
  static const examples::ByteDataset data(
      {.paths = {"examples/train_gpt"}, .context = kContext, .seed = 1});
  return data;
}

struct ByteGpt : SameBitsModel {
  explicit ByteGpt(c10::ScalarType dtype) {
    const std::lock_guard<std::mutex> lock(random_numbers);
    torch::manual_seed(1);
    gpt = register_module(
        "gpt",
        examples::Gpt(examples::GptOptions{
            .context = kContext, .layers = 2, .width = 32, .heads = 2, .dropout = kDropout}));
    gpt->to(dtype);
    values = gpt->parameters();
  }

  at::Tensor loss_of(const SameBitsCase& c, int step, int64_t number) const override {
    const auto [inputs, targets] = text().training_sequences(step, number * kSequences, kSequences);
    const at::Tensor logits = forward(inputs, step, number);
    const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
    const bool bad = step == c.bad_step && number == c.micro_batches / 2;
    return bad ? loss * std::numeric_limits<double>::infinity() : loss;
  }

  // GptImpl::forward() without the layers that this micro-batch drops. In every fourth step all
  // micro-batches drop the second layer.
  at::Tensor forward(const at::Tensor& tokens, int step, int64_t number) const {
    const auto parts = gpt->named_children();
    const auto apply = [&]<typename Layer>(const char* name, const at::Tensor& x) {
      return parts[name]->as<Layer>()->forward(x);
    };
    const std::lock_guard<std::mutex> lock(random_numbers);
    torch::manual_seed(static_cast<uint64_t>(1000 * step + number));
    at::Tensor x =
        apply.operator()<torch::nn::EmbeddingImpl>("token_embedding", tokens) +
        apply.operator()<torch::nn::EmbeddingImpl>("position_embedding", at::arange(kContext));
    x = at::dropout(x, kDropout, /*train=*/true);
    const auto blocks = parts["blocks"]->children();
    for (size_t i = 0; i < blocks.size(); ++i) {
      const bool dropped = i == 1 && (step % 4 == 3 || (number + step) % 3 == 1);
      if (!dropped) x = blocks[i]->as<examples::GptBlockImpl>()->forward(x);
    }
    x = apply.operator()<torch::nn::LayerNormImpl>("norm", x);
    return apply.operator()<torch::nn::LinearImpl>("head", x).to(at::kFloat);
  }

  mutable examples::Gpt gpt = nullptr;
};

// Where and how the same training runs.
struct Place {
  const char* name;
  int ranks;
  int ranks_per_machine = 0;  // 0: all
  int stage = 2;
  Layout layout = Layout::kContiguous;
  Wire wire = Wire::kGloo;
};

constexpr Place kPlaces[] = {
    {.name = "2 x 2, stage 1, Gloo", .ranks = 4, .ranks_per_machine = 2, .stage = 1},
    {.name = "3, per parameter, shared memory",
     .ranks = 3,
     .layout = Layout::kPerParameter,
     .wire = Wire::kShared},
    {.name = "2, Gloo", .ranks = 2},
    {.name = "2, stage 1, per parameter, in memory",
     .ranks = 2,
     .stage = 1,
     .layout = Layout::kPerParameter,
     .wire = Wire::kMemory},
    {.name = "3, stage 1, collectives of the backend",
     .ranks = 3,
     .stage = 1,
     .wire = Wire::kNative},
    {.name = "1 x 4, shared memory", .ranks = 4, .wire = Wire::kShared},
    {.name = "2 x 2, per parameter, shared memory",
     .ranks = 4,
     .ranks_per_machine = 2,
     .layout = Layout::kPerParameter,
     .wire = Wire::kShared},
    {.name = "4 x 1, Gloo", .ranks = 4, .ranks_per_machine = 1},
    {.name = "6, in memory", .ranks = 6, .wire = Wire::kMemory},
    {.name = "2 x 3, stage 1, Gloo", .ranks = 6, .ranks_per_machine = 3, .stage = 1},
    {.name = "2 x 3, per parameter, collectives of the backend",
     .ranks = 6,
     .ranks_per_machine = 3,
     .layout = Layout::kPerParameter,
     .wire = Wire::kNative},
    {.name = "8, stage 1, shared memory", .ranks = 8, .stage = 1, .wire = Wire::kShared},
    {.name = "8, Gloo", .ranks = 8},
};

struct Training {
  const char* name;
  Inner inner;
  c10::ScalarType dtype = at::kFloat;
};

// So that a failure does not print bytes.
void PrintTo(const Training& training, std::ostream* out) { *out << training.name; }

class SameBitsGpt : public ::testing::TestWithParam<Training> {};
INSTANTIATE_TEST_SUITE_P(
    Runs, SameBitsGpt,
    ::testing::Values(
        Training{"AdamW", Inner::kAdamW}, Training{"AdamWInBFloat16", Inner::kAdamW, at::kBFloat16},
        Training{"Sgd", Inner::kSgdMomentum},
        Training{"SgdInBFloat16", Inner::kSgdMomentum, at::kBFloat16},
        Training{"Lion", Inner::kLion}, Training{"LionInBFloat16", Inner::kLion, at::kBFloat16},
        Training{"Muon", Inner::kMuon}, Training{"MuonInBFloat16", Inner::kMuon, at::kBFloat16},
        Training{"Lamb", Inner::kLamb}, Training{"LambInBFloat16", Inner::kLamb, at::kBFloat16},
        Training{"Adafactor", Inner::kAdafactor},
        Training{"AdafactorInBFloat16", Inner::kAdafactor, at::kBFloat16}),
    [](const auto& info) { return info.param.name; });

std::string hash_of(const Record& record) {
  const auto state = std::make_unique<XXH3_state_t>();  // aligned to 64 bytes
  XXH3_128bits_reset(state.get());
  for (const NamedValue& v : record) {
    const at::Tensor bytes = v.value.contiguous();
    XXH3_128bits_update(state.get(), bytes.const_data_ptr(), bytes.nbytes());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  char text[40];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text;
}

TEST_P(SameBitsGpt, OnEveryNumberOfRanksAndMachines) {
  const Training& training = GetParam();
  const char* const wanted = std::getenv("ZERO_COMBINATIONS");
  const bool all = wanted != nullptr && std::string(wanted) == "all";
  const char* const steps = std::getenv("ZERO_STEPS");
  SameBitsCase c{
      .name = training.name,
      .micro_batches = kMicroBatches,
      .inner = training.inner,
      .dtype = training.dtype,
      .max_norm = 0.5,
      .options = ZeroOptions().bucket_bytes(16 << 10),
      .bad_step = 2,
      .steps = steps != nullptr ? std::atoi(steps)
               : all            ? 40
                                : 4,
      .make_model = [](const SameBitsCase& of) { return std::make_unique<ByteGpt>(of.dtype); }};
  const auto show = [&](const std::string& where, const Record& run) {
    if (all) std::printf("%-20s %-50s %s\n", training.name, where.c_str(), hash_of(run).c_str());
    std::fflush(stdout);
  };
  const Record one = run_same_bits(c, 1);
  show("1", one);
  // One of the first two, by dtype.
  const size_t first = !all && training.dtype == at::kBFloat16 ? 1 : 0;
  const size_t end = all ? std::size(kPlaces) : first + 1;
  for (size_t i = first; i < end; ++i) {
    const Place& place = kPlaces[i];
    c.options.stage(place.stage).layout(place.layout);
    c.ranks_per_machine = place.ranks_per_machine;
    c.wire = place.wire;
    const Record run = run_same_bits(c, place.ranks);
    show(place.name, run);
    EXPECT_EQ(first_difference(one, run), "") << place.name;
  }
  if (training.inner == Inner::kAdamW || training.inner == Inner::kSgdMomentum) {
    const Record plain = run_plain(c);
    show("plain torch, without moments", plain);
    expect_plain_bits(plain, one);
  }
}

}  // namespace
}  // namespace zero
