// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are processes and reach each other by NCCL, on as many GPUs as there are: ranks that
// share one state a host of their own each, so that NCCL takes sockets between them.
//
//   nccl_program sequences <ranks> <first seed> <number of seeds>
//     The programs of call_sequence_test that have that many ranks, compared with plain torch.
//   nccl_program capture <ranks> [<ranks of a machine>]
//     An iteration in a CUDA graph has the bits of one without, for each layout and stage.
//   nccl_program sums|sums_nvls <ranks>
//     What NCCL makes of fp32 values whose sum depends on the order: whether bits differ from call
//     to call, which they may with NVLS alone, and how many sums are the exact ones rounded once,
//     or those in rank order. And the time beside an exchange of the rows.
//   nccl_program stands_first <ranks>
//     The last rank stands still before the first round, in which NCCL connects.
//   nccl_program dies|dies_unseen|dies_replayed|stands|recovers <ranks>
//     In the fourth step the last rank ends, or stands still. The others have an error that names
//     it within the timeout, can end or recover, and are not ended by a watchdog of libtorch.
//     Unseen: with static_graph no rank sends control messages. Replayed: from the third step on a
//     CUDA graph has them.
//   nccl_program breaks <ranks>
//     In the fourth step NCCL's connections of the last rank end, and all ranks live. Each has an
//     error within the timeout, and goes back to the third step.
#include <ATen/Functions.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <sys/socket.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fuzz_seeds.h"
#include "tests/support/random_tensors.h"
#include "tests/training/run_sequence.h"
#include "zero/base/message_probe.h"
#include "zero/comm/backends/nccl.h"
#include "zero/errors.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kTimeout{5};
// By when all ranks have loaded cuBLAS.
constexpr seconds kLoaded{60};
// What is waited for behind an error, to see that nothing ends the process.
constexpr seconds kAfter{12};

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// The first product of a process loads cuBLAS, for 10 s and more where several ranks do it at once.
void load_cublas(c10::Device device) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::ones({8, 8}, at::TensorOptions(dtype).device(device));
    const at::Tensor weight = x.clone().requires_grad_(), bias = x[0].clone().requires_grad_();
    at::linear(x, weight, bias).sum().backward();
  }
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::device_synchronize();
}

// Before NCCL is used first.
Group init(seconds timeout, std::optional<int> ranks_per_machine = std::nullopt) {
  const auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? 0 : std::atoi(text);
  };
  // Kernels are loaded when they are first used, which can wait for a collective that runs.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  const int rank = number("RANK"), gpus = c10::cuda::device_count();
  TORCH_CHECK(gpus > 0, "expected a GPU, got none");
  if (gpus < number("WORLD_SIZE")) {
    setenv("NCCL_HOSTID", c10::str("host-", rank).c_str(), /*overwrite=*/1);
  }
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("GLOO_SOCKET_IFNAME", "lo", 0);
  InitOptions options;
  options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank % gpus));
  // No limit of time counts what loading takes: when all have met, all have loaded.
  load_cublas(*options.device);
  options.timeout = kLoaded;
  const Group loaded = init_process_group(options);
  options.timeout = timeout;
  if (ranks_per_machine) {
    options.topology = Topology::of_equal_machines(loaded.world_size(), *ranks_per_machine);
  }
  return init_process_group(options);
}

int run_sequences(int ranks, const Seeds& seeds) {
  const Group job = init(seconds(60));
  const auto folder =
      std::filesystem::temp_directory_path() / ("nccl_program-" + std::to_string(getppid()));
  const BackendFactory factory =
      default_backend_factory(job.device(), "127.0.0.1", /*nccl=*/true, /*shared_memory=*/false);
  int run = 0;
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const CallSequence sequence = draw_sequence(seed);
    if (sequence.world_size != ranks) continue;
    // Rows of 8 bits are for host memory.
    if (sequence.options.gradient_wire() != GradientWire::kDtype) continue;
    const std::string text = describe(sequence);
    print_if_aborted(&text, seconds(60));
    const Group group(
        job.store(), job.rank(), ranks, "sequence " + std::to_string(seed), factory, job.device(),
        seconds(20),
        Topology::of_equal_machines(
            ranks, sequence.ranks_per_machine > 0 ? sequence.ranks_per_machine : ranks));
    const auto own = folder / std::to_string(seed);
    std::filesystem::create_directories(own);
    try {
      run_sequence(sequence, group, own.string());
    } catch (const c10::Error& error) {
      print_if_aborted(nullptr);
      std::fprintf(stderr, "%s\nin %sof the seed %llu\n", error.what_without_backtrace(),
                   text.c_str(), static_cast<unsigned long long>(seed));
      return 1;
    }
    print_if_aborted(nullptr);
    ++run;
  }
  std::error_code ignored;  // another rank removes it too
  std::filesystem::remove_all(folder, ignored);
  std::printf("rank %d: %d sequences equal plain torch\n", job.rank(), run);
  return 0;
}

