// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/ended_ranks.h"

#include <cstdint>
#include <exception>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace zero {
namespace {

// Of the store without a prefix.
constexpr const char* kEnded = "zero/launcher/ended";

}  // namespace

void add_ended_rank(BoundedStore& store, int rank) noexcept {
  try {
    const std::string text = std::to_string(rank) + " ";
    store.without_prefix()->append(kEnded, {text.begin(), text.end()});
  } catch (const std::exception&) {  // The others notice at their timeouts.
  }
}

std::set<int> ended_ranks(const BoundedStore& store) {
  const auto all = store.without_prefix();
  std::set<int> ranks;
  if (!all->check({kEnded})) return ranks;
  const std::vector<uint8_t> bytes = all->get(kEnded);
  std::istringstream text(std::string(bytes.begin(), bytes.end()));
  for (int rank = 0; text >> rank;) ranks.insert(rank);
  return ranks;
}

bool all_below_have_ended(const BoundedStore& store, int rank) {
  const std::set<int> ended = ended_ranks(store);
  return rank > 0 && std::distance(ended.begin(), ended.lower_bound(rank)) == rank;
}

}  // namespace zero
