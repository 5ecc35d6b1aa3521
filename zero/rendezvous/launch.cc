// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/launch.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/descriptors.h"
#include "zero/base/error_text.h"
#include "zero/rendezvous/ended_ranks.h"
#include "zero/rendezvous/environment.h"
#include "zero/rendezvous/job.h"
#include "zero/rendezvous/line_pipe.h"
#include "zero/rendezvous/tcp_store.h"
#include "zero/rendezvous/usable_cores.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

// How late the end of a rank may be noticed.
constexpr int kPollMilliseconds = 20;
// How long the last lines of a job that a signal has ended wait for a reader.
constexpr std::chrono::milliseconds kLastOutput{1000};
// The store is served and asked by this process.
constexpr std::chrono::seconds kServeTimeout{10};
// The parent must not wait longer than this for its own store.
constexpr std::chrono::seconds kStoreLimit{1};

struct Child {
  pid_t pid = -1;  // -1 once it has ended.
  int local_rank = 0;
  std::list<LinePipe> pipes;
};

// The signal to pass on, 0 for none.
std::atomic<int> received_signal{0};
// Whether one has come, also where it is not passed on.
std::atomic<bool> signal_has_come{false};

// stdout and stderr.
using LineTargets = std::array<std::shared_ptr<LineTarget>, 2>;

// Those of this process: one target where both are one file, so that lines stay whole.
LineTargets own_streams() {
  LineTargets targets{std::make_shared<LineTarget>(STDOUT_FILENO),
                      std::make_shared<LineTarget>(STDERR_FILENO)};
  struct stat out = {};
  struct stat error = {};
  const bool known = fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &error) == 0;
  if (known && out.st_dev == error.st_dev && out.st_ino == error.st_ino) targets[1] = targets[0];
  return targets;
}

extern "C" void remember_signal(int number, siginfo_t* info, void*) {
  // A terminal has sent its Ctrl-C to the children as well, and a second one may end them at once.
  // The SIGHUP of one that closes may have come to this process alone.
  if (number == SIGHUP || info->si_code != SI_KERNEL) received_signal = number;
  signal_has_come = true;
}

// While it lives, SIGINT, SIGTERM and SIGHUP are remembered instead of ending this process. A
// SIGHUP that was ignored, as under nohup, stays so. A SIGCHLD that was ignored, which supervisors
// pass on to what they start, or that had a handler would take the exit codes of children.
class SignalCatcher {
 public:
  SignalCatcher() {
    struct sigaction action = {};
    action.sa_sigaction = remember_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    received_signal = 0;
    signal_has_come = false;
    struct sigaction usual = {};
    usual.sa_handler = SIG_DFL;
    for (auto& [signal, before] : before_) {
      sigaction(signal, nullptr, &before);
      if (signal == SIGHUP && before.sa_handler == SIG_IGN) continue;
      sigaction(signal, signal == SIGCHLD ? &usual : &action, nullptr);
    }
  }
  ~SignalCatcher() {
    for (const auto& [signal, before] : before_) sigaction(signal, &before, nullptr);
  }
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;

 private:
  std::map<int, struct sigaction> before_{{SIGINT, {}}, {SIGTERM, {}}, {SIGHUP, {}}, {SIGCHLD, {}}};
};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<std::string> arguments;
  for (size_t begin = 0; begin < all.size();) {
    arguments.emplace_back(all.c_str() + begin);
    begin += arguments.back().size() + 1;
  }
  TORCH_CHECK(!arguments.empty(), "launch_local: cannot read /proc/self/cmdline");
  return arguments;
}

// A process to start: one of `ranks` ranks, or one that joins them with a number above.
struct LaunchedRank {
  int rank = 0;
  int ranks = 0;
  int local_rank = 0;
  bool joins() const { return rank >= ranks; }
};

// Where the ranks find each other.
struct Address {
  int port = 0;
  std::string job;  // identifier
};

