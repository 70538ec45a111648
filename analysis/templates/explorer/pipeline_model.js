/* Pipeline schedules and their duration, for the page. This file does not use the DOM.

   A port of workloads/costs/shape/schedule.py and of `simulate` in workloads/costs/time/pipeline.py, which explain
   them; a test compares both on random pipelines. Results have the unit of the given times. */
"use strict";
const PipelineModel = (() => {
  const V_SHAPED = ["zero_bubble_v", "dualpipe_v"];
  const INTERLEAVED = ["interleaved_1f1b", "interleaved_zero_bubble"];
  const SPLIT_BACKWARD = ["interleaved_zero_bubble", ...V_SHAPED];

  /** @type {(kind: PipelineAction["kind"], microbatch: number, chunk?: number) => PipelineAction} */
  const act = (kind, microbatch, chunk = 0) => ({ kind, microbatch, chunk });
  const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  const times = (count, doing) => { for (let i = 0; i < count; i += 1) doing(i); };

  /** schedule.stage_at */
  const stageAt = (name, rank, chunk, numRanks) =>
    V_SHAPED.includes(name) && chunk === 1 ? 2 * numRanks - 1 - rank : chunk * numRanks + rank;

  /** schedule.gpipe */
  const gpipe = (rank, p, m) => [...range(0, m).map((i) => act("F", i)), ...range(0, m).map((i) => act("B", i))];

  /** schedule._looped */
  function looped(rank, p, m, v, lead, weightsAfter = null) {
    const rounds = range(0, Math.ceil(m / p)).map((round) => round * p);
    /** @type {Pair[]} */
    const forwards = rounds.flatMap((first) =>
      range(0, v).flatMap((chunk) => range(first, first + p).map((i) => /** @type {Pair} */ ([chunk, i]))));
    /** @type {Pair[]} */
    const backwards = forwards.map(([chunk, i]) => [v - 1 - chunk, i]);
    const warmup = Math.min((v - 1) * p + lead, forwards.length);
    const actions = forwards.slice(0, warmup).map(([chunk, i]) => act("F", i, chunk));
    const weights = ([chunk, i]) => actions.push(act("W", i, chunk));
    backwards.forEach(([chunk, i], at) => {
      if (warmup + at < forwards.length) actions.push(act("F", forwards[warmup + at][1], forwards[warmup + at][0]));
      actions.push(act(weightsAfter === null ? "B" : "I", i, chunk));
      if (weightsAfter !== null && at >= weightsAfter) weights(backwards[at - weightsAfter]);
    });
    if (weightsAfter) backwards.slice(Math.max(0, backwards.length - weightsAfter)).forEach(weights);
    return actions;
  }
  const oneFOneB = (rank, p, m, v) => looped(rank, p, m, v, p - 1 - rank);
  const interleaved = (rank, p, m, v) => looped(rank, p, m, v, 2 * (p - 1 - rank));
  const interleavedZeroBubble = (rank, p, m, v) => looped(rank, p, m, v, p - 1 - rank, rank);

  /** schedule._Writer: each call takes the next micro-batch of its kind and chunk. */
  function writer() {
    const actions = [], waiting = [], next = { F: [0, 0], B: [0, 0] };
    const add = (kind, chunk) => {
      const counts = next[kind === "F" ? "F" : "B"];
      actions.push(act(kind, counts[chunk], chunk));
      counts[chunk] += 1;
      return counts[chunk] - 1;
    };
    const weights = (...chunks) => {
      const at = waiting.findIndex((action) => chunks.includes(action.chunk));
      actions.push(...waiting.splice(at, 1));
    };
    return {
      actions,
      forward: (chunk) => { add("F", chunk); },
      backward: (chunk) => { add("B", chunk); },
      inputs: (chunk) => { waiting.push(act("W", add("I", chunk), chunk)); },
      weights,
      remainingWeights: (chunk) => waiting.filter((action) => action.chunk === chunk).forEach(() => weights(chunk)),
    };
  }

  /** schedule.zero_bubble_v */
  function zeroBubbleV(rank, p, given) {
    const w = writer(), m = Math.max(2 * p - 1, given), ahead = 2 * (p - rank) - 1;
    times(ahead, () => w.forward(0));
    times(rank, () => { w.forward(1); w.forward(0); });
    times(p - rank, () => { w.forward(1); w.inputs(1); w.weights(1); });
    times(m - p, (i) => {
      if (ahead + rank + i < m) w.forward(0);
      w.inputs(0);
      w.weights(0);
      w.forward(1);
      w.inputs(1);
      w.weights(1);
    });
    times(rank, () => { w.inputs(0); w.inputs(1); });
    times(p - rank, () => { w.inputs(0); w.weights(0); });
    w.remainingWeights(1);
    w.remainingWeights(0);
    return w.actions;
  }

  /** schedule.dualpipe_v */
  function dualpipeV(rank, p, given) {
    const w = writer(), m = Math.max(2 * p, given), beforeTurn = p - 1 - rank;
    times(2 * beforeTurn, () => w.forward(0));
    times(rank + 1, () => { w.forward(0); w.forward(1); });
    times(beforeTurn, () => { w.inputs(1); w.weights(0, 1); w.forward(1); });
    times(m - 2 * p + rank + 1, () => { w.forward(0); w.backward(1); w.forward(1); w.backward(0); });
    times(beforeTurn, () => { w.backward(1); w.forward(1); w.backward(0); });
    times(2 * (rank + 1), (at) => (at <= rank ? w.backward : w.inputs)(1 - at % 2));
    times(beforeTurn, () => { w.weights(0, 1); w.inputs(0); });
    times(rank + 1, () => w.weights(0, 1));
    return w.actions;
  }

  /** schedule._SCHEDULES */
  const SCHEDULES = {
    none: oneFOneB,
    gpipe,
    "1f1b": oneFOneB,
    interleaved_1f1b: interleaved,
    interleaved_zero_bubble: interleavedZeroBubble,
    zero_bubble_v: zeroBubbleV,
    dualpipe_v: dualpipeV,
  };

  /** schedule.schedule_actions: the actions of one rank, in order. */
  const scheduleActions = (name, rank, numRanks, numMicrobatches, virtualStages = 1) =>
    SCHEDULES[name](rank, numRanks, numMicrobatches, virtualStages)
      .filter((action) => action.microbatch < numMicrobatches);

  /** The largest number of micro-batches between actions of two lists of kinds; each chunk of a micro-batch counts. */
  function mostBetween(actions, begins, ends) {
    let now = 0, most = 0;
    for (const { kind } of actions) {
      now += begins.includes(kind) ? 1 : ends.includes(kind) ? -1 : 0;
      most = Math.max(most, now);
    }
    return most;
  }
  /** schedule.microbatches_in_flight */
  const microbatchesInFlight = (actions) => mostBetween(actions, ["F"], ["B", "I"]);
  /** The largest number of micro-batches with a pending weight gradient. */
  const weightsWaiting = (actions) => mostBetween(actions, ["I"], ["W"]);

  /** pipeline.simulate: execute the action list of every rank; `lengths[kind][rank][chunk]` are the times. */
  function simulate(name, schedule, lengths, p2p) {
    const p = schedule.length, lastStage = p * lengths.F[0].length - 1;
    const done = new Map(), key = (kind, stage, microbatch) => `${kind} ${stage} ${microbatch}`;
    const position = schedule.map(() => 0), clock = schedule.map(() => 0), busy = schedule.map(() => 0);
    const spans = schedule.map(() => []);
    let remaining = schedule.reduce((count, actions) => count + actions.length, 0);
    while (remaining) {
      const before = remaining;
      schedule.forEach((actions, rank) => {
        for (; position[rank] < actions.length; position[rank] += 1, remaining -= 1) {
          const action = actions[position[rank]], { kind, microbatch, chunk } = action;
          const stage = stageAt(name, rank, chunk, p), direction = kind === "F" ? "F" : "B";
          const neighbour = kind === "F" ? stage - 1 : stage + 1;
          let start = clock[rank];
          if (kind === "W" && !done.has(key("B", stage, microbatch))) return;
          if (direction === "B" && kind !== "W" && !done.has(key("F", stage, microbatch))) return;
          if (kind !== "W" && neighbour >= 0 && neighbour <= lastStage) {
            const awaited = done.get(key(direction, neighbour, microbatch));
            if (awaited === undefined) return;
            if (awaited.rank !== rank) start = Math.max(start, awaited.end + p2p);
          }
          const length = lengths[kind][rank][chunk], end = start + length;
          if (kind !== "W") done.set(key(direction, stage, microbatch), { rank, end });
          clock[rank] = end;
          busy[rank] += length;
          spans[rank].push({ rank, action, start, end });
        }
      });
      if (remaining === before) throw new Error("the schedule waits for itself");
    }
    const total = Math.max(...clock);
    return { total, idle: busy.map((own) => total - own), spans };
  }

  return {
    INTERLEAVED, SCHEDULES, SPLIT_BACKWARD, V_SHAPED, microbatchesInFlight, scheduleActions, simulate, stageAt,
    weightsWaiting,
  };
})();
