// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/parameter_table.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <unordered_set>

#include "zero/base/plain_text.h"
#include "zero/memory/whole_tensor.h"

namespace zero {
namespace {

const void* key(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

// Reads what a module itself holds. named_parameters() makes a list and a text for each entry, at
// 3000 instructions.
class OwnParameters : public torch::nn::Module {
 public:
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

// The bytes from a tensor's first element to its last.
struct MemoryRange {
  // Of managed parameters, which get other memory or not; of trainable ones and of all others.
  enum Mobility : size_t { kMoving, kStaying, kTrainable, kOther };

  MemoryRange(Mobility mobility, const at::Tensor& tensor, std::string name)
      : mobility(mobility),
        begin(static_cast<const char*>(tensor.const_data_ptr())),
        end(begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                     tensor.element_size())),
        name(std::move(name)) {}
  bool may_share_with(Mobility other) const {
    const bool managed = mobility == kMoving || mobility == kStaying;
    const bool other_managed = other == kMoving || other == kStaying;
    if (managed && other_managed) return false;
    if (!managed && !other_managed) return true;
    return mobility != kMoving && other != kMoving && mobility != kTrainable && other != kTrainable;
  }

  Mobility mobility;
  const char* begin;
  const char* end;
  std::string name;
};

}  // namespace

bool is_in_order(const Parameter& parameter) {
  const at::Tensor& t = parameter.tensor;
  for (int64_t d = 0; d < t.dim() && t.numel() > 0; ++d) {
    // That of a single element addresses nothing.
    if (t.size(d) > 1 && t.stride(d) != parameter.strides[d]) return false;
  }
  return true;
}

void check_trainable(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "parameter ", name,
              ": expected a dense (strided) tensor, got layout ", tensor.layout(),
              "; sparse parameters cannot be cut into flat shards, use a dense one");
  TORCH_CHECK(
      !tensor.is_complex(), "parameter ", name, ": expected a real dtype, got ",
      tensor.scalar_type(),
      "; register at::view_as_real() of it, and compute with at::view_as_complex() of that");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "parameter ", name,
      ": expected dtype float, bfloat16 or half, got ", dtype,
      "; convert the model with module.to(dtype) before making the optimizer: masters, state "
      "and sums are fp32");
  TORCH_CHECK(tensor.is_leaf(), "parameter ", name,
              ": expected a leaf tensor, got the result of an operation; pass the tensors that "
              "module.parameters() returns");
  TORCH_CHECK(!tensor.is_inference(), "parameter ", name,
              ": expected a tensor that autograd can use, got one made under c10::InferenceMode; "
              "make the model outside of it");
}

bool is_managed(const at::Tensor& tensor) {
  // A tensor that never required a gradient has no autograd state to ask.
  return torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
         torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr;
}

std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  std::unordered_set<const void*> known;
  for (const at::Tensor& tensor : tensors) {
    if (known.insert(key(tensor)).second) result.push_back(tensor);
  }
  return result;
}

ParameterTable::ParameterTable(const torch::nn::Module& module,
                               const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               const std::function<bool(const at::Tensor&)>& trained) {
  // Tied tensors are listed once for each name they have.
  std::unordered_map<const void*, std::vector<std::string>> names;
  std::vector<NamedTensor> in_order;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined()) continue;
    auto& list = names[key(item.value())];
    if (list.empty()) in_order.push_back({item.key(), item.value()});
    list.push_back(item.key());
  }
  std::unordered_map<const void*, int64_t> groups_seen;
  for (size_t g = 0; g < groups.size(); ++g) {
    collect_group(groups[g], static_cast<int64_t>(g), names, groups_seen);
  }
  for (const NamedTensor& item : in_order) {
    const auto seen = groups_seen.find(key(item.tensor));
    const bool own = seen != groups_seen.end();
    if (own && item.tensor.requires_grad() && (!trained || trained(item.tensor))) {
      check_trainable(item.tensor, item.name);
      index_[key(item.tensor)] = static_cast<int64_t>(parameters_.size());
      parameters_.push_back({item.name, item.tensor, seen->second, dense_strides(item.tensor),
                             item.tensor.sizes().vec()});
    } else {
      frozen_.push_back({item.name, item.tensor, !own && item.tensor.requires_grad()});
    }
  }
  TORCH_CHECK(!parameters_.empty(),
              "nothing to optimize: expected at least one parameter with requires_grad, got ",
              groups_seen.size(), " frozen ones; ",
              groups_seen.empty() ? "add the groups to the inner optimizer before it is wrapped"
                                  : "unfreeze some before making the optimizer");
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) buffers_.push_back({item.key(), item.value()});
  }
  verify_frozen_and_buffers();
  const at::Device device = parameters_.front().tensor.device();
  for (const Parameter& p : parameters_) {
    TORCH_CHECK(p.tensor.device() == device, "parameter ", p.name, ": expected device ", device,
                " like ", parameters_.front().name, ", got ", p.tensor.device(),
                "; move the whole model to one device first");
  }
}

