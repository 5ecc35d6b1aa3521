// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The interface of objects whose state is saved with a checkpoint. zero::LrSchedule and
// zero::RandomState implement it, and a sampler or a data loader of your own can.
//
//   class Batches : public zero::Stateful {
//    public:
//     std::string state() const override { return std::to_string(next_); }
//     void set_state(const std::string& state) override { next_ = std::stoll(state); }
//     ...
//   };
//   optimizer.save_checkpoint(folder, SaveOptions().include("batches", batches));
//   optimizer.load_checkpoint(folder, LoadOptions().include("batches", batches));
#pragma once

#include <string>

namespace zero {

// An object whose state is saved with a checkpoint.
class Stateful {
 public:
  virtual ~Stateful() = default;

  // Everything that the object needs to go on, in any bytes. Called by the thread that saves; it
  // must not communicate with other ranks.
  virtual std::string state() const = 0;

  // Takes over what state() returned, perhaps in another process. Throws where it cannot. A load
  // that fails on any rank calls this again with the former state(), so an object that throws
  // halfway needs no way back of its own. It must not communicate with other ranks.
  virtual void set_state(const std::string& state) = 0;
};

}  // namespace zero
