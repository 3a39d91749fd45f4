// The stations of the path: what each shows when it is open. Each function returns elements, made
// from `now` (what the model computes on the text) and `state` (what the reader chose), see page.js.
//
// Letters as in model.js; `layer` is a number from 0.
"use strict";

const MAX_NEURONS = 10; // in the table

// -- tokens as elements --------------------------------------------------------------------------

/** Spell a token as [text, isSymbol] pairs.
 *
 * Symbols stand for white space, for bytes that are no character, and for invisible ones.
 */
function spell(token) {
  if (!spellings.has(token)) spellings.set(token, spellAnew(token));
  return spellings.get(token);
}

const spellings = new Map();

function spellAnew(token) {
  const special = Object.entries(tokenizer.specialTokens).find(([, number]) => number === token);
  if (special) return [[special[0], true]];
  const bytes = tokenizer.decodeToken(token);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return Array.from(bytes, (byte) => [
      `‹${byte.toString(16).toUpperCase().padStart(2, "0")}›`,
      true,
    ]);
  }
  return text === "" ? [["∅", true]] : spellCharacters(text);
}

function spellCharacters(text) {
  const symbols = { " ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥" };
  return text
    .split(/([ \n\r\t]|\p{Cc}|\p{Cf})/u)
    .filter(Boolean)
    .map((part) => {
      if (part in symbols) return [symbols[part], true];
      const isInvisible = /^[\p{Cc}\p{Cf}]$/u.test(part);
      return isInvisible
        ? [`‹${part.codePointAt(0).toString(16).toUpperCase()}›`, true]
        : [part, false];
    });
}

function spellNodes(token) {
  return spell(token).map(([text, isSymbol]) => (isSymbol ? make("span.symbol", text) : text));
}

function label(token) {
  return make("span.label", spellNodes(token));
}

function spellText(token) {
  return spell(token)
    .map(([text]) => text)
    .join("");
}

/** A token of the text with its place: two of one spelling are told apart. */
function labelAt(place) {
  return make("span.place", make("small", `${place} `), label(now.tokens[place]));
}

/** The tokens of the text as boxes, filled by `shares` (T,) of 0 to 1, or null where blind. */
function shadeTokens(shares, titles) {
  const chips = now.tokens.map((token, place) => {
    const chip = makeChip(token, place, "shade", titles(place));
    if (shares[place] === null) chip.classList.add("hatched");
    else tint(chip, shares[place]);
    return chip;
  });
  return rove(make("div.chips", { role: "group" }, chips), (chip) => chip.click());
}

/** A token of the text as a button that selects its place; `group` names what it is one of. */
function makeChip(token, place, group, title) {
  return make(
    "button.chip",
    {
      "aria-pressed": String(place === now.at),
      title,
      "data-focus": `${group}-${place}`,
      onclick: () => choose({ place, key: null }),
    },
    spellNodes(token),
  );
}

// -- what several stations need ------------------------------------------------------------------

/** What a vector (D,) that is added to the stream adds to the logits (V,), less its mean over them. */
function readThroughHead(vector) {
  const { head, meanHead } = now.gpt;
  const read = passFinalNorm(now.gpt, now.entry, vector);
  const shared = dot(read, 0, meanHead, 0, read.length);
  return multiply(read, head, null, 1).map((logit) => logit - shared);
}

/** What the head would expect if the model ended with this stream (D,): probabilities (V,). */
function readEarly(stream) {
  return expect(now.gpt.computeLogits(now.gpt.finalNorm.forward(stream), 1));
}

const MIN_CHANCE = 1e-5; // tokens that training never met stay below it

/** The tokens that a vector raises and lowers most, of those that may come here at all. */
function showPushes(vector) {
  const logits = readThroughHead(vector);
  const chances = softmax(now.entry.logits);
  const order = findTop(logits, logits.length).filter((token) => chances[token] >= MIN_CHANCE);
  const rows = [
    ["raises", order.filter((token) => logits[token] > 0).slice(0, 5)],
    [
      "lowers",
      order
        .filter((token) => logits[token] < 0)
        .slice(-5)
        .reverse(),
    ],
  ];
  return rows.map(([name, tokens]) =>
    make(
      "p.pushes",
      make("b", say(name)),
      tokens.map((token) => [" ", label(token), make("small", ` ${formatReal(logits[token], 2)}`)]),
    ),
  );
}

