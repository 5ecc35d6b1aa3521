// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/call_protocol.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "zero/base/error_text.h"
#include "zero/base/normal_tensors.h"

namespace zero {

const char* const kEmaInUseProblem =
    "expected the guard of use_ema() to have ended, since parameters hold their average, got one "
    "that is alive; end its scope first, on all ranks";

void CallProtocol::check_usable() const {
  // This runs for each gradient, so it makes the text only if it throws.
  if (!process_.here()) process_.check("rank " + std::to_string(rank()));
  if (failure_.empty()) return;
  throw_error(asks_for_recovery_,
              c10::str("rank ", rank(),
                       ": expected a working optimizer, got one that failed earlier; end all ranks "
                       "and resume from a checkpoint. The first failure was: ",
                       failure_));
}

void CallProtocol::throw_misuse(const std::string& problem) {
  check_usable();
  misuse_ = problem;
  comms_.channel.announce(problem);
  TORCH_CHECK(false, "rank ", rank(), ": ", problem);
}

void CallProtocol::run_call(const std::function<void()>& body) {
  check_usable();
  std::thread::id caller;
  const bool outermost = caller_.compare_exchange_strong(caller, std::this_thread::get_id());
  if (!outermost && caller != std::this_thread::get_id()) refuse_second_thread();
  const auto ended = c10::make_scope_exit([&] {
    if (outermost) caller_ = std::thread::id();
  });
  const c10::OptionalDeviceGuard guard(device_);
  const NormalTensors normal;
  try {
    comms_.with_peer_reports(body);
  } catch (const std::exception& error) {
    asks_for_recovery_ = is_of_communication(error);
    // Ranks agree on every other problem before this one throws it. Without memory it may have left
    // out a message, which none of its next call may replace.
    if (comms_.failed().empty() && is_out_of_memory(error)) comms_.abort(error_text(error));
    if (comms_.failed().empty()) throw;
    failure_ = error_text(error);
    const std::string text = c10::str("rank ", rank(), ": ", failure_);
    TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory(error), text);
    throw_error(asks_for_recovery_, text);
  } catch (...) {  // whatever a function of the user throws
    asks_for_recovery_ = false;
    failure_ = comms_.failed();
    throw;
  }
}

bool CallProtocol::is_called_elsewhere() const {
  const std::thread::id caller = caller_;
  return caller != std::thread::id() && caller != std::this_thread::get_id();
}

void CallProtocol::refuse_second_thread() {
  const std::string text =
      "calls of one ZeroOptimizer: expected those of one thread at a time, in one order on all "
      "ranks, got calls of two threads at once; make all of them in one thread, or start a rank "
      "for each thread";
  comms_.abort(text);
  TORCH_CHECK(false, "rank ", rank(), ": ", text);
}

void CallProtocol::break_backward(const std::string& reason) {
  broken_backward_ = reason;
  comms_.channel.announce(reason);
}

void CallProtocol::fail_on_all_ranks(const std::string& reason) {
  comms_.abort(reason);
  asks_for_recovery_ = false;
  failure_ = reason;
}

void CallProtocol::fail_for_recovery(const std::string& reason) {
  comms_.abort(reason);
  if (has_failed()) return;
  failure_ = reason + ", which did not succeed";
  asks_for_recovery_ = true;
}

std::string CallProtocol::take_problem(Call call) {
  if (call == Call::kEndEma) return {};  // all of it stays for the next call
  std::string text = std::exchange(misuse_, {});
  if (text.empty() && call != Call::kZeroGrad) text = broken_backward_;
  if (text.empty() && in_no_sync()) {
    text = std::string(call_name(call)) +
           " inside no_sync: expected no guard to be alive, got an active one; end its scope first";
  }
  if (text.empty() && ema_in_use_) {
    text = c10::str(call_name(call), ": ", kEmaInUseProblem);
  }
  return text;
}

Agreement CallProtocol::agree_on_call(Call call, const Problem& problem, AgreedArguments arguments,
                                      Agreement own) {
  refused_ = true;
  if (expected_rounds_ > 0 && is_of_a_step(call)) {
    if (!problem.empty()) {
      comms_.channel.announce(problem.text);
      throw_error(problem.of_communication, c10::str("rank ", rank(), ": ", problem.text));
    }
    refused_ = false;
    return {expected_rounds_, true, std::move(own.used)};
  }
  arguments.by_domain.resize(domains_.list.size());
  CallArguments all{arguments.on_all_ranks, {}, false};
  std::string& joined = domains_.uniform ? all.on_all_ranks : all.by_domain;
  for (const std::string& of_domain : arguments.by_domain) {
    if (!of_domain.empty()) joined += (joined.empty() ? "" : "; ") + of_domain;
  }
  // The same number stands for different parameters on other ranks of the mesh, so used flags and
  // what concerns parameters are compared where parameters are the same.
  std::vector<uint8_t> used;
  if (!domains_.uniform) {
    used = std::exchange(own.used, {});
    all.domains_differ = !comms_.agree_domains(arguments.by_domain, domain_of_, used);
  }
  Agreement agreement = comms_.channel.agree(call, all, problem, own);
  if (!domains_.uniform) agreement.used = std::move(used);
  refused_ = false;
  if (call == Call::kStep) asks_for_recovery_ = false;  // training goes on without one
  return agreement;
}

AgreedArguments CallProtocol::at_home(const std::string& text) const {
  // Then arguments are compared over the mesh, of which home is a part.
  if (domains_.uniform) return {{}, {text}};
  AgreedArguments arguments;
  arguments.by_domain.resize(domains_.list.size());
  arguments.by_domain[domains_.home_domain] = text;
  return arguments;
}

bool is_of_a_step(Call call) {
  return call == Call::kReduceGradients || call == Call::kClipGradNorm ||
         call == Call::kClipGradValue || call == Call::kStep;
}

}  // namespace zero
