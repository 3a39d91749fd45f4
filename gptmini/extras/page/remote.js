// The page of a model that did not travel with it: the server continues the text, and says what the
// model expected. If the reader wants to look inside, the weights are fetched, and page.js goes on.
"use strict";

const N_EXPECTED = 10; // tokens that the server lists for each place
const READ_DELAY = 400; // milliseconds without typing before the server reads the text

// What the server said of the text in the box.
const remote = {
  tokens: [], // {spelled, logprob, top, before}: `before` is the text before a drawn one, else null
  next: null, // what may come after them, as `top`: [[spelled, logprob]], the likeliest first
  readText: null, // the text that they are of
  place: null, // the selected token; null: the last
  running: null, // an AbortController
  timer: null,
  hasEnded: false,
  problem: "",
  note: "",
  loading: null, // {controller, share, words} while the weights come
  lookProblem: "",
};

/** Get the data if they need a key, then the weights if they are few; else let the server work. */
async function openRemotePage() {
  if (data.server.is_locked) {
    fill(document.querySelector("main"), make("h1", {}, data.name), makeKeyForm());
    try {
      const response = await ask("page.json");
      Object.assign(data, await response.json());
    } catch (error) {
      document.querySelector("main").append(make("p.problem", { role: "alert" }, error.message));
      return;
    }
  }
  useData();
  buildRemotePage();
  if (data.server.is_small) await lookInside();
  else await readRemotely();
}

function buildRemotePage() {
  makeTextBox(() => {
    stopRemote();
    state.hasTyped = true;
    remote.hasEnded = false;
    showRemoteState();
    remote.timer = setTimeout(readRemotely, READ_DELAY);
  });
  makePlace("generate", "button.main", {
    onclick: () => (remote.running ? stopRemote() : continueRemotely(data.sample.max_new_tokens)),
  });
  makePlace("oneStep", "button", { onclick: () => continueRemotely(1) });
  makePlace("stepBack", "button", { onclick: takeBackRemotely });
  fill(places.oneStep, say("oneStep"));
  fill(places.stepBack, say("stepBack"));
  fill(
    document.querySelector("main"),
    makeHeader(),
    makeNavigation({ top: "toText", look: "toLook" }),
    makeKeyForm(),
    makeChat(),
    make(
      "div.first",
      {},
      make(
        "section.card",
        { id: "top" },
        make("label", { for: "text" }, make("h2", {}, say("yourText"))),
        textBox,
        make(
          "div.row",
          {},
          places.generate,
          places.oneStep,
          places.stepBack,
          makePlace("remoteNote", "small"),
        ),
        makePlace("remoteProblem", "p.problem", { role: "alert" }),
        makePlace("tokensHeading", "h3"),
        makePlace("tokens", "div.chips", { role: "group", "aria-label": sayText("tokens") }),
        makePlace("tokensHelp", "p.note"),
      ),
      make("section.card", {}, makePlace("expect", "div"), makeSettings()),
    ),
    makePlace("look", "section.card", { id: "look" }),
    make("footer", {}, say("footServed")),
  );
  showRemote();
  showLook();
}

// -- the text ------------------------------------------------------------------------------------

function stopRemote() {
  clearTimeout(remote.timer);
  remote.running?.abort();
}

/** Do something with the server, one thing at a time; a stop is no problem. */
async function workRemotely(work) {
  stopRemote();
  const running = new AbortController();
  Object.assign(remote, { running, problem: "" });
  showRemoteState();
  let problem = "";
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  if (remote.running !== running) return; // something else has begun
  Object.assign(remote, { running: null, problem });
  showRemote();
}

/** Have the server read the text in the box. */
function readRemotely() {
  return workRemotely(readPrompt);
}

async function readPrompt(signal) {
  const text = textBox.value;
  // A space at the end is left to the next token, where tokens are words.
  const isWords = !["byte", "char"].includes(data.tokenizer?.kind);
  const prompt = isWords ? text.replace(/ $/, "") : text;
  const { tokens, token_logprobs, top_logprobs } = await score({ prompt, echo: true }, signal);
  remote.tokens = tokens.slice(0, -1).map((spelled, i) => ({
    spelled,
    logprob: token_logprobs[i],
    top: sortTop(top_logprobs[i]),
    before: null,
  }));
  Object.assign(remote, { next: sortTop(top_logprobs.at(-1)), readText: text, place: null });
}

/** The log-probabilities of a prompt, with `echo`, and of the likeliest token behind it. */
async function score(fields, signal) {
  const body = { ...fields, max_tokens: 1, temperature: 0, logprobs: N_EXPECTED };
  const overflow = state.sample.overflow;
  const response = await ask("v1/completions", { ...body, special: false, overflow }, signal);
  return (await response.json()).choices[0].logprobs;
}

function sortTop(top) {
  return top && Object.entries(top).sort((a, b) => b[1] - a[1]);
}