// Milliseconds of one call, on the device.
double time_of(const std::function<void()>& call) {
  constexpr int kCalls = 20;
  call();
  c10::cuda::device_synchronize();
  const auto start = steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  c10::cuda::device_synchronize();
  return 1000 * seconds_since(start) / kCalls;
}

int sums(bool nvls) {
  constexpr int64_t kRow = 1 << 20;
  constexpr int kCalls = 250;
  setenv("NCCL_NVLS_ENABLE", nvls ? "1" : "0", /*overwrite=*/1);
  const Group group = init(seconds(60));
  const int ranks = group.world_size();
  const auto backend = [&](int number) {
    return make_nccl_backend(
        c10::make_intrusive<c10d::PrefixStore>(c10::str("sums/", number), group.store()),
        group.rank(), ranks, group.device(), seconds(60));
  };
  // Multiples of 2^-31 below 2^8 with all bits of fp32, so that a sum in double is exact and one in
  // fp32 is not.
  const auto values_of = [&](int rank) {
    const auto seed = static_cast<uint64_t>(2 * rank + 1);
    const at::Tensor exponent = random_tensor({ranks * kRow}, seed).mul(8).floor();
    return random_tensor({ranks * kRow}, seed + 1).mul(at::exp2(exponent));
  };
  at::Tensor exact = at::zeros({kRow}, at::kDouble), in_order = at::zeros({kRow});
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor own = values_of(rank).narrow(0, group.rank() * kRow, kRow);
    exact += own.to(at::kDouble);
    in_order += own;
  }
  TORCH_CHECK(!at::equal(in_order, exact.to(at::kFloat)),
              "expected at least 3 ranks, whose sums depend on an order, got ", ranks);
  at::Tensor values = values_of(group.rank()).to(group.device());
  at::Tensor first = at::empty({kRow}, values.options()), sum = at::empty_like(first);
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends{backend(0)};
  const auto add = [&](at::Tensor& into) {
    backends[0]->_reduce_scatter_base(into, values)->wait();
  };
  add(first);
  int differ = 0;
  for (int more = 0; more < 4; ++more) {
    if (more > 0) backends.push_back(backend(more));
    for (int call = 0; call < kCalls; ++call) {
      add(sum);
      differ += at::equal(sum, first) ? 0 : 1;
    }
  }
  const auto others = [&](const at::Tensor& expected) {
    return static_cast<long long>(first.cpu().ne(expected).sum().item<int64_t>());
  };
  at::Tensor received = at::empty_like(values);
  std::vector<int64_t> equal;
  const double reduce = time_of([&] { add(sum); });
  const double exchange =
      time_of([&] { backends[0]->alltoall_base(received, values, equal, equal)->wait(); });
  std::printf(
      "rank %d: %d of %d calls have other bits; of %lld sums %lld are not exact, %lld not in rank "
      "order; reduce-scatter %.3f ms, all-to-all %.3f ms of %lld MiB\n",
      group.rank(), differ, 4 * kCalls, static_cast<long long>(kRow), others(exact.to(at::kFloat)),
      others(in_order), reduce, exchange, static_cast<long long>(values.nbytes() >> 20));
  for (const auto& one : backends) one->shutdown();
  return differ > 0 && !nvls ? 1 : 0;
}

torch::nn::Sequential make_model(const Group& group, c10::ScalarType dtype) {
  torch::nn::Sequential model(torch::nn::Linear(64, 129), torch::nn::Tanh(),
                              torch::nn::Linear(129, 33));
  const at::NoGradGuard no_grad;
  uint64_t seed = 1;
  for (at::Tensor& p : model->parameters()) p.copy_(random_tensor(p.sizes(), seed++).mul(0.2));
  model->to(group.device(), dtype);
  return model;
}