// This process's variables with those of a rank in place of its own.
std::vector<std::string> child_environment(const LaunchedRank& launched, const Address& address) {
  const std::string world_size =
      std::to_string(launched.joins() ? launched.rank + 1 : launched.ranks);
  std::map<std::string, std::string> ours{
      {"RANK", std::to_string(launched.rank)},
      {"WORLD_SIZE", world_size},
      {"LOCAL_RANK", std::to_string(launched.local_rank)},
      {"LOCAL_WORLD_SIZE", world_size},
      {"ZERO_JOIN", launched.joins() ? "1" : "0"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(address.port)},
      {"TORCHELASTIC_RUN_ID", address.job},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
  };
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    ours["OMP_NUM_THREADS"] = std::to_string(std::max(1, usable_cores() / launched.ranks));
  }
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (ours.count(text.substr(0, text.find('='))) == 0) result.push_back(text);
  }
  for (const auto& [name, value] : ours) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// Runs in the child between fork and exec. Another thread of the parent may have held any lock
// at the fork, so only calls that take none are allowed here. Signals are blocked: what has come
// since the fork counts once the child has no handler of its parent, and before it takes `mask`.
[[noreturn]] void become(char** arguments, char** environment, int out, int error, pid_t parent,
                         const sigset_t& mask) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == parent) {  // Otherwise it died before the call above, and no signal follows.
    if (out >= 0) dup2(out, STDOUT_FILENO);
    if (error >= 0) dup2(error, STDERR_FILENO);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action = {};
      sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) std::signal(signal, SIG_DFL);
    }
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    execve("/proc/self/exe", arguments, environment);
  }
  _exit(127);
}

Child start_child(const LaunchedRank& launched, const Address& address,
                  const LaunchOptions& options, const LineTargets& targets) {
  const int rank = launched.rank;
  std::vector<std::string> arguments = own_arguments();
  std::vector<std::string> environment = child_environment(launched, address);
  const std::vector<char*> argument_pointers = pointers(arguments);
  const std::vector<char*> environment_pointers = pointers(environment);
  Child child;
  child.local_rank = launched.local_rank;
  // The ends that the child writes to.
  std::array<int, 2> writers{-1, -1};
  const auto at_end = c10::make_scope_exit([&writers] {
    for (const int writer : writers) {
      if (writer >= 0) close(writer);
    }
  });
  for (int stream = 0; stream < 2 && options.prefix_lines; ++stream) {
    std::array<int, 2> ends;
    TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "launch_local: cannot make a pipe for rank ",
                rank, ": ", std::strerror(errno));
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    writers[child.pipes.size()] = ends[1];
    child.pipes.emplace_back(ends[0], targets[child.pipes.size()], c10::str("[", rank, "] "));
  }
  const pid_t parent = getpid();
  sigset_t all, mask;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &mask);
  child.pid = fork();
  if (child.pid == 0) {
    become(const_cast<char**>(argument_pointers.data()),
           const_cast<char**>(environment_pointers.data()), writers[0], writers[1], parent, mask);
  }
  const int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  TORCH_CHECK(child.pid > 0, "launch_local: cannot start rank ", rank, " of ", launched.ranks, ": ",
              std::strerror(fork_error));
  return child;
}

// Starts the children, and looks after them until the last one has ended.
class Parent {
 public:
  Parent(int ranks, const LaunchOptions& options, c10::intrusive_ptr<BoundedStore> store,
         Address address)
      : ranks_(ranks), options_(options), store_(std::move(store)), address_(std::move(address)) {}

  ~Parent() {  // Children are left only when starting one has failed.
    send_all(SIGKILL);
    for (Child& child : children_) {
      if (child.pid > 0) waitpid(child.pid, nullptr, 0);
    }
  }
  Parent(const Parent&) = delete;
  Parent& operator=(const Parent&) = delete;

