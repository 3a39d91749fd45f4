// The parts of the page: the expectation, the drawing of the path and its open station, the heads
// by what they do, and what is switched off. Each `show…` fills its place from `now` and `state`.
"use strict";

// -- what comes next -----------------------------------------------------------------------------

const MAX_EXPECTED = 10;

/** The rows to show: the likeliest, also of those before something was switched off. */
function selectExpected() {
  const chosen = now.rows.slice(0, MAX_EXPECTED);
  if (now.before === null) return chosen;
  const likeliest = Array.from(now.before.entries()).sort((a, b) => b[1] - a[1]);
  const few = new Set(likeliest.slice(0, MAX_EXPECTED / 2).map(([token]) => token));
  const lost = now.rows.slice(MAX_EXPECTED).filter(({ token }) => few.has(token));
  return [...chosen.slice(0, MAX_EXPECTED - lost.length), ...lost];
}

/** Bars of the next token: pale is expected, solid can be drawn, outlined was expected before. */
function makeExpectation() {
  if (now.rows === null) return make("p", {}, say("noToken"));
  const rows = selectExpected();
  const came = now.rows.find(({ token }) => token === now.next);
  // The row of what came has its place, so that nothing below moves.
  const isApart = came && !rows.includes(came);
  const cells = rows.map(makeExpectedRow);
  const last = isApart ? makeExpectedRow(came) : make("div.expected.empty", {}, "\u00a0");
  return make(`div.expectation${now.before === null ? "" : ".changed"}`, {}, cells, last);
}

function makeExpectedRow({ token, probability, chance, removedBy }) {
  const before = now.before?.get(token);
  const parts = [
    ["pale", probability],
    ["solid", chance],
  ];
  if (before !== undefined) parts.push(["before", before]);
  const classes = [token === now.next ? ".came" : "", removedBy === null ? "" : ".gone"].join("");
  let number = formatPercent(probability);
  if (before !== undefined) number = `${formatPercent(before).replace(" %", "")} → ${number}`;
  return make(
    `div.expected${classes}`,
    { "data-token": token },
    label(token),
    makeBar(...parts),
    make("span.number", {}, number),
    make("small.why", {}, removedBy === null ? "" : say(removedBy)),
  );
}

function showExpectation() {
  const after = label(now.tokens[now.at]);
  let outcome = say("expectOpen");
  if (now.next !== null && now.rows !== null) {
    const rank = now.rows.findIndex(({ token }) => token === now.next);
    const chance = formatPercent(now.rows[rank].probability);
    outcome = say("expectCame", { token: label(now.next), chance, rank: rank + 1 });
  } else if (continuation.finishReason !== null) {
    outcome = say(`finished.${continuation.finishReason}`);
  }
  const { temperature } = state.sample;
  fill(
    places.expect,
    make("h2", {}, say("expectHeading", { token: after })),
    make("p.outcome", {}, outcome),
    makeExpectation(),
    make(
      "p.note",
      {},
      say("barsHelp", { temperature }),
      now.before === null ? "" : [" ", ...say("barsHelpBefore")],
    ),
  );
  fill(places.filters, summarizeFilters());
}

function summarizeFilters() {
  if (now.rows === null) return [];
  const sums = new Map();
  for (const { removedBy, probability } of now.rows) {
    if (removedBy === null) continue;
    const [count, share] = sums.get(removedBy) ?? [0, 0];
    sums.set(removedBy, [count + 1, share + probability]);
  }
  const lines = Array.from(sums, ([name, [count, share]]) =>
    make(
      "p.note",
      {},
      say("removed", {
        name: sayText(name),
        count: formatCount(count),
        share: formatPercent(Math.min(1, share)),
      }),
    ),
  );
  return lines.length ? lines : [make("p.note", {}, say("keptAll"))];
}

// -- the path ------------------------------------------------------------------------------------

