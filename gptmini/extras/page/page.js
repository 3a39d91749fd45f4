// The page: a text box, and all that the model makes of it. This file has what the reader chose,
// what the model computes on it, and the first screen; sections.js and views.js show the rest.
// Where a server gave it, ask.js has a chat, and the page of a model that is too large.
//
// Whatever comes from a run or a reader becomes text, never markup.
"use strict";

const { data, gpt, tokenizer } = openPage(document); // no gpt where the server computes

// What the reader chose. Places count from 0 through the tokens that the model reads.
const state = {
  sample: {
    ...data.sample,
    max_new_tokens: Infinity, // the reader stops it
    overflow: data.sample.overflow === "error" ? "stop" : data.sample.overflow,
  },
  place: null, // the selected token; null: the last, also of a text that grows
  station: "tokens",
  layer: 0, // drawn large in the path
  opened: null, // the step of the station
  head: 0, // shown in the stations of attention,
  headLayer: null, // of this layer, if one was chosen
  key: null, // null: the strongest
  neuron: null, // null: the strongest
  off: { heads: [], mlps: [], layers: [], attentions: [] },
  number: null, // of the embedding whose update is shown; null: the one of the largest gradient
  other: "", // the second text, from which parts that are off are taken
  hasTyped: false,
};

const readers = gpt && { whole: new Reader(gpt), changed: new Reader(gpt) }; // all on, some off
let continuation; // the text
let now; // what the model computes, see `compute`
let timer = null; // of a text that is being generated
let typing = null; // a timer, while a text that was typed waits to be read
let updateTime = 0; // milliseconds that reading and showing a text took last
const places = {}; // the elements that are filled again and again
let textBox;
let openingTokens; // of the text that the page opened with
let written = ""; // what the box held when a text was written into it

// -- what the model computes ---------------------------------------------------------------------

/** Read a text as a prompt: nothing of it was drawn. */
function readText(text) {
  const options = [readers.whole, tokenizer, state.sample];
  continuation = new Continuation(...options, text);
  // A text of bytes that the tokenizer does not know has no tokens.
  if (!continuation.promptTokens.length) continuation = new Continuation(...options, "");
  continuation.prompt = text;
  state.place = null;
  state.key = null;
}

/** The text, drawn tokens included. It is here, and not in the box, which knows no \r. */
function getText() {
  return continuation.prompt + continuation.text;
}

/** Read what was typed into the box. */
function readTyped() {
  if (textBox.value === written) return;
  readText(textBox.value);
  written = textBox.value;
}

/** Compute what all views show.
 *
 * `tokens` (T,) are what the model reads, `entries` those of a Reader, `entry` the one of the
 * selected place `at`, `next` the token behind it or null. `rows` are those of `explainFilters` for
 * what comes next, null where no token is left; `before` maps tokens to their probability with
 * nothing switched off, if something is; `other` are the tokens of the second text, or null;
 * `target` is the token that attributions are for.
 */
function compute() {
  readTyped();
  const options = [readers.whole, tokenizer, state.sample];
  const other = state.other === "" ? null : new Continuation(...options, state.other).context;
  const off = listOff().length ? { ...state.off, from: other } : null;
  const tokens = continuation.context;
  const reader = off ? readers.changed : readers.whole;
  readers.whole.read(tokens);
  if (off) reader.read(tokens, off);
  continuation.reader = reader;
  continuation.off = off;
  const T = tokens.length;
  const at = Math.min(state.place ?? T - 1, T - 1);
  const entry = reader.record[at];
  const rows = explainNext(entry, T - 1 - at);
  const rowsBefore = off && explainNext(readers.whole.record[at], T - 1 - at);
  const next = tokens[at + 1] ?? null;
  let heads = null;
  let repeats = null;
  now = {
    gpt: reader.gpt,
    config: reader.gpt.config,
    tokens,
    T,
    entries: [...reader.record], // which a step of learning empties
    at,
    entry,
    next,
    rows,
    before: rowsBefore && mapChances(rowsBefore),
    other,
    target: next ?? (rowsBefore ?? rows)?.[0].token ?? findLargest(entry.logits),
    heads: () => (heads ??= summarizeHeads(reader.gpt, readers.whole.record)),
    repeats: () => (repeats ??= repeatsItself(tokens)),
  };
}

