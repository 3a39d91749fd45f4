// The model once more, in plain JavaScript: text -> tokens -> logits -> the next token -> text.
//
// It follows gptmini's Python file by file: tokenizer/, then model/layers.py, attention.py and
// gpt.py, then generate/filters.py, sampler.py and sequence.py. Names are the same, written as
// JavaScript writes them (project_qkv is projectQkv); settings keep those of config.yaml. There is no
// batch: a pass reads T tokens of one text. In place of a KV cache stands the record of all that was
// computed, see `Reader`: keys and values of earlier tokens are in it.
//
// Behind `forward` stands `backward`, written out: PyTorch derives it. It takes what went in and the
// gradient of what came out, d…, writes those of its weights into `gradients`, by the names of the
// weights, and returns that of what went in. All but the smallest are generators that pause between
// two products, so that a page can do something else in between.
//
// Numbers are stored in float32 and summed in float64, so results are those of PyTorch in float32
// up to rounding. A tensor is a flat Float32Array, its shape stands in the comment behind it.
//
// Letters: T positions of a pass, S keys, H query heads, G KV heads, D width, K head size, V
// vocabulary, L layers.
"use strict";

// -- tokenizer: text to tokens and back ----------------------------------------------------------

const END_OF_TEXT = "<|endoftext|>";
const CHAT_END = "<|im_end|>"; // behind each message of a chat

/** Create the tokenizer that a run's tokenizer.json describes. */
function createTokenizer(data) {
  if (data.kind === "byte") return new ByteTokenizer(data);
  if (data.kind === "char") return new CharTokenizer(data);
  return new BpeTokenizer(data);
}

/** What all tokenizers share; each kind adds `encode`, `decodeToken` and its special tokens. */
class Tokenizer {
  addsBos = false; // whether the end-of-text token stands before prompts, too
  specialTokens = {}; // the tokens that no text encodes to, by name
  endTokens = []; // the tokens that end a text

  /** Put the special tokens behind `nPlain` others: the end-of-text token, and those of a chat. */
  addSpecial(nPlain, data) {
    this.eosToken = nPlain;
    this.specialTokens = data.special_tokens ?? { [END_OF_TEXT]: nPlain };
    this.endTokens = [nPlain];
    if (CHAT_END in this.specialTokens) this.endTokens.unshift(this.specialTokens[CHAT_END]);
    this.vocabSize = nPlain + Object.keys(this.specialTokens).length;
  }

  listTokens() {
    return Array.from({ length: this.vocabSize }, (_, token) => token);
  }

  /** The tokens that begin with a space, as a set. */
  get spaced() {
    const begins = (token) => this.decodeToken(token)[0] === 32;
    this.spacedTokens ??= new Set(this.listTokens().filter(begins));
    return this.spacedTokens;
  }

  /** Put the end-of-text token before those of a prompt, if that is done and it is not there. */
  addBos(tokens) {
    return !this.addsBos || tokens[0] === this.eosToken ? tokens : [this.eosToken, ...tokens];
  }

  /** Decode tokens into text; invalid UTF-8 becomes U+FFFD. `unfinished` holds back such an end. */
  decode(tokens, unfinished = false) {
    const bytes = tokens.flatMap((token) => [...this.decodeToken(token)]);
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return decoder.decode(new Uint8Array(bytes), { stream: unfinished });
  }
}

/** The 256 bytes: encodes any text, learns nothing. */
class ByteTokenizer extends Tokenizer {
  kind = "byte";

  constructor(data) {
    super();
    this.addSpecial(256, data);
  }

  encode(text) {
    return [...new TextEncoder().encode(text)];
  }

  /** Return the bytes that a token stands for; none for the end-of-text token. */
  decodeToken(token) {
    return token < 256 ? Uint8Array.of(token) : new Uint8Array();
  }
}

/** Bytes, plus one token per non-ASCII character of a corpus; others are split into bytes. */
class CharTokenizer extends Tokenizer {
  kind = "char";

  constructor(data) {
    super();
    this.characters = [...data.characters]; // by code point
    this.addSpecial(256 + this.characters.length, data);
    this.tokens = new Map(this.characters.map((character, index) => [character, 256 + index]));
  }

  encode(text) {
    return [...text].flatMap((character) => {
      const token = this.tokens.get(character);
      return token === undefined ? [...new TextEncoder().encode(character)] : [token];
    });
  }

  decodeToken(token) {
    if (token < 256) return Uint8Array.of(token);
    return new TextEncoder().encode(this.characters[token - 256] ?? "");
  }
}

/** A byte-pair encoding: words by a pattern, then merges within a word, lowest rank first. */
class BpeTokenizer extends Tokenizer {
  constructor(data) {
    super();
    this.kind = data.kind;
    this.pattern = translatePattern(data.pattern);
    this.specialTokens = data.special_tokens;
    this.eosToken = this.specialTokens[data.document ?? END_OF_TEXT];
    const ends = new Set([...(data.ends ?? []), data.document ?? END_OF_TEXT]);
    this.endTokens = [...ends].map((name) => this.specialTokens[name]);
    this.addsBos = data.adds_bos ?? false;
    // A string of characters below 256 stands for bytes: it can be a key, and a part of another.
    this.ranks = new Map(Object.entries(data.ranks).map(([token, rank]) => [atob(token), rank]));
    this.pieces = new Map([...this.ranks].map(([bytes, rank]) => [rank, toBytes(bytes)]));
    for (const [name, token] of Object.entries(this.specialTokens)) {
      this.pieces.set(token, new TextEncoder().encode(name));
    }
    this.pieces.set(this.eosToken, new Uint8Array());
    this.vocabSize = 1 + Math.max(...this.pieces.keys());
    this.missing = new Set(); // bytes without a token, which `encode` leaves out
    for (let byte = 0; byte < 256; byte++) {
      if (!this.ranks.has(String.fromCharCode(byte))) this.missing.add(byte);
    }
  }

  encode(text) {
    const tokens = [];
    for (const [word] of text.matchAll(this.pattern)) {
      const bytes = [...new TextEncoder().encode(word)].filter((byte) => !this.missing.has(byte));
      if (bytes.length) tokens.push(...this.mergePairs(String.fromCharCode(...bytes)));
    }
    return tokens;
  }

  /** Encode a word, given as bytes: merge the pair of lowest rank until no pair has one. */
  mergePairs(word) {
    if (this.ranks.has(word)) return [this.ranks.get(word)];
    const parts = [...word]; // bytes
    for (;;) {
      let lowest = Infinity;
      let place = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(parts[i] + parts[i + 1]) ?? Infinity;
        if (rank < lowest) [lowest, place] = [rank, i];
      }
      if (place < 0) return parts.map((part) => this.ranks.get(part));
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
  }

  decodeToken(token) {
    return this.pieces.get(token) ?? new Uint8Array(); // a gap in the ranks has no bytes
  }
}

/** The bytes that a string of characters below 256 stands for. */
function toBytes(string) {
  const bytes = new Uint8Array(string.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = string.charCodeAt(i);
  return bytes;
}

/** Write a word pattern of tiktoken as a regular expression of JavaScript with the same matches.
 *
 * Possessive quantifiers (?+ ++ *+) only spare backtracking in the patterns that export.py lets
 * pass. \s is any white space of Unicode there; JavaScript has another one, and it has no
 * case-insensitive groups in all browsers.
 */
function translatePattern(pattern) {
  const other = { s: "ſ", k: "\u212a" }; // what else has that letter as its small letter
  const anyCase = pattern.replace(/\(\?i:((?:[^()]|\((?:[^()])*\))*)\)/g, (_, group) => {
    const letters = group.replace(/\[([^\]]*)\]|[a-z]/g, (part, inside) => {
      const each = (letter) => letter + letter.toUpperCase() + (other[letter] ?? "");
      return `[${(inside ?? part).replace(/[a-z]/g, each)}]`;
    });
    return `(?:${letters})`;
  });
  const greedy = anyCase.replace(/([?*+}])\+/g, "$1");
  const spaces = greedy.replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}");
  return new RegExp(spaces, "gu");
}

