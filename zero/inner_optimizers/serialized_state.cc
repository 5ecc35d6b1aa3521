// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapter of optimizer classes that this library does not know: their state and options by
// name, through the serialize() functions that torch asks of OptimizerParamState and
// OptimizerOptions. torch can read an archive only once it is written out, so that everything here
// copies, one parameter at a time.
//
// State is tensors of the parameter's shape by their names, and single values as "value:<name>"
// (int, double, bool) and "scalar:<name>" (0-dim tensor). A tensor of another shape means something
// for the whole parameter and cannot be cut: it is refused. What a class keeps outside of state()
// is not seen, and not saved.
//
// To make state, step() of the optimizer is called with a scratch parameter of one element. Its
// groups and its state() are afterwards as before; what step() changes in members stays changed.
// load_checkpoint(), load_plain_state(), freeze(), unfreeze(), add_param_group(), resize_rows() and
// recover() make state. Options are the numbers that serialize() writes, a pair of them as
// "<name>.0" and "<name>.1"; of a class without serialize() the learning rate, if it has one.
#include <ATen/ScalarOps.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <typeindex>
#include <typeinfo>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr char kValue[] = "value:";
constexpr char kScalar[] = "scalar:";
constexpr double kExactWhole = 9007199254740992.0;  // 2^53

InputArchive reopened(OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  InputArchive result;
  result.load_from(bytes.data(), bytes.size());
  return result;
}

template <typename Serializable>
std::map<std::string, c10::IValue> named_values(const Serializable& object) {
  OutputArchive written;
  object.serialize(written);
  InputArchive archive = reopened(written);
  std::map<std::string, c10::IValue> values;
  for (const std::string& name : archive.keys()) archive.read(name, values[name]);
  return values;
}

template <typename Serializable>
void read_values(Serializable& object, const std::map<std::string, c10::IValue>& values) {
  OutputArchive written;
  for (const auto& [name, value] : values) written.write(name, value);
  InputArchive archive = reopened(written);
  object.serialize(archive);
}

// What is stored as a value.
bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

// `optimizer` with one scratch parameter and nothing else, until the end. It has a dimension, so
// that a tensor of its one element is not 0-dim as one of the whole parameter.
class Probe {
 public:
  Probe(torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& like)
      : optimizer_(optimizer),
        scratch_(
            at::zeros(std::vector<int64_t>(std::max<int64_t>(like.dim(), 1), 1), like.options())) {
    std::swap(states_, optimizer_.state());
    for (auto& g : optimizer_.param_groups()) parameters_.push_back(std::exchange(g.params(), {}));
    optimizer_.param_groups()[group].params().push_back(scratch_);
  }
  ~Probe() {
    std::swap(states_, optimizer_.state());
    for (size_t g = 0; g < parameters_.size(); ++g) {
      optimizer_.param_groups()[g].params() = std::move(parameters_[g]);
    }
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // None if the class makes none.
  std::unique_ptr<torch::optim::OptimizerParamState> new_state() {
    // Not zeros, for which some classes make none.
    scratch_.mutable_grad() = at::ones_like(scratch_);
    optimizer_.step();
    return std::move(optimizer_.state()[scratch_.unsafeGetTensorImpl()]);
  }

 private:
  torch::optim::Optimizer& optimizer_;
  at::Tensor scratch_;
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> states_;
  std::vector<std::vector<at::Tensor>> parameters_;
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor left = a.cpu().contiguous(), right = b.cpu().contiguous();
  return left.nbytes() == 0 ||
         std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

// By kind, and where `parameter` has one element, of which that is a tensor or a scalar by its
// shape, by name.
std::map<std::string, at::Tensor> by_kind(const InnerState& state, const at::Tensor& parameter) {
  const bool one = parameter.numel() == 1;
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : state.tensors) {
    result[one ? kScalar + name : name] = one ? tensor.reshape({1}) : tensor;
  }
  result.insert(state.values.begin(), state.values.end());
  return result;
}

// Numbers of pairs and other tuples, as numbers with a position. Lists are left out.
void visit_numbers(const std::string& name, c10::IValue& value,
                   const std::function<void(const std::string&, c10::IValue&)>& visit) {
  if (is_number(value)) visit(name, value);
  if (!value.isTuple()) return;
  std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
  for (size_t i = 0; i < elements.size(); ++i) {
    visit_numbers(name + "." + std::to_string(i), elements[i], visit);
  }
  value = c10::ivalue::Tuple::create(std::move(elements));
}

class SerializedAdapter : public OptimizerAdapter {
 public:
  std::string name() const override { return {}; }
  bool is_class_of(const Optimizer&) const override { return true; }
  bool is_class_of(const Options&) const override { return true; }
  bool is_class_of(const State&) const override { return true; }

