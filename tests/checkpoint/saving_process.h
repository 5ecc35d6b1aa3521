// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A program that saves checkpoints until it is killed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace zero {

// A program that saves without end and prints a line after each save, in a process group of its
// own: see checkpoint_program.cc.
class SavingProcess {
 public:
  // `replaces`: it saves to one path again and again, too.
  SavingProcess(const char* program, int ranks, const std::string& folder, bool replaces = true) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]);
      execl(program, program, std::to_string(ranks).c_str(), folder.c_str(),
            replaces ? "replaces" : "new names", nullptr);
      _exit(127);
    }
    close(ends[1]);
    output_ = fdopen(ends[0], "r");
  }
  ~SavingProcess() { fclose(output_); }
  SavingProcess(const SavingProcess&) = delete;
  SavingProcess& operator=(const SavingProcess&) = delete;

  // The step of the next save it reports; -1 when it has ended.
  int next_save() {
    char line[256];
    int step = -1;
    while (std::fgets(line, sizeof(line), output_) != nullptr) {
      if (std::sscanf(line, "saved %d", &step) == 1) return step;
    }
    return -1;
  }

  // Stops it where `met`, which may be true for a moment at a time.
  void stop_when(const std::function<bool()>& met) {
    for (;; usleep(100)) {
      if (!met()) continue;
      kill(-pid_, SIGSTOP);
      if (met()) return;
      kill(-pid_, SIGCONT);
    }
  }

  // Returns the last save it reported before it died.
  int kill_now(int last) {
    kill(-pid_, SIGKILL);
    for (int step = next_save(); step >= 0; step = next_save()) last = step;
    int status = 0;
    waitpid(pid_, &status, 0);
    return last;
  }

 private:
  pid_t pid_ = 0;
  FILE* output_ = nullptr;
};

}  // namespace zero