// -- layers: linear, norms, feed-forward, positions ----------------------------------------------

/** A weight (N, D) and perhaps a bias (N,). */
class Linear {
  constructor(weights, name) {
    this.name = name;
    this.weight = weights[`${name}.weight`]; // (N, D)
    this.bias = weights[`${name}.bias`] ?? null; // (N,)
  }

  /** (T, D) -> (T, N) */
  forward(x, T) {
    return multiply(x, this.weight, this.bias, T);
  }

  /** x (T, D), dOut (T, N) -> dX (T, D) */
  *backward(x, dOut, T, gradients) {
    const N = dOut.length / T;
    if (this.bias !== null) gradients[`${this.name}.bias`] = sumRows(dOut, T); // (N,)
    gradients[`${this.name}.weight`] = multiplyTransposed(dOut, x, T); // (N, D)
    yield;
    const dX = multiply(dOut, transpose(this.weight, N), null, T);
    yield;
    return dX;
  }
}

/** x (T, D) times weight (N, D), transposed, plus bias (N): (T, N). */
function multiply(x, weight, bias, T) {
  const D = x.length / T;
  const N = weight.length / D;
  const input = new Float64Array(x); // converted once, and not at each product
  const out = new Float32Array(T * N);
  let t = 0;
  for (; t + 4 <= T; t += 4) multiplyFour(input, weight, t, D, N, out);
  for (; t < T; t++) multiplyOne(input, weight, t, D, N, out);
  if (bias !== null) {
    for (let i = 0; i < out.length; i++) out[i] += bias[i % N];
  }
  return out;
}

/** Positions t to t + 3, by two rows of the weight at a time: what is read serves several sums. */
function multiplyFour(x, weight, t, D, N, out) {
  const x0 = t * D;
  const x1 = x0 + D;
  const x2 = x1 + D;
  const x3 = x2 + D;
  const at = t * N;
  for (let n = 0; n < N; n += 2) {
    const m = Math.min(n + 1, N - 1); // of an odd number of rows, the last is computed twice
    const row = n * D;
    const next = m * D;
    let a0 = 0;
    let a1 = 0;
    let a2 = 0;
    let a3 = 0;
    let b0 = 0;
    let b1 = 0;
    let b2 = 0;
    let b3 = 0;
    for (let d = 0; d < D; d++) {
      const a = weight[row + d];
      const b = weight[next + d];
      a0 += a * x[x0 + d];
      a1 += a * x[x1 + d];
      a2 += a * x[x2 + d];
      a3 += a * x[x3 + d];
      b0 += b * x[x0 + d];
      b1 += b * x[x1 + d];
      b2 += b * x[x2 + d];
      b3 += b * x[x3 + d];
    }
    out[at + n] = a0;
    out[at + m] = b0;
    out[at + N + n] = a1;
    out[at + N + m] = b1;
    out[at + 2 * N + n] = a2;
    out[at + 2 * N + m] = b2;
    out[at + 3 * N + n] = a3;
    out[at + 3 * N + m] = b3;
  }
}

/** Position t, by four rows of the weight at a time. */
function multiplyOne(x, weight, t, D, N, out) {
  const start = t * D;
  for (let n = 0; n < N; n += 4) {
    const n1 = Math.min(n + 1, N - 1);
    const n2 = Math.min(n + 2, N - 1);
    const n3 = Math.min(n + 3, N - 1);
    const row0 = n * D;
    const row1 = n1 * D;
    const row2 = n2 * D;
    const row3 = n3 * D;
    let sum0 = 0;
    let sum1 = 0;
    let sum2 = 0;
    let sum3 = 0;
    for (let d = 0; d < D; d++) {
      const value = x[start + d];
      sum0 += value * weight[row0 + d];
      sum1 += value * weight[row1 + d];
      sum2 += value * weight[row2 + d];
      sum3 += value * weight[row3 + d];
    }
    out[t * N + n] = sum0;
    out[t * N + n1] = sum1;
    out[t * N + n2] = sum2;
    out[t * N + n3] = sum3;
  }
}

/** a (T, N), transposed, times b (T, D): (N, D). */
function multiplyTransposed(a, b, T) {
  return multiply(transpose(a, T), transpose(b, T), null, a.length / T);
}

/** a (rows, columns) -> (columns, rows) */
function transpose(a, rows) {
  const columns = a.length / rows;
  const out = new Float32Array(a.length);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      out[column * rows + row] = a[row * columns + column];
    }
  }
  return out;
}

/** The sum (N,) of the rows of a (T, N). */
function sumRows(a, T) {
  const N = a.length / T;
  const sums = new Float64Array(N);
  for (let i = 0; i < a.length; i++) sums[i % N] += a[i];
  return Float32Array.from(sums);
}

/** The dot product of `length` numbers of a, from i on, and of b, from j on. */
function dot(a, i, b, j, length) {
  let sum0 = 0;
  let sum1 = 0;
  let sum2 = 0;
  let sum3 = 0;
  let k = 0;
  for (; k + 4 <= length; k += 4) {
    sum0 += a[i + k] * b[j + k];
    sum1 += a[i + k + 1] * b[j + k + 1];
    sum2 += a[i + k + 2] * b[j + k + 2];
    sum3 += a[i + k + 3] * b[j + k + 3];
  }
  for (; k < length; k++) sum0 += a[i + k] * b[j + k];
  return sum0 + sum1 + (sum2 + sum3);
}

/** a + b, of one shape. */
function add(a, b) {
  return a.map((value, i) => value + b[i]);
}

/** Create a LayerNorm or RMSNorm of width D. */
function createNorm(config, weights, name) {
  const Norm = config.norm === "rmsnorm" ? RMSNorm : LayerNorm;
  return new Norm(weights, name, config.norm_eps);
}

/** (x - mean) / √(variance + eps) · weight + bias, row by row. */
class LayerNorm {
  takesMean = true;

  constructor(weights, name, eps) {
    this.name = name;
    this.weight = weights[`${name}.weight`]; // (D,)
    this.bias = weights[`${name}.bias`] ?? null; // (D,)
    this.eps = eps;
  }

  /** Mean and scale, 1 / √(variance + eps), of the D numbers of x from `start` on. */
  measure(x, start) {
    const D = this.weight.length;
    let sum = 0;
    for (let d = 0; d < D; d++) sum += x[start + d];
    const mean = sum / D;
    let squares = 0;
    for (let d = 0; d < D; d++) squares += (x[start + d] - mean) ** 2;
    return { mean, scale: 1 / Math.sqrt(squares / D + this.eps) };
  }

  forward(x) {
    const D = this.weight.length;
    const out = new Float32Array(x.length); // (T, D)
    for (let start = 0; start < x.length; start += D) {
      const { mean, scale } = this.measure(x, start);
      for (let d = 0; d < D; d++) {
        const bias = this.bias === null ? 0 : this.bias[d];
        out[start + d] = (x[start + d] - mean) * scale * this.weight[d] + bias;
      }
    }
    return out;
  }

