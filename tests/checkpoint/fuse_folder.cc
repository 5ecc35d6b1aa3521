// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/checkpoint/fuse_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <system_error>
#include <vector>

namespace zero {
namespace {

constexpr uint32_t kMaxWrite = 128 << 10;

struct Node {
  bool folder = false;
  std::map<std::string, uint64_t> names;
  std::string content;
};

// Answers the kernel's requests, one after the other: see linux/fuse.h. Nothing is cached there.
class Server {
 public:
  Server(int device, const FuseLimits& limits) : device_(device), limits_(limits) {
    nodes_.resize(FUSE_ROOT_ID + 1);
    nodes_[FUSE_ROOT_ID].folder = true;
  }

  void run() {
    std::vector<char> request(kMaxWrite + 4096);
    for (;;) {
      const ssize_t size = read(device_, request.data(), request.size());
      if (size < 0 && (errno == EINTR || errno == ENOENT)) continue;
      if (size < 0) return;  // unmounted
      std::memcpy(&header_, request.data(), sizeof(header_));
      in_ = request.data() + sizeof(header_);
      reply_.clear();
      const int error = answer();
      if (header_.opcode == FUSE_FORGET || header_.opcode == FUSE_BATCH_FORGET ||
          header_.opcode == FUSE_INTERRUPT) {
        continue;
      }
      if (error != 0) reply_.clear();
      fuse_out_header out{};
      out.len = static_cast<uint32_t>(sizeof(out) + reply_.size());
      out.error = -error;
      out.unique = header_.unique;
      reply_.insert(0, reinterpret_cast<const char*>(&out), sizeof(out));
      if (write(device_, reply_.data(), reply_.size()) < 0 && errno != ENOENT) return;
    }
  }

 private:
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, in_, sizeof(T));
    in_ += sizeof(T);
    return value;
  }
  std::string take_name() {
    const std::string name = in_;
    in_ += name.size() + 1;
    return name;
  }
  template <typename T>
  void give(const T& value) {
    reply_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }

  fuse_attr attributes(uint64_t id) const {
    const Node& node = nodes_[id];
    fuse_attr result{};
    result.ino = id;
    result.size = node.content.size();
    result.mode = node.folder ? S_IFDIR | 0755 : S_IFREG | 0644;
    result.nlink = 1;
    result.uid = getuid();
    result.gid = getgid();
    result.blksize = 4096;
    return result;
  }
  void give_attributes(uint64_t id) {
    fuse_attr_out out{};
    out.attr = attributes(id);
    give(out);
  }
  void give_entry(uint64_t id) {
    fuse_entry_out out{};
    out.nodeid = id;
    out.attr = attributes(id);
    give(out);
  }

