/* Types that the page's scripts derive and share, for their type checker (../tsconfig.json); this file is not part of
   the page. */

/** A column of all rows: the class of columns.js. */
type Column = ReturnType<ReturnType<typeof Columns.unpack>["get"]>;

/** All columns by name, in the order of the file. */
type ColumnMap = Map<string, Column>;

/** The value of a column in one row; null also if there is no such column. */
type Read = (name: string) => Value;

/** A model on a number of devices: row numbers of its points, indices of its ranked layouts, points not run. */
interface Cell {
  workload: string;
  size: number;
  points: number[];
  layouts: number[];
  waiting: number;
  /** Points of the plan that it still has to run. */
  next?: WaitingPoints;
}

/** The reader's limits on one cell: `memory` in bytes; a null `batch` is that of most finished layouts. */
interface Query {
  workload: string;
  size: number;
  memory: number | null;
  batch: number | "any" | null;
  /** The value, as text, that a column must have. */
  only: Record<string, string>;
}

/** A ranked layout of an answer; `behind` is its loss relative to the fastest, a fraction. */
interface Layout {
  place: number;
  row: number;
  rate: number;
  noise: number | null;
  freedom: number | null;
  repeats: number;
  behind?: number;
  /** Whether its noise is unknown. */
  unknown?: boolean;
  /** Whether it is within noise of the fastest. */
  tied?: boolean;
}

/** The answer for a cell under the reader's limits. */
type Found = ReturnType<typeof Answer.find>;

/** The state of the page, and that of the section "Every run". */
type PageState = InstanceType<typeof State.Model>;
type RunsState = InstanceType<typeof ViewState.State>;

/** Actions of the page's buttons. */
interface Act {
  set(changes: Partial<Pick<PageState, "cell" | "batch" | "only" | "memory" | "price" | "trillions" | "measure" | "minor">>): void;
  choose(cell: Cell): void;
  failures(cell: Cell): void;
}

/** What `Runs.mount` returns. */
type RunsSection = ReturnType<typeof Runs.mount>;

/** Times at which parts of the page were ready, in ms since it was opened; `plotted`: the drawing is complete. */
interface Timing {
  inflated?: number;
  answer?: number;
  all?: number;
  charts?: number;
  table?: number;
  open?: number;
  plot?: number;
  filter?: number;
  plotted?: boolean;
}

/** Access to the page for tests and the console. */
interface ReportOnPage {
  timing: Timing;
  ready: boolean;
  runs?: RunsSection;
  state?: PageState;
  found?: (cell: Cell) => Found;
  act?: Act;
  command?: (row: number) => Command;
}

/** The page replaces the browser's own `Report` with it, which no script uses. */
interface PageWindow {
  Report: ReportOnPage;
}

/** A part's keys of the address, read and replaced together. */
interface Claim {
  read(): Map<string, string>;
  write(pairs: Iterable<[string, string]>): void;
}

/** The command that measures the layout of a row. */
type Commander = (row: number) => Command;

/** The words of a command with notes, or the reason why there is none. */
interface Command {
  words?: string[];
  notes?: string[];
  missing?: string;
}

/**
 * A filter of one column: its values as texts, a part of its text, or bounds (null: none) in the unit of the table.
 */
interface Filter {
  values?: Set<string>;
  holds?: string;
  low?: number | null;
  high?: number | null;
}

/** The controls of one filter. */
interface Facet {
  root: HTMLElement;
  update(filter: Filter | undefined, model: FilterModel): void;
}
type FilterModel = InstanceType<typeof Filters.Model>;

/** The column that rows are sorted by; without a name they keep the order of the data. */
interface Sort {
  name: string;
  descending: boolean;
}

/** The state that the plot draws. */
interface Asked {
  rows: Int32Array;
  selected: Set<number>;
  current: number;
  x: Column;
  y: Column;
  colour?: Column;
  size?: Column;
  logX: boolean;
  logY: boolean;
  keepZoom: boolean;
}

/** Rows that share colour, shape and size. */
type PlotGroup = ReturnType<typeof PlotColours.groups>["groups"][number];

/** Areas of rows: see `PlotPoints.place`. */
type Placed = ReturnType<typeof PlotPoints.place>;

/** Start and end on an axis. */
type Pair = [number, number];

/** Pixels on x and y, and the row drawn there. */
type Spot = [number, number, number];

/** The area of the plot's canvas that holds points, in pixels; `band` and `strip` are the areas of failures. */
interface PlotArea {
  left: number;
  top: number;
  right: number;
  bottom: number;
  band: number;
  strip: number;
  small: boolean;
}

/** Actions of a press, a box and a pointer move in the plot. */
interface PlotActions {
  open(row: number): void;
  select(rows: number[]): void;
  lines(row: number): string[];
  zoom?(zoomed: boolean): void;
}

/** A box or a lasso in pixels, as the chart library reports it. */
interface Brushed {
  brushType: string;
  range: Pair[];
}

/** The parts of an Apache ECharts chart that the page uses. */
interface Chart {
  resize(): void;
  getWidth(): number;
  getHeight(): number;
  getZr(): { on(name: string, then: (event: { offsetX: number; offsetY: number }) => void): void };
  on(name: "brushEnd", then: (event: { areas: Brushed[] }) => void): void;
  on(name: "datazoom", then: () => void): void;
  setOption(option: object, how?: { notMerge: boolean }): void;
  getOption(): { dataZoom: { startValue: number; endValue: number }[] };
  dispatchAction(action: object): void;
}

/** The chart library, which is loaded late. */
declare const echarts: { init(root: HTMLElement, theme: null, options: { renderer: string }): Chart };

/** The planner's closed forms, which analysis/explorer/closed_forms.py translates from Python, by their names there. */
declare const ClosedForms: Record<string, any>;

/** The inputs of the pipeline view. */
interface PipelineInputs {
  schedule: string;
  ranks: number;
  microbatches: number;
  chunks: number;
  forward: number;
  backward: number;
  /** Share of the weight gradients in the backward, in per cent. */
  weights: number;
  p2p: number;
}

/** A row's pipeline with its measured times in seconds; null if not measured. */
interface PipelineRun {
  fields: Pick<PipelineInputs, "schedule" | "ranks" | "microbatches" | "chunks">;
  times: { work: number; idle: number; slowest: number | null; profiled: number | null } | null;
  /** Seconds by rank, of a micro-batch (`measured`: forward and backward were recorded separately) and of a step. */
  stages: { work: number[]; idle: number[]; forward: number[]; backward: number[]; measured: boolean } | null;
}