/** Ids of all stations, in the order of the path: "embed", "attn:0", … */
function listStations() {
  const ofLayer = ["attnNorm", "attn", "attnAdd", "mlpNorm", "mlp", "mlpAdd"];
  const layers = range(now.config.n_layer).flatMap((l) => ofLayer.map((name) => `${name}:${l}`));
  return ["text", "tokens", "embed", ...layers, "finalNorm", "head", "softmax", "draw"];
}

function splitStation(id) {
  const [name, layer] = id.split(":");
  return { name, layer: layer === undefined ? null : Number(layer) };
}

const STATION_WORDS = {
  attnNorm: "norm",
  mlpNorm: "norm",
  attn: "attention",
  attnAdd: "add",
  mlpAdd: "add",
};

function nameStation(id) {
  const { name, layer } = splitStation(id);
  const words = sayText(STATION_WORDS[name] ?? name);
  return layer === null ? words : `${sayText("layerName", { layer })}: ${words}`;
}

const PATH_WIDTH = 360;
const STREAM = 34; // where the residual stream runs down

function showPath() {
  const bands = []; // of layers, behind everything
  const drawing = [];
  let y = 4;
  const station = (id, x, width, height, ...children) => {
    const { name, layer } = splitStation(id);
    const isOff =
      layer !== null &&
      (isLayerOff(state.off, layer) ||
        (name === "mlp" && isMlpOff(state.off, layer)) ||
        (name === "attn" && areHeadsOff(layer)));
    const isRound = name.endsWith("Add");
    const classes = `${id === state.station ? ".open" : ""}${isOff ? ".off" : ""}`;
    const outline = isRound
      ? make("circle", { cx: x + width / 2, cy: y + height / 2, r: height / 2 })
      : make("rect", { x, y, width, height, rx: 7 });
    drawing.push(
      make(
        `g.station${classes}`,
        {
          role: "button",
          tabindex: id === state.station ? 0 : -1,
          "aria-label": nameStation(id),
          "aria-pressed": String(id === state.station),
          "data-focus": `station-${id}`,
          "data-station": id,
          onclick: () => openStation(id),
          onkeydown: moveBetweenStations,
        },
        outline,
        children,
      ),
    );
  };
  const text = (x, dy, content, name = "") => make(`text${name}`, { x, y: y + dy }, content);
  const line = (d) => drawing.push(make("path.flow", { d }));
  const guesses = [];
  const guess = (stream, dy) => {
    const line = make("text.guess", { x: PATH_WIDTH - 10, y: y + dy, "text-anchor": "end" });
    drawing.push(line);
    guesses.push(() => {
      const probabilities = readEarly(stream);
      const best = findLargest(probabilities);
      const spelled = shorten(spellText(best), 9);
      const chance = formatPercent(probabilities[best]);
      line.append(sayText("wouldSay", { token: spelled, chance }));
    });
  };
  const wide = (id, info) => {
    station(
      id,
      8,
      PATH_WIDTH - 16,
      28,
      text(STREAM + 20, 19, sayText(splitStation(id).name)),
      make("text.info", { x: PATH_WIDTH - 18, y: y + 19, "text-anchor": "end" }, info),
    );
    y += 38;
  };
  const branch = (layer, kind, length) => {
    // From the stream to the right, through the norm and the part, and back to the sum.
    line(`M${STREAM} ${y + 13}h32`);
    station(`${kind}Norm:${layer}`, 66, 62, 26, text(97, 17, sayText("norm"), ".middle"));
    line(`M128 ${y + 13}h18`);
    const name = sayText(kind === "attn" ? "attention" : "mlp");
    const adds = sayText("adds", { length: formatReal(length, 1) });
    station(
      `${kind}:${layer}`,
      146,
      196,
      26,
      text(156, 17, name),
      make("text.info", { x: 332, y: y + 17, "text-anchor": "end" }, adds),
    );
    line(`M180 ${y + 26}v18H${STREAM + 11}`);
    line(`M${STREAM + 16} ${y + 40}l-5 4 5 4`);
    y += 34;
    station(`${kind}Add:${layer}`, STREAM - 10, 20, 20, text(STREAM, 15, "+", ".middle.plus"));
    y += 28;
  };

  wide("text", sayText("characters", { count: countText().characters }));
  wide("tokens", formatCount(now.T));
  wide("embed", `${now.T} × ${now.config.d_model}`);
  const start = y - 10;
  guess(now.entry.layers[0].x, 4);
  y += 12;
  for (const layer of range(now.config.n_layer)) {
    const { attn, mlp } = now.entry.layers[layer];
    const isOff = isLayerOff(state.off, layer);
    const box = { x: 4, y: y - 2, width: PATH_WIDTH - 8, height: 140, rx: 10 };
    bands.push(make(`rect.layer${isOff ? ".off" : ""}`, box));
    drawing.push(text(PATH_WIDTH - 14, 12, sayText("layerName", { layer }), ".end.caption"));
    y += 18;
    branch(layer, "attn", measureLength(attn));
    branch(layer, "mlp", measureLength(mlp));
    guess(streamAfter(layer), -13);
    y += 8;
  }
  y += 4;
  const end = y;
  wide("finalNorm", "");
  wide("head", `${formatCount(now.entry.logits.length)} logits`);
  const top = findLargest(now.entry.logits);
  const chance = formatPercent(softmax(now.entry.logits)[top]);
  wide("softmax", `${shorten(spellText(top), 12)} ${chance}`);
  wide("draw", `seed ${state.sample.seed}`);
  const links = [32, 70, ...[0, 1, 2].map((n) => end + 28 + 38 * n)].map(
    (top) => `M${STREAM} ${top}v10`,
  );
  const stream = [
    make("path.flow", { d: links.join("") }),
    make("path.stream", { d: `M${STREAM} ${start}V${end}` }),
  ];
  const options = {
    viewBox: `0 0 ${PATH_WIDTH} ${y}`,
    role: "group",
    "aria-label": sayText("pathHeading"),
  };
  const svg = make("svg.drawing", options, bands, stream, drawing);
  fill(
    places.path,
    svg,
    make("p.note", {}, say("streamHelp", { width: now.config.d_model })),
    now.config.tie_embeddings ? make("p.note", {}, say("tiedHelp")) : null,
  );
  fill(places.pathHelp, say("pathHelp", { token: labelAt(now.at) }));
  writeGuesses(guesses);
}

