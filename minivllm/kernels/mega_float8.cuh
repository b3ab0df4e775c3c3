// Float8 (e4m3) in megakernel.cu, if FLOAT8: weights with a scale per line, and inputs that each program converts, with
// a scale per row, as fp8_linear.py's ``quantize`` does. Without FLOAT8 all of this is nothing.
//
// A norm's weight is not folded into the product's, where it would be rounded again: it multiplies the input.

// Starts copying a norm's weights; ``norm_is_there`` waits for them.
__device__ __forceinline__ void copy_norm(Memory& memory, const u16* from) {
  if constexpr (FLOAT8)
    for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS)
      copy16_later(shared_address(memory.norm) + 16 * i, from + 8 * i);
}
__device__ __forceinline__ void norm_is_there() {
  if constexpr (FLOAT8) wait_for_copies(), meet();
}

// Four elements of x, times the norm's weights, if there is one; they are the ``at``-th of a row.
template <bool NORMED> __device__ __forceinline__ float4 four_of(const Memory& memory, int at, u32 front, u32 back) {
  float4 four = make_float4(low(front), high(front), low(back), high(back));
  if constexpr (NORMED) {
    const uint2 by = *((const uint2*)memory.norm + at);
    four.x *= low(by.x), four.y *= high(by.x), four.z *= low(by.y), four.w *= high(by.y);
  }
  return four;
}
// What a thread has found among the elements that it took: their sum of squares, if asked for, and, if FLOAT8, the
// largest.
struct Found {
  float square = 0.f, top = 1e-12f;  // so that no scale is zero

  template <bool NORMED> __device__ __forceinline__ void note(const Memory& memory, int at, u32 front, u32 back) {
    if constexpr (FLOAT8) {
      const float4 four = four_of<NORMED>(memory, at, front, back);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w))));
    }
  }
};

// Converts the K elements of each row that have been taken, each thread its own. All threads must have synchronized
// since x was last read; they do at the end.
template <int K, bool NORMED = false> __device__ __forceinline__ void to_float8(Memory& memory, float top) {
  if constexpr (!FLOAT8) return;
  constexpr int FOURS = K / 4, EACH = (FOURS + TEAM - 1) / TEAM, TEAM_WARPS = TEAM / 32;
  const int first = threadIdx.x % TEAM, row = threadIdx.x / TEAM;
#pragma unroll
  for (int other = 1; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
  if (threadIdx.x % 32 == 0) memory.largest[threadIdx.x / 32] = top;
  meet();
#pragma unroll
  for (int w = 0; w < TEAM_WARPS; w++) top = fmaxf(top, memory.largest[row * TEAM_WARPS + w]);
  if (first == 0) memory.x_scales[row] = top / LARGEST;
  const float by = LARGEST / top;
#pragma unroll 4  // more takes registers
  for (int i = 0; i < EACH; i++)
    if (const int at = first + i * TEAM; at < FOURS) {
      const uint2 x = *((const uint2*)memory.taken[row] + at);
      const float4 four = four_of<NORMED>(memory, at, x.x, x.y);
      // Of each four words the order is 0, 2, 1, 3, as x_of_lane wants it.
      ((u32*)memory.x[row])[at & ~3 | (at & 1) << 1 | at >> 1 & 1] =
          float8_pair(four.x * by, four.y * by) | float8_pair(four.z * by, four.w * by) << 16;
    }
  meet();
}
