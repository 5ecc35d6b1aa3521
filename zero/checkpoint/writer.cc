// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/writer.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <future>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/base/detached_call.h"
#include "zero/base/error_text.h"
#include "zero/base/own_process.h"
#include "zero/base/own_thread_wait.h"
#include "zero/base/thread_priority.h"
#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/format/file_system.h"

namespace zero {
namespace {

constexpr char kSighting[] = "/sighting";

void write_text(const std::string& path, const std::string& text) {
  FileWriter file(path);
  file.write(text.data(), text.size());
  file.finish();
}

}  // namespace

std::string absolute(const std::string& folder) {
  std::error_code ignored;
  const std::filesystem::path path = std::filesystem::absolute(folder, ignored);
  return path.empty() ? folder : path.string();
}

std::string rank_file_name(int rank) {
  char name[64];
  std::snprintf(name, sizeof(name), "rank-%05d.safetensors", rank);
  return name;
}

std::string whole_file_name(const std::string& name, int rank) {
  if (rank == 0) return name + ".safetensors";
  return c10::str(name, "-", rank_file_name(rank).substr(5));
}

CheckpointWriter::CheckpointWriter(Communicator& control, std::string folder, bool overwrite,
                                   bool shared)
    : control_(control),
      folder_(absolute(folder)),
      what_("save_checkpoint(" + folder + ")"),
      overwrite_(overwrite),
      shared_(shared) {}

void CheckpointWriter::make_directory(const std::string& id) {
  std::error_code ignored;
  TORCH_CHECK(shared_ || overwrite_ || !std::filesystem::exists(folder_, ignored), folder_,
              ": expected a path where nothing is, got one that exists; choose another or set "
              "overwrite(true), also where it is a checkpoint that other disks lack, because a "
              "save was cut short; where the file system cannot exchange folders, choose another");
  auto made = std::make_unique<AtomicDirectory>(folder_, overwrite_, kManifestName, id);
  if (!made->made()) return;
  directory_ = std::move(made);
  // Others need to see it, and a machine that crashes does not need it.
  FileWriter sighting(directory_->path() + kSighting);
  const std::string text = id + " " + std::to_string(control_.rank());
  sighting.write(text.data(), text.size());
  sighting.close();
}

// A save, step by step:
//
//   begin()        1  rank 0 draws an id and makes the hidden folder with a sighting in it
//                  2  shared: every rank reads that sighting; own disks: one rank makes the folder
//                     on each disk that does not show rank 0's
//   write_files()  3  each rank writes its files into the hidden folder it sees; sends nothing
//   finish()       4  ranks exchange what their files hold, or why they have none: all throw, or
//                     none does
//                  5  rank 0 writes the manifest, which makes the folder a checkpoint, and gives
//                     the folder its name; own disks: so does the keeper of each
void CheckpointWriter::begin() {
  try {
    const auto ids = run_on_all_ranks(control_, what_, [&]() -> std::string {
      if (control_.rank() != 0) return {};
      make_directory(random_id());
      TORCH_INTERNAL_ASSERT(directory_, "a folder with a new random name");
      return directory_->id();
    });
    id_ = ids[0];
    saving_ = saving_path(folder_, id_);
    // Of those that do not see the folder of rank 0, one on each disk makes it.
    if (!shared_) {
      run_on_all_ranks(control_, what_, [&] {
        if (!exists(saving_)) make_directory(id_);
      });
    }
    // Several ranks of one disk may have tried: the sighting says whose folder is there. Disks are
    // numbered by their keepers, in the order of ranks; rank 0 keeps the one that all share.
    const auto keepers =
        run_on_all_ranks(control_, what_, [&] { return std::to_string(keeper()); });
    std::set<int> disks;
    for (const std::string& rank : keepers) disks.insert(std::stoi(rank));
    const int own = std::stoi(keepers[static_cast<size_t>(control_.rank())]);
    disk_ = std::distance(disks.begin(), disks.find(own));
  } catch (...) {
    directory_.reset();
    throw;
  }
}

int CheckpointWriter::keeper() const {
  std::string seen;
  try {
    FileReader file(saving_ + kSighting);
    seen = file.read_text(0, file.size());
  } catch (const c10::Error& error) {
    seen = error_text(error);
  }
  const std::string prefix = id_ + " ";
  TORCH_CHECK(seen.starts_with(prefix), saving_, ": expected the folder that ",
              shared_ ? "rank 0" : "a rank", " has just made, got another or none (", seen, ")",
              shared_ ? "; save to a folder that all ranks share, or set "
                        "SaveOptions::shared_folder(false) if each machine shall write to a disk "
                        "of its own"
                      : "");
  return std::stoi(seen.substr(prefix.size()));
}

void CheckpointWriter::add_file(FileContent file) {
  file.about.disk = disk_;
  files_.push_back(std::move(file));
}

void CheckpointWriter::prepare(const std::function<void()>& work) noexcept {
  try {
    work();
  } catch (const std::exception& error) {
    problem_ = error_text(error);
  }
}

bool CheckpointWriter::link_file(const std::string& path, const FileContent& content) {
  if (!problem_.empty()) return false;
  const std::string name = saving_ + "/" + content.about.name;
  if (link(path.c_str(), name.c_str()) != 0) return false;
  try {
    StoredFile(std::make_unique<FileReader>(name), content.about);
  } catch (const c10::Error&) {  // another save has put its file there
    unlink(name.c_str());
    return false;
  }
  add_file(content);
  return true;
}

const FileContent* CheckpointWriter::written(const std::string& name) const {
  const auto found = std::find_if(files_.begin(), files_.end(),
                                  [&](const FileContent& f) { return f.about.name == name; });
  return found == files_.end() ? nullptr : &*found;
}

void CheckpointWriter::write_files(std::vector<FileToSave> files) noexcept {
  if (!problem_.empty()) return;
  prepare([&] {
    for (FileToSave& file : files) {
      const std::string path = saving_ + "/" + file.name;
      add_file(write_file(std::move(file), path, id_));
    }
  });
}

bool CheckpointWriter::write_files(std::deque<std::shared_ptr<MemoryFileWriter>>& files,
                                   const std::atomic<bool>& pause) noexcept {
  if (problem_.empty()) {
    prepare([&] {
      while (!files.empty() && !pause) {
        MemoryFileWriter& source = *files.front();
        if (!file_) file_ = std::make_unique<FileWriter>(saving_ + "/" + source.name());
        // First all of it is hashed, because the manifest needs the hashes.
        if (!memory_.bytes.defined()) {
          if (source.hash_part()) continue;
          memory_ = source.finish();
        }
        const uint64_t left = memory_.bytes.nbytes() - file_->bytes();
        file_->write(static_cast<const char*>(memory_.bytes.const_data_ptr()) + file_->bytes(),
                     std::min<uint64_t>(left, FileWriter::kPart));
        if (left > FileWriter::kPart) continue;
        file_->finish();
        add_file(std::move(memory_.content));
        file_.reset();
        memory_ = {};
        files.pop_front();
      }
    });
  }
  if (!problem_.empty()) {
    files.clear();
    file_.reset();
    memory_ = {};
  }
  return files.empty();
}

void CheckpointWriter::write_manifest(const Manifest& manifest) {
  directory_->check_present();
  // From here on the folder holds what a checkpoint holds and nothing else.
  if (unlink((saving_ + kSighting).c_str()) != 0) {
    throw_errno("cannot remove " + saving_ + kSighting, errno);
  }
  write_text(saving_ + "/" + kManifestName, manifest_text(manifest));
}

void CheckpointWriter::finish_disks(const Manifest& manifest, const RunTask& remove) {
  std::string text;
  run_on_all_ranks(control_, what_, [&] {
    if (control_.rank() == 0) text = manifest_text(manifest);
  });
  text = broadcast_text(control_, text, /*source=*/0, "manifest");
  // All disks have the manifest, synced, before the first folder gets its name.
  run_on_all_ranks(control_, what_, [&] {
    if (!directory_) return;
    Manifest own = parse_manifest(text, folder_ + "/" + kManifestName);
    own.disk = disk_;
    write_manifest(own);
    sync_folder(saving_);
  });
  run_on_all_ranks(control_, what_, [&] {
    try {
      if (directory_) directory_->publish(remove);
    } catch (const c10::Error& error) {
      TORCH_CHECK(
          false, error_text(error),
          "; other disks may have this checkpoint now, which lacks the files of this one: "
          "save again with overwrite(true), or under a new name where the file system cannot "
          "exchange folders");
    }
  });
}

void CheckpointWriter::finish(Manifest manifest, const RunTask& remove) {
  try {
    const auto files = run_on_all_ranks(control_, what_, [&] {
      std::error_code ignored;
      TORCH_CHECK(
          problem_.empty(), problem_,
          std::filesystem::exists(saving_, ignored)
              ? ""
              : "; another save to the same folder, or keep_last(), has removed " + saving_);
      return control_.rank() == 0 ? std::string() : files_text(files_);
    });
    run_on_all_ranks(control_, what_, [&] {
      if (control_.rank() != 0) return;
      manifest.id = id_;
      std::vector<FileContent> contents = files_;
      for (size_t r = 1; r < files.size(); ++r) {
        for (FileContent& file : parse_files(files[r], "files of rank " + std::to_string(r))) {
          contents.push_back(std::move(file));
        }
      }
      add_files(contents, manifest);
      if (shared_) {
        write_manifest(manifest);
        directory_->publish(remove);
      }
    });
    if (!shared_) finish_disks(manifest, remove);
  } catch (...) {
    directory_.reset();
    throw;
  }
}

bool WrittenOnce::link(const FileToSave& file, CheckpointWriter& writer) noexcept {
  if (file.name != last_.name) return false;
  try {
    FileContent now = hash_file(file, last_.id);
    if (now.about.hash != last_.hash || now.about.bytes != last_.bytes) return false;
    now.about.id = last_.id;
    return writer.link_file(folder_ + "/" + file.name, now);
  } catch (const std::exception&) {  // memory, or a device: writing it will say so
    return false;
  }
}

void WrittenOnce::keep(const std::string& folder, const ManifestFile& file, const std::string& id) {
  folder_ = folder;
  last_ = file;
  if (last_.id.empty()) last_.id = id;
}

namespace {

// What the thread uses, which may be left behind; it calls copy() and write().
struct Work {
  BackgroundSave save;
  std::atomic<bool> pause = false;
};

}  // namespace

// A forked child keeps it: destroyed there, the writer would remove the parent's files.
struct PendingCheckpoint::State {
  OwnProcess process;
  const std::shared_ptr<Work> work = std::make_shared<Work>();
  std::future<bool> thread;  // ready at its end

