// What the loader calls first: which instruction sets the processor has, and PyTorch's threads.
#include "common.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nm {

void prefer_large_pages(const void* begin, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLarge = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kLarge - 1) & ~(kLarge - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + uintptr_t(bytes)) & ~(kLarge - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

int32_t (*torch_parallel_for)(int64_t, int64_t, int64_t, ParallelBody, void*) = nullptr;
int32_t (*torch_get_num_threads)(uint32_t*) = nullptr;
}  // namespace nm

// Raised with every change of a function's arguments: a library left over from another version is not called.
NM_EXPORT int64_t nm_version() { return NM_VERSION; }

// The best set of x86-64 that this processor and its operating system support: 2 AVX-512, 1 AVX2, else 0.
NM_EXPORT int64_t nm_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  uint32_t a, b, c, d;  // F16C by hand: GCC before 11 has no name for it
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C) || !__builtin_cpu_supports("fma")) return 0;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

NM_EXPORT void nm_init(void* parallel_for, void* get_num_threads) {
  nm::torch_parallel_for = reinterpret_cast<decltype(nm::torch_parallel_for)>(parallel_for);
  nm::torch_get_num_threads = reinterpret_cast<decltype(nm::torch_get_num_threads)>(get_num_threads);
}

// y = x in float32: the conversions' test, and an example of a kernel. Both are n elements; to_float says which way.
NM_EXPORT void nm_convert(void* x, float* y, int64_t n, int64_t dtype, int64_t to_float) {
  nm::with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      constexpr int64_t block = 1 << 14;
      nm::parallel_for((n + block - 1) / block, [&](int64_t task) {
        const int64_t end = task * block + block < n ? task * block + block : n;
        constexpr int W = nm::kWidth<float>;
        T* narrow = static_cast<T*>(x);
        int64_t i = task * block;
        for (; i + W <= end; i += W) {
          if (to_float) nm::store(y + i, nm::load(narrow + i));
          else nm::store(narrow + i, nm::load(y + i));
        }
        if (i < end) {
          if (to_float) nm::store_first(y + i, nm::load_first(narrow + i, end - i), end - i);
          else nm::store_first(narrow + i, nm::load_first(y + i, end - i), end - i);
        }
      });
    }
  });
}
