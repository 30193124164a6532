// Batch norm in training, forward and backward, for every kind of statistic; batch_norm_<dtype>.cpp instantiate it.
//
//   forward   y = act((x − μ)·γ/D + β + residual),  D = √(s² + eps),  s = C·T(x − μ)
//   backward  dγ = Σ g·x̂,  dβ = Σ g,  dx = γ/D·(g − mean g) + slope·(u − mean u),  u ~ ∂T/∂(x − μ)
//
// with g 0 where the ReLU is closed. The equations and their slopes are those of kernels/hand_derived.py.
//
// Two layouts. *Planes*: (N, C, S), S pixels of a channel beside each other; a thread takes a channel, or a part of one,
// and what it reads again is still in its cache. *Rows*: (R, C), the channels of a pixel beside each other (channels_last
// and 2-d inputs); a thread takes some rows, and sums of the threads are added in their order.
//
// Accuracy: each sum runs in the compute type over at most 256 terms, then in double. μ is kept as a number of the
// compute type and a small rest, so that data far from 0 lose nothing. That number is never below μ: so it divides the
// elements at or above μ from those below it.
//
// Passes over memory: forward 2 reads and 1 write for L∞, Top(k), range and mean-only, one read more for L1, L2 and Lp
// (planes: from the cache); backward 4 reads and 1 write. A residual adds 1 read, and 1 write backward.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "pack.h"
#include "power.h"

namespace nm {

enum Kind : int64_t { kL1 = 0, kL2 = 1, kLp = 2, kLinf = 3, kTopK = 4, kRange = 5, kMean = 6 };

// What Python passes, in this order; NULL for what there is not. (C,) tensors have the compute type.
struct BatchNormArgs {
  // Geometry: planes (N, C, S), or rows (N, C) with S = 1.
  int64_t n, channels, pixels;
  int64_t kind, k;
  double p, constant, eps, momentum;
  int64_t relu;
  // Bits saved of each pack: `mask` 1 saves where the ReLU is open; `code` saves 1 bit (the sign) or 4 (x̂ in steps).
  int64_t mask, code;
  const void* x;         // (N, C, S); in the lean backward pass with code 1 it is the output
  const void* residual;  // as x
  const void* weight;    // (C,)
  const void* bias;      // (C,)
  void* running_mean;    // (C,)
  void* running_var;     // (C,)
  void* y;               // as x
  void* statistics;      // (4, C): μ, its rest, 1/D, s
  int16_t* bits;         // mask + code numbers for each pack
  int64_t* positions;    // (C, k): where in x the extremes are
  // Backward only.
  const void* g;    // as x
  void* dx;         // as x
  void* dresidual;  // as x
  void* dweight;    // (C,)
  void* dbias;      // (C,)
};

// x̂ in four bits: step · (q + ½), q in −8..7.
constexpr double kCodeStep = 0.4;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
struct BatchNorm {
  using C = Compute<T>;
  using P = Pack<C>;
  static constexpr int kUnroll = kVectorBytes == 64 && sizeof(C) == 4 ? 4 : 1;  // packs at a time in rows
  static constexpr int64_t kPiece = 256;  // pixels of a plane that share one largest and one smallest value

  const BatchNormArgs& a;
  const bool rows;
  const int64_t n, channels, pixels, count;   // count: elements of a channel
  const int64_t packs;                        // of a row, or of a plane
  int64_t column_parts = 1, row_parts = 1;    // tasks of the rows layout
  int64_t parts = 1, cuts = 1;                // tasks per channel, and segments per plane, of the planes layout
  int64_t block;                              // rows that one register sum runs over
  int64_t planes_saved;                       // numbers of bits per pack
  const bool distant;                         // rows: the input does not fit into the second-level caches
  const bool past;                            // outputs are stored past the cache
  int64_t later_plane = 0;                    // planes: how far away the one is that is loaded meanwhile; 0 for none
  C* mean;
  C* rest;
  C* inverse;
  C* scale;
  std::vector<double> slots;                  // sums of tasks
  std::vector<C> largest, smallest;           // of groups of elements of a channel
  int64_t groups = 0;
  std::vector<C> pilot, factor, shift;        // per channel, padded to whole packs

  explicit BatchNorm(const BatchNormArgs& args)
      : a(args), rows(args.pixels == 1), n(args.n), channels(args.channels), pixels(args.pixels),
        count(args.n * args.pixels), packs(divide_up(rows ? args.channels : args.pixels, kPack)),
        planes_saved(args.mask + args.code),
        distant(bytes() >= 4 << 20), past(leaves_cache(bytes()) && stores_are_aligned()) {
    mean = static_cast<C*>(a.statistics);
    rest = mean + channels;
    inverse = rest + channels;
    scale = inverse + channels;
    const int64_t threads = num_threads();
    const int64_t most = std::max<int64_t>(1, count * channels / (1 << 14));  // tasks worth a thread
    const int64_t wanted = std::min(threads, most);
    if (rows) {
      block = std::clamp<int64_t>(32768 / (channels * int64_t(sizeof(T))), 8, 64);
      if (has_positions()) block = count < 4096 ? 8 : count < 16384 ? 16 : count < 65536 ? 32 : 64;
      row_parts = std::clamp<int64_t>(divide_up(n, std::max<int64_t>(block, 64)), 1, wanted);
      column_parts = std::clamp<int64_t>(divide_up(wanted, row_parts), 1, packs);
    } else {
      block = 0;
      // Of long planes the processor foresees the rest; short ones are over before anything comes.
      const int64_t plane = pixels * int64_t(sizeof(T));
      if (plane < 512) later_plane = pixels;  // the next channel's
      else if (plane <= 4096) later_plane = std::max<int64_t>(1, 3072 / plane) * channels * pixels;
      if (channels < wanted * 4 && channels % wanted != 0) parts = divide_up(wanted * 4, channels);
      cuts = std::clamp<int64_t>(divide_up(parts, n), 1, divide_up(pixels, 1024));
      parts = std::min(parts, n * cuts);
    }
  }

  int64_t bytes() const { return count * channels * int64_t(sizeof(T)); }

  // Whether all packs of the outputs but the last of a row or plane begin at whole vectors.
  bool stores_are_aligned() const {
    for (const void* output : {a.y, a.dx, a.dresidual})
      if (!is_aligned(static_cast<const T*>(output))) return false;
    return (rows ? channels : pixels) % kPack == 0;
  }

  // Stores a pack of an output.
  template <class Part>
  NM_INLINE void put(T* to, const P& x, Part part) const {
    if constexpr (std::is_same_v<Part, Full>) {
      if (past) {
        NM_EACH(j) store_past_cache(to + j * kWidth<C>, x.v[j]);
        return;
      }
    }
    store_pack(to, x, part);
  }

