// Attention of megakernel.cu: load pages, prepare queries and the new key, attend, combine partial results.

// The programs of a key head split the pages of all sequences. A program takes at least two pages per warp, because
// each further part has to be combined with the others. Programs of one sequence are consecutive.
struct Shares {
  int pages[ROWS], splits[ROWS];  // 0 for missing rows

  __device__ __forceinline__ Shares(const int* lengths, int rows) {
    int all = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) pages[r] = r < rows ? (lengths[r] + TILE - 1) / TILE : 0, all += pages[r];
    int each = max(2 * WARPS, (all + SPLITS - 1) / SPLITS), used;
    do {
      used = 0;
#pragma unroll
      for (int r = 0; r < ROWS; r++) splits[r] = (pages[r] + each - 1) / each, used += splits[r];
      each += each / 8;
    } while (used > SPLITS);
  }
};
__device__ __forceinline__ Share share_of(const Shares& all, int program) {
  Share its;
  int split = program / KV;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (split >= 0 && split < all.splits[r]) {
      const int pages = all.pages[r], each = (pages + all.splits[r] - 1) / all.splits[r];
      its.row = r, its.pages = pages, its.begin = min(split * each, pages), its.end = min(its.begin + each, pages);
    }
    split -= all.splits[r];
  }
  return its;
}
// Stores what every layer needs of the step.
__device__ __forceinline__ void make_plan(Memory& memory, const Shares& shares, const float* angles, long long stride,
                                          const long long* positions, const long long* slots, const int* lengths,
                                          int rows) {
  const Share share = share_of(shares, blockIdx.x);
  const int row = max(share.row, 0);
  for (int i = threadIdx.x; i < D / 2; i += THREADS) {
    const float* at = angles + positions[row] * stride + i;
    memory.cosines[i] = at[0], memory.sines[i] = at[D / 2];
  }
  if (threadIdx.x == 0) {
    memory.share = share, memory.length = lengths[row], memory.slot = (int)slots[row];
    if (EXPERTS) memory.live = live_rows(slots, rows);
    int first = 0;
    memory.joins = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      memory.parts[r] = {first, shares.splits[r]}, first += shares.splits[r];
      memory.joins |= shares.splits[r] > MOST_TAKEN;
    }
  }
}

// Loads this program's pages of a layer, one head of them. table: the sequence's block table.
__device__ __forceinline__ void load_pages(const TensorMap* maps, const int* table, const Share& share, Ring& ring,
                                           int lane) {
  const int end = share.end, column = blockIdx.x % KV * HEAD_COLUMNS;
#pragma unroll 1
  for (int some = share.begin; some < end; some += 32) {
    const int block = some + lane < end ? table[some + lane] : 0;
#pragma unroll 1
    for (int first = some; first < min(some + 32, end); first += PAGES, ring.next()) {
      const int pages = min(end - first, PAGES);
      const u32 bar = make_room(ring, pages * PAGE_BYTES, lane);
#pragma unroll
      for (int i = 0; i < PAGES; i++) {
        const int its_block = __shfl_sync(~0u, block, first - some + i);
        const u32 to = ring.at() + i * PAGE_BYTES + lane * (PAGE_BYTES / 2);
        if (lane < 2 && i < pages) load_page(to, maps + lane, column, its_block, bar);  // keys, values
      }
    }
  }
}

struct Tile {  // a lane's part of one head's page, as MMA fragments
  static constexpr int EIGHTHS = 2 * HEAD_COLUMNS;  // that a lane reads of a key: two of each column of 128 bytes
  uint4 keys[EIGHTHS][2];         // of two keys
  uint4 values[4][HEAD_COLUMNS];  // four values: an eighth of each column