const MODEL = "gptmini/model/";
const GENERATE = "gptmini/generate/";

// Each station: name, plain sentence, shapes, formula, [file, line of Python], what it shows.
const STATIONS = {
  tokens: () => {
    const text = getText();
    const counts = {
      characters: formatCount([...text].length),
      bytes: formatCount(new TextEncoder().encode(text).length),
      tokens: formatCount(now.T),
    };
    return {
      plain: [
        ...say("tokensPlain", { vocabulary: formatCount(tokenizer.vocabSize) }),
        " ",
        ...say(TOKENIZER_WORDS[tokenizer.kind] ?? "tokenizerBpe"),
      ],
      body: [
        make("p", say("textFacts", counts)),
        range(now.T)
          .slice(Math.max(0, now.at - 4), now.at + 5)
          .map((place) => make("div", labelAt(place), ` → ${formatCount(now.tokens[place])}`)),
      ],
      shape: `text → (T,) = (${now.T},)`,
      code: [
        "gptmini/tokenizer/tokenizers.py",
        "def encode(self, text: str, continues: bool = False) -> Tokens:",
      ],
    };
  },

  embed: () => {
    const { embedding, positionEmbedding, token, position } = now.entry;
    const D = now.config.d_model;
    const vectors = { [sayText("embedVector", { token: label(token) })]: embedding };
    if (positionEmbedding) {
      vectors[sayText("positionVector", { place: position })] = positionEmbedding;
    }
    const hints = { learned: "embedLearned", none: "nonePlain" };
    return {
      plain: say("embedPlain", { width: D }),
      body: [
        make(
          "p",
          say(hints[now.config.position] ?? "embedLater"),
          now.config.tie_embeddings ? [" ", ...say("tiedHelp")] : "",
        ),
        makeVectors(vectors),
      ],
      shape: `(T,) → (T, D) = (${now.T}, ${D})`,
      formula: positionEmbedding ? "x = embed[token] + positions[position]" : "x = embed[token]",
      code: [`${MODEL}gpt.py`, "x = self.embed(tokens)  # (B, T, D)"],
    };
  },

  attn: (layer) => showAttention(layer),

  mlp: (layer) => showMlp(layer),

  head: () => {
    const { x, logits } = now.entry;
    const D = now.config.d_model;
    const chances = expect(logits);
    return {
      plain: [
        ...say("headPlain", { vocabulary: formatCount(logits.length) }),
        now.config.tie_embeddings ? [" ", ...say("headTied")] : "",
      ],
      body: [
        make("p", say("softmaxPlain", { temperature: getTemperature() })),
        makeBars(
          findTop(logits, 8).map((token) => [
            label(token),
            makeBar(["solid", chances[token]]),
            `${formatReal(logits[token], 2)} → ${formatPercent(chances[token])}`,
          ]),
        ),
        showNorm(now.gpt.finalNorm, x),
      ],
      shape: `(T, D) → (T, V) = (${now.T}, ${D}) → (${now.T}, ${logits.length})`,
      formula: "logits = norm(x) · Wᵀ; pᵢ = exp(logitᵢ) / Σⱼ exp(logitⱼ)",
      code: [`${MODEL}gpt.py`, "return F.linear(hidden, self.head_weight)"],
    };
  },

  draw: () => ({
    plain: say("drawPlain"),
    body: showDraw(),
    shape: "(V,) → 1",
    code: [`${GENERATE}filters.py`, "index = sample_index(weights, random)"],
  }),
};

const TOKENIZER_WORDS = { byte: "tokenizerByte", char: "tokenizerChar" };

function showNorm(norm, before) {
  const { scale } = norm.measure(before, 0);
  const formula =
    norm instanceof RMSNorm
      ? "x / √(mean(x²) + ε) · weight"
      : `(x − mean) / √(variance + ε) · weight${norm.bias === null ? "" : " + bias"}`;
  return make("p", say("normPlain", { root: formatReal(1 / scale) }), " ", make("code", formula));
}

/** The step that shows the stream before a part of a layer and after it. */
function makeStreamStep(norm, before, after) {
  const line = (name, stream) => [`${sayText(name)}, ${sayGuess(readEarly(stream))}`, stream];
  return makeStep("stream", say("streamHeading"), () =>
    make(
      "div",
      showNorm(norm, before),
      make("p", say("addPlain")),
      makeVectors(Object.fromEntries([line("streamBefore", before), line("streamAfter", after)])),
    ),
  );
}

