// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/classes.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <typeinfo>

#include "zero/base/error_text.h"
#include "zero/combined_optimizer.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

std::string name_of(const torch::optim::Optimizer& optimizer) {
  const std::string name = adapter_of(optimizer).name();
  return name.empty() ? c10::demangle(typeid(optimizer).name()) : name;
}

bool has_state(const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& params) {
  return std::any_of(params.begin(), params.end(), [&](const at::Tensor& p) {
    return optimizer.state().count(p.unsafeGetTensorImpl()) != 0;
  });
}

void check_class(const torch::optim::Optimizer& optimizer, bool elementwise, bool whole) {
  TORCH_CHECK(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
              "inner optimizer: expected one that needs one parameter at a time, got LBFGS, which "
              "needs dot products over all parameters and a closure per iteration; on the "
              "parameters of one rank it would compute something else. Use ",
              known_classes());
  if (whole) return;
  const OptimizerAdapter& adapter = adapter_of(optimizer);
  TORCH_CHECK(!adapter.needs_whole_parameters(),
              "inner optimizer: expected one that treats every element by itself, got ",
              name_of(optimizer),
              ", which looks at whole parameters; on flat shards it would compute something else. "
              "Leave out the layout of its parameter groups, or make it Layout::kWholeParameters");
  TORCH_CHECK(!adapter.name().empty() || elementwise, "inner optimizer: expected ",
              known_classes(" of torch::optim"), ", got ", name_of(optimizer),
              ". If this one treats every element by itself, say so with "
              "ZeroOptions().elementwise(true); if it looks at the shape or the norm of a "
              "parameter, use ZeroOptions().layout(Layout::kWholeParameters)");
}

std::string text_of(const OptimizerAdapter::OptionValues& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    text += (text.empty() ? "" : " ") + name + " " + exact_text(value);
  }
  return text;
}

}  // namespace

std::vector<bool> needs_whole_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<bool> result;
  for (int64_t g = 0; g < std::ssize(optimizer.param_groups()); ++g) {
    result.push_back(adapter_of(optimizer, g).needs_whole_parameters());
  }
  return result;
}

std::string optimizer_name(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const CombinedOptimizer*>(&optimizer) == nullptr) return name_of(optimizer);
  std::string text;
  const torch::optim::Optimizer* last = nullptr;
  for (int64_t g = 0; g < std::ssize(optimizer.param_groups()); ++g) {
    const torch::optim::Optimizer& part = part_of(optimizer, g);
    if (&part != std::exchange(last, &part)) text += (text.empty() ? "" : " + ") + name_of(part);
  }
  return text;
}

std::string known_classes(const std::string& of_torch) {
  std::vector<std::string> torchs;
  std::string others;
  for (const OptimizerAdapter* adapter : registered_adapters()) {
    const std::string name = adapter->name();
    if (name.find("::") == std::string::npos) {
      torchs.push_back(name);
    } else {
      others += ", or " + name;
    }
  }
  std::string text;
  for (size_t i = 0; i < torchs.size(); ++i) {
    if (i > 0) text += i + 1 < torchs.size() ? ", " : " or ";
    text += torchs[i];
  }
  return text + of_torch + others;
}

void check_inner_optimizer(const torch::optim::Optimizer& optimizer, bool elementwise,
                           const std::vector<bool>& whole) {
  for (int64_t g = 0; g < std::ssize(optimizer.param_groups()); ++g) {
    const torch::optim::Optimizer& part = part_of(optimizer, g);
    check_class(part, elementwise, whole[g]);
    const torch::optim::OptimizerOptions& options = optimizer.param_groups()[g].options();
    TORCH_CHECK(typeid(options) == typeid(part.defaults()), "parameter group ", g,
                ": expected options of the class that ", name_of(part), " reads, got ",
                c10::demangle(typeid(options).name()), "; give set_options() that class");
    // Segments would have to get such state, which only the class itself can make.
    TORCH_CHECK(!adapter_of(part).name().empty() ||
                    !has_state(optimizer, optimizer.param_groups()[g].params()),
                "inner optimizer: expected no state yet, got some of ", name_of(part),
                ": it has stepped or was loaded, or its constructor makes state, as that of "
                "Adagrad does for every class that is derived from it. Make a new one, or make "
                "the state in step()");
  }
  check_options(optimizer.param_groups());
  for (const auto& item : optimizer.state()) {
    TORCH_CHECK(item.second && adapter_of(*item.second).is_unused(*item.second),
                "inner optimizer: expected no state yet, got ", optimizer.state().size(),
                " entries: it has stepped or was loaded. Make a new one; to continue a run, use "
                "load_checkpoint()");
  }
}

void check_parameter(const torch::optim::Optimizer& optimizer, int64_t group,
                     const torch::optim::OptimizerOptions& options, const at::Tensor& parameter,
                     const std::string& name) {
  try {
    adapter_of(optimizer, group).check_parameter(options, parameter);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "parameter ", name, ": ", error_text(error));
  }
}

void check_options(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const torch::optim::OptimizerOptions& options = groups[g].options();
    const OptimizerAdapter& adapter = adapter_of(options);
    for (const auto& [name, value] : adapter.step_values(options)) {
      TORCH_CHECK(!std::isnan(value) && (name != "lr" || std::isfinite(value)), "parameter group ",
                  g, ": expected a number as ", name, ", got ", value,
                  "; set it in param_groups()[", g, "].options()");
    }
    try {
      adapter.check_options(options);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "parameter group ", g, ": ", error_text(error));
    }
  }
}

void make_initial_state(torch::optim::Optimizer& optimizer, int64_t group,
                        const at::Tensor& segment) {
  auto state = adapter_of(optimizer, group).initial_state(optimizer, group, segment);
  if (state) optimizer.state()[segment.unsafeGetTensorImpl()] = std::move(state);
}

std::string exact_text(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

std::string options_text(const torch::optim::OptimizerOptions& options) {
  return text_of(adapter_of(options).option_values(options));
}

std::string step_options_text(const torch::optim::OptimizerOptions& options) {
  return text_of(adapter_of(options).step_values(options));
}

}  // namespace zero
