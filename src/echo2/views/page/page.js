// The page: events of the server in, words and numbers out.

import { CAUSES, Charts, coloursOf } from "./charts.js";
import { Files } from "./files.js";
import { Fleet } from "./fleet.js";
import { at, duration, make, number, pairs, percent, put, say, table, usd } from "./parts.js";
import { Rollouts } from "./rollouts.js";

const RECENT_STEPS = 50;
const runs = []; // by index: {run, steps, cost, heard}
let chosen = 0, compared = false;
const charts = new Charts(at("charts"));
const fleet = new Fleet();
const rollouts = new Rollouts(), files = new Files();
let isConnected = false;

function showRuns() {
  const known = runs.length < 2 ? [] : [...runs.entries()].filter(([, each]) => each?.run);
  const buttons = known.map(([index, each]) => [each.run.name, !compared && index === chosen, () => { chosen = index; compared = false; rollouts.open(index, each.run.version); files.open(index); }]);
  if (buttons.length > 1) buttons.push(["side by side", compared, () => { compared = true; }]);
  const places = at("runs").children;
  while (places.length > buttons.length) places[buttons.length].remove();
  buttons.forEach(([name, isPressed, choose], index) => {
    if (!places[index]) at("runs").append(make("button"));
    say(places[index], name);
    places[index].setAttribute("aria-pressed", String(isPressed));
    places[index].onclick = () => { choose(); soon("run", "steps", "cost"); };
  });
}

function showNow({ run, steps, heard }) {
  const title = `${run.name} · step ${run.version} · echo2`;
  if (document.title !== title) document.title = title;
  say(at("state"), `${run.name}: ${run.state}`);
  at("state").className = run.state === "running" ? "runs" : /^(finished|starting)/.test(run.state) ? "" : "stands";
  if (isConnected) say(at("link"), run.goes_on ? "live" : "this run is not going on");
  const last = (name) => newest(steps, name);
  const facts = [
    ["step", run.max_steps === null ? number(run.version) : `${number(run.version)} of ${number(run.max_steps)}`],
    ["held-out reward", number(last("eval/accuracy"))], ["reward", number(last("reward/mean"))],
    ["staleness (bound)", `${number(last("off_policy/max"))} (${number(run.max_staleness ?? last("off_policy/bound"))})`],
    ["learner idle", percent(last("learner/idle_ratio"))],
    ["workers", number(run.num_workers)], ["snapshot", number(run.published)], ["checkpoint", number(run.checkpoint)],
  ];
  pairs(at("facts"), facts);
  put(at("notes"), run.notes.map((note) => make("li", note)));
  const now = run.time + (performance.now() - heard) / 1000;
  at("nobody").hidden = run.num_waits > 0;
  table(at("waits"), run.num_waits > run.waits.length ? `${run.waits.length} of ${run.num_waits}` : "",
    [["who"], ["waits for"], ["since", "number"], ["until", "number"], ["why", "wide"]],
    run.waits.map((wait) => [wait.who, wait.for, wait.since ? duration(Math.max(0, now - wait.since)) : "–",
      wait.until === null ? "–" : `in ${duration(Math.max(0, wait.until - now))}`, wait.reason]));
  table(at("decisions"), "what the planner decided last", [["when", "number"], ["what", "wide"], ["why", "wide"]],
    run.decisions.map((one) => [`${duration(Math.max(0, now - one.at))} ago`, one.count > 1 ? `${one.what}, and ${number(one.count - 1)} more` : one.what, one.reason]));
}

const newest = (steps, name) => steps?.columns[name]?.findLast((value) => value !== null);

// The runs beside each other, in numbers.
function showCompared() {
  at("compared").hidden = !compared;
  if (!compared) return;
  table(at("compare"), "", [["run"], ["step", "number"], ["reward", "number"], ["held-out", "number"], ["best held-out", "number"], ["time", "number"], ["dollars", "number"], ["state", "wide"]],
    runs.filter((each) => each?.run).map(({ run, steps }) => {
      const held = steps?.columns["eval/accuracy"] ?? [], best = Math.max(...held.filter((value) => value !== null));
      const told = Number.isFinite(best) ? `${number(best)} at step ${number(steps.steps[held.lastIndexOf(best)])}` : "–";
      return [run.name, number(run.version), number(newest(steps, "reward/mean")), number(newest(steps, "eval/accuracy")), told,
        steps?.seconds.at(-1) > 0 ? duration(steps.seconds.at(-1)) : "–", usd(newest(steps, "cost/cum_usd")), run.state];
    }));
}

