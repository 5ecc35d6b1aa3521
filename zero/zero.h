// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// All public headers but bookkeeping/layout.h, which says how a plan cuts parameters. None of them
// includes torch/torch.h.
#pragma once

// IWYU pragma: begin_exports
#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "zero/adafactor.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/combined_optimizer.h"
#include "zero/communicator.h"
#include "zero/errors.h"
#include "zero/grad_norm.h"
#include "zero/lamb.h"
#include "zero/launch.h"
#include "zero/lion.h"
#include "zero/lr_schedule.h"
#include "zero/mesh.h"
#include "zero/muon.h"
#include "zero/options.h"
#include "zero/process_group.h"
#include "zero/skip_rule.h"
#include "zero/version.h"
#include "zero/zero_optimizer.h"
// IWYU pragma: end_exports