  OptionValues option_values(const Options& options) const override;
  void set_option_values(Options& options, const OptionValues& values) const override;
  // All would be serialized at every step.
  OptionValues step_values(const Options& options) const override;
  bool equal_options(const Options& a, const Options& b) const override {
    return step_values(a) == step_values(b);
  }

  void visit_tensors(const State& state, const VisitTensor& visit) const override;
  InnerState read_state(const Optimizer& optimizer, const State& state,
                        const at::Tensor& parameter) const override;
  std::unique_ptr<State> make_state(Optimizer& optimizer, int64_t group,
                                    const at::Tensor& parameter, const InnerState& content,
                                    Moments moments) const override;
};

std::string type_name(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

InnerState SerializedAdapter::read_state(const Optimizer& optimizer, const State& state,
                                         const at::Tensor& parameter) const {
  at::NoGradGuard no_grad;
  InnerState result;
  std::map<std::string, c10::IValue> named;
  try {
    named = named_values(state);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "state of ", type_name(optimizer),
                ": expected a class that overrides serialize() of OptimizerParamState, got one "
                "whose serialize() throws: ",
                error_text(error));
  }
  for (const auto& [name, value] : named) {
    const std::string where = "state " + name + " of " + type_name(optimizer);
    if (value.isNone()) continue;
    if (!value.isTensor()) {
      TORCH_CHECK(is_number(value), where, ": expected a tensor, an int, a double or a bool, got ",
                  value.tagKind(), ", which cannot be cut for other numbers of ranks");
      result.values.emplace_back(kValue + name,
                                 c10::scalar_to_tensor(value.toScalar()).reshape({1}));
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) continue;
    if (tensor.dim() == 0) {
      result.values.emplace_back(kScalar + name, tensor.reshape({1}));
      continue;
    }
    TORCH_CHECK(tensor.sizes() == parameter.sizes(), where,
                ": expected one value for each element, shape ", parameter.sizes(),
                ", or a 0-dim tensor, got shape ", tensor.sizes(),
                ", which cannot be cut for other numbers of ranks");
    const bool reserved = name == "master" || name == "step" || name == "frozen" ||
                          name == "buffer" || name.rfind("zero.", 0) == 0 ||
                          name.find(':') != std::string::npos;
    TORCH_CHECK(!reserved, where,
                ": expected a tensor of another name; checkpoints use this one themselves");
    result.tensors.emplace_back(name, tensor);
  }
  return result;
}

std::unique_ptr<torch::optim::OptimizerParamState> SerializedAdapter::make_state(
    Optimizer& optimizer, int64_t group, const at::Tensor& parameter, const InnerState& content,
    Moments) const {
  at::NoGradGuard no_grad;
  const std::string name = type_name(optimizer);
  TORCH_CHECK(content.uncut.empty(), "state: expected tensors that ", name, " has, got ",
              content.uncut.front().first);
  auto state = Probe(optimizer, group, parameter).new_state();
  TORCH_CHECK(state, "state of ", name, ": expected step() to make some, got none");
  const auto present = named_values(*state);
  std::map<std::string, c10::IValue> values;
  for (const auto& [kind, tensor] : content.tensors) values[kind] = tensor.to(parameter.device());
  for (const auto& [kind, tensor] : content.values) {
    const bool scalar = kind.starts_with(kScalar);
    const std::string key = kind.substr(kind.find(':') + 1);
    if (!scalar) {
      values[key] = tensor.item();
      continue;
    }
    // Some classes count on the host, others on the device.
    const auto found = present.find(key);
    const bool known = found != present.end() && found->second.isTensor();
    // Of a 0-dim parameter that a rank held whole, the only element was stored as a scalar, too.
    const bool element = known && parameter.numel() == 1 && found->second.toTensor().dim() > 0;
    values[key] = tensor.reshape(element ? parameter.sizes() : at::IntArrayRef())
                      .to(known ? found->second.toTensor().device() : at::kCPU);
  }
  read_values(*state, values);
  const auto wanted = by_kind(content, parameter);
  std::map<std::string, at::Tensor> made;
  try {
    made = by_kind(read_state(optimizer, *state, parameter), parameter);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "state of ", name,
                ": expected serialize() to read what it wrote, got: ", error_text(error));
  }
  for (const auto& [kind, tensor] : wanted) {
    const auto found = made.find(kind);
    TORCH_CHECK(found != made.end() && same_bits(found->second, tensor), "state ", kind, " of ",
                name, ": expected serialize() to read what it wrote, got something else");
  }
  TORCH_CHECK(made.size() == wanted.size(), "state of ", name, ": expected what was stored, got ",
              made.size(), " values in place of ", wanted.size(),
              "; were its options others when it was saved?");
  return state;
}