function showDraw() {
  if (now.rows === null) return [make("p", say("noToken"))];
  const drawn = now.tokens.length - now.at - 1; // tokens that stand behind the selected one
  const count = continuation.tokens.length - drawn;
  if (count < 0) return [make("p", say("drawTyped"))];
  const { seed, temperature } = state.sample;
  const rows = listDrawable(now.rows, state.sample);
  if (temperature === 0) return [make("p", say("drawGreedy", { token: label(rows[0].token) }))];
  const random = drawUniform(seed, 0, count);
  const chosen = sampleToken(rows, random);
  const segments = rows.map(({ token, chance }) => {
    const text = chance > 0.06 ? spellNodes(token) : [];
    return make("span", { title: spellText(token), style: { "flex-grow": chance } }, text);
  });
  const needle = make("b.needle", { style: { left: `${100 * random}%` } });
  const values = { random: formatReal(random, 4), token: label(chosen), seed, count };
  return [make("div.segments", segments, needle), make("p", say("drawNumber", values))];
}

// -- attention -----------------------------------------------------------------------------------

/** The weights (S,) of the token at `place` in a head. */
function weightsOf(place, layer, head) {
  const S = place + 1;
  return now.entries[place].layers[layer].weights.subarray(head * S, (head + 1) * S);
}

/** Whether a query sees a key: it is not later and inside the window. */
function canSee(layer, query, key) {
  const { window } = now.gpt.blocks[layer].attn;
  return key <= query && (window === null || query - key < window);
}

function drawHead(canvas, layer, head, maxSize) {
  const { window } = now.gpt.blocks[layer].attn;
  const weigh = (q) => [weightsOf(q, layer, head), window ? Math.max(0, q - window + 1) : 0];
  return paintMap(canvas, now.T, weigh, maxSize);
}

/** The key that the arithmetic shows: the chosen one, or the strongest that is not the query. */
function findKey(layer, head) {
  if (state.key !== null && canSee(layer, now.at, state.key)) return state.key;
  const weights = weightsOf(now.at, layer, head).slice(0, now.at);
  const visible = weights.map((weight, key) => (canSee(layer, now.at, key) ? weight : -1));
  return visible.length && Math.max(...visible) >= 0 ? findLargest(visible) : now.at;
}

function nameHead(layer, head) {
  return sayText("layerHead", { layer, head });
}

function showAttention(layer) {
  const { attn } = now.gpt.blocks[layer];
  const { H, G, K } = attn;
  const { x, middle } = now.entry.layers[layer];
  const D = now.config.d_model;
  const head = Math.min(state.head, H - 1);
  const key = findKey(layer, head);
  const shared = range(H).filter((h) => Math.floor(h / (H / G)) === Math.floor(head / (H / G)));
  const isOff = isHeadOff(state.off, layer, head);
  const plain = [
    ...say("attentionPlain", { heads: H }),
    attn.window === null ? "" : [" ", ...say("windowHelp", { count: attn.window })],
    shared.length === 1 ? "" : [" ", ...say("sharedHelp", { heads: shared.join(", ") })],
  ];
  const bias = attn.alibiSlopes === null ? "" : " − slope · distance";
  const weights = weightsOf(now.at, layer, head);
  const shares = now.tokens.map((_, k) => (canSee(layer, now.at, k) ? weights[k] : null));
  return {
    plain,
    body: [
      rove(
        make(
          "div.tiles",
          { role: "group" },
          range(H).map((h) => makeHeadTile(layer, h, h === head)),
        ),
        (tile) => tile.click(),
      ),
      make(
        "div.row",
        make("b", nameHead(layer, head)),
        makeSwitch(isOff, "heads", [layer, head], "head-switch"),
      ),
      make("h4", say("mapHeading", { layer, head })),
      makeLargeMap(layer, head, key),
      make("p.note", say("mapHelp")),
      make("h4", say("readsHeading", { token: labelAt(now.at) })),
      shadeTokens(shares, (k) => (shares[k] === null ? "" : `${k}: ${formatPercent(shares[k])}`)),
      make("h4", say("stepsHeading", { query: labelAt(now.at), key: labelAt(key) })),
      showArithmetic(layer, head, key),
      makeStreamStep(now.gpt.blocks[layer].attnNorm, x, middle),
    ],
    shape: [
      `q (T, H, K) = (${now.T}, ${H}, ${K})`,
      `k, v (T, G, K) = (${now.T}, ${G}, ${K})`,
      `out (T, D) = (${now.T}, ${D})`,
    ].join("; "),
    formula: `softmax(q kᵀ / √${K}${bias} + mask) v → o_proj`,
    code: [`${MODEL}attention.py`, "mixed = self.mix(q, k, v, cache)  # (B, H, T, K)"],
  };
}

