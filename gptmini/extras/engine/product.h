// Matrix products y = w x of weights w with the inputs x of M tokens. Almost all time goes here.
//
// For one token each weight is used once, so memory bandwidth is the limit. For many tokens it is
// arithmetic, and each loaded weight must serve several tokens. So a tile of rows x tokens is
// computed at a time, with its sums in registers. Every sum adds the columns in order, whatever the
// tile, so a token's outputs have the same bits whichever tokens share the call. Behind the first
// tile of tokens, its rows of weights are in the processor's cache, so memory is still read once.
//
// float32 weights are multiplied in float32. For 16-bit inputs, processors have instructions that
// multiply and add two columns at once: bfloat16 weights are multiplied with inputs rounded to
// bfloat16, int8 weights with inputs rounded to int16 with one scale per token.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#endif

// WIDTH: the widest registers of this processor, in 32-bit numbers. TOKENS: how many tokens a tile
// of two registers of rows takes, so that all sums stay in registers: AVX-512 has 32, others mostly
// 16.
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int WIDTH = 16, TOKENS = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, TOKENS = 6;
#else
constexpr int WIDTH = 4, TOKENS = 4;
#endif
// Floats in a vector. The compiler splits vectors for processors with narrower registers.
constexpr int LANES = 16;
// Threads share out the rows of a matrix in blocks of this size, which are whole tiles everywhere.
constexpr int ROW_BLOCK = 32;
// Rows and columns are padded with zeros to a multiple of this.
constexpr int ROW_ALIGNMENT = 64;
// How many bytes ahead a panel is fetched from memory for one token.
constexpr int FETCH_AHEAD = 1024;
enum { FLOAT32, BFLOAT16, INT8 };
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

inline int round_up(int n, int multiple = ROW_ALIGNMENT) {
  return (n + multiple - 1) / multiple * multiple;
}

// Weights (rows, columns): rows are outputs, columns are inputs, padded.
struct Matrix {
  const void* data;    // in the layout that `pack` in packing.py makes
  const float* scale;  // (rows,) for int8, else null
  const float* bias;   // (rows,) or null
  int rows, columns;
};

// Adds the lanes of a vector, always in the same order.
template <typename Vector>
inline float sum_lanes(Vector v) {
  float lanes[sizeof v / sizeof(float)];
  memcpy(lanes, &v, sizeof v);
  for (int half = sizeof v / sizeof(float) / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <typename Vector = Lanes>
inline Vector load(const float* from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}

// -- by vectors -----------------------------------------------------------------------------------

typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Packed __attribute__((vector_size(4 * WIDTH)));  // in each lane one word
typedef int16_t Numbers __attribute__((vector_size(4 * WIDTH)));

// Weights lie in panels of 16 rows: the 32-bit words with the first columns of all 16 rows, then
// the words with the next columns. A word of the inputs holds a column of float32, or a pair of
// others. `extract` makes a register of words of weights like those of the inputs. `add` multiplies
// such words of as many rows as a register holds with the same word of inputs and adds the products
// to the rows' sums.
struct Float32 {
  static constexpr int COLUMNS = 1;  // in a word of inputs
  static constexpr int PARTS = 1;    // words of inputs for a word of weights
  typedef Floats Sums;
  static Packed extract(Packed words, int) { return words; }
  static Sums add(Sums sums, Packed weights, Packed inputs) {
    return sums + (Floats)weights * (Floats)inputs;
  }
};

struct BFloat16 {
  static constexpr int COLUMNS = 2, PARTS = 1;
  typedef Floats Sums;
  static Packed extract(Packed words, int) { return words; }
  static Sums add(Sums sums, Packed weights, Packed inputs) {
#if defined(__AVX512BF16__)
    return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)inputs);
#else  // bfloat16 is the upper half of a float32
    sums += (Floats)(weights << 16) * (Floats)(inputs << 16);
    return sums + (Floats)(weights & 0xffff0000u) * (Floats)(inputs & 0xffff0000u);
#endif
  }
};

