// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Declarations only: see third_party/gloo_stubs/BUILD.
#pragma once

namespace gloo::transport {

class Device;

}  // namespace gloo::transport