std::unique_ptr<torch::optim::Optimizer> make_adamw(torch::nn::Sequential& model) {
  return std::make_unique<torch::optim::AdamW>(model->parameters(), 0.01);
}

at::Tensor batch_of(const Group& group, c10::ScalarType dtype) {
  return random_tensor({16, 64}, static_cast<uint64_t>(100 + group.rank()))
      .to(group.device(), dtype);
}

void iterate(ZeroOptimizer& optimizer, torch::nn::Sequential& model, const at::Tensor& x) {
  optimizer.backward(model->forward(x).pow(2).mean());
  optimizer.clip_grad_norm_(0.5);
  optimizer.step();
}

std::vector<at::Tensor> after_six_steps(const Group& group, const ZeroOptions& options,
                                        bool captured, bool graph_lives) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  std::vector<at::Tensor> result;
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  double seconds_to_end = 0;
  {
    auto model = make_model(group, at::kBFloat16);
    auto optimizer = std::make_unique<ZeroOptimizer>(*model, make_adamw(model), group, options);
    const at::Tensor x = batch_of(group, at::kBFloat16);
    int step = 0;
    const auto next_rate = [&] {
      optimizer->param_groups().front().options().set_lr(0.01 / ++step);
    };
    for (int i = 0; i < 2; ++i) {
      next_rate();
      iterate(*optimizer, model, x);
    }
    if (captured) {
      graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      iterate(*optimizer, model, x);
      graph->capture_end();
      for (int i = 0; i < 4; ++i) {
        next_rate();
        optimizer->refresh_learning_rates();
        graph->replay();
      }
      c10::cuda::device_synchronize();
    } else {
      for (int i = 0; i < 4; ++i) {
        next_rate();
        iterate(*optimizer, model, x);
      }
    }
    for (const at::Tensor& p : model->parameters()) result.push_back(p.detach().cpu());
    {
      const auto averages = optimizer->use_ema();
      for (const at::Tensor& p : model->parameters()) result.push_back(p.detach().cpu());
    }
    if (!graph_lives) graph.reset();
    const auto start = steady_clock::now();
    optimizer.reset();
    seconds_to_end = seconds_since(start);
  }
  std::printf("rank %d: %s, ended in %.2f s%s\n", group.rank(),
              captured ? "captured" : "not captured", seconds_to_end,
              captured && graph_lives ? " while the graph lives" : "");
  std::fflush(stdout);
  return result;
}

int capture(bool graph_lives, std::optional<int> ranks_per_machine = std::nullopt) {
  const Group group = init(seconds(20), ranks_per_machine);
  int different = 0;
  for (const int64_t stage : {2, 1}) {
    for (const auto layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      const auto options =
          ZeroOptions().stage(stage).layout(layout).static_graph(true).bucket_bytes(8192).ema(
              EmaOptions().decay(0.9));
      const auto without = after_six_steps(group, options, false, graph_lives);
      const auto with = after_six_steps(group, options, true, graph_lives);
      for (size_t i = 0; i < with.size(); ++i) {
        if (!at::equal(with[i], without[i])) ++different;
      }
    }
  }
  std::printf("rank %d: %d parameters differ\n", group.rank(), different);
  return different == 0 ? 0 : 1;
}

// What of this process is a socket.
std::set<int> sockets() {
  std::set<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:")) found.insert(std::stoi(entry.path().filename().string()));
  }
  return found;
}

// Connections of NCCL, which makes those of a collective in the first one. All others are made
// before the optimizer sends gradients, or after.
struct NcclSockets {
  static inline std::mutex mutex;
  static inline std::set<int> before, made;
  static inline bool is_first = true;

  static void look(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    const bool of_bucket = what.find("gradient bucket") != std::string::npos;
    if (of_bucket && is_first) before = sockets();
    if (!of_bucket && !is_first && made.empty()) {
      std::ranges::set_difference(sockets(), before, std::inserter(made, made.end()));
    }
    is_first = is_first && !of_bucket;
  }
  static void shut_down() {
    for (const int socket : made) shutdown(socket, SHUT_RDWR);
    std::printf("%zu connections end\n", made.size());
  }
};