  /** x (T, D), dOut (T, D) -> dX (T, D)
   *
   * A number moves its own output, and those of all through the scale and the mean.
   */
  backward(x, dOut, gradients) {
    const D = this.weight.length;
    const dX = new Float32Array(x.length);
    const dWeight = new Float64Array(D);
    const row = new Float64Array(D); // normed, without weight and bias
    const dRow = new Float64Array(D);
    for (let start = 0; start < x.length; start += D) {
      const { mean, scale } = this.measure(x, start);
      let sum = 0;
      for (let d = 0; d < D; d++) {
        row[d] = (x[start + d] - mean) * scale;
        dRow[d] = dOut[start + d] * this.weight[d];
        dWeight[d] += dOut[start + d] * row[d];
        sum += dRow[d];
      }
      const throughMean = this.takesMean ? sum / D : 0;
      const throughScale = dot(dRow, 0, row, 0, D) / D;
      for (let d = 0; d < D; d++) {
        dX[start + d] = scale * (dRow[d] - throughMean - row[d] * throughScale);
      }
    }
    gradients[`${this.name}.weight`] = Float32Array.from(dWeight);
    if (this.bias !== null) gradients[`${this.name}.bias`] = sumRows(dOut, x.length / D);
    return dX;
  }
}

/** x / √(mean square + eps) · weight: a LayerNorm that takes no mean and has no bias. */
class RMSNorm extends LayerNorm {
  takesMean = false;

  measure(x, start) {
    const D = this.weight.length;
    return { mean: 0, scale: 1 / Math.sqrt(dot(x, start, x, start, D) / D + this.eps) };
  }
}

/** Feed-forward network (T, D) -> (T, D), applied to each position by itself. */
class MLP {
  constructor(config, weights, name) {
    this.activation = config.activation;
    if (!["swiglu", "relu2", "gelu"].includes(this.activation)) {
      throw Error(`model.js does not know the activation ${this.activation}`);
    }
    this.gateProj = this.activation === "swiglu" ? new Linear(weights, `${name}.gate_proj`) : null;
    this.upProj = new Linear(weights, `${name}.up_proj`);
    this.downProj = new Linear(weights, `${name}.down_proj`);
  }

  /** (T, D) -> (T, D); what `backward` needs goes into `record`, an entry for each position. */
  forward(x, T, record) {
    const up = this.upProj.forward(x, T); // (T, d_ff)
    const gate = this.gateProj?.forward(x, T); // (T, d_ff)
    keep(record, "up", up, T);
    if (gate) keep(record, "gate", gate, T);
    const inner = up.map((value, i) => {
      if (this.activation === "swiglu") return silu(gate[i]) * value;
      if (this.activation === "relu2") return Math.max(value, 0) ** 2;
      return gelu(value);
    });
    keep(record, "inner", inner, T);
    return this.downProj.forward(inner, T); // (T, D)
  }

  /** x (T, D), dOut (T, D) -> dX (T, D); `record` has what `forward` kept. */
  *backward(x, dOut, T, record, gradients) {
    const up = gather(record, "up"); // (T, d_ff)
    const dInner = yield* this.downProj.backward(gather(record, "inner"), dOut, T, gradients);
    if (this.activation !== "swiglu") {
      const slope = this.activation === "relu2" ? (value) => 2 * Math.max(value, 0) : slopeOfGelu;
      const dUp = dInner.map((d, i) => d * slope(up[i]));
      return yield* this.upProj.backward(x, dUp, T, gradients);
    }
    const gate = gather(record, "gate"); // (T, d_ff)
    const dUp = dInner.map((d, i) => d * silu(gate[i]));
    const dGate = dInner.map((d, i) => d * up[i] * slopeOfSilu(gate[i]));
    const throughUp = yield* this.upProj.backward(x, dUp, T, gradients);
    return add(throughUp, yield* this.gateProj.backward(x, dGate, T, gradients));
  }
}

function silu(x) {
  return x / (1 + Math.exp(-x));
}

function slopeOfSilu(x) {
  const share = 1 / (1 + Math.exp(-x));
  return share * (1 + x * (1 - share));
}

/** GELU in GPT-2's tanh form. */
function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

function slopeOfGelu(x) {
  const inside = Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3);
  const slope = Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * x ** 2);
  return 0.5 * (1 + Math.tanh(inside)) + (0.5 * x * slope) / Math.cosh(inside) ** 2;
}

/** Compute the angles (K/2,), in radians per position, by which RoPE turns the pairs. */
function computeFrequencies(config) {
  const K = config.head_dim;
  const frequencies = Array.from({ length: K / 2 }, (_, i) => config.rope_theta ** ((-2 * i) / K));
  return config.rope_scaling ? scaleFrequencies(frequencies, config.rope_scaling) : frequencies;
}

/** Scale RoPE frequencies (K/2,) for a longer context, as Llama 3.1 does. */
function scaleFrequencies(frequencies, [factor, low, high, context]) {
  return frequencies.map((frequency) => {
    const periods = (context * frequency) / (2 * Math.PI);
    const kept = Math.min(Math.max((periods - low) / (high - low), 0), 1); // 0: divide, 1: keep
    return frequency * (kept + (1 - kept) / factor);
  });
}

/** Rotate each pair (i, i + K/2) of x (T, heads, K) by angle i of its position. */
function applyRotary(x, frequencies, start, T) {
  const half = frequencies.length; // K/2
  const width = x.length / T; // heads · K
  const out = new Float32Array(x.length);
  for (let t = 0; t < T; t++) {
    for (let i = 0; i < half; i++) {
      const cosine = Math.fround(Math.cos((start + t) * frequencies[i]));
      const sine = Math.fround(Math.sin((start + t) * frequencies[i]));
      for (let at = t * width + i; at < (t + 1) * width; at += 2 * half) {
        const first = x[at];
        const second = x[at + half];
        out[at] = first * cosine - second * sine;
        out[at + half] = second * cosine + first * sine;
      }
    }
  }
  return out;
}

/** Compute the slopes (H,) of ALiBi: how much each head minds distance. */
function computeAlibiSlopes(H) {
  const P = 2 ** Math.floor(Math.log2(H));
  const exponents = [];
  for (let n = 1; n <= P; n++) exponents.push((8 * n) / P);
  for (let n = 1; n < 2 * (H - P); n += 2) exponents.push((4 * n) / P);
  return Float32Array.from(exponents, (exponent) => 2 ** -exponent);
}

/** Scores (S,) -> weights (S,) that sum to 1; a query that sees no key gets zeros. */
function softmax(scores) {
  let highest = -Infinity;
  for (const score of scores) if (score > highest) highest = score;
  const weights = new Float32Array(scores.length);
  if (highest === -Infinity) return weights;
  let sum = 0;
  for (let s = 0; s < scores.length; s++) sum += Math.exp(scores[s] - highest);
  for (let s = 0; s < scores.length; s++) weights[s] = Math.exp(scores[s] - highest) / sum;
  return weights;
}

// -- attention -----------------------------------------------------------------------------------

/** Causal self-attention of one layer: (T, D) -> (T, D).
 *
 * Query head h reads KV head h // (H / G): G = H is multi-head, G = 1 multi-query attention.
 */
class Attention {
  constructor(config, weights, layer) {
    const name = `blocks.${layer}.attn`;
    this.layer = layer;
    this.H = config.n_head;
    this.G = countKvHeads(config);
    this.K = config.head_dim;
    this.qProj = new Linear(weights, `${name}.q_proj`); // D -> H·K
    this.kProj = new Linear(weights, `${name}.k_proj`); // D -> G·K
    this.vProj = new Linear(weights, `${name}.v_proj`); // D -> G·K
    this.oProj = new Linear(weights, `${name}.o_proj`); // H·K -> D
    this.window = getWindow(config, layer);
    this.qNorm = null;
    this.kNorm = null;
    if (config.attention.qk_norm) {
      this.qNorm = new RMSNorm(weights, `${name}.q_norm`, config.norm_eps);
      this.kNorm = new RMSNorm(weights, `${name}.k_norm`, config.norm_eps);
    }
    this.frequencies = config.position === "rope" ? computeFrequencies(config) : null;
    this.alibiSlopes = config.position === "alibi" ? computeAlibiSlopes(this.H) : null;
  }

