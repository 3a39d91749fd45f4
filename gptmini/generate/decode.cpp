// The forward pass of a GPT for a few tokens at a time, limited only by how fast memory delivers
// the weights, which are read from it once per call, whatever the number of tokens.
//
// Computes what model/gpt.py computes, in float32. Weights may be stored as float32, bfloat16 or
// int8 with one scale per row; they are widened to float32 in registers. The order of every sum
// depends only on its own length, so a token's logits have the same bits whichever tokens share
// the call and however many threads run it. native.py fills Model and calls gptmini_step.
//
// Letters: M tokens of a call, D width, F width of the MLP, H query heads, G KV heads, K head
// size, S positions, V vocabulary.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int LANES = 16;    // floats per vector; the compiler splits it for narrower registers
constexpr int COLUMNS = 64;  // matrix columns and input widths are padded with zeros to a multiple
enum { GELU, RELU2, SWIGLU };
enum { FLOAT32, BFLOAT16, INT8 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// How weights are packed into 32-bit words. Word i of a block holds columns i, i + 16, ... (one,
// two or four of them), so shifting a vector of 16 words gives 16 neighboring columns as float32,
// with no shuffles. bfloat16 is the upper half of a float32; int8 is sign-extended by two shifts.
struct Float32 {
  static constexpr int PARTS = 1;
  static Lanes part(Words words, int) { return (Lanes)words; }
};
struct BFloat16 {
  static constexpr int PARTS = 2;
  static Lanes part(Words words, int i) { return (Lanes)(i ? words & 0xffff0000u : words << 16); }
};
struct Int8 {
  static constexpr int PARTS = 4;
  static Lanes part(Words words, int i) {
    return __builtin_convertvector((Ints)(words << (24 - 8 * i)) >> 24, Lanes);
  }
};

// The sum of a vector, always in the same order.
inline float total(Lanes v) {
  Half low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, (const char*)&v + sizeof low, sizeof high);
  low += high;
  float s[LANES / 2];
  memcpy(s, &low, sizeof s);
  return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}

int padded(int n) { return (n + COLUMNS - 1) / COLUMNS * COLUMNS; }

struct Matrix {  // (rows, columns): rows are outputs, columns inputs, padded
  const void* data;    // packed words
  const float* scale;  // (rows,) for int8, else null
  const float* bias;   // (rows,) or null
  int rows, columns;
};

struct Norm { const float *weight, *bias; };  // null if absent

struct Layer {
  Norm attn_norm, mlp_norm, q_norm, k_norm;  // the last two are null without QK-norm
  Matrix qkv, o, up, down;  // qkv: rows of q, then k, then v; up: with SwiGLU first the gate's rows
  // The KV cache, (slots, G, size, K): a ring, position p lies at index p % size. With a window it
  // is only a little longer than the window, and new keys overwrite those nobody sees any more.
  float *keys, *values;
  int size, window;  // window 0: no window
};

struct Model {
  int n_layer, n_head, n_kv_head, head_dim, d_model, d_ff, context_length;
  int rms, activation, precision, n_threads;  // choices are numbered as in native.py
  float norm_eps;
  const float *embed, *positions, *cosines, *sines;  // (V, D), (S, D), (S, K/2); or null
  Norm final_norm;
  Matrix head;
  Layer* layers;
  // Buffers: x is the residual stream. All are (M, padded width) but scores (threads, S).
  float *x, *normed, *qkv, *mixed, *inner, *scores;
};

