// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/line_pipe.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace zero {
namespace {

constexpr size_t kLineBytes = 64 << 10;
// So often a call of drain() reads at most, which takes more than a pipe holds. A child that prints
// all the time must not keep the other ranks, and signals, from having their turn.
constexpr int kReads = 16;

}  // namespace

// A terminal with room for one byte is writable, and a write that blocks waits there until it has
// taken all. Whether one blocks belongs to a description that others may have: this is another one.
LineTarget::LineTarget(int to) : to_(to) {
  struct stat status = {};
  const bool pipe = fstat(to, &status) == 0 && S_ISFIFO(status.st_mode);
  if (!pipe && isatty(to) == 0) return;
  own_ = open(("/proc/self/fd/" + std::to_string(to)).c_str(),
              O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
}

LineTarget::~LineTarget() {
  if (own_ >= 0) close(own_);
}

void LineTarget::add(const std::string& text) {
  waiting_ += text;
  write_out();
}

void LineTarget::write_out() {
  size_t done = 0;
  refused_ = false;
  while (done < waiting_.size()) {
    pollfd writable{descriptor(), POLLOUT, 0};
    if (poll(&writable, 1, 0) == 0) break;
    // What is writable and no terminal takes so much without blocking.
    const ssize_t count = write(descriptor(), waiting_.data() + done,
                                std::min<size_t>(waiting_.size() - done, PIPE_BUF));
    refused_ = count < 0 && errno == EAGAIN;
    if (refused_) break;
    if (count < 0 && errno != EINTR) done = waiting_.size();  // The reader has closed its end.
    done += static_cast<size_t>(std::max<ssize_t>(count, 0));
  }
  waiting_.erase(0, done);
}

LinePipe::~LinePipe() {
  if (open()) close(from_);
}

void LinePipe::drain() {
  to_->write_out();
  read_on(/*while_full=*/false);
}

void LinePipe::read_on(bool while_full) {
  std::array<char, 65536> buffer;
  for (int reads = 0; open() && (while_full || !to_->full()) && reads < kReads; ++reads) {
    const ssize_t count = read(from_, buffer.data(), buffer.size());
    if (count > 0) {
      text_.append(buffer.data(), static_cast<size_t>(count));
      pass_on_lines();
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      end();
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

void LinePipe::close_now() {
  read_on(/*while_full=*/true);
  if (open()) end();
}

void LinePipe::end() {
  if (!text_.empty()) {
    text_ += '\n';
    pass_on_lines();
  }
  close(from_);
  from_ = -1;
}

void LinePipe::pass_on_lines() {
  std::string out;
  size_t begin = 0;
  while (begin < text_.size()) {
    const size_t end = std::min(text_.find_first_of("\r\n", begin), begin + kLineBytes);
    if (end >= text_.size()) break;
    const char last = text_[end];
    const bool ended = last == '\r' || last == '\n';
    // Nothing is left of "\r\n" at its second half, and of a bar that returns first.
    const bool empty = end == begin && (last == '\r' || (last == '\n' && returned_));
    if (!empty) out += prefix_ + text_.substr(begin, end - begin) + '\n';
    returned_ = last == '\r';
    begin = ended ? end + 1 : end;
  }
  text_.erase(0, begin);
  to_->add(out);
}

}  // namespace zero
