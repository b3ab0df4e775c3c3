// A mixture-of-experts MLP in megakernel.cu. All programs have equally many lines (weight rows) of the router and of
// each expert. All write their logits; from these the loading warp selects each row's experts and loads them, row by
// row.

constexpr int ROUTER_LINES = EXPERTS / PROGRAMS, OF_EXPERT = 2 * INNER / PROGRAMS;  // lines; half of the latter gate's
constexpr int NONE = 0xFFFF;  // no expert
static_assert(EXPERTS % PROGRAMS == 0 && EXPERTS % 32 == 0 && CHOSEN <= 32 && PIECES == 1, "megakernel.py");

// A sort key for bfloat16 logits; among equal ones the first expert wins.
__device__ __forceinline__ u32 key_of(u32 logit, int expert) {
  const u32 bits = logit >> 16, ordered = bits & 0x8000 ? ~bits & 0xFFFF : bits | 0x8000;
  return ordered << 16 | (NONE - expert);
}
__device__ __forceinline__ int expert_of(u32 key) { return NONE - (key & 0xFFFF); }
__device__ __forceinline__ float logit_of(u32 key) {
  const u32 ordered = key >> 16;
  return __uint_as_float((ordered & 0x8000 ? ordered & 0x7FFF : ~ordered & 0xFFFF) << 16);
}

// A lane's part of a row's logits, which all programs write.
struct Logits {
  static constexpr int EACH = EXPERTS / 32;
  u32 keys[EACH];

  __device__ __forceinline__ Logits(const u64* from, u32 flag, int lane) {
    u64 words[EACH];
    u32 looks = 0;
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < EACH; i++) words[i] = look(from + i * 32 + lane), there &= has(words[i], flag);
      be_patient(looks);
    } while (!__all_sync(~0u, there));
#pragma unroll
    for (int i = 0; i < EACH; i++) keys[i] = key_of((u32)words[i], i * 32 + lane);
  }
  // Returns the largest and removes it.
  __device__ __forceinline__ u32 take_best() {
    u32 best = keys[0];
#pragma unroll
    for (int i = 1; i < EACH; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = 0; i < EACH; i++) keys[i] = keys[i] == best ? 0 : keys[i];
    return best;
  }
  // The sum of the exponentials of those that are left.
  __device__ __forceinline__ float sum(float top) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) total += keys[i] ? __expf(logit_of(keys[i]) - top) : 0.f;
    return total;
  }
};

struct MlpLoads {
  Memory& memory;
  const u64* logits;
  int rows;
  u32 first_flag;

  __device__ __forceinline__ MlpLoads(Memory& memory, const u64* words, int rows, u32 first_flag)
      : memory(memory), logits(words + ROWS * QKV_WORDS + blockIdx.x % COPIES * COPY_WORDS + LOGITS), rows(rows),
        first_flag(first_flag) {}

  __device__ __forceinline__ void load(const Layer& its, int layer, Ring& ring, int lane, u64 policy) {
    load_weights<ROUTER_LINES, HIDDEN, HIDDEN_CHUNK>(its.router, ring, lane, policy);
#pragma unroll 1
    for (int row = 0; row < rows; row++) load_gate_up(its, row, layer, ring, lane, policy);
#pragma unroll 1
    for (int row = 0; row < rows; row++)
#pragma unroll 1
      for (int first = 0; first < ADD_LINES; first += 8) {
        const int line = blockIdx.x * ADD_LINES + first + lane;
#pragma unroll 1
        for (int c = 0; c < CHOSEN; c++) {
          const u16* from = its.down + ((u64)memory.experts[row][c] * HIDDEN + line) * INNER;
#pragma unroll 1
          for (int k = 0; k < INNER; k += INNER_CHUNK)
            load_lines<INNER_CHUNK>(from + k, min(ADD_LINES - first, 8), ring, lane, policy);
        }
      }
  }

