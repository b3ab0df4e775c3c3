// Packs a weight as packed_weights.py says, whose torch code writes the same bytes. A program has a unit, 128 lines by
// 128 of k; a thread of it what it has of the unit where that is multiplied: 16 pairs of each of two tiles.
//
// Compiled for any shape, behind hopper.cuh.

constexpr int WARPS = 8, TILES = 4, WORD_BYTES = 2048, TILE_BYTES = 3 * WORD_BYTES, TAIL_WORDS = MOST_EXCEPTIONS + 2;

__device__ __forceinline__ bool inside(u32 bits, int base) { return (bits >> 7 & 255) - base < WINDOW; }
__device__ __forceinline__ u32 code(u32 bits, int base) {
  return inside(bits, base) ? bits & 0x807F | (bits >> 7 & 255) - base << 7 : 0;
}
// The exponent of what is multiplied by the power of two that all are; the bits of that.
__device__ __forceinline__ int moved_exponent(u32 bits, int base) { return (bits >> 7 & 255) - base + FIRST_EXPONENT; }
__device__ __forceinline__ u32 moved(u32 bits, int base) {
  return (bits & 0x7FFF) == 0 ? bits : bits & 0x807F | moved_exponent(bits, base) << 7;
}
__device__ __forceinline__ bool is_odd(u32 bits) {  // denormal, infinite, or no number: no exponent to be moved
  return (bits & 0x7F80) == 0x7F80 || ((bits & 0x7F80) == 0 && (bits & 0x7F));
}
// Whether it is not as exact times that power.
__device__ __forceinline__ bool is_lost(u32 bits, int base) {
  if (is_odd(bits)) return (bits & 0x7F80) == 0 && base > FIRST_EXPONENT;
  const int exponent = moved_exponent(bits, base);
  return (bits & 0x7FFF) && (exponent < 1 || exponent > 254);
}

// weight (lines, k); data (units, UNIT_BYTES); base: the first exponent. told: to its first number is added how many
// units are raw, its second becomes 1 if something is lost.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
pack_weights(const u16* weight, unsigned char* data, const long long* base_at, u32* told, int lines, int k, int gated) {
  __shared__ u32 tail[TAIL_WORDS];
  __shared__ u32 of_warps[WARPS];  // exceptions of the first tile, and of the second in the upper half
  __shared__ bool has_odd;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = warp / 4, base = (int)*base_at;
  const int block = blockIdx.x / (k / 128), step = blockIdx.x % (k / 128);
  const int line = (gated ? block * 64 + warp * 8 : block * 128 + warp * 16) + lane / 4;
  const int apart = gated ? lines / 2 : 8;  // lines from a register's to the next one's
  const u16* from = weight + (u64)line * k + step * 128 + lane % 4 * 2;
  unsigned char* unit = data + (u64)blockIdx.x * UNIT_BYTES;
  if (thread < TAIL_WORDS) tail[thread] = 0;
  if (thread == 0) has_odd = false;
  __syncthreads();

  u32 pairs[2][16], outside[2] = {0, 0};
#pragma unroll
  for (int t = 0; t < 2; t++) {
    u32 words[3][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 codes[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const u32 pair = *(const u32*)(from + (u64)(r % 2 * apart) * k + t * 64 + i * 16 + r / 2 * 8);
        outside[t] += !inside(pair & 0xFFFF, base) + !inside(pair >> 16, base);
        codes[r] = code(pair & 0xFFFF, base) | code(pair >> 16, base) << 16;
        pairs[t][4 * i + r] = pair;
      }
      words[0][i] = codes[0] | codes[3] << 4 & 0x78007800;
      words[1][i] = codes[1] | codes[3] << 8 & 0x78007800;
      words[2][i] = codes[2] | codes[3] << 11 & 0x38003800 | codes[3] >> 1 & 0x40004000;
    }
#pragma unroll
    for (int w = 0; w < 3; w++)
      *(uint4*)(unit + (group * 2 + t) * TILE_BYTES + w * WORD_BYTES + thread % 128 * 16) =
          uint4{words[w][0], words[w][1], words[w][2], words[w][3]};
  }

  u32 until = outside[0] | outside[1] << 16;  // this lane's, of its warp's
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u32 others = __shfl_sync(~0u, until, lane - by & 31);
    if (lane >= by) until += others;
  }
  if (lane == 31) of_warps[warp] = until;
  __syncthreads();
  int begin = 0;
  for (int w = 0; w < warp; w++) begin += (of_warps[w] & 0xFFFF) + (of_warps[w] >> 16);
  const int first = of_warps[warp] & 0xFFFF, end = begin + first + (of_warps[warp] >> 16);
  if (lane == 0) ((unsigned char*)tail)[warp] = min(end, MOST_EXCEPTIONS);
  bool lost = false;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    int place = t ? begin + first + (until >> 16) - outside[1] : begin + (until & 0xFFFF) - outside[0];
    if (outside[t] == 0) continue;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const u32 bits = pairs[t][i / 2] >> i % 2 * 16 & 0xFFFF;
      if (inside(bits, base)) continue;
      lost |= is_lost(bits, base);
      if (is_odd(bits)) has_odd = true;
      const u32 entry = moved(bits, base) << 16 | i % 2 << 10 | t << 9 | i / 2 << 5 | lane;
      if (place < MOST_EXCEPTIONS) tail[2 + place] = entry;
      place++;
    }
  }
  if (lost) told[1] = 1;
  __syncthreads();
  int all = 0;
  for (int w = 0; w < WARPS; w++) all += (of_warps[w] & 0xFFFF) + (of_warps[w] >> 16);
  const bool raw = all > MOST_EXCEPTIONS || has_odd;
  if (raw && thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(told) : "memory");
  if (thread < TAIL_WORDS)
    ((u32*)(unit + TILES * TILE_BYTES))[thread] = !raw ? tail[thread] : thread < WARPS / 4 ? RAW_ENDS : 0;
}