// y[m][row + n] = w[row + n] . x[m] for N rows of weights and M tokens. xs and ys are the distances
// between tokens in x and y.
//
// This is where the time goes. The N x M sums stay in vector registers (4 x 4 take 16 of AVX-512's
// 32): each vector of weights is loaded and widened once for M tokens, and inputs brought into the
// L1 cache serve N rows. N and M are template arguments so that the compiler unrolls the inner
// loops. The next tile's weights are prefetched meanwhile. A sum adds the same products in the same
// order whatever the tile, so the bits do not depend on M.
template <int N, int M, typename Type>
inline void tile(const Matrix& w, int row, const float* x, int64_t xs, float* y, int64_t ys) {
  Lanes sums[N][M] = {};
  const int step = LANES * Type::PARTS;
  const int64_t words = w.columns / Type::PARTS;  // per row
  const uint32_t* data = (const uint32_t*)w.data + row * words;
  for (int c = 0; c < w.columns; c += step, data += LANES) {
    for (int n = 0; n < N; n++) {
      Words packed;
      memcpy(&packed, data + n * words, sizeof packed);
      __builtin_prefetch(data + (n + N) * words);  // the next tile's weights
      for (int i = 0; i < Type::PARTS; i++) {
        Lanes weights = Type::part(packed, i), inputs;
        for (int m = 0; m < M; m++) {
          memcpy(&inputs, x + m * xs + c + i * LANES, sizeof inputs);
          sums[n][m] += weights * inputs;
        }
      }
    }
  }
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++) {
      float scale = w.scale ? w.scale[row + n] : 1, bias = w.bias ? w.bias[row + n] : 0;
      // An explicit fma: otherwise the compiler could contract it in one tile size only.
      y[m * ys + row + n] = std::fma(total(sums[n][m]), scale, bias);
    }
}

// N rows of weights for any number of tokens, in tiles of 4, 2 and 1. After the first tile the rows
// come from the cache, so the memory is still read once.
template <int N, typename Type>
inline void tiles(const Matrix& w, int row, int M, const float* x, int64_t xs, float* y,
                  int64_t ys) {
  for (; M >= 4; M -= 4, x += 4 * xs, y += 4 * ys) tile<N, 4, Type>(w, row, x, xs, y, ys);
  for (; M >= 2; M -= 2, x += 2 * xs, y += 2 * ys) tile<N, 2, Type>(w, row, x, xs, y, ys);
  if (M) tile<N, 1, Type>(w, row, x, xs, y, ys);
}

// Rows `from` to `to` of y = w x for M tokens.
template <typename Type>
void product(const Matrix& w, int from, int to, int M, const float* x, int xs, float* y, int ys) {
  int row = from;
  for (; row + 4 <= to; row += 4) tiles<4, Type>(w, row, M, x, xs, y, ys);
  for (; row < to; row++) tiles<1, Type>(w, row, M, x, xs, y, ys);
}

void multiply(const Model& g, const Matrix& w, int from, int to, int M, const float* x, int xs,
              float* y, int ys) {
  if (g.precision == FLOAT32) product<Float32>(w, from, to, M, x, xs, y, ys);
  if (g.precision == BFLOAT16) product<BFloat16>(w, from, to, M, x, xs, y, ys);
  if (g.precision == INT8) product<Int8>(w, from, to, M, x, xs, y, ys);
}

// RMSNorm or LayerNorm of n numbers.
void normalize(const float* x, float* y, int n, bool rms, float eps, Norm norm) {
  float mean = 0, square = 0;
  if (!rms) {
#pragma omp simd reduction(+ : mean)
    for (int i = 0; i < n; i++) mean += x[i];
    mean /= n;
  }
#pragma omp simd reduction(+ : square)
  for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
  float factor = 1 / std::sqrt(square / n + eps);
  for (int i = 0; i < n; i++) {
    float value = (x[i] - mean) * factor;
    if (norm.weight) value *= norm.weight[i];
    y[i] = norm.bias ? value + norm.bias[i] : value;
  }
}

float activate(float x, int kind) {
  if (kind == GELU) {  // gelu, tanh form: x * sigmoid(2u)
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1 + std::exp(-2 * u));
  }
  if (kind == RELU2) return x > 0 ? x * x : 0;
  return x / (1 + std::exp(-x));  // silu
}

