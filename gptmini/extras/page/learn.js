// Learning: the model takes steps on the reader's text, and all that is shown follows each of them.
// The way back and the optimizer are in model.js.
"use strict";

const MAX_LEARNED = 6_000_000; // weights; with more, a step takes too long to watch
const STEPS = 100; // of one press
const SLICE = 40; // milliseconds for which a step may hold up the page
const PIECE = 16; // tokens that are read between two pauses

// Made at the first press, and null again on the way back. `opening` is a Reader of the text that the
// page opened with, `losses` has [of the reader's text, of that one] after each step, `gradients`
// and `embedBefore` are of the last step, `run` is what runs, or null.
let learning = null;

function startLearning() {
  learning = { optimizer: new AdamW(), opening: new Reader(gpt), losses: [], run: null };
  learning.opening.read(openingTokens);
  noteLosses(learning);
}

function noteLosses({ opening, losses }) {
  losses.push([readers.whole.record, opening.record].map(computeLoss));
}

/** Take steps until there are `count`, the reader stops them, or something else begins. */
async function learn(count) {
  pause();
  update(); // reads what was typed
  if (learning === null) startLearning();
  const run = (learning.run = {});
  for (let n = 0; n < count && learning?.run === run; n++) {
    showControls();
    await runInSlices(takeStep(learning, run));
    update();
  }
  if (learning?.run === run) pause();
}

/** One step on the text, as it is now: back through the model, an update, and the text read anew. */
function* takeStep(learning, run) {
  const { tokens } = now;
  readers.whole.read(tokens);
  const gradients = yield* gpt.backward([...readers.whole.record]);
  if (learning.run !== run) return; // stopped; no weight has moved yet
  Object.assign(learning, { gradients, embedBefore: gpt.embed.slice() });
  learning.optimizer.update(gpt.weights, gradients);
  forgetAll();
  yield* readInPieces(learning.opening, openingTokens);
  yield* readInPieces(readers.whole, tokens);
  noteLosses(learning);
}

/** Forget what was computed with other weights. */
function forgetAll() {
  for (const reader of [readers.whole, readers.changed, learning.opening]) reader.forget();
  gpt.meanOfHead = null;
}

function* readInPieces(reader, tokens) {
  for (let n = PIECE; n < tokens.length + PIECE; n += PIECE) {
    yield;
    reader.read(tokens.slice(0, n));
  }
}

/** Run a generator to its end, and let the page do something else in between. */
async function runInSlices(walk) {
  let began = performance.now();
  while (!walk.next().done) {
    if (performance.now() - began < SLICE) continue;
    await new Promise((resolve) => setTimeout(resolve));
    began = performance.now();
  }
}

/** Go back to the weights that the page came with. */
function unlearn() {
  pause();
  for (const [name, values] of Object.entries(readWeights(document, data))) {
    gpt.weights[name].set(values);
  }
  forgetAll();
  learning = null;
  update();
}

// -- what is shown -------------------------------------------------------------------------------

/** The buttons, and places for what they do; of a model that is too large, why they are not there. */
function makeLearning() {
  const weights = countWeights();
  if (weights > MAX_LEARNED) {
    const counts = { weights: formatCount(weights), most: formatCount(MAX_LEARNED) };
    return make("p.note", say("learnTooLarge", counts));
  }
  const press = () => (learning?.run ? pause() : learn(STEPS));
  return [
    make(
      "div.row",
      makePlace("learn", "button", { onclick: press }),
      makePlace("learnStep", "button", { onclick: () => learn(1) }, say("learnStep")),
      makePlace("unlearn", "button", { onclick: unlearn }, say("unlearn")),
      makePlace("learnHelp", "small"),
    ),
    makePlace("learned", "div"),
  ];
}

function makeLastStep() {
  const options = { id: "lastStep", ontoggle: showLearning, hidden: "" };
  return makeKeptOpen("details", options, say("stepHeading"), makePlace("lastStep", "div"));
}

function showLearnControls() {
  if (!places.learn) return;
  const isShort = now.T < 2;
  const isRunning = Boolean(learning?.run);
  fill(places.learn, say(isRunning ? "pause" : "learn"));
  places.learn.setAttribute("aria-pressed", String(isRunning));
  places.learn.disabled = places.learnStep.disabled = isShort;
  places.unlearn.disabled = learning === null;
  fill(places.learnHelp, isShort ? say("learnTooShort") : learning ? "" : say("learnHelp"));
}

function showLearning() {
  if (!places.learn) return;
  const lastStep = places.lastStep.parentElement;
  lastStep.hidden = !learning?.gradients;
  if (lastStep.hidden) return fill(places.learned);
  const { losses, optimizer } = learning;
  const tell = (n) =>
    make("b", `${formatReal(losses[0][n], 2)} → ${formatReal(losses.at(-1)[n], 2)}`);
  const values = { step: optimizer.step, line: tell(0), opening: tell(1) };
  const scale = findScale(losses.flat());
  fill(
    places.learned,
    make("p", say("learned", values)),
    drawCurves(
      [0, 1].map((n) => losses.map((pair) => pair[n])),
      scale,
    ),
    make("p.note", say("curveHelp", { scale: formatReal(scale, 1) })),
  );
  if (!lastStep.open) return;
  fill(places.lastStep, showGradients(), showWeight(), make("p.note", say("learnUnlike")));
}

/** The lengths of the gradients, by layer and part. */
function showGradients() {
  const squares = new Map();
  for (const [name, gradient] of Object.entries(learning.gradients)) {
    const [, layer, part] = name.match(/^blocks\.(\d+)\.(attn|mlp)/) ?? [];
    const key = part ? `${part}:${layer}` : name.split(/[._]/)[0].replace("positions", "embed");
    squares.set(key, (squares.get(key) ?? 0) + dot(gradient, 0, gradient, 0, gradient.length));
  }
  const lengths = listStations()
    .filter((id) => squares.has(id))
    .map((id) => [id, Math.sqrt(squares.get(id))]);
  const scale = findScale(lengths.map(([, length]) => length));
  return [
    make("p", say("gradientsHelp")),
    makeBars(
      lengths.map(([id, length]) => [
        nameStation(id),
        makeBar(["solid", length / scale]),
        formatReal(length),
      ]),
    ),
  ];
}

const formatWeight = (x) => formatReal(x, 6);

/** The last update of one weight in numbers: in the embedding of the token that comes next. */
function showWeight() {
  const { optimizer, gradients, embedBefore } = learning;
  const D = now.config.d_model;
  const row = gradients["embed.weight"].subarray(now.target * D, (now.target + 1) * D);
  const number = state.number ?? findLargest(row.map(Math.abs));
  const at = now.target * D + number;
  const { mean, root } = optimizer.measure(...optimizer.moments["embed.weight"], at);
  const { rate, decay } = optimizer;
  const [before, m, r, after] = [embedBefore[at], mean, root, gpt.embed[at]].map(formatWeight);
  const facts = {
    weightBefore: before,
    weightGradient: formatWeight(row[number]),
    weightMean: m,
    weightRoot: r,
    weightRate: `${rate}`,
    weightAfter: `${before} · (1 − ${rate} · ${decay}) − ${rate} · ${m} / ${r} = ${after}`,
  };
  const input = makeNumberField("number", D - 1, number, (typed) => choose({ number: typed }));
  return [
    make("p", make("label", say("weightHelp", { token: label(now.target), input }))),
    makeFacts(facts),
  ];
}
