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
  if (now.rows === null) return make("p", say("noToken"));
  const rows = selectExpected();
  const came = now.rows.find(({ token }) => token === now.next);
  // The row of what came has its place, so that nothing below moves.
  const isApart = came && !rows.includes(came);
  const last = isApart ? makeExpectedRow(came) : make("div.expected.empty", "\u00a0");
  return make("div.bars", rows.map(makeExpectedRow), last);
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
  const why = removedBy === null || before !== undefined ? null : make("small", say(removedBy));
  return make(
    `div.expected${classes}`,
    { "data-token": token },
    label(token),
    makeBar(...parts),
    make("span.number", why, why && " ", make("span", number)),
  );
}

function mapChances(rows) {
  return new Map(rows.map(({ token, probability }) => [token, probability]));
}

function showExpectation() {
  let outcome = say("expectOpen");
  if (now.next !== null && now.rows !== null) {
    const rank = now.rows.findIndex(({ token }) => token === now.next);
    const chance = formatPercent(now.rows[rank].probability);
    outcome = say("expectCame", { token: label(now.next), chance, rank: rank + 1 });
  } else if (continuation.finishReason !== null) {
    outcome = say(`finished.${continuation.finishReason}`);
  }
  const temperature = getTemperature();
  const key = (name) => make(`i.key.${name}`);
  fill(places.expectHeading, say("expectHeading", { token: label(now.tokens[now.at]) }));
  fill(places.outcome, outcome);
  fill(
    places.expect,
    make(
      "p.note",
      say("barsHelp", { pale: key("pale"), temperature, solid: key("solid") }),
      now.before ? say("barsHelpBefore", { before: key("before") }) : "",
    ),
    makeExpectation(),
  );
}

// -- the path ------------------------------------------------------------------------------------

/** Ids of all stations, in the order of the path: "tokens", "embed", "attn:0", "mlp:0", … */
function listStations() {
  const layers = range(now.config.n_layer).flatMap((layer) => [`attn:${layer}`, `mlp:${layer}`]);
  return ["tokens", "embed", ...layers, "head", "draw"];
}

function splitStation(id) {
  const [name, layer] = id.split(":");
  return { name, layer: layer === undefined ? null : Number(layer) };
}

function nameStation(id) {
  const { name, layer } = splitStation(id);
  const words = sayText(name);
  return layer === null ? words : `${sayText("layerName", { layer })}: ${words}`;
}

/** The stations as a list: of the layers one is large, and of each other there is a line. */
function showPath() {
  const { layer: open } = splitStation(state.station);
  if (open !== null) state.layer = open;
  const large = Math.min(state.layer, now.config.n_layer - 1);
  const streams = [...now.entry.layers.map(({ x }) => x), now.entry.x];
  const chances = streams.map(readEarly);
  const guess = (n) => make("small.guess", sayGuess(chances[n]));
  const ranks = chances.map((each) => 1 + each.filter((p) => p > each[now.target]).length);
  const station = (id, name, info, isOff = false) =>
    make(
      `button.station${isOff ? ".off" : ""}`,
      {
        "aria-pressed": String(id === state.station),
        "data-focus": `station-${id}`,
        "data-station": id,
        onclick: () => openStation(id),
      },
      make("span", name),
      info,
    );
  const note = (words) => make("small", words);
  const part = (id, name, layer, isOff) => {
    const length = formatReal(measureLength(now.entry.layers[layer][name]), 1);
    return make(
      "li.part",
      station(id, say("throughNorm", { part: say(name) }), note(say("adds", { length })), isOff),
    );
  };
  const layers = range(now.config.n_layer).map((layer) => {
    const isOff = isLayerOff(state.off, layer);
    const name = say("layerName", { layer });
    if (layer !== large)
      return make("li.stream.line", station(`attn:${layer}`, name, guess(layer + 1), isOff));
    return make(
      "li.stream.layer",
      make("div", make("b", name), guess(layer + 1)),
      make(
        "ol",
        part(`attn:${layer}`, "attn", layer, areHeadsOff(layer)),
        part(`mlp:${layer}`, "mlp", layer, isMlpOff(state.off, layer)),
      ),
    );
  });
  const list = make(
    "ol",
    { "aria-label": sayText("pathHeading") },
    make("li", station("tokens", say("tokens"), note(formatCount(now.T)))),
    make("li.stream", station("embed", say("embed"), guess(0))),
    layers,
    make("li", station("head", say("head"), note(sayTop(expect(now.entry.logits))))),
    make("li", station("draw", say("draw"), note(`${sayText("seed")} ${state.sample.seed}`))),
  );
  rove(list, (button) => openStation(button.dataset.station, false));
  fill(
    places.path,
    list,
    make("p.ranks", say("ranks", { token: label(now.target), ranks: ranks.join(" → ") })),
    make("p.note", say("streamHelp", { width: now.config.d_model })),
  );
  fill(places.pathHelp, say("pathHelp", { token: labelAt(now.at) }));
}

