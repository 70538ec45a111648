"use strict";

/** Fields that say how weights are updated, with their usual values, as in workloads.spec.updates.words. */
const UPDATE_FIELDS = { grad_reduce: "fp32", optimizer: "adamw", optimizer_states: "fp32", master_weights: "fp32", optimizer_offload: 0 };
