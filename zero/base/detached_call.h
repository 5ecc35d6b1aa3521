// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs a call on a thread of its own, so that the caller can stop waiting for it: calls of
// libtorch's store and of Gloo's connections block for ever when the other side is stopped or
// silent.
#pragma once

#include <future>
#include <optional>
#include <type_traits>
#include <utility>

#include "zero/base/threads.h"

namespace zero {

// Runs call() on a new thread. `call` must own all that it uses, since it may outlive the caller.
// It is destroyed before the result is there, so that what it owns ends on the thread that waits.
// `name` and errors are those of start_thread().
template <typename Call>
std::future<std::invoke_result_t<Call&>> start_detached(Call call, const char* name = "call") {
  using Result = std::invoke_result_t<Call&>;
  std::promise<Result> promise;
  std::future<Result> future = promise.get_future();
  auto body = [promise = std::move(promise), call = std::make_optional(std::move(call))]() mutable {
    try {
      if constexpr (std::is_void_v<Result>) {
        (*call)();
        call.reset();
        promise.set_value();
      } else {
        Result result = (*call)();
        call.reset();
        promise.set_value(std::move(result));
      }
    } catch (...) {
      call.reset();
      promise.set_exception(std::current_exception());
    }
  };
  start_detached_thread(std::move(body), name);
  return future;
}

}  // namespace zero
