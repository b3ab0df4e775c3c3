// The base of megakernel.cu: sizes, the words that programs exchange, a program's shared memory, and the ring buffer of
// stages through which weights and pages arrive.

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // compute warps: products and attention
constexpr int TEAM = THREADS / ROWS;            // threads that read one input row
constexpr int HEADS = KV * G, WIDTH = HEADS * D, QKV = WIDTH + 2 * KV * D;
// GATE_LINES: lines (weight rows) of gate and up, for all experts of a row; a dense MLP counts as one.
constexpr int ADD_LINES = HIDDEN / PROGRAMS, GATE_LINES = CHOSEN * 2 * INNER / PROGRAMS, QKV_LINES = QKV / PROGRAMS;
// Where up's sums begin, after gate's. Packed lines come in eights, whose first lines may be another program's.
constexpr int UP_AT = PACKED ? (GATE_LINES / 2 + 7) / 8 * 8 : GATE_LINES / 2, GATE_SUMS = 2 * UP_AT;
constexpr int MOST_OTHERS = ADD_LINES > QKV_LINES ? ADD_LINES : QKV_LINES;
constexpr int MOST_LINES = GATE_SUMS > MOST_OTHERS ? GATE_SUMS : MOST_OTHERS;
// Offsets of the scales of lines, one product of a layer after another.
constexpr int O_SCALES = QKV_LINES, DOWN_SCALES = O_SCALES + ADD_LINES, GATE_SCALES = DOWN_SCALES + ADD_LINES;
constexpr int UP_SCALES = GATE_SCALES + GATE_LINES / 2, ALL_SCALES = GATE_SCALES + GATE_LINES;
constexpr int PIECE = CHOSEN * INNER / PIECES;  // pieces of down's input, which may not fit in shared memory whole
constexpr int MOST_K = PIECE > WIDTH ? PIECE > HIDDEN ? PIECE : HIDDEN : WIDTH > HIDDEN ? WIDTH : HIDDEN;
constexpr int BYTES = FLOAT8 ? 1 : 2;  // of an element of unpacked weights, and of x where it is multiplied
constexpr float LARGEST = 448.f;       // of e4m3
constexpr int X_BYTES = BYTES * MOST_K + (ROWS > 1 ? 64 : 0);  // per input row; padded: rows in different banks
constexpr int X_TILES = (ROWS + 3) / 4;            // MMA tiles: eight columns each, two for each row
constexpr int SUMS_OF = X_TILES > 2 ? X_TILES : 2;  // per eight lines: one per tile, or even and odd k of one tile
constexpr int TILE = 16;                    // keys in a page
constexpr int MOST_TAKEN = 2;               // parts of a sequence that every program reads itself, see join_parts
constexpr int HEAD_BYTES = 2 * D + 16;      // of a query in shared memory
constexpr int HEAD_COLUMNS = D / (FLOAT8_CACHE ? 128 : 64);  // of 128 bytes, of a head in a page
constexpr int PAGE_BYTES = 2 * TILE * HEAD_COLUMNS * LINE;   // of one head: keys, then values
constexpr int PAGES = STAGE_BYTES / PAGE_BYTES < 2 ? 1 : 2;  // in a stage
static_assert(STAGE_BYTES >= PAGE_BYTES && !(STAGE_BYTES % 1024), "megakernel.py");
static_assert(INNER % PIECES == 0, "megakernel.py");
static_assert(ROWS == 1 || ROWS == 2 || ROWS == 4 || ROWS == 8, "megakernel.py");
// In words: the sizes of a row's vectors (projections come first in memory), and, within each copy of what all programs
// read, the offsets of attention's parts, of the parts' sums, and of the other vectors' rows.
constexpr int QKV_WORDS = QKV / 2, X_WORDS = HIDDEN / 2, INNER_WORDS = CHOSEN * INNER / 2;
constexpr int SUMS = SPLITS * WIDTH / 2, MIDDLE = SUMS + SPLITS * HEADS, ACTIVATED = MIDDLE + ROWS * X_WORDS;
constexpr int STREAM = ACTIVATED + ROWS * INNER_WORDS, LOGITS = STREAM + ROWS * X_WORDS;
constexpr int JOINED = LOGITS + ROWS * EXPERTS, COPY_WORDS = JOINED + ROWS * WIDTH / 2;

