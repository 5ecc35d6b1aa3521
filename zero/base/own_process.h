// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Protects objects that own threads or connections in a forked child. The child has a copy of the
// object and none of its threads, so that a join or the destructor of a condition variable would
// block for ever; and it shares the sockets, so that closing a connection properly would end it for
// the parent. In the child the object is never destroyed, and collective calls throw.
#pragma once

#include <c10/util/Exception.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

namespace zero {

// Remembers the process that made an object.
class OwnProcess {
 public:
  bool here() const { return process_ == getpid(); }
  // Throws c10::Error, which begins with `what`, in any other process.
  void check(const std::string& what) const {
    TORCH_CHECK(here(), what, ": expected process ", process_,
                ", which made this object, got its forked child ", getpid(),
                ", which has none of its threads and shares its connections; make collective calls "
                "in the parent only, and start other programs with exec");
  }

 private:
  const pid_t process_ = getpid();
};

// An object that only the process that made it destroys.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_owned(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), [process = OwnProcess()](T* object) {
            if (process.here()) delete object;
          }};
}

}  // namespace zero
