// Runs a kernel in CUDA C++ on the CPU, for emulator.py: each of its threads is a coroutine, all of one thread here.
// Programs go on in another order each time, and some sleep a while. What a warp does together waits for its 32 lanes;
// copies by TMA land some time later; a run that comes to a standstill says who waits for what. Memory is in order, as
// it is not on a GPU: a fence that is missing is not found. Kernels of several GPUs run beside each other.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
using std::max;
using std::min;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return (*at += x) - x; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned how) {
  const uint64_t all = (uint64_t)b << 32 | a;
  unsigned y = 0;
  for (int i = 0; i < 4; i++) y |= (unsigned)(all >> 8 * (how >> 4 * i & 7) & 255) << 8 * i;
  return y;
}

namespace emulated {
constexpr size_t STACK = 128 << 10, DYNAMIC = 232 << 10, FIXED = 4 << 10, SHARED = DYNAMIC + 4 * FIXED;
constexpr unsigned CLUSTER = 2, RANK = 1 << 20;  // programs of a cluster; in addresses of another's memory
struct Barrier { unsigned count, left; int bytes; unsigned phase; };  // an mbarrier; stands beside shared memory
struct Copy { int program; unsigned to, bar; std::vector<unsigned char> bytes; };
struct Warp {
  uint64_t words[2][32][6];
  float sums[2][16][8];     // of a product of these words,
  unsigned made[2] = {};    // which so many lanes have taken
  unsigned arrived = 0, number = 0;
};
struct Named { unsigned arrived = 0, number = 0; };
struct Product {  // of a warpgroup: this thread's sums, and where the matrices are; the first may be in registers
  std::vector<float*> sums;
  std::vector<unsigned> held;
  std::vector<const unsigned*> where;  // registers that are read when the product is made
  std::vector<unsigned long long> tiles;
  bool adds, columns = false;  // of registers by a matrix whose lines are columns of the product
  float (*of)(unsigned);       // what 16 bits mean
};
struct Program {
  unsigned char* shared;
  std::vector<Barrier> barriers = std::vector<Barrier>(SHARED / 8);
  std::vector<Warp> warps;
  Named named[20];    // 16, and one of each warpgroup
  Named cluster;      // of its first program
  unsigned left = 0;  // threads that are not done
};
struct Dim { unsigned x, y = 0, z = 0; };
struct Thread {
  ucontext_t entry;  // for its first turn; from then on jumps, as switching contexts asks the kernel for signals each time
  jmp_buf place;
  bool begun = false;
  Dim thread, block;
  unsigned rank, program;  // of which GPU, and which of all GPUs' programs
  bool done = false;
  const char* waits = "";
  const unsigned* watched = nullptr;  // it need not go on before this is another number than it was
  unsigned seen;
  std::vector<std::vector<Product>> products{1};  // the last group is not yet committed
  std::vector<std::pair<unsigned, const void*>> later;  // where copies go, from where
};
inline std::vector<Program> programs;
inline std::vector<Thread> threads;
inline std::vector<Copy> copies;
inline jmp_buf scheduler;
inline Thread* now;
inline std::mt19937 random;
inline unsigned gpus = 1;
inline unsigned long progress;  // of anybody
inline std::string wrong;       // what ends the run

inline Program& program() { return programs[now->program]; }
inline Warp& warp() { return program().warps[now->thread.x / 32]; }
inline unsigned lane() { return now->thread.x % 32; }
inline void yield(const char* waits) {
  now->waits = waits;
  if (!_setjmp(now->place)) _longjmp(scheduler, 1);
}
inline void watch(const unsigned& number, const char* waits) {
  now->watched = &number, now->seen = number;
  yield(waits);
  now->watched = nullptr;
}
inline void come_late() {  // with what others see, so that it comes in any order
  while (random() % 2) yield("its turn");
}
inline std::string name_of(const Thread& its) {
  const std::string gpu = gpus > 1 ? "GPU " + std::to_string(its.rank) + ", " : "";
  return gpu + "program " + std::to_string(its.block.x) + ", warp " + std::to_string(its.thread.x / 32);
}
[[noreturn]] inline void fail(const std::string& why) {
  wrong = name_of(*now) + ": " + why;
  for (;;) yield("nothing more");
}
// Leaves this lane's words and waits until all 32 have: two buffers, so that nobody overtakes by more than one.
inline const uint64_t (*exchange(std::initializer_list<uint64_t> mine))[6] {
  Warp& its = warp();
  const unsigned number = its.number;
  std::copy(mine.begin(), mine.end(), its.words[number % 2][lane()]);
  if (++its.arrived == 32)
    its.arrived = 0, its.number++, progress++;
  else
    while (its.number == number) watch(its.number, "its warp");
  return its.words[number % 2];
}
inline bool come(Named& its, unsigned count) {  // the last of them?
  if (++its.arrived < count) return false;
  its.arrived = 0, its.number++, progress++;
  return true;
}
inline void meet(int which, unsigned count) {
  Named& its = program().named[which];
  const unsigned number = its.number;
  if (!come(its, count))
    while (its.number == number) watch(its.number, "its program");
}
inline Barrier& barrier(unsigned at) {
  if (at % 8 || at >= SHARED) fail("no barrier stands there");
  return program().barriers[at / 8];
}
inline void turn(Barrier& its) {
  if (its.left || its.bytes) return;
  its.left = its.count, its.phase++, progress++;
}
inline unsigned char* shared(unsigned at, size_t size) {
  if (at % size || at + size > SHARED) fail("an address in shared memory that is not, or not aligned");
  return program().shared + at;
}
template <class T> T& fixed(int which) {  // of a program's variables in shared memory
  return *(T*)(program().shared + DYNAMIC + which * FIXED);
}
// A copy to a program's shared memory, for ``land`` some time later.
inline void send(unsigned to, unsigned bar, std::vector<unsigned char> bytes, unsigned program = now->program) {
  if (to % 16 || to + bytes.size() > SHARED) fail("a copy to where shared memory is not, or not aligned");
  if (!programs[program].left) fail("a copy to a program that is gone");
  copies.push_back({(int)program, to, bar, std::move(bytes)});
}
inline void land(size_t which) {
  Copy copy = std::move(copies[which]);
  copies[which] = std::move(copies.back()), copies.pop_back();
  Program& its = programs[copy.program];
  memcpy(its.shared + copy.to, copy.bytes.data(), copy.bytes.size());
  Barrier& bar = its.barriers[copy.bar / 8];
  bar.bytes -= (int)copy.bytes.size();
  turn(bar);
}
inline void resume(Thread& its) {
  now = &its;
  if (_setjmp(scheduler)) return;
  if (its.begun) _longjmp(its.place, 1);
  its.begun = true;
  setcontext(&its.entry);
}
// One launch on each of so many GPUs, of ``each`` programs. Returns what went wrong, or nothing.
template <class F> const char* run(unsigned many, unsigned each, unsigned block, unsigned seed, F kernel) {
  const unsigned number = many * each;
  gpus = many;
  static F* body;
  body = &kernel;
  random.seed(seed);
  programs.assign(number, {}), threads.assign(number * block, {}), copies.clear(), wrong.clear();
  const auto mapped = [](size_t size) {
    return (unsigned char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  unsigned char *memory = mapped(number * SHARED), *stacks = mapped(threads.size() * STACK);
  memset(memory, 0xFF, number * SHARED);  // NaN
  for (unsigned p = 0; p < number; p++)
    programs[p].shared = memory + p * SHARED, programs[p].warps.resize(block / 32), programs[p].left = block;
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& its = threads[i];
    its.program = i / block, its.rank = its.program / each;
    its.block.x = its.program % each, its.thread.x = i % block;
    getcontext(&its.entry);
    its.entry.uc_stack.ss_sp = stacks + i * STACK, its.entry.uc_stack.ss_size = STACK;
    makecontext(&its.entry, (void (*)()) + [] {
      (*body)(now->rank), now->done = true, program().left--, progress++;
      _longjmp(scheduler, 1);
    }, 0);
  }
  std::vector<unsigned> order(number), asleep(number);
  std::iota(order.begin(), order.end(), 0);
  unsigned long before = ~0ul, still = 0;
  const auto is_done = [](const Thread& its) { return its.done; };
  while (wrong.empty() && !std::all_of(threads.begin(), threads.end(), is_done)) {
    std::shuffle(order.begin(), order.end(), random);
    for (const unsigned p : order)
      if (asleep[p])
        asleep[p]--;
      else if (random() % 64 == 0)
        asleep[p] = random() % 48;
      else
        for (unsigned t = 0; t < block && wrong.empty(); t++)
          if (Thread& its = threads[p * block + t]; !its.done && !(its.watched && *its.watched == its.seen)) resume(its);
    for (size_t c = copies.size(); c-- > 0;)
      if (random() % 3 == 0) land(c);
    still = progress == before && copies.empty() ? still + 1 : 0, before = progress;
    if (still > 500) {
      std::map<std::string, int> waiting;  // the first of each kind is told
      for (const Thread& its : threads)
        if (!its.done && ++waiting[its.waits] == 1)
          wrong += name_of(its) + " waits for " + its.waits + "\n";
    }
  }
  munmap(memory, number * SHARED), munmap(stacks, threads.size() * STACK);
  return wrong.c_str();
}
}  // namespace emulated

#define threadIdx (emulated::now->thread)
#define blockIdx (emulated::now->block)
#define gridDim (emulated::Dim{(unsigned)emulated::programs.size() / emulated::gpus})
inline void __syncthreads() { emulated::meet(0, 32 * emulated::program().warps.size()); }
inline void __syncwarp() { emulated::exchange({}); }
inline bool __all_sync(unsigned, bool yes) {
  auto* all = emulated::exchange({yes});
  for (int i = 0; i < 32; i++) yes &= all[i][0];
  return yes;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  auto* all = emulated::exchange({x});
  for (int i = 0; i < 32; i++) x = std::max(x, (unsigned)all[i][0]);
  return x;
}
template <class T> T from_lane(T x, int lane) {
  uint64_t word = 0;
  memcpy(&word, &x, sizeof x);
  auto* all = emulated::exchange({word});
  memcpy(&x, all[lane], sizeof x);
  return x;
}
template <class T> T __shfl_sync(unsigned, T x, int lane) { return from_lane(x, lane % 32); }
template <class T> T __shfl_xor_sync(unsigned, T x, int other) { return from_lane(x, emulated::lane() ^ other); }
template <class T> T __shfl_down_sync(unsigned, T x, int by) {
  const unsigned from = emulated::lane() + by;
  return from_lane(x, from < 32 ? from : emulated::lane());
}
inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - emulated::program().shared; }