void ParameterTable::collect_group(
    const torch::optim::OptimizerParamGroup& group, int64_t group_index,
    const std::unordered_map<const void*, std::vector<std::string>>& names,
    std::unordered_map<const void*, int64_t>& groups_seen) {
  std::unordered_map<const void*, size_t> times;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& tensor = group.params()[i];
    TORCH_CHECK(tensor.defined(), "parameter ", i, " of group ", group_index,
                ": expected a tensor, got an undefined one");
    const auto found = names.find(key(tensor));
    if (found == names.end()) {
      check_trainable(tensor, "(number " + std::to_string(i) + " of group " +
                                  std::to_string(group_index) + ")");
    }
    TORCH_CHECK(found != names.end(), "parameter ", i, " of group ", group_index, " of shape ",
                tensor.sizes(),
                ": expected a parameter of the module, got a tensor that is not registered "
                "in it; register it or leave it to another optimizer");
    const auto [seen, added] = groups_seen.try_emplace(key(tensor), group_index);
    const size_t count = ++times[key(tensor)];
    TORCH_CHECK(seen->second == group_index && count <= found->second.size(), "parameter ",
                found->second.front(), ": expected once, given again in group ", group_index,
                added ? "" : " after group " + std::to_string(seen->second),
                "; give every parameter to one group, once");
  }
}

int64_t ParameterTable::find(const at::Tensor& tensor) const {
  const auto found = tensor.defined() ? index_.find(key(tensor)) : index_.end();
  return found == index_.end() ? -1 : found->second;
}

std::function<bool(const at::Tensor&)> ParameterTable::managed_or(
    const std::vector<at::Tensor>& added) const {
  std::unordered_set<const void*> keys;
  for (const at::Tensor& tensor : added) keys.insert(key(tensor));
  return [this, keys = std::move(keys)](const at::Tensor& tensor) {
    return find(tensor) >= 0 || keys.contains(key(tensor));
  };
}

int64_t ParameterTable::index_or_throw(const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.defined(),
              "expected a parameter of this optimizer, got an undefined tensor; pass one that "
              "module.parameters() returns");
  const int64_t index = find(tensor);
  TORCH_CHECK(index >= 0, "expected a parameter of this optimizer, got a tensor of shape ",
              tensor.sizes(),
              " that it does not manage; pass one that module.parameters() returns and that "
              "requires gradients");
  return index;
}

std::vector<int64_t> ParameterTable::managed_by(const torch::nn::Module& module) const {
  std::vector<int64_t> result;
  module.apply([&](const torch::nn::Module& part) {
    for (const auto& item : OwnParameters::of(part)) {
      const int64_t index = find(item.value());
      if (index >= 0) result.push_back(index);
    }
  });
  return result;
}

std::vector<NamedTensor> ParameterTable::unmanaged() const {
  std::vector<NamedTensor> result;
  for (const NamedTensor& item : frozen_) {
    if (!is_managed(item.tensor)) result.push_back(item);
  }
  return result;
}