void stand_before_gradients(const std::string& what) {
  if (what.find("gradient bucket") == std::string::npos) return;
  message_probe = nullptr;
  std::this_thread::sleep_for(3 * kTimeout);
}

int fail(const std::string& how) {
  const bool breaks = how == "breaks", replays = how == "dies_replayed";
  if (breaks) message_probe = &NcclSockets::look;
  const Group group = init(kTimeout);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  auto model = make_model(group, at::kFloat);
  const bool recovers = how == "recovers" || breaks;
  auto options = ZeroOptions().bucket_bytes(8192);
  if (recovers) options.protect(1);
  if (how == "dies_unseen" || replays) options.static_graph(true);
  std::unique_ptr<ZeroOptimizer> optimizer;
  const at::Tensor x = batch_of(group, at::kFloat);
  const bool last = group.rank() == group.world_size() - 1;
  if (last && how == "stands_first") message_probe = &stand_before_gradients;
  auto graph = std::make_unique<at::cuda::CUDAGraph>();
  at::Tensor before;
  auto start = steady_clock::now();
  bool failed = false;
  try {
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_adamw(model), group, options);
    for (int step = 0; step < 8; ++step) {
      start = steady_clock::now();
      if (step == 3 && breaks) before = model->parameters()[0].detach().cpu();
      if (step == 3 && last && breaks) NcclSockets::shut_down();
      if (step == 3 && last && !breaks) {
        if (!replays) optimizer->backward(model->forward(x).pow(2).mean());
        if (how != "stands") std::raise(SIGKILL);
        std::this_thread::sleep_for(2 * kTimeout);
      }
      if (replays && step == 2) {
        graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
        iterate(*optimizer, model, x);
        graph->capture_end();
      }
      if (replays && step >= 2) {
        optimizer->refresh_learning_rates();
        graph->replay();
      } else {
        iterate(*optimizer, model, x);
      }
      model->parameters()[0].sum().item();  // which waits for the device
    }
  } catch (const CommunicationError& error) {
    failed = true;
    std::printf("rank %d: error after %.2f s: %s\n", group.rank(), seconds_since(start),
                error.what_without_backtrace());
    std::fflush(stdout);
  }
  if (!failed) {
    std::printf("rank %d: FAILED: expected an error, got none\n", group.rank());
    return 1;
  }
  graph.reset();
  start = steady_clock::now();
  if (recovers) {
    const auto report = optimizer->recover("run");
    std::printf("rank %d: recovered step %lld in %.2f s\n", group.rank(),
                static_cast<long long>(report.steps), seconds_since(start));
    std::fflush(stdout);
    if (breaks && (report.steps != 3 || !at::equal(model->parameters()[0].cpu(), before))) {
      std::printf("rank %d: FAILED: expected the third step and its parameters, got others\n",
                  group.rank());
      return 1;
    }
    for (int step = 0; step < 3; ++step) iterate(*optimizer, model, x);
    c10::cuda::device_synchronize();
    start = steady_clock::now();
  }
  optimizer.reset();
  std::printf("rank %d: ended in %.2f s\n", group.rank(), seconds_since(start));
  std::fflush(stdout);
  std::this_thread::sleep_for(kAfter);
  std::printf("rank %d: lives %lld s later\n", group.rank(),
              static_cast<long long>(kAfter.count()));
  return 0;
}

int run(int argc, char** argv) {
  const std::string what = argv[1];
  const int ranks = std::atoi(argv[2]);
  const auto seed = [&](int i) { return std::strtoull(i < argc ? argv[i] : "", nullptr, 10); };
  if (what == "sequences") return run_sequences(ranks, {seed(3), seed(4)});
  if (what == "sums" || what == "sums_nvls") return sums(what == "sums_nvls");
  if (what == "capture") {
    const auto ranks_per_machine = argc > 3 ? std::optional(std::atoi(argv[3])) : std::nullopt;
    return capture(/*graph_lives=*/false, ranks_per_machine);
  }
  if (what == "living_graph") return capture(/*graph_lives=*/true);
  return fail(what);
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s what ranks ...; see its source\n", argv[0]);
    return 2;
  }
  zero::LaunchOptions options;
  options.survivors_go_on = std::string(argv[1]) != "sequences";
  return zero::launch_local(
      std::atoi(argv[2]), [&] { return zero::run(argc, argv); }, options);
}
