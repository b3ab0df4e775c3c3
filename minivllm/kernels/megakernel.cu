// All layers of a decoder for one token, in one kernel; see megakernel.py.
//
// Compiled for one shape, behind hopper.cuh. PROGRAMS of them, one a multiprocessor, all at once. Of each of a layer's
// four products a program has as many lines of the weight as any other, all of k. One warp asks for weights, which
// depend on nothing, as far ahead as there is room: from one product, and one layer, to the next; and for the pages of
// keys and values that its program attends to. WARPS multiply, each a part of k, and attend, each to a page at a time.
// What programs make for each other are words in memory, two bfloat16 (or a float) and a flag, written at once: a word
// is there when its flag is this step's and layer's, so that nothing is fenced, counted or cleared. (A flag comes back
// after 2^32 layers.) Buffers of words are used again in each layer: who writes one has read what all have made from
// what it held. What everybody reads is there COPIES times, so that fewer wait for one word.

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // that multiply and attend
constexpr int HEADS = KV * G, WIDTH = HEADS * D, QKV = WIDTH + 2 * KV * D;
constexpr int ADD_LINES = HIDDEN / PROGRAMS, GATE_LINES = 2 * INNER / PROGRAMS, QKV_LINES = QKV / PROGRAMS;
constexpr int MOST_LINES = GATE_LINES > QKV_LINES ? GATE_LINES : QKV_LINES;
constexpr int MOST_K = INNER > WIDTH ? INNER > HIDDEN ? INNER : HIDDEN : WIDTH > HIDDEN ? WIDTH : HIDDEN;
constexpr int LINE_BYTES = 2 * CHUNK + 64;  // in shared memory, where eight lines are in different banks
constexpr int LOADS = CHUNK / WARPS / 32;
constexpr int AT_ONCE = 16 / LOADS;         // stages that a warp reads before it multiplies
constexpr int TILE = 16;                    // keys: a page
constexpr int FEW = SPLITS < 8 ? SPLITS : 8, LONG_PAGES = 512;  // see Shares
constexpr int HEAD_BYTES = 2 * D + 16;      // of a query in shared memory
constexpr int PAGE_BYTES = 4 * TILE * D, PAGES = STAGE_BYTES / PAGE_BYTES < 2 ? 1 : 2;  // of one head; in a stage
static_assert(STAGE_BYTES >= 8 * LINE_BYTES && STAGE_BYTES >= PAGE_BYTES && !(STAGE_BYTES % 1024), "megakernel.py");
// Words, in this order.
constexpr int QKV_WORDS = QKV / 2, PART_WORDS = SPLITS * WIDTH / 2, SUM_WORDS = SPLITS * HEADS, X_WORDS = HIDDEN / 2;

