// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Makes room for the file descriptors of communicators, keeps programs that this process starts
// from inheriting them, and keeps this process alive when the other side has closed one.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace zero {

// Raises the soft limit to the hard one if it is too low for `needed` more descriptors. Returns an
// empty text, or the reason why there is no room.
std::string make_room_for_descriptors(int needed);

// Gloo and the server of c10d's store write to sockets without MSG_NOSIGNAL, so a peer that ends
// would end this process without a message. Python programs ignore the signal from the start;
// others keep a handler of their own if they have one.
void survive_broken_pipes();

// Returns the descriptors that an epoll instance watches; none where /proc cannot be read.
std::vector<int> watched_by(int epoll);

// Gloo and c10d's store open some descriptors without FD_CLOEXEC. A program that a rank has started
// would keep these connections open when the rank is killed, so that its peers would notice only at
// their timeout.
//
// This object remembers the descriptors that were open when it was made, and sets the flag on those
// that a library has opened since. Until then a program that another thread starts can still
// inherit them. Another thread may open descriptors too: those are left alone, unless they are of
// the kind that is named below. Even then little is lost, since dup2(), posix_spawn() and popen()
// pass descriptors to a program under numbers without the flag. Where /proc cannot be read nothing
// is changed.
class NewDescriptors {
 public:
  NewDescriptors();
  // Returns the new epoll instances.
  std::vector<int> epolls() const;
  // Returns what they watch.
  std::vector<int> watched() const;
  // New epoll instances, everything that they watch, and both ends of the pipes among it. That is
  // all that Gloo opens.
  void close_watched_on_exec() const;
  // New pipes of which this process has both ends.
  void close_pipes_on_exec() const;

 private:
  const std::map<int, std::string> before_;  // with their targets
};

}  // namespace zero