// Bytes 0 and 2 of a word are its first pair of columns, bytes 1 and 3 the second. Shifts of 16-bit
// numbers widen them with their signs. Sums of integers are exact, the same on every processor.
struct Int8 {
  static constexpr int COLUMNS = 2, PARTS = 2;
  typedef Integers Sums;
  static Packed extract(Packed words, int i) {
    Numbers bytes = (Numbers)words;
    return (Packed)((i ? bytes : bytes << 8) >> 8);
  }
  static Sums add(Sums sums, Packed weights, Packed inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__)
    return sums + (Sums)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#elif defined(__SSE2__)
    return sums + (Sums)_mm_madd_epi16((__m128i)weights, (__m128i)inputs);
#else
    sums += ((Sums)weights << 16 >> 16) * ((Sums)inputs << 16 >> 16);
    return sums + ((Sums)weights >> 16) * ((Sums)inputs >> 16);
#endif
  }
};

struct Inputs {
  const uint32_t* words;  // columns or pairs of them; the tokens begin `distance` words apart
  const float* scales;    // (M,) for int16, else unused
  int64_t distance;
  bool by_tiles;  // whether AMX multiplies them; words of int16 are then split
};

// Multiplies N registers of rows with M of `all` tokens, from `first` on.
template <int N, int M, typename Type>
inline void multiply_panel(const Matrix& w, int row, int first, int all, Inputs x, float* y,
                           int64_t ys) {
  constexpr int PANELS = std::max(1, N * WIDTH / LANES);  // in which these rows lie
  typename Type::Sums sums[N][M] = {};
  const int64_t size = w.columns / (Type::COLUMNS * Type::PARTS) * LANES;  // words in a panel
  const uint32_t *panels = (const uint32_t*)w.data + row / LANES * size, *data[N];
  for (int n = 0; n < N; n++) {
    int at = row % LANES + n * WIDTH;
    data[n] = panels + at / LANES * size + at % LANES;
  }
  // Weights are fetched from memory meanwhile. For one token, those that come soon: many panels at
  // a time keep the memory busy. For more, those of the next rows: each token fetches its part, so
  // that no tile waits for memory while the others leave it idle.
  const char* fetched = (const char*)panels;
  fetched += all == 1 ? FETCH_AHEAD : 4 * size * PANELS + 4 * size * first / all;
  const int step = 4 * LANES * M / all;
  for (int c = 0; c < w.columns / Type::COLUMNS; c += Type::PARTS, fetched += step) {
    for (int n = 0; n < PANELS; n++) __builtin_prefetch(fetched + 4 * size * n);
    Packed words[N];
    for (int n = 0; n < N; n++, data[n - 1] += LANES) memcpy(&words[n], data[n], sizeof words[n]);
    for (int i = 0; i < Type::PARTS; i++) {
      Packed weights[N];
      for (int n = 0; n < N; n++) weights[n] = Type::extract(words[n], i);
      for (int m = 0; m < M; m++) {
        uint32_t input;
        memcpy(&input, x.words + (first + m) * x.distance + c + i, sizeof input);
        for (int n = 0; n < N; n++)
          sums[n][m] = Type::add(sums[n][m], weights[n], input + Packed{});
      }
    }
  }
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++) {
      Floats sum = __builtin_convertvector(sums[n][m], Floats);
      for (int i = 0, at = row + n * WIDTH; i < WIDTH; i++, at++) {
        float scale = w.scale ? w.scale[at] * x.scales[first + m] : 1;
        float bias = w.bias ? w.bias[at] : 0;
        // An explicit fma: otherwise the compiler could contract it in one tile size only.
        y[(first + m) * ys + at] = std::fma(sum[i], scale, bias);
      }
    }
}

