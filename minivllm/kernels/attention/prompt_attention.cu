// Causal attention of prompts, or chunks of them, over a paged cache; see prompt_attention.py.
//
// Compiled for one (D, KEYS, GROUPS, STAGES, LOADS, WIDENERS): head dimension, keys per tile, warpgroups of 64 rows,
// stages of keys and of values, parts in which a tile is loaded, and, if the cache is float8 (e4m3), warps that widen
// keys, and as many for values; after hopper.cuh, `multiply_first` and `multiply` of 64 x KEYS and `multiply_held` of
// 64 x D, in bfloat16 or, if the cache is float8, in float16.
// Persistent: a program (thread block) loops over items, longest first. An item's rows are a tile of query tokens times
// the query heads that share a key head, a token's heads one after another. GROUPS warpgroups compute, 64 rows each; of
// the next one a warp loads queries and keys, another values, a page at a time (TMA). Key tiles are processed from last
// to first, so that the masked ones come first. While the tensor cores compute one tile's output, the next tile's scores
// are exponentiated (FlashAttention-3, Shah et al., 2024), also across items: so queries of two items are in shared
// memory. Where few queries see many keys, the keys are split into parts, an item each (flash decoding, Dao et al.,
// 2023); the part that finishes last combines them.
//
// Pages of a float8 cache come to a place of their own, from where the widening warps write them into tiles of float16,
// which has all numbers of e4m3. The warps that compute turn queries and weights into float16, too.

constexpr int ROWS = 64 * GROUPS, AT_ONCE = 2, KNOWN = 2 * AT_ONCE;  // items whose queries are loaded; items announced
constexpr int HALVES = D / 64, PAGE = 16, PAGES = KEYS / PAGE;
constexpr bool FLOAT8 = WIDENERS > 0;
constexpr int LOADERS = WIDENERS > 1 ? 2 : 1;   // warpgroups that load and widen
constexpr int FILLERS = FLOAT8 ? WIDENERS : 1;  // warps that fill a tile
constexpr int HALF_QUERIES = ROWS * LINE, HALF_KEYS = KEYS * LINE;  // 64 dimensions of all rows
constexpr int QUERY_BYTES = HALVES * HALF_QUERIES, TILE_BYTES = HALVES * HALF_KEYS;
constexpr int LOAD_KEYS = KEYS / LOADS, LOAD_LINE = FLOAT8 ? 64 : LINE;  // 64 dimensions of a key
constexpr int LOAD_BYTES = HALVES * LOAD_KEYS * LOAD_LINE, LOAD_STAGES = FLOAT8 ? LOADS : STAGES;
#define NONE __int_as_float(0xFF800000)  // minus infinity

struct Step {  // of the batch; strides in elements
  const int4* tiles;                     // of queries: row (-1: end), tile's first token in it; the part of its
                                         // keys + 65,536 * the number of parts; where these are written
  const int *starts, *lengths, *tables;  // (rows + 1,); (rows,); (rows, stride): first tokens, keys, blocks
  long long table_stride, out_stride;
  int count, first_row, heads, group;    // tiles; first row with a prompt; key heads, query heads per key head
  float4* left;                          // what parts write, and how many have done so
  u32* came;
  int each;                              // tokens per tile
  float scale;                           // times log2(e)
};

struct Item {
  // Key head; first token in q and out; number of tokens; keys before them, and in total; first key tile.
  int head, row, token, live, before, length, first, left, part, parts, tiles;

  // Takes item ``number``; row is -1 if there is none.
  __device__ __forceinline__ void take(const Step& step, int number) {
    const int tile = number / step.heads;
    row = -1, tiles = first = 0;
    if (tile >= step.count) return;
    const int4 its = step.tiles[tile];
    if (its.x < 0) return;
    head = number % step.heads, row = step.first_row + its.x;
    const int start = step.starts[row], queries = step.starts[row + 1] - start;
    token = start - step.starts[step.first_row] + its.y, live = min(queries - its.y, step.each);
    length = step.lengths[row], before = length - queries + its.y;
    const int seen = max(min(before + step.each, length), 0), all = (seen + KEYS - 1) / KEYS;
    part = its.z & 0xFFFF, parts = its.z >> 16, left = its.w;
    first = all * part / parts, tiles = all * (part + 1) / parts - first;
  }
  // The block of a page of a tile; past the last key, the last page's.
  __device__ __forceinline__ int block(const Step& step, int tile, int page) const {
    if (tile < first) return 0;
    return step.tables[row * step.table_stride + min(tile * PAGES + page, (length - 1) / PAGE)];
  }
};

