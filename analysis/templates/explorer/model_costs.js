/* Sizes of a model and its layers in closed form: the planner's formulas, for the page. This file does not use the DOM.

   A line-by-line port of workloads/costs/{params,partition,activations,expert_activations,fp8}.py and of the parts of
   workloads/{experiment,mesh}.py that they use, which explain the formulas. Names, order of arithmetic and integer
   divisions are the same (tests compare both sides). Experiments are the dicts of workloads.spec.experiment.to_dict.
   Beyond the port, a layer's saved bytes come with their parts. Numbers are doubles: whole ones are exact below 2^53. */
"use strict";
const ModelCosts = (() => {
  const STATISTICS_BYTES = 4;
  const LOSS_CHUNK_TOKENS = 4096;
  const MASTER_BYTES = { fp64: 8 };
  const COMPUTE_BYTES = { fp64: 8, fp32: 4 };
  /** recomputation.SELECTIVE and OPERATIONS */
  const SELECTIVE = ["norm", "rope", "swiglu"];
  const OPERATIONS = [...SELECTIVE, "mla_up", "experts"];
  /** rules.V_SHAPED */
  const V_SHAPED = ["zero_bubble_v", "dualpipe_v"];

  /**
   * Python's `a // b` for whole numbers from 0 to 2^53.
   * @param {number} a
   * @param {number} b
   */
  const div = (a, b) => (a - (a % b)) / b;
  /** @param {Record<string, number>} parts */
  const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);
  /** @param {Experiment} e */
  const masterBytes = (e) => MASTER_BYTES[e.precision] ?? 4;
  /** @param {Experiment} e */
  const computeBytes = (e) => COMPUTE_BYTES[e.precision] ?? 2;

  /* ---- workloads/spec/experiment.py, workloads/spec/mesh.py ---- */

  /** Experiment.dp @param {Experiment} e */
  const dataParallel = (e) => e.dp_replicate * e.dp_shard;
  /** Experiment.world_size @param {Experiment} e */
  const worldSize = (e) => dataParallel(e) * e.cp * e.tp * e.pp;
  /** Experiment.num_microbatches @param {Experiment} e */
  const numMicrobatches = (e) => div(e.global_batch_size, dataParallel(e) * e.micro_batch_size);

  /** Experiment.recomputed_operations @param {Experiment} e */
  function recomputedOperations(e) {
    const names = e.recompute.split("+");
    return OPERATIONS.filter((name) => names.includes(name) || (names.includes("selective") && SELECTIVE.includes(name)));
  }

  /** mesh.data_degrees: [replicas, shards] @param {Experiment} e */
  const dataDegrees = (e) => (e.zero_stage === 0 ? [e.dp_replicate * e.cp, 1] : [e.dp_replicate, e.dp_shard * e.cp]);

  /** mesh.expert_degrees: [replicas, shards] @param {Experiment} e */
  function expertDegrees(e) {
    const [replicas, owners] = dataDegrees(e), given = div(e.tp, e.etp);
    if (e.zero_stage === 0) return [div(replicas * given, e.ep), 1];
    const shards = owners * given;
    return shards % e.ep === 0 ? [replicas, div(shards, e.ep)] : [div(replicas * shards, e.ep), 1];
  }

  /* ---- workloads/costs/shape/params.py ---- */

  /** params.Counts, with its + and *. */
  const counts = (split = 0, replicated = 0, experts = 0) => ({ split, replicated, experts });
  /**
   * @param {Counts} a
   * @param {Counts} b
   */
  const add = (a, b) => counts(a.split + b.split, a.replicated + b.replicated, a.experts + b.experts);
  /**
   * @param {Counts} a
   * @param {number} factor
   */
  const times = (a, factor) => counts(a.split * factor, a.replicated * factor, a.experts * factor);

  /** params._norms_in_attention @param {ModelShape} model */
  function normsInAttention(model) {
    if (model.mla) return model.mla.q_lora_rank + model.mla.kv_lora_rank;
    return model.qk_norm ? 2 * model.head_dim : 0;
  }

  /** params.attention_params @param {ModelShape} model */
  function attentionParams(model) {
    const h = model.hidden_size, mla = model.mla;
    if (!mla) {
      const q = model.num_heads * model.head_dim, kv = model.num_kv_heads * model.head_dim;
      return counts(h * q + 2 * h * kv + q * h, normsInAttention(model));
    }
    const qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
    const queries = mla.q_lora_rank || h; // without a query latent, one matrix makes the queries
    const up = queries * qk + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim);
    const down = h * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim);
    return counts(model.num_heads * (up + mla.v_head_dim * h), down + normsInAttention(model));
  }

  /** params.dense_layer @param {ModelShape} model */
  const denseLayer = (model) =>
    add(attentionParams(model), counts(3 * model.hidden_size * model.ffn_hidden_size, 2 * model.hidden_size));

  /** params.moe_layer @param {ModelShape} model */
  function moeLayer(model) {
    const moe = model.moe, expert = 3 * model.hidden_size * moe.expert_hidden_size;
    const replicated = model.hidden_size * moe.num_experts + 2 * model.hidden_size;
    return add(attentionParams(model), counts(moe.num_shared_experts * expert, replicated, moe.num_experts * expert));
  }

  /** params.num_dense_layers @param {ModelShape} model */
  const numDenseLayers = (model) => (model.moe ? Math.min(model.moe.num_dense_layers, model.num_layers) : model.num_layers);

  /** params.num_params @param {ModelShape} model */
  function numParams(model) {
    const vocabulary = model.vocab_size * model.hidden_size, dense = numDenseLayers(model);
    const ends = (model.tie_embeddings ? 1 : 2) * vocabulary + model.hidden_size;
    const routed = model.moe ? (model.num_layers - dense) * sum(moeLayer(model)) : 0;
    return ends + dense * sum(denseLayer(model)) + routed;
  }

  /**
   * params.matmul_of_layer
   * @param {ModelShape} model
   * @param {boolean} routed
   */
  function matmulOfLayer(model, routed) {
    const h = model.hidden_size, attention = sum(attentionParams(model)) - normsInAttention(model);
    if (!routed) return attention + 3 * h * model.ffn_hidden_size;
    const moe = model.moe, expert = 3 * h * moe.expert_hidden_size;
    return attention + (moe.experts_per_token + moe.num_shared_experts) * expert + h * moe.num_experts;
  }

  /* ---- workloads/costs/shape/partition.py ---- */

  /**
   * schedule.place_of, the rank alone
   * @param {string} schedule
   * @param {number} stage
   * @param {number} pp
   */
  function rankOf(schedule, stage, pp) {
    if (V_SHAPED.includes(schedule)) return stage < pp ? stage : 2 * pp - 1 - stage;
    return stage % pp;
  }

  /**
   * partition.head_in_layers
   * @param {ModelShape} model
   * @param {number} seqLen
   */
  function headInLayers(model, seqLen) {
    const dense = numDenseLayers(model), [qk, v] = headSizes(model);
    let matmul = dense * matmulOfLayer(model, false);
    if (model.moe) matmul += (model.num_layers - dense) * matmulOfLayer(model, true);
    const layer = (2.0 * matmul) / model.num_layers + 0.5 * (2.0 * model.num_heads * (qk + v) * seqLen);
    return (2.0 * model.vocab_size * model.hidden_size) / layer;
  }

  /** pipeline_stages.written_stages: the letters of every stage. @param {string|null|undefined} text */
  function writtenStages(text) {
    if (!text) return [];
    const repeated = (_, part, count) => part.repeat(Number(count));
    return text.replaceAll(",", "").replace(/\(([^)]+)\)\*(\d+)/g, repeated).replace(/(.)\*(\d+)/g, repeated).split("|");
  }

  /** The number of layers of a written stage. @param {string} stage */
  const layersOf = (stage) => stage.split("t").length - 1;

  /** held_model.as_held: with padded rows and copied heads. @param {Experiment} e @returns {Experiment} */
  function asHeld(e) {
    const model = e.model, heads = model.num_kv_heads, multiple = e.pad_vocab_to ? e.pad_vocab_to * e.tp : 1;
    const copied = e.tp > heads && e.tp % heads === 0 && model.num_heads % e.tp === 0 && !model.mla;
    if (multiple === 1 && !copied) return e;
    const rows = Math.ceil(model.vocab_size / multiple) * multiple;
    return { ...e, model: { ...model, vocab_size: rows, num_kv_heads: copied ? e.tp : heads } };
  }

  /** partition.experiment_layers: [first, end) of every stage. @param {Experiment} e */
  function experimentLayers(e) {
    const model = asHeld(e).model, count = e.pp * e.virtual_stages, base = div(model.num_layers, count);
    const written = writtenStages(e.pp_stages).map(layersOf);
    const allWritten = written.reduce((total, size) => total + size, 0);
    if (written.length === count && allWritten === model.num_layers) return contiguous(written);
    const layers = Array.from({ length: count }, (_, stage) => base + (stage < model.num_layers % count ? 1 : 0));
    if (e.pp_split === "ends_count" && base) {
      const [all, last] = [model.num_layers + 2, count - 1];
      layers.forEach((_, stage) => {
        layers[stage] = div(all, count) + (stage < all % count ? 1 : 0) - (stage === 0 ? 1 : 0) - (stage === last ? 1 : 0);
      });
    }
    if (e.pp_split === "balanced" && base) {
      const ranks = layers.map((_, stage) => rankOf(e.pp_schedule, stage, e.pp));
      const work = layers.map((_, stage) => (stage === count - 1 ? 1.0 + headInLayers(model, e.seq_len) : 1.0));
      const ofRank = Array(e.pp).fill(0.0);
      ranks.forEach((rank, stage) => { ofRank[rank] += work[stage]; });
      layers.fill(1);
      for (let left = model.num_layers - count; left > 0; left -= 1) {
        let least = 0;
        for (let stage = 1; stage < count; stage += 1) {
          const ahead = ofRank[ranks[stage]] - ofRank[ranks[least]] || work[stage] - work[least];
          if (ahead < 0) least = stage;
        }
        layers[least] += 1;
        work[least] += 1.0;
        ofRank[ranks[least]] += 1.0;
      }
    }
    return contiguous(layers);
  }

  /** [first, end) of stages with these numbers of layers. @param {number[]} layers */
  function contiguous(layers) {
    let start = 0;
    return layers.map((size) => [start, (start += size)]);
  }

  /** partition.experiment_stages: the layers of each pipeline rank. @param {Experiment} e */
  const experimentStages = (e) => Array.from({ length: e.pp }, (_, rank) => holding(e, stagesOf(e, rank)));

  /** partition.experiment_chunks: the layers of each chunk of one pipeline rank. @param {Experiment} e */
  const experimentChunks = (e, rank) => stagesOf(e, rank).map((stage) => holding(e, [stage]));

  /** The stages of a pipeline rank, in the order of its chunks. @param {Experiment} e */
  const stagesOf = (e, rank) => Array.from({ length: e.pp * e.virtual_stages }, (_, stage) => stage)
    .filter((stage) => rankOf(e.pp_schedule, stage, e.pp) === rank);

  /** The layers that some stages of a model hold together. @param {Experiment} e @param {number[]} own */
  function holding(e, own) {
    const model = e.model, layers = experimentLayers(e), last = layers.length - 1;
    const denseTotal = numDenseLayers(model), vocabulary = model.vocab_size * model.hidden_size;
    const every = e.recompute === "none" ? 1 : e.recompute_every;
    let firstMoe;
    let dense = 0, held = 0, denseRecomputed = 0, recomputed = 0, keptAfter = 0;
    for (const stage of own) {
      const [start, end] = layers[stage];
      held += end - start;
      dense += Math.max(0, Math.min(end, denseTotal) - start);
      for (let layer = start; layer < end; layer += 1) {
        const again = layer % every === 0;
        if (layer >= denseTotal) firstMoe ??= layer;
        recomputed += again ? 1 : 0;
        denseRecomputed += again && layer < denseTotal ? 1 : 0;
        keptAfter = again ? 0 : keptAfter + 1;
      }
    }
    let parts = times(denseLayer(model), dense);
    if (held > dense) parts = add(parts, times(moeLayer(model), held - dense));
    const hasHead = own.includes(last), firstRecomputed = layers[own[0]][0] % every === 0;
    return {
      dense_layers: dense,
      moe_layers: held - dense,
      layers: parts,
      embedding: own.includes(0) ? vocabulary : 0,
      head: hasHead && !(last === 0 && model.tie_embeddings) ? vocabulary : 0,
      has_head: hasHead,
      final_norm: hasHead ? model.hidden_size : 0,
      dense_recomputed: denseRecomputed,
      moe_recomputed: recomputed - denseRecomputed,
      first_recomputed: firstRecomputed,
      first_moe_recomputed: firstMoe !== undefined && firstMoe % every === 0,
      kept_after: keptAfter,
    };
  }

  /**
   * params.local_params: [parameters, expert parameters] of one rank.
   * @param {Experiment} e
   * @param {Counts} c
   */
  const localParams = (e, c) => [div(c.split, e.tp) + c.replicated, div(c.experts, e.ep * e.etp)];

  /* ---- workloads/costs/memory/activations.py ---- */

  /** flops.head_sizes: [query and key, value]. @param {ModelShape} model */
  function headSizes(model) {
    if (!model.mla) return [model.head_dim, model.head_dim];
    return [model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim];
  }

  /** activations.rank_tokens: [T, T_s]. @param {Experiment} e */
  function rankTokens(e) {
    const tokens = div(e.micro_batch_size * e.seq_len, e.cp);
    return [tokens, e.sequence_parallel ? div(tokens, e.tp) : tokens];
  }

  /**
   * activations.layer_tensors, with the changes that activations._tensors_of makes under Ulysses
   * @param {Experiment} e
   * @param {boolean} routed
   * @param {number} c
   */
  function layerTensors(e, routed, c) {
    const model = e.model, mla = model.mla, tp = e.tp;
    const [tokens, streamTokens] = rankTokens(e);
    const h = model.hidden_size, heads = model.num_heads, kv = model.num_kv_heads;
    const [qk, v] = headSizes(model);
    const qkHeads = model.qk_norm ? heads + kv : 0;
    let latents = 0, latentNorms = 0, projected = div((heads + 2 * kv) * qk, tp), rotated = div((heads + kv) * qk, tp);
    if (mla) {
      const normed = c * streamTokens * (mla.q_lora_rank + mla.kv_lora_rank);
      projected = div(heads * (mla.qk_nope_head_dim + v), tp);
      rotated = div(2 * heads * qk, tp);
      latents = normed + c * streamTokens * mla.qk_rope_head_dim;
      latentNorms = normed + STATISTICS_BYTES * streamTokens * (mla.q_lora_rank ? 2 : 1);
    }
    const columns = routed ? model.moe.num_shared_experts * model.moe.expert_hidden_size : model.ffn_hidden_size;
    const x = routed ? expertTensors(e, c) : { router: 0, weights: 0, rows: 0, gate_up: 0, product: 0 };
    const stream = c * streamTokens * h, norm = stream + STATISTICS_BYTES * streamTokens;
    const ulysses = receives(e), attentionOutput = div(c * tokens * heads * v, tp);
    projected *= c * tokens;
    rotated *= c * tokens;
    const inFp8 = keepsFp8(e), product = div(c * tokens * columns, tp);
    const kept = inFp8 ? keptInputs(e, norm, latentNorms, norm, routed, c) : [norm, latentNorms, norm];
    return {
      input: stream,
      attention_norm: kept[0],
      projected: ulysses && mla ? rotated + attentionOutput : projected,
      latents: ulysses && !mla && model.qk_norm ? projected : latents,
      latent_norms: kept[1],
      qk_statistics: div(STATISTICS_BYTES * tokens * qkHeads, tp),
      rotated: ulysses ? 0 : rotated,
      softmax: div(tokens * heads, tp) * (e.attention === "math" ? c * e.seq_len : STATISTICS_BYTES),
      attention_output: (ulysses ? 2 : 1) * attentionOutput,
      residual: stream,
      ffn_norm: kept[2],
      dispatched: x.router + x.weights + x.rows,
      gate_up: div(2 * c * tokens * columns, tp) + x.gate_up,
      product: (inFp8 ? castBytes(e, div(product, c)) : product) + x.product,
    };
  }

  /* ---- workloads/costs/memory/expert_activations.py ---- */

  /**
   * expert_loads.skewed_loads
   * @param {number} experts
   * @param {number} imbalance
   */
  function skewedLoads(experts, imbalance) {
    const powers = (ratio) => Array.from({ length: experts }, (_, i) => ratio ** i);
    const all = (loads) => loads.reduce((total, load) => total + load, 0);
    let low = 0.0, high = 1.0;
    for (let turn = 0; turn < 100; turn += 1) {
      const ratio = (low + high) / 2;
      if (experts / all(powers(ratio)) > imbalance) low = ratio;
      else high = ratio;
    }
    const loads = powers(high), total = all(loads);
    return loads.map((load) => load / total);
  }

  /** expert_loads.sent_tokens @param {Experiment} e */
  const sentTokens = (e) => div(div(e.micro_batch_size * e.seq_len, e.cp), div(e.tp, e.etp));

  /** expert_activations.received_rows @param {Experiment} e */
  function receivedRows(e) {
    const moe = e.model.moe, sent = sentTokens(e) * moe.experts_per_token;
    if (e.capacity_factor !== null) return moe.num_experts * Math.ceil((e.capacity_factor * sent) / moe.num_experts);
    if (e.ep === 1 || e.routing === "balanced" || e.routing_imbalance <= 1) return sent;
    const first = skewedLoads(moe.num_experts, e.routing_imbalance).slice(0, div(moe.num_experts, e.ep));
    return Math.min(e.ep * sent, Math.round(sent * e.ep * first.reduce((total, load) => total + load, 0)));
  }

  /**
   * expert_activations.expert_tensors
   * @param {Experiment} e
   * @param {number} c
   */
  function expertTensors(e, c) {
    const h = e.model.hidden_size, moe = e.model.moe, streamTokens = rankTokens(e)[1];
    const copies = moe.experts_per_token, received = receivedRows(e), sent = sentTokens(e) * copies;
    let router = STATISTICS_BYTES * streamTokens * moe.num_experts;
    if (moe.normalize_weights) router += STATISTICS_BYTES * streamTokens * (copies + 1);
    if (e.routing === "learned") {
      router += 8 * (streamTokens * copies + 2 * sent + (e.ep > 1 ? 2 * received : 0));
      if (moe.balance === "aux_loss") router += STATISTICS_BYTES * streamTokens * moe.num_experts;
    }
    const columns = div(moe.expert_hidden_size, e.etp);
    return {
      router,
      weights: STATISTICS_BYTES * received,
      rows: c * received * h,
      gate_up: 2 * c * received * columns,
      product: c * received * columns,
      sent: c * sent * h,
      parameters: c * 3 * h * columns * div(moe.num_experts, e.ep),
    };
  }

  /** expert_activations.expert_working @param {Experiment} e */
  function expertWorking(e, t, gathered, again) {
    const down = div(t.parameters, 3), received = e.ep > 1 ? [t.sent + t.rows, 2 * t.rows] : [];
    const weights = [t.rows + t.product + down, t.gate_up + down, t.rows + t.parameters - t.product];
    if (isFp8(e)) {
      const turned = div(t.parameters, 6);
      weights.push(t.rows + div(t.rows, 2) + turned + t.product, div(t.gate_up, 2) + 2 * turned + t.rows + down - t.product);
    }
    return Math.max(gathered + t.sent, ...received, again + Math.max(...weights));
  }

  /* ---- workloads/costs/shape/fp8.py ---- */

  /** fp8.is_fp8 @param {Experiment} e */
  const isFp8 = (e) => e.precision.startsWith("fp8");
  /** fp8.gathered_bytes @param {Experiment} e */
  const gatheredBytes = (e, c, ofExperts = false) => (e.precision === "fp8_tensorwise" || (ofExperts && isFp8(e)) ? 1 : c);
  /** fp8.keeps_fp8 @param {Experiment} e */
  const keepsFp8 = (e) => ["fp8_tensorwise", "fp8_blockwise"].includes(e.precision);
  /** fp8.cast_bytes @param {Experiment} e */
  const castBytes = (e, elements) => elements + (e.precision === "fp8_blockwise" ? div(elements * 4, 128) : 0);

  /** fp8.kept_inputs for attention_norm, latent_norms, ffn_norm @param {Experiment} e */
  function keptInputs(e, attentionNorm, latentNorms, ffnNorm, routed, c) {
    const { hidden_size: h, mla } = e.model, alone = e.tp === 1;
    const cast = (kept, width, statistics) => {
      const tokens = div(kept, c * width + STATISTICS_BYTES * statistics);
      return castBytes(e, tokens * width) + STATISTICS_BYTES * statistics * tokens;
    };
    let attention = attentionNorm, latents = latentNorms;
    if (!mla) attention = alone ? cast(attentionNorm, h, 1) : attentionNorm;
    else {
      if (mla.q_lora_rank && e.precision !== "fp8_blockwise") attention = cast(attentionNorm, h, 1);
      if (alone) latents = cast(latentNorms, mla.q_lora_rank + mla.kv_lora_rank, mla.q_lora_rank ? 2 : 1);
    }
    return [attention, latents, alone && !routed ? cast(ffnNorm, h, 1) : ffnNorm];
  }

  /** fp8.working_bytes @param {Experiment} e */
  function workingBytesInFp8(e, stream, tokens, columns, c, remade) {
    const h = e.model.hidden_size, copies = keepsFp8(e) ? 2 : 1;
    const product = tokens * columns, output = tokens * h, down = h * columns;
    const gathered = e.tp > 1 ? c * output : 0;
    const cast = copies === 2 ? castBytes(e, product) : 0;
    const kept = remade ? 0 : cast || c * product, again = remade ? c * product + cast : 0;
    const turned = copies === 2 && e.tp > 1 ? castBytes(e, output) : 0;
    const entering = c * down + c * output + gathered - kept;
    return stream + Math.max(
      gathered + copies * castBytes(e, output) + down + c * product,
      gathered + (copies - 1) * castBytes(e, output) + c * product + c * down + again,
      c * down + 3 * c * product - kept,
      entering + copies * castBytes(e, 2 * product) + 2 * down,
      entering + (copies - 1) * castBytes(e, 2 * product) + turned + 2 * c * down,
    );
  }

  /** Saved tensors by part; `t` without the tensors that the backward recomputes. */
  function savedParts(t, attentionAgain, ffnAgain, residualAgain) {
    return {
      "residual stream": t.input + t.residual - residualAgain,
      attention: t.attention_norm + t.latents + t.latent_norms + t.projected + t.qk_statistics + t.rotated + t.softmax
        + t.attention_output - attentionAgain,
      "feed-forward": t.ffn_norm + t.gate_up + t.product - ffnAgain,
      "tokens sent to experts": t.dispatched,
    };
  }

  /** Ulysses keeps the received tensors. @param {Experiment} e */
  const receives = (e) => e.cp > 1 && e.cp_kind === "ulysses";

  /** activations._normed_latents @param {Experiment} e */
  function normedLatents(e, t) {
    const { mla } = e.model;
    return mla ? t.latent_norms - STATISTICS_BYTES * rankTokens(e)[1] * (mla.q_lora_rank ? 2 : 1) : 0;
  }

  /**
   * activations._recomputable_bytes
   * @param {Experiment} e
   * @param {Record<string, number>} t
   * @param {number} c
   */
  function madeAgain(e, t, c) {
    const mla = e.model.mla, [tokens, streamTokens] = rankTokens(e);
    const norms = t.attention_norm + t.ffn_norm - 2 * STATISTICS_BYTES * streamTokens;
    if (!mla) return { norm: norms, rope: t.rotated, swiglu: t.product, mla_up: 0, experts: 0 };
    const half = div(t.rotated, 2);
    return {
      norm: norms + normedLatents(e, t),
      rope: receives(e) ? 0 : half - c * tokens * mla.qk_rope_head_dim,
      swiglu: t.product,
      mla_up: receives(e) ? 0 : t.projected + (mla.q_lora_rank ? half : 0),
      experts: 0, // see routedBytes
    };
  }

  /**
   * activations._attention_working
   * @param {Experiment} e
   * @param {Record<string, number>} t
   * @param {number} c
   * @param {number} downWeight
   * @param {number} saved
   */
  function attentionWorking(e, t, c, downWeight, saved) {
    const model = e.model, mla = model.mla, [tokens, streamTokens] = rankTokens(e);
    if (!mla) return 0;
    const heads = div(c * tokens * model.num_heads, e.tp), [qk, v] = headSizes(model);
    const outWeight = div(c * model.hidden_size * model.num_heads * v, e.tp);
    const made = t.input + t.attention_norm + t.latents + t.latent_norms + t.projected + t.rotated + t.softmax;
    const gradients = heads * 2 * (qk + v) + c * streamTokens * model.hidden_size;
    return made + t.attention_output + gradients + 3 * downWeight + outWeight - saved;
  }

  /**
   * activations._routed_bytes, with parts
   * @param {Experiment} e
   */
  function routedBytes(e, t, c, stream, gathered, recomputed) {
    const x = expertTensors(e, c), total = sum(t), streamTokens = rankTokens(e)[1];
    const sent = e.etp > 1 ? gathered : 0;
    const reducing = stream + x.rows - (x.weights + x.rows + x.gate_up + x.product);
    let saved = total, again = 0, working = expertWorking(e, x, sent, 0);
    /** @type {Record<string, number>} */
    let parts = savedParts(t, 0, 0, 0);
    if (e.recompute === "full" && recomputed) {
      saved = t.input;
      again = total - saved;
      working += again;
      parts = { "residual stream": t.input };
    } else if (e.recompute !== "none" && recomputed) {
      const of = madeAgain(e, t, c), named = recomputedOperations(e);
      /** @param {"norm" | "rope" | "swiglu" | "mla_up"} name */
      const remade = (name) => (named.includes(name) ? of[name] : 0);
      saved = total - named.reduce((all, name) => all + of[name], 0);
      let ofExperts = 0; // in addition to what swiglu recomputes
      if (named.includes("experts")) {
        again = x.gate_up + x.product;
        ofExperts = named.includes("swiglu") ? x.gate_up : again;
        saved -= ofExperts;
      } else if (named.includes("swiglu")) again = x.product;
      working = expertWorking(e, x, sent, again);
      const ffnNorm = named.includes("norm") ? t.ffn_norm - STATISTICS_BYTES * streamTokens : 0;
      const ffnAgain = ffnNorm + remade("swiglu") + ofExperts;
      parts = savedParts(t, remade("norm") - ffnNorm + remade("rope") + remade("mla_up"), ffnAgain, 0);
    }
    const own = attentionWorking(e, t, c, 0, saved);
    return { saved, working: Math.max(stream + working, own), beside_experts: again + reducing, parts };
  }

  /**
   * activations.layer_bytes: saved (with its parts) and working bytes of one layer.
   * @param {Experiment} e
   * @param {boolean} routed
   * @param {number} c
   * @param {boolean} [recomputed]
   */
  function layerBytes(e, routed, c, recomputed = true) {
    const [tokens, streamTokens] = rankTokens(e), h = e.model.hidden_size;
    const t = layerTensors(e, routed, c), total = sum(t);
    const stream = c * streamTokens * h, gathered = e.tp > 1 ? c * tokens * h : 0;
    if (routed) return routedBytes(e, t, c, stream, gathered, recomputed);
    const downWeight = div(c * e.model.ffn_hidden_size, e.tp) * h;
    const steps = [gathered + t.product, t.gate_up, 2 * gathered + 2 * downWeight - t.product];
    const inFp8 = isFp8(e), remade = recomputed && recomputedOperations(e).includes("swiglu");
    const working = inFp8
      ? workingBytesInFp8(e, stream, tokens, div(e.model.ffn_hidden_size, e.tp), c, remade)
      : stream + downWeight + Math.max(...steps);
    const compiled = compilesDense(e, recomputed);
    const kept = compiled && e.tp > 1 && e.sequence_parallel ? gathered - stream : 0;
    if (e.recompute === "none" || !recomputed) {
      const own = attentionWorking(e, t, c, downWeight, total);
      return { saved: total + 2 * kept, working: Math.max(working, own), parts: savedParts(t, -kept, -kept, 0) };
    }
    if (e.recompute === "full") {
      const most = Math.max(total + 2 * kept - t.input + working, attentionWorking(e, t, c, downWeight, t.input));
      return { saved: t.input, working: most, parts: { "residual stream": t.input } };
    }
    if (!compiled || e.tp === 1) {
      const of = madeAgain(e, t, c), named = recomputedOperations(e);
      /** @param {"norm" | "rope" | "swiglu" | "mla_up"} name */
      const again = (name) => (named.includes(name) ? of[name] : 0);
      const saved = total - named.reduce((all, name) => all + of[name], 0);
      const own = attentionWorking(e, t, c, downWeight, saved) - (named.includes("norm") ? of.norm - stream : 0);
      const ffnNorm = named.includes("norm") ? t.ffn_norm - STATISTICS_BYTES * streamTokens : 0;
      const parts = savedParts(t, again("norm") - ffnNorm + again("rope") + again("mla_up"), ffnNorm + again("swiglu"), 0);
      return { saved, working: Math.max((inFp8 ? 0 : again("swiglu")) + working, own), parts };
    }
    const again = t.attention_norm + t.qk_statistics + t.rotated + t.residual + t.ffn_norm + t.product;
    const each = stream + gathered;
    const attention = t.attention_norm + t.qk_statistics + t.rotated - each;
    const parts = savedParts(t, attention, t.ffn_norm + t.product - each, t.residual);
    return { saved: total - again + 2 * each, working: again + working - 2 * each, parts };
  }

  /**
   * Experiment.compiles, for layers without experts
   * @param {Experiment} e
   * @param {boolean} recomputed
   */
  function compilesDense(e, recomputed) {
    const breaks = e.cp > 1 && e.cp_kind !== "ulysses";
    return e.compile === "block" && !(breaks && recomputed && e.recompute !== "none");
  }

  /**
   * activations.deferred_bytes
   * @param {Experiment} e
   * @param {boolean} routed
   * @param {number} c
   */
  function deferredBytes(e, routed, c) {
    const [tokens, streamTokens] = rankTokens(e), h = e.model.hidden_size;
    const t = layerTensors(e, routed, c);
    const attentionOutput = div(c * tokens * e.model.num_heads * headSizes(e.model)[1], e.tp);
    const norms = t.attention_norm + t.ffn_norm - 2 * STATISTICS_BYTES * streamTokens, mla = e.model.mla;
    let projected = t.projected, wide = 0;
    if (mla) { // gradients of the up-projections, and of the down-projections
      const [qk, v] = headSizes(e.model);
      projected = t.latents + div(c * tokens * e.model.num_heads * (qk + mla.qk_nope_head_dim + v), e.tp);
      wide = e.precision === "fp8_blockwise" ? t.latents : 0;
    }
    const copies = routed ? expertTensors(e, c).rows : 0;
    if (routed) wide += expertTensors(e, c).gate_up + copies;
    const sums = (routed && !e.model.moe.num_shared_experts ? 1 : 2) * c * tokens * h + copies;
    const gradients = projected + t.gate_up + sums;
    const cast = keepsFp8(e) ? castBytes(e, div(gradients - wide, c)) + wide : gradients;
    const again = div(uncast(e, t, c, "norm", routed), e.recompute_every) + div(uncast(e, t, c, "swiglu", routed), e.recompute_every);
    return norms + normedLatents(e, t) + attentionOutput + t.product + again + copies + cast;
  }

  /** activations._uncast @param {Experiment} e */
  function uncast(e, t, c, operation, routed) {
    if (!keepsFp8(e) || !recomputedOperations(e).includes(operation)) return 0;
    const [tokens, streamTokens] = rankTokens(e);
    if (operation === "swiglu") return routed ? 0 : div(c * tokens * e.model.ffn_hidden_size, e.tp) - t.product;
    if (e.tp > 1) return 0;
    return 2 * (c * e.model.hidden_size + STATISTICS_BYTES) * streamTokens - t.attention_norm - t.ffn_norm;
  }

  /**
   * activations.first_half_bytes
   * @param {Experiment} e
   * @param {number} c
   */
  function firstHalfBytes(e, c) {
    const t = layerTensors(e, false, c);
    if (isFp8(e)) return uncast(e, t, c, "swiglu", false) + div(uncast(e, t, c, "norm", false), 2);
    const downWeight = div(c * e.model.ffn_hidden_size, e.tp) * e.model.hidden_size;
    return Math.max(0, t.product - downWeight);
  }

  /**
   * activations.head_bytes
   * @param {Experiment} e
   * @param {number} c
   */
  function headBytes(e, c) {
    const model = e.model, [tokens, streamTokens] = rankTokens(e);
    const full = c * tokens * model.hidden_size, rows = div(model.vocab_size, e.tp);
    const chunks = Math.ceil(tokens / LOSS_CHUNK_TOKENS);
    const logits = c * Math.ceil(tokens / chunks) * rows;
    const gradient = c * rows * model.hidden_size;
    const accumulator = chunks === 1 ? gradient : Math.max(c, STATISTICS_BYTES) * rows * model.hidden_size;
    const weight = Math.max(logits + accumulator, chunks > 1 ? accumulator + gradient : 0);
    const normInput = (c * model.hidden_size + STATISTICS_BYTES) * streamTokens;
    const working = normInput + full + full + weight;
    const kept = e.pp_schedule === "gpipe" ? STATISTICS_BYTES * tokens : gradient;
    return { saved: normInput + full + kept, working };
  }

  return {
    asHeld, computeBytes, dataDegrees, dataParallel, deferredBytes, denseLayer, div, experimentChunks, experimentStages, expertDegrees, expertTensors, firstHalfBytes, gatheredBytes, headBytes, layerBytes, localParams,
    masterBytes, moeLayer, numDenseLayers, numMicrobatches, numParams, rankTokens, sum, V_SHAPED, worldSize, writtenStages,
  };
})();