  bool has_positions() const { return a.kind == kLinf || a.kind == kTopK || a.kind == kRange; }
  bool has_groups() const { return has_positions() || a.kind == kLp; }
  bool has_deviations() const { return a.kind == kL1 || a.kind == kL2 || a.kind == kLp; }
  C weight(int64_t c) const { return a.weight ? static_cast<const C*>(a.weight)[c] : C(1); }
  C bias(int64_t c) const { return a.bias ? static_cast<const C*>(a.bias)[c] : C(0); }
  const T* x() const { return static_cast<const T*>(a.x); }

  // γ/D, and β less what the rest of μ gives: y = (x − μ)·slope + offset. Forward and backward compute the same bits.
  C slope_of(int64_t c) const { return inverse[c] * weight(c); }
  C offset_of(int64_t c) const { return bias(c) - rest[c] * slope_of(c); }

  // ---- walking over a task ----

  // f(task, row_begin, row_end, pack_begin, pack_end) for each task of the rows layout. Row bounds are whole blocks.
  template <class F>
  void each_rows_task(F&& f) {
    const int64_t blocks = divide_up(n, block);
    parallel_for(row_parts * column_parts, [&](int64_t task) {
      const int64_t row = task / column_parts, column = task % column_parts;
      const int64_t begin = part_begin(blocks, row, row_parts) * block;
      const int64_t end = std::min(n, part_begin(blocks, row + 1, row_parts) * block);
      f(row, begin, end, part_begin(packs, column, column_parts), part_begin(packs, column + 1, column_parts));
    });
  }

  // f(u packs as a constant, column, part, r0, r1) for each block of rows, several packs of columns at a time.
  template <bool kBackwards = false, class F>
  NM_INLINE void each_block(int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end, F&& f) {
    const int64_t whole = std::min(p_end, channels / kPack);
    const int64_t blocks = divide_up(r_end - r_begin, block);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t r0 = r_begin + (kBackwards ? blocks - 1 - i : i) * block, r1 = std::min(r_end, r0 + block);
      int64_t p = p_begin;
      if constexpr (kUnroll > 1) {
        for (; p + kUnroll <= whole; p += kUnroll) f(std::integral_constant<int, kUnroll>{}, p * kPack, Full{}, r0, r1);
      }
      for (; p < whole; ++p) f(std::integral_constant<int, 1>{}, p * kPack, Full{}, r0, r1);
      if (p < p_end) f(std::integral_constant<int, 1>{}, p * kPack, Partial{channels - p * kPack}, r0, r1);
    }
  }

  // f(channel, slot, segment_begin, segment_end) for each task of the planes layout: all of a channel, or a part of it.
  template <class F>
  void each_planes_task(F&& f) {
    const int64_t segments = n * cuts;
    parallel_for(channels * parts, [&](int64_t task) {
      const int64_t part = task % parts;
      f(task / parts, task, part_begin(segments, part, parts), part_begin(segments, part + 1, parts));
    });
  }

