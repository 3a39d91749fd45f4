// Where the text in the box comes from: what of it stands in the training text, letter for letter.
// The server looks for it; or the training text is in the page, and the classes here search it.
"use strict";

const SHORTEST_COPY = 20; // characters
const MAX_SEARCHED = 10_000; // characters at the end of the text in the box; no server takes more
const SOURCES_DELAY = 400; // milliseconds without a change before the server is asked

// -- search --------------------------------------------------------------------------------------

/** All stretches of a text of bytes, as an automaton (Blumer et al. 1985).
 *
 * A state stands for stretches that end at the same places of the text: the longest has `lengths`
 * bytes, and what remains of the shortest without its first byte is in the state `links`. State 0
 * is the empty stretch. `next` has the state behind a byte, or 0, at `width * state + column`.
 */
class Stretches {
  constructor(bytes) {
    this.columns = new Uint8Array(256); // by byte; 0: not in the text
    let width = 1;
    for (const byte of bytes) if (!this.columns[byte]) this.columns[byte] = width++;
    this.width = width;
    this.lengths = new Int32Array(2 * bytes.length + 1);
    this.links = new Int32Array(2 * bytes.length + 1);
    this.next = new Int32Array((2 * bytes.length + 1) * width);
    this.count = 1;
    this.ends = [0]; // by the number of bytes from the beginning: the state of all of these
    for (const byte of bytes) this.ends.push(this.append(this.columns[byte], this.ends.at(-1)));
  }

  /** Append a byte to the text, whose state is `last`; returns the new one. */
  append(column, last) {
    const { next, links, lengths, width } = this;
    const added = this.count++;
    lengths[added] = lengths[last] + 1;
    let state = last;
    while (next[width * state + column] === 0) {
      next[width * state + column] = added;
      if (state === 0) return added;
      state = links[state];
    }
    const found = next[width * state + column];
    links[added] = found;
    if (lengths[found] === lengths[state] + 1) return added;
    // The shorter stretches of `found` end here too, the longer ones do not: they part.
    const shorter = this.count++;
    lengths[shorter] = lengths[state] + 1;
    links[shorter] = links[found];
    next.copyWithin(width * shorter, width * found, width * (found + 1));
    links[found] = links[added] = shorter;
    while (next[width * state + column] === found) {
      next[width * state + column] = shorter;
      if (state === 0) break;
      state = links[state];
    }
    return added;
  }

  /** Measure how many bytes `other` has in a row of those before each place, from 0 to the end. */
  measure(other) {
    const { next, links, lengths, width, columns } = this;
    const longest = new Int32Array(this.count); // by state: bytes of its stretches that `other` has
    let state = 0;
    let length = 0;
    for (let at = 0; at < other.length; at++) {
      const column = columns[other[at]];
      if (column === 0) {
        state = length = 0;
        continue;
      }
      while (state !== 0 && next[width * state + column] === 0) {
        state = links[state];
        length = lengths[state];
      }
      state = next[width * state + column];
      length += 1;
      if (length > longest[state]) longest[state] = length;
    }
    const order = new Int32Array(range(this.count)).sort((a, b) => lengths[a] - lengths[b]);
    // Where a stretch stands, its end stands, too; and of one that does not, a shorter end may.
    for (const each of order.toReversed())
      if (longest[each]) longest[links[each]] = lengths[links[each]];
    for (const each of order) longest[each] ||= longest[links[each]];
    return this.ends.map((each) => longest[each]);
  }
}

/** A training text: UTF-8 with a byte behind each document that stands in no UTF-8.
 *
 * `pieces` are [begin, file, line, whether it is a record, document], in the order of the text.
 */
class TrainingText {
  constructor(binary, { files, pieces }) {
    this.binary = binary; // a string whose characters are bytes, which can be searched quickly
    this.bytes = toBytes(binary);
    this.files = files;
    this.pieces = pieces;
  }

  /** Find what of a text stands in this one, as Python's `search` does. */
  find(text) {
    const characters = Array.from(text);
    const encoder = new TextEncoder();
    const bytes = encoder.encode(text);
    const bounds = [0]; // where characters begin, in bytes
    for (const each of characters) bounds.push(bounds.at(-1) + encoder.encode(each).length);
    const measured = new Stretches(bytes).measure(this.bytes);
    // The furthest start for each end; of those with one start, the last end counts.
    const copies = [];
    let start = 0;
    for (let end = 1; end < bounds.length; end++) {
      while (bounds[start] < bounds[end] - measured[bounds[end]]) start += 1; // whole characters
      if (end - start < SHORTEST_COPY) continue;
      if (copies.at(-1)?.start === start) copies.pop();
      if (/[\p{L}\p{N}]/u.test(characters.slice(start, end).join(""))) copies.push({ start, end });
    }
    let covered = 0;
    let reached = 0;
    for (const copy of copies) {
      covered += copy.end - Math.max(copy.start, reached);
      reached = copy.end;
      const copied = bytes.subarray(bounds[copy.start], bounds[copy.end]);
      const position = this.binary.indexOf(toBinary(copied));
      // A copy that begins with line breaks is looked up where its words begin.
      const words = characters.slice(copy.start, copy.end).join("");
      const [before] = words.match(/^(?:[^\S\ufeff]|[\x1c-\x1f\x85])*/);
      Object.assign(copy, this.locate(position + encoder.encode(before).length));
      copy.length = copy.end - copy.start;
    }
    const longest = Math.max(0, ...copies.map(({ length }) => length));
    return { share: covered / Math.max(1, characters.length), longest, copies };
  }

