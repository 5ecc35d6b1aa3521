// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/checkpoint_run.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "zero/checkpoint/format/safetensors.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/segment_tensors.h"

namespace zero {
namespace {

at::Tensor number(double value) {
  return at::full({1}, value, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace

CheckpointRun::CheckpointRun(const Training& training, const Group& group, uint64_t seed)
    : model(seed, training.width), training_(training) {
  model->to(training.dtype);
  {
    at::NoGradGuard no_grad;
    model->counter.fill_(static_cast<int64_t>(seed));
  }
  optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(training.inner, *model), group,
                                              training.options);
}

void CheckpointRun::train(int first, int last) {
  const Training& t = training_;
  for (int step = first; step < last; ++step) {
    // A schedule, so that options are worth saving.
    for (auto& g : optimizer->param_groups()) g.options().set_lr(g.options().get_lr() * 0.95);
    for (int micro = 0; micro < t.micro_batches; ++micro) {
      const uint64_t seed = 1000u * static_cast<unsigned>(step) +
                            10u * static_cast<unsigned>(micro) +
                            static_cast<unsigned>(optimizer->group().rank());
      const at::Tensor x = random_tensor({3, 17}, seed).to(t.dtype);
      const at::Tensor target = random_tensor({3, 11}, seed + 7000).to(t.dtype);
      optimizer->backward(model->loss(x, target, t.use(optimizer->group().rank(), step, micro)));
    }
    if (t.max_norm) optimizer->clip_grad_norm_(*t.max_norm);
    optimizer->step();
    optimizer->wait_for(*model);  // with overlap_gather, rows are still under way
    at::NoGradGuard no_grad;
    model->counter.add_(1);
  }
}

Snapshot CheckpointRun::snapshot() {
  at::NoGradGuard no_grad;
  Snapshot result;
  const Plan& plan = optimizer->plan();
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) {
      result["frozen/" + item.key()] = item.value().detach().clone();
      continue;
    }
    result["working/" + item.key()] = item.value().detach().clone();
    result["master/" + item.key()] = optimizer->master(item.value());
    names.push_back(item.key());
    tensors.push_back(item.value());
  }
  for (const auto& item : model->named_buffers()) {
    result["buffer/" + item.key()] = item.value().clone();
  }
  // State is gathered by sum: every element lives on one rank and is zero elsewhere.
  const auto link = optimizer->group().make_communicator("snapshot", Purpose::kControl);
  const char* kinds[] = {"exp_avg", "exp_avg_sq",   "momentum_buffer", "square_avg",  "sum",
                         "step",    "value:step",   "value:product",   "value:moved", "momentum",
                         "sign",    "scalar:power", "row_var",         "col_var",     "variance"};
  std::map<std::string, at::Tensor> full;
  for (size_t p = 0; p < names.size(); ++p) {
    for (const char* kind : kinds) {
      full[std::string(kind) + "/" + names[p]] =
          at::zeros({tensors[p].numel()}, at::TensorOptions().dtype(at::kDouble));
    }
    full["present/" + names[p]] = at::zeros({1}, at::TensorOptions().dtype(at::kDouble));
  }
  const auto& groups = optimizer->inner().param_groups();
  std::vector<size_t> next(groups.size(), 0);
  std::map<const void*, Segment> segments;
  for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
    for (const Segment& s : plan.segments(b, optimizer->group().rank())) {
      // In the order in which ShardOptimizer gives segments to the inner optimizer.
      size_t g = 0;
      for (; g < groups.size(); ++g) {
        const auto& visible = optimizer->param_groups()[g].params();
        const bool here = std::any_of(visible.begin(), visible.end(), [&](const at::Tensor& t) {
          return t.is_same(tensors[s.parameter]);
        });
        if (here) break;
      }
      segments[groups[g].params()[next[g]++].unsafeGetTensorImpl()] = s;
    }
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& master : groups[g].params()) {
      const auto state = read_inner_state(optimizer->inner(), static_cast<int64_t>(g), master);
      if (!state || segments.count(master.unsafeGetTensorImpl()) == 0) continue;  // or the trap's
      const Segment& s = segments.at(master.unsafeGetTensorImpl());
      const auto part = [&](const std::string& kind) {
        return full[kind + "/" + names[s.parameter]].narrow(0, s.begin, s.numel);
      };
      full["present/" + names[s.parameter]].fill_(1);
      for (const auto& [kind, tensor] : state->tensors) {
        part(kind).copy_(elements_of(tensor, master));
      }
      for (const auto& [kind, tensor] : state->uncut) {
        part(kind).narrow(0, 0, tensor.numel()).copy_(tensor);
      }
      for (const auto& [kind, value] : state->values) part(kind).copy_(value);
    }
  }
  std::vector<at::Tensor> parts;
  for (const auto& [name, tensor] : full) parts.push_back(tensor);
  const at::Tensor sums = at::cat(parts);
  link->all_reduce_sum(sums, "snapshot").wait();
  int64_t begin = 0;
  for (auto& [name, tensor] : full) {
    tensor = sums.narrow(0, begin, tensor.numel()).clone();
    begin += tensor.numel();
    if (name.rfind("present/", 0) == 0) tensor = tensor.gt(0);
    result[name] = tensor;
  }
  for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
    const auto& options = optimizer->param_groups()[g].options();
    for (const auto& [name, value] : adapter_of(options).option_values(options)) {
      result["option/" + std::to_string(g) + "/" + name] = number(value);
    }
  }
  result["scaler/scale"] = number(optimizer->loss_scale());
  result["steps/done"] = number(static_cast<double>(optimizer->stats().steps));
  result["steps/skipped"] = number(static_cast<double>(optimizer->stats().skipped_steps));
  return result;
}

void write_snapshot(const Snapshot& snapshot, const std::string& path) {
  std::vector<TensorToWrite> tensors;
  for (const auto& item : snapshot) {
    const at::Tensor& tensor = item.second;
    tensors.push_back(
        {item.first, tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor; }});
  }
  write_safetensors_files(path, tensors, {}, /*max_file_bytes=*/0);
}

int64_t differing(const Snapshot& a, const Snapshot& b) {
  int64_t count = 0;
  for (const auto& [name, tensor] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second.sizes() != tensor.sizes() ||
        found->second.scalar_type() != tensor.scalar_type()) {
      ++count;
      continue;
    }
    const at::Tensor left = tensor.contiguous(), right = found->second.contiguous();
    const auto* l = static_cast<const char*>(left.const_data_ptr());
    const auto* r = static_cast<const char*>(right.const_data_ptr());
    const size_t size = left.element_size();
    for (size_t i = 0; i < left.nbytes(); i += size) count += std::memcmp(l + i, r + i, size) != 0;
  }
  for (const auto& item : b) count += a.count(item.first) == 0 ? 1 : 0;
  return count;
}

std::string fresh_folder(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

}  // namespace zero