  /** x (T, D) is of the last T positions of `record`, which has an entry for each from 0 on. */
  forward(x, T, record, off) {
    this.projectQkv(x, T, record);
    const mixed = this.mix(T, record, off); // (T, H, K)
    return this.oProj.forward(mixed, T); // (T, H·K) -> (T, D)
  }

  /** Project x (T, D) to queries (T, H, K), keys and values (T, G, K).
   *
   * Queries and keys are normalized and rotated; values are not.
   */
  projectQkv(x, T, record) {
    const start = record.length - T;
    let q = this.qProj.forward(x, T);
    let k = this.kProj.forward(x, T);
    const v = this.vProj.forward(x, T);
    keep(record, "qProjected", q, T);
    keep(record, "kProjected", k, T);
    if (this.qNorm !== null) {
      q = this.qNorm.forward(q);
      k = this.kNorm.forward(k);
    }
    if (this.frequencies !== null) {
      q = applyRotary(q, this.frequencies, start, T);
      k = applyRotary(k, this.frequencies, start, T);
    }
    keep(record, "q", q, T);
    keep(record, "k", k, T);
    keep(record, "v", v, T);
  }

  /** x (T, D), dOut (T, D) -> dX (T, D); `record` has what `forward` kept of a whole text. */
  *backward(x, dOut, T, record, gradients) {
    const dMixed = yield* this.oProj.backward(gather(record, "mixed"), dOut, T, gradients);
    let { dQ, dK, dV } = this.unmix(dMixed, T, record); // (T, H, K), (T, G, K) twice
    yield;
    if (this.frequencies !== null) {
      const back = this.frequencies.map((frequency) => -frequency);
      dQ = applyRotary(dQ, back, 0, T);
      dK = applyRotary(dK, back, 0, T);
    }
    if (this.qNorm !== null) {
      dQ = this.qNorm.backward(gather(record, "qProjected"), dQ, gradients);
      dK = this.kNorm.backward(gather(record, "kProjected"), dK, gradients);
    }
    const throughQ = yield* this.qProj.backward(x, dQ, T, gradients);
    const throughK = yield* this.kProj.backward(x, dK, T, gradients);
    const throughV = yield* this.vProj.backward(x, dV, T, gradients);
    return add(add(throughQ, throughK), throughV);
  }

  /** Average, for each of the last T queries (H, K), the values that it sees: (T, H, K). */
  mix(T, record, off) {
    const { H, G, K } = this;
    const mixed = new Float32Array(T * H * K);
    for (let t = 0; t < T; t++) {
      const S = record.length - T + t + 1;
      const entry = record[S - 1];
      const scores = new Float32Array(H * S);
      const weights = new Float32Array(H * S);
      for (let h = 0; h < H; h++) {
        const g = Math.floor(h / (H / G));
        const at = (t * H + h) * K;
        const row = scores.subarray(h * S, (h + 1) * S);
        this.computeScores(row, entry.q.subarray(h * K, (h + 1) * K), h, g, record);
        hideAttentions(row, off, this.layer, h, S - 1);
        weights.set(softmax(row), h * S);
        this.sumValues(mixed, at, weights.subarray(h * S, (h + 1) * S), g, record);
        if (!isHeadOff(off, this.layer, h)) continue;
        replaceRow(off, this.layer, "mixed", S - 1, mixed.subarray(at, at + K), h * K);
      }
      Object.assign(entry, { scores, weights });
    }
    keep(record, "mixed", mixed, T);
    return mixed;
  }

  /** dMixed (T, H, K) -> dQ (T, H, K), dK and dV (T, G, K). */
  unmix(dMixed, T, record) {
    const { H, G, K } = this;
    const dQ = new Float32Array(T * H * K);
    const dK = new Float32Array(T * G * K);
    const dV = new Float32Array(T * G * K);
    for (const [t, { q, weights }] of record.entries()) {
      const S = t + 1;
      for (let h = 0; h < H; h++) {
        const g = Math.floor(h / (H / G));
        const at = (t * H + h) * K;
        const row = weights.subarray(h * S, (h + 1) * S);
        // What a weight gains depends on its value; softmax takes from each what all gain on average.
        const dWeights = Float64Array.from(row, (_, s) => dot(dMixed, at, record[s].v, g * K, K));
        const mean = dot(dWeights, 0, row, 0, S);
        for (let s = 0; s < S; s++) {
          if (row[s] === 0) continue; // hidden
          const dScore = (row[s] * (dWeights[s] - mean)) / Math.sqrt(K);
          const start = (s * G + g) * K;
          for (let i = 0; i < K; i++) {
            dQ[at + i] += dScore * record[s].k[g * K + i];
            dK[start + i] += dScore * q[h * K + i];
            dV[start + i] += row[s] * dMixed[at + i];
          }
        }
      }
    }
    return { dQ, dK, dV };
  }

  /** Fill the scores (S,) of a query (K,) on all keys so far: q·k / √K, -∞ where it is blind. */
  computeScores(scores, query, h, g, record) {
    const { K } = this;
    for (let s = 0; s < scores.length; s++) {
      const distance = scores.length - 1 - s;
      if (this.window !== null && distance >= this.window) {
        scores[s] = -Infinity;
        continue;
      }
      const bias = this.alibiSlopes === null ? 0 : -this.alibiSlopes[h] * distance;
      scores[s] = dot(query, 0, record[s].k, g * K, K) / Math.sqrt(K) + bias;
    }
  }

  /** Write the mean of the values (S, K) by their weights (S,) to `mixed`, from `at` on. */
  sumValues(mixed, at, weights, g, record) {
    const { K } = this;
    const sums = new Float64Array(K);
    for (let s = 0; s < weights.length; s++) {
      const weight = weights[s];
      if (weight === 0) continue;
      const values = record[s].v;
      for (let i = 0; i < K; i++) sums[i] += weight * values[g * K + i];
    }
    mixed.set(sums, at);
  }

  /** What head h adds to the residual stream (D,), given `mixed` (H, K) of one position.
   *
   * The bias of o_proj belongs to no head.
   */
  addedByHead(mixed, h) {
    const width = this.H * this.K;
    const D = this.oProj.weight.length / width;
    return Float32Array.from({ length: D }, (_, d) =>
      dot(mixed, h * this.K, this.oProj.weight, d * width + h * this.K, this.K),
    );
  }
}

/** G, the number of key/value heads. */
function countKvHeads(config) {
  if (config.attention.variant === "mqa") return 1;
  return config.attention.variant === "gqa" ? config.attention.n_kv_head : config.n_head;
}

/** Get the positions that a query of a layer sees, its own included; null: all. */
function getWindow(config, layer) {
  const every = config.attention.full_every;
  if (every && (layer + 1) % every === 0) return null;
  return config.attention.window ?? null;
}

// -- what is switched off ------------------------------------------------------------------------
//
// `off` is null or {heads: [[layer, head]], mlps: [layer], layers: [layer], attentions: [[layer,
// head, query, key]], from: tokens}, with any of them left out. A head, MLP or layer that is off
// adds nothing to the residual stream (a head leaves the bias of o_proj); an attention gets a score
// of -∞. There, null stands for every layer or head.
//
// With `from`, a second text that a `Reader` reads, a part that is off adds what it adds there at
// the same position ("activation patching"); behind the end of that text nothing is replaced.