  int run() {
    for (int rank = 0; rank < ranks_; ++rank) start({rank, ranks_, rank});
    while (alive() > 0 || has_output()) {
      wait_for_output();
      reap();
      if (const int signal = received_signal.exchange(0)) send_all(signal);
      if (signal_has_come.exchange(false)) {
        kill_within(options_.signal_grace);
        ending_ = signalled_ = true;
      }
      if (signalled_ && alive() == 0) kill_within(options_.grace);  // output may be left
      if (Clock::now() >= kill_at_) {
        if (alive() == 0 && signalled_) break;  // the reader has stalled
        send_all(SIGKILL);
        kill_at_ = Clock::now() + kLastOutput;
      }
    }
    return succeeded_ && options_.survivors_go_on ? 0 : exit_code_;
  }

 private:
  void start(const LaunchedRank& launched) {
    children_.push_back(start_child(launched, address_, options_, targets_));
  }

  // Like the lines of ranks it waits for no reader.
  void say(const std::string& line) { targets_[1]->add(line + "\n"); }

  int alive() const {
    return static_cast<int>(std::count_if(children_.begin(), children_.end(),
                                          [](const Child& child) { return child.pid > 0; }));
  }

  void send_all(int signal) const {
    for (const Child& child : children_) {
      if (child.pid > 0) kill(child.pid, signal);
    }
  }

  void kill_within(std::chrono::milliseconds grace) {
    kill_at_ = std::min(kill_at_, Clock::now() + std::min(grace, kLongestTimeout));
  }

  void wait_for_output() {
    std::vector<pollfd> polled;
    for (const auto& target : targets_) {
      if (target->full() && !target->refused()) {
        polled.push_back({target->descriptor(), POLLOUT, 0});
      }
    }
    for (Child& child : children_) {
      for (LinePipe& pipe : child.pipes) {
        if (pipe.open() && !pipe.target().full()) polled.push_back({pipe.descriptor(), POLLIN, 0});
      }
    }
    poll(polled.data(), polled.size(), kPollMilliseconds);
    for (const auto& target : targets_) target->write_out();
    for (Child& child : children_) {
      for (LinePipe& pipe : child.pipes) pipe.drain();
    }
  }

  bool has_output() const {
    return std::ranges::any_of(targets_, [](const auto& target) { return target->full(); });
  }

  void reap() {
    std::vector<int> failed;  // their local ranks
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      Child& child = children_[rank];
      int status = 0;
      if (child.pid <= 0 || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.pid = -1;
      // A process that the rank has left behind may hold the other ends.
      for (LinePipe& pipe : child.pipes) pipe.close_now();
      if (status != 0) failed.push_back(child.local_rank);
      if (options_.survivors_go_on) add_ended_rank(*store_, static_cast<int>(rank));
      report(static_cast<int>(rank), status);
    }
    for (const int local_rank : failed) replace(local_rank);
  }

  void replace(int local_rank) {
    const int replaced = static_cast<int>(children_.size()) - ranks_;
    const bool wanted = options_.survivors_go_on && replaced < options_.replacements;
    // A job of which a rank has ended takes in no other, nor does one that is to end.
    if (!wanted || ending_ || signal_has_come || succeeded_ || alive() == 0) return;
    const int rank = ranks_ + replaced;
    say(c10::str("launch_local: starting rank ", rank, ", which joins the others"));
    try {
      start({rank, ranks_, local_rank});
    } catch (const c10::Error& error) {  // the others do not need it
      say(error.what_without_backtrace());
    }
  }

