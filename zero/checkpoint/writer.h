// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One save under way: a hidden folder beside the target, files of every rank in
// it, and a manifest written last. Knows nothing of optimizers.
//
//   begin()        collective: the folder exists and every rank sees it; refused
//                  while another save to the same place is under way
//   link_file()    by this rank alone: a file of the last checkpoint is one of this, too
//   write_files()  by this rank alone, on any thread
//   finish()       collective: all files are on disk; manifest, rename
//
// Any error on any rank is thrown on all of them by the next collective call; the
// hidden folder is removed and what was at the target stays.
//
// Without a shared folder there is one hidden folder, with one id in its name, on each disk: the
// ranks that see one folder at their paths share a disk. One of them makes it and is the disk's
// keeper, which writes a manifest there and renames it. Rank 0 is one. All keepers have written
// their manifests before the first one renames; then a crash can leave some disks without the new
// checkpoint.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/stored_file.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/checkpoint_options.h"
#include "zero/communicator.h"

namespace zero {

// The same folder where the working folder is another one.
std::string absolute(const std::string& folder);
// "rank-00003.safetensors".
std::string rank_file_name(int rank);
// "frozen.safetensors" of rank 0, "frozen-00003.safetensors" of rank 3.
std::string whole_file_name(const std::string& name, int rank);

class CheckpointWriter {
 public:
  // `control` must outlive the writer. `folder` may differ between ranks unless it is `shared`.
  CheckpointWriter(Communicator& control, std::string folder, bool overwrite, bool shared = true);

  void begin();
  // As an absolute path.
  const std::string& folder() const { return folder_; }
  // After begin(): equal on all ranks.
  const std::string& id() const { return id_; }
  // Runs what comes before write_files(). Errors are thrown by finish().
  void prepare(const std::function<void()>& work) noexcept;
  // After begin(). Gives the file at `path`, of an earlier checkpoint, a second name in this one.
  // Returns whether that is done: the file system can do it, and the index of the file is that of
  // `content`.
  bool link_file(const std::string& path, const FileContent& content);
  // Writes `files`. Errors are thrown by finish().
  void write_files(std::vector<FileToSave> files) noexcept;
  // Writes `files`, whose copies are made, straight from their memory, and removes those that are
  // written. Errors are thrown by finish(). Returns whether nothing is left to do. If not, `pause`
  // has become true, and another call, on any thread, goes on where this one stopped.
  bool write_files(std::deque<std::shared_ptr<MemoryFileWriter>>& files,
                   const std::atomic<bool>& pause) noexcept;
  // Returns the file that was written or linked under this name; null if none was.
  const FileContent* written(const std::string& name) const;
  // Rank 0's `manifest` counts; its id and files are filled in here. Where a checkpoint is
  // replaced, `remove` runs the removal.
  void finish(Manifest manifest, const RunTask& remove = run_now);
  // In place of finish(), also while a thread writes files: another save to the folder may begin.
  void abandon() { directory_.reset(); }

 private:
  // Makes the hidden folder with a sighting in it, unless another rank does.
  void make_directory(const std::string& id);
  // Returns the keeper of the disk that this rank sees, by the sighting there.
  int keeper() const;

  void add_file(FileContent file);
  void write_manifest(const Manifest& manifest);
  void finish_disks(const Manifest& manifest, const RunTask& remove);

  Communicator& control_;
  const std::string folder_;
  const std::string what_;  // for errors
  const bool overwrite_;
  const bool shared_;
  std::unique_ptr<AtomicDirectory> directory_;  // rank 0's; those of all keepers
  std::string saving_;                          // the hidden folder
  std::string id_;
  int64_t disk_ = 0;
  std::vector<FileContent> files_;    // that are written
  std::unique_ptr<FileWriter> file_;  // the next one
  MemoryFile memory_;                 // its bytes
  std::string problem_;
};

// A file that several checkpoints of a run have in common, since what is in it does not change:
// frozen parameters. It is written once, and each later checkpoint has a hard link to it, so that
// any of them may be removed.
class WrittenOnce {
 public:
  // Returns whether the last checkpoint has a file of this name with the bytes of `file`, and the
  // checkpoint of `writer` has it now, too. Hashes `file`, in memory for its largest tensor. Never
  // throws: a file that cannot be linked is written.
  bool link(const FileToSave& file, CheckpointWriter& writer) noexcept;

  // The last checkpoint, with this `id`, is at `folder` and has `file`, of which no name says that
  // it has none that can be linked.
  void keep(const std::string& folder, const ManifestFile& file, const std::string& id);

 private:
  std::string folder_;
  ManifestFile last_;
};

// What a PendingCheckpoint runs, and where.
struct BackgroundSave {
  // Both run on a thread of the save, which may be left behind with them, and throw nothing. A step
  // may wait for `copy`. Then `write` runs with a low priority; it returns early when `pause`
  // becomes true, and called again goes on.
  std::function<void()> copy;
  std::function<void(const std::atomic<bool>& pause)> write;
  // Runs on the thread that calls PendingCheckpoint::finish(): the collective end. It calls
  // `write_rest` once, which stops the thread of the save and writes what that has not written.
  std::function<void(const std::function<void()>& write_rest)> finish;
  std::string wait;                    // the text of a wait for the thread of the save
  std::chrono::milliseconds limit{0};  // of that thread, where it stands still

  // Once. Starts the thread. If the system has none left, runs `copy` in this call, and
  // PendingCheckpoint::finish() writes everything.
  std::unique_ptr<PendingCheckpoint> start();
};

}  // namespace zero
