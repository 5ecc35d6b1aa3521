// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/same_on_all_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "zero/agreement/fingerprint.h"
#include "zero/base/error_text.h"
#include "zero/base/plain_text.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

std::string place_of(const std::string& call) {
  return call.empty() ? " at construction" : " of " + call;
}

constexpr char kEnd[] = "(nothing more)";

// Returns whether `own` is the same on all ranks. Collective.
bool same_everywhere(Communicator& communicator, const Fingerprint& own) {
  at::Tensor message = at::empty({kFingerprintWords}, at::TensorOptions().dtype(at::kInt));
  std::ranges::copy(own, message.mutable_data_ptr<int32_t>());
  communicator.all_reduce_max(message, "search for different arguments").wait();
  return all_equal(message.const_data_ptr<int32_t>());
}

// Of the first 0, 1, ... lines.
std::vector<Fingerprint> fingerprints_of_prefixes(const std::vector<std::string>& lines) {
  std::vector<Fingerprint> prefixes{{}};
  for (const std::string& line : lines) {
    const Fingerprint& before = prefixes.back();
    prefixes.push_back(fingerprint_of(plain_text(before[0], "/", before[2], "/", line)));
  }
  return prefixes;
}

[[noreturn]] void throw_problem(Communicator& communicator, const std::string& problem,
                                const std::string& call) {
  const auto all = communicator.all_gather_text(problem, "problems" + place_of(call));
  TORCH_CHECK(problem.empty(), "rank ", communicator.rank(), ": ", problem);
  std::string text;
  std::vector<int> ranks;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    text += "\n  rank " + std::to_string(r) + ": " + all[r];
    ranks.push_back(static_cast<int>(r));
  }
  throw_error(RowCommunicator(communicator).are_newcomers(ranks),
              c10::str("rank ", communicator.rank(), ": ",
                       call.empty() ? "the optimizer was not made on any rank"
                                    : call + " was given up by all ranks",
                       " because of:", text));
}

// Ranks send the line that differs and not all lines: models have 100,000 of them.
[[noreturn]] void throw_difference(Communicator& communicator, std::vector<std::string> lines,
                                   const std::string& call) {
  at::Tensor longest = at::full({1}, static_cast<int64_t>(lines.size()), at::kLong);
  communicator.all_reduce_max(longest, "number of arguments" + place_of(call)).wait();
  lines.resize(static_cast<size_t>(longest.item<int64_t>()), kEnd);
  const std::vector<Fingerprint> prefixes = fingerprints_of_prefixes(lines);
  // The first `same` lines are equal on all ranks, and of the first `different` some is not.
  size_t same = 0, different = lines.size();
  while (different - same > 1) {
    const size_t middle = same + (different - same) / 2;
    (same_everywhere(communicator, prefixes[middle]) ? same : different) = middle;
  }
  const auto all = communicator.all_gather_text(lines[same], "arguments" + place_of(call));
  std::string got;
  std::vector<int> ranks;
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    got += "\n  rank " + std::to_string(r) + ": " + all[r];
    ranks.push_back(static_cast<int>(r));
  }
  TORCH_INTERNAL_ASSERT(!got.empty(), "descriptions hash differently but are equal");
  throw_error(
      RowCommunicator(communicator).are_newcomers(ranks),
      c10::str("rank ", communicator.rank(), ": ", call, call.empty() ? "" : ": ",
               "expected the same model, options and optimizer on every rank; the first "
               "difference is\n  rank 0: ",
               all[0], got,
               call.empty() ? "\nbuild the model alike on all ranks, with names, shapes and "
                              "dtypes in the same order"
                            : "\nmake the call with the same model, parameters and options "
                              "on all ranks",
               RowCommunicator(communicator).has_newcomers()
                   ? "; a process that joins registers what the others have registered "
                     "since, as by a forward pass, before it makes its optimizer"
                   : ""));
}

}  // namespace

void check_same_on_all_ranks(Communicator& communicator, const std::string& problem,
                             const std::vector<std::string>& lines, const std::string& call) {
  if (communicator.world_size() == 1) {
    TORCH_CHECK(problem.empty(), "rank 0: ", problem);
    return;
  }
  at::Tensor message = at::empty({1 + kFingerprintWords}, at::TensorOptions().dtype(at::kInt));
  auto* words = message.mutable_data_ptr<int32_t>();
  words[0] = problem.empty() ? 0 : 1;
  std::ranges::copy(fingerprint_of(join(lines)), words + 1);
  communicator.all_reduce_max(message, "check of arguments" + place_of(call)).wait();
  if (words[0] != 0) throw_problem(communicator, problem, call);
  if (!all_equal(words + 1)) throw_difference(communicator, lines, call);
}

}  // namespace zero