  void report(int rank, int status) {
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code == 0) succeeded_ = true;
    const bool reported = exit_code_ != 0 && !options_.survivors_go_on;
    if (code == 0 || reported) return;
    if (exit_code_ == 0) exit_code_ = code;
    const std::string who =
        rank < ranks_ ? c10::str("rank ", rank, " of ", ranks_) : c10::str("rank ", rank);
    const std::string how = by_signal ? c10::str("ended by signal ", WTERMSIG(status), " (",
                                                 strsignal(WTERMSIG(status)), ")")
                                      : c10::str("failed with exit code ", code);
    const bool others = alive() > 0 && !ending_;
    const char* then = options_.survivors_go_on ? "; the others go on" : "; stopping the others";
    say(c10::str("launch_local: ", who, " ", how, others ? then : ""));
    if (options_.survivors_go_on) return;
    if (!ending_) send_all(SIGTERM);
    kill_within(options_.grace);
    ending_ = true;
  }

  const int ranks_;
  const LaunchOptions options_;
  const LineTargets targets_ = own_streams();
  const c10::intrusive_ptr<BoundedStore> store_;
  const Address address_;        // of the store
  std::vector<Child> children_;  // by rank
  int exit_code_ = 0;            // Of the first failure.
  bool succeeded_ = false;       // any rank
  bool ending_ = false;
  bool signalled_ = false;  // this process
  Clock::time_point kill_at_ = Clock::time_point::max();
};

// c10d would listen on all interfaces. The system chooses the port, so no other job can have it.
int bind_to_loopback(uint16_t& port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TORCH_CHECK(listener >= 0 && bind(listener, generic, size) == 0 &&
                  getsockname(listener, generic, &size) == 0,
              "launch_local: cannot serve the store at 127.0.0.1: ", std::strerror(errno));
  port = ntohs(address.sin_port);
  return listener;
}

c10::intrusive_ptr<c10d::TCPStore> serve_store(int ranks) {
  c10d::TCPStoreOptions options;
  options.masterListenFd = bind_to_loopback(options.port);  // The store closes it.
  options.isServer = true;
  options.numWorkers = static_cast<size_t>(ranks);
  options.waitWorkers = false;
  options.timeout = kServeTimeout;
  return open_tcp_store("127.0.0.1", options);
}

// The parent opens the store, and two pipes for each rank.
int parent_descriptors(int ranks, const LaunchOptions& options) {
  const int processes = ranks + options.replacements;
  return store_descriptors(processes) + (options.prefix_lines ? 2 * processes : 0);
}

// Returns an identifier that no other job has.
std::string new_job() {
  std::random_device random;
  std::ostringstream text;
  text << "launch_local of process " << getpid() << ", " << std::hex << random();
  return text.str();
}

int run_here(const std::function<int()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error_text(error).c_str());
  }
  return 1;
}

}  // namespace

int launch_local(int ranks, const std::function<int()>& body, const LaunchOptions& options) {
  TORCH_CHECK(ranks >= 1, "launch_local: expected at least 1 rank, got ", ranks);
  TORCH_CHECK(options.replacements >= 0, "launch_local: expected 0 or more replacements, got ",
              options.replacements);
  TORCH_CHECK(options.replacements == 0 || options.survivors_go_on,
              "launch_local: expected survivors_go_on with replacements, got ",
              options.replacements,
              " replacements without it, and where all end with the first that fails there is "
              "nobody to join; set LaunchOptions::survivors_go_on");
  const Environment env = read_environment();
  const bool launched = env.source == Environment::Source::kTorchrun || env.world_size > 1;
  if (launched && env.world_size == 1 && ranks > 1 && !env.joins) {
    std::fprintf(stderr,
                 "launch_local: RANK and WORLD_SIZE=1 are set, so that this process is the only "
                 "rank; unset them to start %d ranks on this machine\n",
                 ranks);
  }
  if (launched || ranks == 1) return run_here(body);
  std::fflush(nullptr);
  return with_c10_errors("launch_local", [&] {
    const std::string problem = make_room_for_descriptors(parent_descriptors(ranks, options));
    TORCH_CHECK(problem.empty(), "launch_local: cannot start ", ranks, " ranks: ", problem);
    const SignalCatcher signals;
    const auto store = serve_store(ranks);
    const auto bounded = c10::make_intrusive<BoundedStore>(store, kStoreLimit);
    const Address address{store->getPort(), new_job()};
    claim_for_job(*bounded->under(prefix_of_restart_round(0)), address.job, ranks);
    return Parent(ranks, options, bounded, address).run();
  });
}

}  // namespace zero
