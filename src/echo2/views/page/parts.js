// What all parts of the page are made with. Texts of runs reach it by textContent alone.

export const at = (id) => document.getElementById(id);

export function make(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

export const percent = (share) => share === undefined ? "–" : `${Math.round(share * 100)} %`;
export const usd = (value) => value === null || value === undefined ? "–" : `$${value.toFixed(value < 100 ? 4 : 2)}`;
export const megabytes = (value) => value ? `${number(value / 1e6)} MB` : "–";

export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return `${number(whole / 3600)} h`;
}

export async function ask(path, values, headers = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(values)}`, { headers });
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  return answer.json();
}

// Put the elements there, but leave those that say the same already: what is selected or has the focus stays.
export function put(place, elements) {
  elements.forEach((element, index) => {
    const before = place.children[index];
    if (!before) place.append(element);
    else if (!before.isEqualNode(element)) before.replaceWith(element);
  });
  while (place.children.length > elements.length) place.lastElementChild.remove();
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Names and their values, each in a box.
export function pairs(place, facts) {
  put(place, facts.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
}

// headings: [name, class]; rows: lists of texts and elements. Only the cells that differ are written.
export function table(place, caption, headings, rows) {
  if (!rows.length) { if (place.firstChild) place.replaceChildren(); return; }
  if (!place.tHead) {
    const top = make("tr");
    for (const [name, kind] of headings) {
      const cell = make("th", name, kind);
      cell.scope = "col";
      top.append(cell);
    }
    place.createCaption();
    place.createTHead().append(top);
    place.createTBody();
  }
  say(place.caption, caption);
  const body = place.tBodies[0];
  rows.forEach((row, index) => {
    const line = body.rows[index] ?? body.insertRow();
    row.forEach((value, column) => {
      let cell = line.cells[column];
      if (!cell) { cell = line.insertCell(); cell.className = headings[column][1] ?? ""; }
      if (value instanceof Node) put(cell, [value]); else say(cell, value);
    });
  });
  while (body.rows.length > rows.length) body.deleteRow(-1);
}