// Increments count and returns its previous value. Whoever increments last sees what all wrote before they did.
__device__ __forceinline__ u32 one_more(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(1) : "memory");
  return before;
}

template <int NUMBER = STAGES> struct Turn {  // position in a ring buffer of stages
  int stage = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == NUMBER) stage = 0, round ^= 1;
  }
};

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT groups of products are in flight.
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void meet(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void arrived(float (&x)[N]) {  // keeps reads of x after this point
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// This program's item of a round. Items get shorter, so the program with the longest has the shortest in the next
// round.
__device__ __forceinline__ int number_of(int round) {
  return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Loads 64 dimensions of a tile's queries, starting at the token and the head.
__device__ __forceinline__ void load_queries(u32 to, const TensorMap* map, int head, int token, int half, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
      "r"(to), "l"(map), "r"(bar), "r"(0), "r"(head), "r"(token), "r"(half) : "memory");
}

// Loads all keys, or all values, of this program's items. With the keys, also queries, and publishes the items in
// ``given`` for the warps that compute. Each lane loads 64 dimensions of a page.
template <bool QUERIES>
__device__ __forceinline__ void load_pages(const TensorMap& map, const TensorMap& queries, const Step& step, u32 tiles,
                                           u32 full, u32 empty, u32 query_tile, u32 query_full, u32 query_empty,
                                           Item* given) {
  const int lane = threadIdx.x % 32, page = lane % PAGES, half = lane / PAGES % HALVES;
  Turn<LOAD_STAGES> turn;
  Item item;
  int round = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // before this nothing may be read, and nobody computes
  item.take(step, number_of(round));
  int block = item.block(step, item.first + item.tiles - 1, page);
#pragma unroll 1
  for (int items = 0;; items++) {
    if (QUERIES && lane == 0) {
      const int place = items % AT_ONCE;
      const u32 bar = query_full + 8 * place;
      barrier_wait(query_empty + 8 * place, items / AT_ONCE & 1 ^ 1);
      given[items % KNOWN] = item;  // free: all stored its last item's output before they released these queries
      if (!item.tiles) here_arrive(bar);
      else {
        barrier_expect(bar, HALVES * step.each * step.group * LINE);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          load_queries(query_tile + place * QUERY_BYTES + h * HALF_QUERIES, &queries, item.head * step.group,
                       item.token, h, bar);
      }
    }
    if (item.row < 0) return;
    Item next;
    int next_block = 0;
    const auto look_ahead = [&] {
      next.take(step, number_of(++round));
      next_block = next.block(step, next.first + next.tiles - 1, page);
    };
    if (!item.tiles) look_ahead();
#pragma unroll 1
    for (int tile = item.first + item.tiles - 1; tile >= item.first; tile--) {
#pragma unroll
      for (int part = 0; part < LOADS; part++, turn.next()) {
        const u32 bar = full + 8 * turn.stage;
        barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);
        if (lane == 0) barrier_expect(bar, LOAD_BYTES);
        __syncwarp();
        if (lane < PAGES * HALVES && page / (PAGES / LOADS) == part)
          load_page(tiles + turn.stage * LOAD_BYTES + (half * LOAD_KEYS + page % (PAGES / LOADS) * PAGE) * LOAD_LINE,
                    &map, item.head * HALVES + half, block, bar);
      }
      block = item.block(step, tile - 1, page);
      if (tile == item.first + item.tiles - 1) look_ahead();
    }
    item = next, block = next_block;
  }
}

// Widens its ``share`` of all key tiles, or all value tiles, of this program's items.
__device__ __forceinline__ void widen_tiles(const Step& step, u32 loads, u32 loads_full, u32 loads_empty, u32 tiles,
                                            u32 full, u32 empty, int share) {
  constexpr int AHEAD = 4, LINES = 8;  // reads under way; lines of one, of 64 bytes
  const int lane = threadIdx.x % 32, line = lane / 4;
  const u32 eight = line * LINE + (lane % 4 * 2 ^ line) * 16;  // this lane's first, swizzled; its second one is beside
  Turn<> turn;
  Turn<LOAD_STAGES> of_loads;
  Item item;
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int round = 0;; round++) {
    item.take(step, number_of(round));
    if (item.row < 0) return;
#pragma unroll 1
    for (int left = item.tiles; left > 0; left--, turn.next()) {
      barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);
#pragma unroll 1
      for (int part = 0; part < LOADS; part++, of_loads.next()) {
        barrier_wait(loads_full + 8 * of_loads.stage, of_loads.round);
        const u32 from = loads + of_loads.stage * LOAD_BYTES + lane * 16;
        const u32 to = tiles + turn.stage * TILE_BYTES + part * LOAD_KEYS * LINE + eight;
#pragma unroll 1
        for (int first = share * AHEAD * LINES; first < HALVES * LOAD_KEYS; first += WIDENERS * AHEAD * LINES) {
          uint4 x[AHEAD];
#pragma unroll
          for (int i = 0; i < AHEAD; i++) x[i] = read16(from + (first + i * LINES) * LOAD_LINE);
          const u32 there = to + first / LOAD_KEYS * HALF_KEYS + first % LOAD_KEYS * LINE;
#pragma unroll
          for (int i = 0; i < AHEAD; i++) {
            uint4 a, b;
            halves(x[i].x, a.x, a.y), halves(x[i].y, a.z, a.w), halves(x[i].z, b.x, b.y), halves(x[i].w, b.z, b.w);
            write16(there + i * LINES * LINE, a);
            write16((there ^ 16) + i * LINES * LINE, b);
          }
        }
        __syncwarp();
        if (lane == 0) here_arrive(loads_empty + 8 * of_loads.stage);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) here_arrive(full + 8 * turn.stage);
    }
  }
}

