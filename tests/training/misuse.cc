// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/misuse.h"

#include <c10/util/Exception.h>

#include <exception>

namespace zero {

std::string error_soon(const std::function<void()>& action) {
  const auto start = Clock::now();
  std::string text;
  try {
    action();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_LT(Clock::now() - start, kSoon) << text;
  return text;
}

void expect_survives(const ZeroOptions& options, const std::function<void(Rank&)>& body,
                     int world_size) {
  SCOPED_TRACE("stage " + std::to_string(options.stage()));
  const auto train = [&](const std::function<void(Rank&)>& middle) {
    Trajectory trajectory(static_cast<size_t>(world_size));
    run_ranks(world_size, [&](const Group& group) {
      Rank rank(group, options);
      rank.train(0);
      middle(rank);
      rank.train(2);
      rank.optimizer->check_replicas();
      for (const at::Tensor& p : rank.model->parameters()) {
        trajectory[group.rank()].push_back(p.detach().clone());
      }
    });
    return trajectory;
  };
  const Trajectory clean = train([](Rank& rank) { rank.train(1); });
  EXPECT_EQ(differing_elements(train(body), clean), 0);
}

}  // namespace zero