function isHeadOff(off, layer, head) {
  return isLayerOff(off, layer) || (off?.heads ?? []).some(([l, h]) => l === layer && h === head);
}

function isMlpOff(off, layer) {
  return isLayerOff(off, layer) || (off?.mlps ?? []).includes(layer);
}

function isLayerOff(off, layer) {
  return (off?.layers ?? []).includes(layer);
}

function hideAttentions(scores, off, layer, head, query) {
  for (const [l, h, q, key] of off?.attentions ?? []) {
    const here = (l ?? layer) === layer && (h ?? head) === head && q === query;
    if (here && key < scores.length) scores[key] = -Infinity;
  }
}

/** Replace the numbers of a part that is off at a position; they are those from `first` on. */
function replaceRow(off, layer, name, position, row, first = 0) {
  if (!off.record) row.fill(0);
  const other = off.record?.[position]?.layers[layer][name];
  if (other) row.set(other.subarray(first, first + row.length));
}

/** Replace what a part that is off adds: rows (T, D). */
function replaceRows(off, layer, name, start, rows, T) {
  const D = rows.length / T;
  for (let t = 0; t < T; t++) {
    replaceRow(off, layer, name, start + t, rows.subarray(t * D, (t + 1) * D));
  }
}

// -- the model -----------------------------------------------------------------------------------

/** Attention, then feed-forward, each normed first and added to the residual stream x. */
class Block {
  constructor(config, weights, layer) {
    const name = `blocks.${layer}`;
    this.layer = layer;
    this.attnNorm = createNorm(config, weights, `${name}.attn_norm`);
    this.attn = new Attention(config, weights, layer);
    this.mlpNorm = createNorm(config, weights, `${name}.mlp_norm`);
    this.mlp = new MLP(config, weights, `${name}.mlp`);
  }

  /** x (T, D) -> (T, D), of the last T positions of `record` */
  forward(x, T, record, off) {
    const start = record.length - T;
    keep(record, "x", x, T);
    const attnNormed = this.attnNorm.forward(x); // (T, D)
    const attn = this.attn.forward(attnNormed, T, record, off); // (T, D)
    if (isLayerOff(off, this.layer)) replaceRows(off, this.layer, "attn", start, attn, T);
    const middle = add(x, attn); // (T, D)
    const mlpNormed = this.mlpNorm.forward(middle); // (T, D)
    const mlp = this.mlp.forward(mlpNormed, T, record); // (T, D)
    if (isMlpOff(off, this.layer)) replaceRows(off, this.layer, "mlp", start, mlp, T);
    keep(record, "attn", attn, T);
    keep(record, "middle", middle, T);
    keep(record, "mlp", mlp, T);
    return add(middle, mlp);
  }

  /** dOut (T, D) -> dX (T, D); `record` has what `forward` kept of a whole text. */
  *backward(dOut, T, record, gradients) {
    const middle = gather(record, "middle"); // (T, D)
    const mlpNormed = this.mlpNorm.forward(middle); // (T, D)
    const dMlpNormed = yield* this.mlp.backward(mlpNormed, dOut, T, record, gradients);
    const dMiddle = add(dOut, this.mlpNorm.backward(middle, dMlpNormed, gradients)); // (T, D)
    const x = gather(record, "x"); // (T, D)
    const attnNormed = this.attnNorm.forward(x); // (T, D)
    const dAttnNormed = yield* this.attn.backward(attnNormed, dMiddle, T, record, gradients);
    return add(dMiddle, this.attnNorm.backward(x, dAttnNormed, gradients)); // (T, D)
  }
}

/** A pre-norm decoder-only transformer.
 *
 * `config` is the section `model` of config.yaml with every default filled in; `weights` maps the
 * names of PyTorch ("blocks.0.attn.q_proj.weight") to Float32Arrays.
 */
class GPT {
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    this.embed = weights["embed.weight"]; // (V, D)
    this.positions = weights["positions.weight"] ?? null; // (context, D), learned positions
    this.blocks = Array.from({ length: config.n_layer }, (_, l) => new Block(config, weights, l));
    this.finalNorm = createNorm(config, weights, "final_norm");
    this.head = weights["head.weight"] ?? this.embed; // (V, D), tied unless it has its own
  }

  /** Tokens (T,) -> logits (T, V).
   *
   * They continue those of a record, which gets an entry for each, see `Reader`; by default they are
   * the whole text. A record is filled under one `off`.
   */
  forward(tokens, record = [], off = null) {
    const T = tokens.length;
    const { context_length } = this.config;
    const start = record.length;
    if (start + T > context_length) {
      throw new RangeError(`${start + T} positions in a context of ${context_length}`);
    }
    record.push(...tokens.map((token, t) => this.createEntry(token, start + t)));
    let x = this.embedTokens(record.slice(start)); // (T, D)
    for (const [layer, block] of this.blocks.entries()) {
      x = block.forward(x, T, takeLayer(record, layer), off);
    }
    const hidden = this.finalNorm.forward(x); // (T, D)
    const logits = this.computeLogits(hidden, T); // (T, V)
    keep(record, "x", x, T);
    keep(record, "hidden", hidden, T);
    keep(record, "logits", logits, T);
    return logits;
  }

  /** The gradients of `computeLoss`, by the names of the weights; `record` is that of a `Reader`. */
  *backward(record) {
    const { d_model: D, vocab_size: V } = this.config;
    const T = record.length;
    const gradients = {};
    const dLogits = new Float32Array(T * V); // behind the last token nothing came: it stays 0
    for (let t = 0; t + 1 < T; t++) {
      const chances = softmax(record[t].logits); // (V,)
      chances[record[t + 1].token] -= 1;
      dLogits.set(chances.map((d) => d / (T - 1)), t * V);
    }
    const dHead = multiplyTransposed(dLogits, gather(record, "hidden"), T); // (V, D)
    yield;
    const dHidden = multiply(dLogits, transpose(this.head, V), null, T); // (T, D)
    yield;
    let dX = this.finalNorm.backward(gather(record, "x"), dHidden, gradients); // (T, D)
    for (const [layer, block] of [...this.blocks.entries()].reverse()) {
      dX = yield* block.backward(dX, T, takeLayer(record, layer), gradients);
    }
    const isTied = this.head === this.embed;
    const dEmbed = isTied ? dHead : new Float32Array(V * D);
    if (!isTied) gradients["head.weight"] = dHead;
    for (const [t, { token }] of record.entries()) {
      for (let d = 0; d < D; d++) dEmbed[token * D + d] += dX[t * D + d];
    }
    gradients["embed.weight"] = dEmbed;
    if (this.positions !== null) {
      gradients["positions.weight"] = new Float32Array(this.positions.length);
      gradients["positions.weight"].set(dX); // a text begins at position 0
    }
    return gradients;
  }

  /** Entries of T tokens -> (T, D). */
  embedTokens(entries) {
    const D = this.config.d_model;
    const x = new Float32Array(entries.length * D);
    for (const [t, { embedding, positionEmbedding }] of entries.entries()) {
      x.set(positionEmbedding ? add(embedding, positionEmbedding) : embedding, t * D);
    }
    return x;
  }

  /** Hidden (T, D) -> logits (T, V), by the head or, if tied, the embedding table. */
  computeLogits(hidden, T) {
    return multiply(hidden, this.head, null, T);
  }

  /** The mean (D,) of the rows of the head. */
  get meanHead() {
    if (this.meanOfHead) return this.meanOfHead;
    const D = this.config.d_model;
    const mean = new Float64Array(D);
    for (let i = 0; i < this.head.length; i++) mean[i % D] += this.head[i];
    this.meanOfHead = mean.map((sum) => (sum * D) / this.head.length);
    return this.meanOfHead;
  }

  createEntry(token, position) {
    const D = this.config.d_model;
    return {
      token,
      position,
      embedding: this.embed.subarray(token * D, (token + 1) * D),
      positionEmbedding: this.positions && this.positions.subarray(position * D, (position + 1) * D),
      layers: this.blocks.map(() => ({})),
    };
  }
}