  // Selects a row's experts, the most probable first, and loads lines of those selected so far. Warps that have a stage
  // of the last expert see what is written here.
  __device__ __forceinline__ void load_gate_up(const Layer& its, int row, int layer, Ring& ring, int lane, u64 policy) {
    Logits its_logits(logits + row * EXPERTS, first_flag + layer, lane);
    float top = 0.f, mine = 0.f;
#pragma unroll 1
    for (int c = 0, first = 0; c < CHOSEN; c++) {
      const u32 best = its_logits.take_best();
      if (c == 0) top = logit_of(best);
      if (c == lane) mine = __expf(logit_of(best) - top), memory.experts[row][c] = expert_of(best);
      const bool last = c == CHOSEN - 1;
      if (last) {
        const float total = warp_sum(mine + (RENORMALIZE ? 0.f : its_logits.sum(top)));
        if (lane < CHOSEN) memory.shares[row][lane] = __fdividef(mine, total);
      }
      __syncwarp();
#pragma unroll 1
      for (; first < GATE_LINES && (last || first + 8 <= (c + 1) * OF_EXPERT); first += 8) {
        const int i = min(first + lane, GATE_LINES - 1), line = i % OF_EXPERT, own = OF_EXPERT / 2;
        const int of_expert = blockIdx.x * own + (line < own ? line : INNER - own + line);
        const int expert = memory.experts[row][min(i / OF_EXPERT, c)];
        const u16* from = its.gate_up + ((u64)expert * 2 * INNER + of_expert) * HIDDEN;
#pragma unroll 1
        for (int k = 0; k < HIDDEN; k += HIDDEN_CHUNK)
          load_lines<HIDDEN_CHUNK>(from + k, min(GATE_LINES - first, 8), ring, lane, policy);
      }
    }
  }
};

// Ends with down's sums in shared memory. The outputs of a row's experts, each scaled by its weight, are one input of
// down.
__device__ __forceinline__ void run_mlp(Memory& memory, Ring& ring, const Layer& its, u64* copies, const u64* its_copy,
                                        float eps, u32 flag, u32 nothing) {
  Batch<Cut<ROUTER_LINES, HIDDEN, HIDDEN_CHUNK>> router;
  router.read(ring, 0, 0, nothing);
  const float square = take<X_WORDS, true, X_WORDS, true>(memory, its_copy + MIDDLE, flag, its.norm);
  multiply_lines(memory, ring, router, nothing);
  leave_squares(memory, square);
  meet();
  int live = 1;  // read here: a load is used before the next arrival
  if (ROWS > 1)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(live) : "r"(shared_address(&memory.live)) : "memory");
  for (int i = threadIdx.x; i < live * ROUTER_LINES; i += THREADS) {
    const int row = i / ROUTER_LINES, line = i % ROUTER_LINES;
    const u32 logit = __float_as_uint(rounded(sum_of(memory, line, row) * factor(memory, row, eps)));
#pragma unroll
    for (int c = 0; c < COPIES; c++)
      leave(copies + c * COPY_WORDS + LOGITS + row * EXPERTS + blockIdx.x * ROUTER_LINES + line, logit, flag);
  }

  // The router's sums are read before these overwrite them: experts load only after all router logits are written.
#pragma unroll 1
  for (int row = 0; row < live; row++) {
    Batch<Cut<GATE_LINES, HIDDEN, HIDDEN_CHUNK>> gate_up;
    gate_up.read(ring, 0, 0, nothing);
    multiply_lines(memory, ring, gate_up, nothing, false, row);
  }
  meet();
  constexpr int OUTPUTS = OF_EXPERT / 2;
  for (int i = threadIdx.x; i < up(ROWS * CHOSEN * OUTPUTS); i += THREADS) {
    const int row = i / (CHOSEN * OUTPUTS), c = i / OUTPUTS % CHOSEN, line = i % OUTPUTS;
    float out = 0.f;
    if (row < live) {
      const float gate = sum_of(memory, c * OF_EXPERT + line, row);
      const float up = sum_of(memory, c * OF_EXPERT + OUTPUTS + line, row);
      out = activated(gate, up, factor(memory, row, eps)) * memory.shares[row][c];
    }
    leave_pair(copies + ACTIVATED + row * INNER_WORDS + (c * INNER + blockIdx.x * OUTPUTS) / 2, line, out, row < ROWS,
               flag);
  }

  Batch<Cut<ADD_LINES, CHOSEN * INNER, INNER_CHUNK>> down;
  down.read(ring, 0, 0, nothing);
  take<INNER_WORDS, false>(memory, its_copy + ACTIVATED, flag);
#pragma unroll 1
  for (int row = 0; row < live; row++) {
    if (row) down.read(ring, 0, 0, nothing);
    multiply_lines(memory, ring, down, nothing, false, row);
  }
  meet();
}
