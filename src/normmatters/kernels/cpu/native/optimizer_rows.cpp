// What optimizers do to the channels of their weights: one call for all parameters, each row read from memory once.
//
// A row stays in the cache between the two passes that a rotation makes over it, so a step costs what SGD's own costs:
// it reads the weights, the buffers and the gradients, and writes the weights and the buffers.
#include <cmath>
#include <limits>

#include "rows.h"

namespace nm {
namespace {

struct Rotated {
  void* weight;
  void* direction;  // with momentum the buffer, which is updated
  const void* grad;
  const void* norm;  // [rows], compute type
  int64_t rows, length;
};

struct Stepped {
  void* weight;
  void* buffer;  // null without momentum
  const void* grad;
};

struct Measured {
  const void* weight;
  void* norm;      // [rows], compute type; with `previous` read first: the norm then
  void* previous;  // null, or the weight of the last reading; becomes the present one
  void* tangent;   // [rows], compute type; unused without `previous`
  int64_t rows, length;
};

struct Scaled {
  void* to;
  const void* from;
  const void* ratio;  // [rows], compute type
  int64_t rows, length;
};

enum Form : int64_t { kGiven, kMomentum, kNesterov };

struct Turn {
  double cos, sin, decay, sign;
};

// w·w, w·d and d·d of a row, and whether its gradient is anything but 0.
struct Products {
  double ww = 0, wd = 0, dd = 0;
  bool any = false;
};

// A row's direction: as it is given, its momentum buffer, or Nesterov's form of that.
template <class T, int kForm>
struct Direction {
  T* d;
  const T* g;
  Vec<Compute<T>> decay, sign;

  template <class Lanes>
  NM_INLINE Vec<Compute<T>> at(int64_t i, Lanes lanes) const {
    Vec<Compute<T>> x = lanes.load(d + i);
    return kForm == kNesterov ? fma(decay, x, sign * lanes.load(g + i)) : x;
  }
  double one(int64_t i) const {
    return double(kForm == kNesterov ? decay[0] * load_one(d + i) + sign[0] * load_one(g + i) : load_one(d + i));
  }
};

// The products of a row, whose buffer takes in the gradient on the way.
template <class T, int kForm>
NM_INLINE Products take_in(const T* w, const Direction<T, kForm>& direction, int64_t n) {
  using C = Compute<T>;
  Products sums;
  Bits<C> any = {};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec<C> ww[kUnroll] = {}, wd[kUnroll] = {}, dd[kUnroll] = {};
    for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
      const Vec<C> x = lanes.load(w + i), grad = lanes.load(direction.g + i);
      Vec<C> d = lanes.load(direction.d + i);
      any |= grad != 0;
      if (kForm != kGiven) {
        d = fma(direction.decay, d, direction.sign * grad);
        lanes.store(direction.d + i, d);
        if (sizeof(T) < sizeof(C)) d = lanes.load(direction.d + i);  // as rounded: that is what the last pass reads
      }
      if (kForm == kNesterov) d = fma(direction.decay, d, direction.sign * grad);
      ww[k] = fma(x, x, ww[k]);
      wd[k] = fma(x, d, wd[k]);
      dd[k] = fma(d, d, dd[k]);
    });
    sums.ww += sum_of<C>(ww);
    sums.wd += sum_of<C>(wd);
    sums.dd += sum_of<C>(dd);
  }
  for (int i = 0; i < kWidth<C>; ++i) sums.any |= any[i] != 0;
  return sums;
}

// w ← ρ(cos θ·ŵ − sin θ·d̂⊥) with d⊥ = d − ⟨d, ŵ⟩ŵ.
template <class T, int kForm>
void rotate_row(T* w, T* d, const T* g, double rho, int64_t n, const Turn& turn) {
  using C = Compute<T>;
  const Direction<T, kForm> direction{d, g, splat(C(turn.decay)), splat(C(turn.sign))};
  Products sums = take_in(w, direction, n);
  double along = sums.wd / sums.ww;
  double squares = sums.dd - along * sums.wd;  // ‖d⊥‖²
  if (!in_range(sums.ww) || !in_range(sums.dd)) {
    // Also a pruned row, which has no direction and stays 0, and a direction that is 0.
    sums.ww = sums.wd = sums.dd = squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double x = load_one(w + i), y = direction.one(i);
      sums.ww += x * x;
      sums.wd += x * y;
      sums.dd += y * y;
    }
    if (sums.ww == 0) sums.ww = 1, rho = 0;
    along = sums.wd / sums.ww;
    for (int64_t i = 0; i < n; ++i) {
      const double p = direction.one(i) - along * load_one(w + i);
      squares += p * p;
    }
  } else if (!(squares > 0.5 * sums.dd)) {
    // Subtract first, square after: the difference above loses the digits of a direction that is nearly along w.
    const Vec<C> share = splat(C(-along));
    squares = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      Vec<C> pp[kUnroll] = {};
      for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
        const Vec<C> p = fma(share, lanes.load(w + i), direction.at(i, lanes));
        pp[k] = fma(p, p, pp[k]);
      });
      squares += sum_of<C>(pp);
    }
  }
  const double size = std::sqrt(squares);
  const bool turns = sums.any && size > 16 * std::numeric_limits<C>::epsilon() * std::sqrt(sums.dd);
  const double a = (turns ? turn.cos : 1) * rho / std::sqrt(sums.ww), b = turns ? turn.sin * rho / size : 0;
  const Vec<C> of_w = splat(C(a + b * along)), of_d = splat(C(-b));
  for_each_vector<C>(0, n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
    lanes.store(w + i, fma(of_w, lanes.load(w + i), of_d * direction.at(i, lanes)));
  });
}