  int lookup(const std::string& name) {
    const auto& names = nodes_[header_.nodeid].names;
    const auto found = names.find(name);
    if (found == names.end()) return ENOENT;
    give_entry(found->second);
    return 0;
  }
  int make(const std::string& name, bool folder) {
    if (nodes_[header_.nodeid].names.count(name) != 0) return EEXIST;
    nodes_.emplace_back().folder = folder;  // number by number, for ever
    nodes_[header_.nodeid].names[name] = nodes_.size() - 1;
    give_entry(nodes_.size() - 1);
    return 0;
  }
  int remove(const std::string& name, bool folder) {
    auto& names = nodes_[header_.nodeid].names;
    const auto found = names.find(name);
    if (found == names.end()) return ENOENT;
    const Node& node = nodes_[found->second];
    if (node.folder != folder) return folder ? ENOTDIR : EISDIR;
    if (!node.names.empty()) return ENOTEMPTY;
    names.erase(found);
    return 0;
  }
  int rename(uint64_t to_folder, uint32_t flags) {
    const std::string from = take_name(), to = take_name();
    auto& sources = nodes_[header_.nodeid].names;
    auto& targets = nodes_[to_folder].names;
    const auto source = sources.find(from);
    const auto target = targets.find(to);
    if (flags != 0 && !limits_.rename_flags) return EINVAL;
    if (source == sources.end()) return ENOENT;
    Node& moved = nodes_[source->second];
    if (moved.folder && !limits_.renames_folders) return ENOSYS;
    if ((flags & RENAME_EXCHANGE) != 0) {
      if (target == targets.end()) return ENOENT;
      std::swap(source->second, target->second);
      return 0;
    }
    if (target != targets.end()) {
      if ((flags & RENAME_NOREPLACE) != 0) return EEXIST;
      if (!nodes_[target->second].names.empty()) return ENOTEMPTY;
    }
    if (moved.folder && limits_.stops_in_rename) {
      Node half;
      half.folder = true;
      const auto end =
          std::next(moved.names.begin(), static_cast<ptrdiff_t>((moved.names.size() + 1) / 2));
      half.names.insert(moved.names.begin(), end);
      moved.names.erase(moved.names.begin(), end);
      nodes_.push_back(half);
      nodes_[to_folder].names[to] = nodes_.size() - 1;  // `targets` may have moved
      return EIO;
    }
    const uint64_t id = source->second;
    sources.erase(source);
    targets[to] = id;
    return 0;
  }
  // Names by their numbers, so that a removal in the middle of a listing skips none.
  void list(const fuse_read_in& in) {
    std::map<uint64_t, std::string> sorted;
    for (const auto& [name, id] : nodes_[header_.nodeid].names) sorted[id] = name;
    for (auto next = sorted.upper_bound(in.offset); next != sorted.end(); ++next) {
      const auto& [id, name] = *next;
      fuse_dirent entry{};
      entry.ino = id;
      entry.off = id;
      entry.namelen = static_cast<uint32_t>(name.size());
      entry.type = nodes_[id].folder ? DT_DIR : DT_REG;
      const size_t bytes = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + name.size());
      if (reply_.size() + bytes > in.size) return;
      const size_t begin = reply_.size();
      reply_.append(reinterpret_cast<const char*>(&entry), FUSE_NAME_OFFSET);
      reply_ += name;
      reply_.resize(begin + bytes);
    }
  }

  // Returns an errno, or 0 and fills reply_.
  int answer() {
    switch (header_.opcode) {
      case FUSE_INIT: {
        const auto in = take<fuse_init_in>();
        fuse_init_out out{};
        out.major = FUSE_KERNEL_VERSION;
        out.minor = std::min<uint32_t>(in.minor, 31);
        out.max_readahead = in.max_readahead;
        out.flags = FUSE_BIG_WRITES | (limits_.locks ? 0 : FUSE_POSIX_LOCKS);
        out.max_write = kMaxWrite;
        give(out);
        return 0;
      }
      case FUSE_LOOKUP:
        return lookup(take_name());
      case FUSE_GETATTR:
        give_attributes(header_.nodeid);
        return 0;
      case FUSE_SETATTR: {
        const auto in = take<fuse_setattr_in>();
        if ((in.valid & FATTR_SIZE) != 0) nodes_[header_.nodeid].content.resize(in.size);
        give_attributes(header_.nodeid);
        return 0;
      }
      case FUSE_MKDIR:
        take<fuse_mkdir_in>();
        return make(take_name(), true);
      case FUSE_CREATE: {
        take<fuse_create_in>();
        const int error = make(take_name(), false);
        give(fuse_open_out{});
        return error;
      }
      case FUSE_UNLINK:
        return remove(take_name(), false);
      case FUSE_RMDIR:
        return remove(take_name(), true);
      case FUSE_RENAME:
        return rename(take<fuse_rename_in>().newdir, 0);
      case FUSE_RENAME2: {
        const auto in = take<fuse_rename2_in>();
        return rename(in.newdir, in.flags);
      }
      case FUSE_OPEN:
      case FUSE_OPENDIR:
        give(fuse_open_out{});
        return 0;
      case FUSE_READ: {
        const auto in = take<fuse_read_in>();
        const std::string& content = nodes_[header_.nodeid].content;
        if (in.offset < content.size()) reply_ = content.substr(in.offset, in.size);
        return 0;
      }
      case FUSE_WRITE: {
        const auto in = take<fuse_write_in>();
        std::string& content = nodes_[header_.nodeid].content;
        content.resize(std::max<size_t>(content.size(), in.offset + in.size));
        content.replace(in.offset, in.size, in_, in.size);
        fuse_write_out out{};
        out.size = in.size;
        give(out);
        return 0;
      }
      case FUSE_READDIR:
        list(take<fuse_read_in>());
        return 0;
      case FUSE_STATFS: {
        fuse_statfs_out out{};
        out.st.bsize = out.st.frsize = 4096;
        out.st.blocks = out.st.bfree = out.st.bavail = 1 << 20;
        out.st.namelen = 255;
        give(out);
        return 0;
      }
      case FUSE_FSYNCDIR:
        return limits_.syncs_folders ? 0 : EINVAL;
      case FUSE_GETLK:
      case FUSE_SETLK:
      case FUSE_SETLKW:
        return ENOLCK;
      case FUSE_FLUSH:
      case FUSE_FSYNC:
      case FUSE_RELEASE:
      case FUSE_RELEASEDIR:
      case FUSE_ACCESS:
        return 0;
      default:
        return ENOSYS;
    }
  }

  const int device_;
  const FuseLimits& limits_;
  std::vector<Node> nodes_;
  fuse_in_header header_{};
  const char* in_ = nullptr;
  std::string reply_;
};

}  // namespace

FuseFolder::FuseFolder(const std::string& path, const FuseLimits& limits, const std::string& source)
    : path_(path) {
  void* shared =
      mmap(nullptr, sizeof(FuseLimits), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  limits_ = new (shared) FuseLimits(limits);
  const int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  const std::string options = "fd=" + std::to_string(device) +
                              ",rootmode=40000,user_id=" + std::to_string(getuid()) +
                              ",group_id=" + std::to_string(getgid());
  if (device < 0 || mount(source.c_str(), path.c_str(), "fuse", 0, options.c_str()) != 0) {
    problem_ = "/dev/fuse: " + std::generic_category().message(errno);
  } else {
    server_ = fork();
    if (server_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Server(device, *limits_).run();
      _exit(0);
    }
  }
  if (device >= 0) close(device);
}

FuseFolder::~FuseFolder() {
  if (server_ != 0) {
    umount2(path_.c_str(), MNT_DETACH);
    kill(server_, SIGKILL);
    waitpid(server_, nullptr, 0);
  }
  munmap(limits_, sizeof(FuseLimits));
}

}  // namespace zero
