// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Agrees on every collective call before data is sent: host to host, the ranks compare that all of
// them make the same call and that none has a problem, and learn how many rounds must be sent and
// which parameters any rank used. This turns misuse on one rank into an exception on all of them
// instead of a hang or mixed-up data.
//
// A call costs one all-reduce (MAX) of 14 int32. If ranks used different parameters, a second
// message carries one bit per parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/problem_board.h"
#include "zero/process_group.h"

namespace zero {

// The collective calls of a ZeroOptimizer. Values are sent: never reorder.
enum class Call : int32_t {
  kReduceGradients = 1,
  kClipGradNorm,
  kStep,
  kZeroGrad,
  kGradient,
  kMaster,
  kRefreshMasters,
  kRefreshWorking,
  kBroadcastBuffers,
  kCheckReplicas,
  kSaveCheckpoint,
  kLoadCheckpoint,
  kFreeze,
  kUnfreeze,
  kAddParamGroup,
  kLatestCheckpoint,
  kClipGradValue,
  kResizeRows,
  kUseEma,
  kEndEma,
};

const char* call_name(Call call);

// Why a rank cannot make a call.
struct Problem {
  Problem() = default;
  // `recoverable`: not a fault of this program, see zero/errors.h.
  Problem(std::string why, bool recoverable = false)
      : text(std::move(why)), of_communication(recoverable) {}
  Problem(const char* why) : text(why) {}
  bool empty() const { return text.empty(); }

  std::string text;
  bool of_communication = false;
};

struct Agreement {
  int64_t rounds = 0;         // the most any rank needs
  bool passes = false;        // whether any rank began a backward pass
  std::vector<uint8_t> used;  // 1 where any rank used the parameter
};

// The arguments of a call, as text for errors.
struct CallArguments {
  std::string on_all_ranks;  // equal on every rank; only a hash is sent
  std::string by_domain;     // equal on the ranks that hold the same parameters, which compared it
  bool domains_differ = false;  // the result of that comparison
};

class ControlChannel {
 public:
  // `communicator` spans `group`, whose store carries the texts of problems;
  // the message only announces them.
  ControlChannel(Communicator& communicator, const Group& group);
  ~ControlChannel();

  // Collective, blocks. Puts together what each rank has of its `own`. Throws on every rank when
  // any rank has a `problem` (empty: none), or when calls or arguments differ; the text says which
  // rank and why. The type is the same on all ranks: CommunicationError where all problems are of
  // communication, else another c10::Error. Where only ranks that join the job are the reason, the
  // others throw CommunicationError: they may go on without those.
  Agreement agree(Call call, const CallArguments& arguments, const Problem& problem,
                  const Agreement& own);

  // Leaves a problem in the store for the others in case this rank never reaches its next agree().
  // Forgotten when an agree() succeeds. Never throws, waits for no rank and at most 200 ms for the
  // store.
  void announce(const std::string& problem) noexcept;
  // After a failure of the transport: announces `text`, unless this rank has announced what led to
  // it, and returns what the other ranks announce, one line each, and which ranks announce nothing.
  // Never throws, takes at most 500 ms.
  std::string report_failure(const std::string& text) noexcept;

 private:
  [[noreturn]] void throw_different_calls(Call call, const CallArguments& arguments);
  // Collective. Returns whether the ranks whose `own` differs from the `expected` text, which is
  // that of rank 0 if there is none, are all newcomers, and this rank is not.
  bool is_of_newcomers(const std::string& own, const std::optional<std::string>& expected);

  Communicator& communicator_;
  ProblemBoard board_;
  int64_t sequence_ = 0;
  std::atomic<bool> has_announced_ = false;
};

// One flag per parameter as bits of a message: [ceil(flags / 32)] int32, for a bitwise OR over
// ranks, and back.
at::Tensor pack_flags(const std::vector<uint8_t>& flags);
void unpack_flags(const at::Tensor& bits, std::vector<uint8_t>& flags);

}  // namespace zero