// Multiplies two registers of rows with the tokens from m on, M at a time; m ends behind the last.
template <int M, typename Type>
inline void multiply_panels(const Matrix& w, int row, int& m, int all, Inputs x, float* y,
                            int64_t ys) {
  for (; m + M <= all; m += M) multiply_panel<2, M, Type>(w, row, m, all, x, y, ys);
}

// -- the same by AMX ------------------------------------------------------------------------------

// AMX is the matrix unit of Intel's processors since Sapphire Rapids. One instruction multiplies a
// tile of 16 tokens with one of 16 rows of weights, 32 columns of bfloat16 or 64 of int8. Panels of
// weights are such tiles, one behind the other.
//
// It adds even and odd columns of bfloat16 by themselves: sums have other bits than those above,
// though still the same whatever the other tokens are. So where there are tiles, all products of
// bfloat16 take them, also those of a single token. Sums of integers are exact either way, so that
// the few tokens of a call can take what is faster for them.
#ifdef HAS_TILES

constexpr int TILE = 16;        // tokens, or rows of weights
constexpr int TILE_BYTES = 64;  // in one of the 16 lines of a tile
// The tile registers. For bfloat16: sums of the first and second 16 tokens, each with two panels of
// 16 rows; the inputs of the first and second 16 tokens; the weights of the two panels. For int8:
// upper and lower halves in place of first and second tokens. g++ makes the names of registers of
// these, and takes no other constants.
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define INPUTS_0 4
#define INPUTS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

// Asks Linux for the tile registers, once in a process; false if it refuses.
inline bool allow_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}

// Returns whether a call of M tokens is multiplied by tiles.
inline bool takes_tiles(int precision, int M) {
  constexpr int MIN_TOKENS_FOR_INT8 = 4;
  const bool is_faster = precision == BFLOAT16 || (precision == INT8 && M >= MIN_TOKENS_FOR_INT8);
  return is_faster && allow_tiles();
}

// Sets the lines of this thread's tile registers, for the first and the second sums and inputs.
inline void configure_tiles(int first, int second) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  } shapes = {1, 0, {}, {}, {}};
  const int lines[] = {first, first, second, second, first, second, TILE, TILE};
  for (int tile = 0; tile < 8; tile++) {
    shapes.lines[tile] = lines[tile];
    shapes.bytes[tile] = TILE_BYTES;
  }
  // The intrinsics do not tell g++ all of what they read: it must be in memory by now.
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

struct BFloat16Tiles {
  static constexpr int TOKENS_AT_A_TIME = 2 * TILE;

  static void configure(int M) {
    // No tile may be empty, used or not.
    configure_tiles(std::min(M, TILE), std::max(M - TILE, 1));
  }

  // Multiplies two panels of rows with the M tokens that the tiles are configured for.
  static void multiply(const Matrix& w, int row, int M, Inputs x, float* y, int64_t ys) {
    const int64_t panel_words = w.columns / 2 * TILE;
    const uint32_t* panels = (const uint32_t*)w.data + row / TILE * panel_words;
    const uint32_t* inputs = x.words;
    const int64_t input_bytes = 4 * x.distance, output_bytes = 4 * ys;
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    _tile_zero(SUMS_10);
    _tile_zero(SUMS_11);
    for (int c = 0; c < w.columns; c += 32, inputs += TILE, panels += TILE * TILE) {
      _tile_loadd(WEIGHTS_0, panels, TILE_BYTES);
      _tile_loadd(WEIGHTS_1, panels + panel_words, TILE_BYTES);
      _tile_loadd(INPUTS_0, inputs, input_bytes);
      _tile_dpbf16ps(SUMS_00, INPUTS_0, WEIGHTS_0);
      _tile_dpbf16ps(SUMS_01, INPUTS_0, WEIGHTS_1);
      if (M > TILE) {
        _tile_loadd(INPUTS_1, inputs + TILE * x.distance, input_bytes);
        _tile_dpbf16ps(SUMS_10, INPUTS_1, WEIGHTS_0);
        _tile_dpbf16ps(SUMS_11, INPUTS_1, WEIGHTS_1);
      }
    }
    _tile_stored(SUMS_00, y + row, output_bytes);
    _tile_stored(SUMS_01, y + row + TILE, output_bytes);
    if (M > TILE) {
      _tile_stored(SUMS_10, y + TILE * ys + row, output_bytes);
      _tile_stored(SUMS_11, y + TILE * ys + row + TILE, output_bytes);
    }
    if (!w.bias) return;
    for (int m = 0; m < M; m++)
      for (int i = row; i < row + 2 * TILE; i++) y[m * ys + i] += w.bias[i];
  }
};

