// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that descriptors_test starts: descriptor_program <ranks> <scene> [prefix]

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>

#include "zero/launch.h"
#include "zero/process_group.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr char kFromOutside[] = "DESCRIPTORS_FROM_OUTSIDE";

zero::Group init() {
  zero::InitOptions options;
  options.timeout = std::chrono::seconds(20);
  return zero::init_process_group(options);
}

void say(const zero::Group& group, const std::string& text) {
  std::printf("rank %d %s\n", group.rank(), text.c_str());
  std::fflush(stdout);
}

// " socket:[123] anon_inode:[eventpoll]": what process `pid` has open and is not a file.
std::string connections_of(const std::string& pid, bool inherited_only) {
  std::string text;
  for (const auto& entry : fs::directory_iterator("/proc/" + pid + "/fd")) {
    std::error_code gone;  // the directory's own descriptor
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    const int descriptor = std::atoi(entry.path().filename().c_str());
    if (gone || target.front() == '/' || descriptor <= STDERR_FILENO) continue;
    if (inherited_only && (fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0) continue;
    const char* outside = std::getenv(kFromOutside);
    if (outside != nullptr && std::string(outside).find(target) != std::string::npos) continue;
    text += " " + target;
  }
  return text;
}

int open_descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Every rank says what it has, and what a program that it starts would inherit.
int scene_list() {
  const zero::Group group = init();
  const auto control = group.make_communicator("control", zero::Purpose::kControl);
  const auto data = group.make_communicator("data", zero::Purpose::kData);
  control->all_gather_text("", "all are connected");
  say(group, "has:" + connections_of("self", false));
  say(group, "lets inherit:" + connections_of("self", true));
  return 0;
}

pid_t start_sleep() {
  const pid_t child = fork();
  if (child == 0) {
    const int nothing = open("/dev/null", O_RDWR);
    for (int descriptor = 0; descriptor <= 2; ++descriptor) dup2(nothing, descriptor);
    execlp("sleep", "sleep", "60", nullptr);
    _exit(127);
  }
  return child;
}

// The last rank starts a program that outlives it, and is killed while the others wait for it.
int scene_child() {
  std::signal(SIGTERM, SIG_IGN);  // The launcher ends the others at once; they shall speak first.
  const zero::Group group = init();
  const auto control = group.make_communicator("control", zero::Purpose::kControl);
  const auto data = group.make_communicator("data", zero::Purpose::kData);
  control->all_gather_text("", "all are connected");
  if (group.rank() == group.world_size() - 1) {
    const pid_t child = start_sleep();
    // Until the exec the child has what this process has.
    const fs::path link = "/proc/" + std::to_string(child) + "/exe";
    while (fs::read_symlink(link) == fs::read_symlink("/proc/self/exe")) usleep(1000);
    say(group, "started " + std::to_string(child));
    say(group, "gave it:" + connections_of(std::to_string(child), false));
    std::raise(SIGKILL);
  }
  const auto start = Clock::now();
  try {
    data->all_gather_text("", "what the last rank does not send");
  } catch (const c10::Error& error) {
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    say(group, "waited " + std::to_string(took.count()) + " ms: " + error.what_without_backtrace());
  }
  return 0;
}

// The last rank may open only 8 descriptors beyond what it has.
int scene_few() {
  std::signal(SIGTERM, SIG_IGN);
  const zero::Group group = init();
  if (group.rank() == group.world_size() - 1) {
    const auto few = static_cast<rlim_t>(open_descriptors() + 8);
    const rlimit limit{few, few};
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  const auto start = Clock::now();
  try {
    group.make_communicator("data", zero::Purpose::kData)->all_gather_text("", "all are connected");
  } catch (const c10::Error& error) {
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    say(group, "waited " + std::to_string(took.count()) + " ms: " + error.what_without_backtrace());
    return 3;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  if (std::getenv(kFromOutside) == nullptr) {
    setenv(kFromOutside, (connections_of("self", false) + " ").c_str(), 1);
  }
  const std::string scene = argv[2];
  zero::LaunchOptions options;
  options.prefix_lines = argc > 3;
  try {
    return zero::launch_local(
        std::atoi(argv[1]),
        [&] {
          if (scene == "list") return scene_list();
          if (scene == "child") return scene_child();
          if (scene == "few") return scene_few();
          return 2;
        },
        options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "c10::Error: %s\n", error.what_without_backtrace());
    return 4;
  }
}
