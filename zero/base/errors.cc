// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/errors.h"

namespace zero {

CommunicationError::~CommunicationError() = default;

}  // namespace zero
