// The page: a text box and what the model makes of it. All text becomes text, never markup.
"use strict";

const { data, gpt, tokenizer } = openPage(document);
const reader = new Reader(gpt);

function create(tag, text = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  document.querySelector("main").append(element);
  return element;
}

document.title = `gptmini: ${data.name}`;
create("h1", data.name);
const prompt = create("textarea");
prompt.value = data.prompt;
const button = create("button", "Generate");
const shown = create("pre");

button.addEventListener("click", () => {
  const continuation = new Continuation(reader, tokenizer, data.sample, prompt.value);
  function step() {
    const token = continuation.next();
    shown.textContent = prompt.value + continuation.text;
    if (token !== null) setTimeout(step);
  }
  step();
});
