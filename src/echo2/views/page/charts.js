// The charts: one line a metric for one run, one line a run for several.

import { duration, make, number, say } from "./parts.js";

// What the learner waits for: metric, label, and the rest of "most of it for ...".
export const CAUSES = [
  ["wait/lease", "no free worker has the weights", "a free worker with the weights"],
  ["wait/sampling", "workers sample", "workers that sample"],
  ["wait/rewards", "rewards", "rewards"],
  ["wait/lost", "leases lost", "leases that brought nothing"],
  ["wait/replaced", "groups replaced", "groups that were retired and replaced"],
  ["wait/held", "checks, or a full disk", "checks of how tokens were drawn, or room on the disk"],
];
// A line: metric, label, and how it is drawn. exact: it is never smoothed; dots: points are marked, because most steps have
// none; absent: why it may have no value. open: a line for each metric that begins so. beside: lines of the other runs, too.
const EXACT = { exact: true }, DOTS = { exact: true, dots: true };
const NOT_NEEDED = "no step was timed yet, or no number of workers is enough (Fleet says why)";
const CHARTS = [
  { title: "Reward", what: "mean reward of the groups of a step, and of held-out tasks", lines: [["reward/mean", "reward"], ["eval/accuracy", "held-out reward", DOTS]], beside: 2 },
  { title: "Held-out sets", what: "mean reward of each set of held-out tasks", lines: [], open: "eval/accuracy/" },
  { title: "pass@k", what: "share of held-out tasks that at least one of k rollouts solves", lines: [], open: "eval/pass@", label: "pass@" },
  { title: "Flat groups", what: "share of groups whose rewards are all equal: nothing is learned from them", lines: [["reward/frac_zero_std", "flat"]] },
  { title: "Length", what: "mean tokens of a rollout, in training and of held-out tasks", lines: [["completions/mean_length", "training"], ["eval/mean_length", "held-out", DOTS]] },
  { title: "Cut off", what: "share of rollouts that reached sampling.max_tokens", lines: [["completions/clipped_ratio", "cut off"]] },
  { title: "Loss", what: "of a step; its size says little about progress", lines: [["loss/mean", "loss"]] },
  { title: "Gradient norm", what: "before clipping", lines: [["optim/grad_norm", "norm"]] },
  { title: "Entropy", what: "of the policy, nats a token", lines: [["entropy/mean", "entropy"]] },
  { title: "Effective sample size", what: "share of the rollouts that counts after importance weighting", lines: [["ess", "ESS"]] },
  { title: "Clipped tokens", what: "share of tokens without a policy gradient, masked or clipped by the loss", lines: [["clip_ratio/mean", "clipped"]] },
  { title: "Mismatch", what: "between sampler and learner, nats a token", lines: [["mismatch_kl/mean", "KL"], ["mismatch/abs_log_ratio", "|log ratio|"]] },
  { title: "Teacher", what: "divergence of the policy from it at sampled tokens, nats a token", lines: [["distill/reverse_kl/mean", "KL"]] },
  { title: "Staleness", what: "versions between a rollout's oldest token and the one trained", lines: [["off_policy/mean", "mean"], ["off_policy/max", "max", EXACT], ["off_policy/bound", "bound", EXACT]] },
  { title: "Learner", what: "share of its time that it waits for groups", lines: [["learner/idle_ratio", "idle"], ["learner/idle_predicted", "predicted"]] },
  { title: "Why the learner waited", what: "seconds the learner waited before each step, by the cause of the last missing group", lines: CAUSES, isStacked: true },
  { title: "Seconds of a step", what: "the whole step, waiting for groups, teachers' logprobs, and waiting for teachers that compute elsewhere", lines: [["time/step", "step"], ["time/wait_for_batch", "waiting"], ["time/teacher", "teacher"], ["time/teacher_wait", "waiting for it"]] },
  { title: "Rollouts a second", what: "made by the fleet, and needed by the learner", lines: [["fleet/rate", "made"], ["fleet/needed_rate", "needed", { absent: NOT_NEEDED }]] },
  { title: "New weights", what: "seconds until the workers have them", lines: [["broadcast/t_bcast", "seconds"]] },
  { title: "Dollars", what: "spent in all, and of it wasted", lines: [["cost/cum_usd", "spent", EXACT], ["cost/wasted_usd", "wasted", EXACT]] },
];
const COLOURS = { light: ["#1f5fa8", "#b2500b", "#5c6670", "#23733b", "#7a3fb0", "#a8201a"], dark: ["#7fb4f0", "#f0a35e", "#a5adb8", "#74cf8e", "#c49bf0", "#ff8f85"] };
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 170;
const SPANS = [...[1, 2, 5, 10, 30].flatMap((each) => [each, 60 * each]), 900, ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 1200, 2400].map((each) => 3600 * each)].sort((one, other) => one - other); // between ticks, s
const dark = matchMedia("(prefers-color-scheme: dark)");
export const coloursOf = () => COLOURS[dark.matches ? "dark" : "light"];