// AMX multiplies bytes with bytes, so a token's inputs are the upper bytes of all columns, then the
// lower ones; see `split_int16`.
struct Int8Tiles {
  static constexpr int TOKENS_AT_A_TIME = TILE;

  static void configure(int M) { configure_tiles(M, M); }

  // Multiplies two panels of rows with the M tokens that the tiles are configured for.
  static void multiply(const Matrix& w, int row, int M, Inputs x, float* y, int64_t ys) {
    const int64_t panel_words = w.columns / 4 * TILE;
    const uint32_t* panels = (const uint32_t*)w.data + row / TILE * panel_words;
    const uint32_t* upper = x.words;
    const uint32_t* lower = x.words + w.columns / 4;
    const int64_t input_bytes = 4 * x.distance;
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    _tile_zero(SUMS_10);
    _tile_zero(SUMS_11);
    for (int c = 0; c < w.columns; c += 64, upper += TILE, lower += TILE, panels += TILE * TILE) {
      _tile_loadd(WEIGHTS_0, panels, TILE_BYTES);
      _tile_loadd(WEIGHTS_1, panels + panel_words, TILE_BYTES);
      _tile_loadd(INPUTS_0, upper, input_bytes);
      _tile_loadd(INPUTS_1, lower, input_bytes);
      _tile_dpbssd(SUMS_00, INPUTS_0, WEIGHTS_0);
      _tile_dpbssd(SUMS_01, INPUTS_0, WEIGHTS_1);
      _tile_dpbusd(SUMS_10, INPUTS_1, WEIGHTS_0);  // lower bytes have no sign
      _tile_dpbusd(SUMS_11, INPUTS_1, WEIGHTS_1);
    }
    uint32_t upper_sums[TILE][2 * TILE], lower_sums[TILE][2 * TILE];
    _tile_stored(SUMS_00, upper_sums[0], 2 * TILE_BYTES);
    _tile_stored(SUMS_01, upper_sums[0] + TILE, 2 * TILE_BYTES);
    _tile_stored(SUMS_10, lower_sums[0], 2 * TILE_BYTES);
    _tile_stored(SUMS_11, lower_sums[0] + TILE, 2 * TILE_BYTES);
    for (int m = 0; m < M; m++)
      for (int i = 0; i < 2 * TILE; i++) {
        int32_t sum = upper_sums[m][i] * 256 + lower_sums[m][i];
        float bias = w.bias ? w.bias[row + i] : 0;
        y[m * ys + row + i] = std::fma((float)sum, w.scale[row + i] * x.scales[m], bias);
      }
  }
};

// Computes the rows `from` to `to` of y = w x for M tokens, two panels at a time.
template <typename Tiles>
void multiply_rows_by_tiles(const Matrix& w, int from, int to, int M, Inputs x, float* y,
                            int64_t ys) {
  int configured = 0;
  for (int row = from; row < to; row += 2 * TILE)
    for (int m = 0; m < M; m += Tiles::TOKENS_AT_A_TIME) {
      const int tokens = std::min(M - m, Tiles::TOKENS_AT_A_TIME);
      if (tokens != configured) Tiles::configure(tokens);
      configured = tokens;
      Inputs some{x.words + m * x.distance, x.scales + m, x.distance, true};
      Tiles::multiply(w, row, tokens, some, y + m * ys, ys);
    }
  _tile_release();
}

