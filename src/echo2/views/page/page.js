// The page: events of the server in, words and numbers out. Texts of runs reach it by textContent alone.

import { Charts, number } from "./charts.js";
import { Rollouts } from "./rollouts.js";

const at = (id) => document.getElementById(id);
const runs = []; // by index: {run, steps, cost, heard}
let chosen = 0, compared = false;
const charts = new Charts(at("charts"));
const rollouts = new Rollouts();

export function make(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function table(id, caption, headings, rows) {
  const place = at(id), head = make("thead"), body = make("tbody"), top = make("tr");
  if (!rows.length) { place.replaceChildren(); return; }
  for (const [name, kind] of headings) {
    const cell = make("th", name, kind);
    cell.scope = "col";
    top.append(cell);
  }
  head.append(top);
  for (const row of rows) {
    const line = make("tr");
    row.forEach((value, index) => {
      const cell = make("td", "", headings[index][1]);
      if (value instanceof Node) cell.append(value); else cell.textContent = value;
      line.append(cell);
    });
    body.append(line);
  }
  place.replaceChildren(make("caption", caption), head, body);
}

const usd = (value) => value === null || value === undefined ? "–" : `$${value.toFixed(value < 100 ? 4 : 2)}`;
const megabytes = (value) => value ? `${number(value / 1e6)} MB` : "–";

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return `${number(whole / 3600)} h`;
}

function showRuns() {
  const buttons = runs.length < 2 ? [] : [...runs.entries()].filter(([, each]) => each?.run).map(([index, each]) => {
    const button = make("button", each.run.name);
    button.setAttribute("aria-pressed", String(!compared && index === chosen));
    button.addEventListener("click", () => { chosen = index; compared = false; showAll(); rollouts.open(index); });
    return button;
  });
  if (buttons.length > 1) {
    const both = make("button", "side by side");
    both.setAttribute("aria-pressed", String(compared));
    both.addEventListener("click", () => { compared = true; showAll(); });
    buttons.push(both);
  }
  const places = [...at("runs").children], focused = places.indexOf(document.activeElement);
  at("runs").replaceChildren(...buttons);
  if (focused >= 0) buttons[focused]?.focus();
}