export class Charts {
  constructor(place, charts = CHARTS) {
    this.place = place;
    this.charts = charts; // what is drawn
    this.drawn = new Map(); // by title: the figure, its plot, and what it was made for
    this.runs = [];
    this.axis = "step"; // or "time"
    this.smoothing = 0; // steps over which lines are averaged
    dark.addEventListener("change", () => { this.forget(); this.show(this.runs); });
    new ResizeObserver(() => this.fit()).observe(place);
  }

  forget() {
    for (const { plot, figure } of this.drawn.values()) { plot.destroy(); figure.remove(); }
    this.drawn.clear();
  }

  fit() {
    for (const { plot, figure } of this.drawn.values()) {
      const width = figure.clientWidth - 20;
      if (width > 0 && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: HEIGHT });
    }
  }

  // runs: [{name, steps, seconds, stride, columns}]
  show(runs) {
    this.runs = runs;
    const isTimed = this.axis === "time" && runs.every((run) => run.seconds.at(-1) > 0);
    for (const chart of this.charts) {
      const lines = runs.length > 1
        ? runs.flatMap((run, index) => (chart.open ? linesOf(chart, run) : chart.lines.slice(0, chart.beside ?? 1)).map((line, extra) => this.line(run, index, line, extra || chart.open ? `${run.name}: ${line[1]}` : run.name, extra)))
        : runs.flatMap((run) => linesOf(chart, run).map((line, index) => this.line(run, index, line, line[1])));
      const known = lines.filter((line) => line.column);
      if (known.length) this.draw(chart, known, Boolean(chart.isStacked) && runs.length === 1, isTimed);
      else this.drop(chart);
    }
  }

  line(run, index, [name, , how = {}], label, extra = 0) {
    const column = run.columns[name], points = this.smoothing / run.stride;
    return { label, run, index: index + extra, colour: index, dots: how.dots, column: column && !how.exact ? smooth(column, points) : column };
  }

  // What a chart shows, over how many steps it is averaged, and why a line is not there.
  words(chart) {
    const isSmooth = this.smoothing > 1 && chart.lines.some(([, , how]) => !how?.exact);
    const parts = [chart.what + (this.runs.length > 1 && chart.lines.length > (chart.beside ?? 1) ? `: ${chart.lines[0][1]}` : ""), ...(isSmooth ? [`averaged over about ${this.smoothing} steps`] : [])];
    for (const [name, label, how] of this.runs.length === 1 ? chart.lines : []) {
      const isThere = (this.runs[0].columns[name]?.at(-1) ?? null) !== null;
      if (how?.absent && !isThere) parts.push(`no “${label}” now: ${how.absent}`);
    }
    return parts.join("; ");
  }

  drop(chart) {
    const made = this.drawn.get(chart.title);
    if (made) { made.plot.destroy(); made.figure.remove(); this.drawn.delete(chart.title); }
  }

  draw(chart, lines, isStacked, isTimed) {
    const kind = [isTimed, ...lines.map((line) => line.label)].join("\n");
    if (this.drawn.get(chart.title)?.kind !== kind) this.drop(chart);
    let made = this.drawn.get(chart.title);
    const data = isStacked ? stacked(lines, isTimed) : aligned(lines, isTimed);
    if (!made) {
      const figure = make("figure"), about = make("figcaption");
      figure.append(make("h3", chart.title), about);
      const order = this.charts.indexOf(chart);
      const after = [...this.place.children].find((each) => Number(each.dataset.order) > order);
      figure.dataset.order = order;
      this.place.insertBefore(figure, after ?? null);
      made = { figure, kind, lines, isTimed, what: "", start: 1, cut: (value) => say(about, value === null ? made.what : `${made.what}; the first step's ${number(value)} is cut off`) };
      made.plot = new uPlot(options(made, isStacked, figure.clientWidth - 20), data, figure);
      this.drawn.set(chart.title, made);
    }
    made.lines = lines;
    made.what = this.words(chart);
    made.start = isTimed ? Math.max(...this.runs.map((run) => run.seconds[run.steps.findLastIndex((step) => step <= 1)] ?? 0)) : 1;
    made.plot.setData(data);
  }
}

