// The page of a model that is too large to travel: the server continues the text, and says what the
// model expected of each token. Looking inside is for models that travel.
"use strict";

const N_EXPECTED = 10; // tokens that the server lists for each place
const READ_DELAY = 400; // milliseconds without typing before the server reads the text

// What the server said of the text.
const remote = {
  text: "",
  tokens: [], // {spelled, logprob, top}; `top` is [[spelled, logprob]], the likeliest first
  next: [], // what may come behind them, as `top`
  place: null, // the selected token; null: the last
  running: null, // an AbortController
  timer: null,
  problem: "",
  note: "",
};

function openRemotePage() {
  buildRemotePage();
  return workRemotely(readRemotely);
}

function buildRemotePage() {
  const type = () => {
    stopRemote();
    remote.timer = setTimeout(() => workRemotely(readRemotely), READ_DELAY);
  };
  makePlace("generate", "button.main", {
    onclick: () => (remote.running ? stopRemote() : workRemotely(continueRemotely)),
  });
  fill(
    document.querySelector("main"),
    makeHeader(),
    makeNavigation({ top: "toText" }),
    makeChat(),
    make(
      "div.journey",
      {},
      makeTextCard(
        makeTextBox(type),
        make("div.row", {}, places.generate, makePlace("remoteNote", "small")),
        makePlace("remoteProblem", "p.problem", { role: "alert" }),
      ),
      make("section.card", {}, makePlace("expect", "div"), makeSettings()),
    ),
    make("footer.note", {}, say("footServed")),
  );
  showRemote();
}

function stopRemote() {
  clearTimeout(remote.timer);
  remote.running?.abort();
}

/** Do something with the server, one thing at a time; a stop is no problem. */
async function workRemotely(work) {
  stopRemote();
  const running = new AbortController();
  Object.assign(remote, { running, problem: "" });
  showRemote();
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

/** Have the server read the text, and say what it expected of each token and behind the last. */
async function readRemotely(signal) {
  remote.text = readBox(remote.text);
  // A space at the end is left to the next token, where tokens are words.
  const isWords = !["byte", "char"].includes(data.tokenizer.kind);
  const body = {
    prompt: isWords ? remote.text.replace(/ $/, "") : remote.text,
    echo: true,
    max_tokens: 1,
    temperature: 0,
    logprobs: N_EXPECTED,
    special: false,
    overflow: state.sample.overflow,
  };
  const answer = await (await ask("v1/completions", body, signal)).json();
  const { tokens, token_logprobs, top_logprobs } = answer.choices[0].logprobs;
  const read = tokens.map((spelled, i) => ({
    spelled,
    logprob: token_logprobs[i],
    top: Object.entries(top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
  const { top: next } = read.pop(); // the token that was drawn
  Object.assign(remote, { tokens: read, next, place: null });
}

/** Have the server continue the text, and then read all of it. */
async function continueRemotely(signal) {
  remote.text = readBox(remote.text);
  const count = startCount();
  const body = {
    prompt: remote.text,
    max_tokens: Math.min(data.sample.max_new_tokens, data.server.max_tokens),
    seed: state.sample.seed,
    overflow: state.sample.overflow,
    special: false,
    ...pickSettings(),
  };
  for await (const { choices } of askForEvents("v1/completions", body, signal)) {
    remote.text += choices[0].text;
    writeBox(remote.text);
    fill(places.remoteNote, (remote.note = count()));
  }
  await readRemotely(signal);
}

/** A token as the server spells it. */
function labelRemote(spelled) {
  const bytes = spelled.startsWith("bytes:") ? spelled.split("\\x").slice(1) : null;
  const parts = bytes?.map((byte) => [`‹${byte.toUpperCase()}›`, true]) ?? spellCharacters(spelled);
  return make("span.label", {}, markSymbols(parts));
}

function showRemote() {
  const { tokens, running } = remote;
  const at = Math.min(remote.place ?? tokens.length - 1, tokens.length - 1);
  const chips = tokens.map(({ spelled }, place) =>
    make(
      "button.chip",
      { "aria-pressed": String(place === at), onclick: () => chooseRemotely(place) },
      labelRemote(spelled),
    ),
  );
  fill(places.tokensHeading, say("tokensHeading", { count: formatCount(tokens.length) }));
  fill(places.tokens, chips);
  fill(places.tokensHelp, say("tokensHelp"));
  rove(places.tokens, (chip) => chip.click());
  fill(places.generate, say(running ? "stop" : "generate"));
  fill(places.remoteProblem, remote.problem);
  fill(places.remoteNote, remote.note);
  if (!tokens.length) return; // the server has not answered yet
  const came = tokens[at + 1];
  const token = came && labelRemote(came.spelled);
  const chance = came && formatPercent(Math.exp(came.logprob));
  fill(
    places.expect,
    make("h2", {}, say("expectHeading", { token: labelRemote(tokens[at].spelled) })),
    make("p.outcome", {}, came ? say("cameRemotely", { token, chance }) : ""),
    makeBars(
      (came?.top ?? remote.next).map(([spelled, logprob]) => [
        labelRemote(spelled),
        makeBar(["solid", Math.exp(logprob)]),
        formatPercent(Math.exp(logprob)),
      ]),
    ),
    make("p.note", {}, say("barsRemotely")),
  );
}

function chooseRemotely(place) {
  remote.place = place;
  showRemote();
  places.tokens.children[place].focus();
}