/** What a record has of one layer. */
function takeLayer(record, layer) {
  return record.map(({ layers }) => layers[layer]);
}

/** Note rows (T, ...) under a name, one in each of the last T entries. */
function keep(entries, name, rows, T) {
  const width = rows.length / T;
  for (const [t, entry] of entries.slice(entries.length - T).entries()) {
    entry[name] = rows.subarray(t * width, (t + 1) * width);
  }
}

/** The rows under a name as one array (T, ...): what `keep` took apart. */
function gather(entries, name) {
  const width = entries[0][name].length;
  const rows = new Float32Array(entries.length * width);
  for (const [t, entry] of entries.entries()) rows.set(entry[name], t * width);
  return rows;
}

// -- learning ------------------------------------------------------------------------------------

/** The mean loss, in nats, of the tokens of a record after those before them; NaN of a single one. */
function computeLoss(record) {
  let sum = 0;
  for (let t = 0; t + 1 < record.length; t++) sum += surprise(record[t].logits, record[t + 1].token);
  return sum / (record.length - 1);
}

/** -log of the probability that logits (V,) give to a token. */
function surprise(logits, token) {
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const sum = logits.reduce((total, logit) => total + Math.exp(logit - highest), 0);
  return Math.log(sum) + highest - logits[token];
}

/** AdamW as `torch.optim.AdamW` has it, by default but for the rate; two moments for each weight. */
class AdamW {
  rate = 3e-4; // slow enough to watch
  decay = 0.01;
  betas = [0.9, 0.999];
  eps = 1e-8;
  step = 0;
  moments = {};

  /** Move each weight by its gradient, both by name. */
  update(weights, gradients) {
    this.step += 1;
    const [beta1, beta2] = this.betas;
    this.begun = this.betas.map((beta) => 1 - beta ** this.step); // as the moments begin at 0
    for (const [name, gradient] of Object.entries(gradients)) {
      const weight = weights[name];
      this.moments[name] ??= [weight, weight].map(({ length }) => new Float32Array(length));
      const [means, squares] = this.moments[name];
      for (let i = 0; i < weight.length; i++) {
        means[i] = beta1 * means[i] + (1 - beta1) * gradient[i];
        squares[i] = beta2 * squares[i] + (1 - beta2) * gradient[i] ** 2;
        const { mean, root } = this.measure(means, squares, i);
        weight[i] = weight[i] * (1 - this.rate * this.decay) - (this.rate * mean) / root;
      }
    }
  }

  /** The mean of a weight's gradients, and the root of that of their squares: recent ones count most. */
  measure(means, squares, i) {
    const [begun1, begun2] = this.begun;
    return { mean: means[i] / begun1, root: Math.sqrt(squares[i] / begun2) + this.eps };
  }
}

// -- looking inside ------------------------------------------------------------------------------

/** Reads a text that changes: what is still the same at its beginning is not computed again.
 *
 * `record` has an entry for each token: token, position, embedding (D,), positionEmbedding (D,) or
 * null, layers, then x (D,), the residual stream after the last layer, hidden (D,), the same after
 * the final norm, and logits (V,). Each of `layers` has, in the order of computation:
 *
 *   x (D,)                                     the residual stream before the layer
 *   qProjected (H, K), kProjected (G, K)
 *   q (H, K), k (G, K)                         after QK-norm and RoPE
 *   v (G, K)
 *   scores (H, S), S = position + 1            with ALiBi; -∞ where a key is hidden
 *   weights (H, S)
 *   mixed (H, K)                               replaced where a head is off
 *   attn (D,)                                  what attention adds
 *   middle (D,)                                the residual stream after attention
 *   up (d_ff,), gate (d_ff,)                   before the activation; gate with swiglu only
 *   inner (d_ff,)                              after the activation
 *   mlp (D,)                                   what the MLP adds
 */
class Reader {
  record = [];

  constructor(gpt) {
    this.gpt = gpt;
    this.off = null; // what was off, as JSON
  }

  /** Read tokens (T,), T > 0, as the whole text; return the logits (V,) after the last. */
  read(tokens, off = null) {
    const written = JSON.stringify(off);
    if (written !== this.off) this.record.length = 0;
    this.off = written;
    if (off?.from?.length) {
      this.other ??= new Reader(this.gpt);
      this.other.read(off.from);
      off = { ...off, record: this.other.record };
    }
    let same = 0;
    while (same < tokens.length && this.record[same]?.token === tokens[same]) same++;
    this.record.length = same;
    if (same < tokens.length) this.gpt.forward(tokens.slice(same), this.record, off);
    return this.record.at(-1).logits;
  }

  /** Forget what was read, as the weights have changed. */
  forget() {
    this.record.length = 0;
    this.other?.forget();
  }
}

/** What a vector (D,) that is added to the stream becomes behind the final norm, whose scale is held. */
function passFinalNorm({ finalNorm }, entry, vector) {
  const { scale } = finalNorm.measure(entry.x, 0);
  const mean = finalNorm.takesMean ? vector.reduce((sum, x) => sum + x, 0) / vector.length : 0;
  return vector.map((x, d) => (x - mean) * scale * finalNorm.weight[d]);
}

/** Attribute a token's logit to what was added to the residual stream ("direct logit attribution").
 *
 * What raises all tokens alike changes nothing after the softmax, so the logit counts less the mean
 * of all logits. `entry` is one of a `Reader`. The final norm's mean and scale are held as they
 * were, so that the parts sum to that: embedding, position, heads [L][H], attnBiases [L] (of
 * o_proj), mlps [L] and normBias. A part is 0 where the model has none.
 */
function attribute(gpt, entry, token) {
  const { d_model: D } = gpt.config;
  const norm = gpt.finalNorm;
  const mean = gpt.meanHead;
  const head = gpt.head.subarray(token * D, (token + 1) * D).map((x, d) => x - mean[d]); // (D,)
  const along = (added) => (added && dot(passFinalNorm(gpt, entry, added), 0, head, 0, D)) ?? 0;
  const parts = {
    embedding: along(entry.embedding),
    position: along(entry.positionEmbedding),
    heads: [],
    attnBiases: [],
    mlps: entry.layers.map((layer) => along(layer.mlp)),
    normBias: norm.bias === null ? 0 : dot(norm.bias, 0, head, 0, D),
  };
  for (const [layer, { attn }] of gpt.blocks.entries()) {
    const { mixed, attn: added } = entry.layers[layer];
    const isOff = added.every((value) => value === 0);
    parts.heads.push(Array.from({ length: attn.H }, (_, h) => along(attn.addedByHead(mixed, h))));
    parts.attnBiases.push(isOff ? 0 : along(attn.oProj.bias));
  }
  return parts;
}

/** How each head looks, [L][H]: the mean weight on the previous token, on the first and on itself, as
 * `gptmini inspect` lists them. The first query, which sees only itself, does not count.
 *
 * `induction` is the mean weight on what followed the same token before, over the queries that
 * `findRepetitions` lists; null if there are none. `record` is that of a `Reader`.
 */
