// Attention: several queries at a time over the same keys, as the tokens of a prompt share keys, and
// so do the heads of a group.
//
// The cache is laid out for vectors. 16 positions form a block, whose keys lie column by column, so
// a vector takes one column of 16 keys, and no score is a sum across its lanes. With float32 weights
// the cache holds float32, with others bfloat16, which is half as much to read. A word of 32 bits
// then holds two numbers: of values one column of two positions, of keys two columns of one position.
//
// All arithmetic is float32, unless AMX multiplies words: then queries and the weights of the values
// are rounded to bfloat16, too.

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

constexpr int MAX_QUERIES = 16;      // at a time
constexpr int CACHE_ALIGNMENT = 32;  // positions and head sizes in a cache are multiples

struct Query {
  const float* q;  // (K,)
  float* out;      // (K,)
  int row, start, position;  // sees the positions `start` to `position` of its slot
  float slope;  // of ALiBi: takes slope * distance from a score; 0 without
};

// Numbers in a word of 32 bits.
template <typename Number>
constexpr int PACKED = sizeof(uint32_t) / sizeof(Number);

// The keys and values of one slot and KV head: a ring, where position p lies at p % size.
template <typename Number>  // float, or uint16_t for bfloat16
struct Cache {
  static constexpr int N = PACKED<Number>;
  Number* keys;    // (size / 16, K / N, 16, N)
  Number* values;  // (size / N, K, N)
  int size, K;     // K is the head size, padded

  Number* find_key(int position, int i) const {
    const int at = position % size;
    return keys + (int64_t)(at / LANES * LANES) * K + i / N * LANES * N + at % LANES * N + i % N;
  }
  Number* find_value(int position, int i) const {
    const int at = position % size;
    return values + (int64_t)(at / N * N) * K + i * N + at % N;
  }
};

// Loads 16 words and returns the first or second number of each.
template <typename Number>
inline Lanes load_words(const Number* from, int place) {
  Words words;
  memcpy(&words, from, sizeof words);
  if (PACKED<Number> == 1) return (Lanes)words;
  return (Lanes)(place ? words & 0xffff0000u : words << 16);  // the upper half of a float32
}

// The positions that any of some queries sees, from a multiple of 32 to one.
struct Span {
  int from, to;

  Span(const Query* queries, int n) {
    int first = queries[0].start, last = queries[0].position;
    for (int i = 1; i < n; i++) {
      first = std::min(first, queries[i].start);
      last = std::max(last, queries[i].position);
    }
    from = first / CACHE_ALIGNMENT * CACHE_ALIGNMENT;
    to = last / CACHE_ALIGNMENT * CACHE_ALIGNMENT + CACHE_ALIGNMENT;
  }
  // Between the scores of two queries. Not a power of 2, or they would compete for few lines of the
  // processor's cache.
  int distance() const { return to - from + LANES; }
};

