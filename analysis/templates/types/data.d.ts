/* Types of the data that Python puts into the page, for the type checker of its scripts (../tsconfig.json); this file
   is not part of the page. */

/** A value of a row, in the unit of the table; null if unknown. */
type Value = string | number | null;

/** A column of analysis/explorer/row_data.py: plain values, codes into `levels` or `texts`, or differences. */
interface PackedColumn {
  name: string;
  label: string;
  unit: string;
  description: string;
  kind: "text" | "number" | "time";
  /** The distinct values; codes are indices into it, -1 for an unknown value. */
  levels?: (string | number)[];
  texts?: PackedTexts;
  codes?: number[];
  /** The code that all rows have. */
  code?: number;
  /** Differences of consecutive codes. */
  codeSteps?: number[];
  values?: (number | null)[];
  /** Differences of consecutive values. */
  steps?: number[];
}

/** Many different texts, split into their parts: analysis/explorer/pack_texts.py. */
interface PackedTexts {
  forms: { cuts: string; places: PackedPlace[] }[];
  /** The form of each text, if there are several. */
  form?: number[];
}

/** The parts at one position of a form: plain, as differences, or as codes. */
type PackedPlace = string[] | { steps?: number[]; levels?: string[]; codes?: number[] };

/** Comparable rows, as the explorer names them. */
interface CohortAbout {
  title: string;
  meaning: string;
  stamp: string;
  rows: number;
}

/** Name and version of this project's engine. */
interface EngineAbout {
  name: string;
  version: string | number;
}

/** Lists of one row: analysis/explorer/row_series.py. Seconds of each pipeline stage, MiB of each step from the first. */
interface RowSeries {
  forward?: (number | null)[];
  backward?: (number | null)[];
  work?: (number | null)[];
  idle?: (number | null)[];
  allocated?: (number | null)[];
  reserved?: (number | null)[];
}

/** The page's data: analysis.explorer.parts.page_data, with `page` from analysis/index_page/page_data.py. */
interface RunsData {
  rows: number;
  /** Fingerprint of the rows' ids: a selection in the address applies only to rows with this fingerprint. */
  fingerprint: string;
  cohorts: CohortAbout[];
  columns: PackedColumn[];
  /** Names of columns that have a filter from the start. */
  filters: string[];
  /** Names of the table's columns. */
  table: string[];
  /** Outcomes in words. */
  outcomes: Record<string, string>;
  engine: EngineAbout;
  source: string;
  /** End of the log of a failed row, by the row's number. */
  logs: Record<string, { name: string; text: string }>;
  /** Relative address of the trace of a row, by the row's number. */
  traces?: Record<string, string>;
  /** Lists of a row, by the row's number. */
  series?: Record<string, RowSeries>;
  widget: Widget;
  page?: { parts: PackedPart[]; price: number | null; command: string | null; opens: OpensAt | null };
}

/** The cell that the page shows at first: analysis/index_page/page_data.py. */
interface OpensAt {
  workload: string;
  world_size: number;
  tokens_per_step: number;
}

/** Shapes, devices and rules of the memory view: analysis/explorer/model_data.py. */
interface Widget {
  /** Model shapes, smallest first. */
  models: ModelShape[];
  /** Names of models of rows that are lists of layers. */
  listed: string[];
  /** Name and sizes of every shipped model that is a list of layers. */
  listed_sizes: ({ name: string } & Record<string, number | string>)[];
  clusters: ClusterAbout[];
  /** A layout is left out if its peak exceeds this many times a cluster's usable bytes. */
  oom_margin: number;
  /** The allowed values of an experiment's fields. */
  choices: Record<string, string[]>;
  engine: { engine: string; engine_version: string | number };
  rules: RuleData;
}

/** A model's sizes: workloads.spec.experiment.ModelConfig as plain data. */
interface ModelShape {
  name: string;
  num_layers: number;
  hidden_size: number;
  num_heads: number;
  num_kv_heads: number;
  head_dim: number;
  ffn_hidden_size: number;
  vocab_size: number;
  tie_embeddings: boolean;
  qk_norm: boolean;
  /** Unknown for a shape that the page has built from a row; no script reads these two. */
  rope_theta?: number;
  norm_eps?: number;
  moe: ExpertShape | null;
  mla: LatentShape | null;
}

/** Routed experts of a model. */
interface ExpertShape {
  num_experts: number;
  experts_per_token: number;
  expert_hidden_size: number;
  num_shared_experts: number;
  num_dense_layers: number;
  gate: string;
  normalize_weights: boolean;
  weight_scale: number;
  balance: string;
  balance_coefficient: number;
}

/** Multi-head latent attention of a model. */
interface LatentShape {
  q_lora_rank: number;
  kv_lora_rank: number;
  qk_nope_head_dim: number;
  qk_rope_head_dim: number;
  v_head_dim: number;
}