/** Whether most of a text's second half stands as far before as the same distance, like "abcabc". */
function repeatsItself(tokens) {
  const half = Math.floor(tokens.length / 2);
  const later = range(half).map((n) => tokens.length - 1 - n);
  const count = (distance) => later.filter((t) => tokens[t] === tokens[t - distance]).length;
  return half > 1 && range(half + 1).some((n) => count(n + 1) >= 0.8 * half);
}

/** Explain what comes after an entry that has `behind` tokens behind it; null if nothing can. */
function explainNext(entry, behind) {
  const scores = continuation.adjust(entry.logits, continuation.tokens.length - behind);
  return scores.some((score) => score > -Infinity) ? explainFilters(scores, state.sample) : null;
}

/** What logits (V,) at the selected place make likely, before the filters: probabilities (V,). */
function expect(logits) {
  const count = continuation.tokens.length - (now.T - 1 - now.at);
  const temperature = getTemperature();
  return softmax(continuation.adjust(logits, count).map((score) => score / temperature));
}

/** The temperature of all that is expected; 0 takes the likeliest, and is shown as 1. */
function getTemperature() {
  return state.sample.temperature || 1; // as `explainFilters` has it
}

// -- what the reader does ------------------------------------------------------------------------

function choose(changes) {
  Object.assign(state, changes);
  update();
}

function openHead(layer, head, moves = false) {
  state.head = head;
  state.headLayer = layer;
  state.key = null;
  openStation(`attn:${layer}`, moves);
}

/** Open a station; `moves` the window to it, where it does not stand beside the drawing. */
function openStation(id, moves = true) {
  state.station = id;
  state.neuron = null;
  update();
  const { top, bottom } = places.station.getBoundingClientRect();
  const isSeen = top >= 0 && top < innerHeight * 0.6 && bottom > 0;
  if (moves && !isSeen) places.station.scrollIntoView({ block: "start" });
}

function listOff() {
  return Object.entries(state.off).flatMap(([list, items]) => items.map((item) => [list, item]));
}

function isListed(list, item) {
  return state.off[list].some((each) => String(each) === String(item));
}

function toggleOff(list, item) {
  const items = state.off[list];
  const others = items.filter((each) => String(each) !== String(item));
  state.off[list] = others.length < items.length ? others : [...items, item];
  update();
}

function switchAllOn() {
  for (const list of Object.keys(state.off)) state.off[list] = [];
  update();
}

/** Show a text that was not typed. */
function showText() {
  writeBox(getText());
  update();
}

function drawNext() {
  readTyped();
  continuation.next();
  state.place = null;
  state.key = null;
  state.hasTyped = true;
  showText();
}

function drawOne() {
  pause();
  drawNext();
}

function takeBack() {
  pause();
  readTyped();
  continuation.back();
  state.place = null;
  showText();
}

const DELAY = 60; // milliseconds between two tokens, slow enough to watch

/** Draw a token after the other until the text ends, the reader stops it, or there are many. */
function generate() {
  pause();
  let left = data.sample.max_new_tokens;
  const step = () => {
    drawNext();
    left -= 1;
    const canGoOn = continuation.finishReason === null && now.rows !== null && left > 0;
    timer = canGoOn ? setTimeout(step, DELAY) : null;
    showControls();
  };
  timer = setTimeout(step);
  showControls();
}

function pause() {
  clearTimeout(timer);
  timer = null;
  if (learning) learning.run = null;
  showControls();
}

// -- the first screen ----------------------------------------------------------------------------

/** Replace what stands in a place. */
function fill(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter((child) => child !== null));
}

