// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Lists the tensors that a ZeroOptimizer manages, with their names, and notices when one is no
// longer as the last step left it.
//
// Parameters are identified by their index in this table (module registration
// order), never by address, so that all ranks and all files mean the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::nn {
class Module;
}

namespace zero {

struct Parameter {
  std::string name;
  at::Tensor tensor;  // the working parameter
  int64_t group = 0;  // parameter group of the inner optimizer
  // The memory order of the parameter, of its gradient in a bucket and of its
  // segments: its own strides if they are dense, else contiguous ones.
  std::vector<int64_t> strides;
  std::vector<int64_t> sizes;  // as at construction, like all of the above
};

// A tensor that is sent from rank 0 but not optimized.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  bool trainable = false;  // required gradients when it was found: another optimizer's
  bool late = false;       // registered since construction
};

// Returns whether the elements of the parameter are in its memory order.
bool is_in_order(const Parameter& parameter);

// Throws c10::Error unless `tensor` can be optimized.
void check_trainable(const at::Tensor& tensor, const std::string& name);

// Returns whether a ZeroOptimizer manages `tensor`: it has a post-accumulate hook on each of its
// parameters.
bool is_managed(const at::Tensor& tensor);

// Returns `tensors` without those that are the same tensor as an earlier one.
std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors);

class ParameterTable {
 public:
  // Collects the parameters of `groups` that require gradients; a group may have none. A tensor
  // that is registered in `module` under several names (tied) may also be given several times
  // within one group; it is managed once, under its first name. Throws c10::Error naming the
  // parameter for everything the constructor of ZeroOptimizer refuses. `trained`: those alone for
  // which it returns true.
  ParameterTable(const torch::nn::Module& module,
                 const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 const std::function<bool(const at::Tensor&)>& trained = nullptr);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Parameters without gradients, and of the module but of no group.
  const std::vector<NamedTensor>& frozen() const { return frozen_; }
  // Those of frozen() that no other ZeroOptimizer manages now.
  std::vector<NamedTensor> unmanaged() const;
  const std::vector<NamedTensor>& buffers() const { return buffers_; }

  // Takes into those lists what `module` has registered since, and out what it has not any more.
  // Returns the problem where `module` holds another tensor in the place of a managed one or of one
  // of the lists, which then stay as they are, or nothing.
  std::string refresh_lists(const torch::nn::Module& module);

  // Returns -1 when `tensor` is not managed.
  int64_t find(const at::Tensor& tensor) const;
  // For a table that is made again: tensors that are managed, and `added`. Others of the groups may
  // require gradients since, for another optimizer. This table must outlive it.
  std::function<bool(const at::Tensor&)> managed_or(const std::vector<at::Tensor>& added) const;
  // Throws c10::Error when `tensor` is not managed.
  int64_t index_or_throw(const at::Tensor& tensor) const;

  // The managed parameters of `module` and its children.
  std::vector<int64_t> managed_by(const torch::nn::Module& module) const;

  // Throws c10::Error naming two tensors that share memory, if one of them is managed and the other
  // would not follow it: another managed parameter, or any tensor if `moves` says of the managed
  // one that the optimizer gives it other memory.
  void check_overlaps(const std::function<bool(const Parameter&)>& moves) const;

  // One line per parameter with everything the ranks must agree on.
  std::vector<std::string> describe() const;

  // Remembers the memory and the version of every parameter.
  void remember();
  // Raises the version of a parameter, also that which is remembered.
  void bump_version(int64_t parameter);
  // Returns whether a parameter has the memory, version, dtype, device, shape and order still.
  bool is_as_remembered(int64_t parameter) const;
  // These throw c10::Error that names the first tensor that is not as it was, and says what to do.
  // Of the managed parameters each of the first three asks for more than the one before it:
  //
  //   verify_shapes      shapes, dtypes and devices, without which no element may be read
  //   verify_values      and memory, versions and orders, so that values are those of remember()
  //   verify_unchanged   and requires_grad, of frozen ones too
  void verify_shapes() const;
  void verify_values() const;
  void verify_unchanged() const;
  // The managed parameters are in `module` still.
  void verify_in_module(const torch::nn::Module& module) const;
  // Frozen parameters and buffers have plain memory.
  void verify_frozen_and_buffers() const;

 private:
  struct Memory {
    const void* data = nullptr;
    uint32_t version = 0;
    c10::ScalarType dtype = c10::ScalarType::Float;
    at::Device device = at::kCPU;
  };

  void collect_group(const torch::optim::OptimizerParamGroup& group, int64_t group_index,
                     const std::unordered_map<const void*, std::vector<std::string>>& names,
                     std::unordered_map<const void*, int64_t>& groups_seen);
  // What verify_in_module() throws, or nothing.
  std::string registered_problem(const torch::nn::Module& module) const;

  std::vector<Parameter> parameters_;
  std::vector<NamedTensor> frozen_;
  std::vector<NamedTensor> buffers_;
  std::unordered_map<const void*, int64_t> index_;  // of parameters_, by TensorImpl
  std::vector<Memory> memory_;
};

}  // namespace zero