struct Layer {
  const u16 *qkv, *o, *gate_up, *down;  // norms' weights are folded in
  const u16 *query_norm, *key_norm;     // (D,), or null: not normed
  u16 *keys, *values;                   // (blocks, TILE, KV, D)
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
__device__ __forceinline__ bool has(u64 word, u32 flag) { return (u32)(word >> 32) == flag; }
__device__ __forceinline__ bool both(const u64 (&words)[2], u32 flag) {
  return has(words[0], flag) && has(words[1], flag);
}
__device__ __forceinline__ void be_patient(u32& looks) {
  if (++looks == PATIENCE) asm volatile("trap;");
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
               " {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint2 read8(u32 from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ u32 word(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ float rounded(float x) { return low(pack(x, 0.f)); }

struct Memory {  // shared
  union {
    alignas(16) u16 x[MOST_K];           // a product's input
    alignas(16) float outs[WARPS][G][D];  // of each warp's keys
  };
  alignas(16) float sums[(MOST_LINES + 7) / 8 * 8][WARPS];
  alignas(16) u16 made[G + 2][HEAD_BYTES / 2];  // queries, the new key and value
  float tops[WARPS][8], totals[WARPS][8], squares[WARPS];
  u64 barriers[2 * STAGES];
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

// Asks for LINES lines of a weight, eight at a time; of gate and up a program has half of each.
template <int LINES, int K, bool GATED>
__device__ __forceinline__ void load_weights(const u16* weight, Ring& ring, int lane, u64 policy) {
  constexpr int OWN = GATED ? LINES / 2 : LINES;
#pragma unroll 1
  for (int first = 0; first < LINES; first += 8) {
    const int i = first + lane, some = min(LINES - first, 8);
    const int line = blockIdx.x * OWN + (GATED && i >= OWN ? INNER - OWN + i : i);
    const u16* from = weight + (u64)line * K;
#pragma unroll 1
    for (int k = 0; k < K; k += CHUNK, ring.next()) {
      const u32 bar = make_room(ring, some * CHUNK * 2, lane);
      if (lane < some)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(ring.at() + lane * LINE_BYTES), "l"(from + k), "r"(CHUNK * 2), "r"(bar), "l"(policy) : "memory");
    }
  }
}

// A product's sums, a part of each warp's. A lane reads 16 bytes of a line at once and hands them to the tensor cores
// as they are: two of their four words are k of one row of a tile, two of another, whose x stands in another column.
// GROUPS times eight lines, CHUNKS stages each, which are there or come soon.
template <int GROUPS, int CHUNKS>
__device__ __forceinline__ void multiply_stages(float (&sums)[GROUPS][2][4], Ring& ring, u32 line_at, u32 x_at,
                                                u32 nothing) {
  uint4 w[GROUPS][CHUNKS][LOADS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++, ring.next()) {
      barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
      u32 seen = 0;  // see `nothing` below
#pragma unroll
      for (int i = 0; i < LOADS; i++) w[g][c][i] = read16(ring.at() + line_at + 64 * i), seen |= w[g][c][i].x;
      __syncwarp();
      if (threadIdx.x % 32 == 0) here_arrive(ring.empty + 8 * ring.stage + (seen & nothing));
    }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint2 x = read8(x_at + 2 * CHUNK * c + 64 * i);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const uint4 a = w[g][c][i];
        multiply(sums[g][i % 2], a.x, a.y, a.z, a.w, x.x, x.y);
      }
    }
}
// So many lines from the first on.
template <int GROUPS, int K>
__device__ __forceinline__ void multiply_groups(Memory& memory, Ring& ring, int first, u32 line_at, u32 x_at,
                                                u32 nothing) {
  constexpr int CHUNKS = K / CHUNK, SOME = CHUNKS < AT_ONCE ? CHUNKS : AT_ONCE, REST = CHUNKS % SOME;
  float sums[GROUPS][2][4] = {};
#pragma unroll 1
  for (int c = 0; c + SOME <= CHUNKS; c += SOME)
    multiply_stages<GROUPS, SOME>(sums, ring, line_at, x_at + 2 * CHUNK * c, nothing);
  if constexpr (REST) multiply_stages<GROUPS, REST>(sums, ring, line_at, x_at + 2 * CHUNK * (CHUNKS - REST), nothing);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const float sum = (sums[g][0][0] + sums[g][1][0]) + (sums[g][0][3] + sums[g][1][3]);
    if (threadIdx.x % 4 == 0) memory.sums[first + 8 * g + threadIdx.x % 32 / 4][threadIdx.x / 32] = sum;
  }
}
template <int LINES, int K> __device__ __forceinline__ void multiply_lines(Memory& memory, Ring& ring, u32 nothing) {
  constexpr int GROUPS = (LINES + 7) / 8, CHUNKS = K / CHUNK, SOME = AT_ONCE / CHUNKS > 1 ? AT_ONCE / CHUNKS : 1;
  constexpr int MANY = SOME < GROUPS ? SOME : GROUPS, REST = GROUPS % MANY;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 mine = warp * (CHUNK / WARPS) * 2 + lane % 4 * 16;
  const u32 x_at = shared_address(memory.x) + mine + lane / 4 % 2 * 8, line_at = lane / 4 * LINE_BYTES + mine;
#pragma unroll 1
  for (int g = 0; g + MANY <= GROUPS; g += MANY)
    multiply_groups<MANY, K>(memory, ring, 8 * g, line_at, x_at, nothing);
  if constexpr (REST) multiply_groups<REST, K>(memory, ring, 8 * (GROUPS - REST), line_at, x_at, nothing);
}
// Where a pair of x stands: of each eight elements the first, third, second and fourth.
__device__ __forceinline__ void put_four(Memory& memory, int at, u32 front, u32 back) {  // at: of four, in fours
  u32* to = (u32*)memory.x + at / 2 * 4 + at % 2;
  to[0] = front, to[2] = back;
}
__device__ __forceinline__ float sum_of(const Memory& memory, int line) {
  const float4 a = *(const float4*)memory.sums[line], b = *((const float4*)memory.sums[line] + 1);
  return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}

