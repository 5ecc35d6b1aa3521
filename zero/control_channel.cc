// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/control_channel.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

#include "zero/used_flags.h"

namespace zero {
namespace {

// The words of the message. A maximum of a value and of its negative shows
// whether all ranks sent the same.
enum Word : int64_t {
  kCall,
  kMinusCall,
  kProblemRank,
  kRounds,
  kPasses,
  kArgumentsDiffer,
  kArguments,
  kUsed = kArguments + kFingerprintWords,
  kWords = kUsed + kFingerprintWords
};

// A store is asked for at most this many texts, however many ranks there are.
constexpr int kTextsAtMost = 64;

std::string text_key(int64_t sequence, int rank) {
  return "problem/" + std::to_string(sequence) + "/" + std::to_string(rank);
}

std::string announcement_key(int rank) { return "announced/" + std::to_string(rank); }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

const char* call_name(Call call) {
  switch (call) {
    case Call::kReduceGradients:
      return "reduce_gradients()";
    case Call::kClipGradNorm:
      return "clip_grad_norm_()";
    case Call::kStep:
      return "step()";
    case Call::kZeroGrad:
      return "zero_grad()";
    case Call::kGradient:
      return "gradient()";
    case Call::kMaster:
      return "master()";
    case Call::kRefreshMasters:
      return "refresh_master_parameters()";
    case Call::kRefreshWorking:
      return "refresh_working_parameters()";
    case Call::kBroadcastBuffers:
      return "broadcast_buffers()";
    case Call::kCheckReplicas:
      return "check_replicas()";
    case Call::kSaveCheckpoint:
      return "save_checkpoint()";
    case Call::kLoadCheckpoint:
      return "load_checkpoint()";
  }
  return "an unknown call";
}

ControlChannel::ControlChannel(Communicator& communicator, const Group& group)
    : communicator_(communicator), store_(group.make_store("control")) {}

ControlChannel::~ControlChannel() = default;

Agreement ControlChannel::agree(Call call, const CallArguments& arguments,
                                const std::string& problem, const Agreement& own) {
  const int rank = communicator_.rank();
  ++sequence_;
  if (!problem.empty() && communicator_.world_size() > 1) {
    store_->set(text_key(sequence_, rank), to_bytes(problem));
  }
  at::Tensor message = at::empty({kWords}, at::TensorOptions().dtype(at::kInt));
  auto* words = message.mutable_data_ptr<int32_t>();
  words[kCall] = static_cast<int32_t>(call);
  words[kMinusCall] = -words[kCall];
  words[kProblemRank] = problem.empty() ? 0 : rank + 1;
  words[kRounds] = static_cast<int32_t>(own.rounds);
  words[kPasses] = own.passes ? 1 : 0;
  words[kArgumentsDiffer] = arguments.differ ? 1 : 0;
  std::ranges::copy(fingerprint_of(arguments.of_all), words + kArguments);
  std::ranges::copy(fingerprint_of(own.used), words + kUsed);
  const std::string label = std::string("control message of ") + call_name(call);
  communicator_.all_reduce_max(message, label).wait();
  if (words[kProblemRank] != 0) {
    const int from = words[kProblemRank] - 1;
    TORCH_CHECK(problem.empty(), "rank ", rank, ": ", problem);
    TORCH_CHECK(false, "rank ", rank, ": ", call_name(call),
                " was given up by all ranks because "
                "of rank ",
                from, ": ", to_text(store_->get(text_key(sequence_, from))));
  }
  const bool same_arguments = all_equal(words + kArguments) && words[kArgumentsDiffer] == 0;
  if (words[kCall] != -words[kMinusCall] || !same_arguments) {
    throw_different_calls(call, arguments);
  }
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
  const auto key = [&](int r) {
    return "call/" + std::to_string(sequence_) + "/" + std::to_string(r);
  };
  const bool both = !arguments.of_all.empty() && !arguments.of_some.empty();
  const std::string text_of_arguments = arguments.of_all + (both ? ", " : "") + arguments.of_some;
  const std::string own =
      call_name(call) + (text_of_arguments.empty() ? "" : " with " + text_of_arguments);
  store_->set(key(rank), to_bytes(own));
  std::string text;
  for (int r = 0; r < std::min(communicator_.world_size(), kTextsAtMost); ++r) {
    text += "\n  rank " + std::to_string(r) + ": " + to_text(store_->get(key(r)));
  }
  const bool zero_grad = text.find(call_name(Call::kZeroGrad)) != std::string::npos;
  TORCH_CHECK(false, "rank ", rank,
              ": expected the same call with the same arguments on every rank, got", text,
              "\nmake collective calls on all ranks in the same order; nothing was sent, so they "
              "can be made again",
              zero_grad ? ". zero_grad() is collective on a rank that has gradients and local on "
                          "one that has none: some ranks had none"
                        : "",
              announced());
}

void ControlChannel::announce(const std::string& problem) noexcept {
  if (communicator_.world_size() == 1) return;
  has_announced_ = !problem.empty();
  try {
    store_->set(announcement_key(communicator_.rank()), to_bytes(problem));
  } catch (...) {  // the store may be gone with its host; nothing depends on it
  }
}

std::string ControlChannel::announced() noexcept {
  std::string text;
  try {
    for (int r = 0; r < std::min(communicator_.world_size(), kTextsAtMost); ++r) {
      if (r == communicator_.rank() || !store_->check({announcement_key(r)})) continue;
      const std::string problem = to_text(store_->get(announcement_key(r)));
      if (!problem.empty()) text += "\nrank " + std::to_string(r) + " had reported: " + problem;
    }
  } catch (...) {
  }
  return text;
}

}  // namespace zero