function makeSwitch(isOff, list, item, focus) {
  const press = () => toggleOff(list, item);
  const options = { onclick: press, "aria-pressed": String(isOff), "data-focus": focus };
  return make("button", options, say("switchOff"));
}

function makeHeadTile(layer, head, isChosen) {
  const isOff = isHeadOff(state.off, layer, head);
  return make(
    `button.tile${isOff ? ".off" : ""}`,
    {
      "aria-pressed": String(isChosen),
      "data-focus": `tile-${layer}-${head}`,
      onclick: () => openHead(layer, head),
    },
    make("b", say("headName", { head })),
    drawHead(make("canvas.hatched"), layer, head, 64),
    make("small", describeHead(layer, head)),
  );
}

/** The large map: pointing says a weight, pressing chooses query and key; nothing moves. */
function makeLargeMap(layer, head, key) {
  const { T } = now;
  const canvas = drawHead(make("canvas.hatched"), layer, head);
  const readout = make("p.readout");
  const mark = make("i.mark");
  const row = make("i.rowmark");
  const percent = (n) => `${(100 * n) / T}%`;
  const show = (q, k) => {
    mark.style.left = percent(k);
    mark.style.top = percent(q);
    const values = { query: labelAt(q), key: labelAt(k) };
    const weight = make("b", formatPercent(weightsOf(q, layer, head)[k] ?? 0));
    fill(readout, say(canSee(layer, q, k) ? "mapCell" : "mapBlind", { ...values, weight }));
  };
  const find = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (n) => Math.min(T - 1, Math.max(0, Math.floor(n * T)));
    return [
      place((event.clientY - box.top) / box.height),
      place((event.clientX - box.left) / box.width),
    ];
  };
  mark.style.width = percent(1);
  mark.style.height = percent(1);
  row.style.top = percent(now.at);
  row.style.height = percent(1);
  show(now.at, key);
  const frame = make(
    "div.frame",
    {
      tabindex: 0,
      role: "application",
      "aria-label": sayText("mapHeading", { layer, head }),
      "data-focus": "map",
      onpointermove: (event) => show(...find(event)),
      onpointerleave: () => show(now.at, key),
      onclick: (event) => {
        const [q, k] = find(event);
        choose({ place: q, key: canSee(layer, q, k) ? k : null });
      },
      onkeydown: (event) => {
        const steps = {
          ArrowUp: [-1, 0],
          ArrowDown: [1, 0],
          ArrowLeft: [0, -1],
          ArrowRight: [0, 1],
        };
        handleKeys(event, steps, ([down, right]) => {
          const q = Math.min(T - 1, Math.max(0, now.at + down));
          choose({ place: q, key: Math.min(q, Math.max(0, key + right)) });
          fill(places.spoken, places.station.querySelector(".readout").textContent);
        });
      },
    },
    canvas,
    row,
    mark,
  );
  // As many labels as have room, each beside its row; none stand on their heads.
  const every = Math.ceil(T / 24);
  const names = range(Math.ceil(T / every)).map((n) => {
    const place = n * every;
    const style = { "grid-row": place + 1 };
    return make("span", { style }, `${place} `, spellNodes(now.tokens[place]));
  });
  const style = { "grid-template-rows": `repeat(${T}, minmax(0, 1fr))` };
  return make("div.map", readout, make("div.names", { style }, names), frame);
}

