// What all of megakernel.cu is built on: its sizes, the words that programs leave for each other, what a program has in
// shared memory, and its ring of stages, which weights and pages go through.

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that multiply and attend
constexpr int TEAM = THREADS / ROWS;            // those of them that take in one row of what the others made
constexpr int HEADS = KV * G, WIDTH = HEADS * D, QKV = WIDTH + 2 * KV * D;
// Of gate and up: of all experts that a row has chosen, one where an MLP is dense.
constexpr int ADD_LINES = HIDDEN / PROGRAMS, GATE_LINES = CHOSEN * 2 * INNER / PROGRAMS, QKV_LINES = QKV / PROGRAMS;
// Where sums of up's lines begin, behind gate's; packed lines come by eights, of which the first may be another's.
constexpr int UP_AT = PACKED ? (GATE_LINES / 2 + 7) / 8 * 8 : GATE_LINES / 2, GATE_SUMS = 2 * UP_AT;
constexpr int MOST_OTHERS = ADD_LINES > QKV_LINES ? ADD_LINES : QKV_LINES;
constexpr int MOST_LINES = GATE_SUMS > MOST_OTHERS ? GATE_SUMS : MOST_OTHERS;
// Scales of packed lines, of a layer's products one behind another.
constexpr int O_SCALES = QKV_LINES, DOWN_SCALES = O_SCALES + ADD_LINES, GATE_SCALES = DOWN_SCALES + ADD_LINES;
constexpr int UP_SCALES = GATE_SCALES + GATE_LINES / 2, ALL_SCALES = GATE_SCALES + GATE_LINES;
constexpr int PIECE = CHOSEN * INNER / PIECES;  // of down's input, which may not fit in shared memory whole
constexpr int MOST_K = PIECE > WIDTH ? PIECE > HIDDEN ? PIECE : HIDDEN : WIDTH > HIDDEN ? WIDTH : HIDDEN;
constexpr int X_BYTES = 2 * MOST_K + (ROWS > 1 ? 64 : 0);  // of a row in shared memory: rows in different banks
constexpr int X_TILES = (ROWS + 3) / 4;            // of the tensor cores: eight columns, of which a row takes two
constexpr int SUMS_OF = X_TILES > 2 ? X_TILES : 2;  // of eight lines: each tile's, or even and odd k's of one
constexpr int TILE = 16;                    // keys: a page
constexpr int MOST_TAKEN = 2;               // parts of a sequence, of which everybody reads all, see join_parts
constexpr int HEAD_BYTES = 2 * D + 16;      // of a query in shared memory
constexpr int PAGE_BYTES = 4 * TILE * D, PAGES = STAGE_BYTES / PAGE_BYTES < 2 ? 1 : 2;  // of one head; in a stage
static_assert(STAGE_BYTES >= PAGE_BYTES && !(STAGE_BYTES % 1024), "megakernel.py");
static_assert(INNER % PIECES == 0, "megakernel.py");
static_assert(ROWS == 1 || ROWS == 2 || ROWS == 4 || ROWS == 8, "megakernel.py");
// Words: of a row's projection, which stand in front; in each copy of what all read, where parts of attention, their
// sums, and rows of the others begin.
constexpr int QKV_WORDS = QKV / 2, X_WORDS = HIDDEN / 2, INNER_WORDS = CHOSEN * INNER / 2;
constexpr int SUMS = SPLITS * WIDTH / 2, MIDDLE = SUMS + SPLITS * HEADS, ACTIVATED = MIDDLE + ROWS * X_WORDS;
constexpr int STREAM = ACTIVATED + ROWS * INNER_WORDS, LOGITS = STREAM + ROWS * X_WORDS;
constexpr int JOINED = LOGITS + ROWS * EXPERTS, COPY_WORDS = JOINED + ROWS * WIDTH / 2;

#if PACKED
typedef unsigned char Stored;
#else
typedef u16 Stored;
#endif
struct Layer {
  const Stored *qkv, *o, *gate_up, *down;  // norms' weights are folded in, but where there is a router
  const u16 *query_norm, *key_norm;        // (D,), or null: not normed
  u16 *keys, *values;                      // (blocks, TILE, KV, D)
  const u16 *router, *norm;                // (EXPERTS, HIDDEN), (HIDDEN,): of what stands before router and experts
  const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales;  // of packed lines, see packed_weights.py
  const u16* qkv_bias;                                                // of the lines, if BIASED
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
// The same between GPUs, whose memory NVLink reaches.
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
// Another GPU may be late for as long as its process rests (Ctrl-Z); who hangs is for the host to see.
__device__ __forceinline__ void be_patient(u32& looks) {
  if (RANKS == 1 && ++looks == PATIENCE) asm volatile("trap;");
}

// Sums over RANKS GPUs, of which each has a part of heads and of the MLP, see peer_words.py.
constexpr int BEHIND_ATTENTION = 0, BEHIND_MLP = 1;
struct Ranks {
  u64* const* everywhere;  // (RANKS,) each one's words
  int rank;

  // Of one element of the stream, of which each rank has a part: of all of them, in their order, so that it is the same
  // everywhere.
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

// Rows that are no padding, which stands behind the others, in page 0.
__device__ __forceinline__ int live_rows(const long long* slots, int rows) {
  while (rows > 1 && slots[rows - 1] < TILE) rows--;
  return rows;
}

struct Share {  // of the pages of all sequences, a program's
  int row = -1, pages, begin, end;  // row: of the sequence; none. pages: all of it
};
struct Parts {  // of a sequence
  int first, splits;
};

struct Memory {  // shared
  union {
    alignas(16) u16 x[ROWS][X_BYTES / 2];  // a product's input
    alignas(16) float outs[WARPS][G][D];  // of each warp's keys
  };
  alignas(16) float sums[(MOST_LINES + 7) / 8 * 8][ROWS][WARPS];
  float scales[PACKED ? ALL_SCALES : 1];
  alignas(16) u16 made[G + 2][HEAD_BYTES / 2];  // queries, the new key and value
  float tops[WARPS][8], totals[WARPS][8], squares[WARPS];
  // This step's, in every layer: what this program attends to, that sequence's angles, length and place in the cache,
  // and the parts of all sequences.
  Share share;
  float cosines[D / 2], sines[D / 2];
  int length, slot;
  Parts parts[ROWS];
  bool joins;  // see join_parts
  u64 barriers[2 * STAGES];
  int experts[ROWS][CHOSEN];  // that each row has chosen in this layer, and what they count
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

// Waits until a stage is free, then says how much of it is asked for.
__device__ __forceinline__ u32 make_room(const Ring& ring, int bytes, int lane) {
  const u32 bar = ring.full + 8 * ring.stage;
  barrier_wait(ring.empty + 8 * ring.stage, ring.round & 1 ^ 1);
  if (lane == 0) barrier_expect(bar, bytes);
  __syncwarp();
  return bar;
}
// Waits until no more stages, of so many bytes, are under way than memory needs to be busy.
template <int BYTES>
__device__ __forceinline__ void keep_pace(const Ring& ring) {
  constexpr int AHEAD = UNDER_WAY / BYTES > 2 ? UNDER_WAY / BYTES : 2;
  if (AHEAD < STAGES && (ring.round || ring.stage >= AHEAD)) {
    const int before = ring.stage - AHEAD;
    barrier_wait(ring.full + 8 * (before < 0 ? before + STAGES : before), (before < 0 ? ring.round - 1 : ring.round) & 1);
  }
}

// One lane of a warp, of which the compiler knows that no other does the same.
__device__ __forceinline__ bool is_elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}
