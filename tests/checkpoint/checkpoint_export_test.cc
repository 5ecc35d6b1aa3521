// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Out to Python and inference and back, and in from a run of plain torch.
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_program.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/combined_optimizer.h"
#include "zero/muon.h"

namespace {

std::function<void()> before_naming;
std::vector<std::string> on_disk;  // by fsync(); and "-> name" for each rename
// Of a file system: flags of a rename, and second names of a file.
bool has_flags = true, has_links = true;

void call_before_naming(const char* to) {
  on_disk.push_back(std::string("-> ") + to);
  if (before_naming) std::exchange(before_naming, nullptr)();
}

}  // namespace

// These take the place of the C library's in the whole program.
extern "C" int rename(const char* from, const char* to) noexcept {
  call_before_naming(to);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                         unsigned int flags) noexcept {
  if (flags != 0 && !has_flags) {
    errno = EINVAL;
    return -1;
  }
  call_before_naming(to);
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

extern "C" int link(const char* from, const char* to) noexcept {
  if (!has_links) {
    errno = EPERM;
    return -1;
  }
  call_before_naming(to);
  return static_cast<int>(syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
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

// Of both models: parameters and buffers of equal bits.
bool equal(OddModelImpl& a, OddModelImpl& b) {
  for (const auto& item : a.named_parameters()) {
    if (!item.value().equal(b.named_parameters()[item.key()])) return false;
  }
  return a.counter.equal(b.counter);
}

TEST(ExportTest, AModelGoesOutAndComesBackInEveryBit) {
  const std::string parent = fresh_folder("export");
  run_ranks(3, [&](const Group& group) {
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

    export_model(parent + "/a", parent + "/half.safetensors", ExportOptions().dtype(at::kBFloat16));
    OddModel rounded(8);
    load_weights(*rounded, parent + "/half.safetensors");
    EXPECT_TRUE(rounded->trunk->weight.equal(
        run.model->trunk->weight.detach().to(at::kBFloat16).to(at::kFloat)));
  });
}

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file()) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(ExportTest, AnExportIsOnDiskUnderItsNameAndReplacesNoOther) {
  const std::string parent = fresh_folder("exports");
  const std::string path = parent + "/model.safetensors", another = "another program's";
  run_ranks(1, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(parent + "/a");
  });
  before_naming = [&] { std::ofstream(path) << another; };
  EXPECT_ANY_THROW(export_model(parent + "/a", path));
  EXPECT_EQ(content(path), another);
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
  EXPECT_EQ(files_in(parent).size(), 1u) << "something is left of the exports that failed";
}

// NFS has links alone, and some mounts of a bucket have neither.
TEST(ExportTest, AnExportIsWrittenWhereRenamesHaveNoFlags) {
  const std::string parent = fresh_folder("no_flags");
  run_ranks(1, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(parent + "/a");
  });
  has_flags = false;
  for (const bool links : {true, false}) {
    has_links = links;
    const std::string path = parent + (links ? "/links" : "/none");
    EXPECT_EQ(export_model(parent + "/a", path), path);
    OddModel model(8);
    load_weights(*model, path);
    EXPECT_ANY_THROW(export_model(parent + "/a", path));
  }
  has_flags = has_links = true;
  EXPECT_EQ(files_in(parent), (std::vector<std::string>{"links", "none"}));
}