// QK-norm and RoPE, in place, for a query or key of one head (K,). RoPE rotates the pairs (i,
// i + K/2) by the angles of the position.
void place(const Model& g, float* head, Norm norm, int position) {
  int K = g.head_dim, half = K / 2;
  if (norm.weight) normalize(head, head, K, true, g.norm_eps, norm);
  if (!g.cosines) return;
  const float *cosines = g.cosines + position * half, *sines = g.sines + position * half;
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + half] = second * cosines[i] + first * sines[i];
  }
}

// One query (K,) over the positions that it sees: out = softmax(q . keys / sqrt K) values. `cache`
// is where the keys and values of its slot and KV head begin; `at` runs around the ring. A NaN
// score makes the output NaN, as in torch, so that damaged weights are noticed.
void attend(const Model& g, const Layer& layer, const float* q, int64_t cache, int position,
            float* scores, float* out) {
  int K = g.head_dim, start = 0;
  if (layer.window && position >= layer.window) start = position - layer.window + 1;
  int S = position - start + 1, first = start % layer.size;
  const float *keys = layer.keys + cache, *values = layer.values + cache;
  float factor = 1 / std::sqrt((float)K), highest = -INFINITY, sum = 0;
  for (int s = 0, at = first; s < S; s++, at = at + 1 == layer.size ? 0 : at + 1) {
    const float* key = keys + (int64_t)at * K;
    float score = 0;
#pragma omp simd reduction(+ : score)
    for (int i = 0; i < K; i++) score += q[i] * key[i];
    scores[s] = score * factor;
    if (scores[s] > highest || std::isnan(scores[s])) highest = scores[s];
  }
  for (int s = 0; s < S; s++) sum += scores[s] = std::exp(scores[s] - highest);
  for (int i = 0; i < K; i++) out[i] = 0;
  for (int s = 0, at = first; s < S; s++, at = at + 1 == layer.size ? 0 : at + 1) {
    const float* value = values + (int64_t)at * K;
    float weight = scores[s] / sum;
    for (int i = 0; i < K; i++) out[i] += weight * value[i];
  }
}

// One call as a single thread runs it; all threads run the same code.
//
// The rows of each matrix are split among the threads: each reads only its part of the weights and
// writes only its own outputs. Barriers stand where a thread needs what others have written.
// `omp for` ends with one.
struct Call {
  const Model& g;
  int M;
  const int *tokens, *rows, *positions;  // (M,) each; rows are slots of the cache
  int thread, threads;
  int heads = g.n_head + 2 * g.n_kv_head;  // of queries, keys and values
  // Distances between tokens in x and normed, qkv, mixed, inner.
  int D = padded(g.d_model);
  int Q = padded(heads * g.head_dim), O = padded(g.n_head * g.head_dim);
  int F = padded(g.d_ff) * (g.activation == SWIGLU ? 2 : 1);

  struct Share { int from, to; };
  // This thread's part of n rows, in whole units (4 rows are a tile).
  Share share(int n, int unit) const {
    int units = (n + unit - 1) / unit;
    int from = units * thread / threads * unit, to = units * (thread + 1) / threads * unit;
    return {from, to < n ? to : n};
  }

  void embed() const {
#pragma omp for schedule(static)
    for (int m = 0; m < M; m++) {
      const float* token = g.embed + (int64_t)tokens[m] * g.d_model;
      const float* place = g.positions ? g.positions + (int64_t)positions[m] * g.d_model : nullptr;
      for (int i = 0; i < g.d_model; i++) g.x[m * D + i] = token[i] + (place ? place[i] : 0);
    }
  }

  void norm(Norm weights) const {
#pragma omp for schedule(static)
    for (int m = 0; m < M; m++)
      normalize(g.x + m * D, g.normed + m * D, g.d_model, g.rms, g.norm_eps, weights);
  }