  // f(offset in the tensor, image, pixel, length) for each segment of a channel.
  template <bool kBackwards = false, class F>
  void each_segment(int64_t c, int64_t begin, int64_t end, F&& f) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = kBackwards ? end - 1 - (i - begin) : i;
      if (cuts == 1) {  // without the divisions, which small planes would feel
        f((s * channels + c) * pixels, s, int64_t(0), pixels);
        continue;
      }
      const int64_t image = s / cuts, cut = s % cuts;
      const int64_t p0 = part_begin(packs, cut, cuts) * kPack;
      const int64_t p1 = std::min(pixels, part_begin(packs, cut + 1, cuts) * kPack);
      f((image * channels + c) * pixels + p0, image, p0, p1 - p0);
    }
  }

  int16_t* bits_at(int64_t image, int64_t c, int64_t pixel) const {
    return a.bits + ((image * channels + c) * packs + pixel / kPack) * planes_saved;
  }
  int16_t* row_bits_at(int64_t r, int64_t column) const { return a.bits + (r * packs + column / kPack) * planes_saved; }

  // Start to load the same columns of the next block of rows: the processor foresees no steps of a row's length. What is
  // small enough lies in the second-level caches anyway.
  template <int kPacks>
  NM_INLINE void load_soon(const void* tensor, int64_t at) const {
    if (!distant) return;
    const char* from = static_cast<const char*>(tensor) + at * int64_t(sizeof(T));
    for (int i = 0; i < kPacks * kPack * int(sizeof(T)); i += 64) __builtin_prefetch(from + i);
  }

  // The same for the plane of a later image, or of the next channel.
  NM_INLINE void load_plane_soon(const void* tensor, int64_t at) const {
    if (!later_plane) return;
    const char* from = static_cast<const char*>(tensor) + (at + later_plane) * int64_t(sizeof(T));
    for (int64_t i = 0; i < pixels * int64_t(sizeof(T)); i += 64) __builtin_prefetch(from + i);
  }

  // f(channel) for every channel: on several threads where it reads elements here and there.
  template <class F>
  void each_channel(F&& f) {
    const int64_t tasks = divide_up(channels, kPack);
    const auto some = [&](int64_t task) {
      for (int64_t c = task * kPack; c < std::min(channels, (task + 1) * kPack); ++c) f(c);
    };
    parallel_for(tasks, some, has_positions() ? 1 : tasks);
  }

  // ---- sums of tasks ----

  // K sums per channel: rows keep [row part][K][channels], planes [task][K].
  void make_slots(int64_t K) { slots.assign(rows ? row_parts * K * packs * kPack : channels * parts * K, 0.0); }
  double* row_slot(int64_t row, int64_t K, int64_t which) { return slots.data() + (row * K + which) * packs * kPack; }
  double total(int64_t c, int64_t K, int64_t which) {
    double sum = 0;
    if (rows) {
      for (int64_t row = 0; row < row_parts; ++row) sum += row_slot(row, K, which)[c];
    } else {
      for (int64_t part = 0; part < parts; ++part) sum += slots[(c * parts + part) * K + which];
    }
    return sum;
  }

  // ---- forward --------------------------------------------------------------------------------------------------

  void forward() {
    prefer_large_pages(a.y, bytes());
    pilot.resize(packs * kPack * (rows ? 1 : 0) + (rows ? 0 : channels));
    for (int64_t c = 0; c < channels; ++c) {
      // Sums run over differences from a number of the channel's size, the middle one of three: no outlier.
      const C one = load_one(x() + position_of(c, 0)), two = load_one(x() + position_of(c, count / 2));
      const C three = load_one(x() + position_of(c, count - 1));
      const C middle = std::max(std::min(one, two), std::min(std::max(one, two), three));
      pilot[c] = std::isfinite(double(middle)) ? middle : C(0);
    }
    if (has_groups()) {
      groups = rows ? divide_up(n, block) : n * cuts * pieces_of_cut();
      largest.resize(groups * (rows ? packs * kPack : channels));
      smallest.resize(largest.size());
    }
    // One task per channel: all passes at once, so that what is read again is in the cache.
    if (!rows && parts == 1) {
      make_slots(2);
      parallel_for(channels, [&](int64_t c) {
        planes_sums(c, c, 0, n * cuts);
        set_mean(c);
        if (has_deviations()) planes_deviations(c, c, 0, n * cuts);
        set_scale(c);
        planes_normalize(c, 0, n * cuts);
      });
      return;
    }
    make_slots(1);
    if (rows) {
      if (has_groups()) each_rows_task([&](auto... bounds) { rows_sums<true>(bounds...); });
      else each_rows_task([&](auto... bounds) { rows_sums<false>(bounds...); });
    } else {
      make_slots(2);
      each_planes_task([&](auto... bounds) { planes_sums(bounds...); });
    }
    for (int64_t c = 0; c < channels; ++c) set_mean(c);
    if (has_deviations()) {
      make_slots(rows ? 1 : 2);
      if (rows) each_rows_task([&](auto... bounds) { rows_deviations(bounds...); });
      else each_planes_task([&](auto... bounds) { planes_deviations(bounds...); });
    }
    if (has_positions()) {
      parallel_for(divide_up(channels, kPack), [&](int64_t i) {
        const int64_t begin = i * kPack, end = std::min(channels, begin + kPack);
        const std::vector<C> most = rows && a.kind != kRange ? row_deviations(begin, end) : std::vector<C>();
        for (int64_t c = begin; c < end; ++c) set_scale(c, most.empty() ? nullptr : most.data() + (c - begin) * groups);
      });
    } else {
      for (int64_t c = 0; c < channels; ++c) set_scale(c);
    }
    if (rows) {
      fill_affine();
      with_bool(a.relu, [&](auto relu) {
        with_bool(a.residual != nullptr, [&](auto residual) {
          each_rows_task([&](auto... bounds) { rows_normalize<relu.value, residual.value>(bounds...); });
        });
      });
    } else {
      each_planes_task([&](int64_t c, int64_t, int64_t begin, int64_t end) { planes_normalize(c, begin, end); });
    }
  }

  template <class Body>
  static NM_INLINE void with_bool(bool flag, Body&& body) {
    if (flag) body(std::true_type{});
    else body(std::false_type{});
  }

  int64_t pieces_of_cut() const { return divide_up(divide_up(packs, cuts) * kPack, kPiece); }

  // Σ (x − pilot), and the extremes of each group if they are wanted.
  void planes_sums(int64_t c, int64_t slot, int64_t begin, int64_t end) {
    const P about = splat_pack<C>(pilot[c]);
    alignas(64) double lanes[kPack] = {};
    P sum[4] = {};
    int64_t since = 0;
    each_segment(c, begin, end, [&](int64_t at, int64_t image, int64_t pixel, int64_t length) {
      const T* from = x() + at;
      load_plane_soon(x(), at);
      if (has_groups()) {
        const int64_t segment = image * cuts + (pixel ? cut_of(pixel) : 0);
        for (int64_t piece = 0; piece * kPiece < length; ++piece) {
          P most = splat_pack<C>(-C(INFINITY)), least = splat_pack<C>(C(INFINITY));
          const int64_t here = std::min(kPiece, length - piece * kPiece);
          sweep<C>(here, [&](int64_t i, auto u, auto part) __attribute__((always_inline)) {
            const P value = load_pack(from + piece * kPiece + i, part);
            sum[u] = sum[u] + existing(value - about, part);
            most = max(replace(value, -C(INFINITY), part), most);
            least = min(replace(value, C(INFINITY), part), least);
          });
          set_group(c, segment * pieces_of_cut() + piece, most, least);
          if (piece % 4 == 3) flush(lanes, sum);
        }
        for (int64_t piece = divide_up(length, kPiece); piece < pieces_of_cut(); ++piece)  // a shorter cut
          set_group(c, segment * pieces_of_cut() + piece, splat_pack<C>(-C(INFINITY)), splat_pack<C>(C(INFINITY)));
        flush(lanes, sum);
      } else {
        for (int64_t done = 0; done < length; done += 4096) {
          const int64_t here = std::min<int64_t>(4096, length - done);
          if (since + here > 4096) flush(lanes, sum), since = 0;
          since += divide_up(here, 4 * kPack) * 4 * kPack;
          sweep<C>(here, [&](int64_t i, auto u, auto part) __attribute__((always_inline)) {
            sum[u] = sum[u] + existing(load_pack(from + done + i, part) - about, part);
          });
        }
      }
    });
    flush(lanes, sum);
    slots[slot * 2] = sum_lanes(lanes);
  }

  int64_t cut_of(int64_t pixel) const {
    int64_t cut = 0;
    while (cut + 1 < cuts && part_begin(packs, cut + 1, cuts) * kPack <= pixel) ++cut;
    return cut;
  }

  static NM_INLINE P replace(const P& value, C, Full) { return value; }
  static NM_INLINE P replace(P value, C missing, Partial part) {
    NM_EACH(j) value.v[j] = first<C>(part.count - j * kWidth<C>) ? value.v[j] : splat<C>(missing);
    return value;
  }

  void set_group(int64_t c, int64_t group, const P& most, const P& least) {
    C top = most.v[0][0], bottom = least.v[0][0];
    NM_EACH(j) for (int i = 0; i < kWidth<C>; ++i) {
      top = most.v[j][i] > top ? most.v[j][i] : top;
      bottom = least.v[j][i] < bottom ? least.v[j][i] : bottom;
    }
    largest[c * groups + group] = top;
    smallest[c * groups + group] = bottom;
  }

  static NM_INLINE void flush(double* lanes, P* sum) {
    add_to(lanes, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (int u = 0; u < 4; ++u) sum[u] = P{};
  }

  template <bool kGroups>
  void rows_sums(int64_t row, int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end) {
    double* sums = row_slot(row, 1, 0);
    each_block(r_begin, r_end, p_begin, p_end, [&](auto U, int64_t column, auto part, int64_t r0, int64_t r1) __attribute__((always_inline)) {
      P about[U.value], sum[U.value], most[U.value], least[U.value];
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u) {
        about[u] = load_pack(pilot.data() + column + u * kPack);
        sum[u] = P{};
        if (kGroups) most[u] = splat_pack<C>(-C(INFINITY)), least[u] = splat_pack<C>(C(INFINITY));
      }
      for (int64_t r = r0; r < r1; ++r) {
        load_soon<U.value>(x(), (r + block) * channels + column);
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) {
          const P value = load_pack(x() + r * channels + column + u * kPack, part);
          sum[u] = sum[u] + (value - about[u]);
          if (kGroups) most[u] = max(value, most[u]), least[u] = min(value, least[u]);
        }
      }
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u) {
        add_to(sums + column + u * kPack, sum[u]);
        if (kGroups) {
          store_pack(largest.data() + r0 / block * packs * kPack + column + u * kPack, most[u]);
          store_pack(smallest.data() + r0 / block * packs * kPack + column + u * kPack, least[u]);
        }
      }
    });
  }

  void set_mean(int64_t c) {
    const double exact = double(pilot[c]) + total(c, rows ? 1 : 2, 0) / double(count);
    mean[c] = C(exact);
    if (double(mean[c]) < exact) mean[c] = std::nextafter(mean[c], C(INFINITY));
    rest[c] = std::isfinite(exact) && std::isfinite(double(mean[c])) ? C(exact - double(mean[c])) : C(0);
    if (a.kind == kLp) scale[c] = top_of(c);
  }

  // The largest |x − μ| of a channel; 1 if it is 0.
  C top_of(int64_t c) {
    C most = -C(INFINITY), least = C(INFINITY);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = rows ? group * packs * kPack + c : c * groups + group;
      most = largest[at] > most ? largest[at] : most;
      least = smallest[at] < least ? smallest[at] : least;
    }
    const C top = std::max(most - mean[c], mean[c] - least);
    return top == 0 ? C(1) : top;
  }

  // |d|, d² or (|d|/top)^p.
  template <int kKind>
  NM_INLINE P deviation(const P& value, const P& mu, const P& mu_rest, const P& inverse_top) const {
    const P d = (value - mu) - mu_rest;
    if constexpr (kKind == kL1) return abs(d);
    else if constexpr (kKind == kL2) return d * d;
    else return power(abs(d) * inverse_top, C(a.p));
  }

  template <class Body>
  NM_INLINE void with_kind(Body&& body) const {
    if (a.kind == kL1) body(std::integral_constant<int, kL1>{});
    else if (a.kind == kL2) body(std::integral_constant<int, kL2>{});
    else body(std::integral_constant<int, kLp>{});
  }

  void planes_deviations(int64_t c, int64_t slot, int64_t begin, int64_t end) {
    const P mu = splat_pack<C>(mean[c]), mu_rest = splat_pack<C>(rest[c]);
    const P inverse_top = splat_pack<C>(a.kind == kLp ? C(1) / scale[c] : C(1));
    alignas(64) double lanes[kPack] = {};
    with_kind([&](auto kind) {
      P sum[4] = {};
      int64_t since = 0;
      each_segment<true>(c, begin, end, [&](int64_t at, int64_t, int64_t, int64_t length) {
        for (int64_t done = 0; done < length; done += 4096) {
          const T* from = x() + at + done;
          const int64_t here = std::min<int64_t>(4096, length - done);
          if (since + here > 4096) flush(lanes, sum), since = 0;
          since += divide_up(here, 4 * kPack) * 4 * kPack;
          sweep<C>(here, [&](int64_t i, auto u, auto part) __attribute__((always_inline)) {
            sum[u] = sum[u] + existing(deviation<kind.value>(load_pack(from + i, part), mu, mu_rest, inverse_top), part);
          });
        }
      });
      flush(lanes, sum);
    });
    slots[slot * 2 + 1] = sum_lanes(lanes);
  }

  void rows_deviations(int64_t row, int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end) {
    double* sums = row_slot(row, 1, 0);
    with_kind([&](auto kind) {
      each_block<true>(r_begin, r_end, p_begin, p_end, [&](auto U, int64_t column, auto part, int64_t r0, int64_t r1) __attribute__((always_inline)) {
        P mu[U.value], mu_rest[U.value], inverse_top[U.value], sum[U.value];
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) {
          mu[u] = load_pack(mean + column + u * kPack, part);
          mu_rest[u] = load_pack(rest + column + u * kPack, part);
          inverse_top[u] = P{};
          if (kind.value == kLp) {
            const P top = load_pack(scale + column + u * kPack, part);
            NM_EACH(j) inverse_top[u].v[j] = C(1) / top.v[j];
          }
          sum[u] = P{};
        }
        for (int64_t r = r0; r < r1; ++r) {
          load_soon<U.value>(x(), (r - block) * channels + column);
#pragma GCC unroll 4
          for (int u = 0; u < U.value; ++u) {
            const P value = load_pack(x() + r * channels + column + u * kPack, part);
            sum[u] = sum[u] + deviation<kind.value>(value, mu[u], mu_rest[u], inverse_top[u]);
          }
        }
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) add_to(sums + column + u * kPack, existing(sum[u], part));
      });
    });
  }

  void set_scale(int64_t c, const C* most = nullptr) {
    double T_of = 1;
    const double sum = has_deviations() ? total(c, rows ? 1 : 2, rows ? 0 : 1) : 0;
    switch (a.kind) {
      case kL1: T_of = sum / double(count); break;
      case kL2: T_of = std::sqrt(sum / double(count)); break;
      case kLp: T_of = std::pow(sum / double(count), 1 / a.p) * double(scale[c]); break;
      case kMean: break;
      default: T_of = extremes(c, most);
    }
    if (a.kind == kMean) {
      scale[c] = inverse[c] = C(1);
    } else {
      const double s = a.constant * T_of;
      scale[c] = C(s);
      // As kernels/hand_derived.py: with eps = 0 a constant channel gives 0, not 0/0.
      inverse[c] = C(1 / std::sqrt(s * s + std::max(a.eps, 1.1754943508222875e-38)));
    }
    move(c);
  }

  void move(int64_t c) {
    const auto step = [&](void* running, C batch) {
      C* value = static_cast<C*>(running) + c;
      *value = *value * C(1 - a.momentum) + batch * C(a.momentum);
    };
    if (a.running_mean) step(a.running_mean, C(double(mean[c]) + double(rest[c])));
    if (a.running_var && a.kind != kMean) {
      const double squared = double(scale[c]) * double(scale[c]);
      step(a.running_var, C(a.kind == kRange ? squared : squared * (double(count) / double(count - 1))));
    }
  }

  // Rows: the largest |x − μ| of each group, for one channel after the other. Read a channel at a time, the groups'
  // numbers would be a row apart, and miss the cache.
  std::vector<C> row_deviations(int64_t begin, int64_t end) {
    std::vector<C> most(groups * kPack);
    const Partial part{end - begin};
    const P mu = load_pack(mean + begin, part), mu_rest = load_pack(rest + begin, part);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = group * packs * kPack + begin;
      const P above = (load_pack(largest.data() + at) - mu) - mu_rest, below = (load_pack(smallest.data() + at) - mu) - mu_rest;
      alignas(64) C deviations[kPack];
      store_pack(deviations, max(abs(below), above));
      for (int i = 0; i < kPack; ++i) most[i * groups + group] = deviations[i];
    }
    return most;
  }

  // The k-th largest of n numbers that are not negative; −1 if there are fewer.
  static C kth_largest(const C* values, int64_t n, int64_t k) {
    if (n < k) return -1;
    if (k > 32) {
      std::vector<C> sorted(values, values + n);
      std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<C>());
      return sorted[k - 1];
    }
    C top[32];  // the largest so far, in order: most numbers are compared with the last of them alone
    std::fill(top, top + k, C(-1));
    for (int64_t i = 0; i < n; ++i) {
      int64_t place = k - 1;
      if (!(values[i] > top[place])) continue;
      for (; place > 0 && top[place - 1] < values[i]; --place) top[place] = top[place - 1];
      top[place] = values[i];
    }
    return top[k - 1];
  }

  // The statistic T for L∞, Top(k) and range, and where its elements are. Only groups that can hold one are read again.
  // `most`: the largest |x − μ| of each group, or null.
  double extremes(int64_t c, const C* most) {
    const int64_t wanted = a.kind == kRange ? 2 : a.kind == kLinf ? 1 : a.k;
    int64_t* positions = a.positions + c * wanted;
    for (int64_t i = 0; i < wanted; ++i) positions[i] = position_of(c, std::min(i, count - 1));
    if (!std::isfinite(double(mean[c]))) return NAN;  // as in the equation: ∞ − ∞ is among the deviations
    if (a.kind == kRange) {
      C found[2];
      for (int which = 0; which < 2; ++which) {
        const C sign = which == 0 ? C(1) : C(-1);
        C best = -C(INFINITY);
        int64_t best_group = 0;
        for (int64_t group = 0; group < groups; ++group) {
          const C value = which == 0 ? largest[group_at(c, group)] : -smallest[group_at(c, group)];
          if (value > best) best = value, best_group = group;
        }
        bool seen = false;
        each_value(c, best_group, best_group + 1, [&](C value, int64_t at) {
          if (!seen && sign * value == best) positions[which] = at, seen = true;
        });
        found[which] = sign * best;
      }
      return double(found[0]) - double(found[1]);
    }
    // The k-th largest of the groups' largest deviations: k elements reach it.
    std::vector<C> own(most ? 0 : groups);
    for (size_t group = 0; group < own.size(); ++group) own[group] = group_deviation(c, group);
    if (!most) most = own.data();
    const C threshold = kth_largest(most, groups, wanted);
    using Item = std::pair<C, int64_t>;  // a deviation and where it is; of equal ones the first is taken
    const auto before = [](const Item& l, const Item& r) { return l.first != r.first ? l.first > r.first : l.second < r.second; };
    std::vector<Item> heap;  // its front is the smallest
    heap.reserve(wanted);
    for (int64_t group = 0; group < groups; ++group) {
      if (!(most[group] >= threshold)) continue;
      each_value(c, group, group + 1, [&](C value, int64_t at) {
        const C d = std::abs(deviation_of(c, value));
        if (d < threshold) return;
        if (int64_t(heap.size()) < wanted) {
          heap.emplace_back(d, at);
          std::push_heap(heap.begin(), heap.end(), before);
        } else if (before({d, at}, heap.front())) {
          std::pop_heap(heap.begin(), heap.end(), before);
          heap.back() = {d, at};
          std::push_heap(heap.begin(), heap.end(), before);
        }
      });
    }
    double sum = 0;
    std::sort_heap(heap.begin(), heap.end(), before);
    for (size_t i = 0; i < heap.size(); ++i) {
      positions[i] = heap[i].second;
      sum += double(heap[i].first);
    }
    return sum / double(wanted);
  }

  C deviation_of(int64_t c, C value) const { return (value - mean[c]) - rest[c]; }
  int64_t group_at(int64_t c, int64_t group) const { return rows ? group * packs * kPack + c : c * groups + group; }
  C group_deviation(int64_t c, int64_t group) const {
    const int64_t at = group_at(c, group);
    return std::max(deviation_of(c, largest[at]), -deviation_of(c, smallest[at]));
  }
  int64_t position_of(int64_t c, int64_t i) const {
    return rows ? i * channels + c : (i / pixels * channels + c) * pixels + i % pixels;
  }

  // f(value, offset in the tensor) for each element of some groups of a channel.
  template <class F>
  void each_value(int64_t c, int64_t begin, int64_t end, F&& f) {
    for (int64_t group = begin; group < end; ++group) {
      if (rows) {
        for (int64_t r = group * block; r < std::min(n, (group + 1) * block); ++r)
          f(load_one(x() + r * channels + c), r * channels + c);
        continue;
      }
      const int64_t segment = group / pieces_of_cut(), piece = group % pieces_of_cut();
      each_segment(c, segment, segment + 1, [&](int64_t at, int64_t, int64_t, int64_t length) {
        for (int64_t i = piece * kPiece; i < std::min(length, (piece + 1) * kPiece); ++i) f(load_one(x() + at + i), at + i);
      });
    }
  }

  void fill_affine() {
    factor.assign(packs * kPack, C(0));
    shift.assign(packs * kPack, C(0));
    for (int64_t c = 0; c < channels; ++c) factor[c] = slope_of(c), shift[c] = offset_of(c);
  }

  // One pack of the output, and its bits.
  template <bool kRelu, bool kResidual, class Part>
  NM_INLINE P normalized(const P& value, const T* residual, const P& mu, const P& slope, const P& offset, int16_t* bits,
                         const P& to_xhat, Part part) const {
    const P centered = value - mu;
    P y = fma(centered, slope, offset);
    if constexpr (kResidual) y = y + load_pack(residual, part);
    if (planes_saved) {
      if (a.mask) *bits++ = int16_t(bits_open(y));
      if (a.code == 1) *bits = int16_t(bits_at_least(value, mu));
      if (a.code == 4) encode(centered * to_xhat, bits);
    }
    if constexpr (kRelu) y = relu_gate(y, y);
    return y;
  }

  // x̂ as the four bits of q + 8, q = ⌊x̂/step⌋ held within −8..7: the highest bit is the sign.
  static NM_INLINE void encode(const P& xhat, int16_t* bits) {
    const P q = fma(xhat, splat_pack<C>(C(1 / kCodeStep)), splat_pack<C>(C(8)));
    Bits<C> whole[P::kVectors];  // NaN counts as the least
    NM_EACH(j) whole[j] = __builtin_convertvector(min<C>(max<C>(q.v[j], Vec<C>{}), splat<C>(C(15))), Bits<C>);
    for (int bit = 0; bit < 4; ++bit) {
      uint32_t set = 0;
      NM_EACH(j) set |= vector_bits<C>(whole[j] << (8 * int(sizeof(C)) - 1 - bit)) << (j * kWidth<C>);
      bits[bit] = int16_t(set);
    }
  }
  static NM_INLINE P decode(const int16_t* bits) {
    P xhat = splat_pack<C>(C(-7.5 * kCodeStep));
    for (int bit = 0; bit < 4; ++bit) {
      const P more = xhat + splat_pack<C>(C((1 << bit) * kCodeStep));
      xhat = choose(uint16_t(bits[bit]), more, xhat);
    }
    return xhat;
  }

  void planes_normalize(int64_t c, int64_t begin, int64_t end) {
    with_bool(a.relu, [&](auto relu) {
      with_bool(a.residual != nullptr, [&](auto residual) {
        const P mu = splat_pack<C>(mean[c]), slope = splat_pack<C>(slope_of(c)), offset = splat_pack<C>(offset_of(c));
        const P to_xhat = splat_pack<C>(inverse[c]);
        each_segment(c, begin, end, [&](int64_t at, int64_t image, int64_t pixel, int64_t length) {
          const T* from = x() + at;
          const T* added = residual.value ? static_cast<const T*>(a.residual) + at : from;
          if (residual.value) load_plane_soon(a.residual, at);
          T* to = static_cast<T*>(a.y) + at;
          int16_t* bits = planes_saved ? bits_at(image, c, pixel) : nullptr;
          sweep<C>(length, [&](int64_t i, auto, auto part) __attribute__((always_inline)) {
            put(to + i, normalized<relu.value, residual.value>(
                load_pack(from + i, part), added + i, mu, slope, offset, bits + i / kPack * planes_saved, to_xhat, part), part);
          });
        });
      });
    });
  }

  template <bool kRelu, bool kResidual>
  void rows_normalize(int64_t, int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end) {
    each_block(r_begin, r_end, p_begin, p_end, [&](auto U, int64_t column, auto part, int64_t r0, int64_t r1) __attribute__((always_inline)) {
      P mu[U.value], slope[U.value], offset[U.value], to_xhat[U.value];
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u) {
        mu[u] = load_pack(mean + column + u * kPack, part);
        slope[u] = load_pack(factor.data() + column + u * kPack);
        offset[u] = load_pack(shift.data() + column + u * kPack);
        to_xhat[u] = load_pack(inverse + column + u * kPack, part);
      }
      for (int64_t r = r0; r < r1; ++r) {
        load_soon<U.value>(x(), (r + block) * channels + column);
        if (kResidual) load_soon<U.value>(a.residual, (r + block) * channels + column);
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) {
          const int64_t at = r * channels + column + u * kPack;
          int16_t* bits = planes_saved ? row_bits_at(r, column + u * kPack) : nullptr;
          const T* residual = static_cast<const T*>(a.residual) + (kResidual ? at : 0);
          put(static_cast<T*>(a.y) + at, normalized<kRelu, kResidual>(
              load_pack(x() + at, part), residual, mu[u], slope[u], offset[u], bits, to_xhat[u], part), part);
        }
      }
    });
  }

  // ---- backward -------------------------------------------------------------------------------------------------

  // Where the ReLU is open: everywhere, where the input says so, where a bit is set, where the output is not 0.
  enum Gate { kAlways, kInput, kBit, kOutput };
  // What x − μ comes from: the input, the output (lean), four bits (lean), or nothing (mean-only).
  enum Center { kFromInput, kFromOutput, kFromCode, kNothing };
  enum Direction { kSign, kLinear, kPower };

  // Numbers per channel of the two backward passes.
  struct Numbers {
    P mu, slope, offset;        // of the forward pass; lean: 1/γ and β
    P along, low, high;         // dx = slope·g + along·u + low, or slope·g + (u ? high : low)
    P inverse_T, rest;          // Lp
  };

  template <class Body>
  void with_modes(Body&& body) {
    using std::integral_constant;
    const auto go = [&](auto gate, auto center) {
      body(integral_constant<Gate, gate.value>{}, integral_constant<Center, center.value>{});
    };
    constexpr integral_constant<Gate, kAlways> always{};
    constexpr integral_constant<Gate, kInput> by_input{};
    constexpr integral_constant<Gate, kBit> by_bit{};
    constexpr integral_constant<Gate, kOutput> by_output{};
    constexpr integral_constant<Center, kFromInput> input{};
    constexpr integral_constant<Center, kFromOutput> output{};
    constexpr integral_constant<Center, kFromCode> code{};
    constexpr integral_constant<Center, kNothing> nothing{};
    if (a.code == 1) return go(by_output, output);
    if (a.code == 4) return a.mask ? go(by_bit, code) : go(always, code);
    if (a.kind == kMean) return a.mask ? go(by_bit, nothing) : go(always, nothing);
    if (a.mask) return go(by_bit, input);
    return a.relu ? go(by_input, input) : go(always, input);
  }

  template <class Body>
  void with_direction(Body&& body) {
    if (a.kind == kL1) body(std::integral_constant<Direction, kSign>{});
    else if (a.kind == kLp) body(std::integral_constant<Direction, kPower>{});
    else body(std::integral_constant<Direction, kLinear>{});
  }

  // g where the ReLU is open, and x − μ (lean: x̂).
  template <Gate kGate, Center kCenter, class Part>
  NM_INLINE void read(int64_t at, const int16_t* bits, const Numbers& with, Part part, P& g, P& centered, P& value) const {
    g = loaded<C>(load_pack(static_cast<const T*>(a.g) + at, part));
    if constexpr (kGate == kBit) g = choose(uint16_t(*bits), g, P{});
    if constexpr (kCenter == kFromCode) centered = decode(bits + (kGate == kBit));
    if constexpr (kCenter == kFromInput || kCenter == kFromOutput) value = load_pack(x() + at, part);
    if constexpr (kCenter == kFromInput) {
      centered = value - with.mu;
      if constexpr (kGate == kInput) g = relu_gate(g, fma(centered, with.slope, with.offset));
    }
    if constexpr (kCenter == kFromOutput) {
      g = relu_gate(g, value);
      centered = (value - with.offset) * with.mu;
      // Where γ is too small for the output to tell x̂, its sign and mean size do.
      centered = centered + choose(uint16_t(*bits), with.high, with.low);
    }
  }

  template <Center kCenter, Direction kDirection>
  static constexpr int sums_of() {
    return kCenter == kFromInput && kDirection != kLinear ? 3 : 2;
  }

  // u up to a factor and a constant, as in kernels/hand_derived.py: [x ≥ μ], x − μ, or ±(|x − μ|/T)^(p−1).
  NM_INLINE P power_direction(const P& centered, const Numbers& with) const {
    const P d = centered - with.rest;
    P u = power(abs(d * with.inverse_T), C(a.p - 1));
    NM_EACH(j) u.v[j] = d.v[j] < C(0) ? -u.v[j] : u.v[j];
    return u;
  }

  template <Gate kGate, Center kCenter, Direction kDirection, class Part>
  NM_INLINE void add_sums(int64_t at, const int16_t* bits, const Numbers& with, Part part, P* sums) const {
    P g, centered, value;
    read<kGate, kCenter>(at, bits, with, part, g, centered, value);
    sums[0] = sums[0] + g;
    if constexpr (kCenter != kNothing) sums[1] = fma(g, existing(centered, part), sums[1]);
    if constexpr (sums_of<kCenter, kDirection>() == 3) {
      if constexpr (kDirection == kSign)
        sums[2] = sums[2] + existing(where_at_least(value, with.mu, splat_pack<C>(C(1)), P{}), part);
      else
        sums[2] = sums[2] + existing(power_direction(centered, with), part);
    } else if constexpr (kCenter == kFromOutput || kCenter == kFromCode) {
      const uint16_t sign = uint16_t(kCenter == kFromOutput ? bits[0] : bits[(kGate == kBit) + 3]);
      sums[2] = sums[2] + existing(choose(sign, splat_pack<C>(C(1)), P{}), part);
    }
  }

  template <Gate kGate, Center kCenter, Direction kDirection, class Part>
  NM_INLINE void write_gradient(int64_t at, const int16_t* bits, const Numbers& with, Part part) const {
    P g, centered, value;
    constexpr Center kNeeded = kCenter == kFromCode ? kNothing : kCenter;
    if constexpr (kCenter == kFromOutput) {
      g = loaded<C>(load_pack(static_cast<const T*>(a.g) + at, part));
      g = relu_gate(g, load_pack(x() + at, part));
    } else {
      read<kGate, kNeeded>(at, bits, with, part, g, centered, value);
    }
    if (a.dresidual) put(static_cast<T*>(a.dresidual) + at, g, part);
    P rest_of = with.low;
    if constexpr (kCenter == kFromOutput) rest_of = choose(uint16_t(bits[0]), with.high, with.low);
    else if constexpr (kCenter == kFromCode) rest_of = choose(uint16_t(bits[(kGate == kBit) + 3]), with.high, with.low);
    else if constexpr (kCenter == kFromInput) {
      if constexpr (kDirection == kSign) rest_of = where_at_least(value, with.mu, with.high, with.low);
      else if constexpr (kDirection == kLinear) rest_of = fma(centered, with.along, with.low);
      else rest_of = fma(power_direction(centered, with), with.along, with.low);
    }
    // The lean passes read 1/γ from `mu`; the forward slope is in `slope` in every mode.
    put(static_cast<T*>(a.dx) + at, fma(g, with.slope, rest_of), part);
  }

  std::vector<C> sum_mu, sum_offset, sum_low, sum_high, along, low, high, inverse_T, sum_rest;

  void backward() {
    prefer_large_pages(a.dx, bytes());
    if (a.dresidual) prefer_large_pages(a.dresidual, bytes());
    const int64_t padded = rows ? packs * kPack : channels;
    for (auto* v : {&sum_mu, &sum_offset, &sum_low, &sum_high, &along, &low, &high, &inverse_T, &sum_rest, &factor})
      v->assign(padded, C(0));
    make_slots(3);
    with_modes([&](auto gate, auto center) {
      if constexpr (center.value == kFromInput) {
        with_direction([&](auto direction) { run<gate.value, center.value, direction.value>(); });
      } else if constexpr (center.value == kNothing) {
        run<gate.value, center.value, kLinear>();
      } else {
        run<gate.value, center.value, kSign>();
      }
    });
    if (has_positions()) each_channel([&](int64_t c) { add_extremes(c); });
  }

  template <Gate kGate, Center kCenter, Direction kDirection>
  void run() {
    if (!rows && parts == 1) {
      parallel_for(channels, [&](int64_t c) {
        before_sums(c);
        planes_backward_sums<kGate, kCenter, kDirection>(c, c, 0, n * cuts);
        after_sums(c);
        planes_gradient<kGate, kCenter, kDirection>(c, 0, n * cuts);
      });
      return;
    }
    for (int64_t c = 0; c < channels; ++c) before_sums(c);
    if (rows) each_rows_task([&](auto... bounds) { rows_backward_sums<kGate, kCenter, kDirection>(bounds...); });
    else each_planes_task([&](auto... bounds) { planes_backward_sums<kGate, kCenter, kDirection>(bounds...); });
    each_channel([&](int64_t c) { after_sums(c); });
    if (!a.dx) return;
    if (rows) each_rows_task([&](auto... bounds) { rows_gradient<kGate, kCenter, kDirection>(bounds...); });
    else each_planes_task([&](int64_t c, int64_t, int64_t begin, int64_t end) {
      planes_gradient<kGate, kCenter, kDirection>(c, begin, end);
    });
  }

  void before_sums(int64_t c) {
    factor[c] = slope_of(c);
    sum_mu[c] = mean[c];
    sum_rest[c] = rest[c];
    sum_offset[c] = offset_of(c);
    const double T_of = double(scale[c]) / a.constant;
    inverse_T[c] = C(1 / (T_of == 0 ? 1.0 : T_of));
    if (a.code == 1) {
      // x̂ = (z − β)/γ. A γ that is small beside what rounding took from z tells nothing: then ±mean |x̂|.
      const double lost = std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, double> ? 0x1p-53
                          : std::is_same_v<T, bfloat16> ? 0x1p-9 : 0x1p-12;
      const double tiny = (std::is_same_v<T, float16> ? 0x1p-14 : std::is_same_v<T, double> ? 0x1p-1022 : 0x1p-126) * lost;
      const double gamma = double(weight(c)), beta = double(bias(c));
      const bool vague = !(std::abs(gamma) >= 16 * (lost * std::abs(beta) + tiny));
      sum_mu[c] = vague ? C(0) : C(1 / gamma);
      sum_offset[c] = bias(c);
      sum_high[c] = vague ? C(T_of * double(inverse[c])) : C(0);
      sum_low[c] = -sum_high[c];
    }
  }

  void after_sums(int64_t c) {
    const double sum_g = total(c, 3, 0);
    double sum_gx = total(c, 3, 1), sum_u = total(c, 3, 2);
    const double D_inverse = double(inverse[c]), s = double(scale[c]), total_count = double(count);
    if (a.code == 0) sum_gx = (sum_gx - double(rest[c]) * sum_g) * D_inverse;  // Σ g·x̂
    if (a.kind == kL2) sum_u = double(rest[c]) * total_count;
    if (has_positions()) {
      sum_u = 0;
      if (a.kind != kRange)
        for (int64_t i = 0; i < extremes_of(); ++i) sum_u += extreme_slope(c, i);
    }
    if (a.dweight) static_cast<C*>(a.dweight)[c] = C(sum_gx);
    if (a.dbias) static_cast<C*>(a.dbias)[c] = C(sum_g);
    const double slope = double(factor[c]);
    double along_u = 0;
    if (a.kind != kMean) {
      const double factor_of = a.kind == kL1 ? 2 / total_count : a.kind == kL2 || a.kind == kLp ? 1 / total_count : 1;
      along_u = -slope * D_inverse * sum_gx * a.constant * factor_of * (a.kind == kL2 ? a.constant : s);
    }
    const double constant_part = -(along_u * sum_u + slope * sum_g) / total_count;
    along[c] = has_positions() ? C(0) : C(along_u);
    low[c] = C(constant_part);
    high[c] = C(constant_part + along_u);
    if (has_positions()) high[c] = C(along_u);
  }

  int64_t extremes_of() const { return a.kind == kRange ? 2 : a.kind == kLinf ? 1 : a.k; }
  double extreme_slope(int64_t c, int64_t i) const {
    if (a.kind == kRange) return i == 0 ? 1 : -1;
    const C d = deviation_of(c, load_one(x() + a.positions[c * extremes_of() + i]));
    return (d > 0 ? 1.0 : d < 0 ? -1.0 : 0.0) / double(extremes_of());
  }

  // L∞, Top(k), range: u is not 0 at a few elements only.
  void add_extremes(int64_t c) {
    if (!a.dx) return;
    for (int64_t i = 0; i < extremes_of(); ++i) {
      T* at = static_cast<T*>(a.dx) + a.positions[c * extremes_of() + i];
      store_one(at, C(double(load_one(at)) + double(high[c]) * extreme_slope(c, i)));
    }
  }

  NM_INLINE Numbers numbers(int64_t c) const {
    Numbers with;
    with.mu = splat_pack<C>(sum_mu[c]);
    with.slope = splat_pack<C>(factor[c]);
    with.offset = splat_pack<C>(sum_offset[c]);
    with.inverse_T = splat_pack<C>(inverse_T[c]);
    with.rest = splat_pack<C>(sum_rest[c]);
    return with;
  }
  NM_INLINE Numbers row_numbers(int64_t column) const {
    Numbers with;
    with.mu = load_pack(sum_mu.data() + column);
    with.slope = load_pack(factor.data() + column);
    with.offset = load_pack(sum_offset.data() + column);
    with.inverse_T = load_pack(inverse_T.data() + column);
    with.rest = load_pack(sum_rest.data() + column);
    return with;
  }

  template <Gate kGate, Center kCenter, Direction kDirection>
  void planes_backward_sums(int64_t c, int64_t slot, int64_t begin, int64_t end) {
    Numbers with = numbers(c);
    with.low = splat_pack<C>(sum_low[c]);
    with.high = splat_pack<C>(sum_high[c]);
    alignas(64) double lanes[3][kPack] = {};
    P sums[4][3] = {};
    int64_t since = 0;
    const auto flush_all = [&]() __attribute__((always_inline)) {
      for (int i = 0; i < 3; ++i) {
        add_to(lanes[i], (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]));
        for (int u = 0; u < 4; ++u) sums[u][i] = P{};
      }
      since = 0;
    };
    each_segment(c, begin, end, [&](int64_t at, int64_t image, int64_t pixel, int64_t length) {
      const int16_t* bits = planes_saved ? bits_at(image, c, pixel) : nullptr;
      load_plane_soon(a.g, at);
      if (a.x) load_plane_soon(a.x, at);
      for (int64_t done = 0; done < length; done += 4096) {
        const int64_t here = std::min<int64_t>(4096, length - done);
        if (since + here > 4096) flush_all();
        since += divide_up(here, 4 * kPack) * 4 * kPack;
        sweep<C>(here, [&](int64_t i, auto u, auto part) __attribute__((always_inline)) {
          add_sums<kGate, kCenter, kDirection>(at + done + i, bits + (done + i) / kPack * planes_saved, with, part, sums[u]);
        });
      }
    });
    flush_all();
    for (int i = 0; i < 3; ++i) slots[slot * 3 + i] = sum_lanes(lanes[i]);
  }

  template <Gate kGate, Center kCenter, Direction kDirection>
  void planes_gradient(int64_t c, int64_t begin, int64_t end) {
    if (!a.dx) return;
    Numbers with = numbers(c);
    with.along = splat_pack<C>(along[c]);
    with.low = splat_pack<C>(low[c]);
    with.high = splat_pack<C>(high[c]);
    each_segment<true>(c, begin, end, [&](int64_t at, int64_t image, int64_t pixel, int64_t length) {
      const int16_t* bits = planes_saved ? bits_at(image, c, pixel) : nullptr;
      sweep<C>(length, [&](int64_t i, auto, auto part) __attribute__((always_inline)) {
        write_gradient<kGate, kCenter, kDirection>(at + i, bits + i / kPack * planes_saved, with, part);
      });
    });
  }

  template <Gate kGate, Center kCenter, Direction kDirection>
  void rows_backward_sums(int64_t row, int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end) {
    each_block(r_begin, r_end, p_begin, p_end, [&](auto U, int64_t column, auto part, int64_t r0, int64_t r1) __attribute__((always_inline)) {
      Numbers with[U.value];
      P sums[U.value][3] = {};
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u) {
        with[u] = row_numbers(column + u * kPack);
        with[u].low = load_pack(sum_low.data() + column + u * kPack);
        with[u].high = load_pack(sum_high.data() + column + u * kPack);
      }
      for (int64_t r = r0; r < r1; ++r) {
        load_soon<U.value>(a.g, (r + block) * channels + column);
        if (a.x) load_soon<U.value>(a.x, (r + block) * channels + column);
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) {
          const int16_t* bits = planes_saved ? row_bits_at(r, column + u * kPack) : nullptr;
          add_sums<kGate, kCenter, kDirection>(r * channels + column + u * kPack, bits, with[u], part, sums[u]);
        }
      }
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u)
        for (int i = 0; i < 3; ++i) add_to(row_slot(row, 3, i) + column + u * kPack, sums[u][i]);
    });
  }

  template <Gate kGate, Center kCenter, Direction kDirection>
  void rows_gradient(int64_t, int64_t r_begin, int64_t r_end, int64_t p_begin, int64_t p_end) {
    each_block<true>(r_begin, r_end, p_begin, p_end, [&](auto U, int64_t column, auto part, int64_t r0, int64_t r1) __attribute__((always_inline)) {
      Numbers with[U.value];
#pragma GCC unroll 4
      for (int u = 0; u < U.value; ++u) {
        with[u] = row_numbers(column + u * kPack);
        with[u].along = load_pack(along.data() + column + u * kPack);
        with[u].low = load_pack(low.data() + column + u * kPack);
        with[u].high = load_pack(high.data() + column + u * kPack);
      }
      for (int64_t r = r0; r < r1; ++r) {
        load_soon<U.value>(a.g, (r - block) * channels + column);
        if (a.x) load_soon<U.value>(a.x, (r - block) * channels + column);
#pragma GCC unroll 4
        for (int u = 0; u < U.value; ++u) {
          const int16_t* bits = planes_saved ? row_bits_at(r, column + u * kPack) : nullptr;
          write_gradient<kGate, kCenter, kDirection>(r * channels + column + u * kPack, bits, with[u], part);
        }
      }
    });
  }
};

}  // namespace nm

// The C functions for one dtype. The arguments are read from memory: Python packs them at once.
#define NM_BATCH_NORM(T, name)                                                        \
  NM_EXPORT void nm_batch_norm_forward_##name(const nm::BatchNormArgs* arguments) {   \
    nm::BatchNorm<T>(*arguments).forward();                                           \
  }                                                                                   \
  NM_EXPORT void nm_batch_norm_backward_##name(const nm::BatchNormArgs* arguments) {  \
    nm::BatchNorm<T>(*arguments).backward();                                          \
  }
