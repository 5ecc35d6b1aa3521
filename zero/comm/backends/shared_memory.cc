// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "zero/base/stat_fields.h"

namespace zero {
namespace {

constexpr char kName[] = "zero";

// No process can change the size, which would end those who read with a signal, nor these seals.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A file that can be sealed and, where the kernel knows how to say so, never executed.
int make_file() {
#ifndef MFD_NOEXEC_SEAL  // of Linux 6.3
#define MFD_NOEXEC_SEAL 0x0008U
#endif
  const int file = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  const bool unknown = file < 0 && errno == EINVAL;
  return unknown ? memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING) : file;
}

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

bool unlimited(int resource) {
  rlimit limit{};
  return getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0 &&
         limit.rlim_cur == RLIM_INFINITY;
}

bool read_overcommit() {
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return file >> mode && mode == 2;
}

// Ranks of one machine send each other data through sockets then, which nothing else would say.
void warn_that_unmapped(const std::string& whose, int64_t bytes) {
  TORCH_WARN_ONCE("shared memory: cannot map the ", bytes >> 20, " MiB of ", whose, ": ",
                  std::strerror(errno),
                  ". A process maps as much for every rank of its machine; without, rows between "
                  "them take sockets, which is slower. Start fewer ranks on a machine");
}

// A signal ends the call without success: that of a profiler comes again and again, so that a call
// for all bytes might never end.
bool allocate_in(int descriptor, int mode, int64_t begin, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  for (const int64_t end = begin + bytes; begin < end; begin += kPiece) {
    const int64_t piece = std::min(kPiece, end - begin);
    while (fallocate(descriptor, mode, begin, piece) != 0) {
      if (errno != EINTR) return false;
    }
  }
  return true;
}

// Gives the pages back, and makes them zeros. Sandboxed kernels refuse it.
bool punch_hole(int descriptor, int64_t begin, int64_t bytes) {
  return allocate_in(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes);
}

}  // namespace

bool SharedMemory::overcommit_is_strict = read_overcommit();

int64_t SharedMemory::file_bytes(int64_t memory, int64_t cores) {
  constexpr int64_t kAddresses = int64_t{1} << 46;  // half of what a process has on x86
  const int64_t most = kAddresses / std::max<int64_t>(cores, 1);
  return std::min(memory, most / page_bytes() * page_bytes());
}

std::shared_ptr<SharedMemory> SharedMemory::instance() {
  // Blocks keep it alive, since static tensors may be freed after it.
  static const std::shared_ptr<SharedMemory> only = [] {
    std::shared_ptr<SharedMemory> made(new SharedMemory);
    return made->open() ? made : nullptr;
  }();
  // A forked child has the same file, and would give out blocks that its parent has given out.
  return only && only->address_.process == getpid() ? only : nullptr;
}

bool SharedMemory::open() {
  // The file is far larger than what it will hold, and beyond a limit a signal would end us.
  const std::string machine = boot_id();
  if (machine.empty() || !unlimited(RLIMIT_FSIZE) || !unlimited(RLIMIT_AS)) return false;
  const int64_t bytes =
      file_bytes(sysconf(_SC_PHYS_PAGES) * page_bytes(), sysconf(_SC_NPROCESSORS_ONLN));
  const int descriptor = make_file();
  if (descriptor < 0) return false;
  void* base = MAP_FAILED;
  // Without holes nothing would ever be given back.
  if (ftruncate(descriptor, bytes) == 0 && punch_hole(descriptor, 0, page_bytes()) &&
      fcntl(descriptor, F_ADD_SEALS, kSeals) == 0) {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) warn_that_unmapped("this process", bytes);
  }
  if (base == MAP_FAILED) {
    close(descriptor);
    return false;
  }
  madvise(base, bytes, MADV_DONTDUMP);  // a core dump would fill the holes
  base_ = static_cast<char*>(base);
  std::copy_n(machine.begin(), std::min(machine.size(), address_.machine.size()),
              address_.machine.begin());
  address_.process = getpid();
  address_.descriptor = descriptor;
  address_.bytes = bytes;
  std::random_device random;
  for (int64_t& word : address_.password) word = (int64_t{random()} << 32) | random();
  std::memcpy(base_, address_.password.data(), sizeof(address_.password));
  holes_[page_bytes()] = bytes - page_bytes();
  return true;
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) munmap(base_, address_.bytes);
  if (address_.descriptor >= 0) close(static_cast<int>(address_.descriptor));
}

at::Tensor SharedMemory::allocate(int64_t bytes) {
  const int64_t page = page_bytes();
  const int64_t length = std::max<int64_t>(1, (bytes + page - 1) / page) * page;
  int64_t begin = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto hole = std::find_if(holes_.begin(), holes_.end(),
                                   [&](const auto& h) { return h.second >= length; });
    if (hole == holes_.end()) return {};
    begin = hole->first;
    if (hole->second > length) holes_[begin + length] = hole->second - length;
    holes_.erase(hole);
    blocks_[begin] = length;
  }
  if (!back(begin, length)) {
    free(begin);
    return {};
  }
  return at::from_blob(
      base_ + begin, {bytes}, [self = shared_from_this(), begin](void*) { self->free(begin); },
      at::TensorOptions().dtype(at::kByte));
}

bool SharedMemory::back(int64_t begin, int64_t bytes) const {
  if (!overcommit_is_strict) return true;
  return allocate_in(static_cast<int>(address_.descriptor), FALLOC_FL_KEEP_SIZE, begin, bytes);
}

