// Attention for bfloat16 and int8 weights: up to four queries at a time over the same keys, as the
// tokens of a prompt share keys, and so do the heads of a group. All arithmetic is float32.
//
// The cache holds bfloat16, which halves the memory to read, and is laid out for vectors: 16
// positions form a block, whose keys lie column by column. So a vector takes one column of 16 keys,
// and no score is a sum across the lanes of a vector. (float32 weights use `attend_float32` in
// decode.cpp, which reads the plain layout that torch's prefill writes.)

#include <algorithm>

// Computes e^x of 16 numbers to a few units in the last place, as 2^n e^r with Taylor's polynomial
// for e^r. Clamps x to -87 .. 88, where the result is a normal float32.
inline Lanes exponential(Lanes x) {
  const Lanes lowest = Lanes{} - 87, highest = Lanes{} + 88;
  x = x < lowest ? lowest : x > highest ? highest : x;
  Lanes shifted = x * 1.44269504f + 12582912.0f;  // + 1.5 * 2^23: its lowest bits are an integer
  Lanes n = shifted - 12582912.0f;
  Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes e = r * (1.0f / 720) + 1.0f / 120;
  for (float term : {1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) e = e * r + term;
  return e * (Lanes)(((Ints)shifted + 127) << 23);
}

inline float exponential(float x) { return std::exp(x); }  // for float32

struct Query {
  const float* q;  // (K,)
  float* out;      // (K,)
  int row, start, position;  // sees the positions `start` to `position` of its slot
  float slope;  // of ALiBi: takes slope * distance from a score; 0 without
};

struct Cache {  // of one slot and KV head
  const uint16_t *keys, *values;  // (size / 16, K, 16) and (size, K)
  int size;  // positions in the ring, a multiple of 16
  int K;     // the head size, padded to a multiple of 16
};

// Loads 16 bfloat16 numbers; bfloat16 is the upper half of a float32.
inline Lanes load(const uint16_t* from) {
  Shorts halves;
  memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

// N queries of one slot and KV head, the positions that they see, and their scores.
template <int N>
struct Group {
  const Query* queries;
  Cache cache;
  int head_dim;
  float* scores;  // (N, to - from)
  // The first and last position that any of them sees, the same range in whole blocks, and the
  // first and last position that all of them see.
  int first = queries[0].start, last = queries[0].position;
  int from, to;
  int common_first = first, common_last = last;

  Group(const Query* queries, Cache cache, int head_dim, float* scores)
      : queries(queries), cache(cache), head_dim(head_dim), scores(scores) {
    for (int n = 1; n < N; n++) {
      first = std::min(first, queries[n].start);
      last = std::max(last, queries[n].position);
      common_first = std::max(common_first, queries[n].start);
      common_last = std::min(common_last, queries[n].position);
    }
    from = first / LANES * LANES;
    to = last / LANES * LANES + LANES;
  }

  // Computes the scores of all queries, -infinity for keys that a query does not see.
  void score() const {
    const float factor = 1 / std::sqrt((float)head_dim);
    const Lanes nothing = Lanes{} - INFINITY;
    Ints places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    places += from;
    for (int p = from; p < to; p += LANES, places += LANES) {
      const uint16_t* keys = cache.keys + (int64_t)(p % cache.size) * cache.K;
      Lanes sums[N] = {};
      for (int i = 0; i < head_dim; i++)
        for (int n = 0; n < N; n++) sums[n] += load(keys + i * LANES) * queries[n].q[i];
      for (int n = 0; n < N; n++) {
        Ints seen = (places >= queries[n].start) & (places <= queries[n].position);
        Lanes distance = __builtin_convertvector(queries[n].position - places, Lanes);
        sums[n] = seen ? sums[n] * factor - queries[n].slope * distance : nothing;
        memcpy(scores + n * (to - from) + p - from, &sums[n], sizeof sums[n]);
      }
    }
  }

  // Computes out = weights . values / sum, for C vectors of columns.
  template <int C>
  void mix(const float* sums, int column) const {
    Lanes mixed[N][C] = {};
    for (int p = first, at = first % cache.size; p <= last; p++) {
      const uint16_t* value = cache.values + (int64_t)at * cache.K + column;
      const float* weights = scores + p - from;
      const bool by_all = p >= common_first && p <= common_last;
      for (int c = 0; c < C; c++) {
        Lanes values = load(value + c * LANES);
        for (int n = 0; n < N; n++)
          // A weight of 0 would not be enough to leave a value out: it may be NaN.
          if (by_all || (p >= queries[n].start && p <= queries[n].position))
            mixed[n][c] += weights[n * (to - from)] * values;
      }
      at = at + 1 == cache.size ? 0 : at + 1;
    }
    for (int n = 0; n < N; n++)
      for (int c = 0; c < C; c++) {
        Lanes found = mixed[n][c] / sums[n];
        int at = column + c * LANES;
        memcpy(queries[n].out + at, &found, std::min(LANES, head_dim - at) * sizeof(float));
      }
  }
};

// Replaces n scores by exp(score - the highest) and returns their sum. A NaN makes the sum NaN, and
// with it the output, so that damaged weights are noticed.
inline float exponentiate(float* scores, int n) {
  Lanes highest = load(scores), sums = {};
  for (int s = LANES; s < n; s += LANES) {
    Lanes next = load(scores + s);
    highest = next > highest ? next : highest;
  }
  float most = highest[0];
  for (int i = 1; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
  for (int s = 0; s < n; s += LANES) {
    Lanes next = load(scores + s), weights = exponential(next - most);
    weights = next == -INFINITY ? Lanes{} : weights;  // keys that are not seen change no bit
    memcpy(scores + s, &weights, sizeof weights);
    sums += weights;
  }
  return sum_lanes(sums);
}

// Computes out = softmax(q . keys / sqrt K + bias) values for N queries of one slot and KV head.
template <int N>
inline void attend(const Query* queries, Cache cache, int head_dim, float* scores) {
  Group<N> group(queries, cache, head_dim, scores);
  group.score();
  int column = 0, n_keys = group.to - group.from;
  float sums[N];
  for (int n = 0; n < N; n++) sums[n] = exponentiate(scores + n * n_keys, n_keys);
  for (; column + 4 * LANES <= cache.K; column += 4 * LANES) group.template mix<4>(sums, column);
  for (; column < cache.K; column += LANES) group.template mix<1>(sums, column);
}
