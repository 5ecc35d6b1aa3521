// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/control_channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "zero/agreement/fingerprint.h"
#include "zero/base/error_text.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

// The words of the message, of which all ranks get the maxima. The maximum of a value and that of
// its negative show whether all ranks sent the same.
enum Word : int64_t {
  kCall,
  kMinusCall,
  kProblemRank,      // 0, or 1 and a rank; beyond the number of ranks for a problem of its own
  kRounds,           // the most that any rank needs
  kPasses,           // 1 where any rank began a backward pass
  kArgumentsDiffer,  // 1 where ranks that hold the same parameters gave different ones
  kArguments,        // a fingerprint
  kUsed = kArguments + kFingerprintWords,  // a fingerprint of which parameters a rank used
  kWords = kUsed + kFingerprintWords
};

std::string problem_topic(int64_t sequence) { return "problem/" + std::to_string(sequence); }

constexpr const char* kGoOnWithout =
    ". Only ranks that have joined the job are the reason: the others go on without them after "
    "recover()";

// An error lists the calls of so many ranks, however many there are.
constexpr size_t kRanksListed = 64;

constexpr size_t kBits = 32;  // flags in each int32

}  // namespace

const char* call_name(Call call) {
  static constexpr const char* kNames[] = {"reduce_gradients()",
                                           "clip_grad_norm_()",
                                           "step()",
                                           "zero_grad()",
                                           "gradient()",
                                           "master()",
                                           "refresh_master_parameters()",
                                           "refresh_working_parameters()",
                                           "broadcast_buffers()",
                                           "check_replicas()",
                                           "save_checkpoint()",
                                           "load_checkpoint()",
                                           "freeze()",
                                           "unfreeze()",
                                           "add_param_group()",
                                           "latest_checkpoint()",
                                           "clip_grad_value_()",
                                           "resize_rows()",
                                           "use_ema()",
                                           "the end of use_ema()"};
  static_assert(std::size(kNames) == static_cast<size_t>(Call::kEndEma));
  return kNames[static_cast<size_t>(call) - 1];
}

ControlChannel::ControlChannel(Communicator& communicator, const Group& group)
    : communicator_(communicator),
      board_(group.make_store("control"), group.rank(), group.world_size(), group.timeout()) {}

ControlChannel::~ControlChannel() = default;

//   1. A rank with a problem leaves its text in the store: the others read it only if they learn
//      from the message that there is one.
//   2. All ranks exchange one message, and get the same maxima.
//   3. A problem of any rank is thrown by all: the highest number, so that all throw the same.
//   4. So are different calls or arguments. All ranks then send each other their own.
//   5. All are well. Only where ranks used different parameters a second message carries the flags.
// All ranks take the same way through 3 to 5, since they compare the same words.
Agreement ControlChannel::agree(Call call, const CallArguments& arguments, const Problem& problem,
                                const Agreement& own) {
  const int rank = communicator_.rank();
  ++sequence_;
  // 1
  if (!problem.empty() && communicator_.world_size() > 1) {
    board_.leave(problem_topic(sequence_), problem.text);
  }
  // 2
  at::Tensor message = at::empty({kWords}, at::TensorOptions().dtype(at::kInt));
  auto* words = message.mutable_data_ptr<int32_t>();
  words[kCall] = static_cast<int32_t>(call);
  words[kMinusCall] = -words[kCall];
  // A problem that another rank caused gives way to one that is a rank's own.
  const int world_size = communicator_.world_size();
  words[kProblemRank] =
      problem.empty() ? 0 : rank + 1 + (problem.of_communication ? 0 : world_size);
  words[kRounds] = static_cast<int32_t>(own.rounds);
  words[kPasses] = own.passes ? 1 : 0;
  words[kArgumentsDiffer] = arguments.domains_differ ? 1 : 0;
  std::ranges::copy(fingerprint_of(arguments.on_all_ranks), words + kArguments);
  std::ranges::copy(fingerprint_of(own.used), words + kUsed);
  const std::string label = std::string("control message of ") + call_name(call);
  communicator_.all_reduce_max(message, label).wait();
  // 3
  if (words[kProblemRank] != 0) {
    const int from = (words[kProblemRank] - 1) % world_size;
    const bool of_communication = words[kProblemRank] <= world_size;
    const bool is_own = !problem.empty() && problem.of_communication == of_communication;
    const bool of_newcomers =
        !of_communication &&
        is_of_newcomers(problem.empty() || problem.of_communication ? "" : "own", "");
    throw_error(of_communication || of_newcomers,
                is_own ? c10::str("rank ", rank, ": ", problem.text)
                       : c10::str("rank ", rank, ": ", call_name(call),
                                  " was given up by all ranks because of rank ", from, ": ",
                                  board_.text_of(problem_topic(sequence_), from),
                                  of_newcomers ? kGoOnWithout : ""));
  }
  // 4
  const bool same_arguments = all_equal(words + kArguments) && words[kArgumentsDiffer] == 0;
  if (words[kCall] != -words[kMinusCall] || !same_arguments) {
    throw_different_calls(call, arguments);
  }
  // 5. What this rank announced before is settled.
  if (has_announced_) announce("");
  Agreement agreement{words[kRounds], words[kPasses] != 0, own.used};
  if (!all_equal(words + kUsed)) {
    const at::Tensor bits = pack_flags(own.used);
    communicator_.all_reduce_or(bits, "used parameters, " + label).wait();
    unpack_flags(bits, agreement.used);
  }
  return agreement;
}