struct Softmax {  // of this thread's two rows, 8 apart
  float tops[2] = {NONE, NONE}, sums[2] = {0.f, 0.f}, fades[2];

  // Turns scores into weights; earlier sums have to be multiplied by fades.
  __device__ __forceinline__ void take(float (&s)[KEYS / 2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = tops[h];
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float floor = top == NONE ? 0.f : top * scale;  // a row may see no key yet
      fades[h] = exp2_of(tops[h] * scale - floor);
      tops[h] = top;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * h + e];
          x = exp2_of(fmaf(x, scale, -floor));
          sum += x;
        }
      sums[h] = sums[h] * fades[h] + sum;
    }
  }
};

// Causal mask for keys from ``first`` on: this thread's rows see keys up to their positions.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], int first, const int (&positions)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (column + j * 8 + e % 2 > positions[e / 2]) s[4 * j + e] = NONE;
}

// Packs weights as wgmma's A operand: of each 16 keys, this thread's of both rows.
__device__ __forceinline__ void hold(u32 (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i] = FLOAT8 ? half_pair(s[2 * i], s[2 * i + 1]) : pack(s[2 * i], s[2 * i + 1]);
}

// Turns 64 lines of bfloat16 into float16, in place, by a warpgroup.
__device__ __forceinline__ void to_halves(u32 lines, int of_group) {
  const auto turned = [](u32 pair) { return half_pair(low(pair), high(pair)); };
#pragma unroll 2
  for (int i = of_group; i < 64 * LINE / 16; i += 128) {
    const uint4 x = read16(lines + i * 16);
    write16(lines + i * 16, make_uint4(turned(x.x), turned(x.y), turned(x.z), turned(x.w)));
  }
}

__device__ __forceinline__ void score(float (&s)[KEYS / 2], u32 queries, u32 keys) {
  const u64 a = matrix(queries), b = matrix(keys);
#pragma unroll
  for (int k = 0; k < D / 16; k++) {  // 16 dimensions: 32 bytes, or the other half
    const u64 in_a = a + k / 4 * (HALF_QUERIES >> 4) + k % 4 * 2, in_b = b + k / 4 * (HALF_KEYS >> 4) + k % 4 * 2;
    if (k == 0)
      multiply_first(s, in_a, in_b);
    else
      multiply(s, in_a, in_b);
  }
  commit_products();
}