void SerializedAdapter::visit_tensors(const State& state, const VisitTensor& visit) const {
  std::map<std::string, c10::IValue> named;
  try {
    named = named_values(state);
  } catch (const c10::Error&) {  // torch's own serialize(), which is to be overridden
    return;
  }
  for (const auto& [name, value] : named) {
    if (value.isTensor() && value.toTensor().defined()) visit(name.c_str(), value.toTensor());
  }
}

OptimizerAdapter::OptionValues SerializedAdapter::option_values(const Options& options) const {
  OptionValues result;
  try {
    for (auto& [name, value] : named_values(options)) {
      visit_numbers(name, value, [&](const std::string& number, c10::IValue& v) {
        result.emplace_back(number, v.toScalar().toDouble());
      });
    }
    return result;
  } catch (const c10::Error&) {  // torch's own serialize(), which is to be overridden
  }
  return step_values(options);
}

namespace {

std::optional<double> rate_of_getter(const torch::optim::OptimizerOptions& options) {
  return options.get_lr();
}

std::optional<double> serialized_rate(const torch::optim::OptimizerOptions& options) {
  const auto named = named_values(options);
  const auto rate = named.find("lr");
  if (rate == named.end() || !is_number(rate->second)) return std::nullopt;
  return rate->second.toScalar().toDouble();
}

}  // namespace

// The learning rate, if the class has get_lr() or serializes a number "lr". An error of torch's own
// functions costs more than many a step, so that each class throws it once.
OptimizerAdapter::OptionValues SerializedAdapter::step_values(const Options& options) const {
  constexpr std::array kWays = {rate_of_getter, serialized_rate};
  static std::mutex mutex;
  static std::map<std::type_index, size_t> ways;  // the first that does not throw
  const auto way_of = [&](size_t at_least) {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t& way = ways[std::type_index(typeid(options))];
    return way = std::max(way, at_least);
  };
  for (size_t way = way_of(0); way < kWays.size(); way = way_of(way + 1)) {
    try {
      if (const auto rate = kWays[way](options)) return {{"lr", *rate}};
    } catch (const c10::Error&) {
    }
  }
  return {};
}

void SerializedAdapter::set_option_values(Options& options, const OptionValues& values) const {
  const std::map<std::string, double> wanted(values.begin(), values.end());
  std::map<std::string, c10::IValue> named;
  try {
    named = named_values(options);
  } catch (const c10::Error&) {
    if (wanted.count("lr") != 0) options.set_lr(wanted.at("lr"));
    return;
  }
  for (auto& [name, value] : named) {
    visit_numbers(name, value, [&](const std::string& number, c10::IValue& v) {
      const auto found = wanted.find(number);
      if (found == wanted.end()) return;
      // A double of this size stands for several whole numbers, of which the present one may be the
      // one that was saved.
      if (v.isInt() && static_cast<double>(v.toInt()) != found->second) {
        TORCH_CHECK(std::abs(found->second) < kExactWhole, "option ", number,
                    ": expected a whole number of less than 2^53, which a checkpoint has exactly, "
                    "got about ",
                    found->second,
                    "; set it to what was saved before the load, or "
                    "keep the present one with restore_options(false)");
        v = static_cast<int64_t>(found->second);
      }
      if (v.isBool()) v = found->second != 0.0;
      if (v.isDouble()) v = found->second;
    });
  }
  read_values(options, named);
}

}  // namespace

const OptimizerAdapter& serialized_adapter() {
  static const SerializedAdapter adapter;
  return adapter;
}

}  // namespace zero
