// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A folder that appears under its name complete or not at all: it is filled
// beside its place, under a hidden name of its own, and renamed. One process owns it.
//
// Two saves to one place never share a hidden folder, so neither can publish the
// other's files. The second one is refused while the first is alive, and replaces
// what a dead one left. Alive is what this process knows to be under way, and what
// holds the lock on the file `lock` in its hidden folder: a POSIX record lock,
// because it ends with its process, a forked child does not inherit it, and NFS
// has it. A file system without locks takes every save of another process to the
// same target for dead; the save that loses its hidden folder in this way throws at publish().
//
// A hidden folder is renamed before it is removed. Either its owner publishes it
// whole, or the owner's rename fails. Nothing is removed but what has a name and a tag of this
// library, or holds a file that its checkpoints hold. A removal that fails is a warning.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace zero {

// 32 hexadecimal digits that are different at every call, on every machine.
std::string random_id();

// "/a/b/.c.<the first 16 digits of id>.saving", for the target "/a/b/c".
std::string saving_path(const std::string& target, const std::string& id);
// "/a/b", or "." for a target without a folder.
std::string parent_of(const std::string& target);
// Returns the names in a folder; none if there is no folder.
std::vector<std::string> names_in(const std::string& parent);

// Runs a task, now or later, on any thread.
using RunTask = std::function<void(std::function<void()> task)>;
inline void run_now(const std::function<void()>& task) { task(); }

class AtomicDirectory {
 public:
  // Makes the hidden folder, removing what dead saves left in the same parent: to other targets
  // only where a lock says that they are dead. Missing parents are made too. Throws when `target`
  // exists and may not be replaced: without `overwrite`, or if it does not hold a file `required`
  // (a checkpoint's manifest), since it may be a folder of the user's. Throws while another save to
  // `target` is under way. The first one in a parent tries what its file system can do: it throws
  // if folders cannot be renamed there or brought to disk, and warns of weaker promises, once for
  // each device. Throws where `target` exists and the file system cannot exchange two folders;
  // publish() does if the trial has no answer.
  //
  // With the `id` of a folder that another process or thread may be making, too, one of them makes
  // it. For the others made() is false, and they do nothing with it.
  AtomicDirectory(std::string target, bool overwrite, const char* required,
                  std::string id = random_id());
  // Removes the hidden folder unless it was published. A forked child removes nothing.
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  bool made() const { return made_; }
  const std::string& id() const { return id_; }
  const std::string& path() const { return path_; }  // saving_path(target, id())

  // Throws when another process has removed the hidden folder.
  void check_present() const;

  // Waits until the folder's names are on disk, and gives it its name. An existing target is
  // exchanged in one system call and then removed. The removal, which takes as long as a step for a
  // large folder, is a task of its own, which needs nothing of this object and does not throw. It
  // also removes what removals that were cut short left in the same place.
  // The lock stays in the folder until it has its name; a crash between leaves it there.
  void publish(const RunTask& remove = run_now);

 private:
  void make();
  void unlock(const std::string& path);
  void give_name();

  const std::string target_;
  const std::string id_;
  const std::string path_;
  const char* const required_;
  const bool overwrite_;
  const int process_;
  int lock_ = -1;
  bool made_ = false;
  bool published_ = false;
};

// Removes what dead saves and removals left in `parent`. Keeps what saves that are
// alive own, links, files, and what has no tag of this library.
void remove_left_overs(const std::string& parent);

// Removes a folder so that it never is there by halves under its own name. Returns whether nothing
// is left under that name; if not, warns.
bool remove_directory(const std::string& path);

}  // namespace zero