  static __device__ __forceinline__ int key_of(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
  static __device__ __forceinline__ int value_of(int i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

  // Which eighth of a column a lane reads of a key (and in bfloat16 of a query); free of bank conflicts.
  static __device__ __forceinline__ int eighth_of(int i) { return threadIdx.x % 4 * 2 + i % 2; }
  static __device__ __forceinline__ int head_at(int i) { return i / 2 * LINE + eighth_of(i) * 16; }  // in a whole head

  // Where TMA has put an eighth of a key's column (swizzled).
  static __device__ __forceinline__ u32 place(int key, int eighth) { return key * LINE + (eighth ^ (key & 7)) * 16; }
  // Returns a value that depends on every load.
  __device__ __forceinline__ u32 read(u32 at) {
    u32 seen = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < EIGHTHS; i++)
        keys[i][half] = read16(at + place(key_of(half), eighth_of(i)) + i / 2 * TILE * LINE),
        seen |= keys[i][half].x;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < HEAD_COLUMNS; j++)
        values[i][j] = read16(at + PAGE_BYTES / 2 + place(value_of(i), threadIdx.x % 32 / 4) + j * TILE * LINE),
        seen |= values[i][j].x;
    return seen;
  }
  // For a sequence's last page, with ``left`` keys: inserts the newest key and value from shared memory, and zeroes the
  // values after it, which may be NaN and have weight 0.
  __device__ __forceinline__ void complete(int left, u32 key_at, u32 value_at) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < EIGHTHS; i++)
        if (key_of(half) == left - 1) keys[i][half] = read16(key_at + head_at(i));
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < HEAD_COLUMNS; j++)
        if (value_of(i) >= left - 1)
          values[i][j] = value_of(i) >= left ? make_uint4(0, 0, 0, 0)
                                             : read16(value_at + threadIdx.x % 32 / 4 * 16 + 128 * j);
  }

  // Multiplies with a query head: a part of its scores with the two keys, and another part.
  __device__ __forceinline__ void add_scores(float (&scores)[2][4], float (&more)[2][4], u32 query_at) const {
#pragma unroll
    for (int i = 0; i < EIGHTHS; i++) {
      if (FLOAT8_CACHE) {
        const uint4 q[2] = {read16(query_at + 2 * head_at(i)), read16(query_at + 2 * head_at(i) + 16)};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int w = 0; w < 4; w++) {
            u32 first, second;
            halves(word(keys[i][half], w), first, second);
            multiply_halves(w % 2 ? more[half] : scores[half], word(q[w / 2], w % 2 * 2), 0,
                            word(q[w / 2], w % 2 * 2 + 1), 0, first, second);
          }
      } else {
        const uint4 q = read16(query_at + head_at(i));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint4 b = keys[i][half];
          multiply(scores[half], q.x, 0, q.y, 0, b.x, b.y);
          multiply(more[half], q.z, 0, q.w, 0, b.z, b.w);
        }
      }
    }
  }
  // Adds its values, weighted, to tile t of the output, two neighbouring dimensions of each lane from ``dim_of(t)``.
  __device__ __forceinline__ void add_values(float (&out)[4], int t, const u32 (&weights)[2]) const {
    if (FLOAT8_CACHE) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {  // two keys: their first numbers, then their second ones
        const u32 key = word(values[2 * i][t / 8], t % 8 / 2), next = word(values[2 * i + 1][t / 8], t % 8 / 2);
        halves(__byte_perm(key, next, t % 2 ? 0x7362 : 0x5140), a[2 * i], a[2 * i + 1]);
      }
      multiply_halves(out, a[0], a[1], a[2], a[3], weights[0], weights[1]);
    } else {
      const u32 v[4] = {word(values[0][t / 4], t % 4), word(values[1][t / 4], t % 4), word(values[2][t / 4], t % 4),
                        word(values[3][t / 4], t % 4)};
      multiply(out, __byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
               __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632), weights[0], weights[1]);
    }
  }
  static __device__ __forceinline__ int dim_of(int t) {
    constexpr int TILES = FLOAT8_CACHE ? 8 : 4;  // of a column
    return t / TILES * TILES * 16 + threadIdx.x % 32 / 4 * TILES * 2 + t % TILES * 2;
  }
};

// Applies norm and rotary embedding to this program's queries and, if its share ends the sequence, to the new key, and
// stores key and value. projection: the sequence's row.
__device__ __forceinline__ void make_heads(Memory& memory, const Layer& its, const u64* projection, int head, bool ends,
                                           float eps, u32 flag) {
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
    u32 front = (u32)words[0], back = (u32)words[1];  // dimensions 2 * lane and 2 * lane + 1; back: D / 2 later
    if (h <= G) {
      if (norms) {
        const float by = rsqrtf(warp_sum(square_of(front) + square_of(back)) / D + eps);
        front = normed(front, by, weights[0]), back = normed(back, by, weights[1]);
      }
      const float a[2] = {low(front), high(front)}, b[2] = {low(back), high(back)};
      const float2 c = *(const float2*)(memory.cosines + 2 * lane), s = *(const float2*)(memory.sines + 2 * lane);
      front = pack(a[0] * c.x - b[0] * s.x, a[1] * c.y - b[1] * s.y);
      back = pack(b[0] * c.x + a[0] * s.x, b[1] * c.y + a[1] * s.y);
    }
    if (!holds) continue;
    const u64 at = ((u64)memory.slot * KV + head) * D;  // in the cache
    u16* kept = h == G ? its.keys : its.values;
    if (FLOAT8_CACHE && h >= G) {
      const u16 first = float8_pair(low(front), high(front)), second = float8_pair(low(back), high(back));
      u16* to = (u16*)((unsigned char*)kept + at) + lane;
      memory.made[h][lane] = first, memory.made[h][D / 4 + lane] = second;
      to[0] = first, to[D / 4] = second;
      continue;
    }
    if (FLOAT8_CACHE) front = half_pair(low(front), high(front)), back = half_pair(low(back), high(back));
    *((u32*)memory.made[h] + lane) = front, *((u32*)memory.made[h] + D / 4 + lane) = back;
    if (h >= G) *((u32*)(kept + at) + lane) = front, *((u32*)(kept + at) + D / 4 + lane) = back;
  }
  meet();
}

