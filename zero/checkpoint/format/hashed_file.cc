// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/hashed_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero {
namespace {

// What passes by the page cache must have multiples of a disk's blocks as address, place and size.
constexpr size_t kBlock = 4096;

// When a file exceeds its size limit, the kernel sends SIGXFSZ, which ends the
// process. Held back on this thread, write() returns EFBIG instead.
class WithoutSizeSignal {
 public:
  WithoutSizeSignal() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &set_, &old_);
  }
  ~WithoutSizeSignal() {
    if (sigismember(&old_, SIGXFSZ) == 0) {
      const timespec now{};
      sigtimedwait(&set_, nullptr, &now);
    }
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
  }

 private:
  sigset_t set_, old_;
};

}  // namespace

void throw_errno(const std::string& text, int error) {
  TORCH_CHECK(false, text, ": ", std::generic_category().message(error), " (errno ", error, ")");
}

bool is_not_there(const std::error_code& error) {
  return error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
}

struct ContentHash::State {
  XXH3_state_t xxh;
};

// XXH3_state_t asks for 64-byte alignment, which make_unique honours.
ContentHash::ContentHash() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
ContentHash::~ContentHash() = default;
void ContentHash::add(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_64bits_update(&state_->xxh, data, bytes);
}
uint64_t ContentHash::value() const { return XXH3_64bits_digest(&state_->xxh); }

uint64_t content_hash(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

std::string hash_text(uint64_t hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(kHashDigits, '0');
  for (size_t i = kHashDigits; i > 0; --i, hash >>= 4) text[i - 1] = kDigits[hash & 15];
  return text;
}

bool is_hash_text(const std::string& text) {
  return text.size() == kHashDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

uint64_t parse_hash(const std::string& text) {
  TORCH_CHECK(is_hash_text(text), "checksum: expected 16 hexadecimal digits, got ",
              printable(text));
  return std::stoull(text, nullptr, 16);
}

std::string printable(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      result += c;
    } else {
      result += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return result;
}

void check_path(const std::string& path) {
  TORCH_CHECK(path.find('\0') == std::string::npos, "expected a path without a NUL, got ",
              printable(path));
}

FileWriter::FileWriter(std::string path)
    : path_(std::move(path)),
      // First, since no destructor closes what a constructor that throws has opened.
      collected_(static_cast<char*>(std::aligned_alloc(kBlock, kPart)), std::free) {
  check_path(path_);
  if (!collected_) throw_errno("cannot write " + path_, ENOMEM);
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw_errno("cannot create " + path_, errno);
}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileWriter::set_direct(bool direct) {
  direct_ = fcntl(descriptor_, F_SETFL, direct ? O_DIRECT : 0) == 0 && direct;
}

void FileWriter::write(const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const size_t part = std::min(bytes, kPart - collected_bytes_);
    if (part == kPart && reinterpret_cast<uintptr_t>(next) % kBlock == 0) {
      write_out(next, part);
    } else {
      std::memcpy(collected_.get() + collected_bytes_, next, part);
      collected_bytes_ += part;
      if (collected_bytes_ == kPart) flush();
    }
    next += part;
    bytes -= part;
    bytes_ += part;
  }
}

void FileWriter::flush() {
  write_out(collected_.get(), collected_bytes_);
  collected_bytes_ = 0;
}

void FileWriter::write_out(const char* next, size_t bytes) {
  const WithoutSizeSignal guard;
  // Small files gain nothing.
  if (bytes == kPart && std::exchange(small_, false)) set_direct(true);
  for (size_t left = bytes; left > 0;) {
    if (direct_ && left % kBlock != 0) set_direct(false);
    const ssize_t done = ::write(descriptor_, next, left);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EINVAL && direct_) {  // it has larger blocks, or cannot after all
      set_direct(false);
      continue;
    }
    if (done <= 0) throw_errno("cannot write " + path_, done == 0 ? ENOSPC : errno);
    next += done;
    left -= done;
  }
}

void FileWriter::finish() {
  flush();
  if (fsync(descriptor_) != 0) throw_errno("cannot write " + path_ + " to disk", errno);
  close();
}

void FileWriter::close() {
  flush();
  // NFS reports some write errors here only.
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) throw_errno("cannot close " + path_, errno);
}

FileReader::FileReader(std::string path) : StoredBytes(std::move(path), 0) {
  check_path(path_);
  size_ = open_file();
}

uint64_t FileReader::open_file() {
  // A pipe without a writer would block the open for ever; files do not know the flag.
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor_ < 0) throw_errno("cannot open " + path_, errno);
  struct stat status {};
  const int result = fstat(descriptor_, &status);
  const int error = result != 0 ? errno : (S_ISREG(status.st_mode) ? 0 : EINVAL);
  if (error != 0) {
    release();
    throw_errno("cannot read " + path_ + " as a file", error);
  }
  return static_cast<uint64_t>(status.st_size);
}

FileReader::~FileReader() { release(); }

void FileReader::release() {
  StoredBytes::release();
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void FileReader::read(uint64_t offset, void* data, size_t bytes) {
  if (descriptor_ < 0) {
    const uint64_t size = open_file();
    TORCH_CHECK(size == size_, path_, ": expected ", size_, " bytes as before, got ", size,
                "; the file was changed");
  }
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t done = pread(descriptor_, next, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno("cannot read " + path_, errno);
    TORCH_CHECK(done > 0, path_, ": expected ", bytes, " more bytes at ", offset,
                ", but the file ends there; it was truncated");
    next += done;
    offset += done;
    bytes -= done;
    bytes_read_ += done;
  }
}

std::string StoredBytes::read_text(uint64_t offset, size_t bytes) {
  TORCH_CHECK(offset <= size_ && bytes <= size_ - offset, path_, ": expected ", bytes, " bytes at ",
              offset, ", got a file of ", size_, " bytes; it was truncated");
  std::string text(bytes, '\0');
  read(offset, text.data(), bytes);
  return text;
}

void StoredBytes::read_parts(uint64_t begin, uint64_t end, const Take& take) {
  if (!buffer_) buffer_ = std::make_unique_for_overwrite<char[]>(kPart);
  for (uint64_t at = begin; at < end;) {
    const auto part = static_cast<size_t>(std::min<uint64_t>(end - at, kPart));
    read(at, buffer_.get(), part);
    take(at - begin, buffer_.get(), part);
    at += part;
  }
}

uint64_t StoredBytes::scan(uint64_t begin, uint64_t end, const Take& take) {
  ContentHash hash;
  read_parts(begin, end, [&](uint64_t at, const char* data, size_t bytes) {
    hash.add(data, bytes);
    if (take) take(at, data, bytes);
  });
  return hash.value();
}

void sync_folder(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw_errno("cannot open folder " + path, errno);
  const int result = fsync(descriptor);
  const int error = errno;
  close(descriptor);
  // Some network file systems do not know fsync of a folder.
  if (result != 0 && error != EINVAL)
    throw_errno("cannot write folder " + path + " to disk", error);
}

}  // namespace zero
