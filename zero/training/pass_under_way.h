// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A pass of ZeroOptimizer::backward() while it is under way, as the hooks of every parameter see it
// that it reaches, also those of other optimizers. Autograd takes it along to all threads on which
// it runs the pass, and to passes inside of it, such as those of checkpointed parts.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <typeinfo>
#include <utility>

namespace zero {

class BackwardPasses;

class PassUnderWay final : public c10::DebugInfoBase {
 public:
  // `owner` runs it, and multiplies the loss by `scale`.
  PassUnderWay(const BackwardPasses& owner, double scale) : owner_(owner), scale_(scale) {}

  double scale() const { return scale_; }
  // Notes that the pass has a gradient for a parameter of `passes`.
  void reach(BackwardPasses& passes) {
    if (&passes == &owner_) return;
    const std::lock_guard lock(mutex_);
    reached_.insert(&passes);
  }
  // Those of which it has reached parameters, without its owner. To be called when it is over.
  const std::set<BackwardPasses*>& reached() const { return reached_; }

  // The innermost one that is under way in this thread, or null.
  static PassUnderWay* current() {
    // Another library may have the same idea.
    c10::DebugInfoBase* const info = c10::ThreadLocalDebugInfo::get(kKind);
    const bool ours = info != nullptr && typeid(*info) == typeid(PassUnderWay);
    return ours ? static_cast<PassUnderWay*>(info) : nullptr;
  }

  // While it lives, `pass` is under way in this thread and where autograd goes from here.
  class Guard {
   public:
    explicit Guard(std::shared_ptr<PassUnderWay> pass) : guard_(kKind, std::move(pass)) {}

   private:
    const c10::DebugInfoGuard guard_;
  };

 private:
  // None of torch's own kinds, of which a lookup finds the innermost.
  static constexpr auto kKind = static_cast<c10::DebugInfoKind>(uint8_t{0xB5});

  const BackwardPasses& owner_;
  const double scale_;
  std::mutex mutex_;
  std::set<BackwardPasses*> reached_;
};

}  // namespace zero
