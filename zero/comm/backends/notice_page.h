// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The shared memory of row_notices.h, and in which order it is written and read. Without libtorch:
// tests/comm/row_notices_model.cc runs it under the C++ memory model, with words of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace zero {

// What a rank says to one other. Zeros at first. A Word<T> is a T to which both have access.
template <template <typename T> class Word, typename Slot, uint64_t kSlots>
struct NoticePage {
  Word<int64_t> password;
  Word<uint32_t> closed;
  Word<uint32_t> announced;                    // how many, modulo 2^32
  Word<uint32_t> taken;                        // how many, modulo 2^32
  std::array<Slot, kSlots> slots;              // row n is in slot n modulo kSlots
  std::array<Word<uint64_t>, kSlots> numbers;  // n + 1 once row n of the peer has been taken

  // Called by the rank itself.
  template <typename Said>
  void announce(uint64_t number, const Said& said) {
    slots[number % kSlots] = said;
    announced.store(static_cast<uint32_t>(number + 1), std::memory_order_release);
  }
  void take(uint64_t number) {
    numbers[number % kSlots].store(number + 1, std::memory_order_release);
    taken.add(1, std::memory_order_release);
  }

  // Called by the peer.
  uint32_t count_announced() const { return announced.load(std::memory_order_acquire); }
  uint32_t count_taken() const { return taken.load(std::memory_order_acquire); }
  bool is_taken(uint64_t number) const {
    return numbers[number % kSlots].load(std::memory_order_acquire) > number;
  }
};

}  // namespace zero
