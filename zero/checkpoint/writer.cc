// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/writer.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/checkpoint/hashed_file.h"
#include "zero/checkpoint/safetensors.h"

namespace zero {
namespace {

constexpr char kSighting[] = "/sighting";

void write_text(const std::string& path, const std::string& text) {
  FileWriter file(path);
  file.write(text.data(), text.size());
  file.finish();
}

// As safetensors can hold it: dtypes it has no name for become bytes.
at::Tensor storable(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  if (safetensors_knows(host.scalar_type())) return host;
  return host.reshape({-1}).view(at::kByte);
}

}  // namespace

std::string rank_file_name(int rank) {
  char name[64];
  std::snprintf(name, sizeof(name), "rank-%05d.safetensors", rank);
  return name;
}

std::string frozen_file_name(int rank) {
  const std::string name = "frozen-and-buffers";
  return name + (rank == 0 ? ".safetensors" : "-" + rank_file_name(rank).substr(5));
}

CheckpointWriter::CheckpointWriter(Communicator& control, std::string folder, bool overwrite)
    : control_(control), folder_(std::move(folder)), overwrite_(overwrite) {}

void CheckpointWriter::begin() {
  const std::string what = "save_checkpoint(" + folder_ + ")";
  try {
    const auto ids = run_on_all_ranks(control_, what, [&]() -> std::string {
      if (control_.rank() != 0) return {};
      restore_replaced(folder_, is_complete_checkpoint);
      directory_ = std::make_unique<AtomicDirectory>(folder_, overwrite_, kManifestName);
      write_text(directory_->path() + kSighting, directory_->id());
      sync_folder(directory_->path());
      return directory_->id();
    });
    id_ = ids[0];
    saving_ = saving_path(folder_, id_);
    run_on_all_ranks(control_, what, [&]() -> std::string {
      std::string seen;
      try {
        FileReader file(saving_ + kSighting);
        seen = file.read_text(0, file.size());
      } catch (const c10::Error& error) {
        seen = error_text(error);
      }
      TORCH_CHECK(seen == id_, saving_,
                  ": expected the folder that rank 0 has just made, got another or none (", seen,
                  "); save to a folder that all ranks share");
      return {};
    });
  } catch (...) {
    directory_.reset();
    throw;
  }
}

void CheckpointWriter::write_file(const FileToSave& file) {
  std::vector<StoredTensor> stored;
  std::map<std::string, const TensorToSave*> by_key;
  for (const TensorToSave& t : file.tensors) {
    const bool known = safetensors_knows(t.tensor.scalar_type());
    stored.push_back({t.about.key, known ? t.tensor.scalar_type() : at::kByte,
                      known ? t.tensor.sizes().vec()
                            : std::vector<int64_t>{static_cast<int64_t>(t.tensor.numel() *
                                                                        t.tensor.element_size())},
                      0, 0});
    by_key[t.about.key] = &t;
  }
  SafetensorsWriter writer(saving_ + "/" + file.name, std::move(stored), {{"checkpoint", id_}});
  ManifestFile result{file.name, 0, 0, {}};
  for (const StoredTensor& place : writer.tensors()) {
    const TensorToSave& t = *by_key.at(place.name);
    const at::Tensor host = storable(t.tensor);
    result.tensors.push_back(t.about);
    result.tensors.back().hash = writer.write(host.const_data_ptr(), host.nbytes());
  }
  writer.finish();
  result.bytes = writer.bytes();
  result.hash = writer.hash();
  files_.push_back(std::move(result));
}

void CheckpointWriter::write_files(const std::vector<FileToSave>& files,
                                   const std::function<void()>& prepare) noexcept {
  try {
    if (prepare) prepare();
    for (const FileToSave& file : files) write_file(file);
  } catch (const std::exception& error) {
    problem_ = error_text(error);
  }
}

void CheckpointWriter::write_manifest(Manifest& manifest, const std::vector<std::string>& files) {
  manifest.id = id_;
  for (size_t r = 0; r < files.size(); ++r) {
    for (ManifestFile& file : parse_files(files[r], "files of rank " + std::to_string(r))) {
      manifest.files.push_back(std::move(file));
    }
  }
  check_values_agree(manifest.files);
  directory_->check_present();
  if (unlink((saving_ + kSighting).c_str()) != 0) {
    throw_errno("cannot remove " + saving_ + kSighting, errno);
  }
  write_text(saving_ + "/" + kManifestName, manifest_text(manifest));
  directory_->publish();
}

void CheckpointWriter::finish(Manifest manifest) {
  const std::string what = "save_checkpoint(" + folder_ + ")";
  try {
    const auto files = run_on_all_ranks(control_, what, [&] {
      std::error_code ignored;
      TORCH_CHECK(
          problem_.empty(), problem_,
          std::filesystem::exists(saving_, ignored)
              ? ""
              : "; another save to the same folder, or keep_last(), has removed " + saving_);
      return files_text(files_);
    });
    run_on_all_ranks(control_, what, [&]() -> std::string {
      if (control_.rank() == 0) write_manifest(manifest, files);
      return {};
    });
  } catch (...) {
    directory_.reset();
    throw;
  }
}

}  // namespace zero
