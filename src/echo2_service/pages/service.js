// What the pages of the service do alike: they ask for their data every few seconds, and show times as people tell them.

import { ask, at, duration, say } from "./parts.js";

const SECONDS = 3;

// Show what `path` tells, now and from then on. A page that nobody sees asks for nothing.
export async function follow(path, show) {
  if (!document.hidden) {
    try {
      show(await ask(path, {}));
      say(at("link"), "live");
    } catch (error) { say(at("link"), `not connected; trying again: ${error.message}`); }
  }
  setTimeout(() => follow(path, show), 1000 * SECONDS);
}

export const ago = (now, then) => then === null ? "–" : `${duration(Math.max(0, now - then))} ago`;
export const day = (seconds) => seconds === null ? "–" : new Date(1000 * seconds).toISOString().slice(0, 10);
export const gigabytes = (value) => value === null ? "–" : value < 0.1 ? `${Number((1000 * value).toPrecision(3))} MB` : `${Number(value.toPrecision(3))} GB`;