// Puts a product's input where it is read: pairs that other programs leave. Returns the squares of this thread's.
template <int WORDS, bool SQUARED> __device__ __forceinline__ float take(Memory& memory, const u64* words, u32 flag) {
  constexpr int TWOS = WORDS / 2, TIMES = (TWOS + THREADS - 1) / THREADS, AT_ONCE = TIMES < 6 ? TIMES : 6;
  float square = 0.f;
  u32 looks = 0;
#pragma unroll 1
  for (int start = 0; start < TIMES; start += AT_ONCE) {
    u64 two[AT_ONCE][2] = {};
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (const int at = (start + i) * THREADS + threadIdx.x; at < TWOS && !both(two[i], flag))
          look_at_two(words + 2 * at, two[i]);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) there &= (start + i) * THREADS + threadIdx.x >= TWOS || both(two[i], flag);
      be_patient(looks);
    } while (!there);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (const int at = (start + i) * THREADS + threadIdx.x; at < TWOS) {
        put_four(memory, at, (u32)two[i][0], (u32)two[i][1]);
        if (SQUARED) square += square_of((u32)two[i][0]) + square_of((u32)two[i][1]);
      }
  }
  meet();
  return square;
}
__device__ __forceinline__ void leave_squares(Memory& memory, float square) {
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) memory.squares[threadIdx.x / 32] = square;
}
// 1 / rms of the input, once all have left their squares and met.
__device__ __forceinline__ float factor(const Memory& memory, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += memory.squares[w];
  return rsqrtf(sum / HIDDEN + eps);
}

// The first layer's input, from the embedding.
__device__ __forceinline__ float take_first(Memory& memory, const u16* x) {
  float square = 0.f;
  for (int i = threadIdx.x; i < HIDDEN / 4; i += THREADS) {
    const uint2 four = *(const uint2*)(x + 4 * i);
    put_four(memory, i, four.x, four.y);
    square += square_of(four.x) + square_of(four.y);
  }
  meet();
  return square;
}

// Which programs attend to how many pages: as few as leave each warp two, since everybody reads each one's part, and
// not more than FEW of a key head; of long contexts SPLITS.
struct Shares {
  int pages, each, splits;
  __device__ __forceinline__ explicit Shares(int length) {
    pages = (length + TILE - 1) / TILE;
    const int wanted = pages > LONG_PAGES ? SPLITS : min((pages + 2 * WARPS - 1) / (2 * WARPS), FEW);
    each = (pages + wanted - 1) / wanted;
    splits = (pages + each - 1) / each;
  }
  __device__ __forceinline__ int begin(int split) const { return min(split * each, pages); }
  __device__ __forceinline__ int end(int split) const { return min(split * each + each, pages); }
};