// Where the learner's time went: training, and by cause what it waited for.
function showTime({ steps }) {
  const from = Math.max(1, (steps?.steps.at(-1) ?? 0) - RECENT_STEPS + 1), first = steps?.steps.findIndex((step) => step >= from) ?? 0;
  const mean = (name) => {
    const values = (steps?.columns[name] ?? []).slice(first).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
  };
  const whole = mean("time/step"), waited = Math.min(whole, mean("time/wait_for_batch"));
  const causes = CAUSES.map(([name, label, words], index) => ({ label, words, seconds: mean(name), colour: coloursOf()[index] }));
  const told = causes.reduce((sum, { seconds }) => sum + seconds, 0); // with what it was busy meanwhile
  const share = (seconds) => seconds / (told || 1) * waited / whole;
  const parts = [["training", 1 - waited / whole, "var(--good)"], ...causes.map((each) => [each.label, share(each.seconds), each.colour])].filter(([, part]) => part > 0.005);
  at("time").hidden = !(whole > 0);
  if (!(whole > 0)) return;
  const most = causes.reduce((one, other) => other.seconds > one.seconds ? other : one);
  const mostly = most.seconds && waited > 0.05 * whole ? `, most of it for ${most.words}` : "";
  say(at("spent"), `The last ${number(steps.steps.at(-1) - from + 1)} steps took ${number(whole)} s each; the learner waited ${percent(waited / whole)} of that${mostly}.`);
  const key = JSON.stringify(parts);
  if (at("bar").dataset.key === key) return;
  at("bar").dataset.key = key;
  at("bar").replaceChildren(...parts.map(([, part, colour]) => {
    const piece = make("span");
    piece.style.flexGrow = part;
    piece.style.background = colour;
    return piece;
  }));
  at("bar-legend").replaceChildren(...parts.map(([name, part, colour]) => {
    const item = make("li"), spot = make("i");
    spot.style.background = colour;
    item.append(spot, ` ${name} ${percent(part)}`);
    return item;
  }));
}

function showMoney({ cost }) {
  if (!cost) return;
  const end = cost.forecast && cost.usd !== null ? `; about ${usd(cost.forecast.usd)} at the end, in ${duration(cost.forecast.seconds)}, if it goes on as now` : "";
  say(at("bill"), cost.usd === null ? "no bill yet: the head makes one with each step" : `${usd(cost.usd)} so far${cost.usd_per_step ? `, ${usd(cost.usd_per_step)} a step` : ""}${end}`);
  const causes = Object.entries(cost.by_cause).filter(([, value]) => value);
  table(at("causes"), "", [["cause"], ["dollars", "number"], ["share", "number"]], causes.map(([cause, value]) => [cause, usd(value), percent(value / cost.usd)]));
}

function showCharts() {
  const shown = compared ? runs : [runs[chosen]];
  charts.show(shown.filter((each) => each?.steps && each.run).map((each) => ({ name: each.run.name, ...each.steps })));
}

// All that came in one moment is drawn once, and only the parts that it is about.
const due = new Set();
function soon(...kinds) {
  if (!due.size) requestAnimationFrame(draw);
  for (const kind of kinds) due.add(kind);
}

function draw() {
  const known = runs[chosen], kinds = new Set(due);
  due.clear();
  showRuns();
  if (!known?.run) return;
  showNow(known);
  showCompared();
  if (kinds.has("run")) fleet.show(known.run);
  if (kinds.has("steps")) { showTime(known); showCharts(); }
  if (kinds.has("cost")) showMoney(known);
}

// Points from number `from` on are new; those before it are known.
function join(before, told) {
  if (!told.from) return told;
  const joined = (old, news) => [...old.slice(0, told.from), ...news];
  const columns = Object.entries(told.columns).map(([name, values]) => [name, joined(before.columns[name], values)]);
  return { ...told, steps: joined(before.steps, told.steps), seconds: joined(before.seconds, told.seconds), columns: Object.fromEntries(columns) };
}

const events = new EventSource("events");
for (const kind of ["run", "steps", "cost"]) {
  events.addEventListener(kind, (event) => {
    const told = JSON.parse(event.data), known = runs[told.run] ??= {};
    if (kind === "run") known.heard = performance.now();
    const isFirst = kind === "run" && !known.run;
    known[kind] = kind === "steps" ? join(known.steps, told) : told;
    soon(kind, ...(isFirst ? ["steps", "cost"] : []));
    if (told.run === chosen && kind === "run") rollouts.stepped(chosen, told.version);
  });
}
events.onopen = () => { isConnected = true; say(at("link"), "connected"); };
events.onerror = () => { isConnected = false; say(at("link"), "not connected; trying again"); };
at("axis").addEventListener("change", () => { charts.axis = at("axis").value; soon("steps"); });
at("smoothing").addEventListener("change", () => { charts.smoothing = Number(at("smoothing").value); soon("steps"); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => soon("steps"));
setInterval(() => { if (runs[chosen]?.run) showNow(runs[chosen]); }, 1000);
