// Attention of one new token a sequence over a paged cache, its pages of 16 keys as one stream; see stream_decode.py.
//
// Compiled for one (KV, G, D, QKV), behind hopper.cuh: key heads, query heads of each, their dimension, and whether q is
// the packed projection: then queries are normed and rotated when they are read, and whoever has a sequence's last page
// puts the new key and value into it, there and in the cache.
// The pages of all sequences, one after another, are cut into equal shares, one a program. A warp asks for pages, keys
// and values of all heads by TMA, as far ahead as there is room, from one sequence to the next. Eight warps take them:
// WARPS / KV a head, each all its scores and so many of its output's dimensions. Scores are made transposed, keys by
// query heads: S' = K q' and out' = V' P', so that eight columns of a tensor-core tile hold the query heads of a key
// head.
// A sequence in several shares: each leaves its part, and the last of them puts them together, for each warp by itself.
// It waits for the parts' words themselves, which need no fence and no count. A program goes through its sequences from
// the last one to the first, so that what it leaves is there when others want it, and what it waits for comes last.
// Programs before it run by then, as they start in order.

constexpr int PAGE = 16, WARPS = 8;  // keys
constexpr int HALVES = KV * D / 64;             // 128-byte columns of a page
constexpr int PART_BYTES = HALVES * PAGE * LINE, STAGE_BYTES = 2 * PART_BYTES;  // keys, then values
constexpr int PER_HEAD = WARPS / KV, DIMS = D / PER_HEAD, TILES = DIMS / 16, STEPS = D / 16;
constexpr int PIECE = (TILES + 1) * 32;         // float4s that a warp leaves of a sequence: outputs; maxima and sums
constexpr u32 ABSENT = 0xFFFFFFFF;              // a word of a part that is not there
constexpr u32 PATIENCE = 1 << 27;               // looks at a part, about a minute: then it is an error, no hang