function showNow({ run, heard }) {
  document.title = `${run.name} · step ${run.version} · echo2`;
  at("state").textContent = `${run.name}: ${run.state}`;
  const row = runs[chosen].steps, last = (name) => row?.columns[name]?.findLast((value) => value !== null);
  const facts = [
    ["step", run.max_steps === null ? number(run.version) : `${number(run.version)} of ${number(run.max_steps)}`],
    ["held-out accuracy", number(last("eval/accuracy"))], ["reward", number(last("reward/mean"))],
    ["staleness (bound)", `${number(last("off_policy/max"))} (${number(run.max_staleness ?? last("off_policy/bound"))})`],
    ["learner idle", last("learner/idle_ratio") === undefined ? "–" : `${Math.round(last("learner/idle_ratio") * 100)} %`],
    ["workers", number(run.num_workers)], ["snapshot", number(run.published)], ["checkpoint", number(run.checkpoint)],
  ];
  at("facts").replaceChildren(...facts.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
  at("notes").replaceChildren(...run.notes.map((note) => make("li", note)));
  const now = run.time + (performance.now() - heard) / 1000;
  table("waits", run.num_waits > run.waits.length ? `${run.waits.length} of ${run.num_waits}` : run.num_waits ? "" : "nobody waits",
    [["who"], ["waits for"], ["since", "number"], ["until", "number"], ["why", "wide"]],
    run.num_waits ? run.waits.map((wait) => [wait.who, wait.for, wait.since ? duration(Math.max(0, now - wait.since)) : "–",
      wait.until === null ? "–" : `in ${duration(Math.max(0, wait.until - now))}`, wait.reason]) : [["nobody", "–", "–", "–", "nobody waits now"]]);
}

function showMoney({ cost }) {
  if (!cost) return;
  const end = cost.forecast && cost.usd !== null ? `; about ${usd(cost.forecast.usd)} at the end, in ${duration(cost.forecast.seconds)}, if it goes on as now` : "";
  at("bill").textContent = cost.usd === null ? "no bill yet: the head makes one with each step" : `${usd(cost.usd)} so far${cost.usd_per_step ? `, ${usd(cost.usd_per_step)} a step` : ""}${end}`;
  const causes = Object.entries(cost.by_cause).filter(([, value]) => value);
  table("causes", "", [["cause"], ["dollars", "number"], ["share", "number"]], causes.map(([cause, value]) => [cause, usd(value), `${Math.round(value / cost.usd * 100)} %`]));
}

function showFleet({ run }) {
  at("fleet").textContent = [run.fleet, run.num_workers ? `${number(run.num_idle)} idle` : "no worker attends"].filter(Boolean).join("; ");
  const took = run.t_bcast ? `; new weights reach the workers in ${number(run.t_bcast)} s` : "";
  at("weights").textContent = run.published === null || !run.num_workers ? "" : `Weights: version ${run.published} at ${run.num_current} of ${run.num_workers} workers${took}; ${megabytes(run.origin_bytes)} sent by the head, ${megabytes(run.peer_bytes)} by workers`;
  const rows = run.workers.map((worker) => {
    const fetching = make("span", worker.version === null ? "–" : `v${worker.version}`);
    if (worker.fetching) {
      const bar = make("progress");
      bar.max = 1;
      bar.value = worker.fetching.share;
      bar.setAttribute("aria-label", `fetching version ${worker.fetching.version}`);
      fetching.append(` → v${worker.fetching.version} `, bar, ` ${Math.round(worker.fetching.share * 100)} %`);
    }
    const doing = make("span", worker.suspected ? `suspected: ${worker.suspected}` : worker.attends ? worker.doing || (worker.is_idle ? "idle" : "") : "away", worker.suspected ? "bad" : "");
    return [worker.id, doing, number(worker.rate), fetching, worker.sources.map((source) => source || "head").join(", ") || "–",
      megabytes(worker.received), megabytes(worker.sent), worker.price_usd_per_hour ? `$${number(worker.price_usd_per_hour)}` : "–", worker.is_own === false ? "stranger" : "own"];
  });
  table("workers", run.num_workers > rows.length ? `${rows.length} of ${number(run.num_workers)} workers: the suspected, then the fastest` : "",
    [["worker"], ["doing", "wide"], ["rollouts/s", "number"], ["weights"], ["from"], ["got", "number"], ["sent", "number"], ["an hour", "number"], ["whose"]], rows);
  table("trust", "strangers' tickets", [["ticket"], ["trust", "number"], ["groups", "number"], ["passed", "number"], ["failed", "number"]],
    run.trust.map((one) => [one.ticket, number(one.score), number(one.num_groups), number(one.num_passed), number(one.num_failed)]));
  showMap(run);
}

// Who takes weights from whom: the head at the left, each worker one column behind the farthest of its sources.
const MAP_WORKERS = 60, SVG = "http://www.w3.org/2000/svg";
function showMap(run) {
  const workers = run.workers.filter((worker) => worker.attends).slice(0, MAP_WORKERS);
  if (workers.length < 2 || !workers.some((worker) => worker.sources.length)) { at("map").replaceChildren(); return; }
  const depth = new Map([["", 0]]), rows = [1];
  for (let turn = 0; turn < workers.length; turn++) {
    for (const worker of workers) {
      const known = worker.sources.filter((source) => depth.has(source)).map((source) => depth.get(source));
      if (!depth.has(worker.id) && known.length) depth.set(worker.id, Math.max(...known) + 1);
    }
  }
  const spots = new Map([["", [20, 24]]]);
  for (const worker of workers) {
    const column = depth.get(worker.id) ?? 1;
    rows[column] = (rows[column] ?? 0) + 1;
    spots.set(worker.id, [20 + column * 150, rows[column] * 24]);
  }
  const svg = document.createElementNS(SVG, "svg");
  const add = (tag, values, text = "") => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    element.textContent = text;
    svg.append(element);
  };
  const width = 170 + Math.max(...depth.values()) * 150, height = 20 + Math.max(...rows.filter(Boolean)) * 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Who takes weights from whom; the table below has the same in words");
  for (const worker of workers) for (const source of worker.sources) {
    const from = spots.get(source), to = spots.get(worker.id);
    if (from) add("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1] });
  }
  add("circle", { cx: 20, cy: 24, r: 6, class: "current" });
  add("text", { x: 8, y: 12 }, "head");
  for (const worker of workers) {
    const [x, y] = spots.get(worker.id);
    add("circle", { cx: x, cy: y, r: 6, class: worker.version === run.published ? "current" : "" });
    add("text", { x: x + 10, y: y + 4 }, worker.id.length > 16 ? `${worker.id.slice(0, 15)}…` : worker.id);
  }
  at("map").replaceChildren(svg);
}

function showAll() {
  const known = runs[chosen];
  showRuns();
  if (!known?.run) return;
  showNow(known);
  showMoney(known);
  showFleet(known);
  showCharts();
}

function showCharts() {
  const shown = compared ? runs : [runs[chosen]];
  charts.show(shown.filter((each) => each?.steps && each.run).map((each) => ({ name: each.run.name, ...each.steps })));
}

// Charts are drawn once for all that came in one moment.
let isDue = false;
function soon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; showAll(); });
}

const events = new EventSource("events");
for (const kind of ["run", "steps", "cost"]) {
  events.addEventListener(kind, (event) => {
    const told = JSON.parse(event.data), known = runs[told.run] ??= {};
    if (kind === "run") known.heard = performance.now();
    known[kind] = told;
    soon();
    if (told.run === chosen && kind !== "cost") rollouts.stepped(chosen, known.run?.version);
  });
}
events.onopen = () => { at("link").textContent = "live"; };
events.onerror = () => { at("link").textContent = "not connected; trying again"; };
setInterval(() => { if (runs[chosen]?.run) showNow(runs[chosen]); }, 1000);