struct Token {  // what is this step's in every layer
  int length, slot;
  float cosines[2], sines[2];  // of a lane's two dimensions of a head
};

// Asks for this program's pages of a layer, one head of them.
__device__ __forceinline__ void load_pages(const TensorMap* maps, const int* table, const Shares& shares, Ring& ring,
                                           int lane) {
  const int end = shares.end(blockIdx.x / KV), column = blockIdx.x % KV * (D / 64);
#pragma unroll 1
  for (int some = shares.begin(blockIdx.x / KV); some < end; some += 32) {
    const int block = some + lane < end ? table[some + lane] : 0;
#pragma unroll 1
    for (int first = some; first < min(some + 32, end); first += PAGES, ring.next()) {
      const int pages = min(end - first, PAGES);
      const u32 bar = make_room(ring, pages * PAGE_BYTES, lane);
#pragma unroll
      for (int i = 0; i < PAGES; i++) {
        const int its_block = __shfl_sync(~0u, block, first - some + i);
        const u32 to = ring.at() + i * PAGE_BYTES + lane * (PAGE_BYTES / 2);
        if (lane < 2 && i < pages)  // keys, values
          asm volatile(
              "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
              " [%0], [%1, {%3, %3, %4, %5}], [%2];" ::"r"(to), "l"(maps + lane), "r"(bar), "r"(0), "r"(column),
              "r"(its_block) : "memory");
      }
    }
  }
}

struct Tile {  // a lane's part of a page of one head, as the tensor cores have it
  uint4 keys[D / 32][2];    // of two keys, a quarter of each 32 dimensions
  uint4 values[4][D / 64];  // of four, an eighth of each 64

  static __device__ __forceinline__ int key_of(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
  static __device__ __forceinline__ int value_of(int i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

  // Of a key's line of 64 elements eight of them, where TMA has put them.
  static __device__ __forceinline__ u32 place(int key, int eighth) { return key * LINE + (eighth ^ (key & 7)) * 16; }
  // Returns words that all that was read has a part in.
  __device__ __forceinline__ u32 read(u32 at) {
    u32 seen = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < D / 32; i++)
        keys[i][half] = read16(at + place(key_of(half), i % 2 * 4 + threadIdx.x % 4) + i / 2 * TILE * LINE),
        seen |= keys[i][half].x;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < D / 64; j++)
        values[i][j] = read16(at + PAGE_BYTES / 2 + place(value_of(i), threadIdx.x % 32 / 4) + j * TILE * LINE),
        seen |= values[i][j].x;
    return seen;
  }
  // Of a sequence's last page, which has so many keys: puts in the newest, whose heads are there; what lies behind it
  // may not be a number, and has no weight.
  __device__ __forceinline__ void complete(int left, u32 key_at, u32 value_at) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < D / 32; i++)
        if (key_of(half) == left - 1) keys[i][half] = read16(key_at + threadIdx.x % 4 * 16 + 64 * i);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < D / 64; j++)
        if (value_of(i) >= left - 1)
          values[i][j] = value_of(i) >= left ? make_uint4(0, 0, 0, 0)
                                             : read16(value_at + threadIdx.x % 32 / 4 * 16 + 128 * j);
  }
};

// Norms and turns this program's queries and, if its share ends the sequence, the new key, and stores key and value.
__device__ __forceinline__ void make_heads(Memory& memory, const Layer& its, const Token& token, const u64* projection,
                                           int head, bool ends, float eps, u32 flag) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool holds = lane < D / 4;