function showControls() {
  const hasEnded = continuation.finishReason !== null || now.rows === null;
  fill(places.generate, timer === null ? say("generate") : say("pause"));
  places.generate.setAttribute("aria-pressed", String(timer !== null));
  places.generate.disabled = timer === null && hasEnded;
  places.oneStep.disabled = hasEnded;
  places.stepBack.disabled = continuation.tokens.length === 0;
  showLearnControls();
}

function showTokens() {
  const nPrompt = now.T - continuation.tokens.length; // tokens before the first drawn one
  const { children } = places.tokens;
  for (const [place, token] of now.tokens.entries()) {
    // What is shown already stays, as a key changes few of them.
    const surprising = learning && place > 0 ? measureSurprise(place) : null;
    const shown = [token, place === now.at, place >= nPrompt, surprising].join();
    if (children[place]?.dataset.shown === shown) continue;
    const chip = makeChip(token, place, "chip", sayText("inText", { place }));
    if (place >= nPrompt) chip.classList.add("drawn");
    if (surprising !== null) tint(chip, surprising);
    chip.dataset.shown = shown;
    if (children[place]) children[place].replaceWith(chip);
    else places.tokens.append(chip);
  }
  while (children.length > now.T) children[now.T].remove();
  const special = Object.entries(tokenizer.specialTokens).filter(([, token]) =>
    now.tokens.includes(token),
  );
  const hasBytes = now.tokens.some((token) => spellText(token).startsWith("‹"));
  const total = continuation.promptTokens.length + continuation.tokens.length;
  const notes = [
    say("tokensHelp"),
    learning ? say("surpriseHelp") : null,
    continuation.tokens.length ? say("writtenHelp") : null,
    hasBytes ? say("bytesHelp") : null,
    ...special.map(([, token]) => say("specialHelp", { token: label(token) })),
    total > now.T ? say("contextHelp", { count: now.config.context_length }) : null,
    continuation.dropSpace && !continuation.tokens.length ? say("spaceHelp") : null,
    state.hasTyped || data.prompt ? null : say(data.held_out ? "heldOutHelp" : "openedHelp"),
  ];
  fill(places.tokensHeading, say("tokensHeading", { count: formatCount(now.T) }));
  rove(places.tokens, (chip) => chip.click());
  fill(
    places.tokensHelp,
    notes.filter(Boolean).flatMap((note) => [...note, " "]),
  );
}

/** How unlikely the token at a place was after those before it: 0 if it was certain, up to 1. */
function measureSurprise(place) {
  return 1 - softmax(now.entries[place - 1].logits)[now.tokens[place]];
}

/** A slider over the values of a filter, with its value and a sentence on what it does. */
function makeFilterSlider(name, listed) {
  const value = state.sample[name];
  // The value of the run may stand between the others; null, without a filter, comes first or last.
  const values = listed.filter((each) => each !== null);
  if (value !== null && !values.includes(value)) values.push(value);
  values.sort((a, b) => a - b);
  if (listed[0] === null) values.unshift(null);
  if (listed.at(-1) === null) values.push(null);
  const id = `slider-${name}`;
  const output = make("output.number");
  const input = make("input", { type: "range", id, min: 0, max: values.length - 1 });
  const show = () => {
    const chosen = values[Number(input.value)];
    output.textContent = chosen ?? sayText("isOff");
    input.setAttribute("aria-valuetext", output.textContent);
    state.sample[name] = chosen;
  };
  input.value = values.indexOf(value);
  show();
  input.addEventListener("input", () => {
    show();
    if (gpt) update();
  });
  return make(
    "div",
    make("label", { for: id }, say(name), " ", make("small", say(`${name}Help`))),
    input,
    output,
  );
}