function summarizeHeads(gpt, record) {
  const queries = record.length > 1 ? record.slice(1) : record;
  const repetitions = findRepetitions(record);
  return gpt.blocks.map(({ attn, layer }) =>
    Array.from({ length: attn.H }, (_, h) => {
      const weigh = ({ position, layers }, key) =>
        layers[layer].weights[h * (position + 1) + key];
      const sums = { previous: 0, first: 0, itself: 0 };
      for (const entry of queries) {
        sums.previous += weigh(entry, Math.max(entry.position - 1, 0));
        sums.first += weigh(entry, 0);
        sums.itself += weigh(entry, entry.position);
      }
      for (const name of Object.keys(sums)) sums[name] /= queries.length;
      let induction = 0;
      for (const { entry, keys } of repetitions) {
        for (const key of keys) induction += weigh(entry, key);
      }
      return { ...sums, induction: repetitions.length ? induction / repetitions.length : null };
    }),
  );
}

/** The entries of a record whose token stood before, each with the keys that followed it there. */
function findRepetitions(record) {
  const found = [];
  for (const entry of record) {
    const keys = [];
    for (let key = 1; key < entry.position; key++) {
      if (record[key - 1].token === entry.token) keys.push(key);
    }
    if (keys.length) found.push({ entry, keys });
  }
  return found;
}

// -- filters: from logits to one token -----------------------------------------------------------
//
// `sample` is the section of that name in config.yaml, with its names.

/** Make a random number in [0, 1) for a draw, the same as Python's for these three integers. */
function drawUniform(seed, textNumber, position) {
  const digest = hashBlake2b(`${seed} ${textNumber} ${position}`);
  const number = digest.reduce((sum, byte) => (sum << 8n) | BigInt(byte), 0n);
  return Number(number >> 11n) * 2 ** -53; // 53 bits fill a float64
}

/** BLAKE2b of at most 128 ASCII characters, 8 bytes of it (RFC 7693). */
function hashBlake2b(message) {
  const mask = (1n << 64n) - 1n;
  const initial = [
    0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
    0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
  ];
  // The order of the words in each round, in hexadecimal digits.
  const orders = [
    "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8",
    "905724afe1bc683d", "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a",
    "6fe9b308c2d714a5", "a2847615fb9e3cd0",
  ];
  const bytes = new Uint8Array(128);
  bytes.set(new TextEncoder().encode(message));
  const words = Array.from(new BigUint64Array(bytes.buffer)); // of a little-endian machine
  const state = [...initial];
  state[0] ^= 0x01010008n; // no key, 8 bytes of digest
  const v = [...state, ...initial];
  v[12] ^= BigInt(message.length);
  v[14] ^= mask; // the last block
  const turn = (word, bits) => ((word >> bits) | (word << (64n - bits))) & mask;
  const stir = (a, b, c, d, first, second) => {
    v[a] = (v[a] + v[b] + first) & mask;
    v[d] = turn(v[d] ^ v[a], 32n);
    v[c] = (v[c] + v[d]) & mask;
    v[b] = turn(v[b] ^ v[c], 24n);
    v[a] = (v[a] + v[b] + second) & mask;
    v[d] = turn(v[d] ^ v[a], 16n);
    v[c] = (v[c] + v[d]) & mask;
    v[b] = turn(v[b] ^ v[c], 63n);
  };
  for (let round = 0; round < 12; round++) {
    const order = Array.from(orders[round % 10], (digit) => words[parseInt(digit, 16)]);
    for (let i = 0; i < 4; i++) stir(i, i + 4, i + 8, i + 12, order[2 * i], order[2 * i + 1]);
    for (let i = 0; i < 4; i++) {
      const [b, c, d] = [1, 2, 3].map((shift) => 4 * shift + ((i + shift) % 4));
      stir(i, b, c, d, order[8 + 2 * i], order[9 + 2 * i]);
    }
  }
  const first = state[0] ^ v[0] ^ v[8];
  return Array.from({ length: 8 }, (_, i) => Number((first >> BigInt(8 * i)) & 0xffn));
}

/** Combine `bias` and `ban` of a sample into one array (V,), or null without any. */
function buildTokenBias(tokenizer, sample) {
  const entries = Object.entries(sample.bias).concat(sample.ban.map((text) => [text, -Infinity]));
  if (!entries.length) return null;
  const bias = new Float32Array(tokenizer.vocabSize);
  for (const [text, value] of entries) {
    const tokens = tokenizer.encode(text);
    if (tokens.length !== 1) throw new RangeError(`${JSON.stringify(text)} is not one token`);
    bias[tokens[0]] += value;
  }
  return bias;
}

/** Adjust logits (V,) by a bias (V,) and the penalties; `prompt` and `generated` are tokens. */
function processLogits(logits, sample, bias, prompt, generated) {
  const scores = bias === null ? logits.slice() : add(logits, bias); // (V,)
  const penalty = sample.repetition_penalty;
  if (penalty !== 1) {
    for (const token of new Set([...prompt, ...generated])) {
      scores[token] = scores[token] > 0 ? scores[token] / penalty : scores[token] * penalty;
    }
  }
  const counts = new Map();
  for (const token of generated) counts.set(token, (counts.get(token) ?? 0) + 1);
  for (const [token, times] of counts) {
    scores[token] -= sample.presence_penalty + sample.frequency_penalty * times;
  }
  return scores;
}

/** Say what each filter does: (V,) rows {token, weight, probability, chance, removedBy}.
 *
 * They run from most to least likely, of equal ones the first first. The most likely token weighs 1;
 * `probability` is at the temperature, before the filters, `chance` that of the draw. `removedBy`
 * is null, or the first of top_k, top_p, min_p that removes the token; temperature removes all but
 * the most likely at 0, a ban is "ban". `scores` (V,) come from `processLogits`.
 */
function explainFilters(scores, sample) {
  const { top_k, top_p, min_p } = sample;
  const isGreedy = sample.temperature === 0;
  const temperature = isGreedy ? 1 : sample.temperature;
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]); // a stable sort
  const highest = scores[order[0]] / temperature;
  const weights = order.map((token) => Math.exp(scores[token] / temperature - highest));
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
  const all = sum(weights);
  const enough = (top_p ?? 1) * sum(weights.slice(0, top_k ?? weights.length));
  let before = 0; // the weight of all tokens more likely than each
  const rows = order.map((token, rank) => {
    const weight = weights[rank];
    let removedBy = null;
    if (weight === 0) removedBy = "ban";
    else if (isGreedy) removedBy = rank > 0 ? "temperature" : null;
    else if (top_k !== null && rank >= top_k) removedBy = "top_k";
    else if (top_p !== null && top_p < 1 && before >= enough) removedBy = "top_p";
    else if (min_p !== null && weight < min_p) removedBy = "min_p";
    before += weight;
    const chance = removedBy === null ? weight : 0;
    return { token, weight, probability: weight / all, chance, removedBy };
  });
  const kept = sum(rows.map(({ chance }) => chance));
  for (const row of rows) row.chance /= kept;
  return rows;
}

/** List the rows of `explainFilters` that may be drawn, in the order in which Python sums them. */
function listDrawable(rows, { top_k, top_p }) {
  const drawable = rows.filter(({ chance }) => chance > 0);
  const isSorted = (top_k !== null && top_k < rows.length) || (top_p !== null && top_p < 1);
  return isSorted ? drawable : drawable.sort((a, b) => a.token - b.token);
}