// Computes this program's part of attention.
__device__ __forceinline__ void attend(Memory& memory, const Layer& its, Ring& ring, const u64* projection, u64* copies,
                                       float eps, float scale, u32 flag, u32 nothing) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, column = lane % 4;
  const int head = blockIdx.x % KV, begin = memory.share.begin, end = memory.share.end;
  const bool ends = end == memory.share.pages;
  make_heads(memory, its, projection + memory.share.row * QKV_WORDS, head, ends, eps, flag);

  // Scores are (query heads, keys): their accumulators are the B operand of (dimensions, keys) @ (keys, query heads).
  float out[D / 16][4] = {}, top = -1e30f, total = 0.f;  // top, total: of query head `group`
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
    const int left = memory.length - page * TILE;
    if (left <= TILE) tile.complete(left, made_at + G * HEAD_BYTES, made_at + (G + 1) * HEAD_BYTES);
    float scores[2][4] = {}, more[2][4] = {};
    tile.add_scores(scores, more, made_at + min(group, G - 1) * HEAD_BYTES);
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
    u32 weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float (&p)[4] = scores[half];
      weights[half] = FLOAT8_CACHE ? half_pair(p[0], p[1]) : pack(p[0], p[1]);
    }
    const float first_by = __shfl_sync(~0u, by, column * 8), second_by = __shfl_sync(~0u, by, column * 8 + 4);
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
      out[t][0] *= first_by, out[t][1] *= second_by, out[t][2] *= first_by, out[t][3] *= second_by;
      tile.add_values(out[t], t, weights);
    }
  }
  total += __shfl_xor_sync(~0u, total, 1), total += __shfl_xor_sync(~0u, total, 2);
  if (column == 0) memory.tops[warp][group] = top, memory.totals[warp][group] = total;
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (2 * column + h < G)
#pragma unroll
      for (int t = 0; t < D / 16; t++)
        *(float2*)&memory.outs[warp][2 * column + h][Tile::dim_of(t)] = make_float2(out[t][h], out[t][2 + h]);
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
    const int to = blockIdx.x / KV * HEADS + head * G + h;
    const float one = __fdividef(1.f, sum);
    const u32 pair = pack(y[0] * one, y[1] * one), top_of = __float_as_uint(all + __log2f(sum));
    const int readers = memory.joins ? 1 : COPIES;
#pragma unroll 1
    for (int c = 0; c < readers; c++) {
      leave(copies + c * COPY_WORDS + to * (D / 2) + d / 2, pair, flag);
      if (d == 0) leave(copies + c * COPY_WORDS + SUMS + to, top_of, flag);
    }
  }
  meet();  // x shares its memory with outs
}

// If a sequence has more than MOST_TAKEN parts, the programs combine them first, each a few words of all sequences.
// That is one more trip through L2, but then every program reads one vector per row instead of every part. In a warp,
// UNITS lanes read two words each of one of LANES parts.
__device__ __forceinline__ void join_parts(const Memory& memory, u64* copies, u32 flag) {
  constexpr int TWOS = WIDTH / 4, UNITS = 4, LANES = 32 / UNITS;
  static_assert(TWOS % UNITS == 0 && COPIES <= LANES, "megakernel.py");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int unit = (warp * PROGRAMS + blockIdx.x) * UNITS; unit < ROWS * TWOS; unit += WARPS * PROGRAMS * UNITS) {
    const int row = unit / TWOS, at = unit % TWOS + lane % UNITS;
    const auto [first, splits] = memory.parts[row];
    const u64 *parts = copies + first * (WIDTH / 2) + 2 * at, *sums = copies + SUMS + first * HEADS + at / (D / 4);
    float top = -1e30f, all = 0.f, y[4] = {};
#pragma unroll 1
    for (int s = lane / UNITS; s < splits; s += LANES) {
      u64 two[2], sum;
      u32 looks = 0;
      do {
        look_at_two(parts + s * (WIDTH / 2), two), sum = look(sums + s * HEADS);
        be_patient(looks);
      } while (!both(two, flag) || !has(sum, flag));
      const float its_top = __uint_as_float((u32)sum), now = fmaxf(top, its_top);
      const float before = exp2_of(top - now), by = exp2_of(its_top - now);
      top = now, all = all * before + by;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        y[2 * j] = y[2 * j] * before + by * low((u32)two[j]);
        y[2 * j + 1] = y[2 * j + 1] * before + by * high((u32)two[j]);
      }
    }
    __syncwarp();
    float best = top;
