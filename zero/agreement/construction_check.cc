// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/construction_check.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <sstream>

namespace zero {
namespace {

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

constexpr char kEnd[] = "(nothing more)";

std::string next_line(std::istringstream& text) {
  std::string line;
  return std::getline(text, line) ? line : kEnd;
}

[[noreturn]] void throw_problem(Communicator& communicator, const std::string& problem) {
  const auto all = communicator.all_gather_text(problem, "problems at construction");
  TORCH_CHECK(problem.empty(), "rank ", communicator.rank(), ": ", problem);
  std::string text;
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) text += "\n  rank " + std::to_string(r) + ": " + all[r];
  }
  TORCH_CHECK(false, "rank ", communicator.rank(),
              ": the optimizer was not made on any rank because of:", text);
}

[[noreturn]] void throw_difference(Communicator& communicator,
                                   const std::vector<std::string>& lines) {
  const auto all = communicator.all_gather_text(join(lines), "arguments at construction");
  // Rank 0's, then those of the others. Each text is read once, side by side: models have 100,000
  // lines.
  std::vector<std::istringstream> texts;
  for (const std::string& text : all) texts.emplace_back(text);
  while (true) {
    const std::string first = next_line(texts[0]);
    std::string got;
    for (size_t r = 1; r < texts.size(); ++r) {
      const std::string line = next_line(texts[r]);
      if (line != first) got += "\n  rank " + std::to_string(r) + ": " + line;
    }
    TORCH_CHECK(got.empty(), "rank ", communicator.rank(),
                ": expected the same model, options and optimizer on every rank; the first "
                "difference is\n  rank 0: ",
                first, got,
                "\nbuild the model alike on all ranks, with names, shapes and dtypes in the same "
                "order");
    TORCH_INTERNAL_ASSERT(first != kEnd, "descriptions hash differently but are equal");
  }
}

}  // namespace

void check_construction(Communicator& communicator, const std::string& problem,
                        const std::vector<std::string>& lines) {
  if (communicator.world_size() == 1) {
    TORCH_CHECK(problem.empty(), "rank 0: ", problem);
    return;
  }
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(join(lines)) >> 2);
  at::Tensor message = at::empty({3}, at::TensorOptions().dtype(at::kLong));
  auto* words = message.mutable_data_ptr<int64_t>();
  words[0] = problem.empty() ? 0 : 1;
  words[1] = hash;
  words[2] = -hash;
  communicator.all_reduce_max(message, "check of arguments at construction").wait();
  if (words[0] != 0) throw_problem(communicator, problem);
  if (words[1] != -words[2]) throw_difference(communicator, lines);
}

}  // namespace zero