#pragma unroll 1
  for (int h = warp; h < (ends ? G + 2 : G); h += WARPS) {
    const int first = h < G ? (head * G + h) * D : h == G ? WIDTH + head * D : WIDTH + (KV + head) * D;
    const u64* from = projection + first / 2 + lane;
    const u32* norm = (const u32*)(h < G ? its.query_norm : its.key_norm) + lane;
    const bool norms = (h < G ? its.query_norm : its.key_norm) && h <= G;
    const u32 weights[2] = {norms && holds ? norm[0] : 0, norms && holds ? norm[D / 4] : 0};
    u64 words[2] = {word_of(0, flag), word_of(0, flag)};
    u32 looks = 0;
    do {
      if (holds) words[0] = look(from), words[1] = look(from + D / 4);
      be_patient(looks);
    } while (!__all_sync(~0u, has(words[0], flag) && has(words[1], flag)));
    u32 front = (u32)words[0], back = (u32)words[1];  // dimensions 2 * lane and the next, and those D / 2 behind
    if (h <= G) {
      if (norms) {
        const float by = rsqrtf(warp_sum(square_of(front) + square_of(back)) / D + eps);
        const auto normed = [&](u32 pair, u32 weight) {
          u32 y;
          asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pack(low(pair) * by, high(pair) * by)), "r"(weight));
          return y;
        };
        front = normed(front, weights[0]), back = normed(back, weights[1]);
      }
      const float a[2] = {low(front), high(front)}, b[2] = {low(back), high(back)};
      const float *c = token.cosines, *s = token.sines;
      front = pack(a[0] * c[0] - b[0] * s[0], a[1] * c[1] - b[1] * s[1]);
      back = pack(b[0] * c[0] + a[0] * s[0], b[1] * c[1] + a[1] * s[1]);
    }
    if (!holds) continue;
    *((u32*)memory.made[h] + lane) = front, *((u32*)memory.made[h] + D / 4 + lane) = back;
    if (h >= G) {
      u32* to = (u32*)((h == G ? its.keys : its.values) + ((u64)token.slot * KV + head) * D) + lane;
      to[0] = front, to[D / 4] = back;
    }
  }
  meet();
}

// This program's part of attention.
__device__ __forceinline__ void attend(Memory& memory, const Layer& its, const Token& token, const Shares& shares,
                                       Ring& ring, const u64* projection, u64* parts, u64* sums, float eps, float scale,
                                       u32 flag, u32 nothing) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, column = lane % 4;
  const int head = blockIdx.x % KV, split = blockIdx.x / KV, begin = shares.begin(split), end = shares.end(split);
  make_heads(memory, its, token, projection, head, end == shares.pages, eps, flag);

  // Scores are query heads by keys, which makes them the weights of dimensions by query heads.
  float out[D / 16][4] = {}, top = -1e30f, total = 0.f;  // of query head `group`
  const u32 made_at = shared_address(memory.made);
