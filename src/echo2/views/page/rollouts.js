// The rollouts: which file, which of its groups, and every token with what is known of it.

import { ask, at, make } from "./parts.js";

const FOLLOW_SECONDS = 2;
const NO_FILTER = at("worker").options[0].textContent;

function choose(select, values, keep) {
  const before = select.value;
  const options = values.map(([value, text]) => {
    const option = make("option", text);
    option.value = value;
    return option;
  });
  select.replaceChildren(...keep, ...options);
  select.value = [...select.options].some((option) => option.value === before) ? before : select.options[0]?.value ?? "";
}

const GROUPS_SHOWN = 200; // of a file, by the server
const WHOLE_GROUPS = 20; // that are drawn at once, in view or not
const LEGENDS = {
  logprob: "The redder a token, the less likely it was: logprobs of 0, -0.5, -1.5, -3 and -5 begin the shades. Grey italics: written by the environment, not trained on.",
  advantage: "Green: better than its group, red: worse. Each token of a rollout has its rollout's advantage.",
  ratio: "Green: the policy that was trained found the token likelier than the one that drew it; red: less likely. Ratios beyond 1.1, 1.5, 2 and 4, or one by these, begin the shades. No colour: no gradient came from it.",
  version: "Each policy version has a shade of its own; a rollout may span several.",
  none: "",
};

export class Rollouts {
  constructor() {
    this.run = -1;
    this.groups = [];
    this.history = null; // {name, number}: the task whose tries are shown
    this.marked = null;
    this.names = null; // files there are; null: to be asked for
    this.wanted = ""; // run and file that were asked for last
    this.askedAt = 0;
    this.version = -1;
    at("file").addEventListener("change", () => { this.history = null; this.load(); });
    for (const event of ["pointerdown", "focus"]) at("file").addEventListener(event, () => this.list());
    for (const id of ["worker", "staleness", "reward-from", "reward-to", "colour"]) at(id).addEventListener("input", () => this.show());
    at("groups").addEventListener("pointerover", (event) => { if (event.target.matches?.(".words span")) this.mark(event.target); });
    document.addEventListener("keydown", (event) => this.key(event));
  }

  // The run goes on: show the newest step where that is chosen. Names of files are asked for when somebody wants one.
  stepped(run, version) {
    if (run !== this.run) { this.open(run, version); return; }
    if (version === this.version) return;
    this.version = version;
    this.names = null;
    const rest = this.askedAt + FOLLOW_SECONDS * 1000 - performance.now();
    clearTimeout(this.due);
    this.due = setTimeout(() => this.follow(), Math.max(0, rest));
  }

  async open(run, version) {
    this.run = run;
    this.version = version;
    this.history = null;
    this.names = null;
    at("file").value = "";
    await this.list();
    this.load();
  }

  follow() {
    this.askedAt = performance.now();
    const isBusy = at("file").value || this.history || at("groups").contains(document.activeElement);
    if (!isBusy || !this.groups.length) this.load();
  }

  async list() {
    if (this.names) return;
    const names = await this.tell(() => ask("rollouts", { run: this.run }));
    if (!names) return;
    const newest = make("option", "the newest step");
    newest.value = "";
    this.names = names;
    choose(at("file"), names.map((name) => [name, name.startsWith("eval") ? `held-out, version ${name.slice(5)}` : `step ${name.slice(5)}`]), [newest]);
  }

  async tell(work) {
    try { return await work(); } catch (error) { at("token").textContent = `The rollouts can't be read: ${error.message}`; return null; }
  }

  // Of the step that ended last; one that goes on has not all its groups yet.
  newest() {
    const ended = `step_${this.version}`, isEnded = (name) => name.startsWith("step") && Number(name.slice(5)) <= this.version;
    return this.names && !this.names.includes(ended) ? this.names.find(isEnded) ?? this.names[0] : ended;
  }

  async load() {
    const name = at("file").value || this.newest();
    if (!name) { at("groups").replaceChildren(make("p", "No rollouts are written yet.")); return; }
    const wanted = this.wanted = `${this.run} ${name}`;
    if (name === this.name && !this.history && this.shown === this.run) return;
    const groups = await this.tell(() => ask("rollouts", { run: this.run, name }));
    if (wanted !== this.wanted) return; // another file was chosen meanwhile
    if (!groups || (!groups.length && this.groups.length && !at("file").value)) return;
    this.name = name;
    this.shown = this.run;
    this.take(groups.map((group) => [name, group]));
  }

