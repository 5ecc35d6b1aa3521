// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapter of optimizer classes that this library does not know: their state and options by
// name, through the serialize() functions that torch asks of OptimizerParamState and
// OptimizerOptions. torch can read an archive only once it is written out, so that everything here
// copies, one parameter at a time.
//
// State is tensors of the parameter's shape by their names, and single values as "value:<name>"
// (int, double, bool) and "scalar:<name>" (0-dim tensor). A tensor of another shape means something
// for the whole parameter and cannot be cut: it is refused. What a class keeps outside of state()
// is not seen, and not saved.
//
// To make state, step() of the optimizer is called with a scratch parameter of one element. Its
// groups and its state() are afterwards as before; what step() changes in members stays changed.
// load_checkpoint(), load_plain_state(), freeze(), unfreeze(), add_param_group(), resize_rows() and
// recover() make state. Options are the numbers that serialize() writes, a pair of them as
// "<name>.0" and "<name>.1"; of a class without serialize() the learning rate, if it has one.
#pragma once

#include "zero/inner_optimizers/adapter.h"

namespace zero {

const OptimizerAdapter& serialized_adapter();

}  // namespace zero
