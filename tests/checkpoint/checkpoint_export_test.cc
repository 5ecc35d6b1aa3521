// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Out to Python and inference and back, and in from a run of plain torch.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <torch/nn/modules/linear.h>
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
  EXPECT_TRUE(import_model(path, *model).empty());
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

TEST(ImportTest, ATensorOfAnUnknownDtypeIsADifferenceAndNoMore) {
  const std::string path = fresh_folder("dtypes") + "/model.safetensors";
  const auto write = [&](const std::string& weight, const std::string& other) {
    std::string header = R"({"weight":{"dtype":")" + weight +
                         R"(","shape":[1,2],"data_offsets":[0,8]},"scales":{"dtype":")" + other +
                         R"(","shape":[4],"data_offsets":[8,12]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t length = header.size();
    const float values[] = {1, 2, 0};
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(&length), sizeof(length))
        .write(header.data(), static_cast<std::streamsize>(length))
        .write(reinterpret_cast<const char*>(values), sizeof(values));
  };
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  write("F32", "F8_E4M3");
  EXPECT_ANY_THROW(import_model(path, *linear));
  EXPECT_EQ(import_model(path, *linear, /*strict=*/false).size(), 1u);
  EXPECT_EQ(linear->weight[0][1].item<float>(), 2.0f);
  write("C64", "U8");
  EXPECT_ANY_THROW(import_model(path, *linear));
  const auto differences = import_model(path, *linear, /*strict=*/false);
  ASSERT_EQ(differences.size(), 2u);
  EXPECT_NE(differences[0].find("weight: of a dtype"), std::string::npos) << differences[0];
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