void SharedMemory::free(int64_t begin) {
  // A forked child leaves the pages to its parent, whose threads may have held the lock at the
  // fork.
  if (address_.process != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(begin);
  int64_t length = block->second;
  blocks_.erase(block);
  // An owner after this one would take what is there for zeros.
  if (!punch_hole(static_cast<int>(address_.descriptor), begin, length)) return;
  auto next = holes_.upper_bound(begin);
  if (next != holes_.end() && next->first == begin + length) {
    length += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
    std::prev(next)->second += length;
  } else {
    holes_[begin] = length;
  }
}

std::optional<int64_t> SharedMemory::offset_of(const at::Tensor& tensor) const {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  if (begin < base_ || begin >= base_ + address_.bytes) return std::nullopt;
  return begin - base_;
}

namespace {

// A mapping is as large as the machine's memory: one is enough for all communicators. Never
// destroyed: communicators may end with the process.
struct Mappings {
  std::mutex mutex;
  std::map<SharedMemoryAddress, std::weak_ptr<PeerMemory>> of;
};

Mappings& mappings() {
  static auto& only = *new Mappings;
  return only;
}

// When a process began, and whether it is one that has ended and has not been waited for yet.
struct ProcessState {
  std::string began;
  bool has_ended = false;
};

// Nothing where there is no process of that number.
std::optional<ProcessState> state_of(int64_t process) {
  const StatFields stat("/proc/" + std::to_string(process) + "/stat");
  if (stat.empty()) return std::nullopt;
  const std::string& state = stat.at(StatFields::kState);  // of its first thread
  const bool others = std::stol(stat.at(StatFields::kThreads)) > 1;
  return ProcessState{stat.at(StatFields::kBegan), (state == "Z" || state == "X") && !others};
}

}  // namespace

std::shared_ptr<PeerMemory> PeerMemory::open(const SharedMemoryAddress& address) {
  const std::lock_guard<std::mutex> lock(mappings().mutex);
  auto& opened = mappings().of;
  std::erase_if(opened, [](const auto& item) { return item.second.expired(); });
  const auto known = opened.find(address);
  std::shared_ptr<PeerMemory> peer = known == opened.end() ? nullptr : known->second.lock();
  if (peer != nullptr && peer->is_there()) return peer;
  peer = map(address);
  if (peer != nullptr) opened[address] = peer;
  return peer;
}

void PeerMemory::give_back_ended() {
  std::vector<std::shared_ptr<PeerMemory>> all;
  {
    const std::lock_guard<std::mutex> lock(mappings().mutex);
    for (const auto& [address, peer] : mappings().of) all.push_back(peer.lock());
  }
  for (const auto& peer : all) {
    if (peer && peer->is_there() && peer->process_has_ended()) peer->give_back();
  }
}

std::shared_ptr<PeerMemory> PeerMemory::map(const SharedMemoryAddress& address) {
  const std::string machine = boot_id();
  if (address.descriptor < 0 || machine.empty() ||
      machine.compare(0, std::string::npos, address.machine.data(),
                      strnlen(address.machine.data(), address.machine.size())) != 0) {
    return nullptr;
  }
  const std::optional<ProcessState> state = state_of(address.process);
  if (!state) return nullptr;
  const std::string path =
      "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  // In another container that number belongs to an unrelated process.
  std::array<char, 64> target{};
  const std::string expected = std::string("/memfd:") + kName + " ";
  if (readlink(path.c_str(), target.data(), target.size() - 1) < 0 ||
      std::strncmp(target.data(), expected.c_str(), expected.size()) != 0) {
    return nullptr;
  }
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  void* base = MAP_FAILED;
  const int seals = fcntl(descriptor, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals;
  if (sealed && lseek(descriptor, 0, SEEK_END) == address.bytes) {
    base = mmap(nullptr, address.bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) {
      warn_that_unmapped("process " + std::to_string(address.process), address.bytes);
    }
  }
  close(descriptor);
  if (base == MAP_FAILED) return nullptr;
  madvise(base, address.bytes, MADV_DONTDUMP);
  std::shared_ptr<PeerMemory> peer(
      new PeerMemory(static_cast<const char*>(base), address, state->began));
  const bool proven = std::memcmp(base, address.password.data(), sizeof(address.password)) == 0;
  // Only of a process that has been there since its state was read is that the right one.
  return proven && !peer->process_has_ended() ? peer : nullptr;
}

PeerMemory::~PeerMemory() { munmap(const_cast<char*>(base_), address_.bytes); }

const void* PeerMemory::at(int64_t offset, int64_t bytes) const {
  TORCH_CHECK(0 <= offset && 0 <= bytes && offset <= address_.bytes - bytes,
              "shared memory: expected ", bytes, " bytes within the peer's ", address_.bytes,
              ", got offset ", offset);
  return base_ + offset;
}

bool PeerMemory::process_has_ended() const {
  const std::optional<ProcessState> state = state_of(address_.process);
  return !state || state->began != began_ || state->has_ended;
}

// A page fault waits while mmap() changes the mapping, and finds the file or zeros.
void PeerMemory::give_back() noexcept {
  given_back_ = true;  // before the first zero can be read
  mmap(const_cast<char*>(base_), address_.bytes, PROT_READ,
       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

bool PeerMemory::is_there() const {
#ifndef __SANITIZE_THREAD__  // which knows no fences, and does not see what other processes write
  // After all that was read before.
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
  return !given_back_;
}

}  // namespace zero