#pragma unroll
    for (int other = UNITS; other < 32; other *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, other));
    const float by = exp2_of(top - best);
    all *= by;
#pragma unroll
    for (int other = UNITS; other < 32; other *= 2) all += __shfl_xor_sync(~0u, all, other);
    const float one = splits == 0 ? 0.f : __fdividef(1.f, all);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      y[j] *= by;
#pragma unroll
      for (int other = UNITS; other < 32; other *= 2) y[j] += __shfl_xor_sync(~0u, y[j], other);
      y[j] *= one;
    }
    if (lane / UNITS < COPIES) {
      u64* to = copies + lane / UNITS * COPY_WORDS + JOINED + row * (WIDTH / 2) + 2 * at;
      leave(to, pack(y[0], y[1]), flag), leave(to + 1, pack(y[2], y[3]), flag);
    }
  }
}

// Loads that a thread issues at once: the largest divisor of ``times`` that is at most ``most``.
__device__ constexpr int even_share(int times, int most) {
  int some = times < most ? times : most;
  while (times % some) some--;
  return some;
}

// Puts attention's output in shared memory as o's input, combined from the up to MOST parts of a sequence.
template <int MOST>
__device__ __forceinline__ void take_parts(Memory& memory, const u64* parts, const u64* sums, int splits, u32 flag) {
  constexpr int TWOS = WIDTH / 4, SOME = even_share((TWOS + TEAM - 1) / TEAM, 8 / MOST);
  static_assert(TWOS >= TEAM, "megakernel.py");
  const auto is_one = [](int at) { return TWOS % TEAM == 0 || at < TWOS; };
  u32 looks = 0;
#pragma unroll 1
  for (int start = threadIdx.x % TEAM; start < TWOS; start += SOME * TEAM) {
    u64 two[SOME][MOST][2] = {}, sum[SOME][MOST] = {};
    bool there;
    do {
      there = true;
#pragma unroll
      for (int s = 0; s < MOST; s++)
        if (s < splits)
#pragma unroll
          for (int i = 0; i < SOME; i++) {
            const int at = start + i * TEAM;
            if (!is_one(at)) continue;
            look_at_two(parts + s * (WIDTH / 2) + 2 * at, two[i][s]);
            sum[i][s] = look(sums + s * HEADS + at / (D / 4));
          }
#pragma unroll
      for (int s = 0; s < MOST; s++)
#pragma unroll
        for (int i = 0; i < SOME; i++)
          there &= s >= splits || !is_one(start + i * TEAM) || (both(two[i][s], flag) && has(sum[i][s], flag));
      be_patient(looks);
    } while (!there);
#pragma unroll
    for (int i = 0; i < SOME; i++) {
      if (!is_one(start + i * TEAM)) break;
      float tops[MOST], top = -1e30f, all = 0.f, y[4] = {};
#pragma unroll
      for (int s = 0; s < MOST; s++) {
        tops[s] = s < splits ? __uint_as_float((u32)sum[i][s]) : -1e38f;
        top = fmaxf(top, tops[s]);
      }
#pragma unroll
      for (int s = 0; s < MOST; s++) {
        const float by = exp2_of(tops[s] - top);
        all += by;
#pragma unroll
        for (int j = 0; j < 2; j++)
          y[2 * j] += by * low((u32)two[i][s][j]), y[2 * j + 1] += by * high((u32)two[i][s][j]);
      }
      const float one = ROWS > 1 && splits == 0 ? 0.f : __fdividef(1.f, all);
      put_four(memory, start + i * TEAM, pack(y[0] * one, y[1] * one), pack(y[2] * one, y[3] * one));
    }
  }
}
__device__ __forceinline__ void take_heads(Memory& memory, u64* copies, const u64* copy, u32 flag) {
  if (memory.joins) {
    join_parts(memory, copies, flag);
    take<WIDTH / 2, false>(memory, copy + JOINED, flag);
    return;
  }
  const auto [first, splits] = memory.parts[threadIdx.x / TEAM];  // of this thread's row
  const u64 *parts = copy + first * (WIDTH / 2), *sums = copy + SUMS + first * HEADS;
  u32 looks = 0;  // poll one word per warp first, see take
  while (splits && !has(look(sums + (splits - 1) * HEADS + threadIdx.x % TEAM / (D / 4)), flag)) be_patient(looks);
  if (splits <= 1)
    take_parts<1>(memory, parts, sums, splits, flag);
  else
    take_parts<MOST_TAKEN>(memory, parts, sums, splits, flag);
  meet();
}
