// The forward pass of a GPT, for the next tokens of several texts or for a part of a prompt. A call
// reads the weights from memory once, whatever the number of its tokens.
//
// This computes what model/gpt.py computes. Weights are stored as float32, bfloat16, or int8 with
// one scale per row; product.h says what they are multiplied with. All other arithmetic is float32,
// but for attention by AMX (attention.h). The order of every sum depends only on what it adds up. So
// a token's logits have the same bits whichever tokens share the call, in a prompt or behind it, and
// however many threads run it. (If values are not finite, AMX may show it at earlier tokens, too.)
// step.py fills Model and calls gptmini_step.
//
// Letters: M tokens of a call, D width, F width of the MLP, H query heads, G KV heads, K head
// size, S positions, V vocabulary.

#include "product.h"

#include "attention.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef _WIN32  // where a library shows only the functions that say so
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

namespace {

enum { GELU, RELU2, SWIGLU };

struct Norm { const float *weight, *bias; };  // null if absent

struct Layer {
  Norm attn_norm, mlp_norm, q_norm, k_norm;  // the last two are null without QK-norm
  Matrix qkv, o, gate, up, down;  // qkv: rows of q, then k, then v; gate: only with SwiGLU
  // The KV cache (slots, G, size, K), a ring: position p lies at index p % size. With a window it
  // is a little longer than the window, and new keys overwrite those that no query sees any more.
  // It holds floats if weights are float32, else bfloat16, padded and laid out as in attention.h.
  void *keys, *values;
  const float* alibi_slopes;  // (H,), or null
  int size, window;  // window 0: no window
};

struct Model {
  int n_layer, n_head, n_kv_head, head_dim, d_model, d_ff, context_length;
  // Numbered as in step.py. embed_precision is FLOAT32 or BFLOAT16.
  int rms, activation, precision, embed_precision, n_threads;
  float norm_eps;
  const void* embed;  // (V, D)
  const float *positions, *cosines, *sines;  // (S, D), (S, K/2); or null
  Norm final_norm;
  Matrix head;
  Layer* layers;
  // Buffers, (M, padded width) but for scratch: x is the residual stream, mixed the output of the
  // heads, inner that of the MLP's first products. scratch is each thread's memory for attention.
  float *x, *normed, *qkv, *mixed, *inner, *scratch;
  uint32_t* words;  // (M, padded width / 2): inputs rounded to 16 bits; null for float32
  float* scales;    // (M,): their scales, for int8
};

// Computes to = from for n numbers; bfloat16 is the upper half of a float32.
void widen_bfloat16(const uint16_t* from, float* to, int n) {
  for (int i = 0; i < n; i++) {
    uint32_t bits = (uint32_t)from[i] << 16;
    memcpy(to + i, &bits, sizeof bits);
  }
}

// Computes y = RMSNorm or LayerNorm of the n numbers x.
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

Lanes activate(Lanes x, int kind) {
  if (kind == GELU) {  // gelu, tanh form: x * sigmoid(2u)
    Lanes u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1 + exponential(-2 * u));
  }
  if (kind == RELU2) return x <= 0 ? Lanes{} : x * x;  // NaN stays NaN
  return x / (1 + exponential(-x));  // silu
}

// Computes x = activate(x) for n numbers, in place, times `factors` unless they are null.
void activate_all(float* x, const float* factors, int n, int kind) {
  for (int i = 0; i < n; i += LANES) {
    Lanes value = activate(load(x + i), kind);
    if (factors) value *= load(factors + i);
    memcpy(x + i, &value, sizeof value);
  }
}

