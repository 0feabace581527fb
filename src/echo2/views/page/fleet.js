// The fleet: its workers, a page of them at a time, who takes weights from whom, and strangers' tickets.

import { ask, at, make, megabytes, number, percent, put, say, table } from "./parts.js";

const MAP_WORKERS = 60, ROW = 34, SVG = "http://www.w3.org/2000/svg", ASK_SECONDS = 5;
const HEADINGS = [["worker"], ["engine"], ["mismatch, nats", "number"], ["doing", "wide"], ["rollouts/s", "number"], ["weights"], ["from"], ["got", "number"], ["sent", "number"], ["an hour", "number"], ["whose"]];

export class Fleet {
  constructor() {
    this.first = 0;
    this.askedAt = 0;
    this.other = null; // what was told of another page than the first, or of a search
    at("find").addEventListener("input", () => { this.first = 0; this.turn(); });
    at("earlier").addEventListener("click", () => { this.first = Math.max(0, this.first - this.run.workers.length); this.turn(); });
    at("later").addEventListener("click", () => { this.first += this.run.workers.length; this.turn(); });
  }

  show(run) {
    if (run.run !== this.run?.run) { this.first = 0; this.other = null; at("find").value = ""; }
    this.run = run;
    const idle = run.workers.some((worker) => worker.attends) ? `${number(run.num_idle)} idle now` : "no worker is connected";
    say(at("fleet"), [...run.fleet, idle].join("; "));
    const took = run.t_bcast ? `; new weights reach the workers in ${number(run.t_bcast)} s` : "";
    say(at("weights"), run.published === null || !run.num_workers ? "" : `Weights: version ${run.published} at ${number(run.num_current)} of ${number(run.num_workers)} workers${took}; ${megabytes(run.origin_bytes)} sent by the head, ${megabytes(run.peer_bytes)} by workers`);
    at("pages").hidden = run.num_workers <= run.workers.length;
    if (this.isElsewhere() && performance.now() - this.askedAt > ASK_SECONDS * 1000) this.turn();
    this.showWorkers();
    table(at("trust"), "strangers' tickets", [["ticket"], ["trust", "number"], ["groups", "number"], ["passed", "number"], ["failed", "number"]],
      run.trust.map((one) => [one.ticket, number(one.score), number(one.num_groups), number(one.num_passed), number(one.num_failed)]));
    showMap(run);
  }

  isElsewhere() { return this.first > 0 || at("find").value !== ""; }

  async turn() {
    this.askedAt = performance.now();
    const wanted = { run: this.run.run, first: this.first, find: at("find").value };
    this.wanted = JSON.stringify(wanted);
    if (!this.isElsewhere()) this.other = null;
    else {
      try {
        const told = await ask("workers", wanted);
        if (JSON.stringify(wanted) === this.wanted) this.other = told; // and not what was asked before it
      } catch (error) { say(at("which"), `The workers can't be read: ${error.message}`); return; }
    }
    this.showWorkers();
  }

  showWorkers() {
    const { workers, num_found: found } = this.other ?? { workers: this.run.workers, num_found: this.run.num_workers };
    const last = this.first + workers.length;
    say(at("which"), workers.length ? `${number(this.first + 1)} to ${number(last)} of ${number(found)}${at("find").value ? " that are found" : ""}; the suspected, then the fastest` : "no worker is like that");
    at("earlier").disabled = this.first === 0;
    at("later").disabled = last >= found;
    table(at("workers"), "", HEADINGS, workers.map(cells));
  }
}

function cells(worker) {
  const weights = make("span", worker.version === null ? "–" : `v${worker.version}`);
  if (worker.fetching) {
    const bar = make("progress");
    bar.max = 1;
    bar.value = worker.fetching.share;
    bar.setAttribute("aria-label", `fetching version ${worker.fetching.version}`);
    weights.append(` → v${worker.fetching.version} `, bar, ` ${percent(worker.fetching.share)}`);
  }
  const doing = make("span", worker.suspected ? `suspected: ${worker.suspected}` : worker.attends ? worker.doing || (worker.is_idle ? "idle" : "") : "away", worker.suspected ? "bad" : "");
  return [worker.id, worker.engine || "–", number(worker.mismatch), doing, number(worker.rate), weights, worker.sources.map((source) => source || "head").join(", ") || "–",
    megabytes(worker.received), megabytes(worker.sent), worker.price_usd_per_hour ? `$${number(worker.price_usd_per_hour)}` : "–", worker.is_own === false ? "stranger" : "own"];
}

// The head at the left, each worker one column behind the farthest of its sources.
function showMap(run) {
  const workers = run.workers.filter((worker) => worker.attends).slice(0, MAP_WORKERS);
  if (workers.length < 2 || !workers.some((worker) => worker.sources.length)) { put(at("map"), []); return; }
  const depth = new Map([["", 0]]), rows = [1];
  for (let turn = 0; turn < workers.length; turn++) {
    for (const worker of workers) {
      const known = worker.sources.filter((source) => depth.has(source)).map((source) => depth.get(source));
      if (!depth.has(worker.id) && known.length) depth.set(worker.id, Math.max(...known) + 1);
    }
  }
  const spots = new Map([["", [20, ROW]]]);
  for (const worker of workers) {
    const column = depth.get(worker.id) ?? 1;
    rows[column] = (rows[column] ?? 0) + 1;
    spots.set(worker.id, [20 + column * 150, rows[column] * ROW]);
  }
  const svg = document.createElementNS(SVG, "svg");
  const add = (tag, values, text = "") => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    element.textContent = text;
    svg.append(element);
  };
  const width = 170 + Math.max(...depth.values()) * 150, height = 20 + Math.max(...rows.filter(Boolean)) * ROW;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Who takes weights from whom; the table below has the same in words");
  for (const worker of workers) for (const source of worker.sources) {
    const from = spots.get(source), to = spots.get(worker.id);
    if (from) add("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1] });
  }
  add("circle", { cx: 20, cy: ROW, r: 6, class: "current" });
  add("text", { x: 8, y: ROW - 10 }, "head");
  for (const worker of workers) {
    const [x, y] = spots.get(worker.id);
    add("circle", { cx: x, cy: y, r: 6, class: worker.version === run.published ? "current" : "" });
    add("text", { x: x - 6, y: y - 10 }, worker.id.length > 16 ? `${worker.id.slice(0, 15)}…` : worker.id);
  }
  put(at("map"), [svg]);
}