const LARGE_HEAD = 1e7; // numbers; a browser multiplies about ten times as many in a blink
let guessing = null; // a timer

/** Write what the model would say at each layer; with a large head, one after the other. */
function writeGuesses(guesses) {
  clearTimeout(guessing);
  if (now.gpt.head.length < LARGE_HEAD) return guesses.forEach((write) => write());
  guessing = setTimeout(() => {
    guesses[0]();
    if (guesses.length > 1) writeGuesses(guesses.slice(1));
  });
}

function shorten(text, length) {
  const characters = [...text];
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : text;
}

function areHeadsOff(layer) {
  return range(now.config.n_head).every((head) => isHeadOff(state.off, layer, head));
}

function moveBetweenStations(event) {
  const ids = listStations();
  const here = ids.indexOf(event.currentTarget.dataset.station);
  const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Enter: 0, " ": 0 };
  handleKeys(event, steps, (step) => {
    const id = ids[Math.min(ids.length - 1, Math.max(0, here + step))];
    openStation(id, step === 0);
    places.path.querySelector(`[data-station="${id}"]`).focus({ preventScroll: step === 0 });
  });
}

/** The open station: name, one plain sentence, what it shows, then shapes, formula and code. */
function showStation() {
  const ids = listStations();
  if (!ids.includes(state.station)) state.station = "tokens";
  const { name, layer } = splitStation(state.station);
  const { plain, body, shape, formula, code } = STATIONS[name](layer);
  const here = ids.indexOf(state.station);
  const go = (step, word) =>
    make(
      "button",
      {
        onclick: () => openStation(ids[here + step], true),
        disabled: ids[here + step] === undefined ? "" : null,
        "data-focus": `go-${step}`,
      },
      say(word),
    );
  const facts = [
    ["shape", shape],
    ["formula", formula],
    ["code", `${code[0]}: ${code[1]}`],
  ];
  fill(
    places.station,
    make(
      "div.row",
      {},
      go(-1, "previousStation"),
      make("a.button", { href: "#path" }, say("backToPath")),
      go(1, "nextStation"),
    ),
    make("h3", {}, nameStation(state.station)),
    make("p", {}, plain),
    make(
      "dl.facts",
      {},
      facts
        .filter(([, value]) => value)
        .map(([key, value]) => [make("dt", {}, say(key)), make("dd", {}, make("code", {}, value))]),
    ),
    body,
  );
}

