// The owner's page: fleet, tenants, money and faults.

import { at, duration, make, number, pairs, say, table, usd } from "./parts.js";
import { ago, follow, gigabytes } from "./service.js";

const TENANTS = [["tenant"], ["dollars", "number"], ["quota", "number"], ["tokens", "number"], ["disk", "number"], ["disk quota", "number"], ["sessions", "number"], ["models", "number"], ["open", "wide"], ["longest wait", "number"]];
const MACHINES = [["machine"], ["host"], ["device"], ["doing", "wide"], ["under way", "number"], ["sampled", "number"], ["an hour", "number"]];
const FAULTS = [["last", "number"], ["times", "number"], ["what"], ["words", "wide"]];

function show(told) {
  const machines = Object.entries(told.machines), open = (row) => Object.entries(row.open).map(([kind, count]) => `${number(count)} ${kind}`).join(", ") || "–";
  document.title = `${number(told.num_tenants)} tenants · echo2`;
  say(at("state"), `serving for ${duration(told.time - told.begun)}`);
  at("state").className = told.faults.some((fault) => fault.level === "error") ? "stands" : "runs";
  pairs(at("facts"), [
    ["tenants", number(told.num_tenants)], ["open requests", number(told.num_open)], ["dollars billed", usd(told.usd)],
    ["machines", number(machines.length)], ["fleet, an hour", usd(told.usd_per_hour)], ["samples without room", number(told.waiting_samples)],
  ]);
  const prices = Object.entries(told.usd_per_million_tokens).map(([kind, price]) => `${kind} $${number(price)}`);
  say(at("prices"), prices.length ? `Prices of a million tokens: ${prices.join(", ")}.` : "Nothing has a price.");
  at("no-tenants").hidden = told.tenants.length > 0;
  table(at("tenants"), told.num_tenants > told.tenants.length ? `${told.tenants.length} of ${number(told.num_tenants)}` : "", TENANTS,
    told.tenants.map((row) => [row.tenant, usd(row.usd), usd(row.quota_usd), number(row.tokens), gigabytes(row.disk_gb), gigabytes(row.quota_disk_gb),
      number(row.sessions), number(row.models), open(row), row.oldest_wait_seconds ? duration(row.oldest_wait_seconds) : "–"]));
  say(at("fleet"), machines.length ? "" : "No machine has joined; the service's own process samples.");
  table(at("workers"), "", MACHINES, machines.map(([name, machine]) => [name, machine.host, machine.device, machine.doing, number(machine.under_way), number(machine.sampled), usd(machine.price_usd_per_hour)]));
  at("no-faults").hidden = told.faults.length > 0;
  table(at("faults"), "", FAULTS, told.faults.map((fault) => [ago(told.time, fault.at), number(fault.num), make("span", fault.level, fault.level === "error" ? "bad" : ""), fault.text]));
}

follow("api/v1/owner", show);
