// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Out to Python and inference and back, and in from a run of plain torch.
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/weights.h"

namespace {

std::function<void()> before_naming;
std::vector<std::string> on_disk;  // by fsync()

void call_before_naming() {
  if (before_naming) std::exchange(before_naming, nullptr)();
}

}  // namespace

// These take the place of the C library's in the whole program.
extern "C" int rename(const char* from, const char* to) noexcept {
  call_before_naming();
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                         unsigned int flags) noexcept {
  call_before_naming();
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

extern "C" int fsync(int file) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> guard(mutex);
  std::error_code ignored;
  on_disk.push_back(
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string());
  return static_cast<int>(syscall(SYS_fsync, file));
}

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
    load_weights(*other, parent + "/model.safetensors");
    EXPECT_TRUE(equal(*run.model, *other));
    EXPECT_ANY_THROW(export_model(parent + "/a", parent + "/model.safetensors"));

    export_model(parent + "/a", parent + "/half.safetensors", at::kBFloat16);
    OddModel rounded(8);
    load_weights(*rounded, parent + "/half.safetensors");
    EXPECT_TRUE(rounded->trunk->weight.equal(
        run.model->trunk->weight.detach().to(at::kBFloat16).to(at::kFloat)));
  });
}

std::string text_at(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ExportTest, AnExportIsOnDiskUnderItsNameAndReplacesNoOther) {
  const std::string parent = fresh_folder("exports");
  const std::string path = parent + "/model.safetensors", another = "another program's";
  on_ranks(1, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(parent + "/a");
  });
  before_naming = [&] { std::ofstream(path) << another; };
  EXPECT_ANY_THROW(export_model(parent + "/a", path));
  EXPECT_EQ(text_at(path), another);
  std::filesystem::remove(path);
  // Another call for the same file, in the middle of this one.
  before_naming = [&] { export_model(parent + "/a", path); };
  EXPECT_ANY_THROW(export_model(parent + "/a", path));
  OddModel model(8);
  load_weights(*model, path);
  std::filesystem::remove(path);
  on_disk.clear();
  export_model(parent + "/a", path);
  EXPECT_EQ(on_disk.back(), std::filesystem::canonical(parent));
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(parent)) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 1) << "something is left of the exports that failed";
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

std::string python() {
  const char* path = std::getenv("ZERO_PYTHON");
  return path != nullptr ? path : "python3";
}

bool python_has(const std::string& modules) {
  return std::system((python() + " -c 'import " + modules + "' 2>/dev/null").c_str()) == 0;
}

// Python's own package reads every file, and a model takes the exported weights.
TEST(PythonTest, SafetensorsAndLoadStateDictReadWhatIsWrittenAndSaveItBack) {
  const std::string command = python();
  if (!python_has("safetensors.torch, torch")) {
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
    load_weights(*exported, folder + ".safetensors");
    load_weights(*returned, folder + ".safetensors.python");
    EXPECT_TRUE(equal(*exported, *returned)) << "what Python saved is not what it loaded";
  }
}

// The Llama of read_weights.py, by the names that transformers gives its weights.
NamedTensors llama() {
  NamedTensors tensors;
  const auto add = [&](const std::string& name, at::IntArrayRef shape) {
    tensors.insert(name, random_tensor(shape, tensors.size()).requires_grad_());
  };
  add("model.embed_tokens.weight", {32, 16});
  for (int i = 0; i < 2; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    for (const char* name : {"q_proj", "o_proj"})
      add(layer + "self_attn." + name + ".weight", {16, 16});
    for (const char* name : {"k_proj", "v_proj"})
      add(layer + "self_attn." + name + ".weight", {8, 16});
    for (const char* name : {"gate_proj", "up_proj"})
      add(layer + "mlp." + name + ".weight", {24, 16});
    add(layer + "mlp.down_proj.weight", {16, 24});
    add(layer + "input_layernorm.weight", {16});
    add(layer + "post_attention_layernorm.weight", {16});
  }
  add("model.norm.weight", {16});
  add("lm_head.weight", {32, 16});
  return tensors;
}

TEST(PythonTest, TransformersReadsAnExportAndLoadWeightsReadsItsFiles) {
  if (!python_has("safetensors.torch, torch, transformers")) {
    GTEST_SKIP() << python() << " has no transformers; set ZERO_PYTHON to one that has";
  }
  const std::string folder = fresh_folder("transformers");
  NamedTensors trained;
  on_ranks(2, [&](const Group& group) {
    const NamedTensors tensors = llama();
    ZeroOptimizer optimizer(tensors, std::make_unique<torch::optim::SGD>(tensors.values(), 0.125),
                            group);
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& t : tensors.values()) loss = loss + t.pow(2).sum();
    optimizer.backward(loss);
    optimizer.step();
    optimizer.save_checkpoint(folder + "/checkpoint");
    if (group.rank() != 0) return;
    export_model(folder + "/checkpoint", folder + "/model.safetensors");
    for (const auto& item : tensors) trained.insert(item.key(), item.value().detach().clone());
  });
  ASSERT_EQ(std::system((python() + " tests/checkpoint/read_weights.py " + folder).c_str()), 0);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string name = dtype == at::kFloat ? "/float32" : "/bfloat16";
    const NamedTensors tensors = llama();
    load_weights(tensors, folder + name + "/model.safetensors.index.json");
    for (const auto& item : tensors) {
      EXPECT_TRUE(item.value().equal(trained[item.key()].to(dtype).to(at::kFloat))) << item.key();
    }
  }
}

}  // namespace
}  // namespace zero
