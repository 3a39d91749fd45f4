// The forward pass of a GPT for a few tokens at a time, as fast as memory gives the weights.
//
// The same arithmetic as model.py, in float32 throughout; the weights may be stored as float,
// bfloat16 or int8 with a scale per row, and are widened in registers. Every sum runs in an order
// that depends on nothing but its own operands, so the logits of a token are the same to the last
// bit whichever tokens share the call, and however many threads run it. native.py fills Model and
// calls gptmini_step; the letters are those of attention.py, M counts the tokens of a call.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int LANES = 16;    // numbers in a vector
constexpr int COLUMNS = 64;  // columns of matrices and widths of their inputs are padded to this
enum { GELU, RELU2, SWIGLU };
enum { FLOAT32, BFLOAT16, INT8 };
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// How weights lie in words of 32 bits: bit-fields of word i are columns i, i + 16, and so on, so
// that a shift widens a whole vector of them.
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

struct Matrix {  // (rows, columns), and what each row is multiplied by and added to
  const void* data;
  const float* scale;  // null unless int8
  const float* bias;   // null if none
  int rows, columns;
};

struct Norm { const float *weight, *bias; };  // null if none

struct Layer {
  Norm attn_norm, mlp_norm, q_norm, k_norm;  // the last two null without QK-norm
  Matrix qkv, o, up, down;       // qkv: the rows of q, k and v; up: first the gate's, if any
  float *keys, *values;          // (rows of the batch, G, size, K): position p at place p % size
  int size, window;              // window 0 sees all
};

struct Model {
  int n_layer, n_head, n_kv_head, head_dim, d_model, d_ff, context_length;
  int rms, activation, precision, n_threads;  // numbered as in native.py
  float norm_eps;
  const float *embed, *positions, *cosines, *sines;  // (V, D), (S, D), (S, K/2); or null
  Norm final_norm;
  Matrix head;
  Layer* layers;
  float *x, *normed, *qkv, *mixed, *inner, *scores;  // (M, width) each, (threads, S)
};

// y[m][n] = w[n] . x[m] for N rows of weights and M tokens at once.
template <int N, int M, typename Type>
inline void tile(const Matrix& w, int row, const float* x, int64_t xs, float* y, int64_t ys) {
  Lanes sums[N][M] = {};
  const int step = LANES * Type::PARTS;
  const int64_t words = w.columns / Type::PARTS;  // in a row
  const uint32_t* data = (const uint32_t*)w.data + row * words;
  for (int c = 0; c < w.columns; c += step, data += LANES) {
    for (int n = 0; n < N; n++) {
      Words packed;
      memcpy(&packed, data + n * words, sizeof packed);
      __builtin_prefetch(data + (n + N) * words);  // of the next tile
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
      y[m * ys + row + n] = std::fma(total(sums[n][m]), scale, bias);  // the same in every tile
    }
}

template <int N, typename Type>
inline void tiles(const Matrix& w, int row, int M, const float* x, int64_t xs, float* y,
                  int64_t ys) {
  for (; M >= 4; M -= 4, x += 4 * xs, y += 4 * ys) tile<N, 4, Type>(w, row, x, xs, y, ys);
  for (; M >= 2; M -= 2, x += 2 * xs, y += 2 * ys) tile<N, 2, Type>(w, row, x, xs, y, ys);
  if (M) tile<N, 1, Type>(w, row, x, xs, y, ys);
}

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

void normalise(const float* x, float* y, int n, bool rms, float eps, Norm norm) {
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

// A query or key of one head: normed over its K numbers, then turned by its position's angles.
void place(const Model& g, float* head, Norm norm, int position) {
  int K = g.head_dim, half = K / 2;
  if (norm.weight) normalise(head, head, K, true, g.norm_eps, norm);
  if (!g.cosines) return;
  const float *cosines = g.cosines + position * half, *sines = g.sines + position * half;
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + half] = second * cosines[i] + first * sines[i];
  }
}

// out (K) = softmax(q . keys / sqrt K) values, over the positions a query sees.
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

// One call, as a thread sees it. Where threads share the rows of a matrix, each computes its own.
struct Call {
  const Model& g;
  int M;
  const int *tokens, *rows, *positions;
  int thread, threads;
  int D = padded(g.d_model), heads = g.n_head + 2 * g.n_kv_head;  // D, Q, O, F: distances of
  int Q = padded(heads * g.head_dim), O = padded(g.n_head * g.head_dim);  // tokens in the buffers
  int F = padded(g.d_ff) * (g.activation == SWIGLU ? 2 : 1);

  struct Share { int from, to; };
  Share share(int n, int unit) const {  // of n things, in whole units
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
      normalise(g.x + m * D, g.normed + m * D, g.d_model, g.rms, g.norm_eps, weights);
  }

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
    Share mine = share(heads, 1);
    multiply(g, layer.qkv, mine.from * K, mine.to * K, M, g.normed, D, g.qkv, Q);
    for (int m = 0; m < M; m++)
      for (int h = mine.from; h < mine.to; h++) {
        float* head = g.qkv + (int64_t)m * Q + h * K;
        if (h < H + G) place(g, head, h < H ? layer.q_norm : layer.k_norm, positions[m]);
        if (h < H) continue;
        float* cache = h < H + G ? layer.keys : layer.values;
        int64_t at = rows[m] * per_row + (h - H) % G * per_head;
        memcpy(cache + at + positions[m] % layer.size * (int64_t)K, head, K * sizeof(float));
      }
#pragma omp barrier
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
    const int behind = padded(g.d_ff);  // the gate is the other branch
    norm(layer.mlp_norm);
    Share mine = share(g.d_ff, 4);
    multiply(g, layer.up, mine.from, mine.to, M, g.normed, D, g.inner, F);
    if (gated)
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

// Tokens (M), each of a row of the batch and at a position in it; logits (M, V) come out. Those of
// one row are in order, and the cache holds what is before them.
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