constexpr bool SCALED = PACKED || FLOAT8;  // lines have scales
#if PACKED || FLOAT8
typedef unsigned char Stored;
#else
typedef u16 Stored;
#endif
struct Layer {
  const Stored *qkv, *o, *gate_up, *down;  // norm weights are folded in, but see norm and input_norm
  const u16 *query_norm, *key_norm;        // (D,), or null: no norm
  u16 *keys, *values;                      // (blocks, TILE, KV, D); FLOAT8_CACHE: bytes
  const u16 *router, *norm;                // (EXPERTS, HIDDEN); (HIDDEN,): before router and experts, or if FLOAT8
  const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales;  // if SCALED; packed: see packed_weights.py
  const u16* qkv_bias;                                                // one per line, if BIASED
  const u16* input_norm;                                              // (HIDDEN,): before qkv, if FLOAT8
};

__device__ __forceinline__ u64 word_of(u32 data, u32 flag) { return (u64)flag << 32 | data; }
__device__ __forceinline__ void leave(u64* to, u32 data, u32 flag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word_of(data, flag)) : "memory");
}
__device__ __forceinline__ u64 look(const u64* from) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void look_at_two(const u64* from, u64 (&words)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
}
// The same between GPUs, over NVLink.
__device__ __forceinline__ void leave_there(u64* to, u32 data, u32 flag) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(word_of(data, flag)) : "memory");
}
__device__ __forceinline__ u64 look_for_theirs(const u64* from) {
  u64 word;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ bool has(u64 word, u32 flag) { return (u32)(word >> 32) == flag; }
__device__ __forceinline__ bool both(const u64 (&words)[2], u32 flag) {
  return has(words[0], flag) && has(words[1], flag);
}
// No limit between GPUs: a peer may be paused for any length of time (Ctrl-Z); the host detects hangs.
__device__ __forceinline__ void be_patient(u32& looks) {
  if (RANKS == 1 && ++looks == PATIENCE) asm volatile("trap;");
}

// All-reduce over RANKS GPUs, each with a part of the heads and of the MLP; see peer_words.py.
constexpr int BEHIND_ATTENTION = 0, BEHIND_MLP = 1;
struct Ranks {
  u64* const* everywhere;  // (RANKS,): each rank's words
  int rank;

  // Sums one element of the stream over all ranks, in rank order, so that every rank gets the same bits.
  __device__ __forceinline__ float sum(float mine, int where, int row, int line, u32 flag) const {
    if (RANKS == 1) return mine;
    const int at = (2 * RANKS * (ROWS - 1) + where * RANKS * ROWS + row) * HIDDEN + line;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != rank) leave_there(everywhere[r] + at + rank * ROWS * HIDDEN, __float_as_uint(mine), flag);
    const u64* here = everywhere[rank] + at;
    float total = 0.f;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      u64 word = word_of(__float_as_uint(mine), flag);
      u32 looks = 0;
      if (r != rank)
        while (!has(word = look_for_theirs(here + r * ROWS * HIDDEN), flag)) be_patient(looks);
      total += __uint_as_float((u32)word);
    }
    return total;
  }
};
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ uint2 read8(u32 from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ u32 word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ float rounded(float x) { return low(pack(x, 0.f)); }

// Rows without the padding, which follows them and has slots in page 0.
__device__ __forceinline__ int live_rows(const long long* slots, int rows) {
  while (rows > 1 && slots[rows - 1] < TILE) rows--;
  return rows;
}

struct Share {  // a program's share of the pages of all sequences
  int row = -1, pages, begin, end;  // row: the sequence, or -1. pages: all of the sequence's
};
struct Parts {  // a sequence's parts of attention
  int first, splits;
};

struct Memory {  // in shared memory
  union {
    alignas(16) u16 x[ROWS][X_BYTES / 2];  // a product's input
    alignas(16) float outs[WARPS][G][D];  // of each warp's keys
  };
  alignas(16) float sums[(MOST_LINES + 7) / 8 * 8][ROWS][WARPS];
  alignas(16) u16 taken[FLOAT8 ? ROWS : 1][FLOAT8 ? MOST_K : 8];  // x before it is converted
  alignas(16) u16 norm[FLOAT8 ? HIDDEN : 8];                      // weights of the norm before this product
  float largest[WARPS], x_scales[ROWS];
  float scales[SCALED ? ALL_SCALES : 1];
  alignas(16) u16 made[G + 2][HEAD_BYTES / 2];  // queries, then the new key and value; FLOAT8_CACHE: float16, float8
  float tops[WARPS][8], totals[WARPS][8], squares[WARPS];
  // The same in every layer of a step: this program's share of attention, the sequence's rotary angles, length and
  // cache slot, and the parts of all sequences.
  Share share;
  float cosines[D / 2], sines[D / 2];
  int length, slot;
  Parts parts[ROWS];
  bool joins;  // see join_parts
  u64 barriers[2 * STAGES];
  int experts[ROWS][CHOSEN];  // each row's experts in this layer, and their weights below
  float shares[ROWS][CHOSEN];
  int live;  // see live_rows
};
static_assert(sizeof(Memory) <= MEMORY_BYTES, "megakernel.py");

struct Ring {
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ u32 at() const { return tiles + stage * STAGE_BYTES; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round++;
  }
};

// Waits until a stage is free, then sets how many bytes will arrive in it.
__device__ __forceinline__ u32 make_room(const Ring& ring, int bytes, int lane) {
  const u32 bar = ring.full + 8 * ring.stage;
  barrier_wait(ring.empty + 8 * ring.stage, ring.round & 1 ^ 1);
  if (lane == 0) barrier_expect(bar, bytes);
  __syncwarp();
  return bar;
}
// Waits until no more stages, of BYTES each, are in flight than it takes to keep memory busy.
template <int BYTES>
__device__ __forceinline__ void keep_pace(const Ring& ring) {
  constexpr int AHEAD = UNDER_WAY / BYTES > 2 ? UNDER_WAY / BYTES : 2;
  if (AHEAD < STAGES && (ring.round || ring.stage >= AHEAD)) {
    const int before = ring.stage - AHEAD;
    barrier_wait(ring.full + 8 * (before < 0 ? before + STAGES : before), (before < 0 ? ring.round - 1 : ring.round) & 1);
  }
}

// True for one lane of the warp. Unlike `lane == 0`, elect.sync tells the compiler that it is a single lane.
__device__ __forceinline__ bool is_elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}