TEST(ExportTest, ALimitMakesSeveralFilesWithAnIndex) {
  const std::string parent = fresh_folder("several");
  const std::string path = parent + "/model.safetensors", index = path + ".index.json";
  OddModel trained(1);
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 2);
    run.optimizer->save_checkpoint(parent + "/a");
    if (group.rank() != 0) return;
    at::NoGradGuard no_grad;
    for (auto& item : trained->named_parameters()) {
      item.value().copy_(run.model->named_parameters()[item.key()]);
    }
    trained->counter.copy_(run.model->counter);
  });
  constexpr int64_t kLimit = 1200;  // trunk.weight has 1564 bytes
  const ExportOptions options = ExportOptions().max_file_bytes(kLimit);
  EXPECT_EQ(export_model(parent + "/a", path, options), index);
  EXPECT_EQ(files_in(parent),
            (std::vector<std::string>{
                "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                "model.safetensors.index.json"}));
  const nlohmann::json root = nlohmann::json::parse(content(index));
  EXPECT_EQ(root.size(), 2u);
  const auto& map = root.at("weight_map");
  EXPECT_EQ(map.size(), 13u);
  EXPECT_EQ(map.at("trunk.weight"), "model-00002-of-00004.safetensors");
  EXPECT_EQ(map.at("scale"), map.at("empty"));
  uint64_t total = 0;
  for (int i = 1; i <= 4; ++i) {
    const std::string name = "model-0000" + std::to_string(i) + "-of-00004.safetensors";
    FileReader reader(parent + "/" + name);
    const SafetensorsHeader header = read_safetensors_header(reader);
    EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
    uint64_t bytes = 0;
    for (const StoredTensor& t : header.tensors) {
      EXPECT_EQ(map.at(t.name), name);
      bytes += t.end - t.begin;
    }
    EXPECT_TRUE(bytes <= kLimit || header.tensors.size() == 1) << name;
    total += bytes;
  }
  EXPECT_EQ(root.at("metadata").at("total_size"), total);
  OddModel other(8);
  load_weights(*other, index);
  EXPECT_TRUE(equal(*trained, *other));

  // Neither beside an index nor beside a file: readers would take one of the two.
  expect_words(error_of([&] { export_model(parent + "/a", path); }), {index, "exists"});
  for (const std::string& name : files_in(parent)) std::filesystem::remove(parent + "/" + name);
  EXPECT_EQ(export_model(parent + "/a", path, ExportOptions().max_file_bytes(1 << 20)), path);
  expect_words(error_of([&] { export_model(parent + "/a", path, options); }), {path, "exists"});
  expect_words(error_of([&] {
                 export_model(parent + "/a", path + "2", ExportOptions().max_file_bytes(-1));
               }),
               {"0 bytes", "-1"});
  std::filesystem::remove(path);
  expect_words(error_of([&] { export_model(parent + "/a", parent + "/model.json"); }),
               {"model.json", "ends in .json"});
  expect_words(
      error_of([&] { export_model(parent + "/a", parent + "/\xff.safetensors", options); }),
      {"UTF-8"});

  // Another program's file is there before, or appears between two of ours.
  const std::string third = parent + "/model-00003-of-00004.safetensors";
  std::ofstream(third) << "another";
  on_disk.clear();
  expect_words(error_of([&] { export_model(parent + "/a", path, options); }), {third, "exists"});
  EXPECT_TRUE(on_disk.empty()) << "something was written";
  std::filesystem::remove(third);
  before_naming = [&] { std::ofstream(third) << "another"; };
  expect_words(error_of([&] { export_model(parent + "/a", path, options); }), {third, "exists"});
  EXPECT_EQ(files_in(parent), std::vector<std::string>{"model-00003-of-00004.safetensors"});
  EXPECT_EQ(content(third), "another");
  std::filesystem::remove(third);
  on_disk.clear();
  export_model(parent + "/a", path, options);
  // All content is on disk, then all names but that of the index, then that.
  const std::string folder = std::filesystem::canonical(parent);
  ASSERT_EQ(on_disk.size(), 12u);
  for (int i = 0; i < 5; ++i) EXPECT_NE(on_disk[i].find("saving"), std::string::npos);
  for (int i = 5; i < 9; ++i) EXPECT_EQ(on_disk[i].rfind("-> " + parent + "/model-0000", 0), 0u);
  EXPECT_EQ(std::vector<std::string>(on_disk.begin() + 9, on_disk.end()),
            (std::vector<std::string>{folder, "-> " + index, folder}));

  // The least limit.
  const std::string small = parent + "/small.safetensors";
  EXPECT_EQ(export_model(parent + "/a", small, ExportOptions().max_file_bytes(1)),
            small + ".index.json");
  EXPECT_EQ(nlohmann::json::parse(content(small + ".index.json")).at("weight_map").at("scale"),
            "small-00001-of-00013.safetensors");
}

struct OddDtypes : torch::nn::Module {
  OddDtypes() {
    register_parameter("weight", at::ones({3}));
    register_parameter("quantized", at::ones({4}).to(at::kFloat8_e4m3fn), /*requires_grad=*/false);
    register_buffer("rotary", at::view_as_complex(random_tensor({5, 3, 2}, 1)));
    register_buffer("wide", at::view_as_complex(random_tensor({2}, 2).to(at::kDouble)));
    register_buffer("small", at::ones({4}).to(at::kFloat8_e4m3fn));
  }
};

TEST(ExportTest, ComplexBuffersGoOutAsPairsAndOtherDtypesAreRefusedOrSkipped) {
  const std::string parent = fresh_folder("dtypes"), path = parent + "/model.safetensors";
  const OddDtypes trained;
  run_ranks(1, [&](const Group& group) {
    OddDtypes model;
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::SGD>(model.parameters(), 0.1),
                            group);
    optimizer.save_checkpoint(parent + "/a");
  });
  expect_words(error_of([&] { export_model(parent + "/a", path); }),
               {"frozen quantized", "Float8_e4m3fn", "dtype()"});
  const ExportOptions floats = ExportOptions().dtype(at::kFloat);
  expect_words(error_of([&] { export_model(parent + "/a", path, floats); }),
               {"buffer small", "Float8_e4m3fn", "skip_unsupported(true)"});
  expect_words(error_of([&] {
                 export_model(parent + "/a", path,
                              ExportOptions().dtype(at::kFloat8_e4m3fn).skip_unsupported(true));
               }),
               {"ExportOptions::dtype", "floating point", "Float8_e4m3fn"});
  EXPECT_TRUE(files_in(parent).empty());
  export_model(parent + "/a", path + "2", ExportOptions(floats).skip_unsupported(true));
  OddDtypes converted;
  const auto frozen = converted.named_parameters()["quantized"];
  frozen.zero_();
  load_weights(converted, path + "2", WeightOptions().allow_missing(true));
  EXPECT_TRUE(frozen.to(at::kFloat).equal(at::ones({4})));
  export_model(parent + "/a", path, ExportOptions().skip_unsupported(true));
  FileReader reader(path);
  const SafetensorsHeader header = read_safetensors_header(reader);
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.find("rotary")->dtype, at::kFloat);
  EXPECT_EQ(header.find("rotary")->shape, (std::vector<int64_t>{5, 3, 2}));
  EXPECT_EQ(header.find("wide")->dtype, at::kDouble);
  EXPECT_EQ(header.find("wide")->shape, std::vector<int64_t>{2});
  OddDtypes other;
  for (at::Tensor& buffer : other.buffers()) buffer.zero_();
  load_weights(other, path, WeightOptions().allow_missing(true));
  for (const char* name : {"rotary", "wide"}) {
    EXPECT_TRUE(other.named_buffers()[name].equal(trained.named_buffers()[name])) << name;
  }
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
    run_ranks(2, [&](const Group& group) {
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

bool python_has(const std::string& modules) {
  return std::system((python() + " -c 'import " + modules + "' 2>/dev/null").c_str()) == 0;
}

// Python's own package reads every file, and a model takes the exported weights.
// Options and groups are the ZeroOptimizer's: the class of its state says whose a parameter is.
TEST(PlainStateTest, TheGroupsOfAClassMayBeOthers) {
  run_ranks(1, [&](const Group& group) {
    torch::nn::Module model;
    const at::Tensor a = model.register_parameter("a", random_tensor({4, 6}, 1));
    const at::Tensor b = model.register_parameter("b", random_tensor({6, 4}, 2));
    const at::Tensor c = model.register_parameter("c", random_tensor({5}, 3));
    using Tensors = std::vector<at::Tensor>;
    const auto make = [](const std::vector<Tensors>& of_muon, const Tensors& others) {
      std::vector<torch::optim::OptimizerParamGroup> groups(of_muon.begin(), of_muon.end());
      std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
      parts.push_back(std::make_unique<Muon>(groups));
      parts.push_back(std::make_unique<torch::optim::AdamW>(others));
      return std::make_unique<CombinedOptimizer>(std::move(parts));
    };
    const auto plain = make({{a, b}}, {c});
    (a.pow(2).sum() + b.pow(2).sum() + c.pow(2).sum()).backward();
    plain->step();
    plain->zero_grad();
    {
      ZeroOptimizer sharded(model, make({{a}, {b}}, {c}), group);
      sharded.load_plain_state(*plain);
      const auto momentum = [](const torch::optim::Optimizer& of, const at::Tensor& p) {
        const auto& state = *of.state().at(p.unsafeGetTensorImpl());
        return static_cast<const MuonParamState&>(state).momentum_buffer();
      };
      const torch::optim::Optimizer& inner = sharded.inner();
      const at::Tensor& master = inner.param_groups()[1].params().at(0);
      EXPECT_TRUE(momentum(inner, master).equal(momentum(*plain, b)));
    }
    ZeroOptimizer sharded(model, make({{a}}, {b, c}), group);
    expect_words(error_of([&] { sharded.load_plain_state(*plain); }),
                 {"parameter b", "expected state of AdamW", "got that of zero::Muon"});
  });
}

TEST(PythonTest, SafetensorsAndLoadStateDictReadWhatIsWrittenAndSaveItBack) {
  const std::string command = python();
  if (!python_has("safetensors.torch, torch")) {
    GTEST_SKIP() << command << " has no safetensors and torch; set ZERO_PYTHON to one that has";
  }
  const std::string parent = fresh_folder("python");
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string folder = parent + "/" + c10::toString(dtype);
    double sum = 0;
    run_ranks(2, [&](const Group& group) {
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
  run_ranks(2, [&](const Group& group) {
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
    std::filesystem::create_directory(folder + "/several");
    export_model(folder + "/checkpoint", folder + "/several/model.safetensors",
                 ExportOptions().max_file_bytes(4000));
    EXPECT_GT(files_in(folder + "/several").size(), 3u);
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
