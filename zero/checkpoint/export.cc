// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {
namespace {

// The source of one exported tensor.
struct Source {
  std::vector<const ManifestParameter*> parts;  // one if it is stored whole
  const char* kind = "";  // of the checkpoint; "master" or kEmaKind for parameters
  c10::ScalarType dtype = c10::ScalarType::Float;
};

std::map<std::string, Source> sources(const Manifest& manifest,
                                      std::optional<c10::ScalarType> dtype, bool ema) {
  std::map<std::string, Source> result;
  const auto add = [&](const ManifestParameter& p, const char* kind, c10::ScalarType as) {
    Source& source = result[p.name];
    source.parts.push_back(&p);
    source.kind = kind;
    source.dtype = as;
  };
  for (const auto& p : manifest.parameters)
    add(p, ema ? kEmaKind : "master", dtype.value_or(p.dtype));
  for (const auto& p : manifest.frozen) {
    const bool converts = dtype && c10::isFloatingType(p.dtype);
    add(p, "frozen", converts ? *dtype : p.dtype);
  }
  for (const auto& p : manifest.buffers) add(p, "buffer", p.dtype);
  return result;
}

at::Tensor read_part(CheckpointReader& reader, const ManifestParameter& about, const char* kind) {
  const std::string name = kind;
  if (name != "master" && name != kEmaKind) return reader.read_whole(about, kind);
  return reader.read_all(about, name).as_strided(about.shape, about.strides);
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
                  std::optional<c10::ScalarType> dtype, bool ema) {
  CheckpointReader reader(folder);
  TORCH_CHECK(!ema || has_ema(reader.manifest()), folder,
              ": expected averages of the parameters, got a checkpoint without; make the optimizer "
              "with ZeroOptions::ema before it is saved");
  const auto all = sources(reader.manifest(), dtype, ema);
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

}  // namespace zero
