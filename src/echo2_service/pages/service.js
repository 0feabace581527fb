// What the pages of the service do alike: they ask for their data every few seconds, and show times as people tell them.

import { ask as askAs, at, duration, say } from "./parts.js";

const SECONDS = 3, HALF = "echo2-page";

// The page's half of the key comes behind the "#" of the address once. Only pages of this port can read where it stays.
if (location.hash.startsWith("#page=")) {
  localStorage.setItem(HALF, location.hash.slice(6));
  history.replaceState(null, "", location.pathname);
}

// As of all pages, with that half. A key that is no longer valid is asked for again.
export async function ask(path, values) {
  try {
    return await askAs(path, values, { "X-Echo2-Page": localStorage.getItem(HALF) ?? "" });
  } catch (error) {
    if (error.status === 401) location.replace("/sign-in");
    throw error;
  }
}

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