/** The steps of all that one head computes for one query and one key. */
function showArithmetic(layer, head, key) {
  const { attn } = now.gpt.blocks[layer];
  const { H, G, K } = attn;
  const g = Math.floor(head / (H / G));
  const query = now.entry.layers[layer];
  const looked = now.entries[key].layers[layer];
  const part = (vector, n) => vector.subarray(n * K, (n + 1) * K);
  const q = part(query.q, head);
  const k = part(looked.k, g);
  const step = (name, ...fill) =>
    makeStep(name, say(`${name}Heading`), () => make("div", ...fill.map((each) => each())));
  return [
    step(
      "qkv",
      () => make("p", say("qkvPlain"), attn.qNorm === null ? "" : [" ", ...say("qkNormHelp")]),
      () =>
        makeVectors({
          [sayText("queryOf", { token: labelAt(now.at) })]: q,
          [sayText("keyOf", { token: labelAt(key) })]: k,
        }),
      () => makeVectors({ [sayText("valueOf", { token: labelAt(key) })]: part(looked.v, g) }),
      () => make("p", say("cachePlain", { count: formatCount(2 * G * K), heads: G, size: K })),
    ),
    step("position", () => showPosition(attn, head)),
    step("score", () => showScore(q, k)),
    step(
      "table",
      () => make("p", say("tablePlain", { size: K, root: formatReal(Math.sqrt(K), 2) })),
      () => showScores(layer, head, key),
      () => showCuts(layer, head, key),
    ),
    step("sum", () => showSum(layer, head, g)),
    step("out", () => showOutput(layer, head)),
  ];
}

function showScore(q, k) {
  const products = q.map((x, i) => x * k[i]);
  const sum = dot(q, 0, k, 0, q.length);
  return make(
    "div",
    make("p", say("scorePlain", { sum: make("b", formatReal(sum)) })),
    makeVectors({ [sayText("productVector")]: products }),
  );
}

function showPosition({ alibiSlopes }, head) {
  const { position } = now.config;
  const slope = alibiSlopes && formatReal(alibiSlopes[head], 4);
  return make("p", say(`${position}Plain`, { slope }));
}

/** The table of keys, the strongest first: weight, q·k, scaled, distance, score. */
function showScores(layer, head, key) {
  const { attn } = now.gpt.blocks[layer];
  const { H, G, K } = attn;
  const g = Math.floor(head / (H / G));
  const at = now.at;
  const weights = weightsOf(at, layer, head);
  const scores = now.entry.layers[layer].scores.subarray(head * (at + 1), (head + 1) * (at + 1));
  const seen = findTop(weights, at + 1).filter((k) => canSee(layer, at, k));
  const q = now.entry.layers[layer].q;
  const rows = seen.map((k) => {
    const raw = dot(q, head * K, now.entries[k].layers[layer].k, g * K, K);
    const numbers = [raw, raw / Math.sqrt(K), scores[k]];
    if (attn.alibiSlopes) numbers.splice(2, 0, -attn.alibiSlopes[head] * (at - k));
    return makeRow(
      `key-${k}`,
      [labelAt(k), k === at ? make("small", " ", say("itself")) : null],
      [
        [makeBar(["solid", weights[k]]), formatReal(weights[k], 4)],
        ...numbers.map((x) => formatReal(x)),
      ],
      k === key,
      () => choose({ place: at, key: k }),
    );
  });
  const columns = [say("key"), say("weight"), "q·k", `÷ √${K}`];
  if (attn.alibiSlopes) columns.push(say("bias"));
  columns.push(say("score"));
  return makeTable("scores", columns, rows);
}

function showCuts(layer, head, key) {
  const query = now.at;
  const names = { query: labelAt(query), key: labelAt(key) };
  const here = [layer, head, query, key];
  const everywhere = [null, null, query, key];
  const button = (item, name, focus) => {
    const press = () => {
      state.key = key; // cut, it is the strongest no more, and should stay in view
      toggleOff("attentions", item);
    };
    const options = {
      onclick: press,
      "aria-pressed": String(isListed("attentions", item)),
      "data-focus": focus,
    };
    return make("button", options, say(name, names));
  };
  return make("div.row", button(here, "cutHere", "cut"), button(everywhere, "cutAll", "cut-all"));
}

