// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a program of ranks that are processes, and takes what it prints.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace zero {

struct ProgramEnd {
  int exit_status = -1;  // -1: ended by a signal, or not started
  std::string output;    // stdout and stderr
};

// What an environment variable names, or else `otherwise`.
inline std::string path_in(const char* variable, const char* otherwise) {
  const char* path = std::getenv(variable);
  return path == nullptr ? otherwise : path;
}

inline std::string python() { return path_in("ZERO_PYTHON", "python3"); }

// `command` is for the shell.
inline ProgramEnd run_program(const std::string& command) {
  ProgramEnd end;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  EXPECT_NE(pipe, nullptr) << command;
  if (pipe == nullptr) return end;
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    end.output.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) end.exit_status = WEXITSTATUS(status);
  return end;
}

}  // namespace zero
