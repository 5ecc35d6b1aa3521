// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device/collective_rules.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "tests/support/device/past.h"

namespace zero {
namespace {

using Call = CollectiveCall;
using CallPtr = std::shared_ptr<const Call>;

// A kernel, a copy or a collective.
struct Work {
  c10::StreamId stream = 0;
  int64_t number = 0;  // among the calls of the stream
  bool before(const Past& past) const { return past.has(stream, number); }
};

struct Use : Work {
  DeviceMemory memory;
  bool writes = false;
};

struct Collective : Work {
  CallPtr call;
  bool in_pass = false;
  // Its memory, as long as that is not another's.
  DeviceMemory input;
  DeviceMemory output;

  bool in_place() const { return input.overlaps(output); }
  // Returns whether using this memory meanwhile is a race.
  bool conflicts(const DeviceMemory& memory, bool writes) const {
    if (writes && memory.overlaps(input)) return true;
    if (!memory.overlaps(output)) return false;
    // In place the own row is read alone.
    const bool own_row = in_place() && memory.begin >= input.begin &&
                         memory.begin + memory.bytes <= input.begin + input.bytes;
    return writes || !own_row || call->kind == Call::Kind::kAllReduce ||
           call->kind == Call::Kind::kBroadcast;
  }
};

struct Block {
  DeviceMemory memory;
  c10::StreamId stream = 0;
  std::set<c10::StreamId> used_on = {};
};

std::string name_of(const Call& call) {
  return c10::str("collective ", call.number, " of communicator ", call.communicator, " on rank ",
                  call.rank, ", ", call.text, ",");
}

// What is checked of one call alone.
std::vector<std::string> problems_of(const Call& call) {
  std::vector<std::string> result;
  const auto say = [&](const char* rule, const std::string& text) {
    result.push_back(c10::str(rule, ": ", name_of(call), " ", text));
  };
  const int64_t input = call.input.bytes;
  const auto size = static_cast<int64_t>(c10::elementSize(call.dtype));
  for (const DeviceMemory& memory : {call.input, call.output}) {
    if (reinterpret_cast<uintptr_t>(memory.begin) % size != 0) {
      say("memory", "has a pointer that is no multiple of " + std::to_string(size));
    }
  }
  if (input > 0 && call.input.overlaps(call.output)) {
    const DeviceMemory& whole = call.kind == Call::Kind::kReduceScatter ? call.input : call.output;
    const DeviceMemory& part = call.kind == Call::Kind::kReduceScatter ? call.output : call.input;
    const bool by_row =
        call.kind == Call::Kind::kReduceScatter || call.kind == Call::Kind::kAllGather;
    if (call.kind == Call::Kind::kAllToAll) {
      say("memory", "sends from what it receives into");
    } else if (by_row ? part.begin != whole.begin + call.rank * part.bytes
                      : call.input != call.output) {
      say("memory", "has input and output that overlap and are not in place");
    }
  }
  if (call.kind == Call::Kind::kAllGather && call.output.bytes != call.ranks * input) {
    say("memory", "has room for other rows than it receives");
  }
  if (call.kind == Call::Kind::kReduceScatter && input != call.ranks * call.output.bytes) {
    say("memory", "has room for another row than it receives");
  }
  switch (call.dtype) {
    case at::kByte:
    case at::kChar:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      break;
    default:
      say("dtypes", "has one that NCCL does not know");
  }
  const bool reduces =
      call.kind == Call::Kind::kAllReduce || call.kind == Call::Kind::kReduceScatter;
  const bool maximum = call.operation == c10d::ReduceOp::MAX;
  if (reduces && !maximum && call.operation != c10d::ReduceOp::SUM) {
    say("dtypes", "reduces neither to a sum nor to a maximum");
  }
  if (reduces && maximum && c10::isFloatingType(call.dtype)) {
    say("dtypes", "takes the maximum of floats");
  }
  return result;
}

class Device {
 public:
  explicit Device(const CollectiveRules& rules) : rules_(rules) {}

