// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/listed_module.h"

#include <c10/util/Exception.h>

#include <map>
#include <string>

namespace zero {
namespace {

// One level of names.
class Part : public torch::nn::Module {
 public:
  // Returns the part that a dotted name leads to, made where it is missing, and leaves the last
  // name of it in `name`.
  Part& part_of(std::string& name) {
    Part* part = this;
    for (size_t dot; (dot = name.find('.')) != std::string::npos;) {
      const std::string child = name.substr(0, dot);
      TORCH_CHECK(dot > 0 && dot + 1 < name.size(), "expected names around the dots");
      std::shared_ptr<Part>& next = part->parts_[child];
      if (!next) next = part->register_module(child, std::make_shared<Part>());
      part = next.get();
      name = name.substr(dot + 1);
    }
    return *part;
  }

 private:
  std::map<std::string, std::shared_ptr<Part>> parts_;  // its children
};

}  // namespace

std::shared_ptr<torch::nn::Module> listed_module(const NamedTensors& parameters,
                                                 const NamedTensors& buffers) {
  auto module = std::make_shared<Part>();
  const auto add = [&](const NamedTensors& list, const char* kind, const auto& put) {
    for (const auto& item : list) {
      try {
        TORCH_CHECK(item.value().defined(), "expected a tensor, got an undefined one");
        std::string name = item.key();
        Part& part = module->part_of(name);
        put(part, name, item.value());
      } catch (const c10::Error& error) {
        TORCH_CHECK(false, kind, " \"", item.key(), "\": ", error.what_without_backtrace());
      }
    }
  };
  add(parameters, "parameter", [](Part& part, const std::string& name, const at::Tensor& tensor) {
    part.register_parameter(name, tensor, tensor.requires_grad());
  });
  add(buffers, "buffer", [](Part& part, const std::string& name, const at::Tensor& tensor) {
    // libtorch takes both, and no checkpoint could hold them.
    TORCH_CHECK(!part.named_parameters(/*recurse=*/false).contains(name),
                "expected another name than that of a parameter");
    part.register_buffer(name, tensor);
  });
  return module;
}

}  // namespace zero