  async over(name, number) {
    const found = await this.tell(() => ask("task", { run: this.run, name, group: number }));
    if (!found) return;
    this.history = { name, number };
    this.take(found);
  }

  take(groups) {
    this.groups = groups;
    const keep = (select) => { const option = make("option", NO_FILTER); option.value = ""; return [option]; };
    const distinct = (key) => [...new Set(groups.map(([, group]) => group[key]).filter((value) => value !== null && value !== undefined && value !== ""))].sort();
    choose(at("worker"), distinct("worker").map((id) => [id, id]), keep());
    choose(at("staleness"), distinct("staleness").map((value) => [String(value), String(value)]), keep());
    this.show();
  }

  show() {
    const from = parseFloat(at("reward-from").value), to = parseFloat(at("reward-to").value);
    const worker = at("worker").value, staleness = at("staleness").value;
    at("legend").textContent = LEGENDS[at("colour").value];
    const found = [];
    if (this.history) {
      const back = make("button", "back to all tasks");
      back.addEventListener("click", () => { this.history = null; this.name = ""; this.load(); });
      found.push(make("p", `One task over ${this.groups.length} ${this.groups.length === 1 ? "try" : "tries"}`), back);
    }
    for (const [name, group] of this.groups) {
      if ((worker && group.worker !== worker) || (staleness && String(group.staleness) !== staleness)) continue;
      const rollouts = group.rollouts.filter((each) => !(each.reward < from) && !(each.reward > to));
      if (rollouts.length) found.push(this.group(name, group, rollouts));
    }
    if (this.groups.length >= GROUPS_SHOWN && !this.history) found.push(make("p", `These are of the file's first ${GROUPS_SHOWN} groups; the run directory has all.`, "about"));
    at("groups").className = found.length > WHOLE_GROUPS ? "long" : "";
    at("groups").replaceChildren(...(found.length ? found : [make("p", "No rollout is like that.")]));
  }

  group(name, group, rollouts) {
    const place = make("article"), about = make("p", "", "about"), prompt = make("pre");
    const mean = group.rollouts.reduce((sum, each) => sum + each.reward, 0) / group.rollouts.length;
    about.append(make("b", `${name.replace("_", " ")}, group ${group.group}`), ` · mean reward ${round(mean)} · ${group.worker || "no worker"}`);
    if (group.staleness !== null && group.staleness !== undefined) about.append(` · staleness ${group.staleness}`);
    if (group.seconds) about.append(` · ${round(group.seconds)} s `);
    if (!this.history) {
      const over = make("button", "this task over the steps");
      over.addEventListener("click", () => this.over(name, group.group));
      about.append(" ", over);
    }
    prompt.textContent = typeof group.prompt === "string" ? group.prompt : group.prompt.map(([role, text]) => `${role}: ${text}`).join("\n\n");
    prompt.tabIndex = 0;
    prompt.setAttribute("role", "region");
    prompt.setAttribute("aria-label", "Prompt");
    const columns = Object.entries(group.columns ?? {}).map(([column, value]) => `${column}: ${value}`);
    const tries = make("div", "", "tries");
    tries.append(...rollouts.map((each, index) => this.rollout(each, index)));
    place.append(about, prompt, ...(columns.length ? [make("p", columns.join("  ·  "), "about columns")] : []), tries);
    return place;
  }

  rollout(each, index) {
    const place = make("div", "", "rollout"), about = make("p", "", "about"), words = make("div", "", "words");
    about.append(make("b", `reward ${round(each.reward)}`));
    const parts = Object.entries(each.reward_parts ?? {});
    if (parts.length > 1) about.append(` (${parts.map(([part, value]) => `${part} ${round(value)}`).join(", ")})`);
    if (each.advantage !== undefined) about.append(` · advantage ${round(each.advantage)}`);
    const versions = each.versions.map(([, version]) => version);
    about.append(` · version ${versions.join(" → ")} · ended by ${each.finish}` + (each.rows ? ` · ${each.rows.length} rows` : ""));
    words.tabIndex = 0;
    words.setAttribute("role", "group");
    words.setAttribute("aria-label", `Rollout ${index + 1}, reward ${round(each.reward)}`);
    if (each.tokens) {
      words.append(...spans(each, at("colour").value));
      if (each.num_tokens > each.tokens.length) about.append(` · the first ${each.tokens.length} of ${each.num_tokens} tokens`);
    } else words.textContent = each.text;
    words.rollout = each;
    place.append(about, words);
    return place;
  }

