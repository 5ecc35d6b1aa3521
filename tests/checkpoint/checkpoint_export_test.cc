// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Out to Python and inference and back, and in from a run of plain torch.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/support/checkpoint_run.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"

namespace zero {
namespace {

void on_ranks(int world_size, const std::function<void(const Group&)>& body) {
  RunOptions options;
  options.transport = Transport::kMemory;
  run_ranks(world_size, body, options);
}

// Of both models: parameters and buffers of equal bits.
bool equal(OddModelImpl& a, OddModelImpl& b) {
  for (const auto& item : a.named_parameters()) {
    if (!item.value().equal(b.named_parameters()[item.key()])) return false;
  }
  return a.counter.equal(b.counter);
}

TEST(ExportTest, AModelGoesOutAndComesBackInEveryBit) {
  const std::string parent = fresh_folder("export");
  on_ranks(3, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 3);
    run.optimizer->save_checkpoint(parent + "/a");
    if (group.rank() != 0) return;
    export_model(parent + "/a", parent + "/model.safetensors");
    OddModel other(8);
    EXPECT_FALSE(equal(*run.model, *other));
    EXPECT_TRUE(import_model(parent + "/model.safetensors", *other).empty());
    EXPECT_TRUE(equal(*run.model, *other));
    EXPECT_ANY_THROW(export_model(parent + "/a", parent + "/model.safetensors"));

    export_model(parent + "/a", parent + "/half.safetensors", at::kBFloat16);
    OddModel rounded(8);
    import_model(parent + "/half.safetensors", *rounded);
    EXPECT_TRUE(rounded->trunk->weight.equal(
        run.model->trunk->weight.detach().to(at::kBFloat16).to(at::kFloat)));

    OddModel wide(8, 24);
    const at::Tensor before = wide->left->bias.detach().clone();
    EXPECT_ANY_THROW(import_model(parent + "/model.safetensors", *wide));
    EXPECT_TRUE(wide->left->bias.equal(before)) << "a refused import changed something";
    EXPECT_EQ(import_model(parent + "/model.safetensors", *wide, /*strict=*/false).size(), 4u);
    EXPECT_TRUE(wide->left->bias.equal(run.model->left->bias));
  });
}

TEST(PlainStateTest, ARunOfPlainTorchGoesOnInEveryBit) {
  const auto step = [](OddModelImpl& model, int i, const std::function<void(at::Tensor)>& use) {
    use(model.loss(random_tensor({3, 17}, 900 + i), random_tensor({3, 11}, 800 + i),
                   i % 2 ? OddModelImpl::kAll : OddModelImpl::kTrunk | OddModelImpl::kLeft));
  };
  for (Inner inner :
       {Inner::kAdamW, Inner::kSgdMomentum, Inner::kRmsprop, Inner::kAdagrad, Inner::kLion}) {
    OddModel plain(1);
    const auto optimizer = make_inner(inner, *plain);
    Snapshot at_eight;
    const auto values = [&](OddModelImpl& model) {
      Snapshot result;
      for (const auto& p : model.named_parameters()) result[p.key()] = p.value().detach().clone();
      return result;
    };
    // The sharded run starts from the plain one's model and state after 4 steps. All
    // ranks see the same batch, so that the mean of two equal gradients is exact.
    const auto plain_steps = [&](int first, int last) {
      for (int i = first; i < last; ++i) {
        optimizer->zero_grad();
        step(*plain, i, [](const at::Tensor& loss) { loss.backward(); });
        optimizer->step();
      }
    };
    plain_steps(0, 4);
    on_ranks(2, [&](const Group& group) {
      OddModel model(1);
      const auto before = make_inner(inner, *model);
      for (int i = 0; i < 4; ++i) {
        before->zero_grad();
        step(*model, i, [](const at::Tensor& loss) { loss.backward(); });
        before->step();
      }
      before->zero_grad();
      ZeroOptimizer sharded(*model, make_inner(inner, *model), group,
                            ZeroOptions().fused(false).bucket_bytes(700));
      sharded.load_plain_state(*before);
      for (int i = 4; i < 8; ++i) {
        step(*model, i, [&](const at::Tensor& loss) { sharded.backward(loss); });
        sharded.step();
      }
      if (group.rank() == 0) at_eight = values(*model);
      const auto other = make_inner(inner == Inner::kAdamW ? Inner::kAdam : Inner::kAdamW, *model);
      EXPECT_ANY_THROW(sharded.load_plain_state(*other));
    });
    plain_steps(4, 8);
    EXPECT_EQ(differing(values(*plain), at_eight), 0) << static_cast<int>(inner);
  }
}

// Python's own package reads every file, and a model takes the exported weights.
TEST(PythonTest, SafetensorsAndLoadStateDictReadWhatIsWrittenAndSaveItBack) {
  const char* python = std::getenv("ZERO_PYTHON");
  const std::string command = python != nullptr ? python : "python3";
  if (std::system((command + " -c 'import safetensors.torch, torch' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << command << " has no safetensors and torch; set ZERO_PYTHON to one that has";
  }
  const std::string parent = fresh_folder("python");
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string folder = parent + "/" + c10::toString(dtype);
    double sum = 0;
    on_ranks(2, [&](const Group& group) {
      Training t;
      t.dtype = dtype;
      CheckpointRun run(t, group, 1);
      run.train(0, 3);
      run.optimizer->save_checkpoint(folder);
      if (group.rank() != 0) return;
      export_model(folder, folder + ".safetensors");
      for (const auto& p : run.model->parameters()) sum += p.to(at::kDouble).sum().item<double>();
    });
    const std::string script = "tests/checkpoint/read_checkpoint.py";
    EXPECT_EQ(std::system((command + " " + script + " " + folder + " " + folder + ".safetensors " +
                           std::to_string(sum))
                              .c_str()),
              0);
    OddModel exported(8), returned(9);
    for (OddModelImpl* model : {exported.get(), returned.get()}) model->to(dtype);
    import_model(folder + ".safetensors", *exported);
    import_model(folder + ".safetensors.python", *returned);
    EXPECT_TRUE(equal(*exported, *returned)) << "what Python saved is not what it loaded";
  }
}

}  // namespace
}  // namespace zero
