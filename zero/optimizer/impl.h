// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a ZeroOptimizer is made of. Internal.
#pragma once

#include <ATen/core/grad_mode.h>

#include <memory>
#include <type_traits>

#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/recovery.h"
#include "zero/optimizer/replanning.h"
#include "zero/training/engine.h"
#include "zero/zero_optimizer.h"

namespace zero {

struct ZeroOptimizer::Impl {
  // Runs a call of the present engine, and returns what it returns.
  template <typename Body>
  auto run(const Body& body) {
    const at::NoGradGuard no_grad;
    Engine& now = *engine;
    using Result = decltype(body(now));
    if constexpr (std::is_void_v<Result>) {
      now.protocol.fail_stop([&] { body(now); });
    } else {
      Result result;
      now.protocol.fail_stop([&] { result = body(now); });
      return result;
    }
  }

  std::shared_ptr<torch::nn::Module> listed;  // null where the module is the caller's
  std::shared_ptr<const void> rule_use;       // of ZeroOptions::skip_if()
  std::shared_ptr<Engine> engine;  // recover() and changes of parameters put another one here
  Checkpoints checkpoints{engine};
  Recovery recovery{engine, checkpoints.run()};
  Replanning replanning{engine, recovery, checkpoints};
};

}  // namespace zero