// -- heads by what they do -----------------------------------------------------------------------

const CLEAR_INDUCTION = 3; // times the weight of a head that looks everywhere alike

function showKinds() {
  if (!places.kinds.parentElement.open) return;
  const means = now.heads();
  const heads = means.flatMap((row, layer) => row.map((_, head) => [layer, head]));
  const kinds = {
    previous: ([layer, head]) => means[layer][head].previous,
    first: ([layer, head]) => means[layer][head].first,
    self: ([layer, head]) => means[layer][head].itself,
    induction: ([layer, head]) => means[layer][head].induction,
  };
  const even = now.evenInduction();
  const repeats = !Number.isNaN(even);
  const rankBy = (score) => [...heads].sort((a, b) => score(b) - score(a));
  const cards = Object.entries(kinds).map(([kind, score]) =>
    make(
      "div.kind",
      {},
      make("h4", {}, say(kind)),
      make("p.note", {}, say(`${kind}Help`)),
      kind === "induction" && !repeats
        ? make("p", {}, say("inductionNowhere"))
        : makeBars(
            rankBy(score)
              .slice(0, 3)
              .map((head) => [
                make(
                  "button.plain.link",
                  { onclick: () => openHead(...head, true), "data-focus": `${kind}-${head}` },
                  nameHead(...head),
                ),
                makeBar(["solid", score(head)]),
                formatPercent(score(head)),
              ]),
          ),
      kind === "induction" && repeats
        ? make("p.note", {}, say("inductionEven", { even: formatPercent(even) }))
        : null,
    ),
  );
  const best = repeats ? rankBy(kinds.induction)[0] : null;
  const isClear = repeats && kinds.induction(best) > CLEAR_INDUCTION * even;
  const link = repeats
    ? make("button.plain.link", { onclick: () => openHead(...best, true) }, nameHead(...best))
    : null;
  fill(
    places.kinds,
    make("p", {}, say("kindsHelp")),
    make("div.kinds", {}, cards),
    make("h4", {}, say("tryHeading")),
    make(
      "p",
      {},
      say("tryRepeat"),
      repeats ? [" ", ...say("trySwitch", { head: link })] : "",
      repeats && !isClear ? [" ", ...say("inductionNone")] : "",
    ),
    make(
      "div.row",
      {},
      make("button", { onclick: repeatText, "data-focus": "repeat" }, say("repeat")),
      repeats
        ? makeSwitch(isHeadOff(state.off, ...best), "heads", best, "induction-switch")
        : null,
    ),
    showHalves(),
    make("h4", {}, say("mapsHeading")),
    make("p.note", {}, say("mapsHelp"), " ", say("mapHelp")),
    means.map((row, layer) =>
      make(
        "div",
        {},
        make("small", {}, say("layerName", { layer })),
        make(
          "div.tiles",
          {},
          row.map((_, head) =>
            makeHeadTile(layer, head, layer === state.headLayer && head === state.head),
          ),
        ),
      ),
    ),
  );
}

