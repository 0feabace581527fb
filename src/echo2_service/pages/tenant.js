// A tenant's page: what it has, what that costs, and why it waits.

import { Charts } from "./charts.js";
import { at, make, number, pairs, put, say, table, usd } from "./parts.js";
import { ago, ask, day, follow, gigabytes } from "./service.js";

const EXACT = { exact: true };
const CURVES = [
  { title: "Loss", what: "sum of a step's losses over its tokens that count", lines: [["loss", "loss"]] },
  { title: "Gradient norm", what: "before clipping", lines: [["grad_norm", "norm"]] },
  { title: "Tokens", what: "trained in a step", lines: [["tokens", "tokens"]] },
  { title: "Dollars", what: "of the session so far: what was trained and sampled", lines: [["usd", "dollars", EXACT]] },
];
const RUNS = [["run"], ["base"], ["rank", "number"], ["step", "number"], ["loss", "number"], ["dollars", "number"], ["last request", "number"], ["state"], ["labels", "wide"]];
const WAITS = [["who"], ["what"], ["open", "number"], ["since", "number"], ["why", "wide"]];
const SAMPLES = [["when", "number"], ["of"], ["samples", "number"], ["text", "wide"], ["tokens", "number"], ["ended by"], ["logprob", "number"]];
const BILL = [["kind"], ["requests", "number"], ["tokens", "number"], ["dollars", "number"], ["a million tokens", "number"]];
const KEYS = [["key"], ["may"], ["calls a minute", "number"], ["made"], ["ends"], ["state"]];
const charts = new Charts(at("charts"), CURVES);
let chosen = null, drawn = "", time = 0;

function show(told) {
  time = told.time;
  document.title = `${told.tenant} · echo2`;
  say(at("state"), `${told.tenant}: ${told.num_open === 1 ? "1 request is open" : `${told.num_open ? number(told.num_open) : "no"} requests are open`}`);
  at("state").className = told.notes.length ? "stands" : told.num_open ? "runs" : "";
  at("to-owner").hidden = !told.scopes.includes("owner");
  const { bill } = told, of = (used, quota) => quota === null ? used : `${used} of ${quota}`;
  pairs(at("facts"), [
    ["dollars", of(usd(bill.usd), bill.quota_usd === null ? null : usd(bill.quota_usd))],
    ["disk", of(gigabytes(bill.disk_gb), bill.quota_disk_gb === null ? null : gigabytes(bill.quota_disk_gb))],
    ["open requests", number(told.num_open)], ["runs", number(told.num_runs)],
    ["checkpoints are kept", bill.checkpoint_days === null ? "until deleted" : `${number(bill.checkpoint_days)} days`],
  ]);
  put(at("notes"), told.notes.map((note) => make("li", note)));
  at("nobody").hidden = told.waits.length > 0;
  const open = told.waits.reduce((sum, wait) => sum + wait.num, 0);
  table(at("waits"), open < told.num_open ? `${number(open)} of ${number(told.num_open)}` : "", WAITS,
    told.waits.map((wait) => [wait.who, wait.kind, number(wait.num), ago(time, wait.since), wait.why]));
  showRuns(told);
  showBill(bill);
  table(at("keys"), "", KEYS, told.keys.map((key) => [key.id, key.scopes.join(", "), number(key.per_minute), day(key.created), day(key.expires), state(key, told.key)]));
}

function state(key, own) {
  if (key.revoked !== null) return `revoked ${day(key.revoked)}`;
  if (key.expires !== null && key.expires <= time) return "expired";
  return key.id === own ? "this page's" : "valid";
}

function showRuns({ runs, num_runs: count }) {
  at("no-runs").hidden = runs.length > 0;
  if (!runs.some((run) => run.id === chosen)) chosen = runs.find((run) => run.step)?.id ?? runs[0]?.id ?? null;
  table(at("models"), count > runs.length ? `the newest ${runs.length} of ${number(count)}` : "", RUNS, runs.map((run) => {
    const button = make("button", run.id);
    button.setAttribute("aria-pressed", String(run.id === chosen));
    return [button, run.base, number(run.rank), number(run.step), number(run.loss), usd(run.usd), ago(time, run.used), run.is_live ? "live" : "session ended",
      Object.entries(run.labels).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ")];
  }));
  curve(runs.find((run) => run.id === chosen));
}

async function curve(run) {
  const key = `${run?.id} ${run?.step}`;
  if (!run || key === drawn) return;
  drawn = key;
  try {
    const told = await ask(`api/v1/training_runs/${encodeURIComponent(run.id)}/steps`, {});
    if (run.id !== chosen) return;
    say(at("shown"), told.steps.length ? `${run.id}${told.stride > 1 ? `, every ${number(told.stride)} steps` : ""}` : `${run.id} has made no step yet.`);
    charts.show([told]);
  } catch (error) { drawn = ""; say(at("shown"), `The curves can't be read: ${error.message}`); }
}

function showBill(bill) {
  const prices = bill.usd_per_million_tokens;
  say(at("bill"), `${usd(bill.usd)} so far${bill.quota_usd === null ? "" : `, of ${usd(bill.quota_usd)}`}`);
  const kinds = Object.entries(bill.usage).sort(([, one], [, other]) => other.usd - one.usd);
  table(at("causes"), "", BILL, kinds.map(([kind, used]) => [kind, number(used.requests), number(used.tokens), usd(used.usd), kind in prices ? `$${number(prices[kind])}` : "–"]));
}

async function samples() {
  try {
    const told = (await ask("api/v1/samples", {})).samples;
    say(at("samples-told"), told.length ? "" : "Nothing was sampled lately.");
    table(at("samples"), "", SAMPLES, told.flatMap((one) => {
      const first = [ago(time, one.at), one.path ?? one.base, number(one.num_sequences || null)];
      if (!one.sequences.length) return [[...first, "too long to be shown", "–", "–", "–"]];
      return one.sequences.map((each, index) => [...(index ? ["", "", ""] : first), each.text || `tokens ${each.tokens.join(" ")}`, number(each.num_tokens), each.finish, number(each.logprob)]);
    }));
  } catch (error) { say(at("samples-told"), `They can't be read: ${error.message}`); }
}

at("models").addEventListener("click", ({ target }) => {
  const run = target.closest("button");
  if (!run) return;
  chosen = run.textContent;
  for (const each of at("models").querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === run));
  curve({ id: chosen, step: null });
});
at("samples-again").addEventListener("click", samples);
at("axis").addEventListener("change", () => { charts.axis = at("axis").value; charts.show(charts.runs); });
at("smoothing").addEventListener("change", () => { charts.smoothing = Number(at("smoothing").value); charts.show(charts.runs); });
follow("api/v1/account", show).then(samples);
