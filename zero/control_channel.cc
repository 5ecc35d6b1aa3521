// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/control_channel.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

namespace zero {
namespace {

// The words of the message. A maximum of a value and of its negative shows
// whether all ranks sent the same.
enum Word : int64_t { kCall, kMinusCall, kDetail, kMinusDetail, kProblemRank, kRounds, kHeader };

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

Agreement ControlChannel::agree(Call call, int32_t detail, const std::string& problem,
                                int64_t rounds, const std::vector<uint8_t>& used) {
  const int rank = communicator_.rank();
  ++sequence_;
  if (!problem.empty() && communicator_.world_size() > 1) {
    store_->set(text_key(sequence_, rank), to_bytes(problem));
  }
  const auto size = static_cast<int64_t>(used.size());
  at::Tensor message = at::empty({kHeader + size}, at::TensorOptions().dtype(at::kInt));
  auto* words = message.mutable_data_ptr<int32_t>();
  words[kCall] = static_cast<int32_t>(call);
  words[kMinusCall] = -words[kCall];
  words[kDetail] = detail;
  words[kMinusDetail] = -detail;
  words[kProblemRank] = problem.empty() ? 0 : rank + 1;
  words[kRounds] = static_cast<int32_t>(rounds);
  std::copy(used.begin(), used.end(), words + kHeader);
  communicator_.all_reduce_max(message, std::string("control message of ") + call_name(call))
      .wait();
  if (words[kProblemRank] != 0) {
    const int from = words[kProblemRank] - 1;
    TORCH_CHECK(problem.empty(), "rank ", rank, ": ", problem);
    TORCH_CHECK(false, "rank ", rank, ": ", call_name(call),
                " was given up by all ranks because "
                "of rank ",
                from, ": ", to_text(store_->get(text_key(sequence_, from))));
  }
  if (words[kCall] != -words[kMinusCall] || words[kDetail] != -words[kMinusDetail]) {
    TORCH_CHECK(false, "rank ", rank,
                ": expected the same call with the same arguments on every "
                "rank, got ",
                describe_calls(call, detail),
                "; collective calls must be made by all ranks in the same order");
  }
  Agreement agreement{words[kRounds], {}};
  agreement.used.assign(words + kHeader, words + kHeader + size);
  return agreement;
}

std::string ControlChannel::describe_calls(Call call, int32_t detail) {
  const auto key = [&](int rank) {
    return "call/" + std::to_string(sequence_) + "/" + std::to_string(rank);
  };
  store_->set(key(communicator_.rank()), to_bytes(std::string(call_name(call)) + " (arguments " +
                                                  std::to_string(detail) + ")"));
  std::string text;
  for (int r = 0; r < std::min(communicator_.world_size(), kTextsAtMost); ++r) {
    text += (r == 0 ? "" : ", ") + to_text(store_->get(key(r))) + " on rank " + std::to_string(r);
  }
  return text;
}

void ControlChannel::announce(const std::string& problem) noexcept {
  if (communicator_.world_size() == 1) return;
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
      text += "\nrank " + std::to_string(r) +
              " had reported: " + to_text(store_->get(announcement_key(r)));
    }
  } catch (...) {
  }
  return text;
}

}  // namespace zero