  void follow(const DeviceCall& call, std::vector<std::string>& broken) {
    using Kind = DeviceCall::Kind;
    Past& past = streams_[call.stream];
    // The host asks for it when it knows what it knows.
    past.join(host_);
    switch (call.kind) {
      case Kind::kUse:
        use(call, past, broken);
        break;
      case Kind::kRecord:
        events_[call.event] = past;
        break;
      case Kind::kWait:
        if (call.in_pass && call.stream == call.model && !call.captured) {
          check_pass("the stream of the model", past, events_[call.event], broken);
        }
        past.join(events_[call.event]);
        break;
      case Kind::kHostSawStream:
        host_saw(call, past, broken);
        break;
      case Kind::kHostSawEvent:
        host_saw(call, events_[call.event], broken);
        break;
      case Kind::kAllocate:
        allocate(call);
        break;
      case Kind::kRecordStream:
        if (Block* block = find(call.memory.begin)) block->used_on.insert(call.stream);
        break;
      case Kind::kFree:
        free(call, broken);
        break;
      case Kind::kCollective:
        start(call, past, broken);
        break;
      case Kind::kCollectiveWait:
        waited_.insert(call.collective);
        break;
      case Kind::kEnd:
        break;
    }
  }

  void end(std::vector<std::string>& broken) const {
    if (!rules_.finished) return;
    for (const CallPtr& call : started_) {
      if (!waited_.contains(call)) {
        broken.push_back("waits: " + name_of(*call) + " was not waited for");
      }
    }
  }

 private:
  // Older ones have ended long ago.
  static constexpr size_t kUses = 512;
  static constexpr size_t kCollectives = 128;

  // `who`, which knows `before`, waits in a backward pass for what is in `joined`.
  void check_pass(const char* who, const Past& before, const Past& joined,
                  std::vector<std::string>& broken) const {
    for (const Collective& c : collectives_) {
      if (!c.in_pass || c.before(before) || !c.before(joined)) continue;
      broken.push_back(c10::str("passes: ", who, " waits in a backward pass for ", name_of(*c.call),
                                " which a peer may begin after it"));
    }
  }

  void host_saw(const DeviceCall& call, const Past& past, std::vector<std::string>& broken) {
    if (call.in_pass && call.waits) check_pass("the host", host_, past, broken);
    host_.join(past);
  }

  void use(const DeviceCall& call, Past& past, std::vector<std::string>& broken) {
    Use use;
    use.stream = call.stream;
    use.number = past.add_call(call.stream);
    use.memory = call.memory;
    use.writes = call.writes;
    for (const Collective& c : collectives_) {
      if (!c.conflicts(use.memory, use.writes) || c.before(past)) continue;
      broken.push_back(c10::str("streams: memory of ", name_of(*c.call), " is ",
                                use.writes ? "written" : "read", " on stream ", use.stream,
                                ", which does not wait for it"));
    }
    uses_.push_back(use);
    if (uses_.size() > kUses) uses_.pop_front();
  }

  void start(const DeviceCall& call, Past& past, std::vector<std::string>& broken) {
    Collective started;
    started.stream = call.stream;
    started.call = call.collective;
    started.in_pass = call.in_pass;
    started.input = call.collective->input;
    started.output = call.collective->output;
    const std::string name = name_of(*started.call);
    for (const std::string& problem : problems_of(*started.call)) broken.push_back(problem);
    if (call.in_pass && started.call->connects) {
      broken.push_back("passes: " + name + " connects in a backward pass");
    }
    for (const Use& u : uses_) {
      if (!started.conflicts(u.memory, u.writes) || u.before(past)) continue;
      broken.push_back(c10::str("streams: ", name, " does not wait for stream ", u.stream,
                                ", which ", u.writes ? "writes" : "reads", " its memory"));
    }
    for (const Collective& c : collectives_) {
      if (c.before(past)) continue;
      if (c.conflicts(started.input, false) || c.conflicts(started.output, true)) {
        broken.push_back("streams: " + name + " uses memory of " + name_of(*c.call) +
                         " which has not ended");
      }
      if (rules_.one_order && c.call->communicator != started.call->communicator) {
        broken.push_back("one order: " + name + " may begin before the end of " + name_of(*c.call));
      }
    }
    started.number = past.add_call(call.stream);
    started_.push_back(started.call);
    collectives_.push_back(std::move(started));
    if (collectives_.size() > kCollectives) collectives_.pop_front();
  }

  // What was there before is forgotten with its memory.
  void allocate(const DeviceCall& call) {
    std::erase_if(uses_, [&](const Use& u) { return u.memory.overlaps(call.memory); });
    for (Collective& c : collectives_) {
      if (c.input.overlaps(call.memory)) c.input = {};
      if (c.output.overlaps(call.memory)) c.output = {};
    }
    blocks_[call.memory.begin] = {call.memory, call.stream};
  }

