/* Micro-batches that a pipeline rank holds during a step, and the state of each of its chunks. This file does not use
   the DOM.

   A port of workloads/costs/shape/schedule.py (`Chunk`, `held_by_rank`, `held_by_chunk`), which explains it. */
"use strict";
const MemoryHeld = (() => {
  const { numMicrobatches } = ModelCosts;

  /** schedule.Chunk */
  const [UNTOUCHED, GATHERED, ENDS_REDUCED, ALL_REDUCED, DONE] = [0, 1, 2, 3, 4];

  /**
   * memory.moments_held: [micro-batches in flight, micro-batches between the halves of a split backward].
   * @returns {Pair[]}
   */
  function momentsHeld(e, rank) {
    const m = numMicrobatches(e), v = e.virtual_stages;
    if (e.pp_schedule === "gpipe") return [[m, 0]];
    const rounds = Math.min(m, 2 * e.pp); // schedule.held_by_rank
    let inFlight = 0, waits = 0;
    /** @type {Pair[]} */
    const found = [[0, 0]];
    for (const { kind } of PipelineModel.scheduleActions(e.pp_schedule, rank, e.pp, rounds, v)) {
      if (kind !== "W") inFlight += kind === "F" ? 1 : -1;
      if (kind === "I" || kind === "W") waits += kind === "I" ? 1 : -1;
      found.push([inFlight / v, waits / v]);
    }
    return found;
  }

  /**
   * schedule.held_by_chunk: for each chunk of a rank, by kind, what all chunks hold when its backwards start.
   * @param {Experiment} e
   * @param {number} rank
   */
  function heldByChunk(e, rank) {
    const m = numMicrobatches(e), v = e.virtual_stages, filling = e.pp_schedule === "gpipe" ? m : Math.min(m, 3 * e.pp);
    const actions = PipelineModel.scheduleActions(e.pp_schedule, rank, e.pp, filling, v);
    const lastForward = actions.findLastIndex(({ kind }) => kind === "F");
    const lastOf = Array.from({ length: v }, (_, chunk) => actions.findLastIndex((one) => one.chunk === chunk && "BW".includes(one.kind)));
    const now = Array(v).fill(0), waits = Array(v).fill(0), far = Array(v).fill(UNTOUCHED);
    /** @type {{kind: string, last: boolean, follows: boolean, far: number[], found: {activations: number[], forWeights: number[]}[]}[][]} */
    const chunks = Array.from({ length: v }, () => []);
    actions.forEach(({ kind, chunk }, place) => {
      const last = place === lastOf[chunk], follows = place < lastForward;
      if (kind === "F") {
        now[chunk] += 1;
        far[chunk] = Math.max(far[chunk], GATHERED);
      }
      if (kind !== "F" || chunk === v - 1) {
        const alike = (one) => one.kind === kind && one.last === last && one.follows === follows && one.far.join() === far.join();
        let own = chunks[chunk].find(alike);
        if (!own) chunks[chunk].push((own = { kind, last, follows, far: [...far], found: [] }));
        own.found.push({ activations: [...now], forWeights: [...waits] });
      }
      if (kind === "B" || kind === "I") now[chunk] -= 1;
      if (kind === "I" || kind === "W") waits[chunk] += kind === "I" ? 1 : -1;
      if (kind !== "F") far[chunk] = Math.max(far[chunk], kind === "I" ? ENDS_REDUCED : last ? DONE : ALL_REDUCED);
    });
    return chunks;
  }

  return { GATHERED, ENDS_REDUCED, ALL_REDUCED, DONE, heldByChunk, momentsHeld };
})();
