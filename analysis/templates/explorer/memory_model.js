/* Device memory of one training step in closed form: the planner's formulas, for the page. This file does not use the
   DOM.

   A line-by-line port of workloads/costs/memory, whose files explain the formulas. Names, order of arithmetic and integer
   divisions are the same, and a test compares both on random layouts. Beyond the port, every number comes with its parts,
   which add up to it. Above 2^53 bytes (8 PiB on one rank) `estimateMemory` throws, because doubles are not exact there. */
"use strict";
const MemoryModel = (() => {
  const { deferredBytes, div, expertTensors, firstHalfBytes, headBytes, layerBytes, rankTokens, sum } = ModelCosts;
  const {
    COMPUTE_BYTES, ChunkState, INTERLEAVED, MASTER_BYTES, SPLIT_BACKWARD, data_degrees: dataDegrees, dense_layer: denseLayer,
    expert_degrees: expertDegrees, gathered_bytes: gatheredBytes, local_params: localParams, moe_layer: moeLayer,
    num_dense_layers: numDenseLayers,
  } = ClosedForms;
  const { GATHERED, ENDS_REDUCED, ALL_REDUCED, DONE } = ChunkState;

  /** The [part, bytes] with the most bytes. */
  const largest = (entries) => entries.reduce((most, part) => (part[1] > most[1] ? part : most));

  /** memory.parameter_shard_bytes @param {Planned} e */
  const parameterShardBytes = (e, params, experts) =>
    MASTER_BYTES.at(e.precision) * (div(params, dataDegrees(e)[1]) + (experts ? div(experts, expertDegrees(e)[1]) : 0));

  /** moments.accumulates_unsharded @param {Planned} e */
  const accumulatesUnsharded = (e) => e.zero_stage <= 1 && (e.num_microbatches > 1 || SPLIT_BACKWARD.includes(e.pp_schedule));

  /** moments.Shared.of: values that are equal on every stage. @param {Planned} e */
  function shared(e) {
    const model = e.model, c = COMPUTE_BYTES.at(e.precision), [tokens, streamTokens] = rankTokens(e);
    const hasDense = numDenseLayers(model) > 0, hasRouted = Boolean(model.moe), none = { saved: 0, working: 0, parts: {} };
    const layersOf = (recomputed) => ({
      dense: hasDense ? layerBytes(e, false, c, recomputed) : none,
      routed: hasRouted ? layerBytes(e, true, c, recomputed) : none,
    });
    const again = layersOf(true), kept = layersOf(false), elements = [];
    if (hasDense) elements.push(localParams(e, denseLayer(model)));
    if (hasRouted) elements.push(localParams(e, moeLayer(model)));
    return {
      c,
      g: MASTER_BYTES.at(e.precision),
      dense: again.dense,
      routed: again.routed,
      denseDeferred: hasDense ? deferredBytes(e, false, c) : 0,
      routedDeferred: hasRouted ? deferredBytes(e, true, c) : 0,
      denseFirstHalf: hasDense ? firstHalfBytes(e, c) : 0,
      working: Math.max(again.dense.working, again.routed.working),
      denseKept: kept.dense,
      routedKept: kept.routed,
      workingKept: Math.max(kept.dense.working, kept.routed.working),
      b: gatheredBytes(e, c),
      bExperts: gatheredBytes(e, c, true),
      block: Math.max(...elements.map(([rest]) => rest)),
      down: div(model.ffn_hidden_size, e.tp) * model.hidden_size,
      moeBlock: hasRouted ? elements.at(-1)[0] : 0,
      experts: Math.max(...elements.map(([, experts]) => experts)),
      expertShards: hasRouted ? expertDegrees(e)[1] : 1,
      besideExperts: again.routed.beside_experts ?? 0,
      besideExpertsKept: kept.routed.beside_experts ?? 0,
      vocabulary: div(model.vocab_size, e.tp) * model.hidden_size,
      head: headBytes(e, c),
      stream: c * streamTokens * model.hidden_size,
      inputs: 16 * tokens * e.num_microbatches + 4 * div(e.seq_len, e.cp) * (model.mla ? model.mla.qk_rope_head_dim : model.head_dim),
      whole: accumulatesUnsharded(e),
      rounds: e.num_microbatches,
      shards: dataDegrees(e)[1],
    };
  }

  /** memory._rounds: the first backward, the second, and the last. */
  function backwardRounds(x, inFlight, deferred, accumulated, own) {
    const m = x.rounds;
    const turn = (in_flight, waits, prior, last, forward_follows) =>
      ({ in_flight, beside: { "kept for the weights' gradients": waits }, prior, last, forward_follows, own });
    const rounds = [turn(inFlight, deferred, 0, m === 1, m > inFlight)];
    if (m > 2) rounds.push(turn(Math.min(inFlight, m - 1), deferred, accumulated, false, m - 1 > inFlight));
    if (m > 1) rounds.push(turn(1, own && !x.whole ? deferred : 0, accumulated, true, false));
    return rounds;
  }

  /** moments.Shared.shard */
  const shardOf = (x, rest, experts) => div(x.g * rest, x.shards) + div(x.g * experts, x.expertShards);

  /** moments.reduces */
  const reduces = (x, turn) => turn.last || !x.whole;

  /** moments.reduce_bytes */
  function reduceBytes(x, unit, turn) {
    if (x.shards === 1 || x.whole) return 2 * x.g * unit;
    return (x.g + x.c) * unit + (turn.prior ? div(x.g * unit, x.shards) : 0);
  }

  /** moments.pending_reduce_buffer */
  const waiting = (x, units, turn) => (turn.prior && !x.whole ? x.g * units.first : 0);

  /** `factor` times every part; the rounding difference to `total` goes into the largest. */
  function scaled(parts, factor, total) {
    const entries = Object.entries(parts).map(([name, bytes]) => [name, Math.trunc(factor * bytes)]);
    if (!Number.isInteger(factor)) largest(entries)[1] += total - sum(Object.fromEntries(entries));
    return Object.fromEntries(entries);
  }

  /** `total` bytes of saved activations by part: `factor` times the stage's and `head` of the loss. */
  const savedInParts = (stage, factor, total, head) => ({
    ...scaled(stage.parts, factor, total - head),
    "loss of other micro-batches": head,
  });

  /** moments.held_bytes, by part. */
  function held(x, turn, stage, hasHead) {
    const head = (turn.in_flight - 1) * (hasHead ? x.head.saved : 0);
    const total = Math.trunc(turn.in_flight * stage.saved + head);
    const parts = savedInParts(stage, turn.in_flight, total, Math.trunc(head));
    return { ...parts, ...turn.beside };
  }

  /** end_moments.head_moments @param {Planned} e */
  function headMoments(e, x, units, turn, stage) {
    const { c, g } = x, zero3 = e.zero_stage === 3;
    const saved = held(x, turn, stage, true);
    const copies = zero3 ? c * (units.head + units.tied) : stage.whole;
    const gathers = x.shards > 1 && (zero3 || !turn.prior);
    const gathering = gathers ? (units.tied ? Math.max(x.b * x.block, x.bExperts * units.experts) : c * units.head) : 0;
    const buffers = waiting(x, units, turn) + gathering;
    const forward = {
      name: "the head's forward", copies, gradients: turn.prior,
      activations: { ...saved, "loss of this micro-batch": x.head.working, "FSDP buffers": buffers },
    };
    if (!units.head || !reduces(x, turn)) return [forward];
    const resharded = zero3 || (turn.last && !turn.own) ? c * units.head : 0;
    const ahead = zero3 ? x.b * x.block : 0, shard = div(g * units.head, x.shards);
    if (turn.own && turn.prior && !x.whole && INTERLEAVED.includes(e.pp_schedule)) {
      const early = e.virtual_stages > 1 ? turn.prior : shard, flat = g * units.head;
      if (early + flat > turn.prior + waiting(x, units, turn)) {
        forward.gradients = early;
        forward.activations["FSDP buffers"] = flat + gathering;
      }
    }
    let gradients = turn.prior || shard, reducing = reduceBytes(x, units.head, turn);
    if (x.whole && turn.prior) reducing -= x.shards > 1 ? g * units.head - shard : 0;
    const reduction = {
      name: "the reduction of the head's gradient", copies: copies - resharded + ahead, gradients,
      activations: { ...saved, "gradient of the stream": x.stream, "FSDP buffers": reducing },
    };
    return [forward, reduction];
  }

  const OWN = "kept for its own weights' gradients";

  /** layer_moments.block_moments @param {Planned} e */
  function blockMoments(e, x, units, turn, stage) {
    const zero3 = e.zero_stage === 3, reducesNow = reduces(x, turn);
    const resharded = turn.last && !turn.own && !turn.second_half ? units.head : 0;
    const both = 2 * x.b * x.block + x.bExperts * units.experts + x.c * units.tied;
    const copies = zero3 ? Math.min(stage.whole, both) : stage.whole - x.c * resharded;
    const head = turn.prior ? 0 : div(x.g * units.head, reducesNow ? x.shards : 1);
    const flat = units.head && reducesNow && !turn.second_half ? x.g * units.head : waiting(x, units, turn);
    const saved = held(x, turn, stage, stage.has_head);
    let gradients = turn.prior + head + x.c * units.tied;
    if (x.whole && turn.last && turn.prior && !turn.first_half && !SPLIT_BACKWARD.includes(e.pp_schedule)) {
      gradients -= x.g * units.head - div(x.g * units.head, x.shards);
    }
    const { holds } = stage, kept = holds.kept_after, layers = holds.dense_layers + holds.moe_layers;
    const name = "a block's backward", working = kept ? x.workingKept : x.working;
    const last = { name, copies, gradients, activations: { ...saved, "backward of one block": working, "FSDP buffers": flat } };
    const reduced = blockReduction(e, x, turn, stage, copies, gradients, saved);
    const done = kept > 0 && kept < layers ? kept : 1;
    if (done === layers) return [last, ...reduced];
    const moe = Math.min(done, holds.moe_layers), left = { ...saved };
    for (const [layer, count] of [[kept ? x.routedKept : x.routed, moe], [kept ? x.denseKept : x.dense, done - moe]]) {
      for (const [part, bytes] of Object.entries(layer.parts)) left[part] -= count * bytes;
    }
    let unsharded = x.g * (done > moe ? x.block : x.moeBlock);
    const rest = moe * x.moeBlock + (done - moe) * x.block;
    const ofDone = x.g * (rest + moe * units.experts), shard = shardOf(x, rest, moe * units.experts);
    if (turn.first_half) unsharded = 0;
    else if (!turn.prior) gradients += reducesNow ? shard : ofDone;
    else if (x.whole && turn.last) gradients -= ofDone - shard;
    let gathered = copies;
    if (zero3 && holds.embedding && done === layers - 1) gathered = x.b * x.block + x.c * units.first;
    else if (!zero3 && turn.last) gathered -= x.b * rest + x.bExperts * moe * units.experts;
    const received = holds.has_head ? 0 : x.stream;
    const between = kept === 0 && e.recompute_every > 1;
    const own = { "gradient of the stream": received, "backward of one block": between || kept === layers ? x.workingKept : x.working };
    if (turn.first_half) left[OWN] = (left[OWN] ?? 0) + moe * x.routedDeferred + (done - moe) * x.denseDeferred;
    const buffers = { "FSDP buffers": reducesNow ? unsharded : flat };
    return [last, ...reduced, { name, copies: gathered, gradients, activations: { ...left, ...own, ...buffers } }];
  }

  /** layer_moments._reduction @param {Planned} e */
  function blockReduction(e, x, turn, stage, copies, gradients, saved) {
    const { holds } = stage, ofWeights = SPLIT_BACKWARD.includes(e.pp_schedule) ? x.g : x.c;
    if (!reduces(x, turn) || turn.first_half || holds.moe_layers) return [];
    const shard = div(x.g * x.block, x.shards), flat = x.g * x.block;
    let buffers = flat + Math.max(ofWeights * x.block, ofWeights * x.down + shard);
    if (x.shards === 1) buffers = 2 * flat;
    else if (x.whole) buffers = flat;
    const left = { ...saved, "gradient of the stream": x.stream + (stage.has_head ? 0 : x.stream), "FSDP buffers": buffers };
    for (const [part, bytes] of Object.entries((holds.kept_after ? x.denseKept : x.dense).parts)) left[part] -= bytes;
    return [{
      name: "the reduction of a block's gradient", copies: copies - (e.zero_stage === 3 || turn.last ? x.b * x.block : 0),
      gradients: gradients + (x.shards === 1 && !turn.prior ? shard : 0), activations: left,
    }];
  }

  /** layer_moments.first_block_moments @param {Planned} e */
  function firstBlockMoments(e, x, units, turn, stage) {
    const { dense_layers: dense, moe_layers: moe } = stage.holds, kinds = dense && moe > 1 ? [false, true] : [!dense];
    return kinds.map((routed) => firstBlock(e, x, units, turn, stage, routed));
  }

  /** layer_moments._first_block @param {Planned} e */
  function firstBlock(e, x, units, turn, stage, routed) {
    const { c, g } = x, { holds } = stage, reducesNow = reduces(x, turn);
    const [experts, before] = routed ? [units.experts, holds.dense_layers] : [0, 0];
    const own = routed ? x.moeBlock : x.block, recomputedBefore = before ? holds.dense_recomputed : 0;
    let ofOthers = units.allExperts - experts;
    let done = Math.max(0, stage.params - units.allExperts - own - before * x.block - (stage.has_embedding ? units.first : 0));
    if (turn.first_half) [done, ofOthers] = [units.head, 0];
    const shard = shardOf(x, done, ofOthers);
    let gradients = turn.prior || (reducesNow ? shard : g * (done + ofOthers));
    if (x.whole && turn.last) gradients -= g * (done + ofOthers) - shard;
    let left = x.b * (own + before * x.block) + x.bExperts * experts + (stage.has_embedding ? units.firstCopy : 0);
    if (turn.second_half) left += c * units.head;
    const following = before ? x.b * x.block : c * units.tied || units.firstCopy;
    const copies = e.zero_stage === 3
      ? x.b * own + x.bExperts * experts + following
      : turn.last ? Math.min(stage.whole, left) : stage.whole;
    const earlier = turn.in_flight - 1, headSaved = stage.has_head ? x.head.saved : 0;
    const total = Math.trunc(earlier * (stage.saved + headSaved));
    const others = savedInParts(stage, earlier, total, Math.trunc(earlier * headSaved));
    Object.assign(others, turn.beside);
    others["gradient of the stream"] = stage.has_head ? 0 : x.stream;
    const again = routed ? holds.first_moe_recomputed : holds.first_recomputed;
    const [ofDense, ofRouted] = again ? [x.dense, x.routed] : [x.denseKept, x.routedKept];
    if (turn.first_half) {
      others[OWN] = turn.own - (routed ? x.routedDeferred : x.denseDeferred - x.denseFirstHalf) - before * x.denseDeferred;
    }
    others["saved by the first block"] = (routed ? ofRouted : ofDense).saved
      + recomputedBefore * x.dense.saved + (before - recomputedBefore) * x.denseKept.saved;
    const flat = reducesNow && !turn.first_half ? g * own : waiting(x, units, turn);
    const ofAny = again ? x.working : x.workingKept;
    return {
      name: "the first block's backward", copies, gradients: gradients + c * units.tied,
      activations: { ...others, "backward of one block": routed ? ofAny : ofDense.working, "FSDP buffers": flat },
    };
  }

  /** layer_moments.expert_moments @param {Planned} e */
  function expertMoments(e, x, units, turn, stage) {
    const { c, g } = x, size = units.experts, shards = x.expertShards, zero3 = e.zero_stage === 3, reduced = reduces(x, turn);
    if (!size) return [];
    const { holds } = stage, name = "the reduction of experts' gradients", shard = div(g * size, shards), tied = c * units.tied;
    let buffers = 0, own = turn.prior ? 0 : shard;
    if (reduced) {
      const fresh = turn.prior && !x.whole ? shard : 0;
      const each = turn.second_half || turn.own ? g : c;
      const accumulated = x.whole && turn.prior > 0;
      buffers = shards === 1 || accumulated ? 2 * g * size + fresh : g * size + Math.max(each * size - own, div(each * size, 3) + fresh);
      if (accumulated && shards > 1) buffers -= g * size;
    } else own = c * size + (turn.prior || c === g ? 0 : div(g * size * 2, 3));
    const unreduced = x.whole && turn.second_half;
    const ofHead = turn.prior ? 0 : div(g * units.head, reduced && !unreduced ? x.shards : 1);
    const ofEnds = turn.second_half ? 0 : c * units.head;
    let copies = stage.whole - (turn.last ? ofEnds + x.bExperts * size : 0);
    if (zero3) copies = Math.min(stage.whole, 2 * x.b * x.block + tied);
    const beside = holds.kept_after ? x.besideExpertsKept : x.besideExperts;
    const saved = { ...held(x, turn, stage, stage.has_head), "backward of one block": beside };
    const last = [{ name, copies, gradients: turn.prior + ofHead + own + tied, activations: { ...saved, "FSDP buffers": buffers } }];
    if (turn.second_half && reduced && shards > 1 && !(x.whole && turn.prior)) {
      const flat = x.whole ? 0 : g * units.head || waiting(x, units, turn);
      const casting = c * size + (c === g ? 0 : div(g * size * 2, 3)) + flat;
      const gathered = zero3 ? copies : stage.whole;
      last.push({ name, copies: gathered, gradients: turn.prior + ofHead + tied, activations: { ...saved, "FSDP buffers": casting } });
    }
    const others = holds.moe_layers - 1, rest = units.head + others * x.moeBlock, ofOthers = g * (rest + others * size);
    let gradients = turn.prior || (reduced ? shardOf(x, rest, others * size) : ofOthers);
    if (x.whole && turn.last) gradients -= ofOthers - shardOf(x, rest, others * size);
    if (!zero3) {
      let left = x.b * (holds.dense_layers * x.block + x.moeBlock) + (stage.has_embedding ? units.firstCopy : 0);
      if (turn.second_half) left += c * units.head;
      copies = turn.last ? Math.min(stage.whole, left) : stage.whole;
    } else if (stage.has_embedding && !holds.dense_layers) copies = x.b * x.block + (tied || units.firstCopy);
    const again = holds.first_moe_recomputed;
    const before = turn.in_flight - 1, headSaved = stage.has_head ? x.head.saved : 0;
    const total = Math.trunc(before * (stage.saved + headSaved));
    const activations = savedInParts(stage, before, total, Math.trunc(before * headSaved));
    Object.assign(activations, turn.beside);
    activations["gradient of the stream"] = stage.has_head ? 0 : x.stream;
    activations["saved by the first blocks"] = (again ? x.routed : x.routedKept).saved
      + holds.dense_recomputed * x.dense.saved + (holds.dense_layers - holds.dense_recomputed) * x.denseKept.saved;
    activations["backward of one block"] = again ? x.besideExperts : x.besideExpertsKept;
    activations["FSDP buffers"] = buffers;
    return [...last, { name, copies, gradients: gradients + own + tied, activations }];
  }

  /** end_moments.tied_moment */
  function tiedMoment(x, units, turn, stage, zero3) {
    const own = x.g * units.tied;
    let gradients = turn.prior || stage.shard - div(own, x.shards);
    if (x.whole) gradients = turn.last ? own + stage.shard - div(own, x.shards) : turn.prior || x.g * stage.params - own;
    return {
      name: "the backward of the tied embedding", copies: zero3 || turn.last ? x.c * units.tied : stage.whole, gradients,
      activations: { "gradient of the stream": x.stream, "gradients of the tied weight": 2 * x.c * units.tied, "FSDP buffers": reduces(x, turn) ? x.g * x.block : 0 },
    };
  }

  /** end_moments.end_moment @param {Planned} e */
  function endMoment(e, x, units, turn, stage) {
    const { c, g } = x, name = "the end of a backward";
    const received = stage.has_head ? 0 : x.stream;
    const reducing = reduceBytes(x, units.first, turn) - (x.whole || x.shards === 1 ? 0 : c * units.tied);
    const zero3 = e.zero_stage === 3;
    if (turn.last && !turn.own) {
      const ahead = zero3 && x.rounds > 1 ? c * units.head : 0, beside = { ...turn.beside, "gradient of the stream": received };
      const end = { name, copies: ahead, gradients: stage.shard, activations: { ...beside, "FSDP buffers": reducing } };
      return higherOf([end, ...(zero3 ? embeddingMoment(x, units, turn, stage, ahead, beside) : [])]);
    }
    const before = turn.in_flight - 1, headSaved = stage.has_head ? x.head.saved : 0;
    const total = Math.trunc(before * (stage.saved + headSaved));
    const others = savedInParts(stage, before, total, Math.trunc(before * headSaved));
    others["gradient of the stream"] = received + x.stream;
    Object.assign(others, turn.beside);
    if (turn.own) others[OWN] = turn.own;
    const everything = stage.whole;
    if (x.whole && turn.first_half) {
      const end = stage.has_embedding ? units.first : 0, own = c === g && !turn.prior ? 0 : c * end;
      others["gradient of the stream"] += own;
      return { name, copies: everything, gradients: turn.prior || g * end, activations: others };
    }
    if (x.whole) {
      const own = c === g && !turn.prior ? 0 : c * units.first;
      return { name, copies: everything, gradients: g * stage.params + own, activations: others };
    }
    if (turn.own) {
      const end = stage.has_embedding ? units.first : 0;
      const activations = { ...others, "FSDP buffers": end ? reduceBytes(x, end, turn) : waiting(x, units, turn) };
      const copies = e.zero_stage === 3 ? (turn.prior ? x.b * x.block : 0) : everything;
      return { name, copies, gradients: turn.prior || div(g * end, x.shards), activations };
    }
    if (!zero3) {
      const activations = { ...others, "FSDP buffers": reducing };
      return { name, copies: everything, gradients: stage.shard, activations };
    }
    const ahead = c * units.head || x.b * x.block;
    const end = { name, copies: ahead, gradients: stage.shard, activations: { ...others, "FSDP buffers": reducing } };
    const found = [end, ...embeddingMoment(x, units, turn, stage, ahead, others)];
    if (turn.forward_follows) {
      const beside = Math.max(units.firstCopy, 2 * x.b * x.block) + ahead + g * units.first;
      found.push({ name, copies: units.firstCopy, gradients: stage.shard, activations: { ...others, "FSDP buffers": beside } });
    }
    return higherOf(found);
  }

  /** The first moment with the highest bytes. */
  const bytesOf = (moment) => moment.copies + moment.gradients + sum(moment.activations);
  const higherOf = (moments) => moments.reduce((most, one) => (bytesOf(one) > bytesOf(most) ? one : most));

  /** end_moments._embedding */
  function embeddingMoment(x, units, turn, stage, ahead, others) {
    if (!stage.has_embedding || units.tied) return [];
    return [{
      name: "the end of a backward", copies: units.firstCopy + ahead,
      gradients: turn.prior || stage.shard - div(x.g * units.first, x.shards),
      activations: { ...others, "FSDP buffers": x.c * units.first + x.g * x.block },
    }];
  }

  /** moments.Shared.saved, plus the outputs that `outputs` chunks pass on, by part. */
  function savedBy(x, holds, outputs) {
    const output = outputs * x.stream, parts = { "stage output": output };
    const layerKinds = [
      [x.dense, holds.dense_recomputed], [x.denseKept, holds.dense_layers - holds.dense_recomputed],
      [x.routed, holds.moe_recomputed], [x.routedKept, holds.moe_layers - holds.moe_recomputed],
    ];
    for (const [layer, count] of layerKinds) {
      for (const [name, bytes] of Object.entries(layer.parts)) parts[name] = (parts[name] ?? 0) + count * bytes;
    }
    return { saved: layerKinds.reduce((total, [layer, count]) => total + count * layer.saved, output), parts };
  }

  /** Bytes that the layers of a stage hold between the halves of a split backward. */
  const waitingOf = (x, holds) => holds.dense_layers * x.denseDeferred + holds.moe_layers * x.routedDeferred;

  /** memory._stage_memory: the moments of a rank with one chunk. @param {Planned} e */
  function ofOneChunk(e, x, index, units, stage, accumulated) {
    const waits = waitingOf(x, stage.holds);
    const [inFlight, count] = ClosedForms.moments_held(e, index).reduce((most, one) => (one[0] > most[0] || (one[0] === most[0] && one[1] > most[1]) ? one : most));
    const keeps = SPLIT_BACKWARD.includes(e.pp_schedule) ? waits : 0;
    return backwardRounds(x, inFlight, Math.trunc(count * waits), accumulated, keeps).flatMap((turn) => [
      ...(stage.has_head ? headMoments(e, x, units, turn, stage) : []),
      ...blockMoments(e, x, units, turn, stage),
      ...expertMoments(e, x, units, turn, stage),
      ...firstBlockMoments(e, x, units, turn, stage),
      ...(units.tied ? [tiedMoment(x, units, turn, stage, e.zero_stage === 3)] : []),
      endMoment(e, x, units, turn, stage),
    ]);
  }

  /** chunk_moments._bytes_of: bytes that one chunk of a rank may hold. @param {Planned} e */
  function chunkBytes(e, x, holds) {
    const [layers, experts] = localParams(e, holds.layers);
    const ends = div(holds.embedding + holds.head, e.tp) + holds.final_norm, params = layers + experts + ends;
    const shard = shardOf(x, layers + ends, experts);
    const ofEnd = { interleaved_zero_bubble: holds.has_head, zero_bubble_v: false }[e.pp_schedule] ?? holds.embedding > 0;
    return {
      ...savedBy(x, holds, holds.has_head ? 0 : 1),
      holds, params, shard,
      has_head: holds.has_head,
      has_embedding: holds.embedding > 0,
      units: {
        head: holds.head ? x.vocabulary : 0,
        first: holds.embedding ? x.vocabulary : x.block,
        firstCopy: holds.embedding ? x.c * x.vocabulary : x.b * x.block,
        tied: 0,
        experts: holds.moe_layers ? x.experts : 0,
        allExperts: experts,
      },
      whole: x.b * layers + x.bExperts * experts + x.c * ends,
      accumulated: x.whole ? x.g * params : shard,
      ofEnds: x.whole ? x.g * ends : shardOf(x, ends, 0),
      flat: x.whole ? 0 : x.g * (ofEnd ? x.vocabulary : x.block),
      ofHead: holds.has_head ? x.head.saved : 0,
      waits: waitingOf(x, holds),
    };
  }

  /** chunk_moments._Bytes.gradients */
  const gradientsOf = (chunk, far) => (far >= ALL_REDUCED ? chunk.accumulated : far >= ENDS_REDUCED ? chunk.ofEnds : 0);

  /** chunk_moments._in_second_half @param {Planned} e */
  function inSecondHalf(e, x) {
    const left = (bytes, kept) => ({ ...kept, saved: bytes, working: x.c * x.block, parts: { [OWN]: bytes } });
    const dense = left(x.denseDeferred, x.denseKept), routed = left(x.routedDeferred, x.routedKept);
    let besideExperts = 0;
    if (x.routedDeferred) {
      const { rows, gate_up, product } = expertTensors(e, x.c);
      besideExperts = x.stream - (2 * rows + gate_up + product);
    }
    const working = x.c * Math.max(x.block, x.experts), ofExperts = { besideExperts, besideExpertsKept: besideExperts };
    return { ...x, dense, denseKept: dense, routed, routedKept: routed, working, workingKept: working, ...ofExperts };
  }

  /**
   * chunk_moments._second_half: the moments of its layers, and the head's reduction if that comes after all blocks.
   * @param {Planned} e
   */
  function secondHalf(e, x, turn, own, blocks) {
    let ofEmbedding = 0;
    if (own.has_embedding && !turn.prior) ofEmbedding = x.whole ? x.g * own.units.first : shardOf(x, own.units.first, 0);
    for (const one of blocks.slice(0, -1)) {
      one.gradients += ofEmbedding;
      if (e.zero_stage === 3) one.copies = x.c * own.units.head;
    }
    if (!own.units.head || !turn.last || e.zero_stage > 1) return blocks;
    const activations = { ...turn.beside, "FSDP buffers": 2 * x.g * own.units.head };
    return [...blocks, { name: "the reduction of the head's gradient", copies: 0, gradients: own.shard, activations }];
  }

  /** chunk_moments.moments_of_chunks: the moments of a rank with several chunks. @param {Planned} e */
  function ofChunks(e, x, index) {
    const chunks = ClosedForms.experiment_chunks(e)[index].map((holds) => chunkBytes(e, x, holds)), moments = [];
    const total = (bytesOf) => chunks.reduce((all, chunk, at) => all + bytesOf(chunk, at), 0);
    ClosedForms.held_by_chunk(e.pp_schedule, index, e.pp, e.num_microbatches, e.virtual_stages).forEach((turns, number) => {
      const own = chunks[number], { units } = own;
      for (const { kind, last, forward_follows, chunks: far, held: found } of turns) {
        const second = kind === "W";
        const states = found.map(({ activations, for_weights: forWeights }) => [
          total((chunk, at) => activations[at] * (chunk.saved + chunk.ofHead)) - (second ? 0 : own.saved + own.ofHead),
          total((chunk, at) => forWeights[at] * chunk.waits) - (second ? own.waits : 0),
        ]);
        const [others, kept] = states.reduce((most, one) => (one[0] + one[1] > most[0] + most[1] ? one : most));
        const ofOthers = (bytesOf) => total((chunk, at) => (at === number ? 0 : bytesOf(chunk, far[at])));
        const beside = {
          "saved by other micro-batches and chunks": others,
          "kept for the weights' gradients": kept,
          "FSDP buffers of other chunks": ofOthers((chunk, at) => (at >= ENDS_REDUCED && at < DONE ? chunk.flat : 0)),
        };
        const splits = SPLIT_BACKWARD.includes(e.pp_schedule) && (kind === "F" || kind === "I");
        const turn = {
          in_flight: 1, beside, last, forward_follows,
          prior: kind !== "W" || far[number] >= ALL_REDUCED ? gradientsOf(own, far[number]) : 0,
          own: splits ? own.waits : 0,
          first_half: kind === "I",
          second_half: second,
        };
        const ofHead = own.has_head ? headMoments(e, x, units, turn, own) : [];
        const blocks = (layers, chunk) => [
          ...blockMoments(e, layers, units, turn, chunk),
          ...(turn.first_half ? [] : expertMoments(e, layers, units, turn, chunk)),
          ...firstBlockMoments(e, layers, units, turn, chunk),
          endMoment(e, layers, units, turn, chunk),
        ];
        const ofTurn = {
          F: () => ofHead.slice(0, 1),
          W: () => secondHalf(e, x, turn, own, blocks(inSecondHalf(e, x), { ...own, saved: own.waits, parts: { [OWN]: own.waits } })),
        }[kind] ?? (() => [...ofHead.slice(1), ...blocks(x, own)]);
        for (const one of ofTurn()) {
          one.copies += ofOthers((chunk, at) => (e.zero_stage < 3 && at >= GATHERED && at < DONE ? chunk.whole : 0));
          one.gradients += ofOthers((chunk, at) => (at === DONE ? chunk.shard : gradientsOf(chunk, at)));
          moments.push(one);
        }
      }
    });
    return moments;
  }

  /**
   * memory._stage_memory: `parts` is {category: {part: bytes}}, `moment` names the stage's highest moment. @param
   * {Planned} e
   */
  function stageMemory(e, x, index, holds) {
    const [layers, experts] = localParams(e, holds.layers);
    const ends = div(holds.embedding + holds.head, e.tp) + holds.final_norm;
    const params = layers + experts + ends;
    const shard = parameterShardBytes(e, layers + ends, experts);
    const isTied = holds.has_head && holds.embedding > 0 && holds.head === 0;
    const units = {
      head: holds.head ? x.vocabulary : 0,
      first: holds.embedding ? x.vocabulary : x.block,
      firstCopy: holds.embedding ? x.c * x.vocabulary : x.b * x.block,
      tied: isTied ? x.vocabulary : 0,
      experts: holds.moe_layers ? x.experts : 0,
      allExperts: experts,
    };
    const whole = x.b * layers + x.bExperts * experts + x.c * ends;
    const accumulated = x.whole ? x.g * params : shard;
    const about = { params, whole, shard, holds, has_head: holds.has_head, has_embedding: holds.embedding > 0 };
    const moments = e.virtual_stages > 1
      ? ofChunks(e, x, index)
      : ofOneChunk(e, x, index, units, { ...about, ...savedBy(x, holds, holds.has_head ? 0 : 1) }, accumulated);
    const totalOf = (moment) => moment.copies + moment.gradients + sum(moment.activations);
    const best = moments.reduce((most, one) => (totalOf(one) > totalOf(most) ? one : most));
    const expertShard = x.g * div(experts, x.expertShards), endShard = x.g * div(ends, x.shards);
    return {
      stage: index,
      parameters_bytes: shard + best.copies,
      gradients_bytes: best.gradients,
      optimizer_bytes: 2 * shard,
      activations_bytes: sum(best.activations) + x.inputs,
      peak_bytes: 3 * shard + best.copies + best.gradients + sum(best.activations) + x.inputs,
      moment: best.name,
      parts: {
        parameters: tidy({
          "master weights of layers": shard - expertShard - endShard,
          "master weights of experts": expertShard,
          "master weights of embedding and head": endShard,
          "copy to compute with": best.copies,
        }),
        gradients: tidy({ gradients: best.gradients }),
        optimizer: tidy({ "first moment": shard, "second moment": shard }),
        activations: tidy({ ...best.activations, "token ids, targets, RoPE tables": x.inputs }),
      },
    };
  }

  /**
   * Parts to show, without zeros. A negative part (a buffer that replaces another) is subtracted from the largest part,
   * and the remainder from the next.
   */
  function tidy(parts) {
    const kept = Object.entries(parts).filter(([, bytes]) => bytes > 0);
    let below = kept.reduce((total, [, bytes]) => total + bytes, 0) - sum(parts);
    while (below > 0 && kept.length) {
      const most = largest(kept), taken = Math.min(below, most[1]);
      most[1] -= taken;
      below -= taken;
      if (!most[1]) kept.splice(kept.indexOf(most), 1);
    }
    return Object.fromEntries(kept);
  }

  /**
   * memory.estimate_memory. The experiment must satisfy all rules; throws RangeError beyond exact whole numbers.
   * @param {Experiment} fields
   */
  function estimateMemory(fields) {
    const e = py.made(ClosedForms.Experiment, fields);
    const x = shared(e);
    const result = ClosedForms.experiment_stages(e).map((holds, index) => stageMemory(e, x, index, holds));
    const peaks = result.map((memory) => memory.peak_bytes);
    const peak = Math.max(...peaks);
    if (!Number.isSafeInteger(peak)) throw new RangeError("more than 8 PiB on one rank: too much to count exactly");
    return { stages: result, peak_stage: peaks.indexOf(peak), peak_bytes: peak };
  }

  return { estimateMemory };
})();
