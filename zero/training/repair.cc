// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/repair.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bookkeeping/layout.h"
#include "zero/base/error_text.h"
#include "zero/base/streams.h"
#include "zero/comm/row_communicator.h"
#include "zero/training/broadcasts.h"
#include "zero/update/replica_check.h"

namespace zero {
namespace {

// Fills `result` with what the rows of a bucket have of a parameter; `own` is that of this rank. Of
// each row only the parameter's part is sent, in rows as long as the longest of these parts, unless
// those are more than the bucket.
void gather_part(Engine& engine, const Bucket& bucket, int64_t parameter, const at::Tensor& own,
                 Communicator& ranks, const std::string& label, const at::Tensor& result) {
  const Slot& slot = *std::ranges::find(bucket.slots, parameter, &Slot::parameter);
  std::vector<Span> spans;
  int64_t longest = 0;
  for (int64_t r = 0; r < bucket.rows.count(); ++r) {
    spans.push_back(engine.plan.layout_of(bucket).span_in_row(bucket, slot, r));
    longest = std::max(longest, spans.back().numel);
  }
  const BucketRows parts(bucket.rows.count(), round_up(longest, alignment_of(at::kFloat)));
  const bool apart = parts.total() < bucket.rows.total();
  const BucketRows& lengths = apart ? parts : bucket.rows;
  const Rows rows(engine.pool.acquire(lengths.total(), at::kFloat), lengths);
  const auto place = [&](size_t r) { return spans[r].bucket_begin - bucket.rows.begin(r); };
  const auto me = static_cast<size_t>(ranks.rank());
  const at::Tensor row = rows.row(ranks.rank());
  if (!apart) row.copy_(own);
  if (apart && spans[me].numel > 0)
    row.narrow(0, 0, spans[me].numel).copy_(own.narrow(0, place(me), spans[me].numel));
  RowCommunicator(ranks).gather_rows(rows, label).wait();
  const at::Tensor elements = result.as_strided({result.numel()}, {1});
  for (size_t r = 0; r < spans.size(); ++r) {
    const auto [begin, in_bucket, numel] = spans[r];
    if (numel == 0) continue;
    const at::Tensor part =
        rows.row(static_cast<int64_t>(r)).narrow(0, apart ? 0 : place(r), numel);
    elements.narrow(0, begin, numel).copy_(part);
  }
  engine.pool.release(rows.values());
}

}  // namespace

at::Tensor gather_parameter(Engine& engine, const at::Tensor& parameter, bool gradient) {
  const int64_t index = engine.table.find(parameter);
  const auto check = [&] {
    engine.table.index_or_throw(parameter);
    engine.table.verify_unchanged();
  };
  std::vector<std::string> by_domain(engine.domains.list.size());
  if (index >= 0)
    by_domain[engine.protocol.domain_of(index)] =
        "parameter " + engine.table.parameters()[index].name;
  const Agreement agreement =
      engine.agree(gradient ? Call::kGradient : Call::kMaster, check, {{}, std::move(by_domain)});
  at::Tensor result;
  engine.comms->close_on_error([&] {
    if (gradient) {
      engine.gather_full_gradients(agreement);
      if (agreement.used[index] == 0) return;
    }
    const Parameter& p = engine.table.parameters()[index];
    result = at::empty_strided(p.tensor.sizes(), p.strides,
                               p.tensor.options().dtype(at::kFloat).requires_grad(false));
    for (int64_t b : engine.plan.parameter_buckets[index]) {
      Communicator& ranks = *engine.comms->domains[engine.protocol.domain_of(index)].data;
      gather_part(engine, engine.plan.buckets[b], index,
                  gradient ? engine.reducer.shard(b) : engine.shards.masters().values(b), ranks,
                  std::string(gradient ? "gradient" : "master") + " of " + p.name, result);
    }
    // Nothing need follow that would say that an abort has left this.
    const c10::Device device = engine.protocol.device();
    if (has_streams(device)) current_torch_stream(device).synchronize();
    engine.comms->check();
  });
  return result;
}

void check_replicas(Engine& engine) {
  engine.agree(Call::kCheckReplicas, [&] { engine.arena.verify_shapes(); });
  if (engine.domains.uniform) {
    check_working_parameters(engine.table, engine.shards, engine.comms->rank(),
                             *engine.comms->control, [](int64_t) { return true; });
    return;
  }
  engine.comms->check_each_domain(
      [&](int64_t domain, Communicator& ranks) {
        check_working_parameters(engine.table, engine.shards, ranks.rank(), ranks,
                                 [&](int64_t p) { return engine.protocol.domain_of(p) == domain; });
      },
      call_name(Call::kCheckReplicas));
}

void refresh_masters(Engine& engine) {
  const std::string replaced = engine.table.refresh_lists(engine.module);
  const std::vector<NamedTensor> frozen = engine.table.unmanaged();
  const auto check = [&] {
    TORCH_CHECK(replaced.empty(), replaced);
    engine.arena.verify_shapes();
    engine.table.verify_frozen_and_buffers();
  };
  engine.agree(Call::kRefreshMasters, check, engine.protocol.at_home(shapes_of(frozen)));
  at::NoGradGuard no_grad;
  engine.comms->close_on_error([&] {
    engine.arena.attach();
    broadcast_parameters(engine);
    broadcast_over_home(engine, frozen, "frozen parameters");
    engine.shards.read_masters();
    if (engine.shards.ema() && engine.record.counts().steps == 0) engine.shards.restart_ema();
    engine.table.remember();
  });
}

void refresh_working(Engine& engine) {
  engine.agree(Call::kRefreshWorking, [&] { engine.arena.verify_shapes(); });
  // An fp32 arena is its masters' home: values from elsewhere must not get in.
  engine.arena.attach(/*keep_values=*/false);
  engine.write_working_parameters();
}

void use_ema(Engine& engine) {
  engine.agree(Call::kUseEma, [&] {
    TORCH_CHECK(engine.shards.ema() != nullptr,
                "expected an optimizer with ZeroOptions::ema, got one without an average; give it "
                "EmaOptions at construction");
    engine.check_no_gradients();
    engine.arena.verify_shapes();
    engine.table.verify_values();  // requires_grad may be off for a validation
  });
  engine.protocol.set_ema_in_use(true);
  engine.comms->close_on_error([&] { engine.write_working_parameters(/*averages=*/true); });
}

void end_ema(Engine& engine) {
  engine.agree(Call::kEndEma, [&] { engine.arena.verify_shapes(); });
  engine.protocol.set_ema_in_use(false);
  engine.comms->close_on_error([&] {
    // Values that were edited meanwhile do not stay, nor does another storage.
    engine.arena.attach(/*keep_values=*/false);
    engine.shards.restore_masters();
    engine.write_working_parameters();
  });
}

void end_ema_or_close(Engine& engine) noexcept {
  CallProtocol& protocol = engine.protocol;
  if (!protocol.in_own_process() || !protocol.ema_in_use() || protocol.has_failed()) return;
  try {
    const at::NoGradGuard no_grad;
    protocol.run_call([&] { end_ema(engine); });
  } catch (const std::exception& error) {
    // The working parameters hold their average still, and a step would go on with it.
    engine.comms->abort("the guard of use_ema() could not put the parameters back: " +
                        error_text(error));
  }
}

void broadcast_buffers(Engine& engine) {
  const std::string replaced = engine.table.refresh_lists(engine.module);
  const auto check = [&] {
    TORCH_CHECK(replaced.empty(), replaced);
    engine.table.verify_frozen_and_buffers();
  };
  engine.agree(Call::kBroadcastBuffers, check,
               engine.protocol.at_home(shapes_of(engine.table.buffers())));
  engine.comms->close_on_error(
      [&] { broadcast_over_home(engine, engine.table.buffers(), "buffers"); });
}

}  // namespace zero