// Splits 64 inputs, pairs of int16, into words of their upper and of their lower bytes. The four
// columns of a word are in the order in which `pack` in packing.py has those of the weights.
inline void split_int16(const uint32_t* pairs, uint32_t* upper, uint32_t* lower) {
  for (int i = 0; i < TILE; i++) {
    const uint32_t first = pairs[2 * i], second = pairs[2 * i + 1];
    upper[i] = (first >> 8 & 0x00ff00ff) | (second & 0xff00ff00);
    lower[i] = (first & 0x00ff00ff) | (second << 8 & 0xff00ff00);
  }
}

#else
inline bool takes_tiles(int, int) { return false; }
#endif

// Computes the rows `from` to `to` of y = w x for M tokens.
template <typename Type>
void multiply_rows(const Matrix& w, int from, int to, int M, Inputs x, float* y, int ys) {
#ifdef HAS_TILES
  using Tiles = std::conditional_t<std::is_same_v<Type, Int8>, Int8Tiles, BFloat16Tiles>;
  if (x.by_tiles) return multiply_rows_by_tiles<Tiles>(w, from, to, M, x, y, ys);
#endif
  int row = from;
  for (; M == 1 && row + 8 * WIDTH <= to; row += 8 * WIDTH)
    multiply_panel<8, 1, Type>(w, row, 0, 1, x, y, ys);
  for (; row < to; row += 2 * WIDTH) {
    int m = 0;
    multiply_panels<TOKENS, Type>(w, row, m, M, x, y, ys);
    multiply_panels<4, Type>(w, row, m, M, x, y, ys);
    multiply_panels<2, Type>(w, row, m, M, x, y, ys);
    multiply_panels<1, Type>(w, row, m, M, x, y, ys);
  }
}

// Stores the lower halves of 16 words.
inline void store(Words halves, uint32_t* to) {
  Shorts shorts = __builtin_convertvector(halves, Shorts);
  memcpy(to, &shorts, sizeof shorts);
}

// Rounds to the nearest bfloat16, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Rounds n inputs (a multiple of 16) to the nearest bfloat16, ties to even.
inline void round_bfloat16(const float* x, uint32_t* words, int n) {
  for (int i = 0; i < n; i += LANES) {
    Words bits = (Words)load(x + i);
    store((bits + 0x7fff + (bits >> 16 & 1)) >> 16, words + i / 2);
  }
}

// Rounds n inputs (a multiple of 64) to int16 and returns their scale: the smallest with which the
// largest input fits and no sum of products with int8 weights exceeds 32 bits. Up to 15,000 columns
// the error is below that of bfloat16, as the largest input is at most sqrt(n) times the root of
// the mean square.
inline float round_int16(const float* x, uint32_t* words, int n, bool by_tiles) {
  Lanes largest = {}, sum = {};
  for (int i = 0; i < n; i += LANES) {
    Lanes size = (Lanes)((Words)load(x + i) & 0x7fffffffu);
    largest = size > largest ? size : largest;
    sum += size;
  }
  float scale = sum_lanes(sum) / 16e6f;  // 16e6 * 127 + rounding < 2^31
  float most = 0;
  for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
  if (most / 32767 > scale) scale = most / 32767;
  // With a NaN or an infinity the sum is not finite, and neither is the scale nor any output.
  float factor = scale > 1e-30f ? 1 / scale : 0;
  for (int i = 0; i < n; i += ROW_ALIGNMENT) {
    uint32_t pairs[ROW_ALIGNMENT / 2];
    for (int j = 0; j < ROW_ALIGNMENT; j += LANES)
      // Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits of the sum.
      store((Words)(load(x + i + j) * factor + 12582912.0f), pairs + j / 2);
#ifdef HAS_TILES
    if (by_tiles) {
      split_int16(pairs, words + i / 4, words + (n + i) / 4);
      continue;
    }
#endif
    memcpy(words + i / 2, pairs, sizeof pairs);
  }
  return scale;
}
