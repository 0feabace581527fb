// The run's configuration, and the ends of its logs: asked for when somebody opens them.

import { ask, at, make, say, table } from "./parts.js";

export class Files {
  constructor() {
    this.run = 0;
    this.settings = [];
    at("configuration").addEventListener("toggle", () => this.configuration());
    at("defaults").addEventListener("input", () => this.showSettings());
    at("logs").addEventListener("toggle", () => this.logs());
    at("log-again").addEventListener("click", () => this.log());
    at("log-name").addEventListener("change", () => this.log());
  }

  // Of another run: what is open is read again.
  open(run) {
    if (run === this.run) return;
    this.run = run;
    this.configuration();
    this.logs();
  }

  async tell(path, values) {
    try {
      const found = await ask(path, { run: this.run, ...values });
      say(at("log-told"), "");
      return found;
    } catch (error) { say(at("log-told"), `It can't be read: ${error.message}`); return null; }
  }

  async configuration() {
    if (!at("configuration").open) return;
    this.settings = await this.tell("settings", {}) ?? [];
    this.showSettings();
  }

  showSettings() {
    const shown = this.settings.filter((one) => at("defaults").checked || !one.is_default);
    say(at("settings-told"), shown.length ? "" : "All settings are as by default.");
    table(at("settings"), "", [["setting"], ["value", "wide"]], shown.map((one) => [one.name, one.value]));
  }

  async logs() {
    if (!at("logs").open) return;
    const names = await this.tell("logs", {}) ?? [], before = at("log-name").value;
    at("log-name").replaceChildren(...names.map((name) => make("option", name)));
    if (names.includes(before)) at("log-name").value = before;
    if (!names.length) say(at("log-text"), "No log is written yet.");
    else await this.log();
  }

  async log() {
    const name = at("log-name").value, place = at("log-text");
    const text = name && await this.tell("logs", { name });
    if (typeof text !== "string" || name !== at("log-name").value) return;
    say(place, text);
    place.scrollTop = place.scrollHeight;
  }
}