function makeFilterSliders() {
  const hundredths = (from, to, step) =>
    range(Math.round((to - from) / step) + 1).map((n) => Number((from + n * step).toFixed(3)));
  const V = data.config.vocab_size;
  const counts = [1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000, 5000, 20000];
  return [
    makeFilterSlider("temperature", hundredths(0, 2, 0.05)),
    makeFilterSlider("top_k", [...counts.filter((count) => count < V), null]),
    makeFilterSlider("top_p", [...hundredths(0.05, 0.95, 0.05), 0.99, null]),
    makeFilterSlider("min_p", [null, 0.01, 0.02, 0.03, ...hundredths(0.05, 1, 0.05)]),
  ];
}

function makeSeedField() {
  const change = (seed) => {
    state.sample.seed = seed;
    if (gpt) update();
  };
  return make(
    "div",
    make("label", { for: "seed" }, say("seed"), " ", make("small", say("seedHelp"))),
    makeNumberField("seed", Number.MAX_SAFE_INTEGER, state.sample.seed, change),
  );
}

/** A field for a whole number from 0 to `max`; `change` gets each that is typed. */
function makeNumberField(id, max, value, change) {
  const onchange = () => input.checkValidity() && change(Number(input.value));
  const options = { type: "number", id, min: 0, max, required: "", value, onchange };
  const input = make("input", { ...options, "data-focus": id });
  return input;
}

/** Links to the parts of the page, those that are closed open; and how the page is read. */
function makeNavigation(parts) {
  const all = data.server?.chat ? { chat: "toChat", ...parts } : parts;
  const links = Object.entries(all).map(([id, words]) => {
    const open = () => {
      const part = document.getElementById(id);
      if (part.tagName !== "DETAILS") return;
      part.open = true;
      update(); // before the window moves there, so that there is enough to move to
    };
    return make("a", { href: `#${id}`, onclick: open }, say(words));
  });
  const other = language === "zh" ? "en" : "zh";
  const options = { id: "language", lang: other, onclick: () => switchLanguage(other) };
  return make("nav.row", links, make("button", options, LANGUAGES[other]));
}

/** The name of the run, and one sentence. */
function makeHeader() {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  document.title = `gptmini: ${data.name}`;
  const facts = { weights: formatCount(countWeights()), step: formatCount(data.step) };
  const size = sayText(data.step ? "sizeTrained" : "size", facts); // an imported model has no steps
  return make(
    "header.row",
    make("h1", data.name),
    make("p", say(gpt ? "lead" : "leadRemote", { size })),
  );
}

function countWeights() {
  const count = (shape) => shape.reduce((product, size) => product * size, 1);
  return data.tensors.reduce((total, { shape }) => total + count(shape), 0);
}

/** The sliders of the filters, and the seed. */
function makeSettings() {
  return makeKeptOpen(
    "details",
    { id: "settings" },
    say("settingsHeading"),
    make("div.bars", makeFilterSliders(), makeSeedField()),
  );
}

/** An element that is filled again and again. */
function makePlace(name, tag, ...parts) {
  return (places[name] = make(tag, ...parts));
}

/** What opens when its title is pressed, and is as open as it was before the page was built anew. */
function makeKeptOpen(tag, options, title, ...children) {
  const details = make(tag, options, make("summary", title), children);
  details.open = document.getElementById(options.id)?.open ?? false;
  return details;
}

/** The text, and what one can do with it. */
function makeTextCard(...parts) {
  const heading = make("label", { for: "text" }, make("h2", say("yourText")));
  return make("section.card", { id: "top" }, heading, parts);
}

/** The box of the text, with the text that it had. */
function makeTextBox(oninput, onfocus = null) {
  const text = textBox?.value ?? "";
  textBox = make("textarea", { id: "text", rows: 3, spellcheck: "false", oninput, onfocus });
  textBox.value = text;
  return textBox;
}

/** The box of the second text. */
function makeOtherBox() {
  const change = () => choose({ other: box.value });
  const box = make("textarea", { id: "other", rows: 1, spellcheck: "false", oninput: change });
  box.value = state.other;
  return [make("p", make("label", { for: "other" }, say("otherHeading"))), box];
}

/** Write a text into the box, which makes \n of each \r and \r\n. */
function writeBox(text) {
  textBox.value = text;
  written = textBox.value;
}