/** A cluster with known device memory, in bytes. */
interface ClusterAbout {
  name: string;
  device: string;
  memory_bytes: number;
  usable_bytes: number;
  /** Workspace of matrix products, in addition to tensors. */
  workspace_bytes: number;
  devices_per_node: number;
  /** Number of devices that the outermost tier of the network joins; 0: not known. */
  joined_devices: number;
  backend: string;
  /** Precisions for which the device's speed is known. */
  precisions: string[];
}

/** The planner's rules, which memory_rules.js evaluates: analysis/explorer/rule_data.py. */
interface RuleData {
  derived: [string, Expression][];
  lacking: Rule[];
  rules: Rule[];
  refusals: {
    model_sizes: string[]; counts: string[]; not_a_count: string; heads_do_not_divide: string;
    relations: { broken: Expression; message: Expression[] }[];
  };
}

/** A rule, violated if its expression is true; in its message texts and expressions alternate. */
interface Rule {
  rule: string;
  scope: "layout" | "engine" | "cluster";
  broken: Expression;
  message: Expression[];
}

/** An expression as workloads.spec.expressions.as_data writes it: a number, a name, or a list of a sign and its operands. */
type Expression = number | string | Expression[];

/** The fields of an experiment, as workloads.spec.experiment.to_dict has them. */
interface Experiment {
  model: ModelShape;
  dp_replicate: number;
  dp_shard: number;
  tp: number;
  cp: number;
  pp: number;
  ep: number;
  etp: number;
  routing: string;
  routing_imbalance: number;
  capacity_factor: number | null;
  micro_batch_size: number;
  global_batch_size: number;
  seq_len: number;
  zero_stage: number;
  recompute: string;
  recompute_every: number;
  activation_offload?: string;
  pp_schedule: string;
  virtual_stages: number;
  pp_split: string;
  pp_stages?: string | null;
  pad_vocab_to?: number | null;
  documents?: string | null;
  gradient_accumulation_fusion?: boolean;
  grad_reduce?: string;
  optimizer?: string;
  optimizer_states?: string;
  master_weights?: string;
  optimizer_offload?: number;
  cp_kind: string;
  precision: string;
  attention: string;
  recurrence?: string;
  compile: string;
  cuda_graph?: string;
  sequence_parallel: boolean;
  seed: number;
  engine: string;
  engine_version: string | number;
}

/** One part of the results, from analysis/index_page/page_data.py; row numbers are indices into the rows' table. */
interface PackedPart {
  slug: string;
  title: string;
  meaning: string;
  stamp: string;
  /** How its rows were obtained: "measured", "rehearsed", "planned" and so on. */
  method: string;
  first: number;
  rows: number;
  /** Plural noun of its devices. */
  noun: string;
  workloads: string[];
  device: string | null;
  power_limit_w: number | null;
  /** Memory of a device in bytes. */
  capacity: number | null;
  /** Name of the column with the peak memory. */
  memory: string;
  /** The deciding attempt of each point; `again`: 1 if it will be retried. */
  points: { rows: number[]; again: number[] };
  /** Ranked layouts; missing for a plan. */
  ranked?: Ranked;
  choices?: ChoiceRow[];
  settings?: Settings;
  waiting: WaitingPoints[];
}

/** Points of the plan without a result: analysis/index_page/next_runs.py. `tight`: how many may not fit. */
interface WaitingPoints {
  workload: string;
  world_size: number;
  points: number;
  tight: number;
  hours: number | null;
  /** The measurements that the predictions used, in words. */
  basis: string | null;
  /** By how much the finished runs change the predictions, in words. */
  corrected: string | null;
  first: WaitingPoint[];
}

/** A point that has not run: predicted tokens per second and device with its 90 % interval, peak in bytes. */
interface WaitingPoint {
  layout: string;
  rate: number | null;
  low: number | null;
  high: number | null;
  peak: number | null;
  tight: boolean;
  hours: number | null;
}

/** The layouts that have a rank, as columns: row number, pooled tokens per second and device, and noise. */
interface Ranked {
  row: number[];
  rate: number[];
  repeats: number[];
  noise: (number | null)[];
  freedom: (number | null)[];
  /** Codes into `sources`, the origins of the noise estimates. */
  from: number[];
  sources: string[];
}

/** How layouts that differ in one axis alone are found: analysis/index_page/page_data.py. */
interface Settings {
  /** Name, the degree that must be above 1, and the settings that may differ with the axis. */
  axes: [string, string | null, ...string[]][];
  /** Columns in which layouts must agree. */
  same: string[];
  /** Codes by ranked layout in which they must agree, too. */
  codes: Record<string, number[]>;
}

/** What a value of an axis costs: analysis/rows/choice_costs.py, and `Answer.changes` beside the answer. */
interface ChoiceRow {
  axis: string;
  first: string;
  value: string;
  pairs: number;
  median: number | null;
  low: number | null;
  high: number | null;
  /** Whether its runs are within noise of the answer. */
  tied?: boolean;
  /** The best layout with the value, other choices free. */
  run?: Layout;
}
