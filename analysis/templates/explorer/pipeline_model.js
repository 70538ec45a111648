/* Pipeline schedules and how long they take, for the page. No DOM here.

A port of workloads/costs/schedule.py and of `simulate` in workloads/costs/pipeline.py, which explain them; a test
compares both on random pipelines. Times have no unit: whatever the given ones have. */
"use strict";
const PipelineModel = (() => {
  const F = (microbatch) => ({ kind: "F", microbatch });
  const B = (microbatch) => ({ kind: "B", microbatch });
  const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);

  /** schedule.gpipe */
  const gpipe = (stage, numStages, numMicrobatches) =>
    [...range(0, numMicrobatches).map(F), ...range(0, numMicrobatches).map(B)];

  /** schedule.one_f_one_b */
  function oneFOneB(stage, numStages, numMicrobatches) {
    const warmup = Math.min(numStages - stage - 1, numMicrobatches);
    return [
      ...range(0, warmup).map(F),
      ...range(0, numMicrobatches - warmup).flatMap((i) => [F(warmup + i), B(i)]),
      ...range(numMicrobatches - warmup, numMicrobatches).map(B),
    ];
  }

  /** schedule._SCHEDULES */
  const SCHEDULES = { none: oneFOneB, gpipe, "1f1b": oneFOneB };

  /** schedule.schedule_actions: the actions of one stage, in order. */
  const scheduleActions = (name, stage, numStages, numMicrobatches) =>
    SCHEDULES[name](stage, numStages, numMicrobatches);

  /** schedule.microbatches_in_flight: most micro-batches whose forward has run and whose backward has not. */
  function microbatchesInFlight(actions) {
    let inFlight = 0, most = 0;
    for (const action of actions) {
      inFlight += action.kind === "F" ? 1 : -1;
      most = Math.max(most, inFlight);
    }
    return most;
  }

  /** pipeline.simulate: execute the action list of every stage with constant times per stage. */
  function simulate(schedule, forward, backward, p2p) {
    const done = new Map(), key = (kind, stage, microbatch) => `${kind} ${stage} ${microbatch}`;
    const position = schedule.map(() => 0), clock = schedule.map(() => 0), spans = schedule.map(() => []);
    let remaining = schedule.reduce((count, actions) => count + actions.length, 0);
    while (remaining) {
      const before = remaining;
      schedule.forEach((actions, stage) => {
        for (; position[stage] < actions.length; position[stage] += 1, remaining -= 1) {
          const action = actions[position[stage]];
          const neighbour = action.kind === "F" ? stage - 1 : stage + 1;
          let start = clock[stage];
          if (neighbour >= 0 && neighbour < schedule.length) {
            const ready = done.get(key(action.kind, neighbour, action.microbatch));
            if (ready === undefined) return;
            start = Math.max(start, ready + p2p);
          } else if (action.kind === "B" && !done.has(key("F", stage, action.microbatch))) return;
          const end = start + (action.kind === "F" ? forward[stage] : backward[stage]);
          done.set(key(action.kind, stage, action.microbatch), end);
          clock[stage] = end;
          spans[stage].push({ stage, action, start, end });
        }
      });
      if (remaining === before) throw new Error("the schedule waits for itself");
    }
    const total = Math.max(...clock);
    const idle = spans.map((own, stage) => {
      const forwards = own.filter((span) => span.action.kind === "F").length;
      return total - forwards * forward[stage] - (own.length - forwards) * backward[stage];
    });
    return { total, idle, spans };
  }

  return { SCHEDULES, microbatchesInFlight, scheduleActions, simulate };
})();