namespace ptx {  // named by their instructions; outputs first
using emulated::barrier, emulated::shared;
inline void mbarrier_init(unsigned bar, unsigned count) { barrier(bar) = {count, count, 0, 0}; }
inline void mbarrier_arrive_expect_tx(unsigned bar, unsigned bytes) {
  auto& its = barrier(bar);
  its.bytes += bytes, its.left--;
  emulated::turn(its);
}
inline void mbarrier_arrive(unsigned bar) {
  auto& its = barrier(bar);
  if (its.left-- == 0) emulated::fail("more arrivals than a barrier waits for");
  emulated::turn(its);
}
inline unsigned of_cluster(unsigned rank) { return emulated::now->program & ~(emulated::CLUSTER - 1) | rank; }
inline void mapa(unsigned& there, unsigned address, unsigned rank) { there = (rank + 1) * emulated::RANK + address; }
inline void mbarrier_arrive_there(unsigned bar) {
  emulated::come_late();
  auto& its = emulated::programs[of_cluster(bar / emulated::RANK - 1)];
  if (!its.left) emulated::fail("an arrival at a program that is gone");
  auto& there = its.barriers[bar % emulated::RANK / 8];
  if (there.left-- == 0) emulated::fail("more arrivals than a barrier waits for");
  emulated::turn(there);
}
inline void barrier_cluster() {  // of all threads that are not done
  auto& its = emulated::programs[of_cluster(0)].cluster;
  const unsigned number = its.number;
  its.arrived++;
  while (its.number == number) {
    unsigned left = 0;
    for (unsigned p = 0; p < emulated::CLUSTER; p++) left += emulated::programs[of_cluster(p)].left;
    if (its.arrived >= left)
      its.arrived = 0, its.number++, emulated::progress++;
    else
      emulated::yield("its cluster");
  }
}
inline void mbarrier_try_wait(unsigned bar, unsigned parity) {
  while ((barrier(bar).phase & 1) == parity) emulated::watch(barrier(bar).phase, "a barrier");
}
inline void mbarrier_test_wait(unsigned& done, unsigned bar, unsigned parity) {
  emulated::yield("a barrier, or not");
  done = (barrier(bar).phase & 1) != parity;
}
inline void clock(unsigned& now) { now = emulated::progress; }
inline void cp_async_bulk(unsigned to, const void* from, int size, unsigned bar, unsigned long long = 0) {
  auto* bytes = (const unsigned char*)from;
  emulated::send(to, bar, {bytes, bytes + size});
}
struct Matrix { const unsigned char* pointer; long long rows, columns, stride, box_rows, box_columns; };  // or this
inline std::vector<unsigned char> box(unsigned to, const void* map, int column, int row) {
  Matrix its;
  memcpy(&its, map, sizeof its);
  if (to % 1024 || its.box_columns != 64) emulated::fail("a tile is lines of 128 bytes, which are swizzled");
  std::vector<unsigned char> bytes(its.box_rows * 128);
  for (int line = 0; line < its.box_rows && row + line < its.rows; line++)
    for (int i = 0; i < 64 && column + i < its.columns; i++)
      memcpy(&bytes[line * 128 + (i / 8 ^ (line & 7)) * 16 + i % 8 * 2],
             its.pointer + ((row + line) * its.stride + column + i) * 2, 2);
  return bytes;
}
inline void cp_async_bulk_tensor_2d(unsigned to, const void* map, unsigned bar, int column, int row) {
  emulated::send(to, bar, box(to, map, column, row));
}
inline void cp_async_bulk_tensor_2d(unsigned to, const void* map, unsigned bar, int column, int row, unsigned ranks) {
  for (unsigned p = 0; p < emulated::CLUSTER; p++)
    if (ranks >> p & 1) emulated::send(to, bar, box(to, map, column, row), of_cluster(p));
}
struct Pages { const unsigned char* pointer; long long size, width, columns, plain; };  // what stands in a TensorMap here
inline void cp_async_bulk_tensor_4d(unsigned to, const void* map, unsigned bar, int zero, int column, int page) {
  Pages its;
  memcpy(&its, map, sizeof its);
  if (zero || to % (its.plain ? 128 : 1024)) emulated::fail("a page is brought whole, to where 128 bytes are swizzled");
  std::vector<unsigned char> bytes(its.size * its.columns * 2);
  for (int line = 0; its.plain && line < its.size; line++)
    memcpy(&bytes[line * its.columns * 2], its.pointer + ((page * its.size + line) * its.width + column * its.columns) * 2,
           its.columns * 2);
  if (its.plain) return emulated::send(to, bar, std::move(bytes));
  for (int c = 0; c < its.columns / 64; c++)
    for (int line = 0; line < its.size; line++)
      for (int unit = 0; unit < 8; unit++)
        memcpy(&bytes[(c * its.size + line) * 128 + (unit ^ (line & 7)) * 16],
               its.pointer + ((page * its.size + line) * its.width + (column + c) * 64 + unit * 8) * 2, 16);
  emulated::send(to, bar, std::move(bytes));
}
struct HeadsOfTokens { const unsigned char* pointer; long long tokens, heads, dim, stride, box_heads, box_tokens; };
inline void cp_async_bulk_tensor_4d(unsigned to, const void* map, unsigned bar, int zero, int head, int token,
                                    int half) {
  HeadsOfTokens its;
  memcpy(&its, map, sizeof its);
  if (zero || to % 1024 || (half + 1) * 64 > its.dim) emulated::fail("a box is lines of 128 bytes, which are swizzled");
  std::vector<unsigned char> bytes(its.box_tokens * its.box_heads * 128);
  for (int line = 0; line < its.box_tokens * its.box_heads; line++) {
    const long long t = token + line / its.box_heads, h = head + line % its.box_heads;
    if (t >= its.tokens || h >= its.heads) continue;
    for (int unit = 0; unit < 8; unit++)
      memcpy(&bytes[line * 128 + (unit ^ (line & 7)) * 16],
             its.pointer + (t * its.stride + h * its.dim + half * 64 + unit * 8) * 2, 16);
  }
  emulated::send(to, bar, std::move(bytes));
}
inline void elect_sync(unsigned& yes) { yes = emulated::lane() == 0; }
inline void createpolicy(unsigned long long& policy) { policy = 0; }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void atom_add(unsigned& before, unsigned* count, unsigned more) {
  emulated::yield("its turn to count");
  before = *count, *count += more;
}
inline void atom_inc(unsigned& before, unsigned* count, unsigned most) {
  emulated::yield("its turn to count");
  before = *count, *count = before >= most ? 0 : before + 1;
}
inline void red_add_one(unsigned* count) {
  emulated::come_late();
  ++*count, emulated::progress++;
}
inline void ld_acquire(unsigned& x, const unsigned* from) {
  x = *from;
  emulated::yield("a count");
}
inline void trap() { emulated::fail("waited for a word too long"); }
template <class... T> void nothing(T&...) {}  // a value that the compiler is not to know
[[noreturn]] inline void unknown(const char* code) { emulated::fail(std::string("not emulated: ") + code); }
inline void bar_sync(int threads) { emulated::meet(1, threads); }
inline void bar_sync_of(int which, int threads) { emulated::meet(which, threads); }
inline void bar_arrive(int which, int threads) { emulated::come(emulated::program().named[which], threads); }
inline void setmaxnreg(int = 0) {}
inline void st_relaxed(unsigned long long* to, unsigned long long x) {
  emulated::come_late();
  *to = x, emulated::progress++;
}
inline void ld_relaxed(unsigned long long& x, const unsigned long long* from) {
  x = *from;
  emulated::yield("a word");
}
inline void ld_relaxed(unsigned long long& x, unsigned long long& y, const unsigned long long* from) {
  if ((size_t)from % 16) emulated::fail("two words that are not aligned");
  x = from[0], y = from[1];
  emulated::yield("two words");
}
inline void st_relaxed(float4* to, float x, float y, float z, float w) {
  emulated::come_late();
  *to = {x, y, z, w}, emulated::progress++;
}
inline void ld_relaxed(float& x, float& y, float& z, float& w, const float4* from) {
  x = from->x, y = from->y, z = from->z, w = from->w;
  emulated::yield("four words");
}
inline void add(unsigned& x, unsigned more) { x += more; }
inline void ld_global(unsigned& x, const void* from) { x = *(const unsigned*)from; }
template <class T> void ld_shared(T& x, unsigned from) { x = *(const T*)shared(from, sizeof x); }
inline void st_shared(unsigned to, unsigned x) { *(unsigned*)shared(to, 4) = x; }
inline void st_shared(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w) {
  auto* at = (unsigned*)shared(to, 16);
  at[0] = x, at[1] = y, at[2] = z, at[3] = w;
}
// Matrices of 8 x 8: lanes 8 * m to 8 * m + 7 say where the rows of the m-th are; a lane gets two elements of each.
inline unsigned two_of(const uint64_t (*rows)[6], int matrix, bool transposed) {
  const int line = emulated::lane() / 4, pair = emulated::lane() % 4 * 2;
  const auto element = [&](int row, int column) -> unsigned {
    return *(const unsigned short*)(shared(rows[matrix * 8 + row][0], 16) + 2 * column);
  };
  return transposed ? element(pair, line) | element(pair + 1, line) << 16
                    : element(line, pair) | element(line, pair + 1) << 16;
}
inline void ldmatrix(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  auto* rows = emulated::exchange({from});
  a = two_of(rows, 0, false), b = two_of(rows, 1, false), c = two_of(rows, 2, false), d = two_of(rows, 3, false);
}
inline void ldmatrix_trans(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  auto* rows = emulated::exchange({from});
  a = two_of(rows, 0, true), b = two_of(rows, 1, true), c = two_of(rows, 2, true), d = two_of(rows, 3, true);
}
inline void ldmatrix_trans(unsigned& a, unsigned& b, unsigned from) {
  auto* rows = emulated::exchange({from});
  a = two_of(rows, 0, true), b = two_of(rows, 1, true);
}
inline void movmatrix(unsigned& to, unsigned from) {
  auto* all = emulated::exchange({from});
  const int line = emulated::lane() / 4, pair = emulated::lane() % 4 * 2;
  const auto element = [&](int row, int column) {
    return (unsigned)(all[row * 4 + column / 2][0] >> column % 2 * 16 & 0xFFFF);
  };
  to = element(pair, line) | element(pair + 1, line) << 16;
}
inline void ld_shared(unsigned& x, unsigned& y, unsigned from) {
  auto* at = (const unsigned*)shared(from, 8);
  x = at[0], y = at[1];
}
inline void ld_shared(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned from) {
  auto* at = (const unsigned*)shared(from, 16);
  x = at[0], y = at[1], z = at[2], w = at[3];
}
inline void ex2_approx(float& y, float x) { y = exp2f(x); }
inline unsigned bf16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float of_bf16(unsigned x) { return __uint_as_float(x << 16); }
inline void cvt_rn(unsigned& pair, float high, float low) { pair = bf16(high) << 16 | bf16(low); }
inline void cvt_rn(unsigned short& y, float x) { y = bf16(x); }
inline float of_e4m3(unsigned x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 127) == 127) return NAN;
  const float y = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return x & 128 ? -y : y;
}
inline unsigned e4m3(float x) {
  const unsigned sign = __float_as_uint(x) >> 31 << 7;
  if (x != x) return sign | 127;
  unsigned best = 0;  // the nearest, the even one of two
  for (unsigned y = 1; y < 127; y++) {
    const float more = fabsf(of_e4m3(y) - fabsf(x)), less = fabsf(of_e4m3(best) - fabsf(x));
    if (more < less || (more == less && y % 2 == 0)) best = y;
  }
  return sign | best;
}
inline void cvt_e4m3(unsigned short& pair, float high, float low) { pair = e4m3(high) << 8 | e4m3(low); }
inline unsigned f16(float x) {
  const unsigned sign = __float_as_uint(x) >> 31 << 15;
  if (x != x) return 0x7FFF;
  const int exponent = std::clamp(x ? ilogbf(x) : -14, -14, 16);
  const long number = lrintf(ldexpf(fabsf(x), 10 - exponent));  // 1,024 to 2,048, less of the smallest exponent
  return sign | (exponent > 15 ? 0x7C00 : std::min(number + (exponent + 14) * 1024L, 0x7C00L));
}
inline float of_f16(unsigned x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float y = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return x >> 15 ? -y : y;
}
inline unsigned finite_f16(float x) { return f16(std::clamp(x, -65504.f, 65504.f)); }
inline void cvt_f16(unsigned& pair, float high, float low) { pair = finite_f16(high) << 16 | finite_f16(low); }
inline void cvt_f16(unsigned& first, unsigned& second, unsigned four) {
  cvt_f16(first, of_e4m3(four >> 8 & 255), of_e4m3(four & 255));
  cvt_f16(second, of_e4m3(four >> 24), of_e4m3(four >> 16 & 255));
}
inline void cp_async(unsigned to, const void* from) {  // it lands when it is waited for
  emulated::now->later.push_back({to, from});
}
inline void cp_async_wait_all() {
  for (auto [to, from] : emulated::now->later) memcpy(shared(to, 16), from, 16);
  emulated::now->later.clear();
}
inline void mul_rn(unsigned& y, unsigned a, unsigned b) {
  y = bf16(of_bf16(a >> 16) * of_bf16(b >> 16)) << 16 | bf16(of_bf16(a & 0xFFFF) * of_bf16(b & 0xFFFF));
}
// Products of a warpgroup. They are made when they are waited for, of what then stands in shared memory, all threads'
// at once: who reads sums earlier, or has a tile written over, gets something else.
inline void take(emulated::Product& its, float& sum) { its.sums.push_back(&sum); }
inline void take(emulated::Product& its, unsigned word) { its.held.push_back(word); }
inline void take(emulated::Product& its, unsigned long long tile) { its.tiles.push_back(tile); }
template <float (*OF)(unsigned), class... T> void product(bool adds, T&&... operands) {
  emulated::Product its{{}, {}, {}, {}, adds, false, OF};
  (take(its, operands), ...);
  emulated::now->products.back().push_back(std::move(its));
}
template <float (*OF)(unsigned) = of_bf16, class... T> void wgmma(T&&... operands) { product<OF>(true, operands...); }
template <float (*OF)(unsigned) = of_bf16, class... T> void wgmma_first(T&&... operands) {
  product<OF>(false, operands...);
}
// Of 64 lines in registers, which must stay as they are until the product is waited for.
template <class... T> void wgmma_by(T&... operands) {
  emulated::Product its{{}, {}, {}, {}, true, true, of_bf16};
  const auto take = [&](auto& x) {
    typedef std::remove_cvref_t<decltype(x)> X;
    if constexpr (std::is_same_v<X, float>)
      its.sums.push_back(&x);
    else if constexpr (std::is_same_v<X, unsigned>)
      its.where.push_back(&x);
    else if constexpr (std::is_same_v<X, int>)
      its.adds = x;
    else
      its.tiles.push_back(x);
  };
  (take(operands), ...);
  emulated::now->products.back().push_back(std::move(its));
}
inline void wgmma_fence() {}
inline void wgmma_commit() { emulated::now->products.emplace_back(); }
// Of 64 elements a line, swizzled; leading and stride: from the first to the next 64 elements, and to the next 8 lines.
inline unsigned element(unsigned long long tile, int line, int i) {
  const unsigned leading = (tile >> 16 & 0x3FFF) << 4, stride = (tile >> 32 & 0x3FFF) << 4;
  const unsigned at = ((tile & 0x3FFF) << 4) + line / 8 * stride + line % 8 * 128 + i / 64 * leading + i % 64 * 2;
  if (tile >> 62 != 1) emulated::fail("a tile that is not swizzled in 128 bytes");
  return *(const unsigned short*)shared(at ^ (at >> 7 & 7) << 4, 2);
}
inline void make(const emulated::Product& its) {
  const int lane = emulated::lane(), row = emulated::now->thread.x / 32 % 4 * 16 + lane / 4;
  const bool held = its.held.size() || its.where.size(), by_line = held && !its.columns;
  const auto b = its.tiles.back();
  const auto word = [&](int i) { return its.columns ? *its.where[i] : its.held[i]; };
  auto* words = held ? emulated::exchange({word(0), word(1), word(2), word(3)}) : nullptr;
  float a[2][16];
  for (int h = 0; h < 2; h++)
    for (int k = 0; k < 16; k++)
      a[h][k] = its.of(held ? words[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + h] >> k % 2 * 16 & 0xFFFF
                            : element(its.tiles[0], row + 8 * h, k));
  for (size_t i = 0; i < its.sums.size(); i++) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = its.adds ? *its.sums[i] : 0.f;
    for (int k = 0; k < 16; k++)
      sum += a[i / 2 % 2][k] * its.of(by_line ? element(b, k, column) : element(b, column, k));
    *its.sums[i] = sum;
  }
}
inline void wgmma_wait(unsigned left) {
  auto& groups = emulated::now->products;
  const int warpgroup = 16 + emulated::now->thread.x / 128;
  emulated::meet(warpgroup, 128);
  for (; groups.size() > left + 1; groups.erase(groups.begin()))
    for (const auto& each : groups.front()) make(each);
  emulated::meet(warpgroup, 128);
}
template <unsigned LEFT> void wgmma_wait() { wgmma_wait(LEFT); }
// A lane has of A, 16 x 2 * WIDE, rows lane / 4 and that + 8, of B and D the columns that PTX's pictures show; EACH
// elements stand in a word. The first lane to go on multiplies for all.
template <int EACH, class F> __attribute__((noinline, optimize("O3"))) void multiply(const uint64_t (*all)[6],
                                                                                     float (*sums)[8], F value) {
  constexpr int WIDE = 4 * EACH;
  float a[16][2 * WIDE], b[2 * WIDE][8];
  for (int lane = 0; lane < 32; lane++)
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < EACH; i++) {
        const int line = lane / 4, k = half * WIDE + lane % 4 * EACH + i, by = 32 / EACH * i;
        a[line][k] = value(all[lane][half * 2] >> by), a[line + 8][k] = value(all[lane][half * 2 + 1] >> by);
        b[k][line] = value(all[lane][4 + half] >> by);
      }
  for (int row = 0; row < 16; row++) {
    float line[8] = {};
    for (int k = 0; k < 2 * WIDE; k++)
      for (int column = 0; column < 8; column++) line[column] += a[row][k] * b[k][column];
    memcpy(sums[row], line, sizeof line);
  }
}
template <int EACH, class F> void multiply_add(float* const (&d)[4], std::initializer_list<uint64_t> mine, F value) {
  emulated::Warp& its = emulated::warp();
  auto* all = emulated::exchange(mine);
  const int which = all == its.words[1];
  if (!its.made[which]) multiply<EACH>(all, its.sums[which], value);
  its.made[which] = (its.made[which] + 1) % 32;
  const int row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
  for (int i = 0; i < 4; i++) *d[i] += its.sums[which][row + i / 2 * 8][column + i % 2];
}
template <float (*OF)(unsigned) = of_bf16>
void mma_sync(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
              unsigned b0, unsigned b1) {
  multiply_add<2>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, [](unsigned word) { return OF(word & 0xFFFF); });
}
inline void mma_sync_e4m3(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
                          unsigned a3, unsigned b0, unsigned b1) {
  static const std::vector<float> values = [] {
    std::vector<float> all(256);
    for (unsigned x = 0; x < 256; x++) all[x] = of_e4m3(x);
    return all;
  }();
  multiply_add<4>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1}, [](unsigned word) { return values[word & 255]; });
}
}  // namespace ptx
