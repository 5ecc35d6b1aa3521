// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory of this process that other processes of the machine can read in place.
//
// It is one anonymous file (memfd), as large as the machine's memory, as far as the address space
// allows that for a rank on each core, and nearly all holes: a peer
// maps it once, and sees what is allocated later; a block that is freed becomes a hole again, also
// for those who mapped it. It has no name in a file system, ends with the last process that uses
// it, and is not bounded by the size of /dev/shm, which is 64 MB in a usual container. Its size is
// sealed, so that no process can cut off memory that others read.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace zero {

// The address of a process's shared memory. Plain bytes, to be sent as they are.
struct SharedMemoryAddress {
  std::array<char, 40> machine{};     // the kernel's boot id
  int64_t process = 0;                // as this process calls itself: another container may differ
  int64_t descriptor = -1;            // -1: has none
  int64_t bytes = 0;                  // size of the file
  std::array<int64_t, 2> password{};  // random, at its beginning: proof of the right file
  auto operator<=>(const SharedMemoryAddress&) const = default;
};

// The shared memory of this process. Thread safety: every member.
class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // The only one, made at first use. Null where the system refuses it: no memfd, no holes in one, a
  // limit on the address space or on the size of files, or a process that was forked after the
  // first use. Warns where the address space is too small.
  static std::shared_ptr<SharedMemory> instance();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const SharedMemoryAddress& address() const { return address_; }
  // [bytes] of kByte, zeros, at the beginning of a page; undefined when there is no room, or the
  // system refuses memory that it cannot back (vm.overcommit_memory=2). Freed with the last tensor
  // that uses it.
  at::Tensor allocate(int64_t bytes);
  // Returns the offset of a contiguous tensor's elements in the file; nothing if they are
  // elsewhere.
  std::optional<int64_t> offset_of(const at::Tensor& tensor) const;

  // Returns the size of the file on a machine with so much memory and so many cores: a process maps
  // that of every rank of the machine, and the address space has room for one on each core.
  static int64_t file_bytes(int64_t memory, int64_t cores);
  // Whether vm.overcommit_memory is 2. Tests set it.
  static bool overcommit_is_strict;

 private:
  SharedMemory() = default;
  bool open();
  // Gives a block its memory now. Returns false where the system has none: to touch it would end
  // this process by a signal.
  bool back(int64_t begin, int64_t bytes) const;
  void free(int64_t begin);

  SharedMemoryAddress address_;
  char* base_ = nullptr;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> holes_;   // begin -> bytes; no two of them touch
  std::map<int64_t, int64_t> blocks_;  // begin -> bytes
};

// Another process's shared memory, mapped read-only. A mapping keeps all of that memory, also when
// its process has ended, until give_back().
class PeerMemory {
 public:
  // Null when this process may not or cannot see it, as that of another machine, container or user,
  // and when its size is not sealed. Warns when it could be seen, and the address space has no
  // room. There is one mapping of an address at a time, which all callers share. Thread safety: any
  // thread may call.
  static std::shared_ptr<PeerMemory> open(const SharedMemoryAddress& address);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // The `bytes` bytes at `offset`. Throws c10::Error when they are not within the file.
  const void* at(int64_t offset, int64_t bytes) const;

  // Puts zeros in the place of the memory, which no process has any more then. Who reads meanwhile
  // goes on and reads zeros.
  void give_back() noexcept;
  // Returns false after give_back(): then what was read before this call may be zeros.
  bool is_there() const;
  // Gives back the memory of all processes that have ended.
  static void give_back_ended();

 private:
  PeerMemory(const char* base, const SharedMemoryAddress& address, std::string began)
      : base_(base), address_(address), began_(std::move(began)) {}
  static std::shared_ptr<PeerMemory> map(const SharedMemoryAddress& address);
  bool process_has_ended() const;

  const char* const base_;
  const SharedMemoryAddress address_;
  const std::string began_;  // the time: numbers of processes are used again
  std::atomic<bool> given_back_ = false;
};

}  // namespace zero
