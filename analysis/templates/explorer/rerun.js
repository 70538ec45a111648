"use strict";

/* The command that runs a row's point again: the grid `one_point` with every field of the experiment spelled out. */
const Rerun = (() => {
  const ALWAYS = ["dp_replicate", "dp_shard", "tp", "pp", "micro_batch_size", "global_batch_size", "seq_len", "zero_stage", "recompute"];
  const DEFAULTS = { cp: 1, ep: 1, pp_schedule: "none", virtual_stages: 1, sequence_parallel: "yes", precision: "bf16", attention: "auto", compile: "none", seed: 42 };
  /** Fields that rows of engines before version 3 lack, with the behaviour of those engines. */
  const SINCE = { pp_split: ["balanced", "even"], cp_kind: ["ring", "ring"], recompute_every: [1, 1], etp: [1, 1], routing: ["balanced", "balanced"], routing_imbalance: [1, 1], capacity_factor: ["null", "null"], pp_stages: ["null", "null"], pad_vocab_to: ["null", "null"], cuda_graph: ["auto", "none"], gradient_accumulation_fusion: ["null", "no"], documents: ["null", "null"], document_balance: ["none", "none"], grad_reduce: ["fp32", "fp32"], optimizer: ["adamw", "adamw"], optimizer_states: ["fp32", "fp32"], master_weights: ["fp32", "fp32"], optimizer_offload: [0, 0], activation_offload: ["none", "none"], recurrence: ["torch", "torch"] };
  const FLAGS = { yes: "true", no: "false" };

  /** {words, notes} or {missing: the reason}. `read(name)` is the row's value of a column, null if unknown. */
  function command(read, engine) {
    const made = read("engine");
    if (made !== engine.name) return { missing: made ? `It was recorded by ${made}, not by this project's engine: no command runs it again.` : "The row does not say which engine ran it." };
    const fields = ["model", "cluster", ...ALWAYS, ...Object.keys(DEFAULTS)];
    const unknown = fields.filter((name) => read(name) === null);
    if (unknown.length) return { missing: `The row does not say its ${unknown.join(", ")}: no command can be given.` };
    const words = ["python", "-m", "sweep", "run", ...confFolders(read("command")), "+grid=one_point", `model=${hydra(configFile(read("command"), read("model")) ?? read("model"))}`, `cluster=${hydra(read("cluster"))}`];
    if (read("launcher") !== null) words.push(`launcher=${hydra(read("launcher"))}`);
    words.push(...kept(read("command"), read("launcher")));
    for (const name of ALWAYS) words.push(`grid.axes.${name}=${hydra(read(name))}`);
    for (const [name, usual] of Object.entries(DEFAULTS)) {
      const value = read(name);
      if (String(value) !== String(usual)) words.push(`grid.axes.${name}=${FLAGS[value] ?? hydra(value)}`);
    }
    for (const [name, [usual, before]] of Object.entries(SINCE)) {
      const value = read(name) ?? (read(name === "pp_split" ? "pp" : "cp") > 1 ? before : usual);
      if (String(value) !== String(usual)) words.push(`grid.axes.${name}=${FLAGS[value] ?? hydra(value)}`);
    }
    for (const name of ["warmup_steps", "timed_steps"]) if (read(name) !== null) words.push(`measure.${name}=${read(name)}`);
    // The point must run even if it is predicted not to fit; under a new sweep name it has no row yet.
    words.push("plan.run_predicted_oom=true", `name=rerun-${hash(read("experiment_id"))}`);
    const version = read("engine_version");
    const notes = version === engine.version ? [] : [`The row is of engine version ${version ?? "unknown"}; this command runs version ${engine.version}, which gives the point another id.`];
    return { words, notes };
  }

  const SHAPE = ["num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"];

  /**
   * The command that measures a row's layout: as it ran, or with this project's engine if another engine ran it and a
   * model file has the row's sizes: the one of the row's name, otherwise the first that is no list of layers.
   * @param {(name: string) => any} read
   * @param {RunsData} data
   * @returns {Command}
   */
  function anywhere(read, data) {
    const by = read("engine");
    if (by === null || by === data.engine.name) return command(read, data.engine);
    const { models, listed_sizes } = data.widget;
    const same = (shape) => SHAPE.every((name) => shape[name] === read(name));
    const model = [...models, ...listed_sizes].find((shape) => shape.name === read("model") && same(shape)) ?? models.find(same);
    if (!model) return { missing: `No model file of this project has the shape of ${read("model")}: no command can be given.` };
    const own = { model: model.name, engine: data.engine.name, engine_version: data.engine.version, cuda_graph: "auto", warmup_steps: null, timed_steps: null };
    const asked = command((name) => (name in own ? own[name] : read(name) ?? DEFAULTS[name] ?? null), data.engine);
    return asked.missing ? asked : { ...asked, notes: [`It runs this layout with this project's engine; the row is of ${by}.`] };
  }

  const hash = (id) => String(id).split("-").at(-1).replace(/[^A-Za-z0-9]/g, "") || "point";

  /** A value in Hydra's grammar. */
  function hydra(value) {
    const text = String(value);
    const keyword = /^(true|false|yes|no|on|off|null|nan|inf)$/i.test(text);
    const number = /^[+-]?[\d_.]+(e[+-]?\d+)?$/i.test(text);
    if (typeof value === "number" || (/^[\w.+-]+$/.test(text) && !keyword && !number)) return text;
    return `'${text.replace(/(\\*)'/g, "$1$1\\'").replace(/(\\+)$/, "$1$1")}'`;
  }

  /** Words of the row's original command line that say where and with whose files it ran. */
  function kept(line, launcher) {
    const prefixes = ["cluster.", ...(launcher ? ["launcher."] : [])];
    return split(line).filter((word) => prefixes.some((prefix) => word.startsWith(prefix)));
  }

  function confFolders(line) {
    const words = split(line);
    return words.flatMap((word, index) => (word.startsWith("--conf=") ? [word] : word === "--conf" && words[index + 1] ? [word, words[index + 1]] : []));
  }

  /**
   * The config.json from which the row's command line read its model, if it read one: a name alone would not be found.
   * @param {?string} line
   * @param {string} model
   */
  function configFile(line, model) {
    const values = split(line).flatMap((word) => /^(?:grid\.axes\.)?model=(.*)$/.exec(word)?.[1].replace(/^\[(.*)\]$/, "$1").split(",") ?? []);
    return values.map((value) => value.trim().replace(/^(['"])(.*)\1$/, "$2")).find((path) => nameOfConfig(path) === model);
  }

  /** The name that the planner gives to the model in a file (workloads.spec.config_json.read.name_of); null for a plain name. */
  function nameOfConfig(path) {
    if (!path.includes("/") && !path.endsWith(".json")) return null;
    const parts = path.replace(/\/+$/, "").split("/");
    if (parts.at(-1) === "config.json") parts.pop();
    const name = parts.at(-2) === "snapshots" ? parts.at(-3) : parts.at(-1);
    return name?.replace(/\.json$/, "").split("--").at(-1) || "model";
  }

  /** The words of a POSIX shell's line, as `shlex.join` writes it. */
  function split(line) {
    const words = [];
    for (const [word] of (line ?? "").matchAll(/(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+/g)) {
      words.push(word.replace(/'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)/g, (_, single, double, one) => single ?? double?.replace(/\\(["\\$`])/g, "$1") ?? one));
    }
    return words;
  }

  /** The words as one line for a POSIX shell. */
  function line(words) {
    return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
  }

  return { command, anywhere, line };
})();
