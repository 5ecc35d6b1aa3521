// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One step of a trace that StepTrace recorded, as an SVG: a row for each thread and depth of its
// named ranges.
#pragma once

#include <string>

namespace zero::examples {

// The last step in the file `trace`. Throws c10::Error or nlohmann's exception when it cannot be
// read, and returns an empty text when it has no step.
std::string draw_step(const std::string& trace);

}  // namespace zero::examples
