// What the page draws with: elements, bars, rows of numbers, maps. It knows nothing of models.
"use strict";

const SVG_TAGS = new Set(["svg", "path"]);

/** make("p.note", {title: "x", onclick: f, style: {width: "1px"}}, "text", child) is an element.
 *
 * The properties may be left out. Strings become text, never markup; `null` and `false` among the
 * children are left out.
 */
function make(tag, ...children) {
  const properties = children[0]?.constructor === Object ? children.shift() : {};
  const [name, ...classes] = tag.split(".");
  const element = SVG_TAGS.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") {
      for (const [part, text] of Object.entries(value)) element.style.setProperty(part, text);
    } else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== false));
  return element;
}

function range(length) {
  return Array.from({ length }, (_, n) => n);
}

// -- numbers as text -----------------------------------------------------------------------------

const COUNTS = new Intl.NumberFormat("en-US"); // made once, as that takes long

function formatCount(count) {
  return COUNTS.format(count);
}

function formatPercent(share) {
  if (share === 0) return "0 %";
  if (share < 0.0001) return "<0.01 %";
  if (share < 0.001) return `${(100 * share).toFixed(2)} %`;
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

function formatReal(number, digits = 3) {
  if (number === -Infinity) return "−∞";
  return number.toFixed(Math.abs(number) < 1000 ? digits : 0).replace("-", "−");
}

/** The index of the largest number. */
function findLargest(numbers) {
  return numbers.reduce((best, number, i) => (number > numbers[best] ? i : best), 0);
}

/** The indices of the `count` largest numbers, the largest first. */
function findTop(numbers, count) {
  const order = Array.from(numbers.keys()).sort((a, b) => numbers[b] - numbers[a] || a - b);
  return order.slice(0, count);
}

function measureLength(vector) {
  return Math.sqrt(dot(vector, 0, vector, 0, vector.length));
}

function findScale(...vectors) {
  let scale = 0;
  for (const vector of vectors) {
    for (const x of vector) if (Number.isFinite(x)) scale = Math.max(scale, Math.abs(x));
  }
  return scale || 1;
}

// -- bars ----------------------------------------------------------------------------------------

/** Shares of a bar's width, drawn over each other; each has a class. */
function makeBar(...parts) {
  return make(
    "span.bar",
    parts.map(([name, share]) => make(`i.${name}`, { style: { width: `${100 * share}%` } })),
  );
}

/** Rows of label, bar and number. */
function makeBars(rows) {
  return make(
    "div.bars",
    rows.map(([name, bar, number]) =>
      make("div", make("span", name), bar, make("span.number", number)),
    ),
  );
}

/** A row of a table: its name is a button, and pressing any of it chooses the row. */
function makeRow(id, name, cells, isChosen, choose) {
  const options = { "data-focus": id, "aria-pressed": String(isChosen) };
  return make(
    isChosen ? "tr.at" : "tr",
    { onclick: choose },
    make("th", { scope: "row" }, make("button.plain", options, name)),
    cells.map((cell) => make("td", cell)),
  );
}

/** A table of such rows in a box that scrolls. */
function makeTable(name, columns, rows) {
  const heading = columns.map((column) => make("th", { scope: "col" }, column));
  const table = make(`table.${name}`, make("thead", make("tr", heading)), make("tbody", rows));
  const options = { tabindex: 0, "data-focus": name, "data-scroll": name };
  return rove(make("div.scroll", options, table));
}

/** The numbers of a vector as bars around zero; a bar of full height is `scale`. */
function drawVector(vector, scale) {
  const bars = Array.from(vector, (x, i) => {
    const height = Number.isFinite(x) ? (-48 * x) / scale : 0;
    return `M${i + 0.1} 50h.8v${height.toFixed(2)}h-.8z`;
  });
  return make(
    "svg.vector",
    { viewBox: `0 0 ${vector.length} 100`, preserveAspectRatio: "none", "aria-hidden": "true" },
    make("path", { d: `M0 49.5h${vector.length}v1H0z${bars.join("")}` }),
  );
}

/** Rows of numbers from 0 to `scale` as lines over their index. */
function drawCurves(rows, scale) {
  const width = Math.max(1, rows[0].length - 1);
  const point = (y, x) => `${x} ${(100 - (100 * y) / scale).toFixed(2)}`;
  return make(
    "svg.curves",
    { viewBox: `0 0 ${width} 100`, preserveAspectRatio: "none", "aria-hidden": "true" },
    rows.map((row) => make("path", { d: `M${row.map(point).join("L")}` })),
  );
}

/** Named vectors of one kind, on one scale: bars, what they stand for and, on demand, each number. */
function makeVectors(entries) {
  const scale = findScale(...Object.values(entries));
  return Object.entries(entries).map(([name, vector]) => {
    const facts = say("vectorFacts", {
      count: vector.length,
      length: formatReal(measureLength(vector)),
      scale: formatReal(scale, 2),
    });
    const listNumbers = () =>
      make(
        "div.list",
        Array.from(vector, (x, i) => make("span", make("small", `${i} `), formatReal(x))),
      );
    return make(
      "figure",
      make("figcaption", make("b", name), " ", make("small", facts)),
      drawVector(vector, scale),
      makeFold(make("small", say("eachNumber")), listNumbers),
    );
  });
}

/** What opens when its title is pressed; `fill` makes the content then. */
function makeFold(title, fill) {
  const details = make("details", make("summary", title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(fill());
  });
  return details;
}

// -- colors and maps -----------------------------------------------------------------------------

const darkMode = matchMedia("(prefers-color-scheme: dark)");
const palettes = {}; // pixels of 256 weights, of a light and a dark page

/** The color (r, g, b) of a weight: the square root of it makes small weights visible. */
function colorOf(weight) {
  const stops = darkMode.matches
    ? [26, 29, 33, 44, 108, 168, 236, 246, 255]
    : [255, 255, 255, 96, 165, 214, 6, 38, 92];
  const at = 2 * Math.sqrt(Math.min(1, Math.max(0, weight)));
  const half = at > 1 ? 1 : 0;
  const [from, to] = [half, half + 1].map((n) => stops.slice(3 * n, 3 * n + 3));
  return from.map((c, i) => Math.round(c + (to[i] - c) * (at - half)));
}

/** Fill an element with the color of a weight, its text in one that can be read on it. */
function tint(element, weight) {
  const isDeep = Math.sqrt(weight) > 0.6;
  element.style.backgroundColor = `rgb(${colorOf(weight)})`;
  element.style.color = isDeep ? (darkMode.matches ? "#000" : "#fff") : "";
}

/** Draw the weights of T queries (rows) on T keys on a canvas.
 *
 * `weigh` gives those of a query, (S,), and the first key that it sees.
 *
 * Of cells that share a pixel, the largest counts.
 */
function paintMap(canvas, T, weigh, maxSize = 512) {
  const size = Math.min(T, maxSize);
  canvas.width = size;
  canvas.height = size;
  const largest = new Float32Array(size * size).fill(-1);
  for (let q = 0; q < T; q++) {
    const row = Math.floor((q * size) / T) * size;
    const [weights, first] = weigh(q);
    for (let k = first; k <= q; k++) {
      const at = row + Math.floor((k * size) / T);
      if (weights[k] > largest[at]) largest[at] = weights[k];
    }
  }
  const image = new ImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer); // of a little-endian machine
  const colors = (palettes[darkMode.matches] ??= range(256).map((n) => {
    const [r, g, b] = colorOf((n / 255) ** 2);
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }));
  for (let at = 0; at < largest.length; at++) {
    if (largest[at] < 0) continue; // transparent
    pixels[at] = colors[Math.round(255 * Math.sqrt(largest[at]))];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Move a choice by keys: `steps` has the step of each key, `go` takes one. */
function handleKeys(event, steps, go) {
  if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  go(steps[event.key]);
}

/** Make one tab stop of the buttons in a group: keys move between them, and `choose` each. */
function rove(group, choose = null) {
  const buttons = Array.from(group.querySelectorAll("button"));
  const chosen = buttons.find((button) => button.getAttribute("aria-pressed") === "true");
  for (const button of buttons) button.tabIndex = button === (chosen ?? buttons[0]) ? 0 : -1;
  group.onkeydown = (event) => {
    const here = buttons.indexOf(event.target);
    if (here < 0) return;
    const last = buttons.length - 1;
    const steps = {
      ArrowLeft: -1,
      ArrowUp: -1,
      ArrowRight: 1,
      ArrowDown: 1,
      Home: -last,
      End: last,
    };
    handleKeys(event, steps, (step) => {
      const button = buttons[Math.min(last, Math.max(0, here + step))];
      for (const each of buttons) each.tabIndex = each === button ? 0 : -1;
      button.focus();
      choose?.(button);
    });
  };
  return group;
}
