// The charts: one line a metric for one run, one line a run for several.

const CHARTS = [
  { title: "Accuracy and reward", what: "held-out accuracy and mean reward", lines: [["reward/mean", "reward"], ["eval/accuracy", "held-out accuracy"]] },
  { title: "Staleness", what: "versions between a rollout's oldest token and the one trained", lines: [["off_policy/mean", "mean"], ["off_policy/max", "max"], ["off_policy/bound", "bound"]] },
  { title: "Learner", what: "share of its time that it waits for groups", lines: [["learner/idle_ratio", "idle"], ["learner/idle_predicted", "predicted"]] },
  { title: "Seconds of a step", what: "the whole step, and of it waiting for groups", lines: [["time/step", "step"], ["time/wait_for_batch", "waiting"]] },
  { title: "Why the learner waited", what: "seconds before a step, by what the group was at that came last", lines: [["wait/sampling", "workers sample"], ["wait/rewards", "rewards"], ["wait/lease", "no worker free, or without the weights"], ["wait/lost", "leases lost"], ["wait/replaced", "groups replaced"], ["wait/held", "checks, or a full disk"]] },
  { title: "Rollouts a second", what: "made by the fleet, and needed by the learner", lines: [["fleet/rate", "made"], ["fleet/needed_rate", "needed"]] },
  { title: "New weights", what: "seconds until the workers have them", lines: [["broadcast/t_bcast", "seconds"]] },
  { title: "Dollars", what: "spent in all, and of it wasted", lines: [["cost/cum_usd", "spent"], ["cost/wasted_usd", "wasted"]] },
  { title: "Entropy", what: "of the policy, nats a token", lines: [["entropy/mean", "entropy"]] },
];
const COLOURS = { light: ["#1f5fa8", "#b2500b", "#5c6670", "#23733b", "#7a3fb0", "#a8201a"], dark: ["#7fb4f0", "#f0a35e", "#a5adb8", "#74cf8e", "#c49bf0", "#ff8f85"] };
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 180;
const dark = matchMedia("(prefers-color-scheme: dark)");

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
        ? runs.map((run) => ({ label: run.name, run, column: run.columns[chart.lines[0][0]] }))
        : runs.flatMap((run) => chart.lines.map(([name, label]) => ({ label, run, column: run.columns[name] })));
      const known = lines.filter((line) => line.column);
      if (known.length) this.draw(chart, known);
    }
  }

  draw(chart, lines) {
    const data = aligned(lines);
    const kind = lines.map((line) => line.label).join("\n");
    let made = this.drawn.get(chart.title);
    if (made && made.kind !== kind) { made.plot.destroy(); made.figure.remove(); made = undefined; }
    if (!made) {
      const figure = document.createElement("figure");
      const title = document.createElement("h3"), about = document.createElement("figcaption");
      title.textContent = chart.title;
      figure.append(title, about);
      const order = CHARTS.indexOf(chart);
      const after = [...this.place.children].find((each) => Number(each.dataset.order) > order);
      figure.dataset.order = order;
      this.place.insertBefore(figure, after ?? null);
      made = { figure, about, kind, plot: new uPlot(options(lines, figure.clientWidth - 20), data, figure) };
      this.drawn.set(chart.title, made);
    } else made.plot.setData(data);
    const last = lines.map((line) => `${line.label} ${number(line.column.findLast((value) => value !== null))}`).join(", ");
    made.about.textContent = `${chart.what}; now: ${last}`;
  }
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

// One column of steps for all lines, as uPlot wants it.
function aligned(lines) {
  if (new Set(lines.map((line) => line.run)).size === 1) return [lines[0].run.steps, ...lines.map((line) => line.column)];
  return uPlot.join(lines.map((line) => [line.run.steps, line.column]));
}

function options(lines, width) {
  const [text, line] = dark.matches ? ["#a5adb8", "#343b45"] : ["#515a64", "#d3d9df"];
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  const colours = COLOURS[dark.matches ? "dark" : "light"];
  return {
    width: Math.max(width, 100), height: HEIGHT, scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map(number) }],
    cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
    series: [{ label: "step" }, ...lines.map((each, index) => ({
      label: each.label, stroke: colours[index % colours.length], width: 2, dash: DASHES[Math.floor(index / 1) % DASHES.length], spanGaps: true,
      points: { show: each.column.length < 3 || each.label === "held-out accuracy" }, value: (_, value) => number(value),
    }))],
  };
}