// The sum of squares of `n` numbers; `at(i, lanes)` gives a vector of them and `one(i)` a single one in double.
template <class C, class At, class One>
NM_INLINE double sum_of_squares(int64_t n, At&& at, One&& one) {
  double squares = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec<C> parts[kUnroll] = {};
    for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
      const Vec<C> x = at(i, lanes);
      parts[k] = fma(x, x, parts[k]);
    });
    squares += sum_of<C>(parts);
  }
  if (in_range(squares)) return squares;
  squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += one(i) * one(i);
  return squares;
}

// tan(θ/2) of the angle between vectors of lengths a and b with the squared distance dd; NaN where one is 0. Factored,
// it keeps its digits at the tiny angles of one training step. At the first reading a is 0 for no norm yet, and dd is 0.
double half_angle_tangent(double a, double b, double dd) {
  if (a == 0 || b == 0) return dd == 0 && b != 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
  const double d = std::sqrt(dd), opposite = (d - (a - b)) * (d + (a - b)), adjacent = (a + b - d) * (a + b + d);
  return std::sqrt((opposite < 0 ? 0 : opposite) / (adjacent < 0 ? 0 : adjacent));
}

}  // namespace
}  // namespace nm

using namespace nm;

// Turn each row by one angle away from its direction, and give it the norm ρ.
NM_EXPORT void nm_rotate_rows(const Rotated* tensors, const int64_t* starts, int64_t count, int64_t dtype, int64_t form,
                              double cos, double sin, double decay, double sign) {
  const Turn turn{cos, sin, decay, sign};
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto rotate = [&](auto row) {
      for_each_row(tensors, starts, count, [&](const Rotated& x, int64_t r) {
        const int64_t at = r * x.length;
        row((T*)x.weight + at, (T*)x.direction + at, (const T*)x.grad + at, double(((const Compute<T>*)x.norm)[r]),
            x.length, turn);
      });
    };
    if (form == kGiven) rotate(rotate_row<T, kGiven>);
    else if (form == kMomentum) rotate(rotate_row<T, kMomentum>);
    else rotate(rotate_row<T, kNesterov>);
  });
}

// b ← m₃w + m₄b + m₅g and, with the old b, w ← w + (m₀w + m₁b + m₂g), element by element: every form of SGD with momentum
// is such a step. The weight is not multiplied: in float32 1 − ηλ would be wrong in the third digit of ηλ.
NM_EXPORT void nm_momentum_step(const Stepped* tensors, const int64_t* starts, int64_t count, int64_t dtype, double m0,
                                double m1, double m2, double m3, double m4, double m5) {
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const Vec<C> ww = splat(C(m0)), wb = splat(C(m1)), wg = splat(C(m2));
    const Vec<C> bw = splat(C(m3)), bb = splat(C(m4)), bg = splat(C(m5));
    for_each_span(starts, count, [&](int64_t t, int64_t first, int64_t last) {
      T *w = (T*)tensors[t].weight, *b = (T*)tensors[t].buffer;
      const T* g = (const T*)tensors[t].grad;
      if (b) {
        for_each_vector<C>(first, last, [&](int64_t i, int, auto lanes) NM_ALWAYS {
          const Vec<C> vw = lanes.load(w + i), vb = lanes.load(b + i), vg = lanes.load(g + i);
          lanes.store(w + i, vw + fma(wb, vb, fma(wg, vg, ww * vw)));
          lanes.store(b + i, fma(bb, vb, fma(bg, vg, bw * vw)));
        });
      } else {
        for_each_vector<C>(first, last, [&](int64_t i, int, auto lanes) NM_ALWAYS {
          const Vec<C> vw = lanes.load(w + i);
          lanes.store(w + i, vw + fma(wg, lanes.load(g + i), ww * vw));
        });
      }
    });
  });
}

// The norm of each row and, with `previous`, the tangent of half the angle by which it turned since.
NM_EXPORT void nm_measure_rows(const Measured* tensors, const int64_t* starts, int64_t count, int64_t dtype) {
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    for_each_row(tensors, starts, count, [&](const Measured& x, int64_t r) {
      const T* w = (const T*)x.weight + r * x.length;
      const double norm = std::sqrt(sum_of_squares<C>(
          x.length, [&](int64_t i, auto lanes) NM_ALWAYS { return lanes.load(w + i); },
          [&](int64_t i) { return double(load_one(w + i)); }));
      if (x.previous) {
        T* before = (T*)x.previous + r * x.length;
        const double distance = sum_of_squares<C>(
            x.length, [&](int64_t i, auto lanes) NM_ALWAYS { return lanes.load(w + i) - lanes.load(before + i); },
            [&](int64_t i) { return double(load_one(w + i)) - double(load_one(before + i)); });
        ((C*)x.tangent)[r] = C(half_angle_tangent(((C*)x.norm)[r], norm, distance));
        std::memcpy(before, w, size_t(x.length) * sizeof(T));
      }
      ((C*)x.norm)[r] = C(norm);
    });
  });
}

// Each row times its ratio.
NM_EXPORT void nm_scale_rows(const Scaled* tensors, const int64_t* starts, int64_t count, int64_t dtype) {
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    for_each_row(tensors, starts, count, [&](const Scaled& x, int64_t r) {
      T* to = (T*)x.to + r * x.length;
      const T* from = (const T*)x.from + r * x.length;
      const Vec<C> ratio = splat(((const C*)x.ratio)[r]);
      for_each_vector<C>(0, x.length, [&](int64_t i, int, auto lanes) NM_ALWAYS {
        lanes.store(to + i, ratio * lanes.load(from + i));
      });
    });
  });
}
