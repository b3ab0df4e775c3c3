// A dense MLP in megakernel.cu: loads weights, computes gate and up, then down.

struct MlpLoads {
  __device__ __forceinline__ MlpLoads(Memory&, const u64*, int, u32) {}
  __device__ __forceinline__ void load(const Layer& its, int, Ring& ring, int lane, u64 policy) {
    load_weights<GATE_LINES, HIDDEN, HIDDEN_CHUNK, true>(its.gate_up, ring, lane, policy);
    load_weights<ADD_LINES, INNER, INNER_CHUNK, false, PIECES>(its.down, ring, lane, policy);
  }
};

// Ends with down's sums in shared memory.
__device__ __forceinline__ void run_mlp(Memory& memory, Ring& ring, const Layer& its, u64* copies, const u64* its_copy,
                                        float eps, u32 flag, u32 nothing) {
  copy_norm(memory, its.norm);
  Batch<Cut<GATE_SUMS, HIDDEN, HIDDEN_CHUNK>> gate_up;
  gate_up.read(ring, 0, 0, nothing);
  const float square = take<X_WORDS, true>(memory, its_copy + MIDDLE, flag);
  to_float8<HIDDEN, true>(memory);
  multiply_lines(memory, ring, gate_up, nothing);
  leave_squares(memory, square);
  meet();
  constexpr int OUTPUTS = GATE_LINES / 2;
  for (int i = threadIdx.x; i < up(ROWS * OUTPUTS); i += THREADS) {
    const int row = i / OUTPUTS, line = i % OUTPUTS;
    float out = 0.f;
    if (row < ROWS)
      out = activated(output<OUTPUTS, GATE_SCALES>(memory, line, row),
                      output<OUTPUTS, UP_SCALES, UP_AT>(memory, line, row), factor(memory, row, eps));
    leave_pair(copies + ACTIVATED + row * INNER_WORDS + blockIdx.x * OUTPUTS / 2, line, out, row < ROWS, flag);
  }

  Batch<Cut<ADD_LINES, PIECE, INNER_CHUNK>> down;
  const u64* parts = its_copy + ACTIVATED;
#pragma unroll 1
  for (int piece = 0; piece < PIECES; piece++, parts += PIECE / 2) {
    down.read(ring, 0, 0, nothing);
    if (piece) meet();  // all threads are done with the previous piece
    take<PIECE / 2, false, INNER_WORDS>(memory, parts, flag);
    to_float8<INNER>(memory);
    multiply_lines(memory, ring, down, nothing, piece);
  }
  meet();
}
