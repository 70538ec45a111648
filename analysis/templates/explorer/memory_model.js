/* Device memory of one training step, by category and tensor: the planner's own events (ClosedForms), at the highest step
   of every pipeline stage. This file does not use the DOM. Above 2^53 bytes (8 PiB on one rank) `estimateMemory` throws,
   because doubles are not exact there. */
"use strict";
const MemoryModel = (() => {
  const { MIXED, Part, Shared, TENSORS, as_held, experiment_stages, highest, live_at, part_of_experiment, saved_by_part, timelines_of } = ClosedForms;
  /** In the order of `events.PARAMETERS` and the following. */
  const CATEGORIES = ["parameters", "gradients", "optimizer", "activations"];

  /** `parts` is {category: {part: bytes}}, whose saved tensors are told by part of a layer; `moment`: the highest step. */
  function stageMemory(e, known, stage, held) {
    const own = part_of_experiment(e, held), shared = known.get(held.recompute) ?? Shared.of(own);
    known.set(held.recompute, shared);
    const timelines = timelines_of(e, shared, stage, held), [number, place] = highest(timelines);
    const { action, steps } = timelines[number], rank = Part.of(own, shared, held);
    /** @type {Record<string, Record<string, number>>} */
    const parts = Object.fromEntries(CATEGORIES.map((category) => [category, {}]));
    const saved = saved_by_part(own, shared, rank); // not of all layers
    const told = held.recompute !== MIXED && py.sum(saved.values()) === rank.saved;
    const put = (of, name, bytes) => { if (bytes) parts[of][name] = (parts[of][name] ?? 0) + bytes; };
    for (const [key, bytes] of live_at(timelines[number], place).items()) {
      const { category, name } = TENSORS.at(key), of = CATEGORIES[category];
      const batches = !told ? 0 : key === "others" ? bytes / (rank.saved + rank.packed + rank.of_head) : key === "saved" && bytes === rank.saved ? 1 : 0;
      if (!batches) put(of, name, bytes);
      else for (const [part, size] of saved.items()) put(of, part, batches * size);
      if (batches && key === "others") put(of, "loss of other micro-batches", batches * rank.of_head);
      if (batches && key === "others") put(of, TENSORS.at("documents").name, batches * rank.packed);
    }
    const [parameters, gradients, optimizer, activations] = CATEGORIES.map((category) => py.sum(Object.values(parts[category])));
    return {
      stage, parts, moment: `${action}: ${steps[place][0]}`,
      parameters_bytes: parameters, gradients_bytes: gradients, optimizer_bytes: optimizer, activations_bytes: activations,
      peak_bytes: parameters + gradients + optimizer + activations,
    };
  }

  /**
   * The experiment must satisfy all rules; throws RangeError beyond exact whole numbers.
   * @param {Experiment} fields
   */
  function estimateMemory(fields) {
    const e = as_held(py.made(ClosedForms.Experiment, fields)), known = new Map();
    const stages = experiment_stages(e).map((held, stage) => stageMemory(e, known, stage, held));
    const peaks = stages.map((memory) => memory.peak_bytes), peak = Math.max(...peaks);
    if (!Number.isSafeInteger(peak)) throw new RangeError("more than 8 PiB on one rank: too much to count exactly");
    return { stages, peak_stage: peaks.indexOf(peak), peak_bytes: peak };
  }

  /** The file of the engine that makes a tensor, by its name. */
  const madeIn = (name) => TENSORS.values().find((tensor) => tensor.name === name)?.made_in;

  return { estimateMemory, madeIn };
})();