__device__ __forceinline__ void load_page(u32 to, const TensorMap* map, int page, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %3, %4}], [%2];" ::
      "r"(to), "l"(map), "r"(bar), "r"(0), "r"(page) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
               " {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void write1(u32 to, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ u32 transposed(u32 pair) {  // of an 8 x 8 matrix, a pair a lane
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float column_max(float x) {  // over the lanes that hold a column
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

struct New {  // what makes q, k and v of a packed projection; strides in elements
  const u16* x;                        // (rows, size): its rms divides the projection; null: nothing does
  const u16 *query_norm, *key_norm;    // (D,), or null: not normed
  const float* angles;                 // (positions, D) cosines of half a head's dimensions, then sines
  const long long *positions, *slots;  // (rows,)
  u16 *keys, *values;                  // (blocks, PAGE, KV, D)
  long long x_stride, angles_stride;
  int size;
  float eps, x_eps;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}
__device__ __forceinline__ float square_of(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ u32 scaled(u32 pair, float factor) { return pack(low(pair) * factor, high(pair) * factor); }
__device__ __forceinline__ u32 normed(u32 pair, float factor, u32 weight) {
  u32 y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(scaled(pair, factor)), "r"(weight));
  return y;
}
// Two of a head's dimensions, and those half a head behind, which they turn with. Both are multiplied by factor first.
__device__ __forceinline__ void turn(u32& front, u32& back, const float* angles, float factor) {
  const float2 c = __ldg((const float2*)angles), s = __ldg((const float2*)(angles + D / 2));
  const float x0 = low(front) * factor, x1 = high(front) * factor, y0 = low(back) * factor, y1 = high(back) * factor;
  front = pack(x0 * c.x - y0 * s.x, x1 * c.y - y1 * s.y);
  back = pack(y0 * c.x + x0 * s.x, y1 * c.y + x1 * s.y);
}
// 1 / rms of a row of x.
__device__ __forceinline__ float row_factor(const New& its, int row, int lane) {
  float square = 0.f;
  const u16* x = its.x + row * its.x_stride;
  for (int i = lane * 8; i < its.size; i += 256) {
    const uint4 eight = *(const uint4*)(x + i);
    square += square_of(eight.x) + square_of(eight.y) + (square_of(eight.z) + square_of(eight.w));
  }
  return rsqrtf(warp_sum(square) / its.size + its.x_eps);
}

struct State {  // of a warp and a sequence; each lane has two columns, query heads 2 * (lane % 4) and the next
  float out[TILES][4], top[2], sum[2];  // not divided by the sum yet; maxima in base 2

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < TILES; t++) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.f;
    top[0] = top[1] = -1e30f, sum[0] = sum[1] = 0.f;
  }
  __device__ void scale(float first, float second) {
#pragma unroll
    for (int t = 0; t < TILES; t++) out[t][0] *= first, out[t][1] *= second, out[t][2] *= first, out[t][3] *= second;
    sum[0] *= first, sum[1] *= second;
  }
  // Makes the maxima at least these.
  __device__ void raise(float first, float second) {
    first = fmaxf(first, top[0]), second = fmaxf(second, top[1]);
    scale(exp2_of(top[0] - first), exp2_of(top[1] - second));
    top[0] = first, top[1] = second;
  }
  __device__ void add(State& other) {
    raise(other.top[0], other.top[1]);
    other.raise(top[0], top[1]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[t][i] += other.out[t][i];
    sum[0] += other.sum[0], sum[1] += other.sum[1];
  }

  // A lane's part of a sequence in memory. Its words tell by themselves that they are there: none that arithmetic makes
  // is ABSENT, a NaN of the other sign.
  __device__ void leave(float4* to) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) put(to + t * 32, out[t][0], out[t][1], out[t][2], out[t][3]);
    put(to + TILES * 32, top[0], top[1], sum[0], sum[1]);
  }
  __device__ void look(const float4* from) {
#pragma unroll
    for (int t = 0; t < TILES; t++) get(from + t * 32, out[t][0], out[t][1], out[t][2], out[t][3]);
    get(from + TILES * 32, top[0], top[1], sum[0], sum[1]);
  }
  __device__ bool is_whole() const {
    bool whole = is_there(top[0]) && is_there(top[1]) && is_there(sum[0]) && is_there(sum[1]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) whole &= is_there(out[t][i]);
    return whole;
  }
  static __device__ void take_away(float4* from) {
    const float absent = __uint_as_float(ABSENT);
#pragma unroll
    for (int t = 0; t <= TILES; t++) put(from + t * 32, absent, absent, absent, absent);
  }

 private:
  static __device__ bool is_there(float x) { return __float_as_uint(x) != ABSENT; }
  static __device__ void put(float4* to, float a, float b, float c, float d) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
  }
  static __device__ void get(const float4* from, float& a, float& b, float& c, float& d) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(from) : "memory");
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, 1)
stream_decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u16* q, u16* out,
              const int* tables, const int* lengths, const int* starts_of, const int* shares, float4* parts,
              long long table_stride, int q_stride, int out_stride, int rows, int stages, int early, float scale,
              const __grid_constant__ New its_new) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * MAX_STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 pages_at = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
  int* starts = (int*)(memory + (pages_at - shared_address(memory)) + stages * STAGE_BYTES);  // (rows + 1,) pages

  if (!early) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int program = blockIdx.x;
  const int* its_share = shares + program * (SHARE + NAMED);  // as _shares_kernel writes it
  const int first = its_share[0], last = its_share[1], first_row = its_share[2], last_row = its_share[3];
  const int sequences = first < last ? last_row - first_row + 1 : 0;
  int asked = 0;  // pages that the share names, asked for before anything else is known
  if (warp == WARPS) {
    const int block = its_share[SHARE + lane], named = min(its_share[4] - (QKV || !early ? 0 : its_share[5]), stages);
    if (lane == 0) {
      for (int s = 0; s < stages; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WARPS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (; asked < named; asked++) {
      const int its = __shfl_sync(~0u, block, asked);
      if (lane == 0) {
        const u32 bar = full + 8 * asked, to = pages_at + asked * STAGE_BYTES;
        barrier_expect(bar, STAGE_BYTES);
        load_page(to, &keys, its, bar);
        load_page(to + PART_BYTES, &values, its, bar);
      }
    }
  }
  for (int i = threadIdx.x; i <= rows; i += blockDim.x) starts[i] = starts_of[i];
  __syncthreads();

  const int all = starts[rows], programs = min((int)gridDim.x, max(all / LEAST, 1));
  int stage = 0, round = 0;

  if (warp == WARPS) {  // asks for pages
    stage = asked % stages, round = asked / stages;
    bool waited = !early;
    for (int n = 0; n < sequences; n++) {
      const int row = last_row - n;
      const int begin = starts[row], end = starts[row + 1], stop = min(end, last);
      int page = max(begin, first) + (n ? 0 : asked);
      while (page < stop) {
        const int some = min(stop - page, 32);
        const int block = lane < some ? tables[row * table_stride + page - begin + lane] : 0;
        for (int i = 0; i < some; i++, page++) {
          const int its = __shfl_sync(~0u, block, i);
          if (!QKV && !waited && page == end - 1) {  // it holds the new token, which the kernel before writes
            asm volatile("griddepcontrol.wait;" ::: "memory");
            waited = true;
          }
          if (lane == 0) {
            const u32 bar = full + 8 * stage, to = pages_at + stage * STAGE_BYTES;
            barrier_wait(empty + 8 * stage, round & 1 ^ 1);
            barrier_expect(bar, STAGE_BYTES);
            load_page(to, &keys, its, bar);
            load_page(to + PART_BYTES, &values, its, bar);
          }
          if (++stage == stages) stage = 0, round++;
        }
      }
    }
    __syncwarp();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");  // late: what comes next may read ahead of its wait
  const int head = warp / PER_HEAD, part = warp % PER_HEAD, group = lane / 4, pair = lane % 4 * 2;
  const u32 key_line = lane % 16 * LINE, value_line = (lane % 8 + lane / 16 * 8) * LINE;
  const int front = lane * 2, back = front + D / 2;  // of the new key and value, this lane's dimensions, and the next
  const bool has_new = front < D / 2;
  u32 query_norm[STEPS][2], key_norm[2];
  if (QKV && its_new.query_norm)
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) query_norm[s][i] = *(const u32*)(its_new.query_norm + 16 * s + 8 * i + pair);
  if (QKV && its_new.key_norm && has_new)
    key_norm[0] = *(const u32*)(its_new.key_norm + front), key_norm[1] = *(const u32*)(its_new.key_norm + back);
  for (int n = 0; n < sequences; n++) {
    const int row = last_row - n;
    const int begin = starts[row], end = starts[row + 1], stop = min(end, last), length = lengths[row];
    int page = max(begin, first);
    u32 query[STEPS][2];
    const u16* its = q + (long long)row * q_stride + (head * G + group) * D + pair;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) query[s][i] = group < G ? *(const u32*)(its + 16 * s + 8 * i) : 0;
    u32 new_key[2] = {0, 0}, new_value[2] = {0, 0};
    if (QKV) {
      const bool ends = stop == end;
      const u16* fresh = q + (long long)row * q_stride + (KV * G + head) * D;
      if (ends && has_new) {
        new_key[0] = *(const u32*)(fresh + front), new_key[1] = *(const u32*)(fresh + back);
        new_value[0] = *(const u32*)(fresh + KV * D + front), new_value[1] = *(const u32*)(fresh + KV * D + back);
      }
      const float* angles = its_new.angles + its_new.positions[row] * its_new.angles_stride;
      const float factor = its_new.x ? row_factor(its_new, row, lane) : 1.f;
      float left = factor;  // to be multiplied by yet
      if (its_new.query_norm) {
        float square = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) square += square_of(query[s][0]) + square_of(query[s][1]);
        square += __shfl_xor_sync(~0u, square, 1), square += __shfl_xor_sync(~0u, square, 2);
        left = factor * rsqrtf(square * factor * factor / D + its_new.eps);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
          for (int i = 0; i < 2; i++) query[s][i] = normed(query[s][i], left, query_norm[s][i]);
        left = 1.f;
      }
#pragma unroll
      for (int s = 0; s < STEPS / 2; s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          turn(query[s][i], query[s + STEPS / 2][i], angles + 16 * s + 8 * i + pair, left);
      if (ends) {
        left = factor;
        if (its_new.key_norm) {
          const float square = warp_sum(square_of(new_key[0]) + square_of(new_key[1]));
          left = factor * rsqrtf(square * factor * factor / D + its_new.eps);
          new_key[0] = normed(new_key[0], left, key_norm[0]), new_key[1] = normed(new_key[1], left, key_norm[1]);
          left = 1.f;
        }
        if (has_new) turn(new_key[0], new_key[1], angles + front, left);
        new_value[0] = scaled(new_value[0], factor), new_value[1] = scaled(new_value[1], factor);
        if (has_new && part == 0) {
          const long long at = (its_new.slots[row] * KV + head) * D;
          *(u32*)(its_new.keys + at + front) = new_key[0], *(u32*)(its_new.keys + at + back) = new_key[1];
          *(u32*)(its_new.values + at + front) = new_value[0], *(u32*)(its_new.values + at + back) = new_value[1];
        }
      }
    }
    State state;
    state.clear();

#pragma unroll 1
    for (; page < stop; page++) {
      barrier_wait(full + 8 * stage, round & 1);
      const u32 at = pages_at + stage * STAGE_BYTES;
      const bool ends = page == end - 1;
      const int left = length - (page - begin) * PAGE;  // keys of this page
      if (QKV && ends && left > 0) {
        const int line = left - 1;
        const u32 to = at + line * LINE + lane * 4 % 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int d = i ? back : front;
          const u32 there = to + (head * (D / 64) + d / 64) * PAGE * LINE + (d % 64 / 8 ^ (line & 7)) * 16;
          if (has_new) write1(there, new_key[i]), write1(there + PART_BYTES, new_value[i]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before TMA fills the stage again
        __syncwarp();
      }
      float scores[2][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        u32 a[4];
        load_matrices(a, at + (head * (D / 64) + s / 4) * PAGE * LINE + key_line +
                             ((s % 4 * 2 + lane / 16) ^ (lane & 7)) * 16);
        multiply(scores[s % 2], a, query[s][0], query[s][1]);
      }
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        p[i] = (scores[0][i] + scores[1][i]) * scale;
        if (ends && group + i / 2 * 8 >= left) p[i] = -1e38f;
      }
      const float top[2] = {column_max(fmaxf(p[0], p[2])), column_max(fmaxf(p[1], p[3]))};
      state.raise(top[0], top[1]);
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = exp2_of(p[i] - state.top[i % 2]), state.sum[i % 2] += p[i];
      const u32 b0 = transposed(pack(p[0], p[1])), b1 = transposed(pack(p[2], p[3]));
      // A key that does not exist has no weight, but what lies there may not be a number.
      const u32 there[2] = {(pair < left ? 0xFFFFu : 0) | (pair + 1 < left ? 0xFFFF0000u : 0),
                            (pair + 8 < left ? 0xFFFFu : 0) | (pair + 9 < left ? 0xFFFF0000u : 0)};
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int d = part * TILES + t;
        u32 a[4];
        load_transposed(a, at + PART_BYTES + (head * (D / 64) + d / 4) * PAGE * LINE + value_line +
                               ((d % 4 * 2 + lane / 8 % 2) ^ (lane & 7)) * 16);
        if (ends) a[0] &= there[0], a[1] &= there[0], a[2] &= there[1], a[3] &= there[1];
        multiply(state.out[t], a, b0, b1);
      }
      __syncwarp();
      if (lane == 0) here_arrive(empty + 8 * stage);
      if (++stage == stages) stage = 0, round++;
    }
    state.sum[0] = column_sum(state.sum[0]), state.sum[1] = column_sum(state.sum[1]);

    if (begin < first || end > last) {  // a part
      const int from = ((begin + 1) * programs - 1) / all, to = (end * programs - 1) / all;  // programs that have some
      const bool holds = pair < G;
      float4* mine = parts + ((long long)program * WARPS + warp) * PIECE + lane % 4 * 8 + group;
      if (end > last) {
        if (holds) state.leave(mine);
        continue;
      }
      State coming;  // the next part is on its way while one is added
      coming.clear();
      for (int p = from; p < to; p++) {  // in this order: when they came makes no difference
        float4* its_part = mine - (long long)(program - p) * WARPS * PIECE;
        if (p == from && holds) coming.look(its_part);
        for (u32 looks = 0; !__all_sync(~0u, !holds || coming.is_whole());) {
          if (++looks == PATIENCE) asm volatile("trap;");
          if (holds) coming.look(its_part);
        }
        State other = coming;
        if (p + 1 < to && holds) coming.look(its_part + WARPS * PIECE);
        if (holds) State::take_away(its_part);
        state.add(other);
      }
    }
    state.scale(state.sum[0] > 0.f ? 1.f / state.sum[0] : 0.f, state.sum[1] > 0.f ? 1.f / state.sum[1] : 0.f);
    u16* to = out + (long long)row * out_stride + (head * G + group) * D + part * DIMS + pair;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 two = transposed(pack(state.out[t][2 * i], state.out[t][2 * i + 1]));
        if (group < G) *(u32*)(to + 16 * t + 8 * i) = two;
      }
  }
}
