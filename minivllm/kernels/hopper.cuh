// Shared by all Hopper kernels: mbarriers, clusters, TMA loads, wgmma tile descriptors, bfloat16 pairs, arithmetic,
// exchange through memory, and the epilogue of a projection of heads. hopper.py prepends it to each.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap { unsigned char bytes[128]; };

constexpr int LINE = 128;  // bytes of k per stage, 64 elements: TMA's swizzle width
constexpr u32 PATIENCE = 1 << 27;  // polls of another program's writes, about a minute; then a trap instead of a hang

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni out;\nbra.uni again;\nout:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ u32 in_cluster(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ void here_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar, u32 rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_cluster(bar, rank)) : "memory");
}
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int k, int row, u32 bar, int sharing,
                                          u16 ranks) {
  if (sharing == 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
        "r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"(ranks) : "memory");
}
// The same for data that is read once, by one program: first to be evicted from L2.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void load_tile_once(u32 to, const TensorMap* map, int k, int row, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "l"(policy) : "memory");
}
// Copies contiguous bytes, a multiple of 16.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, int bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
      "r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
// wgmma's descriptor of a tile of 128-byte lines, swizzled by TMA in groups of 8 lines (1,024 bytes). If a product
// reduces over the lines, ``leading`` is the distance to each line's next 64 elements, in units of 16 bytes.
__device__ __forceinline__ u64 matrix(u32 address, u32 leading = 1) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)leading << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}
__device__ __forceinline__ void read4(float (&d)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(from));
}
__device__ __forceinline__ uint4 read16(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from)
               : "memory");
  return x;
}
// Copies 16 bytes to shared memory; they are there for this thread after ``wait_for_copies``.
__device__ __forceinline__ void copy16_later(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void write16(u32 to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Loads 64 columns of a page, or as many as the map's box has, starting at the ``column``-th 64.
__device__ __forceinline__ void load_page(u32 to, const TensorMap* map, int column, int page, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4, %5}], [%2];" ::
      "r"(to), "l"(map), "r"(bar), "r"(0), "r"(column), "r"(page) : "memory");
}
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 scaled(u32 pair, float factor) { return pack(low(pair) * factor, high(pair) * factor); }
__device__ __forceinline__ u32 product(u32 pair, u32 other) {
  u32 y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(other));
  return y;
}
__device__ __forceinline__ u32 normed(u32 pair, float factor, u32 weight) {
  return product(scaled(pair, factor), weight);
}
__device__ __forceinline__ float square_of(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}
// One MMA tile: 16 rows by 16 of k, times 16 of k by eight columns.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
               " {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same for float8 (e4m3): 32 of k, four to a word.
__device__ __forceinline__ void multiply_float8(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
               " {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same for float16.
__device__ __forceinline__ void multiply_halves(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
               " {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Rounded to e4m3, at most 448.
__device__ __forceinline__ u32 float8_pair(float a, float b) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}
__device__ __forceinline__ u32 float8_four(u32 pair, u32 other) {  // from bfloat16
  return float8_pair(low(pair), high(pair)) | float8_pair(low(other), high(other)) << 16;
}
__device__ __forceinline__ u32 half_pair(float a, float b) {  // in float16, at most 65,504
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}
// Four numbers of e4m3 as two pairs in float16, which has them all.
__device__ __forceinline__ void halves(u32 four, u32& first, u32& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second) : "r"(four));
}

// Programs exchange numbers through memory. Each word tells whether it is there: ABSENT, a NaN with its sign bit set,
// is no result of arithmetic.
constexpr u32 ABSENT = 0xFFFFFFFF;
__device__ __forceinline__ bool is_there(float x) { return __float_as_uint(x) != ABSENT; }
__device__ __forceinline__ void leave_four(float4* to, float a, float b, float c, float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void look_at_four(const float4* from, float& a, float& b, float& c, float& d) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(from) : "memory");
}
__device__ __forceinline__ void take_away_four(float4* from) {
  const float absent = __uint_as_float(ABSENT);
  leave_four(from, absent, absent, absent, absent);
}

struct Heads {  // the epilogue of a projection of heads; strides in elements
  const float* angles;                   // (positions, HEAD) cosines of half a head's dimensions, then sines
  const long long *positions, *slots;    // (rows,)
  u16 *keys, *values;                    // (blocks, block_size, key heads, HEAD)
  const u16 *query_norm, *key_norm;      // (HEAD,), or null: no norm
  u16* kept;                             // (rows, 2 * key heads, HEAD): another copy of keys and values, or null
  long long angles_stride, block_stride, slot_stride, head_stride;
  int queries, keys_each, block_size;    // query heads, key heads
  float eps;
};
