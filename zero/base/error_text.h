// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "zero/errors.h"

namespace zero {

// Returns the text of an error without the C++ backtrace that c10::Error carries.
inline std::string error_text(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const c10::Error*>(&error)) {
    return ours->what_without_backtrace();
  }
  const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  return memory ? c10::str("out of memory (", error.what(), ")") : error.what();
}

// What errors say of whatever else an object or a hook of the user throws.
inline constexpr const char* kNoStdException = "an exception that is no std::exception";

// Returns the text of the exception that a handler has caught, of whatever type. To be called in
// the handler.
inline std::string text_of_caught() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error_text(error);
  } catch (...) {
    return kNoStdException;
  }
}

// The same as error_text() for a message within a message: its first line, and the reason of NCCL,
// which libtorch writes behind a first line that is the same for nearly all errors.
inline std::string error_line(const std::exception& error) {
  constexpr std::string_view kReason = "\nLast error:\n";
  const std::string text = error_text(error);
  const auto line_at = [&](size_t begin) {
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  const size_t begin = text.find(kReason);
  const std::string reason =
      begin == std::string::npos ? std::string() : line_at(begin + kReason.size());
  return reason.empty() ? line_at(0) : line_at(0) + ": " + reason;
}

// Returns whether zero/errors.h has `error` as one that other ranks or connections cause.
inline bool is_of_communication(const std::exception& error) {
  return dynamic_cast<const CommunicationError*>(&error) != nullptr;
}

// Returns whether memory was full here. libtorch's allocator of a CPU throws a c10::Error like any
// other: its text begins as no text of ours does that says it of another rank.
inline bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  if (ours == nullptr) return false;
  if (dynamic_cast<const c10::OutOfMemoryError*>(ours) != nullptr) return true;
  return ours->msg().starts_with("[enforce fail at ") &&
         ours->msg().find("DefaultCPUAllocator: can't allocate memory") != std::string::npos;
}

[[noreturn]] inline void throw_communication_error(const std::string& text) {
  throw CommunicationError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

// For an error that gets another text and keeps its kind.
[[noreturn]] inline void throw_error(bool of_communication, const std::string& text) {
  if (of_communication) throw_communication_error(text);
  TORCH_CHECK(false, text);
}

// Returns action(). An exception that is no c10::Error, such as std::bad_alloc or the
// std::system_error of a thread that cannot start, becomes one that begins with `what`.
template <typename Action>
auto with_c10_errors(const char* what, Action action) {
  try {
    return action();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, what, ": ", error_text(error));
  }
}

}  // namespace zero