// The lines of one run in a chart: those of the chart, or one a metric of the run.
function linesOf(chart, run) {
  if (!chart.open) return chart.lines;
  const names = Object.keys(run.columns).filter((name) => name.startsWith(chart.open));
  const place = (name) => Number(name.slice(chart.open.length)) || 0; // pass@16 comes behind pass@2
  return names.sort((one, other) => place(one) - place(other) || (one < other ? -1 : 1)).map((name) => [name, (chart.label ?? "") + name.slice(chart.open.length), DOTS]);
}

// The mean of the values so far, each weighing 1 - 2 / (points + 1) of the one after it.
function smooth(column, points) {
  if (points < 2) return column;
  const keep = 1 - 2 / (points + 1);
  let sum = 0, weight = 0;
  return column.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}

const placesOf = (run, isTimed) => isTimed ? run.seconds : run.steps;

// One column of places for all lines, as uPlot wants it.
function aligned(lines, isTimed) {
  if (new Set(lines.map((line) => line.run)).size === 1) return [placesOf(lines[0].run, isTimed), ...lines.map((line) => line.column)];
  return uPlot.join(lines.map((line) => [placesOf(line.run, isTimed), line.column]));
}

// Each line on top of those before it.
function stacked(lines, isTimed) {
  const sums = lines[0].run.steps.map(() => 0);
  return [placesOf(lines[0].run, isTimed), ...lines.map(({ column }) => column.map((value, index) => value === null ? null : (sums[index] += value)))];
}

// Where the pointer is, which may be a step without this value; without a pointer (null), the newest.
const place = (at, values) => at === null ? values?.findLast((each) => each !== null) : values[at];
const read = (at, values) => number(place(at, values));

function options(made, isStacked, width) {
  const [text, line] = dark.matches ? ["#a5adb8", "#343b45"] : ["#515a64", "#d3d9df"];
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  const colours = coloursOf();
  const series = made.lines.map((each, index) => ({
    label: each.label, stroke: colours[each.colour % colours.length], width: isStacked ? 1 : 2, dash: isStacked ? [] : DASHES[each.index % DASHES.length], spanGaps: true,
    fill: isStacked ? `${colours[each.colour % colours.length]}66` : undefined,
    points: { show: each.column.length < 3 || Boolean(each.dots) },
    value: (plot, _, __, at) => read(at, isStacked ? made.lines[index].column : plot.data[index + 1]),
  }));
  return {
    width: Math.max(width, 100), height: HEIGHT, scales: { x: { time: false }, y: { range: (plot) => heights(plot, made) } },
    axes: [{ ...axis, size: 32, ...(made.isTimed ? { incrs: SPANS, values: (_, ticks) => ticks.map(duration) } : {}) }, { ...axis, size: 50, values: (_, ticks) => ticks.map(number) }],
    // By itself uPlot takes a run's nearest step, where the run has not reached the step below the pointer.
    cursor: { sync: { key: "step" }, drag: { x: true, y: false }, dataIdx: (plot, line, at) => at },
    bands: isStacked ? series.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
    series: [{ label: made.isTimed ? "after" : "step", value: (plot, _, __, at) => made.isTimed ? duration(place(at, plot.data[0]) ?? 0) : read(at, plot.data[0]) }, ...series],
  };
}

// The first step has the start of the whole run in it. Where it would flatten all others, it may leave the chart.
const NUM_BEFORE_CUT = 10, CUT = 2;
function heights(plot, made) {
  const shown = plot.data.slice(1), [first, last] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
  let low = Infinity, high = -Infinity, start = -Infinity;
  for (const column of shown) for (let index = first; index <= last; index++) {
    const value = column[index];
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    if (plot.data[0][index] <= made.start) start = Math.max(start, value); else high = Math.max(high, value);
  }
  const isCut = last - first >= NUM_BEFORE_CUT && start > CUT * high;
  if (!isCut) high = Math.max(high, start);
  made.cut(isCut ? start : null);
  [low, high] = [Math.min(low, 0), Math.max(high, low, 0)];
  return high > low && Number.isFinite(high - low) ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1];
}