/** What the model would say, of what `readEarly` reads: "would say the 12 %". */
function sayGuess(chances) {
  return sayText("wouldSay", { top: sayTop(chances) });
}

function sayTop(probabilities) {
  const best = findLargest(probabilities);
  return `${shorten(spellText(best), 10)} ${formatPercent(probabilities[best])}`;
}

function shorten(text, length) {
  const characters = [...text];
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : text;
}

function areHeadsOff(layer) {
  return range(now.config.n_head).every((head) => isHeadOff(state.off, layer, head));
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
  const facts = { shape, formula, code: `${code[0]}: ${code[1]}` };
  fill(
    places.station,
    make("h3", nameStation(state.station)),
    make("p", plain),
    body,
    makeStep("facts", say("factsHeading"), () => makeFacts(facts)),
    make("div.row.go", go(-1, "previousStation"), go(1, "nextStation")),
  );
}

/** A list of names and what stands in code under each. */
function makeFacts(facts) {
  const pairs = Object.entries(facts).filter(([, value]) => value);
  return make(
    "dl.facts",
    pairs.map(([key, value]) => [make("dt", say(key)), make("dd", make("code", value))]),
  );
}

/** A step of a station, which is made when it opens. One is open, and stays so at each update. */
function makeStep(name, title, fill) {
  const step = makeFold(make("h4", title), fill);
  step.setAttribute("name", "step");
  step.firstChild.dataset.focus = `step-${name}`;
  if (state.opened === name) {
    step.append(fill());
    step.open = true;
  }
  step.addEventListener("toggle", () => {
    if (step.open) state.opened = name;
    else if (step.isConnected && state.opened === name) state.opened = null;
  });
  return step;
}

// -- heads by what they do -----------------------------------------------------------------------

/** The kinds of places that heads are asked about; induction only where the text repeats itself. */
function listKinds() {
  return ["previous", "first", "itself", ...(now.repeats() ? ["induction"] : [])];
}

/** What a head mostly looks at on this text; "" where nothing stands out. */
function describeHead(layer, head) {
  const shares = now.heads()[layer][head];
  const [kind] = listKinds().sort((a, b) => shares[b] - shares[a]);
  return shares[kind] > 0.35 ? sayText(kind) : "";
}

/** A table with a row for each head and a column for each kind of place that it may look at. */
function showKinds() {
  if (!places.kinds.parentElement.open) return;
  const heads = now
    .heads()
    .flatMap((row, layer) => row.map((shares, head) => ({ layer, head, shares })));
  const kinds = listKinds();
  const rows = heads.map(({ layer, head, shares }) =>
    makeRow(
      `kinds-${layer}-${head}`,
      [drawHead(make("canvas.hatched"), layer, head, 64), nameHead(layer, head)],
      kinds.map((kind) => [makeBar(["solid", shares[kind]]), formatPercent(shares[kind])]),
      layer === state.headLayer && head === state.head,
      () => openHead(layer, head, true),
    ),
  );
  const columns = [say("toKinds"), ...kinds.map((name) => say(name))];
  fill(places.kinds, make("p", say("kindsHelp")), makeTable("kinds", columns, rows));
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
  return make("span.change", say("changed", values));
}

/** The bar at the bottom of the window: what is off, what that did, and the way back. */
function showOffBar() {
  const off = listOff();
  places.off.hidden = off.length === 0;
  fill(
    places.off,
    say(now.other ? "offTaken" : "offNow"),
    off.map(([list, item]) =>
      make("button", { onclick: () => toggleOff(list, item) }, nameOff(list, item), " ×"),
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
  const where = layer === null ? sayText("allHeads") : nameHead(layer, head);
  return `${where}: ${query} → ${key}`;
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
      make("span", name),
      share === null ? null : make("b", formatReal(share, 2)),
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
      make("small", say("layerName", { layer })),
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
    mean: formatReal(dot(now.entry.hidden, 0, now.gpt.meanHead, 0, now.config.d_model), 2),
  };
  fill(
    places.cause,
    make("p.note", say("otherHelp", { here: now.T, there: now.other?.length ?? 0 })),
    make("p", say("causeHelp", { token: label(now.target) })),
    rows,
    make("p.note", say("causeSum", sums)),
  );
  rove(places.cause);
}