  ~State() {
    try {
      stop();
    } catch (const std::exception&) {  // It has printed that the thread stands still.
    }
    work->save.finish = nullptr;  // a thread that is left behind keeps the rest
  }
  void stop() {
    if (!thread.valid()) return;
    work->pause = true;
    OwnThreadWait look(work->save.wait, work->save.limit,
                       "a call of the disk does not return; look at the disk or its server, and "
                       "start again from another checkpoint");
    const std::future<bool> ended = std::move(thread);
    while (ended.wait_for(OwnThreadWait::kLook) != std::future_status::ready) look.look(0);
    work->pause = false;
  }
};

std::unique_ptr<PendingCheckpoint> BackgroundSave::start() {
  const auto state = make_owned<PendingCheckpoint::State>();
  state->work->save = std::move(*this);
  try {
    const auto run = [work = state->work] {
      std::exchange(work->save.copy, nullptr)();
      lower_thread_priority();
      work->save.write(work->pause);
      return true;
    };
    state->thread = start_detached(run, "saves");
  } catch (const c10::Error&) {  // no thread is left
    std::exchange(state->work->save.copy, nullptr)();
  }
  return std::unique_ptr<PendingCheckpoint>(new PendingCheckpoint(state));
}

PendingCheckpoint::~PendingCheckpoint() = default;

void PendingCheckpoint::finish() {
  state_->process.check("finish() of a checkpoint");
  BackgroundSave& save = state_->work->save;
  TORCH_CHECK(save.finish != nullptr, "finish(): expected one call for each save, got another");
  // What refuses the call before anything is written leaves the save as it is.
  bool begun = false;
  const auto finish = std::exchange(save.finish, nullptr);
  try {
    finish([&] {
      begun = true;
      // The thread may not get a core for long, and all ranks would wait.
      state_->stop();
      std::exchange(save.write, nullptr)(state_->work->pause);
    });
  } catch (...) {
    if (!begun) save.finish = finish;
    throw;
  }
}

}  // namespace zero