std::string ParameterTable::refresh_lists(const torch::nn::Module& module) {
  if (std::string problem = registered_problem(module); !problem.empty()) return problem;
  const auto parameters = module.named_parameters(), buffers = module.named_buffers();
  for (const auto* list : {&frozen_, &buffers_}) {
    const bool frozen = list == &frozen_;
    for (const NamedTensor& item : *list) {
      const at::Tensor* const now = (frozen ? parameters : buffers).find(item.name);
      if (now == nullptr || key(*now) == key(item.tensor)) continue;
      if (is_managed(*now)) continue;  // another optimizer's, which saves and sends it
      return c10::str(frozen ? "frozen parameter " : "buffer ", item.name,
                      ": expected the tensor that was registered ",
                      item.late ? "before" : "at construction",
                      ", but the module now holds another in its place; copy_() the values into "
                      "that one, or make a new optimizer");
    }
  }
  // In the order of the module, which is the same on ranks that have registered the same.
  std::unordered_map<const void*, NamedTensor> before;
  for (const auto* list : {&frozen_, &buffers_}) {
    for (const NamedTensor& item : *list) before.emplace(key(item.tensor), item);
  }
  const auto entry = [&](const std::string& name, const at::Tensor& tensor) {
    const auto found = before.find(key(tensor));
    const bool late = found == before.end();
    return NamedTensor{name, tensor, late ? tensor.requires_grad() : found->second.trainable,
                       late || found->second.late};
  };
  frozen_.clear();
  std::unordered_set<const void*> known;
  for (const auto& item : parameters) {
    if (find(item.value()) >= 0 || !known.insert(key(item.value())).second) continue;
    frozen_.push_back(entry(item.key(), item.value()));
  }
  buffers_.clear();
  for (const auto& item : buffers) buffers_.push_back(entry(item.key(), item.value()));
  return {};
}

void ParameterTable::check_overlaps(const std::function<bool(const Parameter&)>& moves) const {
  std::vector<MemoryRange> ranges;
  const auto add = [&](MemoryRange::Mobility mobility, const char* what, const std::string& name,
                       const at::Tensor& tensor) {
    if (tensor.numel() > 0) ranges.emplace_back(mobility, tensor, what + name);
  };
  for (const Parameter& p : parameters_) {
    add(moves(p) ? MemoryRange::kMoving : MemoryRange::kStaying, "parameter ", p.name, p.tensor);
  }
  for (const NamedTensor& f : frozen_) {
    add(f.trainable ? MemoryRange::kTrainable : MemoryRange::kOther,
        f.trainable ? "parameter " : "frozen parameter ", f.name, f.tensor);
  }
  for (const NamedTensor& b : buffers_) {
    if (find(b.tensor) < 0) add(MemoryRange::kOther, "buffer ", b.name, b.tensor);
  }
  std::stable_sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) {
    return std::less<const char*>()(a.begin, b.begin);
  });
  // Of each mobility, the range so far that ends last.
  std::array<const MemoryRange*, 4> last{};
  for (const MemoryRange& range : ranges) {
    for (const MemoryRange* other : last) {
      if (other == nullptr || other->end <= range.begin || range.may_share_with(other->mobility)) {
        continue;
      }
      TORCH_CHECK(false, range.name, ": expected memory of its own, got memory that ", other->name,
                  " has too, and the two would come apart; to tie two layers, let both use one "
                  "tensor object (head->weight = embedding->weight), else give each its clone()");
    }
    const MemoryRange*& latest = last[range.mobility];
    if (latest == nullptr || latest->end < range.end) latest = &range;
  }
}

std::vector<std::string> ParameterTable::describe() const {
  std::vector<std::string> lines;
  for (const Parameter& p : parameters_) {
    lines.push_back(plain_text("parameter ", p.name, " shape ", p.tensor.sizes(), " dtype ",
                               p.tensor.scalar_type(), " strides ", at::IntArrayRef(p.strides),
                               " group ", p.group));
  }
  for (const auto* list : {&frozen_, &buffers_}) {
    for (const NamedTensor& item : *list) {
      lines.push_back(plain_text(list == &frozen_ ? "frozen parameter " : "buffer ", item.name,
                                 " shape ", item.tensor.sizes(), " dtype ",
                                 item.tensor.scalar_type()));
    }
  }
  return lines;
}

void ParameterTable::remember() {
  memory_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& t = parameters_[i].tensor;
    memory_[i] = {t.const_data_ptr(), static_cast<uint32_t>(t._version()), t.scalar_type(),
                  t.device()};
  }
}

void ParameterTable::bump_version(int64_t parameter) {
  torch::autograd::impl::bump_version(parameters_[parameter].tensor);
  ++memory_[parameter].version;
}

bool ParameterTable::is_as_remembered(int64_t parameter) const {
  const Parameter& p = parameters_[parameter];
  const Memory& memory = memory_[parameter];
  const at::Tensor& t = p.tensor;
  return t.sizes() == p.sizes && t.scalar_type() == memory.dtype && t.device() == memory.device &&
         t.const_data_ptr() == memory.data &&
         static_cast<uint32_t>(t._version()) == memory.version && is_in_order(p);
}