  /** The file, the line and the document of a position. */
  locate(position) {
    const number = this.pieces.findLastIndex(([begin]) => begin <= position);
    const [begin, file, firstLine, isRecord, document] = this.pieces[number];
    let line = firstLine || null;
    if (line !== null && !isRecord)
      for (let at = begin; at < position; at++) if (this.bytes[at] === 10) line += 1;
    return { file: this.files[file], line, document };
  }
}

function toBinary(bytes) {
  return Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
}

// -- what the reader sees ------------------------------------------------------------------------

// What was found in a text; `found` is as the server sends it.
const origin = { asked: null, text: "", found: null, chosen: 0, problem: "", timer: null };
let trainingText = null;

/** The part of the page that says where the text comes from; null where nobody can know. */
function makeSources() {
  if (!data.sources && !data.server?.sources) return null;
  const details = make(
    "details",
    { id: "sources" },
    make("summary", {}, say("sourcesHeading")),
    makePlace("sources", "div.sources"),
  );
  details.open = document.getElementById("sources")?.open ?? false; // as it was
  details.addEventListener("toggle", () => {
    origin.problem = "";
    refreshSources();
  });
  showSources();
  return details;
}

/** Look up the text in the box once it rests, if the reader wants to see where it comes from. */
function refreshSources() {
  if (!places.sources?.parentElement.open || origin.problem) return;
  if (origin.asked === textBox.value) return;
  origin.asked = textBox.value;
  clearTimeout(origin.timer);
  origin.timer = setTimeout(findSources, data.sources ? 0 : SOURCES_DELAY);
}

async function findSources() {
  const { asked } = origin;
  const text = Array.from(asked).slice(-MAX_SEARCHED).join("");
  let found = null;
  let problem = "";
  try {
    if (data.sources) found = openTrainingText().find(text);
    else found = await (await ask("sources", { text })).json();
  } catch (error) {
    problem = error.message;
    origin.asked = null;
  }
  if (problem === "" && origin.asked !== asked) return; // the text has gone on
  const lengths = found?.copies.map(({ length }) => length) ?? [];
  Object.assign(origin, { text, found, problem, chosen: lengths.indexOf(found?.longest) });
  showSources();
}

function openTrainingText() {
  trainingText ??= new TrainingText(
    atob(document.getElementById("sources-text").textContent),
    data.sources,
  );
  return trainingText;
}

function showSources() {
  const { text, found, chosen, problem } = origin;
  if (found === null) {
    fill(places.sources, make("p.problem", { role: "alert" }, problem));
    return;
  }
  const scrolled = places.sources.querySelector(".copied")?.scrollTop ?? 0;
  const { copies, share } = found;
  const copy = copies[chosen];
  const longest = copies.find(({ length }) => length === found.longest);
  fill(
    places.sources,
    make(
      "p",
      { role: "status" },
      copies.length
        ? say("sourcesFound", {
            share: formatPercent(share),
            count: formatCount(found.longest),
            place: makeSourcePlace(longest),
          })
        : say("sourcesNone", { count: SHORTEST_COPY }),
    ),
    make("div.copied", { role: "group", "aria-label": sayText("sourcesHeading") }, markCopies()),
    copies.length
      ? make(
          "p.outcome",
          { role: "status" },
          say("copyFrom", { count: formatCount(copy.length), place: makeSourcePlace(copy) }),
        )
      : null,
    make(
      "p.note",
      {},
      copies.length ? say("copiesHelp", { count: SHORTEST_COPY }) : "",
      Array.from(textBox.value).length > MAX_SEARCHED
        ? [" ", ...say("sourcesCut", { count: formatCount(MAX_SEARCHED) })]
        : "",
    ),
  );
  places.sources.querySelector(".copied").scrollTop = scrolled;
}

/** The text with a button for each copy; where two overlap, the second begins. */
function markCopies() {
  const { found, chosen } = origin;
  const { copies } = found;
  const characters = Array.from(origin.text);
  const cut = (from, to) => characters.slice(from, to).join("");
  const parts = copies.flatMap(({ start, end }, number) => {
    const until = Math.min(end, copies[number + 1]?.start ?? end);
    const chosenEnd = number < chosen ? start : clamp(copies[chosen].end, start, until);
    const mark = make(
      "mark",
      {
        role: "button",
        tabindex: number === chosen ? 0 : -1,
        "aria-pressed": String(number === chosen),
        "data-focus": `copy-${number}`,
        onclick: () => chooseCopy(number),
        onkeydown: moveBetweenCopies,
      },
      make("span.chosen", {}, cut(start, chosenEnd)),
      cut(chosenEnd, until),
    );
    return [cut(copies[number - 1]?.end ?? 0, start), mark];
  });
  return [...parts, cut(copies.at(-1)?.end ?? 0)];
}

function clamp(number, low, high) {
  return Math.min(Math.max(number, low), high);
}

function chooseCopy(number) {
  origin.chosen = number;
  showSources();
  places.sources.querySelectorAll("mark")[number].focus();
}

function moveBetweenCopies(event) {
  const { chosen, found } = origin;
  const last = found.copies.length - 1;
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -chosen, End: last, Enter: 0, " ": 0 };
  handleKeys(event, steps, (step) => chooseCopy(clamp(chosen + step, 0, last)));
}

/** Where a copy stands: notes/a.md:12. */
function makeSourcePlace({ file, line, document }) {
  const place = line === null ? sayText("fileDocument", { file, document }) : `${file}:${line}`;
  return make("span.label", {}, place);
}