// Applies QK-norm and RoPE, in place, to a query or key of one head (K,). RoPE rotates the pairs
// (i, i + K/2) by the angles of the position.
void normalize_and_rotate(const Model& g, float* head, Norm norm, int position) {
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

// A call as one thread sees it; all threads run the same code.
//
// The threads share out the rows of each matrix: each reads its part of the weights and writes its
// part of the outputs. A barrier stands wherever a thread needs what others have written; `omp for`
// ends with one.
struct Call {
  const Model& g;
  int M;
  const int *tokens, *rows, *positions;  // (M,) each; rows are slots of the cache
  int thread, threads;
  int heads = g.n_head + 2 * g.n_kv_head;  // of queries, keys and values
  // Distances between tokens in x and normed, qkv, mixed, inner.
  int D = round_up(g.d_model);
  int Q = round_up(heads * g.head_dim), O = round_up(g.n_head * g.head_dim);
  int F = round_up(g.d_ff) * (g.activation == SWIGLU ? 2 : 1);
  // The distance between tokens in words, which hold two columns each.
  int W = std::max({D, O, round_up(g.d_ff)}) / 2;
  bool by_tiles = takes_tiles(g.precision, M);
  bool attends_by_tiles = ::attends_by_tiles(g.precision);

  struct Share { int from, to; };
  // Returns this thread's part of n rows, in whole blocks.
  Share share(int n) const {
    int blocks = n / ROW_BLOCK;
    return {blocks * thread / threads * ROW_BLOCK, blocks * (thread + 1) / threads * ROW_BLOCK};
  }

  // Computes x = token embedding + position embedding, if there is one.
  void embed() const {
#pragma omp for schedule(static)
    for (int m = 0; m < M; m++) {
      int64_t row = (int64_t)tokens[m] * g.d_model;
      float* x = g.x + m * D;
      if (g.embed_precision == BFLOAT16) {
        widen_bfloat16((const uint16_t*)g.embed + row, x, g.d_model);
      } else {
        memcpy(x, (const float*)g.embed + row, g.d_model * sizeof(float));
      }
      const float* position =
          g.positions ? g.positions + (int64_t)positions[m] * g.d_model : nullptr;
      for (int i = 0; i < g.d_model; i++) x[i] += position ? position[i] : 0;
    }
  }

  // Rounds row m of a product's inputs as `multiply` takes them; float32 needs nothing.
  void round(int m, const float* x, int columns) const {
    uint32_t* words = g.words + (int64_t)m * W;
    if (g.precision == BFLOAT16) round_bfloat16(x, words, columns);
    if (g.precision == INT8) g.scales[m] = round_int16(x, words, columns, by_tiles);
  }

  // Computes the rows `mine` of y = w x for n tokens. Every thread needs all of x, so a barrier
  // must stand between the computation of x and this.
  void multiply(const Matrix& w, Share mine, int n, const float* x, int xs, float* y,
                int ys) const {
    Inputs wide{(const uint32_t*)x, nullptr, xs, false}, narrow{g.words, g.scales, W, by_tiles};
    if (g.precision == FLOAT32) multiply_rows<Float32>(w, mine.from, mine.to, n, wide, y, ys);
    if (g.precision == BFLOAT16) multiply_rows<BFloat16>(w, mine.from, mine.to, n, narrow, y, ys);
    if (g.precision == INT8) multiply_rows<Int8>(w, mine.from, mine.to, n, narrow, y, ys);
  }

  // Computes normed = norm of x for n tokens, the first ones or those that `indices` names.
  void norm(Norm weights, int n, const int* indices = nullptr) const {
#pragma omp for schedule(static)
    for (int m = 0; m < n; m++) {
      float* from = g.x + (indices ? indices[m] : m) * D;
      float* to = g.normed + m * D;
      normalize(from, to, g.d_model, g.rms, g.norm_eps, weights);
      // A product may have left NaN in the padding, which is an input, too.
      for (int i = g.d_model; i < D; i++) to[i] = 0;
      round(m, to, D);
    }
  }

  // Computes x += w inputs, the end of both branches. `normed` is no longer needed by then and
  // takes the product. Each thread adds the rows that it computed, so no barrier stands in between.
  void add_product(const Matrix& w, const float* inputs, int distance) const {
    if (g.precision != FLOAT32) {
#pragma omp for schedule(static)
      for (int m = 0; m < M; m++) round(m, inputs + (int64_t)m * distance, w.columns);
    }
    Share mine = share(w.rows);
    multiply(w, mine, M, inputs, distance, g.normed, D);
    for (int m = 0; m < M; m++)
      for (int i = mine.from; i < mine.to; i++) g.x[m * D + i] += g.normed[m * D + i];
#pragma omp barrier
  }

  // Returns the cache of a slot and KV head.
  template <typename Number>
  Cache<Number> get_cache(const Layer& layer, int row, int kv_head) const {
    const int K = round_up(g.head_dim, CACHE_ALIGNMENT);
    int64_t start = ((int64_t)row * g.n_kv_head + kv_head) * layer.size * K;
    return {(Number*)layer.keys + start, (Number*)layer.values + start, layer.size, K};
  }

  // Stores a key or value (K,) of token m in the cache.
  void store_head(const Layer& layer, int m, int kv_head, bool is_key, const float* head) const {
    const int position = positions[m];
    auto store = [&](auto cache, auto round) {
      for (int i = 0; i < g.head_dim; i++)
        *(is_key ? cache.find_key(position, i) : cache.find_value(position, i)) = round(head[i]);
    };
    if (g.precision == FLOAT32) {
      store(get_cache<float>(layer, rows[m], kv_head), [](float x) { return x; });
    } else {
      store(get_cache<uint16_t>(layer, rows[m], kv_head), to_bfloat16);
    }
  }

  // Clears the 32 values from a position on where one of these tokens stands at a multiple of 32: so
  // many AMX multiplies at once. What another text has left there may be NaN, and NaN times a weight
  // of 0 is NaN. No thread may store values there before this is done.
  void clear_values(const Layer& layer) const {
    if (!attends_by_tiles) return;
#pragma omp for schedule(static) nowait
    for (int m = 0; m < M; m++)
      for (int h = 0; h < g.n_kv_head && positions[m] % CACHE_ALIGNMENT == 0; h++) {
        Cache<uint16_t> cache = get_cache<uint16_t>(layer, rows[m], h);
        memset(cache.find_value(positions[m], 0), 0, CACHE_ALIGNMENT * cache.K * sizeof(uint16_t));
      }
  }

  // Returns query i of those that read a KV head: token by token, the query heads of its group.
  Query get_query(const Layer& layer, int kv_head, int i) const {
    const int group = g.n_head / g.n_kv_head, m = i / group, K = g.head_dim;
    int h = kv_head * group + i % group, position = positions[m];
    int start = layer.window && position >= layer.window ? position - layer.window + 1 : 0;
    float* out = g.mixed + (int64_t)m * O + h * K;
    float slope = layer.alibi_slopes ? layer.alibi_slopes[h] : 0;
    return {g.qkv + (int64_t)m * Q + h * K, out, rows[m], start, position, slope};
  }

  // Attends with n queries of a KV head. Those of the same slot share the reading of its keys.
  void attend_some(const Layer& layer, int kv_head, int from, int n, float* scratch) const {
    Query queries[MAX_QUERIES];
    for (int i = 0; i < n; i++) queries[i] = get_query(layer, kv_head, from + i);
    for (int i = 0, same = 1; i < n; i += same, same = 1) {
      const int row = queries[i].row;
      while (i + same < n && queries[i + same].row == row) same++;
      if (g.precision == FLOAT32) {
        Cache<float> cache = get_cache<float>(layer, row, kv_head);
        attend(queries + i, same, cache, g.head_dim, scratch, false);
      } else {
        Cache<uint16_t> cache = get_cache<uint16_t>(layer, row, kv_head);
        attend(queries + i, same, cache, g.head_dim, scratch, attends_by_tiles);
      }
    }
  }

  // Computes x += attention(norm(x)).
  void run_attention(const Layer& layer) const {
    const int H = g.n_head, G = g.n_kv_head, K = g.head_dim;
    norm(layer.attn_norm, M);
    clear_values(layer);
    multiply(layer.qkv, share(layer.qkv.rows), M, g.normed, D, g.qkv, Q);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int task = 0; task < M * heads; task++) {
      int m = task / heads, h = task % heads;
      float* head = g.qkv + (int64_t)m * Q + h * K;
      bool is_query = h < H, is_key = h >= H && h < H + G;
      if (is_query) normalize_and_rotate(g, head, layer.q_norm, positions[m]);
      if (is_key) normalize_and_rotate(g, head, layer.k_norm, positions[m]);
      if (!is_query) store_head(layer, m, (h - H) % G, is_key, head);
    }
    // All keys of the call are cached now, those of later tokens too: a query stops at its own
    // position. Later queries see more keys, so the threads take tasks in turn, not in halves.
    const int n_queries = M * (H / G), at_a_time = attends_by_tiles ? MAX_QUERIES : 4;
    const int tasks = (n_queries + at_a_time - 1) / at_a_time;  // of each KV head
    const int n_scratch = MAX_QUERIES * (round_up(K, CACHE_ALIGNMENT) + g.context_length + 64);
    float* scratch = g.scratch + (int64_t)thread * round_up(n_scratch);
#pragma omp for schedule(static, 1)
    for (int task = 0; task < G * tasks; task++) {
      const int from = task % tasks * at_a_time;
      attend_some(layer, task / tasks, from, std::min(at_a_time, n_queries - from), scratch);
    }
    add_product(layer.o, g.mixed, O);
  }

  // Computes x += mlp(norm(x)).
  void run_mlp(const Layer& layer) const {
    const bool gated = g.activation == SWIGLU;
    const int behind = gated ? round_up(g.d_ff) : 0;  // the up projection lies behind the gate
    norm(layer.mlp_norm, M);
    Share mine = share(layer.up.rows);
    if (gated) multiply(layer.gate, mine, M, g.normed, D, g.inner, F);
    multiply(layer.up, mine, M, g.normed, D, g.inner + behind, F);
    for (int m = 0; m < M; m++) {
      float* x = g.inner + (int64_t)m * F + mine.from;
      activate_all(x, gated ? x + behind : nullptr, mine.to - mine.from, g.activation);
    }
#pragma omp barrier
    add_product(layer.down, g.inner, F);
  }
};

}  // namespace

// Passes M tokens through the model, each with its slot of the cache (`rows`) and its position. The
// tokens of a slot are in order, and the cache holds all positions before them. Writes the logits
// (n, padded V) of the n tokens that `indices` names: a prompt needs only those of its last token.
extern "C" EXPORT void gptmini_step(const Model* model, int M, const int* tokens, const int* rows,
                             const int* positions, int n, const int* indices, float* logits) {
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
      call.run_attention(g.layers[l]);
      call.run_mlp(g.layers[l]);
    }
    call.norm(g.final_norm, n, indices);
    int V = g.head.rows;  // padded
    call.multiply(g.head, call.share(V), n, g.normed, call.D, logits, V);
  }
}

// Returns whether AMX attends, with bfloat16 and int8 weights: it rounds queries and the weights of
// the values, too.
extern "C" EXPORT int gptmini_attends_by_tiles() { return attends_by_tiles(BFLOAT16); }