void ParameterTable::verify_shapes() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    const at::Tensor& t = p.tensor;
    TORCH_CHECK(t.sizes() == p.sizes, "parameter ", p.name, ": expected shape ",
                at::IntArrayRef(p.sizes), " as at construction, got ", t.sizes(),
                "; give it back its shape, or make a new optimizer");
    TORCH_CHECK(t.scalar_type() == memory_[i].dtype, "parameter ", p.name, ": expected dtype ",
                memory_[i].dtype, " as at construction, got ", t.scalar_type(),
                "; move it back and call refresh_master_parameters(), or convert the model before "
                "making an optimizer");
    TORCH_CHECK(t.device() == memory_[i].device, "parameter ", p.name, ": expected device ",
                memory_[i].device, " as at construction, got ", t.device(),
                "; move it back and call refresh_master_parameters(), or move the model before "
                "making an optimizer");
  }
}

void ParameterTable::verify_frozen_and_buffers() const {
  for (const NamedTensor& f : frozen_) check_plain(f.tensor, "frozen parameter " + f.name);
  for (const NamedTensor& b : buffers_) check_plain(b.tensor, "buffer " + b.name);
}

void ParameterTable::verify_values() const {
  verify_shapes();
  constexpr const char* kRefresh =
      "; call refresh_master_parameters() after changing parameters from outside, or "
      "refresh_working_parameters() where the values of the last step are back, which keeps the "
      "masters of 16-bit parameters";
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    const at::Tensor& t = p.tensor;
    TORCH_CHECK(t.const_data_ptr() == memory_[i].data, "parameter ", p.name,
                ": expected the storage the last step left, got another (module.to(), "
                "torch::load and set_data replace it)",
                kRefresh);
    TORCH_CHECK(static_cast<uint32_t>(t._version()) == memory_[i].version, "parameter ", p.name,
                ": expected the values the last step left (version ", memory_[i].version,
                "), got version ", t._version(),
                ": it was loaded over or edited in place, as by an Embedding with max_norm in each "
                "forward pass, or it is a view, whose version all views of its tensor share, also "
                "those that another optimizer steps: give each parameter its clone() before the "
                "optimizers are made",
                kRefresh);
    TORCH_CHECK(is_in_order(p), "parameter ", p.name, ": expected strides ",
                at::IntArrayRef(p.strides), " as the last step left them, got ", t.strides(),
                ", as a transposed view of its own memory has", kRefresh);
  }
}

void ParameterTable::verify_unchanged() const {
  verify_values();
  for (const Parameter& p : parameters_) {
    TORCH_CHECK(p.tensor.requires_grad(), "parameter ", p.name,
                ": expected requires_grad as at construction, got a frozen one; set it "
                "back and call freeze() of the optimizer instead");
  }
  for (const NamedTensor& f : frozen_) {
    if (f.trainable || is_managed(f.tensor)) continue;  // another optimizer's, maybe since then
    TORCH_CHECK(!f.tensor.requires_grad() || !f.tensor.grad().defined(), "parameter ", f.name,
                ": expected it to stay without gradients as at construction, got "
                "requires_grad and a gradient; drop the gradient and call unfreeze() of the "
                "optimizer instead");
  }
}

void ParameterTable::verify_in_module(const torch::nn::Module& module) const {
  const std::string problem = registered_problem(module);
  TORCH_CHECK(problem.empty(), problem);
}

std::string ParameterTable::registered_problem(const torch::nn::Module& module) const {
  // Those of the table are in the order of the module, with others between them.
  auto next = parameters_.begin();
  module.apply([&](const torch::nn::Module& part) {
    for (const auto& item : OwnParameters::of(part)) {
      if (next != parameters_.end() && key(item.value()) == key(next->tensor)) ++next;
    }
  });
  if (next == parameters_.end()) return {};
  std::unordered_set<const void*> registered;
  for (const at::Tensor& t : module.parameters()) registered.insert(key(t));
  for (const Parameter& p : parameters_) {
    if (registered.count(key(p.tensor)) == 1) continue;
    return "parameter " + p.name +
           ": expected the tensor that was registered at construction, but the module now holds "
           "another in its place; make a new optimizer";
  }
  return {};
}

}  // namespace zero