  void free(const DeviceCall& call, std::vector<std::string>& broken) {
    const auto found = blocks_.find(call.memory.begin);
    if (found == blocks_.end()) return;
    const Block block = found->second;
    blocks_.erase(found);
    for (const Collective& c : collectives_) {
      if (!c.input.overlaps(block.memory) && !c.output.overlaps(block.memory)) continue;
      const auto waits = [&](c10::StreamId stream) {
        Past past = streams_[stream];
        past.join(host_);
        return c.before(past);
      };
      if (waits(block.stream) || std::ranges::any_of(block.used_on, waits)) continue;
      broken.push_back("lifetime: memory of " + name_of(*c.call) +
                       " is freed, and no stream of the memory waits for it");
    }
  }

  Block* find(const char* memory) {
    auto found = blocks_.upper_bound(memory);
    if (found == blocks_.begin()) return nullptr;
    --found;
    return &found->second;
  }

  const CollectiveRules rules_;
  std::map<c10::StreamId, Past> streams_;
  std::map<const void*, Past> events_;
  Past host_;
  std::map<const char*, Block> blocks_;
  std::deque<Use> uses_;
  std::deque<Collective> collectives_;
  std::vector<CallPtr> started_;
  std::set<CallPtr> waited_;
};

// Devices are ranks.
void compare_ends(const std::vector<DeviceCall>& calls, std::vector<std::string>& broken) {
  std::map<int, std::vector<int64_t>> ends;
  for (const DeviceCall& call : calls) {
    if (call.kind == DeviceCall::Kind::kEnd) {
      ends[call.device].push_back(call.collective->communicator);
    }
  }
  const auto shared = [](std::vector<int64_t> of, const std::vector<int64_t>& others) {
    std::erase_if(
        of, [&](int64_t number) { return std::ranges::find(others, number) == others.end(); });
    return of;
  };
  for (auto a = ends.begin(); a != ends.end(); ++a) {
    for (auto b = std::next(a); b != ends.end(); ++b) {
      const auto first = shared(a->second, b->second), second = shared(b->second, a->second);
      if (first == second) continue;
      broken.push_back(c10::str("ends: device ", a->first, " ends communicators ", first,
                                ", and device ", b->first, " ", second));
    }
  }
}

void compare_ranks(const std::vector<DeviceCall>& calls, const CollectiveRules& rules,
                   std::vector<std::string>& broken) {
  std::map<int64_t, std::map<int, std::vector<CallPtr>>> communicators;
  for (const DeviceCall& call : calls) {
    if (call.kind != DeviceCall::Kind::kCollective) continue;
    const CallPtr& collective = call.collective;
    auto& ranks = communicators[collective->communicator];
    for (int rank = 0; rank < collective->ranks; ++rank) ranks.try_emplace(rank);
    ranks[collective->rank].push_back(collective);
  }
  for (const auto& [number, ranks] : communicators) {
    const std::vector<CallPtr>& first = ranks.begin()->second;
    for (const auto& [rank, list] : ranks) {
      const auto differ = std::ranges::mismatch(
          first, list, [](const CallPtr& a, const CallPtr& b) { return a->text == b->text; });
      const bool ends = differ.in1 == first.end() || differ.in2 == list.end();
      if (!ends) {
        broken.push_back("same calls: " + name_of(**differ.in1) + " meets " +
                         name_of(**differ.in2));
      } else if (rules.finished && first.size() != list.size()) {
        broken.push_back(c10::str("same calls: communicator ", number, " has ", first.size(),
                                  " collectives on rank 0 and ", list.size(), " on rank ", rank));
      }
    }
  }
}

}  // namespace

std::vector<std::string> broken_rules(const std::vector<DeviceCall>& calls,
                                      const CollectiveRules& rules) {
  std::vector<std::string> broken;
  std::map<int, Device> devices;
  for (const DeviceCall& call : calls) {
    devices.try_emplace(call.device, rules).first->second.follow(call, broken);
  }
  for (const auto& [number, device] : devices) device.end(broken);
  compare_ranks(calls, rules, broken);
  if (rules.finished) compare_ends(calls, broken);
  return broken;
}

}  // namespace zero