  // x += w inputs, the end of both branches; `normed` is free by then and holds the product.
  void add_product(const Matrix& w, const float* inputs, int distance) const {
    Share mine = share(g.d_model, 4);
    multiply(g, w, mine.from, mine.to, M, inputs, distance, g.normed, D);
    for (int m = 0; m < M; m++)
      for (int i = mine.from; i < mine.to; i++) g.x[m * D + i] += g.normed[m * D + i];
#pragma omp barrier
  }

  void attention(const Layer& layer) const {
    const int H = g.n_head, G = g.n_kv_head, K = g.head_dim;
    const int64_t per_head = (int64_t)layer.size * K, per_row = G * per_head;
    norm(layer.attn_norm);
    // Split by heads: whoever projects a head also rotates it and caches it, without a barrier.
    Share mine = share(heads, 1);
    multiply(g, layer.qkv, mine.from * K, mine.to * K, M, g.normed, D, g.qkv, Q);
    for (int m = 0; m < M; m++)
      for (int h = mine.from; h < mine.to; h++) {
        float* head = g.qkv + (int64_t)m * Q + h * K;
        if (h < H + G) place(g, head, h < H ? layer.q_norm : layer.k_norm, positions[m]);
        if (h < H) continue;  // queries are not cached
        float* cache = h < H + G ? layer.keys : layer.values;
        int64_t at = rows[m] * per_row + (h - H) % G * per_head;
        memcpy(cache + at + positions[m] % layer.size * (int64_t)K, head, K * sizeof(float));
      }
#pragma omp barrier
    // All keys of the call are cached now, those of later tokens too: `attend` stops at its own
    // position. Query head h reads KV head h / (H / G).
#pragma omp for schedule(static)
    for (int task = 0; task < M * H; task++) {
      int m = task / H, h = task % H;
      int64_t cache = rows[m] * per_row + h / (H / G) * per_head;
      float* scores = g.scores + thread * (int64_t)padded(g.context_length);
      const float* q = g.qkv + (int64_t)m * Q + h * K;
      attend(g, layer, q, cache, positions[m], scores, g.mixed + (int64_t)m * O + h * K);
    }
    add_product(layer.o, g.mixed, O);
  }

  void mlp(const Layer& layer) const {
    const bool gated = g.activation == SWIGLU;
    const int behind = padded(g.d_ff);  // inner holds the gate, then `behind` it the up projection
    norm(layer.mlp_norm);
    Share mine = share(g.d_ff, 4);
    multiply(g, layer.up, mine.from, mine.to, M, g.normed, D, g.inner, F);
    if (gated)  // the up projection's rows follow the gate's d_ff rows
      multiply(g, layer.up, g.d_ff + mine.from, g.d_ff + mine.to, M, g.normed, D,
               g.inner + behind - g.d_ff, F);
    for (int m = 0; m < M; m++)
      for (int i = mine.from; i < mine.to; i++) {
        float* at = g.inner + (int64_t)m * F + i;
        at[0] = activate(at[0], g.activation) * (gated ? at[behind] : 1);
      }
#pragma omp barrier
    add_product(layer.down, g.inner, F);
  }
};

}  // namespace

// Logits (M, V) of M tokens, each with its slot of the cache (`rows`) and its position. The tokens
// of a slot are in order, and the cache holds all positions before them.
extern "C" void gptmini_step(const Model* model, int M, const int* tokens, const int* rows,
                             const int* positions, float* logits) {
  const Model& g = *model;
#pragma omp parallel num_threads(g.n_threads)
  {
#ifdef _OPENMP
    Call call{g, M, tokens, rows, positions, omp_get_thread_num(), omp_get_num_threads()};
#else
    Call call{g, M, tokens, rows, positions, 0, 1};
#endif
    call.embed();
    for (int l = 0; l < g.n_layer; l++) {
      call.attention(g.layers[l]);
      call.mlp(g.layers[l]);
    }
    call.norm(g.final_norm);
    Call::Share mine = call.share(g.head.rows, 4);
    multiply(g, g.head, mine.from, mine.to, M, g.normed, call.D, logits, g.head.rows);
  }
}