  mark(span) {
    this.marked?.classList.remove("here");
    this.marked = span;
    span.classList.add("here");
    const { rollout } = span.parentElement, index = Number(span.dataset.index), logprob = rollout.logprobs[index], ratio = ratioOf(rollout, index);
    const chance = span.classList.contains("environment") ? "written by the environment" : `logprob ${round(logprob)} (p ${round(Math.exp(logprob))})`;
    at("token").textContent = `token ${index + 1} ${JSON.stringify(rollout.tokens[index])}: ${chance}, version ${versionOf(rollout, index)}` + (ratio === undefined ? "" : `, ratio ${round(ratio)}`) + (rollout.advantage === undefined ? "" : `, advantage ${round(rollout.advantage)}`);
  }

  key(event) {
    if (event.target.matches("input, select") || event.ctrlKey || event.altKey || event.metaKey) return;
    const words = [...document.querySelectorAll(".words")], here = words.indexOf(document.activeElement);
    const step = { j: 1, k: -1 }[event.key], side = { ArrowRight: 1, ArrowLeft: -1 }[event.key], file = { "[": 1, "]": -1 }[event.key];
    if (step && words.length) words[Math.min(words.length - 1, Math.max(0, here + step))].focus();
    else if (side && here >= 0 && words[here].childElementCount) {
      const spans = [...words[here].children], now = spans.indexOf(this.marked);
      this.mark(spans[Math.min(spans.length - 1, Math.max(0, now + side))]);
    } else if (file) this.list().then(() => {
      const select = at("file");
      select.selectedIndex = Math.min(select.options.length - 1, Math.max(0, select.selectedIndex + file));
      select.dispatchEvent(new Event("change"));
    });
    else return;
    event.preventDefault();
  }
}

const round = (value) => value === null || value === undefined ? "–" : String(Number(value.toPrecision(3)));

function versionOf(rollout, index) {
  return rollout.versions.findLast(([first]) => first <= index)?.[1];
}

// Of a token's probability under the policy that was trained to that under the one that drew it.
function ratioOf(rollout, index) {
  const learner = rollout.learner_logprobs?.[index];
  return learner === undefined || learner === null || inEnvironment(rollout, index) ? undefined : Math.exp(learner - rollout.logprobs[index]);
}

function inEnvironment(rollout, index) {
  return rollout.environment.some(([from, to]) => from <= index && index < to);
}

function spans(rollout, colour) {
  let start = 0;
  const later = new Set((rollout.rows ?? []).slice(0, -1).map((length) => (start += length)));
  return rollout.tokens.map((piece, index) => {
    const span = make("span", piece, inEnvironment(rollout, index) ? "environment" : shade(rollout, index, colour));
    if (later.has(index)) span.classList.add("row");
    span.dataset.index = index;
    return span;
  });
}

function shade(rollout, index, colour) {
  if (colour === "version") return `version-${versionOf(rollout, index) % 4}`;
  if (colour === "advantage" && rollout.advantage) {
    const strength = Math.min(4, Math.ceil(Math.abs(rollout.advantage) * 2));
    return `${rollout.advantage > 0 ? "good" : "bad"}-${strength}`;
  }
  if (colour === "ratio") {
    const ratio = ratioOf(rollout, index) ?? 1, strength = [1.1, 1.5, 2, 4].filter((edge) => Math.abs(Math.log(ratio)) > Math.log(edge)).length;
    return strength ? `${ratio > 1 ? "good" : "bad"}-${strength}` : "tint-0";
  }
  if (colour === "logprob") {
    const logprob = rollout.logprobs[index], strength = [-0.5, -1.5, -3, -5].filter((edge) => logprob < edge).length;
    return strength ? `bad-${strength}` : "tint-0";
  }
  return "tint-0";
}