#pragma unroll 1
  for (int first = begin; first < end; first += PAGES, ring.next()) {
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
    const int page = first + warp % PAGES;
    const bool mine = (first - begin) / PAGES % (WARPS / PAGES) == warp / PAGES && page < end;
    const u32 bar = ring.empty + 8 * ring.stage;
    if (!mine) {
      if (lane == 0) here_arrive(bar);
      continue;
    }
    Tile tile;
    const u32 seen = tile.read(ring.at() + warp % PAGES * PAGE_BYTES);
    __syncwarp();
    if (lane == 0) here_arrive(bar + (seen & nothing));
    const int left = token.length - page * TILE;
    if (left <= TILE) tile.complete(left, made_at + G * HEAD_BYTES, made_at + (G + 1) * HEAD_BYTES);
    float scores[2][4] = {}, more[2][4] = {};
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const uint4 q = read16(made_at + min(group, G - 1) * HEAD_BYTES + column * 16 + 64 * i);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 b = tile.keys[i][half];
        multiply(scores[half], q.x, 0, q.y, 0, b.x, b.y);
        multiply(more[half], q.z, 0, q.w, 0, b.z, b.w);
      }
    }
    float now = top;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& p = scores[i / 2][i % 2];
      p = Tile::value_of(i) < left ? (p + more[i / 2][i % 2]) * scale : -1e38f;
      now = fmaxf(now, p);
    }
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 1)), now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
    const float by = exp2_of(top - now);
    top = now, total *= by;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& p = scores[i / 2][i % 2];
      p = exp2_of(p - now), total += p;
    }
    const u32 weights[2] = {pack(scores[0][0], scores[0][1]), pack(scores[1][0], scores[1][1])};
    const float first_by = __shfl_sync(~0u, by, column * 8), second_by = __shfl_sync(~0u, by, column * 8 + 4);
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
      const u32 v[4] = {word(tile.values[0][t / 4], t % 4), word(tile.values[1][t / 4], t % 4),
                        word(tile.values[2][t / 4], t % 4), word(tile.values[3][t / 4], t % 4)};
      out[t][0] *= first_by, out[t][1] *= second_by, out[t][2] *= first_by, out[t][3] *= second_by;
      multiply(out[t], __byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
               __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632), weights[0], weights[1]);
    }
  }
  total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
  if (column == 0) memory.tops[warp][group] = top, memory.totals[warp][group] = total;
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (2 * column + h < G)
#pragma unroll
      for (int t = 0; t < D / 16; t++)
        *(float2*)&memory.outs[warp][2 * column + h][t / 4 * 64 + group * 8 + t % 4 * 2] =
            make_float2(out[t][h], out[t][2 + h]);
  meet();
  for (int i = threadIdx.x; i < G * D / 2; i += THREADS) {
    const int h = i / (D / 2), d = i % (D / 2) * 2;
    float all = -1e30f, sum = 0.f, y[2] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) all = fmaxf(all, memory.tops[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float by = exp2_of(memory.tops[w][h] - all);
      const float2 its_out = *(const float2*)&memory.outs[w][h][d];
      sum += by * memory.totals[w][h], y[0] += by * its_out.x, y[1] += by * its_out.y;
    }
    const int to = split * HEADS + head * G + h;
    const float one = __fdividef(1.f, sum);
    const u32 pair = pack(y[0] * one, y[1] * one), top_of = __float_as_uint(all + __log2f(sum));
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
      leave(parts + c * PART_WORDS + to * (D / 2) + d / 2, pair, flag);
      if (d == 0) leave(sums + c * SUM_WORDS + to, top_of, flag);
    }
  }
  meet();  // x stands where outs do
}