__device__ __forceinline__ void weigh(float (&o)[D / 2], const u32 (&p)[KEYS / 4], u32 values) {
  const u64 b = matrix(values, HALF_KEYS >> 4);
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) multiply_held(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + k * 128);
  commit_products();
}

// Transposes among four lanes, each with a word of each of four lines: returns the line with this lane's number.
__device__ __forceinline__ uint4 gathered(u32 (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // words of even lines to even lanes
    const u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    if (odd) x[i] = other;
    else x[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 other = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
    if (high) x[i] = other;
    else x[i + 2] = other;
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// Warpgroups take turns at products, so that exponentials of one overlap products of the others.
__device__ __forceinline__ void my_turn(int group) { meet(1 + GROUPS + group, 256); }
__device__ __forceinline__ void next_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + GROUPS + (group + 1) % GROUPS), "r"(256) : "memory");
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + LOADERS), 1)
prompt_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                 const __grid_constant__ TensorMap values, u16* out, const __grid_constant__ Step step) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * AT_ONCE + 4 * STAGES + (FLOAT8 ? 4 * LOAD_STAGES : 0)];
  __shared__ Item given[KNOWN];
  __shared__ u32 came[GROUPS];
  const u32 query_tile = (shared_address(memory) + 1023) & ~1023u, key_tiles = query_tile + AT_ONCE * QUERY_BYTES;
  const u32 value_tiles = key_tiles + STAGES * TILE_BYTES;
  const u32 query_full = shared_address(barriers), query_empty = query_full + 8 * AT_ONCE;
  const u32 keys_full = query_empty + 8 * AT_ONCE, keys_empty = keys_full + 8 * STAGES;
  const u32 values_full = keys_empty + 8 * STAGES, values_empty = values_full + 8 * STAGES;
  const u32 key_loads = value_tiles + STAGES * TILE_BYTES, value_loads = key_loads + LOAD_STAGES * LOAD_BYTES;
  const u32 key_loads_full = values_empty + 8 * STAGES, key_loads_empty = key_loads_full + 8 * LOAD_STAGES;
  const u32 value_loads_full = key_loads_empty + 8 * LOAD_STAGES;
  const u32 value_loads_empty = value_loads_full + 8 * LOAD_STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < AT_ONCE; i++) barrier_init(query_full + 8 * i, 1), barrier_init(query_empty + 8 * i, GROUPS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(keys_full + 8 * s, FILLERS), barrier_init(keys_empty + 8 * s, GROUPS);
      barrier_init(values_full + 8 * s, FILLERS), barrier_init(values_empty + 8 * s, GROUPS);
    }
    for (int s = 0; FLOAT8 && s < LOAD_STAGES; s++) {
      barrier_init(key_loads_full + 8 * s, 1), barrier_init(key_loads_empty + 8 * s, WIDENERS);
      barrier_init(value_loads_full + 8 * s, 1), barrier_init(value_loads_empty + 8 * s, WIDENERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x / 128 >= GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADERS == 2 ? 48 : GROUPS == 2 ? 40 : 32));
    const int warp = threadIdx.x / 32 - 4 * GROUPS, widener = warp - 2 * WIDENERS;  // the last: of keys, of values
    if (warp == 0)
      load_pages<true>(keys, queries, step, FLOAT8 ? key_loads : key_tiles, FLOAT8 ? key_loads_full : keys_full,
                       FLOAT8 ? key_loads_empty : keys_empty, query_tile, query_full, query_empty, given);
    else if (warp == 1)
      load_pages<false>(values, queries, step, FLOAT8 ? value_loads : value_tiles,
                        FLOAT8 ? value_loads_full : values_full, FLOAT8 ? value_loads_empty : values_empty, 0, 0, 0,
                        given);
    else if (widener >= 0 && widener < WIDENERS)
      widen_tiles(step, key_loads, key_loads_full, key_loads_empty, key_tiles, keys_full, keys_empty, widener);
    else if (FLOAT8 && widener >= 0)
      widen_tiles(step, value_loads, value_loads_full, value_loads_empty, value_tiles, values_full, values_empty,
                  widener - WIDENERS);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(LOADERS == 2 ? 208 : GROUPS == 2 ? 232 : 160));
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform in the warp, and the compiler must know: else
  const int of_group = threadIdx.x % 128;                    // it computes descriptors per lane, which delays products
  const int line = group * 64 + of_group / 32 * 16 + of_group % 32 / 4;  // this thread's first row in an item
  const int tokens[2] = {line / step.group, (line + 8) / step.group};    // its tokens, in the tile
  const int first_token = group * 64 / step.group;                       // of this group's rows
  const auto leave = [&](u32 bar) {
    if (of_group == 0) here_arrive(bar);
  };
  int items = 0;  // done
  const auto item = [&](int items) -> const Item& { return given[items % KNOWN]; };
  const auto wait_for_item = [&] {
    barrier_wait(query_full + 8 * (items % AT_ONCE), items / AT_ONCE & 1);
    if (!FLOAT8 || !item(items).tiles) return;
    for (int h = 0; h < HALVES; h++)
      to_halves(query_tile + items % AT_ONCE * QUERY_BYTES + h * HALF_QUERIES + group * 64 * LINE, of_group);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet(1 + group, 128);
  };
  const auto leave_queries = [&] { leave(query_empty + 8 * (items % AT_ONCE)); };
  Turn<> of_keys, of_values;
  float o[D / 2], s[KEYS / 2];
  u32 p[KEYS / 4];
  // Starts scoring the next key tile.
  const auto score_next = [&] {
    barrier_wait(keys_full + 8 * of_keys.stage, of_keys.round);
    my_turn(group);
    begin_products();
    score(s, query_tile + items % AT_ONCE * QUERY_BYTES + group * 64 * LINE, key_tiles + of_keys.stage * TILE_BYTES);
  };
  const auto leave_keys = [&] {
    arrived(s);
    leave(keys_empty + 8 * of_keys.stage);
    of_keys.next();
  };
  const auto weigh_next = [&] {
    barrier_wait(values_full + 8 * of_values.stage, of_values.round);
    weigh(o, p, value_tiles + of_values.stage * TILE_BYTES);
  };
  const auto leave_values = [&] {
    wait_for_products<0>();
    arrived(o);
    leave(values_empty + 8 * of_values.stage);
    of_values.next();
  };
  const auto weights_of = [&](Softmax& softmax, int before, int tile) {
    if ((tile + 1) * KEYS - 1 > before + first_token) {
      const int positions[2] = {before + tokens[0], before + tokens[1]};
      hide(s, tile * KEYS, positions);
    }
    softmax.take(s, step.scale);
  };
  const auto begin_item = [&](const Item& item) {  // after the weights of its first tile, the last of its keys
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
    const int held = item.length - (item.first + item.tiles - 1) * KEYS;
    if (held >= KEYS) return;
    const u32 at = value_tiles + of_values.stage * TILE_BYTES;  // values beyond the context may be NaN
    barrier_wait(values_full + 8 * of_values.stage, of_values.round);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      for (int i = held * 8 + of_group; i < KEYS * 8; i += 128)
        write16(at + h * HALF_KEYS + i * 16, make_uint4(0, 0, 0, 0));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet(1 + group, 128);
  };
  // Writes this part of an item. Returns whether it was the last; if so, o, tops and sums are those of all parts.
  const auto joined = [&](const Item& item, float (&tops)[2], float (&sums)[2]) {
    constexpr int WORDS = D / 8;  // fours of o, then one of tops and sums
    const auto of_part = [&](int part) {
      return step.left + (((item.left + part) * step.heads + item.head) * GROUPS + group) * (WORDS + 1) * 128 + of_group;
    };
    float4* mine = of_part(item.part);
#pragma unroll
    for (int i = 0; i < WORDS; i++) leave_four(mine + i * 128, o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    leave_four(mine + WORDS * 128, tops[0], tops[1], sums[0], sums[1]);
    meet(1 + group, 128);
    if (of_group == 0) {
      u32* count = step.came + (item.left * step.heads + item.head) * GROUPS + group;
      came[group] = one_more(count);
      if (came[group] == item.parts - 1) *count = 0;  // for the next step
    }
    meet(1 + group, 128);
    if (came[group] != item.parts - 1) return false;
    tops[0] = tops[1] = NONE, sums[0] = sums[1] = 0.f;
#pragma unroll 1
    for (int part = 0; part < item.parts; part++) {
      float its[2], unused[2];
      look_at_four(of_part(part) + WORDS * 128, its[0], its[1], unused[0], unused[1]);
      tops[0] = fmaxf(tops[0], its[0]), tops[1] = fmaxf(tops[1], its[1]);
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
#pragma unroll 1
    for (int part = 0; part < item.parts; part++) {
      const float4* from = of_part(part);
      float its[2], sum[2], weights[2];
      look_at_four(from + WORDS * 128, its[0], its[1], sum[0], sum[1]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        weights[h] = its[h] == NONE ? 0.f : exp2_of(its[h] - tops[h]);
        sums[h] += weights[h] * sum[h];
      }
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        float x[4];
        look_at_four(from + i * 128, x[0], x[1], x[2], x[3]);
#pragma unroll
        for (int e = 0; e < 4; e++) o[4 * i + e] += weights[e / 2] * x[e];
      }
    }
    return true;
  };
  const auto store = [&](const Item& item, const Softmax& softmax) {
    float tops[2], sums[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      tops[h] = softmax.tops[h] * step.scale, sums[h] = softmax.sums[h];
      sums[h] += __shfl_xor_sync(~0u, sums[h], 1), sums[h] += __shfl_xor_sync(~0u, sums[h], 2);
    }
    if (item.parts > 1 && !joined(item, tops, sums)) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float factor = sums[h] > 0.f ? 1.f / sums[h] : 0.f;
      const int head = item.head * step.group + line + 8 * h - tokens[h] * step.group;
      u16* to = out + (item.token + tokens[h]) * step.out_stride + head * D + of_group % 4 * 8;
#pragma unroll
      for (int i = 0; i < D / 32; i++) {  // four lanes have pairs of four eights; each lane gets one eight
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float* y = o + (i * 4 + j) * 4 + 2 * h;
          pairs[j] = pack(y[0] * factor, y[1] * factor);
        }
        const uint4 eight = gathered(pairs);
        if (tokens[h] < item.live) *(uint4*)(to + i * 32) = eight;
      }
    }
  };
  if (group == GROUPS - 1) next_turn(group);
  wait_for_item();
