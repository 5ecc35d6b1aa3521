// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/tcp_store.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

TEST(TcpStoreTest, AClientFindsWhatTheServerHoldsWithAndWithoutLibuv) {
  for (const char* libuv : {"1", "0"}) {
    setenv("USE_LIBUV", libuv, 1);
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = 0;
    options.waitWorkers = false;
    options.timeout = milliseconds(20000);
    const auto server = open_tcp_store("127.0.0.1", options);
    options.isServer = false;
    options.port = server->getPort();
    const auto client = open_tcp_store("127.0.0.1", options);
    static_cast<c10d::Store&>(*server).set("key", std::string("value"));
    EXPECT_EQ(client->get_to_str("key"), "value");
    // The timeout of later calls is the one that was asked for, not that of one try.
    EXPECT_EQ(client->getTimeout(), milliseconds(20000));
  }
  unsetenv("USE_LIBUV");
}

// A client that closes its connection while the server writes to it would end the process.
TEST(TcpStoreTest, AProcessThatServesAStoreSurvivesBrokenPipes) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto server = open_tcp_store("127.0.0.1", options);
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  EXPECT_EQ(write(ends[1], "x", 1), -1) << "and no signal";
  EXPECT_EQ(errno, EPIPE);
  close(ends[1]);
}

// A port of 127.0.0.1 that accepts connections, as the kernel does, and never answers.
class SilentServer {
 public:
  SilentServer() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    auto* const generic = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(bind(socket_, generic, size), 0);
    EXPECT_EQ(getsockname(socket_, generic, &size), 0);
  }
  ~SilentServer() { close(socket_); }
  void start() { EXPECT_EQ(listen(socket_, 8), 0); }
  uint16_t port() const { return ntohs(address_.sin_port); }

 private:
  const int socket_;
  sockaddr_in address_ = {};
};

c10d::TCPStoreOptions client_of(const SilentServer& server, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = server.port();
  options.timeout = timeout;
  options.waitWorkers = false;
  return options;
}

TEST(TcpStoreTest, AServerThatSaysNothingIsAnErrorInTime) {
  SilentServer server;
  server.start();
  expect_words(
      error_within(milliseconds(2000),
                   [&] { open_tcp_store("127.0.0.1", client_of(server, milliseconds(1000))); }),
      {"what listens at 127.0.0.1:" + std::to_string(server.port()), "does not answer as a store",
       "stopped", "another program has the port"});
}

TEST(TcpStoreTest, NoServerIsAnErrorAfterTheTimeoutAndNotTwice) {
  const SilentServer server;  // Holds the port and does not listen.
  const auto start = Clock::now();
  const std::string text = error_within(milliseconds(4000), [&] {
    open_tcp_store("127.0.0.1", client_of(server, milliseconds(3000)));
  });
  expect_words(text, {"The client socket has timed out"});
  EXPECT_GE(Clock::now() - start, milliseconds(2500)) << text;
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
