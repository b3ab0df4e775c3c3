// A product's weights in megakernel.cu, as they are: a stage has so many elements of k of eight lines.

// Of so many elements of k in a stage, where eight lines are in different banks.
__device__ constexpr int line_bytes(int chunk) { return 2 * chunk + 64; }

// Asks for a stage: OF elements of k of so many lines, of each of which a lane knows the place. Lanes that ask one after
// another take 400 cycles, which is too long for stages of 8 KB; of larger ones it keeps programs at the same pace.
template <int OF>
__device__ __forceinline__ void load_lines(const Stored* from, int lines, Ring& ring, int lane, u64 policy) {
  keep_pace<8 * OF * 2>(ring);
  const u32 bar = make_room(ring, lines * OF * 2, lane);
  if constexpr (OF > 512) {
    if (lane < lines) load_bytes(ring.at() + lane * line_bytes(OF), from, OF * 2, bar, policy);
  } else {
    const bool elected = is_elected();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const Stored* its = (const Stored*)__shfl_sync(~0u, (u64)from, i);
      if (elected && i < lines) load_bytes(ring.at() + i * line_bytes(OF), its, OF * 2, bar, policy);
    }
  }
  ring.next();
}
// Asks for LINES lines of a weight, eight at a time, of one piece of k after another; of gate and up a program has half
// of each.
template <int LINES, int K, int OF, bool GATED = false, int PIECES_ = 1>
__device__ __forceinline__ void load_weights(const Stored* weight, Ring& ring, int lane, u64 policy) {
  constexpr int OWN = GATED ? LINES / 2 : LINES, EIGHTS = (LINES + 7) / 8;
  static_assert(K / PIECES_ % OF == 0 && STAGE_BYTES >= 8 * line_bytes(OF), "megakernel.py");
#pragma unroll 1
  for (int unit = 0; unit < PIECES_ * EIGHTS; unit++) {
    const int first = unit % EIGHTS * 8, begin = unit / EIGHTS * (K / PIECES_);
    const int i = first + lane, some = min(LINES - first, 8);
    const int line = blockIdx.x * OWN + (GATED && i >= OWN ? INNER - OWN + i : i);
    const Stored* from = weight + (u64)line * K;
#pragma unroll 1
    for (int k = begin; k < begin + K / PIECES_; k += OF) load_lines<OF>(from + k, some, ring, lane, policy);
  }
}

// A lane's part of a stage: 16 bytes of a line at once, which the tensor cores take as they are. Returns words that all
// that was read has a part in.
template <int OF> __device__ __forceinline__ u32 read_stage(uint4 (&w)[OF / WARPS / 32], u32 stage, bool, u32) {
  const int lane = threadIdx.x % 32;
  const u32 from = stage + lane / 4 * line_bytes(OF) + threadIdx.x / 32 * (OF / WARPS) * 2 + lane % 4 * 16;
  u32 seen = 0;
#pragma unroll
  for (int j = 0; j < OF / WARPS / 32; j++) w[j] = read16(from + 64 * j), seen |= w[j].x;
  return seen;
}
// Where a lane finds its x of 32 of k, 64 bytes: of each eight the first pair, the third, the second and the fourth.
__device__ __forceinline__ int x_of_lane(int lane) { return lane % 4 * 16 + lane / 4 % 2 * 8; }
__device__ __forceinline__ int x_of_four(int at) { return at / 2 * 4 + at % 2; }  // at: in fours; returns words

// Which of the sums of so many lines a program's begin at, and what its lines' sums are multiplied by.
template <int LINES> __device__ __forceinline__ int first_sum() { return 0; }
__device__ __forceinline__ float scale_of(const Memory&, int) { return 1.f; }
struct Scales {
  __device__ __forceinline__ Scales(const Layer&) {}
  __device__ __forceinline__ void put(Memory&) const {}
};