/** Have the server draw up to `count` tokens, and show each as it comes. */
function continueRemotely(count) {
  return workRemotely(async (signal) => {
    if (remote.readText !== textBox.value) await readPrompt(signal);
    const counted = startCount();
    const nDrawn = remote.tokens.filter(({ before }) => before !== null).length;
    const body = {
      prompt: textBox.value,
      max_tokens: Math.min(count, data.server.max_tokens),
      // The random numbers of what was drawn already are used up.
      seed: state.sample.seed + nDrawn,
      overflow: state.sample.overflow,
      logprobs: N_EXPECTED,
      special: false,
      ...pickSettings(),
    };
    Object.assign(remote, { next: null, place: null });
    state.hasTyped = true;
    let reason = null;
    for await (const { choices } of askForEvents("v1/completions", body, signal)) {
      const { text, logprobs, finish_reason } = choices[0];
      for (const [i, spelled] of logprobs.tokens.entries()) {
        remote.tokens.push({
          spelled,
          logprob: logprobs.token_logprobs[i],
          top: sortTop(logprobs.top_logprobs[i]),
          before: textBox.value,
        });
      }
      textBox.value += text;
      remote.readText = textBox.value;
      remote.note = counted();
      reason = finish_reason;
      showRemote();
    }
    remote.hasEnded = reason === "stop";
    if (remote.hasEnded) return;
    const { top_logprobs } = await score({ prompt: textBox.value }, signal);
    remote.next = sortTop(top_logprobs[0]);
  });
}

async function takeBackRemotely() {
  stopRemote();
  const { before } = remote.tokens.pop();
  textBox.value = before;
  Object.assign(remote, { readText: before, next: null, place: null, hasEnded: false });
  await workRemotely(async (signal) => {
    remote.next = sortTop((await score({ prompt: before }, signal)).top_logprobs[0]);
  });
}

/** A token as the server spells it, as elements. */
function spellRemote(spelled) {
  if (spelled.startsWith("bytes:")) {
    const bytes = spelled.slice("bytes:".length).split("\\x").slice(1);
    return bytes.map((byte) => make("i.symbol", {}, `‹${byte.toUpperCase()}›`));
  }
  return spellCharacters(spelled).map(([text, isSymbol]) =>
    isSymbol ? make("i.symbol", {}, text) : text,
  );
}

function labelRemote(spelled) {
  return make("span.label", {}, spellRemote(spelled));
}

function showRemote() {
  const { tokens } = remote;
  const at = Math.min(remote.place ?? tokens.length - 1, tokens.length - 1);
  const chips = tokens.map(({ spelled, logprob, before }, place) => {
    const bits = logprob === null ? 0 : -logprob / Math.LN2;
    const chance = logprob === null ? "" : ` ${formatPercent(Math.exp(logprob))}`;
    return make(
      `button.chip.surprise${place === at ? ".at" : ""}${before === null ? "" : ".drawn"}`,
      {
        "aria-pressed": String(place === at),
        tabindex: place === at ? 0 : -1,
        title: `${sayText("inText", { place })}${chance}`,
        style: { "--bits": Math.min(12, bits) },
        onclick: () => chooseRemotely(place),
        onkeydown: (event) => {
          const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -at, End: tokens.length };
          handleKeys(event, steps, (step) => chooseRemotely(at + step));
        },
      },
      spellRemote(spelled),
    );
  });
  fill(places.tokensHeading, say("tokensHeading", { count: formatCount(tokens.length) }));
  fill(places.tokens, chips);
  const help = ["tokensHelp", "surpriseHelp"];
  if (tokens.some(({ before }) => before !== null)) help.push("writtenHelp");
  if (tokens.some(({ spelled }) => spelled.startsWith("bytes:"))) help.push("bytesHelp");
  fill(
    places.tokensHelp,
    help.flatMap((words) => [...say(words), " "]),
  );
  showRemoteExpectation(at);
  showRemoteState();
}

function chooseRemotely(place) {
  remote.place = Math.min(remote.tokens.length - 1, Math.max(0, place));
  showRemote();
  places.tokens.children[remote.place].focus();
}

function showRemoteExpectation(at) {
  const came = remote.tokens[at + 1];
  const top = came ? came.top : remote.next;
  let outcome = say(remote.hasEnded ? "finished.document" : "expectOpen");
  if (came) {
    const chance = formatPercent(Math.exp(came.logprob));
    outcome = say("cameRemotely", { token: labelRemote(came.spelled), chance });
  }
  const rows = (top ?? []).map(([spelled, logprob]) =>
    make(
      `div.expected${spelled === came?.spelled ? ".came" : ""}`,
      {},
      labelRemote(spelled),
      makeBar(["pale", Math.exp(logprob)]),
      make("span.number", {}, formatPercent(Math.exp(logprob))),
    ),
  );
  const token = remote.tokens[at];
  fill(
    places.expect,
    make("h2", {}, token ? say("expectHeading", { token: labelRemote(token.spelled) }) : ""),
    make("p.outcome", {}, outcome),
    make("div.expectation", {}, rows),
    make("p.note", {}, say("barsRemotely")),
  );
}