function showSum(layer, head, g) {
  const { K } = now.gpt.blocks[layer].attn;
  const weights = weightsOf(now.at, layer, head);
  const vectors = {};
  for (const k of findTop(weights, 3)) {
    if (weights[k] === 0) continue;
    const value = now.entries[k].layers[layer].v.subarray(g * K, (g + 1) * K);
    const name = sayText("weightedValue", { weight: formatReal(weights[k]), token: labelAt(k) });
    vectors[name] = value.map((x) => weights[k] * x);
  }
  vectors[sayText("mixedVector")] = now.entry.layers[layer].mixed.subarray(
    head * K,
    (head + 1) * K,
  );
  return make("div", make("p", say("sumPlain")), makeVectors(vectors));
}

function showOutput(layer, head) {
  const { attn } = now.gpt.blocks[layer];
  if (isHeadOff(state.off, layer, head) && !now.other) return make("p", say("headIsOff"));
  const added = attn.addedByHead(now.entry.layers[layer].mixed, head);
  return make(
    "div",
    makeVectors({ [sayText("outVector")]: added }),
    make("p", say("outPlain", { width: added.length })),
    showPushes(added),
  );
}

// -- the MLP -------------------------------------------------------------------------------------

const MLP_FORMULAS = {
  gelu: "down_proj(gelu(up_proj(x)))",
  relu2: "down_proj(max(up_proj(x), 0)²)",
  swiglu: "down_proj(silu(gate_proj(x)) · up_proj(x))",
};
const MLP_CODE = {
  gelu: 'hidden = F.gelu(hidden, approximate="tanh")',
  relu2: "hidden = square_relu(hidden)  # relu(x)²",
  swiglu: "hidden = F.silu(self.gate_proj(x)) * hidden",
};

function showMlp(layer) {
  const { mlp } = now.gpt.blocks[layer];
  const { inner, middle, mlp: added } = now.entry.layers[layer];
  const F = inner.length;
  const D = now.config.d_model;
  const down = mlp.downProj.weight; // (D, d_ff)
  const columnOf = (n) => Float32Array.from({ length: D }, (_, d) => down[d * F + n]);
  const order = findTop(
    inner.map((x, n) => Math.abs(x) * measureLength(columnOf(n))),
    MAX_NEURONS,
  );
  const neuron = order.includes(state.neuron) ? state.neuron : order[0];
  const scale = findScale(order.map((n) => inner[n]));
  const makeFiring = (x) => makeBar([x < 0 ? "down" : "up", Math.abs(x) / scale]);
  const rows = order.map((n) => {
    const over = now.entries.map((entry) => entry.layers[layer].inner[n]);
    const place = findLargest(over);
    const pushed = findLargest(readThroughHead(columnOf(n).map((x) => x * Math.sign(inner[n]))));
    return makeRow(
      `neuron-${n}`,
      n,
      [
        [makeFiring(inner[n]), formatReal(inner[n], 2)],
        [labelAt(place), make("small", ` ${formatReal(over[place], 2)}`)],
        label(pushed),
      ],
      n === neuron,
      () => choose({ neuron: n }),
    );
  });
  const columns = ["neuron", "fires", "firesMost", "raises"].map((name) => say(name));
  const over = now.entries.map((entry) => entry.layers[layer].inner[neuron]);
  const most = Math.max(...over.map(Math.abs)) || 1;
  const isOff = isMlpOff(state.off, layer);
  return {
    plain: say("mlpPlain", { count: formatCount(F) }),
    body: [
      make(
        "div.row",
        make("b", say("layerName", { layer }), " MLP"),
        makeSwitch(isOff, "mlps", layer, "mlp-switch"),
      ),
      isOff && !now.other ? null : showPushes(added),
      make("h4", say("neuronsHeading", { token: labelAt(now.at) })),
      makeTable("neurons", columns, rows),
      make("h4", say("neuronHeading", { neuron })),
      shadeTokens(
        over.map((x) => Math.abs(x) / most),
        (place) => `${place}: ${formatReal(over[place])}`,
      ),
      makeStreamStep(
        now.gpt.blocks[layer].mlpNorm,
        middle,
        now.entry.layers[layer + 1]?.x ?? now.entry.x,
      ),
    ],
    shape: `(T, D) → (T, d_ff) → (T, D) = (${now.T}, ${D}) → (${now.T}, ${F}) → (${now.T}, ${D})`,
    formula: MLP_FORMULAS[mlp.activation],
    code: [`${MODEL}layers.py`, MLP_CODE[mlp.activation]],
  };
}