/** How well the model expects each half of the text: the second repeats the first, if it does. */
function showHalves() {
  const half = Math.floor(now.T / 2);
  const rate = (entries, from, to) => {
    let sum = 0;
    for (let t = from; t < to; t++) sum += softmax(entries[t - 1].logits)[now.tokens[t]];
    return sum / (to - from);
  };
  if (half < 2) return null;
  const rows = [
    ["firstHalf", 1, half],
    ["secondHalf", half + 1, now.T],
  ].map(([name, from, to]) => {
    const after = rate(now.entries, from, to);
    if (now.before === null) return [say(name), makeBar(["solid", after]), formatPercent(after)];
    const before = rate(readers.whole.record, from, to);
    const change = `${formatPercent(before)} → ${formatPercent(after)}`;
    return [say(name), makeBar(["solid", after], ["before", before]), change];
  });
  return make("div.halves", {}, make("p", {}, say("halvesHelp")), makeBars(rows));
}

// -- what is switched off ------------------------------------------------------------------------

/** What switching off did to the token that came, or to the likeliest: "␣the 42 % → 3 %". */
function makeChange() {
  if (now.before === null || now.rows === null) return null;
  const { token, probability } = now.rows.find((row) => row.token === now.target);
  const values = {
    token: label(token),
    before: formatPercent(now.before.get(token)),
    after: formatPercent(probability),
  };
  return make("span.change", {}, say("changed", values));
}

/** The bar at the bottom of the window: what is off, what that did, and the way back. */
function showOffBar() {
  const off = listOff();
  places.off.hidden = off.length === 0;
  fill(
    places.off,
    say("offNow"),
    off.map(([list, item]) =>
      make(
        "button",
        { onclick: () => toggleOff(list, item), title: sayText("switchOn") },
        nameOff(list, item),
        " ×",
      ),
    ),
    makeChange(),
    make("button", { onclick: switchAllOn, "data-focus": "all-on" }, say("allOn")),
  );
}

function nameOff(list, item) {
  if (list === "heads") return nameHead(...item);
  if (list === "mlps") return `${sayText("layerName", { layer: item })} MLP`;
  if (list === "layers") return sayText("layerName", { layer: item });
  const [layer, head, query, key] = item;
  return sayText(layer === null ? "cutNameAll" : "cutName", { layer, head, query, key });
}

function showCause() {
  if (!places.cause.parentElement.open) return;
  const parts = attribute(now.gpt, now.entry, now.target);
  const sum = (numbers) => numbers.flat().reduce((total, x) => total + x, 0);
  const scale = findScale(parts.heads.flat(), parts.mlps);
  const cell = (list, item, name, share) => {
    const isOff = isListed(list, item) || isLayerOff(state.off, list === "heads" ? item[0] : item);
    const button = make(
      `button.cell${isOff ? ".off" : ""}`,
      {
        "aria-pressed": String(isListed(list, item)),
        "data-focus": `cell-${list}-${item}`,
        onclick: () => toggleOff(list, item),
      },
      make("span", {}, name),
      share === null ? null : make("b", {}, formatReal(share, 2)),
    );
    if (share !== null) {
      button.style.setProperty("--share", `${Math.round((70 * Math.abs(share)) / scale)}%`);
      button.classList.add(share < 0 ? "down" : "up");
    }
    return button;
  };
  const rows = range(now.config.n_layer).map((layer) =>
    make(
      "div.parts",
      {},
      make("small", {}, say("layerName", { layer })),
      parts.heads[layer].map((share, head) =>
        cell("heads", [layer, head], sayText("headName", { head }), share),
      ),
      cell("mlps", layer, "MLP", parts.mlps[layer]),
      cell("layers", layer, sayText("wholeLayer"), null),
    ),
  );
  const sums = {
    embedding: formatReal(parts.embedding, 2),
    position: formatReal(parts.position, 2),
    heads: formatReal(sum(parts.heads), 2),
    mlps: formatReal(sum(parts.mlps), 2),
    biases: formatReal(sum(parts.attnBiases) + parts.normBias, 2),
    logit: formatReal(now.entry.logits[now.target], 2),
  };
  fill(
    places.cause,
    make("p", {}, say("causeHelp", { token: label(now.target) })),
    rows,
    make("p.note", {}, say("causeSum", sums)),
    make("h4", {}, say("beforeAfter")),
    makeExpectation(),
  );
}
