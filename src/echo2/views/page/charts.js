// The charts: one line a metric for one run, one line a run for several.

import { make, number, say } from "./parts.js";

// What the learner waits for: metric, label, and the rest of "most of it for ...".
export const CAUSES = [
  ["wait/lease", "no free worker has the weights", "a free worker with the weights"],
  ["wait/sampling", "workers sample", "workers that sample"],
  ["wait/rewards", "rewards", "your reward function"],
  ["wait/lost", "leases lost", "leases that brought nothing"],
  ["wait/replaced", "groups replaced", "groups that were retired and replaced"],
  ["wait/held", "checks, or a full disk", "checks of how tokens were drawn, or room on the disk"],
];
const CHARTS = [
  { title: "Reward", what: "mean reward of the groups of a step, and of held-out tasks", lines: [["reward/mean", "reward"], ["eval/accuracy", "held-out reward"]] },
  { title: "Staleness", what: "versions between a rollout's oldest token and the one trained", lines: [["off_policy/mean", "mean"], ["off_policy/max", "max"], ["off_policy/bound", "bound"]] },
  { title: "Learner", what: "share of its time that it waits for groups", lines: [["learner/idle_ratio", "idle"], ["learner/idle_predicted", "predicted"]] },
  { title: "Why the learner waited", what: "seconds before a step, by what the group was at that came last", lines: CAUSES, isStacked: true },
  { title: "Seconds of a step", what: "the whole step, and of it waiting for groups", lines: [["time/step", "step"], ["time/wait_for_batch", "waiting"]] },
  { title: "Rollouts a second", what: "made by the fleet, and needed by the learner", lines: [["fleet/rate", "made"], ["fleet/needed_rate", "needed"]] },
  { title: "New weights", what: "seconds until the workers have them", lines: [["broadcast/t_bcast", "seconds"]] },
  { title: "Dollars", what: "spent in all, and of it wasted", lines: [["cost/cum_usd", "spent"], ["cost/wasted_usd", "wasted"]] },
  { title: "Entropy", what: "of the policy, nats a token", lines: [["entropy/mean", "entropy"]] },
];
const COLOURS = { light: ["#1f5fa8", "#b2500b", "#5c6670", "#23733b", "#7a3fb0", "#a8201a"], dark: ["#7fb4f0", "#f0a35e", "#a5adb8", "#74cf8e", "#c49bf0", "#ff8f85"] };
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 170;
const dark = matchMedia("(prefers-color-scheme: dark)");
export const coloursOf = () => COLOURS[dark.matches ? "dark" : "light"];

export class Charts {
  constructor(place) {
    this.place = place;
    this.drawn = new Map(); // by title: the figure, its plot, and what it was made for
    this.runs = [];
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

  // runs: [{name, steps, columns}]
  show(runs) {
    this.runs = runs;
    for (const chart of CHARTS) {
      const lines = runs.length > 1
        ? runs.map((run, index) => ({ label: run.name, run, index, column: run.columns[chart.lines[0][0]] }))
        : runs.flatMap((run) => chart.lines.map(([name, label], index) => ({ label, run, index, column: run.columns[name] })));
      const known = lines.filter((line) => line.column);
      if (known.length) this.draw(chart, known, Boolean(chart.isStacked) && runs.length === 1);
      else this.drop(chart);
    }
  }

  drop(chart) {
    const made = this.drawn.get(chart.title);
    if (made) { made.plot.destroy(); made.figure.remove(); this.drawn.delete(chart.title); }
  }

  draw(chart, lines, isStacked) {
    const kind = lines.map((line) => line.label).join("\n");
    if (this.drawn.get(chart.title)?.kind !== kind) this.drop(chart);
    let made = this.drawn.get(chart.title);
    const data = isStacked ? stacked(lines) : aligned(lines);
    if (!made) {
      const figure = make("figure");
      const what = chart.what + (lines.length > 1 && lines[0].run !== lines[1].run ? `: ${chart.lines[0][1]}` : ""), about = make("figcaption", what);
      figure.append(make("h3", chart.title), about);
      const order = CHARTS.indexOf(chart);
      const after = [...this.place.children].find((each) => Number(each.dataset.order) > order);
      figure.dataset.order = order;
      this.place.insertBefore(figure, after ?? null);
      made = { figure, kind, lines, cut: (value) => say(about, value === null ? what : `${what}; the first step's ${number(value)} is cut off`) };
      made.plot = new uPlot(options(made, isStacked, figure.clientWidth - 20), data, figure);
      this.drawn.set(chart.title, made);
    }
    made.lines = lines;
    made.plot.setData(data);
  }
}

// One column of steps for all lines, as uPlot wants it.
function aligned(lines) {
  if (new Set(lines.map((line) => line.run)).size === 1) return [lines[0].run.steps, ...lines.map((line) => line.column)];
  return uPlot.join(lines.map((line) => [line.run.steps, line.column]));
}

// Each line on top of those before it.
function stacked(lines) {
  const sums = lines[0].run.steps.map(() => 0);
  return [lines[0].run.steps, ...lines.map(({ column }) => column.map((value, index) => value === null ? null : (sums[index] += value)))];
}

// Where the pointer is, which may be a step without this value; without a pointer (null), the newest.
const read = (at, values) => number(at === null ? values?.findLast((each) => each !== null) : values[at]);

function options(made, isStacked, width) {
  const [text, line] = dark.matches ? ["#a5adb8", "#343b45"] : ["#515a64", "#d3d9df"];
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  const colours = coloursOf();
  const series = made.lines.map((each, index) => ({
    label: each.label, stroke: colours[each.index % colours.length], width: isStacked ? 1 : 2, dash: isStacked ? [] : DASHES[index % DASHES.length], spanGaps: true,
    fill: isStacked ? `${colours[each.index % colours.length]}66` : undefined,
    points: { show: each.column.length < 3 || each.label === "held-out reward" },
    value: (plot, _, __, at) => read(at, isStacked ? made.lines[index].column : plot.data[index + 1]),
  }));
  return {
    width: Math.max(width, 100), height: HEIGHT, scales: { x: { time: false }, y: { range: (plot) => heights(plot, made.cut) } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 50, values: (_, ticks) => ticks.map(number) }],
    // By itself uPlot takes a run's nearest step, where the run has not reached the step below the pointer.
    cursor: { sync: { key: "step" }, drag: { x: true, y: false }, dataIdx: (plot, line, at) => at },
    bands: isStacked ? series.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
    series: [{ label: "step", value: (plot, _, __, at) => read(at, plot.data[0]) }, ...series],
  };
}

// The first step has the start of the whole run in it. Where it would flatten all others, it may leave the chart.
const NUM_BEFORE_CUT = 10, CUT = 2;
function heights(plot, tell) {
  const shown = plot.data.slice(1), [first, last] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
  let low = Infinity, high = -Infinity, start = -Infinity;
  for (const column of shown) for (let index = first; index <= last; index++) {
    const value = column[index];
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    if (plot.data[0][index] <= 1) start = Math.max(start, value); else high = Math.max(high, value);
  }
  const isCut = last - first >= NUM_BEFORE_CUT && start > CUT * high;
  if (!isCut) high = Math.max(high, start);
  tell(isCut ? start : null);
  return Number.isFinite(low) ? uPlot.rangeNum(Math.min(low, 0), Math.max(high, low), 0.1, true) : [0, 1];
}