// Replaces the scores of a query by exp(score + bias - the highest), by 0 for keys that it does not
// see, and returns their sum. A NaN makes the sum NaN, and with it the output, so that damaged
// weights are noticed.
inline float exponentiate(const Query& query, float* scores, Span span) {
  Ints places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  places += span.from;
  const Lanes nothing = Lanes{} - INFINITY;
  Lanes highest = nothing, sums = {};
  const int n = span.to - span.from;
  for (int s = 0; s < n; s += LANES, places += LANES) {
    Ints seen = (places >= query.start) & (places <= query.position);
    Lanes distance = __builtin_convertvector(query.position - places, Lanes);
    Lanes next = seen ? load(scores + s) - query.slope * distance : nothing;
    highest = next > highest ? next : highest;
    memcpy(scores + s, &next, sizeof next);
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

// -- by vectors -----------------------------------------------------------------------------------

// N queries of one slot and KV head.
template <int N, typename Number>
struct Group {
  static constexpr int PLACES = PACKED<Number>;
  const Query* queries;
  Cache<Number> cache;
  float *scaled, *scores;  // (N, K), the queries; (N, distance)
  Span span;
  int distance = span.distance();

  // Computes the scores of all queries, also for keys that they do not see.
  void score() const {
    for (int p = span.from; p < span.to; p += LANES) {
      const Number* keys = cache.find_key(p, 0);
      Lanes sums[N] = {};
      for (int i = 0; i < cache.K; i += PLACES, keys += LANES * PLACES)
        for (int place = 0; place < PLACES; place++) {
          Lanes column = load_words(keys, place);
          for (int n = 0; n < N; n++) sums[n] += column * scaled[n * cache.K + i + place];
        }
      for (int n = 0; n < N; n++)
        memcpy(scores + n * distance + p - span.from, &sums[n], sizeof sums[n]);
    }
  }

  // Computes out = weights . values / sum, for C vectors of columns.
  template <int C>
  void mix(const float* sums, int column, int head_dim) const {
    // The first and last position that any query sees, and those that all see.
    int first = queries[0].start, last = queries[0].position;
    int common_first = first, common_last = last;
    for (int n = 1; n < N; n++) {
      first = std::min(first, queries[n].start);
      last = std::max(last, queries[n].position);
      common_first = std::max(common_first, queries[n].start);
      common_last = std::min(common_last, queries[n].position);
    }
    Lanes mixed[N][C] = {};
    for (int words = first / PLACES * PLACES; words <= last; words += PLACES) {
      const Number* value = cache.find_value(words, column);
      for (int place = 0; place < PLACES; place++) {
        const int p = words + place;
        const float* weights = scores + p - span.from;
        const bool by_all = p >= common_first && p <= common_last;
        for (int c = 0; c < C; c++) {
          Lanes values = load_words(value + c * LANES * PLACES, place);
          for (int n = 0; n < N; n++)
            // A weight of 0 would not be enough to leave a value out: it may be NaN.
            if (by_all || (p >= queries[n].start && p <= queries[n].position))
              mixed[n][c] += weights[n * distance] * values;
        }
      }
    }
    for (int n = 0; n < N; n++)
      for (int c = 0; c < C; c++) {
        Lanes found = mixed[n][c] / sums[n];
        int at = column + c * LANES;
        memcpy(queries[n].out + at, &found, std::min(LANES, head_dim - at) * sizeof(float));
      }
  }
};

// Computes `attend` for N queries. `scratch` holds (N, K) and (N, distance) floats.
template <int N, typename Number>
inline void attend_by_vectors(const Query* queries, Cache<Number> cache, int head_dim,
                              float* scratch) {
  Group<N, Number> group{queries, cache, scratch, scratch + N * cache.K, Span(queries, N)};
  const float factor = 1 / std::sqrt((float)head_dim);
  for (int n = 0; n < N; n++)
    for (int i = 0; i < cache.K; i++)
      group.scaled[n * cache.K + i] = i < head_dim ? queries[n].q[i] * factor : 0;
  group.score();
  float sums[N];
  for (int n = 0; n < N; n++)
    sums[n] = exponentiate(queries[n], group.scores + n * group.distance, group.span);
  constexpr int C = WIDTH == LANES ? 4 : 1;  // so that all sums stay in registers
  int column = 0;
  for (; column + C * LANES <= head_dim; column += C * LANES)
    group.template mix<C>(sums, column, head_dim);
  for (; column < head_dim; column += LANES) group.template mix<1>(sums, column, head_dim);
}

// -- by AMX ---------------------------------------------------------------------------------------

#ifdef HAS_TILES
inline bool attends_by_tiles(int precision) { return precision != FLOAT32 && allow_tiles(); }

// Computes `attend` for up to 16 queries: the lines of a tile. Every 32 positions add to a sum by
// themselves, and those that a query does not see add 0.
inline void attend_by_tiles(const Query* queries, int n, Cache<uint16_t> cache, int head_dim,
                            float* scratch) {
  const int K = cache.K;
  const Span span(queries, n);
  const int distance = span.distance(), query_words = TILE * K / 2;
  uint32_t* rounded = (uint32_t*)scratch;  // (n, K / 2) words of two columns
  float* scaled = scratch + query_words;   // (K,), of one query; the scores overwrite it
  float* scores = scratch + query_words;   // (n, distance)
  const float factor = 1 / std::sqrt((float)head_dim);
  for (int m = 0; m < n; m++) {
    for (int i = 0; i < K; i++) scaled[i] = i < head_dim ? queries[m].q[i] * factor : 0;
    round_bfloat16(scaled, rounded + m * K / 2, K);
  }
  configure_tiles(n, n);
  for (int p = span.from; p < span.to; p += 2 * TILE) {
    const uint16_t* keys = cache.find_key(p, 0);
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    for (int i = 0; i < K; i += 2 * TILE) {
      _tile_loadd(INPUTS_0, rounded + i / 2, 2 * K);
      _tile_loadd(WEIGHTS_0, keys + i * TILE, TILE_BYTES);
      _tile_loadd(WEIGHTS_1, keys + (i + K) * TILE, TILE_BYTES);
      _tile_dpbf16ps(SUMS_00, INPUTS_0, WEIGHTS_0);
      _tile_dpbf16ps(SUMS_01, INPUTS_0, WEIGHTS_1);
    }
    _tile_stored(SUMS_00, scores + p - span.from, 4 * distance);
    _tile_stored(SUMS_01, scores + p - span.from + TILE, 4 * distance);
  }
  float sums[TILE];
  for (int m = 0; m < n; m++) {
    float* weights = scores + m * distance;
    sums[m] = exponentiate(queries[m], weights, span);
    round_bfloat16(weights, (uint32_t*)weights, span.to - span.from);  // in place
  }
  asm volatile("" : : "r"(scores) : "memory");  // as in `configure_tiles`
  for (int column = 0; column < head_dim; column += 4 * TILE) {
    const bool wide = column + 2 * TILE < head_dim;
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    _tile_zero(SUMS_10);
    _tile_zero(SUMS_11);
    for (int p = span.from; p < span.to; p += 2 * TILE) {
      const uint16_t* values = cache.find_value(p, column);
      _tile_loadd(INPUTS_0, (uint32_t*)scores + (p - span.from) / 2, 4 * distance);
      _tile_loadd(WEIGHTS_0, values, 4 * K);
      _tile_loadd(WEIGHTS_1, values + 2 * TILE, 4 * K);
      _tile_dpbf16ps(SUMS_00, INPUTS_0, WEIGHTS_0);
      _tile_dpbf16ps(SUMS_01, INPUTS_0, WEIGHTS_1);
      if (!wide) continue;
      _tile_loadd(WEIGHTS_0, values + 4 * TILE, 4 * K);
      _tile_loadd(WEIGHTS_1, values + 6 * TILE, 4 * K);
      _tile_dpbf16ps(SUMS_10, INPUTS_0, WEIGHTS_0);
      _tile_dpbf16ps(SUMS_11, INPUTS_0, WEIGHTS_1);
    }
    float mixed[TILE][4 * TILE];
    _tile_stored(SUMS_00, mixed[0], sizeof mixed[0]);
    _tile_stored(SUMS_01, mixed[0] + TILE, sizeof mixed[0]);
    _tile_stored(SUMS_10, mixed[0] + 2 * TILE, sizeof mixed[0]);
    _tile_stored(SUMS_11, mixed[0] + 3 * TILE, sizeof mixed[0]);
    for (int m = 0; m < n; m++)
      for (int i = column; i < std::min(column + 4 * TILE, head_dim); i++)
        queries[m].out[i] = mixed[m][i - column] / sums[m];
  }
  _tile_release();
}
#else
inline bool attends_by_tiles(int) { return false; }
#endif

// Computes out = softmax(q . keys / sqrt K + bias) values for up to 16 queries of one slot and KV
// head. `scratch` holds as many queries (K,) and their scores (distance,).
template <typename Number>
inline void attend(const Query* queries, int n, Cache<Number> cache, int head_dim, float* scratch,
                   bool by_tiles) {
#ifdef HAS_TILES
  if constexpr (std::is_same_v<Number, uint16_t>)
    if (by_tiles) return attend_by_tiles(queries, n, cache, head_dim, scratch);
#endif
  for (; n >= 4; n -= 4, queries += 4) attend_by_vectors<4>(queries, cache, head_dim, scratch);
  for (; n >= 2; n -= 2, queries += 2) attend_by_vectors<2>(queries, cache, head_dim, scratch);
  if (n) attend_by_vectors<1>(queries, cache, head_dim, scratch);
}