// What a line's sum is multiplied by; ``i`` counts the lines of all of a layer's products.
__device__ __forceinline__ float scale_of(const Memory& memory, int i) { return SCALED ? memory.scales[i] : 1.f; }
// A layer's scales of this program's lines, loaded into registers before they are put in memory.
struct Scales {
  static constexpr int EACH = SCALED ? (ALL_SCALES + THREADS - 1) / THREADS : 1;
  float its[EACH];

  __device__ __forceinline__ Scales(const Layer& layer) {
    if constexpr (SCALED)
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        its[j] = __ldg(place(layer, min((int)threadIdx.x + j * THREADS, ALL_SCALES - 1)));
        asm volatile("" : "+f"(its[j])::"memory");
      }
  }
  __device__ __forceinline__ void put(Memory& memory) const {
    if constexpr (SCALED)
#pragma unroll
      for (int j = 0; j < EACH; j++)
        if (const int i = threadIdx.x + j * THREADS; i < ALL_SCALES) memory.scales[i] = its[j];
  }

 private:
  // Scales of packed gate and up alternate in eights, as their lines do in memory.
  static __device__ __forceinline__ const float* place(const Layer& layer, int i) {
    constexpr int OWN = GATE_LINES / 2;
    if (i < O_SCALES) return layer.qkv_scales + blockIdx.x * QKV_LINES + i;
    if (i < DOWN_SCALES) return layer.o_scales + blockIdx.x * ADD_LINES + i - O_SCALES;
    if (i < GATE_SCALES) return layer.down_scales + blockIdx.x * ADD_LINES + i - DOWN_SCALES;
    const int line = blockIdx.x * OWN + (i - GATE_SCALES) % OWN, up = i >= UP_SCALES;
    return layer.gate_up_scales + (PACKED ? line / 8 * 16 + up * 8 + line % 8 : up * INNER + line);
  }
};
