// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Empty: see third_party/gloo_stubs/BUILD.
#pragma once
