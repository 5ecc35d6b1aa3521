// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One save under way: a hidden folder beside the target, files of every rank in
// it, and a manifest written last. Knows nothing of optimizers.
//
//   begin()        collective: the folder exists and every rank sees it; refused
//                  while another save to the same place is under way
//   write_files()  by this rank alone, on any thread
//   finish()       collective: all files are on disk; manifest, rename
//
// Any error on any rank is thrown on all of them by the next collective call; the
// hidden folder is removed and what was at the target stays.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/atomic_directory.h"
#include "zero/checkpoint/manifest.h"
#include "zero/communicator.h"

namespace zero {

struct TensorToSave {
  ManifestTensor about;  // the hash is filled in by writing
  at::Tensor tensor;     // any device and strides
};

struct FileToSave {
  std::string name;
  std::vector<TensorToSave> tensors;
};

// "rank-00003.safetensors".
std::string rank_file_name(int rank);
// "frozen-and-buffers.safetensors" of rank 0, "frozen-and-buffers-00003.safetensors" of rank 3.
std::string frozen_file_name(int rank);

class CheckpointWriter {
 public:
  // `control` must outlive the writer.
  CheckpointWriter(Communicator& control, std::string folder, bool overwrite);

  void begin();
  // Runs `prepare`, if there is one, and writes `files`. Never throws: what goes wrong is thrown by
  // finish().
  void write_files(const std::vector<FileToSave>& files,
                   const std::function<void()>& prepare = nullptr) noexcept;
  // Rank 0's `manifest` counts; its id and files are filled in here.
  void finish(Manifest manifest);

 private:
  void write_file(const FileToSave& file);
  void write_manifest(Manifest& manifest, const std::vector<std::string>& files);

  Communicator& control_;
  const std::string folder_;
  const bool overwrite_;
  std::unique_ptr<AtomicDirectory> directory_;  // rank 0's
  std::string saving_;                          // the hidden folder
  std::string id_;
  std::vector<ManifestFile> files_;
  std::string problem_;
};

}  // namespace zero
