// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <set>
#include <sstream>

#include "zero/checkpoint.h"
#include "zero/checkpoint/atomic_directory.h"
#include "zero/checkpoint/reader.h"
#include "zero/checkpoint/safetensors.h"

namespace zero {
namespace {

// The source of one exported tensor.
struct Source {
  std::vector<const ManifestParameter*> parts;  // one if it is stored whole
  const char* kind = "";                        // of read_whole(); "master" for parameters
  c10::ScalarType dtype = c10::ScalarType::Float;
};

std::map<std::string, Source> sources(const Manifest& manifest,
                                      std::optional<c10::ScalarType> dtype) {
  std::map<std::string, Source> result;
  const auto add = [&](const ManifestParameter& p, const char* kind, c10::ScalarType as) {
    Source& source = result[p.name];
    source.parts.push_back(&p);
    source.kind = kind;
    source.dtype = as;
  };
  for (const auto& p : manifest.parameters) add(p, "master", dtype.value_or(p.dtype));
  for (const auto& p : manifest.frozen) {
    const bool converts = dtype && c10::isFloatingType(p.dtype);
    add(p, "frozen", converts ? *dtype : p.dtype);
  }
  for (const auto& p : manifest.buffers) add(p, "buffer", p.dtype);
  return result;
}

at::Tensor read_part(CheckpointReader& reader, const ManifestParameter& about, const char* kind) {
  if (std::string(kind) != "master") return reader.read_whole(about, kind);
  return reader.read_all(about, "master").as_strided(about.shape, about.strides);
}

at::Tensor read(CheckpointReader& reader, const Source& source) {
  const ManifestParameter& first = *source.parts.front();
  if (!is_part(first)) return read_part(reader, first, source.kind);
  at::Tensor whole;
  int64_t elements = 0;
  for (const ManifestParameter* about : source.parts) {
    const at::Tensor part = read_part(reader, *about, source.kind);
    if (!whole.defined()) whole = at::empty(first.whole, part.options());
    TORCH_CHECK(about->whole == first.whole && part.scalar_type() == whole.scalar_type(),
                "parameter ", first.name, ": expected parts of one tensor, got others");
    const TensorPart place = part_of(*about);
    int64_t begin = 0;  // of the box in the part
    for (const TensorBox& box : place.boxes) {
      const int64_t size = box.sizes[place.along];
      whole.narrow(about->dimension, box.from[place.along], size)
          .copy_(part.narrow(about->dimension, begin, size));
      begin += size;
    }
    elements += part.numel();
  }
  TORCH_CHECK(elements == whole.numel(), "parameter ", first.name, ": expected parts of ",
              whole.numel(), " elements together, got ", elements);
  return whole;
}

// Compares a file with what a module expects of it.
struct Import {
  std::vector<std::pair<at::Tensor, const StoredTensor*>> copies;
  std::vector<std::string> differences;
};

Import match(const SafetensorsHeader& header, torch::nn::Module& module) {
  std::map<std::string, const StoredTensor*> stored;
  for (const StoredTensor& t : header.tensors) stored[t.name] = &t;
  std::vector<std::pair<std::string, at::Tensor>> wanted;
  for (const auto& item : module.named_parameters()) wanted.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) wanted.emplace_back(item.key(), item.value());
  Import result;
  std::set<const void*> filled;
  std::vector<std::pair<std::string, at::Tensor>> missing;
  for (const auto& [name, tensor] : wanted) {
    if (!tensor.defined()) continue;
    const auto found = stored.find(name);
    if (found == stored.end()) {
      missing.emplace_back(name, tensor);
      continue;
    }
    if (found->second->dtype == c10::ScalarType::Undefined) {
      result.differences.push_back(name + ": of a dtype in the file that is unknown here");
    } else if (tensor.sizes() != c10::IntArrayRef(found->second->shape)) {
      std::ostringstream line;
      line << name << ": shape " << c10::IntArrayRef(found->second->shape) << " in the file, "
           << tensor.sizes() << " in the model";
      result.differences.push_back(line.str());
    } else {
      result.copies.emplace_back(tensor, found->second);
      filled.insert(tensor.unsafeGetTensorImpl());
    }
    stored.erase(found);
  }
  for (const auto& [name, tensor] : missing) {
    // A tied parameter is there under another name.
    if (filled.count(tensor.unsafeGetTensorImpl()) == 0) {
      result.differences.push_back(name + ": in the model, missing in the file");
    }
  }
  for (const auto& item : stored) {
    result.differences.push_back(item.first + ": in the file, missing in the model");
  }
  return result;
}

// Throws where something is at `path`.
void give_name(const std::string& file, const std::string& path) {
  if (renameat2(AT_FDCWD, file.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0) return;
  // NFS has no such call, but links.
  if (errno != EEXIST && link(file.c_str(), path.c_str()) == 0) {
    unlink(file.c_str());
    return;
  }
  throw_errno("cannot name the exported model " + path, errno);
}

}  // namespace

void export_model(const std::string& folder, const std::string& path,
                  std::optional<c10::ScalarType> dtype) {
  CheckpointReader reader(folder);
  const auto all = sources(reader.manifest(), dtype);
  std::vector<StoredTensor> tensors;
  for (const auto& [name, source] : all) {
    tensors.push_back({name, source.dtype, whole_shape(*source.parts.front()), 0, 0});
  }
  const std::string saving = saving_path(path, random_id());
  if (access(path.c_str(), F_OK) == 0) throw_errno("cannot export to " + path, EEXIST);
  try {
    SafetensorsWriter writer(saving, std::move(tensors), {{"format", "pt"}});
    for (const StoredTensor& place : writer.tensors()) {
      const Source& source = all.at(place.name);
      const at::Tensor tensor = read(reader, source).to(source.dtype).contiguous();
      writer.write(tensor.const_data_ptr(), tensor.nbytes());
    }
    writer.finish();
    give_name(saving, path);
    sync_folder(parent_of(path));
  } catch (...) {
    unlink(saving.c_str());
    throw;
  }
}

std::vector<std::string> import_model(const std::string& path, torch::nn::Module& module,
                                      bool strict) {
  FileReader file(path);
  const SafetensorsHeader header = read_safetensors_header(file);
  Import import = match(header, module);
  if (strict && !import.differences.empty()) {
    std::string text;
    for (size_t i = 0; i < import.differences.size() && i < 10; ++i) {
      text += "\n  " + import.differences[i];
    }
    TORCH_CHECK(false, path, ": expected the tensors of the model, got ", import.differences.size(),
                " differences:", text);
  }
  at::NoGradGuard no_grad;
  for (const auto& [tensor, stored] : import.copies) {
    const at::Tensor host = at::empty(stored->shape, at::TensorOptions().dtype(stored->dtype));
    file.read(stored->begin, host.mutable_data_ptr(), host.nbytes());
    // Shares the version counter, so that an optimizer notices.
    tensor.detach().copy_(host);
  }
  return std::move(import.differences);
}

}  // namespace zero
