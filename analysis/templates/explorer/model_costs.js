/* Bytes of layers and their parts in closed form: the planner's formulas, for the page. This file does not use the DOM.

   A line-by-line port of workloads/costs/memory/{activations,expert_activations}.py, which explain the formulas. Names,
   order of arithmetic and integer divisions are the same (tests compare both sides). Experiments are those of
   ClosedForms. Beyond the port, a layer's saved bytes come with their parts. */
"use strict";
const ModelCosts = (() => {
  const STATISTICS_BYTES = 4;
  const LOSS_CHUNK_TOKENS = 4096;
  const {
    cast_bytes: castBytes, head_sizes: headSizes, is_fp8: isFp8, keeps_fp8: keepsFp8, kept_inputs: keptInputs,
    sent_tokens: sentTokens, skewed_loads: skewedLoads, working_bytes: workingBytesInFp8,
  } = ClosedForms;

  /** Python's `a // b`. @param {number} a @param {number} b */
  const div = (a, b) => Math.floor(a / b);
  /** @param {Record<string, number>} parts */
  const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);

  /* ---- workloads/costs/memory/activations.py ---- */

  /** activations.rank_tokens: [T, T_s]. @param {Planned} e */
  function rankTokens(e) {
    const tokens = div(e.micro_batch_size * e.seq_len, e.cp);
    return [tokens, e.sequence_parallel ? div(tokens, e.tp) : tokens];
  }

  /**
   * activations.layer_tensors, with the changes that activations._tensors_of makes under Ulysses
   * @param {Planned} e
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

  /** expert_activations.received_rows @param {Planned} e */
  function receivedRows(e) {
    const moe = e.model.moe, sent = sentTokens(e) * moe.experts_per_token;
    if (e.capacity_factor !== null) return moe.num_experts * Math.ceil((e.capacity_factor * sent) / moe.num_experts);
    if (e.ep === 1 || e.routing === "balanced" || e.routing_imbalance <= 1) return sent;
    const first = skewedLoads(moe.num_experts, e.routing_imbalance).slice(0, div(moe.num_experts, e.ep));
    return Math.min(e.ep * sent, Math.round(sent * e.ep * first.reduce((total, load) => total + load, 0)));
  }

  /**
   * expert_activations.expert_tensors
   * @param {Planned} e
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

  /** expert_activations.expert_working @param {Planned} e */
  function expertWorking(e, t, gathered, again) {
    const down = div(t.parameters, 3), received = e.ep > 1 ? [t.sent + t.rows, 2 * t.rows] : [];
    const weights = [t.rows + t.product + down, t.gate_up + down, t.rows + t.parameters - t.product];
    if (isFp8(e)) {
      const turned = div(t.parameters, 6);
      weights.push(t.rows + div(t.rows, 2) + turned + t.product, div(t.gate_up, 2) + 2 * turned + t.rows + down - t.product);
    }
    return Math.max(gathered + t.sent, ...received, again + Math.max(...weights));
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

  /** Ulysses keeps the received tensors. @param {Planned} e */
  const receives = (e) => e.cp > 1 && e.cp_kind === "ulysses";

  /** activations._normed_latents @param {Planned} e */
  function normedLatents(e, t) {
    const { mla } = e.model;
    return mla ? t.latent_norms - STATISTICS_BYTES * rankTokens(e)[1] * (mla.q_lora_rank ? 2 : 1) : 0;
  }

  /**
   * activations._recomputable_bytes
   * @param {Planned} e
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
   * @param {Planned} e
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
   * @param {Planned} e
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
      const of = madeAgain(e, t, c), named = e.recomputed_operations;
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
   * @param {Planned} e
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
    const inFp8 = isFp8(e), remade = recomputed && e.recomputed_operations.includes("swiglu");
    const working = inFp8
      ? workingBytesInFp8(e, stream, tokens, div(e.model.ffn_hidden_size, e.tp), c, remade)
      : stream + downWeight + Math.max(...steps);
    const compiled = e.compiles(false, recomputed);
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
      const of = madeAgain(e, t, c), named = e.recomputed_operations;
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
   * activations.deferred_bytes
   * @param {Planned} e
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

  /** activations._uncast @param {Planned} e */
  function uncast(e, t, c, operation, routed) {
    if (!keepsFp8(e) || !e.recomputed_operations.includes(operation)) return 0;
    const [tokens, streamTokens] = rankTokens(e);
    if (operation === "swiglu") return routed ? 0 : div(c * tokens * e.model.ffn_hidden_size, e.tp) - t.product;
    if (e.tp > 1) return 0;
    return 2 * (c * e.model.hidden_size + STATISTICS_BYTES) * streamTokens - t.attention_norm - t.ffn_norm;
  }

  /**
   * activations.first_half_bytes
   * @param {Planned} e
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
   * @param {Planned} e
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

  return { deferredBytes, div, expertTensors, firstHalfBytes, headBytes, layerBytes, rankTokens, sum };
})();