// Attention's output where o reads it: the parts of splits put together, MOST at a time.
template <int MOST>
__device__ __forceinline__ void take_parts(Memory& memory, const u64* parts, const u64* sums, int splits, u32 flag) {
  constexpr int TWOS = WIDTH / 4, TIMES = TWOS / THREADS, MOST_OF = 8 / MOST;
  constexpr int SOME = TIMES <= MOST_OF ? TIMES : TIMES % 2 == 0 && MOST_OF > 1 ? 2 : 1;
  static_assert(TWOS % (SOME * THREADS) == 0, "no thread is left out");
  u32 looks = 0;
#pragma unroll 1
  for (int start = threadIdx.x; start < TWOS; start += SOME * THREADS) {
    float tops[SOME], all[SOME] = {}, y[SOME][4] = {};
#pragma unroll
    for (int i = 0; i < SOME; i++) tops[i] = -1e30f;
#pragma unroll 1
    for (int first = 0; first < splits; first += MOST) {
      u64 two[SOME][MOST][2] = {}, sum[SOME][MOST] = {};
      bool there;
      do {
        there = true;
#pragma unroll
        for (int s = 0; s < MOST; s++)
          if (first + s < splits)
#pragma unroll
            for (int i = 0; i < SOME; i++) {
              const int at = start + i * THREADS;
              look_at_two(parts + (first + s) * (WIDTH / 2) + 2 * at, two[i][s]);
              sum[i][s] = look(sums + (first + s) * HEADS + at / (D / 4));
            }
#pragma unroll
        for (int s = 0; s < MOST; s++)
#pragma unroll
          for (int i = 0; i < SOME; i++)
            there &= first + s >= splits || (both(two[i][s], flag) && has(sum[i][s], flag));
        be_patient(looks);
      } while (!there);
#pragma unroll
      for (int i = 0; i < SOME; i++) {
        const float before = tops[i];
        float its_tops[MOST];
#pragma unroll
        for (int s = 0; s < MOST; s++) {
          its_tops[s] = first + s < splits ? __uint_as_float((u32)sum[i][s]) : -1e38f;
          tops[i] = fmaxf(tops[i], its_tops[s]);
        }
        if (MOST == FEW) {  // there may be more
          const float by = exp2_of(before - tops[i]);
          all[i] *= by;
#pragma unroll
          for (int j = 0; j < 4; j++) y[i][j] *= by;
        }
#pragma unroll
        for (int s = 0; s < MOST; s++) {
          const float by = exp2_of(its_tops[s] - tops[i]);
          all[i] += by;
#pragma unroll
          for (int j = 0; j < 2; j++)
            y[i][2 * j] += by * low((u32)two[i][s][j]), y[i][2 * j + 1] += by * high((u32)two[i][s][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SOME; i++) {
      const float one = __fdividef(1.f, all[i]);
      put_four(memory, start + i * THREADS, pack(y[i][0] * one, y[i][1] * one), pack(y[i][2] * one, y[i][3] * one));
    }
  }
  meet();
}
__device__ __forceinline__ void take_heads(Memory& memory, const u64* parts, const u64* sums, int splits, u32 flag) {
  if (splits == 1) return take_parts<1>(memory, parts, sums, splits, flag);
  if (splits == 2) return take_parts<2>(memory, parts, sums, splits, flag);
  if (splits <= 4) return take_parts<4>(memory, parts, sums, splits, flag);
  take_parts<FEW>(memory, parts, sums, splits, flag);
}

// Leaves pairs of a product's outputs: ``y`` is one of ``line``'s thread, of all threads of a warp.
template <int COPIES_ = COPIES>
__device__ __forceinline__ void leave_pair(u64* words, int size, int line, float y, bool live, u32 flag) {
  const float other = __shfl_down_sync(~0u, y, 1);
  if (live && line % 2 == 0)
#pragma unroll
    for (int c = 0; c < COPIES_; c++) leave(words + c * size + line / 2, pack(y, other), flag);
}

// maps: of each layer's keys and values. words: see above; count: layers so far, of all launches with these words.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
megakernel(const Layer* layers, const TensorMap* maps, const u16* x, u16* y, const float* angles,
           const long long* positions, const long long* slots, const int* lengths, const int* table, u64* words,
           u32* count, long long angles_stride, int num_layers, u32 zero, float eps, float heads_eps, float scale) {
  extern __shared__ unsigned char dynamic[];
  const u32 base = (shared_address(dynamic) + 1023) & ~1023u;
  Memory& memory = *(Memory*)(dynamic + (base - shared_address(dynamic)));
  Ring ring;
  ring.tiles = base + MEMORY_BYTES;
  ring.full = shared_address(memory.barriers), ring.empty = ring.full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, program = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {
    const u64 policy = read_once();
#pragma unroll 1
    for (int l = 0; l < num_layers; l++) {
      const Layer& its = layers[l];
      load_weights<QKV_LINES, HIDDEN, false>(its.qkv, ring, lane, policy);
      if (l == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
      const Shares shares(lengths[0]);
      load_pages(maps + 2 * l, table, shares, ring, lane);
      load_weights<ADD_LINES, WIDTH, false>(its.o, ring, lane, policy);
      load_weights<GATE_LINES, HIDDEN, true>(its.gate_up, ring, lane, policy);
      load_weights<ADD_LINES, INNER, false>(its.down, ring, lane, policy);
    }
    return;
  }

  // An arrival does not wait for loads before it, and lets the next weights in: so it goes to an address that what was
  // loaded has a part in. The part is zero, which the compiler does not know.
  const u32 nothing = zero;
  const int line = threadIdx.x;
  const bool adds = line < ADD_LINES;
  u64 *projection = words, *parts = projection + QKV_WORDS, *sums = parts + COPIES * PART_WORDS;
  u64 *middle = sums + COPIES * SUM_WORDS, *hidden = middle + COPIES * X_WORDS;
  u64* stream = hidden + COPIES * INNER / 2;
  const int copy = program % COPIES;  // that it reads
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Token token;
  token.length = lengths[0], token.slot = (int)slots[0];
  if (lane < D / 4) {
    const float* at = angles + positions[0] * angles_stride + lane * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) token.cosines[i] = at[i], token.sines[i] = at[D / 2 + i];
  }
  const Shares shares(token.length);
  const u32 first_flag = *count + 1;
  float own = adds ? low(x[program * ADD_LINES + line]) : 0.f;  // of the residual stream, this thread's
  float square = take_first(memory, x);
#pragma unroll 1
  for (int l = 0; l < num_layers; l++) {
    const Layer its = layers[l];
    const u32 flag = first_flag + l;
    if (l) square = take<X_WORDS, true>(memory, stream + copy * X_WORDS, flag - 1);
    multiply_lines<QKV_LINES, HIDDEN>(memory, ring, nothing);
    leave_squares(memory, square);
    meet();
    float by = factor(memory, eps);
    for (int i = line; i < (QKV_LINES + 31) / 32 * 32; i += THREADS) {
      const float out = i < QKV_LINES ? sum_of(memory, i) * by : 0.f;
      leave_pair<1>(projection + program * QKV_LINES / 2, 0, i, out, i < QKV_LINES, flag);
    }
    if (program / KV < shares.splits)
      attend(memory, its, token, shares, ring, projection, parts, sums, heads_eps, scale, flag, nothing);

    take_heads(memory, parts + copy * PART_WORDS, sums + copy * SUM_WORDS, shares.splits, flag);
    multiply_lines<ADD_LINES, WIDTH>(memory, ring, nothing);
    meet();
    if (line < (ADD_LINES + 31) / 32 * 32) {
      own = adds ? rounded(own + sum_of(memory, line)) : 0.f;
      leave_pair(middle + program * ADD_LINES / 2, X_WORDS, line, own, adds, flag);
    }

    square = take<X_WORDS, true>(memory, middle + copy * X_WORDS, flag);
    multiply_lines<GATE_LINES, HIDDEN>(memory, ring, nothing);
    leave_squares(memory, square);
    meet();
    by = factor(memory, eps);
    constexpr int OUTPUTS = GATE_LINES / 2;
    for (int i = line; i < (OUTPUTS + 31) / 32 * 32; i += THREADS) {
      float out = 0.f;
      if (i < OUTPUTS) {
        const float gate = sum_of(memory, i) * by;
        out = __fdividef(gate, 1.f + __expf(-gate)) * (sum_of(memory, OUTPUTS + i) * by);
      }
      leave_pair(hidden + program * OUTPUTS / 2, INNER / 2, i, out, i < OUTPUTS, flag);
    }

    take<INNER / 2, false>(memory, hidden + copy * (INNER / 2), flag);
    multiply_lines<ADD_LINES, INNER>(memory, ring, nothing);
    meet();
    if (line < (ADD_LINES + 31) / 32 * 32) {
      own = adds ? rounded(own + sum_of(memory, line)) : 0.f;
      if (l + 1 < num_layers) leave_pair(stream + program * ADD_LINES / 2, X_WORDS, line, own, adds, flag);
    }
  }
  if (adds) y[program * ADD_LINES + line] = (u16)(__float_as_uint(own) >> 16);
  if (program == 0 && threadIdx.x == 0) *count += num_layers;  // by now all have read it
  asm volatile("griddepcontrol.launch_dependents;");
}