/** Draw one of the rows of `listDrawable` with a random number in [0, 1), and return its token. */
function sampleToken(rows, random) {
  if (!rows.length) throw new RangeError("no token is left to draw");
  const target = random * rows.reduce((sum, { weight }) => sum + weight, 0);
  let sum = 0;
  for (const { token, weight } of rows) {
    sum += weight;
    if (sum > target) return token;
  }
  return rows.at(-1).token; // where rounding leads past it
}

// -- generation: a text from its prompt to its last character ------------------------------------

/** A text that continues a prompt, token by token: the same as Python's `generate`.
 *
 * `finishReason` is null while the text grows, then "length", "stop", "document" or "context";
 * `tokens` are the new ones and `text` their characters. `promptTokens` are those of the prompt.
 */
class Continuation {
  /** `reader` may be shared by all texts of a model; `number` selects the random numbers. */
  constructor(reader, tokenizer, sample, prompt, { number = 0 } = {}) {
    this.reader = reader;
    this.tokenizer = tokenizer;
    this.sample = sample; // may be changed between two tokens
    this.number = number;
    this.off = null; // what is switched off; may be changed as well
    this.contextLength = reader.gpt.config.context_length;
    this.encodePrompt(prompt);
    this.tokens = [];
    this.update();
  }

  /** Encode a prompt; find which tokens may come first. */
  encodePrompt(prompt) {
    const { tokenizer, sample } = this;
    this.allowedFirst = null; // a set of tokens, or null for all
    this.dropSpace = false; // the prompt already shows the space that the first token brings along
    if (prompt.endsWith(" ") && tokenizer.spaced.size > 1) {
      // Where words are tokens, a space belongs to the word behind it (" the"), and the model has
      // hardly seen one alone. So drop it, and let the first token bring it back.
      prompt = prompt.slice(0, -1);
      this.allowedFirst = tokenizer.spaced;
      this.dropSpace = true;
    }
    if (prompt === "") {
      const others = tokenizer.listTokens().filter((each) => !tokenizer.endTokens.includes(each));
      this.allowedFirst ??= new Set(others);
      const start = sample.start === null ? null : tokenizer.addBos(tokenizer.encode(sample.start));
      this.promptTokens = start ?? [tokenizer.eosToken];
    } else {
      this.promptTokens = tokenizer.addBos(tokenizer.encode(prompt));
    }
  }

  /** What the model sees, from position 0 on. Where the context is full, its older half goes. */
  get context() {
    let context = this.promptTokens.slice(-this.contextLength);
    for (const token of this.tokens) {
      context.push(token);
      const kept = Math.max(1, Math.floor(this.contextLength / 2));
      if (context.length > this.contextLength) context = context.slice(-kept);
    }
    return context;
  }

  /** Turn logits (V,) into the scores that a token is drawn from: bias, penalties and bans.
   *
   * `count` tokens were drawn before it; of a token of the prompt, that is negative.
   */
  adjust(logits, count) {
    const bias = buildTokenBias(this.tokenizer, this.sample);
    const prompt = count < 0 ? this.promptTokens.slice(0, count) : this.promptTokens;
    const drawn = this.tokens.slice(0, Math.max(0, count));
    const scores = processLogits(logits, this.sample, bias, prompt, drawn);
    if (this.allowedFirst === null || count !== 0) return scores;
    return scores.map((score, token) => (this.allowedFirst.has(token) ? score : -Infinity));
  }

  /** Draw the next token and return it; null if the text has ended. */
  next() {
    if (this.finishReason !== null) return null;
    const random = drawUniform(this.sample.seed, this.number, this.tokens.length);
    const logits = this.reader.read(this.context, this.off);
    const scores = this.adjust(logits, this.tokens.length);
    const rows = explainFilters(scores, this.sample);
    const token = sampleToken(listDrawable(rows, this.sample), random);
    this.tokens.push(token);
    this.update();
    return token;
  }

  /** Take the last token back. */
  back() {
    this.tokens.pop();
    this.update();
  }

  /** Set `finishReason` and `text`, from the tokens. */
  update() {
    const { tokenizer, sample, tokens } = this;
    const total = Math.min(this.promptTokens.length, this.contextLength) + tokens.length;
    this.finishReason = null;
    if (tokens.length >= sample.max_new_tokens) this.finishReason = "length";
    else if (sample.overflow === "stop" && total > this.contextLength) {
      this.finishReason = "context";
    }
    const hasEnded = tokens.length > 0 && tokenizer.endTokens.includes(tokens.at(-1));
    if (hasEnded) this.finishReason = "document";
    const spoken = hasEnded ? tokens.slice(0, -1) : tokens;
    let text = tokenizer.decode(spoken, this.finishReason === null);
    if (this.dropSpace) text = text.replace(/^ /, "");
    // The first stop text to be complete ends the text, the longest if there are several.
    const found = sample.stop.filter((stop) => text.includes(stop));
    const ends = found.map((stop) => [text.indexOf(stop) + stop.length, -stop.length]);
    if (ends.length) {
      this.finishReason = "stop";
      const [[end, back]] = ends.sort(([a, m], [b, n]) => a - b || m - n);
      text = text.slice(0, end + back);
    } else if (this.finishReason === null) {
      text = text.slice(0, text.length - this.countHeldBack(text));
    }
    this.text = text;
  }

  /** Count the characters at the end of a text that may be the beginning of a stop text. */
  countHeldBack(text) {
    let most = 0;
    for (const stop of this.sample.stop) {
      for (let n = most + 1; n < stop.length; n++) if (text.endsWith(stop.slice(0, n))) most = n;
    }
    return most;
  }
}

// -- what export.py wrote ------------------------------------------------------------------------

/** Decode base64 into bytes. */
function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // in browsers since 2025
  return toBytes(atob(text));
}

/** Decode weights by name: `tensors` lists {name, shape, type}, whose bytes follow each other.
 *
 * float32 and bfloat16 are numbers. int8 is preceded by a float32 scale for each row.
 */
function decodeWeights(tensors, bytes) {
  const weights = {};
  let at = 0;
  const take = (count, size) => bytes.slice(at, (at += count * size)).buffer;
  for (const { name, shape, type } of tensors) {
    const count = shape.reduce((product, size) => product * size, 1);
    if (type === "float32") weights[name] = new Float32Array(take(count, 4));
    if (type === "bfloat16") {
      const halves = new Uint16Array(take(count, 2));
      const bits = new Uint32Array(count);
      for (let i = 0; i < count; i++) bits[i] = halves[i] << 16; // the upper half of a float32
      weights[name] = new Float32Array(bits.buffer);
    }
    if (type === "int8") {
      const scales = new Float32Array(take(shape[0], 4)); // (rows,)
      const integers = new Int8Array(take(count, 1));
      const columns = count / shape[0];
      const weight = (weights[name] = new Float32Array(count));
      for (let i = 0; i < count; i++) weight[i] = integers[i] * scales[Math.floor(i / columns)];
    }
  }
  return weights;
}

/** Open the model in a page that export.py wrote: {data, gpt, tokenizer}.
 *
 * `data` has name, step and prompt, the sections `model` (as `config`) and `sample` of config.yaml,
 * and `tokenizer`. A page without weights, from a server, has neither gpt nor tokenizer.
 */
function openPage(document) {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!document.getElementById("weights").textContent) return { data, gpt: null, tokenizer: null };
  const gpt = new GPT(data.config, readWeights(document, data));
  return { data, gpt, tokenizer: createTokenizer(data.tokenizer) };
}

/** Read the weights by name that a page holds. */
function readWeights(document, data) {
  const bytes = decodeBase64(document.getElementById("weights").textContent);
  return decodeWeights(data.tensors, bytes);
}
