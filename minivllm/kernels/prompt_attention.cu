// Causal attention of prompts, or chunks of them, over a paged cache; see prompt_attention.py.
//
// Compiled for one (D, KEYS): a head's dimension and the keys of a tile; behind hopper.cuh, `multiply_first` and
// `multiply` of 64 x KEYS and `multiply_held` of 64 x D. A program goes through items, each 128 query tokens of a head,
// the longest first. Of its warpgroups two multiply, each for 64 of the tokens; of the third, one warp asks for queries
// and keys, one for values, page by page (TMA). Tiles of keys are taken from the last to the first, so that the masked
// ones come first. While the tensor cores make a tile's output, the next tile's scores are exponentiated:
// FlashAttention-3 (Shah et al., 2024).

constexpr int ROWS = 128, HALVES = D / 64, PAGE = 16, PAGES = KEYS / PAGE;
constexpr int HALF_QUERIES = ROWS * LINE, HALF_KEYS = KEYS * LINE;  // 64 dimensions of all rows
constexpr int QUERY_BYTES = HALVES * HALF_QUERIES, TILE_BYTES = HALVES * HALF_KEYS;
constexpr int STAGES = 2, GROUPS = 2;
#define NONE __int_as_float(0xFF800000)  // minus infinity

struct Step {  // of the batch; strides in elements
  const int* tiles;                      // (tiles, 2): a row of prompts (-1: no more), and the tile's first token of it
  const int *starts, *lengths, *tables;  // (rows + 1,); (rows,); (rows, stride): first tokens, keys, blocks
  long long table_stride, out_stride;
  int count, first_row, heads, group;    // tiles; the first row of a prompt; query heads, and those of a key head
  float scale;                           // times log2(e)
};

struct Item {
  int head, row, token, live, before, length, tiles;  // token: of q and out; live: tokens that are; keys before them

  // The number-th; its row is -1 where there are no more.
  __device__ __forceinline__ void take(const Step& step, int number) {
    const int tile = number / step.heads;
    row = -1, tiles = 0;
    if (tile >= step.count) return;
    const int index = step.tiles[2 * tile], first = step.tiles[2 * tile + 1];
    if (index < 0) return;
    head = number % step.heads, row = step.first_row + index;
    const int start = step.starts[row], queries = step.starts[row + 1] - start;
    token = start - step.starts[step.first_row] + first, live = min(queries - first, ROWS);
    length = step.lengths[row], before = length - queries + first;
    const int seen = min(before + ROWS, length);
    tiles = seen > 0 ? (seen + KEYS - 1) / KEYS : 0;
  }
  // The block of a page of a tile; past the last key, of the last page.
  __device__ __forceinline__ int block(const Step& step, int tile, int page) const {
    if (tile < 0) return 0;
    return step.tables[row * step.table_stride + min(tile * PAGES + page, (length - 1) / PAGE)];
  }
};

