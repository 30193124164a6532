// The rows of many tensors, worked on in one call: the part that optimizers and weight norm share.
//
// A tensor counts as a matrix whose rows are dense in memory, one after the other. What a row gives depends on that row
// alone, so results do not depend on the number of threads.
#pragma once

#include <algorithm>

#include "common.h"

namespace nm {

// Elements that one task takes at least. A row belongs to the task in which it begins.
constexpr int64_t kElementsPerTask = 1 << 14;
// Elements whose sums stay in the compute type; sums of these are added in double.
constexpr int64_t kBlock = 4096;

// row(tensor, r) for every row r of every tensor, in parallel. `Tensor` has members `rows` and `length`; starts[t] is
// the number of elements before tensor t, and starts[count] that of all.
template <class Tensor, class Row>
void for_each_row(const Tensor* tensors, const int64_t* starts, int64_t count, Row&& row) {
  const int64_t tasks = (starts[count] + kElementsPerTask - 1) / kElementsPerTask;
  parallel_for(
      tasks,
      [&](int64_t task) {
        const int64_t begin = task * kElementsPerTask, end = std::min(starts[count], begin + kElementsPerTask);
        for (int64_t t = std::upper_bound(starts, starts + count, begin) - starts - 1; t < count && starts[t] < end; ++t) {
          const int64_t n = tensors[t].length;
          const int64_t first = begin <= starts[t] ? 0 : (begin - starts[t] + n - 1) / n;
          const int64_t last = std::min(tensors[t].rows, (end - starts[t] + n - 1) / n);
          for (int64_t r = first; r < last; ++r) row(tensors[t], r);
        }
      },
      2);
}

// span(t, first, last) for stretches of all elements of every tensor, in parallel: for what is done element by element.
template <class Span>
void for_each_span(const int64_t* starts, int64_t count, Span&& span) {
  parallel_for(
      (starts[count] + kElementsPerTask - 1) / kElementsPerTask,
      [&](int64_t task) {
        const int64_t begin = task * kElementsPerTask, end = std::min(starts[count], begin + kElementsPerTask);
        for (int64_t t = std::upper_bound(starts, starts + count, begin) - starts - 1; t < count && starts[t] < end; ++t)
          span(t, std::max<int64_t>(0, begin - starts[t]), std::min(end, starts[t + 1]) - starts[t]);
      },
      2);
}

// One vector of an array. The last one of a row may be partial: its other lanes read 0 and are not written.
struct WholeVector {
  template <class T>
  NM_INLINE auto load(const T* p) const { return nm::load(p); }
  template <class T, class V>
  NM_INLINE void store(T* p, V x) const { nm::store(p, x); }
  template <class V>
  NM_INLINE V only(V x) const { return x; }
};
struct PartOfVector {
  int64_t count;
  template <class T>
  NM_INLINE auto load(const T* p) const { return load_first(p, count); }
  template <class T, class V>
  NM_INLINE void store(T* p, V x) const { store_first(p, x, count); }
  // x, and 0 in the other lanes, where it was computed of what they read.
  template <class V>
  NM_INLINE V only(V x) const {
    using C = std::remove_cv_t<std::remove_reference_t<decltype(x[0])>>;
    return first<C>(count) ? x : V{};
  }
};

// Start to load what is read next, into the second-level cache. It may lie beyond the end of an array.
NM_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// lanes.store(to, x); with `past`, past the cache where `to` is aligned.
template <class T, class Lanes>
NM_INLINE void store_output(T* to, Vec<Compute<T>> x, Lanes lanes, bool past) {
  if constexpr (std::is_same_v<Lanes, WholeVector>) {
    if (past && is_aligned(to)) return store_past_cache(to, x);
  }
  lanes.store(to, x);
}

// body(i, k, lanes) over the vectors of [begin, end): the vector's first element, the number k of an accumulator out of
// kUnroll, and how to load and store the vector.
constexpr int kUnroll = 4;
template <class C, class Body>
NM_INLINE void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  constexpr int W = kWidth<C>;
  int64_t i = begin;
  for (; i + kUnroll * W <= end; i += kUnroll * W) {
    body(i, 0, WholeVector{});
    body(i + W, 1, WholeVector{});
    body(i + 2 * W, 2, WholeVector{});
    body(i + 3 * W, 3, WholeVector{});
  }
  for (; i + W <= end; i += W) body(i, 0, WholeVector{});
  if (i < end) body(i, 1, PartOfVector{end - i});
}

// The sum of an accumulator's elements, in pairs, then in double.
template <class V>
NM_INLINE double sum_of(V x) {
  using C = std::remove_cv_t<std::remove_reference_t<decltype(x[0])>>;
  constexpr int N = sizeof(V) / sizeof(C);
  if constexpr (N <= 2) {
    return double(x[0]) + double(x[N - 1]) * (N - 1);
  } else {
    typename VectorOf<C, N / 2>::type half[2];
    std::memcpy(half, &x, sizeof(x));
    return sum_of(half[0] + half[1]);
  }
}
template <class C>
NM_INLINE double sum_of(const Vec<C> (&x)[kUnroll]) {
  return sum_of((x[0] + x[1]) + (x[2] + x[3]));
}

// Whether a sum of squares in float32 kept its digits: it neither overflowed nor came near the smallest numbers.
NM_INLINE bool in_range(double squares) { return squares > 1e-30 && squares < 1e30; }

}  // namespace nm