void ControlChannel::throw_different_calls(Call call, const CallArguments& arguments) {
  const int rank = communicator_.rank();
  const bool both = !arguments.on_all_ranks.empty() && !arguments.by_domain.empty();
  const std::string text_of_arguments =
      arguments.on_all_ranks + (both ? ", " : "") + arguments.by_domain;
  const std::string own =
      call_name(call) + (text_of_arguments.empty() ? "" : " with " + text_of_arguments);
  const auto calls = communicator_.all_gather_text(own, "calls that differ");
  std::set<std::string> listed;
  std::string text;
  for (size_t r = 0; r < calls.size(); ++r) {
    // Of the others those that call what is not listed yet, so that the difference always is.
    const bool is_new = listed.insert(calls[r]).second;
    if (is_new || r < kRanksListed) text += "\n  rank " + std::to_string(r) + ": " + calls[r];
  }
  const bool zero_grad = text.find(call_name(Call::kZeroGrad)) != std::string::npos;
  const bool of_newcomers = is_of_newcomers(own, std::nullopt);
  throw_error(
      of_newcomers,
      c10::str("rank ", rank, ": expected the same call with the same arguments on every rank, got",
               text,
               "\nmake collective calls on all ranks in the same order; nothing was sent, so they "
               "can be made again",
               zero_grad ? ". zero_grad() is collective on a rank that has gradients and local on "
                           "one that has none: some ranks had none"
                         : "",
               of_newcomers ? kGoOnWithout : "", board_.announced()));
}

bool ControlChannel::is_of_newcomers(const std::string& own,
                                     const std::optional<std::string>& expected) {
  if (!RowCommunicator(communicator_).has_newcomers()) return false;
  const auto all = communicator_.all_gather_text(own, "what ranks that join have given");
  std::vector<int> ranks;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] != expected.value_or(all[0])) ranks.push_back(static_cast<int>(r));
  }
  return RowCommunicator(communicator_).are_newcomers(ranks);
}

void ControlChannel::announce(const std::string& problem) noexcept {
  if (communicator_.world_size() == 1) return;
  has_announced_ = !problem.empty();
  board_.announce(problem);
}

std::string ControlChannel::report_failure(const std::string& text) noexcept {
  if (communicator_.world_size() == 1) return {};
  if (!has_announced_) announce(text);
  return board_.announced_after_failure();
}

at::Tensor pack_flags(const std::vector<uint8_t>& flags) {
  const size_t words = (flags.size() + kBits - 1) / kBits;
  at::Tensor bits = at::zeros({static_cast<int64_t>(words)}, at::TensorOptions().dtype(at::kInt));
  auto* out = bits.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0) out[i / kBits] |= static_cast<int32_t>(uint32_t{1} << (i % kBits));
  }
  return bits;
}

void unpack_flags(const at::Tensor& bits, std::vector<uint8_t>& flags) {
  const auto* in = bits.const_data_ptr<int32_t>();
  for (size_t i = 0; i < flags.size(); ++i) {
    flags[i] = static_cast<uint8_t>((static_cast<uint32_t>(in[i / kBits]) >> (i % kBits)) & 1U);
  }
}

}  // namespace zero