#pragma unroll 1
  while (item(items).row >= 0) {
    Softmax softmax;
    if (item(items).tiles) {
      int before = item(items).before, first = item(items).first, tile = first + item(items).tiles - 1;
      score_next();
      next_turn(group);
      wait_for_products<0>();
      leave_keys();
      weights_of(softmax, before, tile);
      hold(p, s);
      begin_item(item(items));
#pragma unroll 1
      for (;;) {
        const bool last = tile == first;
        if (last) {
          leave_queries();
          items++;
          wait_for_item();
          const Item& next = item(items);
          if (next.row < 0 || !next.tiles) break;
          before = next.before, first = next.first, tile = first + next.tiles;
        }
        tile--;
        score_next();
        weigh_next();
        next_turn(group);
        wait_for_products<1>();
        leave_keys();
        const Softmax of_all = softmax;
        if (last) softmax = Softmax();
        weights_of(softmax, before, tile);
        leave_values();
        hold(p, s);
        if (last) {
          store(item(items - 1), of_all);
          begin_item(item(items));
        } else {
#pragma unroll
          for (int i = 0; i < D / 2; i++) o[i] *= softmax.fades[i / 2 % 2];
        }
      }
      begin_products();
      weigh_next();
      leave_values();
    } else {
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] = 0.f;
      meet(1 + group, 128);  // all have read the item
      leave_queries();
      items++;
      wait_for_item();
    }
    store(item(items - 1), softmax);
  }
}
