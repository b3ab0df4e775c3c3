// Float8 (e4m3) in megakernel.cu, if FLOAT8: weights with a scale per line, and inputs that each program converts, with
// a scale per row, as fp8_linear.py's ``quantize`` does. Without FLOAT8 all of this is nothing.
//
// A norm's weight is not folded into the product's, where it would be rounded again: it multiplies the input.

// Starts copying a norm's weights, which are there once x has been taken.
__device__ __forceinline__ void copy_norm(Memory& memory, const u16* from) {
  if constexpr (FLOAT8)
    for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS)
      copy16_later(shared_address(memory.norm) + 16 * i, from + 8 * i);
}

__device__ __forceinline__ float largest_of(const float (&four)[4]) {
  return fmaxf(fmaxf(fabsf(four[0]), fabsf(four[1])), fmaxf(fabsf(four[2]), fabsf(four[3])));
}
// The ``at``-th four elements that have been taken of this thread's row, times the norm's weights, if there is one.
template <bool NORMED> __device__ __forceinline__ void get_four(float (&four)[4], const Memory& memory, int at) {
  const uint2 x = *((const uint2*)memory.taken[threadIdx.x / TEAM] + at);
  four[0] = low(x.x), four[1] = high(x.x), four[2] = low(x.y), four[3] = high(x.y);
  if constexpr (NORMED) {
    const uint2 by = *((const uint2*)memory.norm + at);
    four[0] *= low(by.x), four[1] *= high(by.x), four[2] *= low(by.y), four[3] *= high(by.y);
  }
}

// Converts the K elements of each row that stand in memory as bfloat16, each thread those that it has put there. All
// threads must have synchronized since x was last read; they do at the end.
template <int K, bool NORMED = false> __device__ __forceinline__ void to_float8(Memory& memory) {
  if constexpr (!FLOAT8) return;
  constexpr int FOURS = K / 4, EACH = (FOURS + TEAM - 1) / TEAM, TEAM_WARPS = TEAM / 32;
  const int first = threadIdx.x % TEAM, row = threadIdx.x / TEAM;
  float top = 1e-12f;  // so that no scale is zero
#pragma unroll 4  // more takes registers
  for (int i = 0; i < EACH; i++)
    if (const int at = first + i * TEAM; at < FOURS) {
      float four[4];
      get_four<NORMED>(four, memory, at);
      top = fmaxf(top, largest_of(four));
    }
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
      float four[4];
      get_four<NORMED>(four, memory, at);
      // Of each four words the order is 0, 2, 1, 3, as x_of_lane wants it.
      ((u32*)memory.x[row])[at & ~3 | (at & 1) << 1 | at >> 1 & 1] =
          float8_pair(four[0] * by, four[1] * by) | float8_pair(four[2] * by, four[3] * by) << 16;
    }
  meet();
}