struct Turn {  // of a ring's stages
  int stage = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round ^= 1;
  }
};

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last so many groups of them are done.
template <int LEFT> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void meet(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void arrived(float (&x)[N]) {  // nothing that reads x goes before this
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// This program's item of a round. Items get shorter: who has the longest of one round has the shortest of the next.
__device__ __forceinline__ int number_of(int round) {
  return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// All keys, or all values, of this program's items; with the keys the items themselves, which whoever multiplies finds in
// ``given``, and their queries. Lanes ask for 64 dimensions of a page each.
template <bool QUERIES>
__device__ __forceinline__ void load_pages(const TensorMap& map, const TensorMap& queries, const Step& step, u32 tiles,
                                           u32 full, u32 empty, u32 query_tile, u32 query_full, u32 query_empty,
                                           Item& given) {
  const int lane = threadIdx.x % 32, page = lane % PAGES, half = lane / PAGES % HALVES;
  Turn turn;
  Item item;
  int round = 0;
  item.take(step, number_of(round));
  int block = item.block(step, item.tiles - 1, page);
#pragma unroll 1
  for (int items = 0;; items++) {
    if (QUERIES && lane == 0) {
      barrier_wait(query_empty, items & 1 ^ 1);
      given = item;
      if (!item.tiles) here_arrive(query_full);
      else {
        barrier_expect(query_full, QUERY_BYTES);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          load_tile(query_tile + h * HALF_QUERIES, &queries, item.head * D + h * 64, item.token, query_full, 1, 0);
      }
    }
    if (item.row < 0) return;
    Item next;
    int next_block = 0;
    const auto look_ahead = [&] {
      next.take(step, number_of(++round));
      next_block = next.block(step, next.tiles - 1, page);
    };
    if (!item.tiles) look_ahead();
#pragma unroll 1
    for (int tile = item.tiles - 1; tile >= 0; tile--, turn.next()) {
      const u32 bar = full + 8 * turn.stage;
      barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);
      if (lane == 0) barrier_expect(bar, TILE_BYTES);
      __syncwarp();
      if (lane < PAGES * HALVES)
        load_page(tiles + turn.stage * TILE_BYTES + half * HALF_KEYS + page * PAGE * LINE, &map,
                  item.head / step.group * HALVES + half, block, bar);
      block = item.block(step, tile - 1, page);
      if (tile == item.tiles - 1) look_ahead();
    }
    item = next, block = next_block;
  }
}

struct Softmax {  // of this thread's two rows, 8 apart
  float tops[2] = {NONE, NONE}, sums[2] = {0.f, 0.f}, fades[2];

  // Scores become weights; what was summed before is to be multiplied by fades.
  __device__ __forceinline__ void take(float (&s)[KEYS / 2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = tops[h];
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float floor = top == NONE ? 0.f : top * scale;  // a row may see nothing yet
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

// Row ``position`` sees keys up to its number, of those that begin at ``first``; its thread's other row eight more.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], int first, int position) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (column + j * 8 + e % 2 > position + e / 2 * 8) s[4 * j + e] = NONE;
}

// As the tensor cores take them: of each 16 keys, this thread's of both rows.
__device__ __forceinline__ void hold(u32 (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void score(float (&s)[KEYS / 2], u32 queries, u32 keys) {
  const u64 a = matrix(queries), b = matrix(keys);
#pragma unroll
  for (int k = 0; k < D / 16; k++) {  // 16 dimensions: 32 bytes on, or the other half
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

// Of four lanes, each with a word of each of four others' lines: the line of this lane's number.
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

// Products of one warpgroup, then of the other: exponentials of one stand beside products of the other.
__device__ __forceinline__ void my_turn(int group) {
  meet(3 + group, 256);
}
__device__ __forceinline__ void your_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(4 - group), "r"(256) : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1)
prompt_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                 const __grid_constant__ TensorMap values, u16* out, const __grid_constant__ Step step) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 + 4 * STAGES];
  __shared__ Item given;
  const u32 query_tile = (shared_address(memory) + 1023) & ~1023u, key_tiles = query_tile + QUERY_BYTES;
  const u32 value_tiles = key_tiles + STAGES * TILE_BYTES;
  const u32 query_full = shared_address(barriers), query_empty = query_full + 8;
  const u32 keys_full = query_full + 16, keys_empty = keys_full + 8 * STAGES;
  const u32 values_full = keys_empty + 8 * STAGES, values_empty = values_full + 8 * STAGES;
  if (threadIdx.x == 0) {
    barrier_init(query_full, 1), barrier_init(query_empty, GROUPS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(keys_full + 8 * s, 1), barrier_init(keys_empty + 8 * s, GROUPS);
      barrier_init(values_full + 8 * s, 1), barrier_init(values_empty + 8 * s, GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (threadIdx.x / 128 == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0)
      load_pages<true>(keys, queries, step, key_tiles, keys_full, keys_empty, query_tile, query_full, query_empty, given);
    else if (warp == 1)
      load_pages<false>(values, queries, step, value_tiles, values_full, values_empty, 0, 0, 0, given);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int group = threadIdx.x / 128, of_group = threadIdx.x % 128;
  const int line = group * 64 + of_group / 32 * 16 + of_group % 32 / 4;  // this thread's first row, of the item's
  const u32 own_queries = query_tile + group * 64 * LINE;
  const auto leave = [&](u32 bar) {
    if (of_group == 0) here_arrive(bar);
  };
  Turn of_keys, of_values;
  if (group == 1) your_turn(group);
#pragma unroll 1
  for (int items = 0;; items++) {
    barrier_wait(query_full, items & 1);
    const Item item = given;
    if (item.row < 0) break;
    float o[D / 2];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
    if (item.tiles) {
      const int position = item.before + line, certain = item.before + group * 64;  // keys that all its rows see
      float s[KEYS / 2];
      u32 p[KEYS / 4];
      int tile = item.tiles - 1;
      barrier_wait(keys_full + 8 * of_keys.stage, of_keys.round);
      my_turn(group);
      begin_products();
      score(s, own_queries, key_tiles + of_keys.stage * TILE_BYTES);
      your_turn(group);
      wait_for_products<0>();
      arrived(s);
      leave(keys_empty + 8 * of_keys.stage);
      of_keys.next();
      hide(s, tile * KEYS, position);
      softmax.take(s, step.scale);
      hold(p, s);
      if (const int held = item.length - tile * KEYS; held < KEYS) {  // what no context holds may be no number
        const u32 at = value_tiles + of_values.stage * TILE_BYTES;
        barrier_wait(values_full + 8 * of_values.stage, of_values.round);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
          for (int i = held * 8 + of_group; i < KEYS * 8; i += 128)
            write16(at + h * HALF_KEYS + i * 16, make_uint4(0, 0, 0, 0));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet(1 + group, 128);
      }
#pragma unroll 1
      while (--tile >= 0) {
        barrier_wait(keys_full + 8 * of_keys.stage, of_keys.round);
        my_turn(group);
        begin_products();
        score(s, own_queries, key_tiles + of_keys.stage * TILE_BYTES);
        barrier_wait(values_full + 8 * of_values.stage, of_values.round);
        weigh(o, p, value_tiles + of_values.stage * TILE_BYTES);
        your_turn(group);
        wait_for_products<1>();
        arrived(s);
        leave(keys_empty + 8 * of_keys.stage);
        of_keys.next();
        if ((tile + 1) * KEYS - 1 > certain) hide(s, tile * KEYS, position);
        softmax.take(s, step.scale);
        wait_for_products<0>();
        arrived(o);
        leave(values_empty + 8 * of_values.stage);
        of_values.next();
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= softmax.fades[i / 2 % 2];
        hold(p, s);
      }
      leave(query_empty);  // and the item
      barrier_wait(values_full + 8 * of_values.stage, of_values.round);
      begin_products();
      weigh(o, p, value_tiles + of_values.stage * TILE_BYTES);
      wait_for_products<0>();
      arrived(o);
      leave(values_empty + 8 * of_values.stage);
      of_values.next();
    } else {
      meet(1 + group, 128);  // all have read the item
      leave(query_empty);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = softmax.sums[h];
      sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
      const float factor = sum > 0.f ? 1.f / sum : 0.f;
      u16* to = out + (item.token + line + 8 * h) * step.out_stride + item.head * D + of_group % 4 * 8;
#pragma unroll
      for (int i = 0; i < D / 32; i++) {  // of four lanes' pairs of four eights each lane gets one eight
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float* y = o + (i * 4 + j) * 4 + 2 * h;
          pairs[j] = pack(y[0] * factor, y[1] * factor);
        }
        const uint4 eight = gathered(pairs);
        if (line + 8 * h < item.live) *(uint4*)(to + i * 32) = eight;
      }
    }
  }
}
