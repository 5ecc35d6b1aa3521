// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Keeps this process alive when it writes to a connection that the other side has closed.
#pragma once

namespace zero {

// Gloo and the server of c10d's store write to sockets without MSG_NOSIGNAL, so a peer that ends
// would end this process without a message. Python programs ignore the signal from the start;
// others keep a handler of their own if they have one.
void survive_broken_pipes();

}  // namespace zero