function showRemoteState() {
  const { running, tokens } = remote;
  fill(places.generate, say(running ? "stop" : "generate"));
  places.generate.disabled = !running && remote.hasEnded;
  places.oneStep.disabled = running !== null || remote.hasEnded;
  places.stepBack.disabled = running !== null || (tokens.at(-1)?.before ?? null) === null;
  fill(places.remoteProblem, remote.problem);
  fill(places.remoteNote, remote.note);
  if (places.cost) fill(places.cost, say("lookCost", estimateCost()));
}

// -- looking inside ------------------------------------------------------------------------------

const MB = 1e6;
let speed = null; // products of two numbers per second, as model.js computes them here

/** What looking inside costs: the download, and the seconds that reading the text will take. */
function estimateCost() {
  if (speed === null) {
    const [T, D, N] = [4, 512, 2048];
    const weight = new Float32Array(N * D);
    const started = performance.now();
    for (let n = 0; n < 4; n++) multiply(new Float32Array(T * D), weight, null, T); // and warm up
    speed = (4 * T * D * N * 1000) / (performance.now() - started);
  }
  const products = countWeights() * Math.max(1, remote.tokens.length);
  return {
    size: formatCount(Math.ceil(data.server.size / MB)),
    seconds: formatCount(Math.ceil(products / speed)),
  };
}

function showLook() {
  const { loading } = remote;
  const parts = [make("h2", {}, say("lookHeading"))];
  places.cost = null;
  if (data.server.size === null) {
    parts.push(make("p", {}, say("lookInTerminal", { command: nameCommand() })));
  } else if (loading) {
    parts.push(
      makePlace("loadingWords", "p", { role: "status" }),
      makePlace("loadingBar", "progress", { max: 1 }),
      make(
        "div.row",
        {},
        make("button", { onclick: () => loading.controller.abort() }, say("stop")),
      ),
    );
  } else {
    parts.push(
      make("p", {}, say("lookHelp")),
      makePlace("cost", "p"),
      make("div.row", {}, make("button.main", { onclick: lookInside }, say("lookInside"))),
    );
  }
  fill(places.look, parts, make("p.problem", { role: "alert" }, remote.lookProblem));
  if (places.cost) fill(places.cost, say("lookCost", estimateCost()));
  if (loading) showLoading();
}

function nameCommand() {
  return make("code", {}, `gptmini inspect ${data.name} --prompt "TEXT"`);
}

function showLoading() {
  const { words, share } = remote.loading;
  fill(places.loadingWords, say(words, { percent: Math.floor(100 * share) }));
  places.loadingBar.value = share;
}

/** Fetch the weights, read the text, and go on as the page of a small model. */
async function lookInside() {
  stopRemote();
  const controller = new AbortController();
  const { signal } = controller;
  Object.assign(remote, { loading: { controller, share: 0, words: "fetching" }, lookProblem: "" });
  const report = (words, share) => {
    const isNews = Math.floor(100 * share) !== Math.floor(100 * remote.loading.share);
    Object.assign(remote.loading, { words, share });
    if (isNews) showLoading();
  };
  showLook();
  try {
    const gpt = await fetchModel((share) => report("fetching", share), signal);
    tokenizer = createTokenizer(data.tokenizer);
    startModel(gpt);
    readText();
    await readInPieces(continuation.context, (share) => report("reading", share), signal);
  } catch (error) {
    models.clear();
    Object.assign(remote, { loading: null, lookProblem: "" });
    if (error.name !== "AbortError") remote.lookProblem = error.message;
    showLook();
    return;
  }
  remote.loading = null;
  const { is_small } = data.server;
  openModel(textBox.value, is_small && textBox.value === "");
  if (!is_small) document.getElementById("path").scrollIntoView();
}

/** Fetch and decode tensor by tensor, so that few bytes are there twice. */
async function fetchModel(report, signal) {
  const response = await ask("weights", null, signal);
  const reader = response.body.getReader();
  const weights = {};
  let part = new Uint8Array();
  let received = 0;
  for (const tensor of data.tensors) {
    const bytes = new Uint8Array(countBytes(tensor));
    for (let filled = 0; filled < bytes.length; ) {
      if (part.length === 0) {
        const { done, value } = await reader.read().catch(explainLoss);
        if (done) explainLoss(new Error("no end"));
        part = value;
      }
      const taken = part.subarray(0, bytes.length - filled);
      bytes.set(taken, filled);
      part = part.subarray(taken.length);
      filled += taken.length;
      received += taken.length;
      report(received / data.server.size);
    }
    Object.assign(weights, decodeWeights([tensor], bytes));
  }
  return new GPT(data.config, weights);
}

const PIECE = 4; // tokens; as many as model.js multiplies at a time

/** Read a text while the window stays alive. */
async function readInPieces(tokens, report, signal) {
  for (let end = PIECE; end < tokens.length; end += PIECE) {
    readers.whole.read(tokens.slice(0, end));
    report(end / tokens.length);
    await new Promise((resolve) => setTimeout(resolve));
    signal.throwIfAborted();
  }
}
