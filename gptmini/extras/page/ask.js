// What the page asks the server that gave it: the chat, and the text of a model that is too large to
// travel. A file that was mailed asks nobody.
"use strict";

// -- requests ------------------------------------------------------------------------------------

/** Ask the server, by POST. Throws errors whose message is for readers; one that was stopped by its
 * signal is an AbortError. */
async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, options).catch(explainLoss);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null); // a proxy may answer in its own words
  throw new Error(answer?.error?.message ?? sayText("refused", { status: response.status }));
}

/** Throw what a broken connection means, but let a stop be a stop. */
function explainLoss(error) {
  throw error.name === "AbortError" ? error : new Error(sayText("serverGone"));
}

/** Yield the events of an answer as they come. */
async function* askForEvents(path, body, signal) {
  const response = await ask(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unfinished = ""; // an event may arrive in several parts
  for (;;) {
    const { done, value } = await reader.read().catch(explainLoss);
    if (done) explainLoss(new Error("no end"));
    const events = (unfinished + value).split("\n\n");
    unfinished = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      const content = JSON.parse(event.slice("data: ".length));
      if (content.error) throw new Error(content.error.message);
      yield content;
    }
  }
}

/** The settings of the sliders, as a request has them. */
function pickSettings() {
  const { temperature, top_k, top_p, min_p } = state.sample;
  return { temperature, top_k, top_p, min_p };
}

// -- the chat ------------------------------------------------------------------------------------

const chat = { messages: [], running: null, problem: "" };
let chatBox;

function makeChat() {
  if (!data.server?.chat) return null;
  const text = chatBox?.value ?? "";
  chatBox = make("textarea", {
    id: "message",
    rows: 2,
    enterkeyhint: "send",
    "aria-label": sayText("yourMessage"),
    placeholder: sayText("yourMessage"),
    onkeydown: (event) => {
      // While an input method composes (Chinese), Enter chooses characters.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      sendMessage();
    },
  });
  chatBox.value = text;
  const card = make(
    "section.card",
    { id: "chat" },
    make("h2", say("chatHeading")),
    makePlace("messages", "div.messages", { role: "log", tabindex: 0 }),
    makePlace("chatProblem", "p.problem", { role: "alert" }),
    chatBox,
    make(
      "div.row",
      makePlace("send", "button.main", {
        onclick: () => (chat.running ? chat.running.abort() : sendMessage()),
      }),
      makePlace("newChat", "button", { onclick: startChat }, say("newChat")),
    ),
  );
  showChat();
  return card;
}

function showChat() {
  const messages = chat.messages.map(({ role, content }) =>
    make(`div.message.${role}`, make("small", say(role)), make("div", content)),
  );
  fill(places.messages, messages.length ? messages : make("p.note", say("chatHelp")));
  fill(places.chatProblem, chat.problem);
  showChatState();
}

/** Show what changes with each token. */
function showChatState() {
  const { messages } = places;
  const last = chat.messages.at(-1);
  const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
  if (last) messages.lastChild.lastChild.textContent = last.content;
  if (isAtEnd || chat.running === null) messages.scrollTop = messages.scrollHeight;
  messages.setAttribute("aria-busy", String(chat.running !== null));
  fill(places.send, say(chat.running ? "stop" : "send"));
  places.newChat.disabled = chat.messages.length === 0;
}

function startChat() {
  chat.running?.abort();
  Object.assign(chat, { messages: [], running: null, problem: "" });
  showChat();
  chatBox.focus();
}

/** Send the message in the box, and show the answer as it comes. */
async function sendMessage() {
  const question = chatBox.value.trim();
  if (question === "" || chat.running) return;
  const { messages } = chat;
  messages.push({ role: "user", content: question });
  const body = { messages: structuredClone(messages), ...pickSettings() };
  const answer = { role: "assistant", content: "" };
  messages.push(answer);
  const running = new AbortController();
  Object.assign(chat, { running, problem: "" });
  chatBox.value = "";
  showChat();
  let hasCome = false;
  let problem = "";
  try {
    for await (const { choices } of askForEvents("v1/chat/completions", body, running.signal)) {
      hasCome = true;
      answer.content += choices[0].delta.content ?? "";
      if (choices[0].finish_reason === "length") problem = sayText("answerCut");
      if (chat.running === running) showChatState();
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  if (chat.running !== running) return; // there is a new conversation
  if (!hasCome) {
    messages.splice(-2);
    chatBox.value ||= question;
  }
  Object.assign(chat, { running: null, problem });
  showChat();
}

// -- the text of a model that is too large -------------------------------------------------------
//
// The server continues the text. Looking inside is for models that travel.

const remote = { text: "", running: null, problem: "" }; // running: an AbortController

function buildRemotePage() {
  makePlace("generate", "button.main", {
    onclick: () => (remote.running ? remote.running.abort() : continueRemotely()),
  });
  fill(
    document.querySelector("main"),
    makeHeader(),
    makeNavigation({ top: "toText" }),
    makeChat(),
    make(
      "div.journey",
      makeTextCard(
        makeTextBox(() => remote.running?.abort()),
        make("div.row", places.generate),
        makePlace("remoteProblem", "p.problem", { role: "alert" }),
      ),
      make("section.card", makeSettings()),
    ),
    make("footer.note", say("footServed")),
  );
  showRemote();
}

function showRemote() {
  fill(places.generate, say(remote.running ? "stop" : "generate"));
  fill(places.remoteProblem, remote.problem);
}

/** Have the server continue the text in the box. */
async function continueRemotely() {
  const running = new AbortController();
  const text = readBox(remote.text);
  Object.assign(remote, { text, running, problem: "" });
  showRemote();
  const body = {
    prompt: text,
    max_tokens: Math.min(data.sample.max_new_tokens, data.server.max_tokens),
    seed: state.sample.seed,
    overflow: state.sample.overflow,
    special: false,
    ...pickSettings(),
  };
  try {
    for await (const { choices } of askForEvents("v1/completions", body, running.signal)) {
      remote.text += choices[0].text;
      writeBox(remote.text);
    }
  } catch (error) {
    if (error.name !== "AbortError") remote.problem = error.message; // a stop is no problem
  }
  remote.running = null;
  showRemote();
}
