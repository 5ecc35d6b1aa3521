// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/whole_parameters.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "bookkeeping/layout.h"

namespace zero {
namespace {

constexpr int64_t kMostCost = int64_t{1} << 62;

// Loads as parts of their sums in units of 2^-50. Integers, so that every rank finds the same
// owners whatever its compiler makes of floating-point expressions.
struct Share {
  int64_t numel = 0;
  int64_t cost = 0;

  int64_t most() const { return std::max(numel, cost); }
  int64_t sum() const { return numel + cost; }
};

int64_t part(int64_t load, int64_t sum) {
  return sum == 0 ? 0 : static_cast<int64_t>((static_cast<__int128>(load) << 50) / sum);
}

std::vector<Share> shares(c10::ArrayRef<ParameterLoad> parameters) {
  ParameterLoad sum;
  for (const ParameterLoad& load : parameters) {
    TORCH_CHECK(load.numel < kMostCost - sum.numel && load.cost < kMostCost - sum.cost,
                "whole parameters: expected sizes and costs that add up to less than 2^62 each; "
                "use a larger unit of cost");
    sum.numel += load.numel;
    sum.cost += load.cost;
  }
  std::vector<Share> result;
  result.reserve(parameters.size());
  for (const ParameterLoad& load : parameters) {
    result.push_back({part(load.numel, sum.numel), part(load.cost, sum.cost)});
  }
  return result;
}

// The ranks by load. Machines are ordered by their least loaded rank, then by their own load, and
// the ranks of a machine by load.
class Ranks {
 public:
  Ranks(int64_t world_size, int64_t ranks_per_machine)
      : per_machine_(ranks_per_machine),
        loads_(world_size),
        machines_((world_size + ranks_per_machine - 1) / ranks_per_machine) {
    for (int64_t rank = 0; rank < world_size; ++rank) {
      machines_[rank / per_machine_].ranks.insert(machines_[rank / per_machine_].ranks.end(),
                                                  {0, 0, rank});
    }
    for (size_t m = 0; m < machines_.size(); ++m) order_.insert(order_.end(), key(m));
  }

  // Adds `share` to the least loaded rank and returns that.
  int64_t add(const Share& share) {
    const auto m = static_cast<size_t>(std::get<3>(*order_.begin()));
    Machine& machine = machines_[m];
    order_.erase(order_.begin());
    const int64_t rank = std::get<2>(*machine.ranks.begin());
    machine.ranks.erase(machine.ranks.begin());
    Share& load = loads_[rank];
    load.numel += share.numel;
    load.cost += share.cost;
    machine.load += share.sum();
    machine.ranks.insert({load.most(), load.sum(), rank});
    order_.insert(key(m));
    return rank;
  }

 private:
  struct Machine {
    std::set<std::tuple<int64_t, int64_t, int64_t>> ranks;  // most(), sum() and the rank
    int64_t load = 0;
  };
  // most() and sum() of its least loaded rank, its load and its number.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t>;

  Key key(size_t m) const {
    const auto& [most, sum, rank] = *machines_[m].ranks.begin();
    return {most, sum, machines_[m].load, static_cast<int64_t>(m)};
  }

  int64_t per_machine_;
  std::vector<Share> loads_;
  std::vector<Machine> machines_;
  std::set<Key> order_;
};

}  // namespace

ParameterLoad load_of(const ParameterInfo& info) {
  const int64_t numel = round_up(info.numel, std::max(alignment_of(info.dtype), info.block));
  return {numel, numel == 0 ? 0 : info.cost.value_or(numel)};
}

int64_t newton_schulz_cost(int64_t rows, int64_t columns) {
  TORCH_CHECK(rows >= 0 && columns >= 0, "matrix: expected sizes of 0 or more, got ", rows, " and ",
              columns);
  const auto [side, length] = std::minmax<__int128>({rows, columns});
  const __int128 factor = length < 2 * side ? 15 * length + 9 * side : 10 * length + 17 * side;
  __int128 cost = 0;
  const bool fits = !__builtin_mul_overflow(side * side, factor, &cost) && cost / 24 < kMostCost;
  TORCH_CHECK(fits, "matrix: expected a cost below 2^62, got sizes ", rows, " and ", columns);
  return static_cast<int64_t>(cost / 24);
}

std::vector<int64_t> assign_owners(c10::ArrayRef<ParameterLoad> parameters, int64_t world_size,
                                   int64_t ranks_per_machine) {
  const std::vector<Share> share = shares(parameters);
  std::vector<int64_t> order(parameters.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::pair(share[a].most(), share[a].sum()) > std::pair(share[b].most(), share[b].sum());
  });
  Ranks ranks(world_size, ranks_per_machine);
  std::vector<int64_t> owners(parameters.size());
  for (const int64_t p : order) owners[p] = ranks.add(share[p]);
  return owners;
}

}  // namespace zero
