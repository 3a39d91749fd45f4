// -- how a head computes what it adds ------------------------------------------------------------
// page.py puts this file into page.html. Letters: T tokens, H query heads in each of L layers, G KV
// heads, K numbers of a head, R numbers of the residual stream; q is a query, k a key.

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const add = (a, b) => a.map((x, i) => x + b[i]);
const maxOf = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const largestOf = (values) => maxOf(values.map(Math.abs)) || 1;
function formatReal(x, digits = 3) {
  if (!Number.isFinite(x)) return "−∞";
  return x.toFixed(Math.abs(x) < 1000 ? digits : 0).replace("-", "−");
}
const formatTurn = (angle) => `${formatNumber(angle).replace("-", "−")} rad`;

// Return the chances of scores; -∞ has none.
function softmax(scores) {
  const largest = maxOf(scores);
  const powers = scores.map((score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}
// Turn the pair (x, y) by an angle.
const turn = ([x, y], angle) => [
  x * Math.cos(angle) - y * Math.sin(angle),
  x * Math.sin(angle) + y * Math.cos(angle),
];

// The numbers of a vector as bars around zero.
function drawBars(values) {
  const scale = 46 / largestOf(values);
  const bars = Array.from(values, (x, i) => `M${i + .1} 50h.8v${(-scale * x).toFixed(2)}h-.8z`);
  return make("svg.vector", {
    viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none", "aria-hidden": true,
  }, make("path", {d: `M0 49h${values.length}v2H0z${bars.join("")}`}));
}
// A named vector: bars and, on demand, numbers. `update` shows other values in it.
function makeVector(name) {
  const spread = make("small");
  const bars = make("div");
  const readout = make("small");
  const numbers = make("div.numbers");
  const details = make("details", {}, make("summary", {}, "Numbers"), numbers);
  let values = [];
  bars.addEventListener("pointermove", (event) => {
    const box = bars.getBoundingClientRect();
    const i = Math.floor((event.clientX - box.left) / box.width * values.length);
    if (i in values) readout.textContent = ` · number ${i}: ${formatReal(values[i], 4)}`;
  });
  bars.addEventListener("pointerleave", () => readout.replaceChildren());
  const element = make("figure", {}, make("figcaption", {}, make("b", {}, name), " ", spread,
    readout), bars, details);
  function update(newValues) {
    if (!values.length) details.open = newValues.length <= 16;
    values = Array.from(newValues);
    const low = values.reduce((a, b) => Math.min(a, b));
    spread.textContent = `${formatCount(values.length, "number")}, ${formatReal(low)} to `
      + `${formatReal(maxOf(values))}; length ${formatReal(Math.sqrt(dot(values, values)))}`;
    bars.replaceChildren(drawBars(values));
    numbers.replaceChildren(...values.map((x) => make("span", {}, formatReal(x))));
  }
  return {element, update};
}
// A number and its bar, which begins at zero in the middle.
function makeSigned(x, largest) {
  const share = Number.isFinite(x) ? 50 * x / largest : 0;
  const style = {left: `${50 + Math.min(0, share)}%`, width: `${Math.abs(share)}%`};
  return make("span.signed", {}, formatReal(x),
    make(Number.isFinite(x) ? "span.bar" : "span.bar.hatched", {}, make("i", {style})));
}

// A pair of numbers as a point in the plane, before and after RoPE turns it by an angle.
function drawPlane(before, after, angle) {
  const radius = Math.hypot(...before) || 1;
  const place = ([x, y], share = 1) =>
    `${(100 * share * x / radius).toFixed(1)} ${(-100 * share * y / radius).toFixed(1)}`;
  const rest = angle % (2 * Math.PI);
  const arc = range(49).map((n) => place(turn(before, rest * n / 48), .45));
  const mark = (point, style) => {
    const [cx, cy] = place(point).split(" ");
    return make(`circle.${style}`, {cx, cy, r: 7});
  };
  return make("svg.plane", {viewBox: "-115 -115 230 230", "aria-hidden": true},
    make("line.axis", {x1: -112, x2: 112, y1: 0, y2: 0}),
    make("line.axis", {x1: 0, x2: 0, y1: -112, y2: 112}),
    make("circle.ring", {cx: 0, cy: 0, r: 100}),
    make("path.curve.dashed", {d: `M0 0L${place(before)}`}), mark(before, "open"),
    make("path.curve", {d: `M0 0L${place(after)}`}), mark(after, "closed"),
    make("path.curve.turned", {d: `M${arc.join("L")}`}));
}

// `reading` has what the rest of the page knows and does: see buildReading.
function buildArithmetic(part, reading) {
  const {H, K, T, labelAt, nameAt} = reading;
  const {layers, notes, frequencies, slopes} = part;
  const L = layers.length;
  const MAX_FULL_TABLE = 16;  // keys; a longer table begins with the strongest of them
  const STRONGEST_KEYS = 12;
  let layer;
  let head;  // in its layer
  let q;
  let all = false;  // whether all keys are shown

  // The numbers of a layer, unpacked when it is first shown.
  function numbersOf(n) {
    const raw = layers[n];
    raw.unpacked ??= Object.fromEntries(Object.entries(raw).map(([name, text]) =>
      [name, new Float32Array(decodeBase64(text).buffer)]));
    return raw.unpacked;
  }
  // Row n of an array of rows that are `width` long.
  const row = (array, n, width) => array.subarray(n * width, (n + 1) * width);
  const queryOf = (h) => row(numbersOf(layer).q, h * T + q, K);
  const keyOf = (h, k) => row(numbersOf(layer).k, reading.kvHeadOf(h) * T + k, K);
  const valueOf = (h, k) => row(numbersOf(layer).v, reading.kvHeadOf(h) * T + k, K);

  // All that a head computes for the query, one array over keys for each step.
  function compute(h) {
    const raw = range(T).map((k) => dot(queryOf(h), keyOf(h, k)));
    const scaled = raw.map((score) => score / Math.sqrt(K));
    const bias = range(T).map((k) => slopes ? -slopes[h] * (q - k) : 0);
    const biased = add(scaled, bias);
    const masked = biased.map((score, k) => reading.sees(layer, q, k) ? score : -Infinity);
    const weights = softmax(masked);
    let mixed = new Array(K).fill(0);
    weights.forEach((weight, k) => {
      if (weight) mixed = add(mixed, Array.from(valueOf(h, k), (x) => weight * x));
    });
    const matrix = numbersOf(layer).output_weight;
    const R = numbersOf(layer).output_bias.length;
    const output = range(R).map((r) =>
      dot(mixed, matrix.subarray(r * H * K + h * K, r * H * K + (h + 1) * K)));
    return {raw, scaled, bias, masked, weights, mixed, output};
  }

  // The choices.
  const choice = (name, count, text, onchange) => make("select", {"aria-label": name, onchange},
    range(count).map((n) => make("option", {value: n}, text(n))));
  const pick = () => reading.pick(Number(layerChoice.value) * H + Number(headChoice.value));
  const layerChoice = choice("Layer", L, (n) => `layer ${n}`, pick);
  const headChoice = choice("Head", H, (n) => `head ${n}`, pick);
  const tokenChoice = choice("Token", T, (k) => `token ${k}: ${nameAt(k)}`,
    () => reading.choose(Number(tokenChoice.value)));
  const step = (by, name, sign) => make("button", {"aria-label": name,
    onclick: () => reading.choose(Math.min(T - 1, Math.max(0, q + by)))}, sign);
  const title = make("h3");

  // 1. Query, key and value.
  const vectors = {q: makeVector("q"), k: makeVector("k"), v: makeVector("v")};

  // 2. Positions.
  let keyChosen = null;  // the key that is turned; null: the one with the largest weight
  let key = 0;
  const slider = (name, max, oninput) =>
    make("input", {type: "range", min: 0, max, value: 0, "aria-label": name, oninput});
  const pairSlider = slider("Pair", K / 2 - 1, () => showTurn());
  const keySlider = slider("Key", T - 1, () => {
    keyChosen = Number(keySlider.value);
    showTurn();
  });
  const pairText = make("span");
  const keyText = make("span");
  const planes = make("div.planes");
  const share = make("p");
  const turning = make("div", {}, make("div.row.sliders", {},
    make("label", {}, pairSlider, pairText), make("label", {}, keySlider, keyText)), planes, share);
  function showTurn() {
    if (!frequencies) return;
    const pair = Number(pairSlider.value);
    const frequency = frequencies[pair];
    const pairOf = (vector) => [vector[pair], vector[pair + K / 2]];
    const turnOne = (name, vector, position) => {
      const after = pairOf(vector);
      const angle = position * frequency;
      const before = turn(after, -angle);
      const degrees = angle * 180 / Math.PI;
      const turns = Math.floor(degrees / 360);
      const rest = turns ? `, which is ${formatCount(turns, "turn")} and `
        + `${formatReal(degrees - 360 * turns, 1)}°` : "";
      const points = [before, after].map((point) =>
        `(${point.map((x) => formatReal(x)).join(", ")})`);
      const figure = make("figure", {},
        make("figcaption", {}, make("b", {}, name), " of token ", labelAt(position),
          ` at position ${position}`),
        drawPlane(before, after, angle),
        make("p.note", {}, `turned by ${position} · ${formatTurn(frequency)} = `
          + `${formatTurn(angle)} = ${formatReal(degrees, 1)}°${rest}: from ${points[0]}, hollow, `
          + `to ${points[1]}, filled`));
      return {before, after, figure};
    };
    key = keyChosen ?? key;
    keySlider.value = key;
    pairText.textContent = `pair ${pair} of ${K / 2}: numbers ${pair} and ${pair + K / 2}, `
      + `${formatTurn(frequency)} for each position`;
    keyText.replaceChildren(`key at position ${key} `, labelAt(key));
    const query = turnOne("q", queryOf(head), q);
    const found = turnOne("k", keyOf(head, key), key);
    planes.replaceChildren(query.figure, found.figure);
    share.textContent = `This pair's share of the score q·k: `
      + `${formatReal(dot(query.after, found.after))}; without turning it would be `
      + `${formatReal(dot(query.before, found.before))}. The two are turned apart by `
      + `(${q} − ${key}) · ${formatTurn(frequency)} = ${formatTurn((q - key) * frequency)}: `
      + "only their distance counts.";
  }
  const slopeBars = make("div.bars");
  function showSlopes() {
    if (!slopes) return;
    slopeBars.replaceChildren(...slopes.flatMap((slope, h) => [
      make(h === head ? "span.came" : "span", {}, `head ${h}`),
      makeBar(slope / maxOf(slopes)),
      make("span", {}, `slope ${formatNumber(slope)}`),
    ]));
  }

  // 3. Scores and weights, a row for each key.
  const scores = make("tbody");
  const hidden = make("p.note");
  const toggle = make("button", {"aria-pressed": false, onclick: () => {
    all = !all;
    toggle.setAttribute("aria-pressed", all);
    show(q, layer * H + head, true);
  }}, `show all ${T} keys`);
  function showScores({raw, scaled, bias, masked, weights}) {
    const strongest = range(T).sort((a, b) => weights[b] - weights[a] || a - b);
    if (keyChosen === null) key = strongest[0];
    const seen = range(T).filter((k) => reading.sees(layer, q, k));
    let rows = range(T);
    if (!all && T > MAX_FULL_TABLE) {
      const few = strongest.slice(0, STRONGEST_KEYS).filter((k) => reading.sees(layer, q, k));
      rows = rows.filter((k) => few.includes(k) || k === q + 1 || k === seen[0] - 1);
    }
    const shown = (values) => rows.map((k) => values[k]);
    const largest = largestOf([raw, scaled, bias].flatMap(shown));
    scores.replaceChildren(...rows.map((k) => {
      const isSeen = reading.sees(layer, q, k);
      const why = k > q ? "comes later" : "outside the window";
      return make(isSeen ? "tr" : "tr.unseen", {},
        make("th", {scope: "row"}, make("small", {}, `${k} `), labelAt(k),
          k === q ? make("small", {}, " itself") : null),
        make("td", {}, drawBars(keyOf(head, k))),
        make("td", {}, makeSigned(raw[k], largest)),
        make("td", {}, makeSigned(scaled[k], largest)),
        slopes ? make("td", {}, makeSigned(bias[k], largest)) : null,
        make("td", {title: isSeen ? "" : why}, makeSigned(masked[k], largest)),
        make("td", {}, make("span.signed", {}, weights[k].toFixed(4), makeBar(weights[k]))),
        make("td", {}, drawBars(valueOf(head, k))));
    }));
    const rest = seen.filter((k) => !rows.includes(k));
    const sum = rest.reduce((total, k) => total + weights[k], 0);
    const tooOld = q + 1 - seen.length;
    const sentences = [
      rest.length ? `${formatCount(rest.length, "more key")} with weights of `
        + `${sum.toFixed(4)} together.` : "",
      q < T - 1 ? `Masked because they come later: ${formatCount(T - 1 - q, "token")}.` : "",
      tooOld ? `Masked because they are outside the window: ${formatCount(tooOld, "token")}.` : "",
      `The weights sum to ${weights.reduce((a, b) => a + b, 0).toFixed(4)}.`,
    ];
    hidden.textContent = sentences.filter(Boolean).join(" ");
  }
  const columns = [
    ["key", "looked at"], ["k", "its key"], ["q·k", "raw score"],
    [`÷ √${K}`, "scaled"], slopes ? ["bias", "of position"] : null, ["mask", "masked"],
    ["softmax", "weight"], ["v", "its value"],
  ].filter(Boolean);
  const table = make("table.scores", {}, make("thead", {}, make("tr", {}, columns.map(([a, b]) =>
    make("th", {scope: "col"}, a, make("small", {}, b))))), scores);

  // 4. and 5. What the head mixes, and what o_proj makes of it.
  const mixed = makeVector("Σ weight · v");
  const outputs = {
    head: makeVector("what this head adds"),
    all: makeVector("what all heads add"),
    before: makeVector("residual stream before"),
    after: makeVector("residual stream after"),
  };
  const ofHeads = make("div.bars");
  const check = make("p.note");
  function showOutput(heads) {
    const {stream, added, output_bias: bias} = numbersOf(layer);
    const R = bias.length;
    const sum = heads.reduce((total, each) => add(total, each.output), Array.from(bias));
    const before = row(stream, q, R);
    mixed.update(heads[head].mixed);
    outputs.head.update(heads[head].output);
    outputs.all.update(sum);
    outputs.before.update(before);
    outputs.after.update(add(Array.from(before), sum));
    const lengths = heads.map(({output}) => Math.sqrt(dot(output, output)));
    ofHeads.replaceChildren(...lengths.flatMap((length, h) => [
      make(h === head ? "span.came" : "span", {}, `head ${h}`),
      makeBar(length / largestOf(lengths)),
      make("span", {}, formatReal(length)),
    ]));
    const offBy = maxOf(sum.map((x, r) => Math.abs(x - added[q * R + r])));
    const offMap = maxOf(heads[head].weights.map((weight, k) =>
      k > q ? 0 : Math.abs(weight - reading.mapWeight(layer * H + head, q, k))));
    check.textContent = "Checked here: what all heads add differs from what the model's own layer "
      + `added by at most ${offBy.toExponential(0)}, and the weights from those of the map, which `
      + `are rounded to 8 bits, by at most ${offMap.toFixed(4)}.`;
  }

  const steps = make("div", {},
    make("h4", {}, "1. Query, key and value"), make("p.note", {}, notes.vectors),
    make("div.vectors", {}, Object.values(vectors).map((vector) => vector.element)),
    make("h4", {}, "2. Position"), make("p.note", {}, notes.position),
    frequencies ? turning : null, slopes ? slopeBars : null,
    make("h4", {}, "3. Scores and weights"), make("p.note", {}, notes.scores),
    make("div.scroll.table", {tabindex: 0, role: "group", "aria-label": "Scores"}, table), hidden,
    T > MAX_FULL_TABLE ? toggle : null,
    make("h4", {}, "4. The weighted sum of the values"), make("p.note", {}, notes.mixed),
    make("div.vectors", {}, mixed.element),
    make("h4", {}, "5. What it adds to the residual stream"), make("p.note", {}, notes.output),
    make("div.vectors.wide", {}, Object.values(outputs).map((vector) => vector.element)),
    make("p", {}, "Length of what each head adds:"), ofHeads, check);
  const missing = make("p");

  // Show the arithmetic of a query in a head, numbered through all layers.
  let shown = null;
  function show(query, globalHead, again) {
    if (!again && shown === `${query} ${globalHead}`) return;
    shown = `${query} ${globalHead}`;
    q = query;
    layer = Math.floor(globalHead / H);
    head = globalHead % H;
    layerChoice.value = layer;
    headChoice.value = head;
    tokenChoice.value = q;
    title.replaceChildren(`The arithmetic of layer ${layer}, head ${head}, for token ${q} `,
      labelAt(q));
    steps.hidden = !layers[layer];
    missing.textContent = layers[layer] ? "" : `This page has no numbers of layer ${layer}.`;
    if (!layers[layer]) return;
    const heads = range(H).map(compute);
    vectors.q.update(queryOf(head));
    vectors.k.update(keyOf(head, q));
    vectors.v.update(valueOf(head, q));
    showScores(heads[head]);
    showTurn();
    showSlopes();
    showOutput(heads);
  }
  const card = make("section.card.arithmetic", {id: "arithmetic"}, title,
    make("p.note", {}, "Follow one head at work. q, k and v are the model's own; this page "
      + "computes the rest from them."),
    make("div.row", {}, layerChoice, headChoice, step(-1, "Token before", "◂"), tokenChoice,
      step(1, "Token after", "▸")),
    make("p.note", {}, notes.partial), missing, steps);
  return {card, show};
}

// The tokens whose embeddings point most nearly the same way as that of a token.
function buildNeighbors(part, reading) {
  const title = make("h3");
  const bars = make("div.bars");
  const byToken = new Map(part.neighbors.map(([n, ...found]) => [n, found]));
  function show(q) {
    const [tokens, cosines] = byToken.get(reading.tokens[q]);
    title.replaceChildren("The nearest embeddings to ", reading.labelAt(q));
    bars.replaceChildren(...tokens.flatMap((n, place) => [
      make("span", {}, make("small", {}, `${place + 1} `), reading.label(n)),
      makeBar(Math.max(0, cosines[place])),
      make("span", {}, cosines[place].toFixed(2).replace("-", "−")),
    ]));
  }
  const card = make("section.card.near", {}, title, bars, make("p.note", {}, part.notes.near));
  return {card, show};
}