/** The text that the reader means by the box: `text`, with its \r, until something is typed. */
function readBox(text) {
  return textBox.value === written ? text : textBox.value;
}

/** Build everything that stays while text and choices change. */
function buildPage() {
  const type = () => {
    pause();
    state.hasTyped = true;
    // A text that takes long to read and show waits for a pause, so that typing does not.
    clearTimeout(typing);
    if (updateTime < 100) update();
    else typing = setTimeout(update, 200);
  };
  const fold = (name, heading, ...parts) => {
    const options = { id: name, ontoggle: () => update() };
    const title = make("h2", say(heading));
    return makeKeptOpen("details.card", options, title, parts, makePlace(name, "div"));
  };
  makePlace("generate", "button.main", { onclick: () => (timer === null ? generate() : pause()) });
  makePlace("oneStep", "button", { onclick: drawOne }, say("oneStep"));
  makePlace("stepBack", "button", { onclick: takeBack }, say("stepBack"));
  fill(
    document.querySelector("main"),
    makeHeader(),
    makeNavigation({ top: "toText", path: "toPath", kinds: "toKinds", cause: "toCause" }),
    makeChat(),
    make(
      "div.journey",
      makeTextCard(
        makeTextBox(type, pause), // as each drawn token would move the cursor
        make("div.row", places.generate, places.oneStep, places.stepBack),
        makeLearning(),
        makePlace("tokensHeading", "h3"),
        makePlace("tokens", "div.chips", { role: "group", "aria-label": sayText("tokens") }),
        makePlace("tokensHelp", "p.note"),
        makeLastStep(),
      ),
      make(
        "section.card",
        makePlace("expectHeading", "h2"),
        makePlace("outcome", "p.outcome", { "aria-live": "polite" }),
        makePlace("expect", "div"),
        makeSettings(),
      ),
      make(
        "section.card",
        { id: "path" },
        make("h2", say("pathHeading")),
        makePlace("pathHelp", "p"),
        makePlace("path", "div"),
      ),
      makePlace("station", "section.card", { id: "station" }),
    ),
    fold("kinds", "kindsHeading"),
    fold("cause", "causeHeading", makeOtherBox()),
    make("footer.note", say(data.server ? "footServed" : "foot")),
    makePlace("off", "div.off.row", { role: "status" }),
    makePlace("spoken", "div.spoken", { "aria-live": "polite" }),
  );
}

function switchLanguage(code) {
  language = code;
  if (gpt) {
    buildPage();
    update();
  } else buildRemotePage();
  document.getElementById("language").focus();
}

/** Compute and show everything, and leave the focus and what was scrolled where they were. */
function update() {
  const began = performance.now();
  const focused = document.activeElement?.dataset?.focus;
  const scrolled = Array.from(document.querySelectorAll("[data-scroll]"), (box) => [
    box.dataset.scroll,
    box.scrollLeft,
    box.scrollTop,
  ]);
  compute();
  showControls();
  showTokens();
  showLearning();
  showExpectation();
  showPath();
  showStation();
  showKinds();
  showCause();
  showOffBar();
  for (const [name, left, top] of scrolled) {
    document.querySelector(`[data-scroll="${name}"]`)?.scrollTo(left, top);
  }
  if (focused && document.activeElement?.dataset?.focus !== focused) {
    document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
  updateTime = performance.now() - began;
}

/** Show the model on a text, or, where there is none, on one that it writes. */
function openModel(text) {
  buildPage();
  readText(text);
  if (text === "") {
    for (let n = 0; n < 24 && continuation.finishReason === null; n++) continuation.next();
    readText(continuation.text.trim());
  }
  openingTokens = continuation.context;
  // Of a text that nobody asked for the last but one: there one sees what came.
  state.place = data.prompt || openingTokens.length < 2 ? null : openingTokens.length - 2;
  showText();
}

if (gpt) {
  darkMode.addEventListener("change", update);
  openModel(data.prompt || data.held_out);
} else buildRemotePage();
