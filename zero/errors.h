// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The two kinds of errors that a training loop must tell apart.
//
//   zero::CommunicationError   The cause is another rank, or the connection to it: a rank ended or
//                              does not answer, a transport failed, or a process waits to join.
//                              ZeroOptimizer::recover() may help, and so may a new job that loads a
//                              checkpoint.
//   c10::Error, and others     The cause is this program: a misuse, a batch that it cannot compute,
//                              a damaged file, memory that is full. It would come again. If such an
//                              error of one rank is thrown on all ranks, it has this type on all of
//                              them.
//
//   try {
//     optimizer.backward(loss(model, batch));
//     optimizer.step();
//   } catch (const zero::CommunicationError&) {
//     step = optimizer.recover().steps;
//   }
//
// A rank that fails alone, as for lack of memory within a step, throws c10::Error and closes its
// connections: the others throw CommunicationError, and may go on without it.
#pragma once

#include <c10/util/Exception.h>

namespace zero {

// Thrown by communicators, by what connects them, and by every call of a ZeroOptimizer. All calls
// of the same object throw it from then on.
class CommunicationError : public c10::DistBackendError {
 public:
  using DistBackendError::DistBackendError;
  CommunicationError(const CommunicationError&) = default;
  // In a source file, so that the type is one in all libraries of a program.
  ~CommunicationError() override;
};

}  // namespace zero
