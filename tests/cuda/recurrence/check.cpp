// Random sequences through the kernels of the recurrence, in the emulator or,
// compiled by nvcc, on a GPU. Each step is compared with what double makes of
// the state that the kernel itself had before it.

#include "cuda/recurrence/arguments.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
#include "gpu_backend.cuh"
#else
#include "emulated_backend.h"
#endif

namespace {

namespace recurrence = lltm::recurrence;
using recurrence::Cursor;
using recurrence::Sequence;

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An array of exactly so many elements, for the checkers to see its bounds.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t size)
      : size_(size),
        data_(static_cast<T*>(backend::allocate(size * sizeof(T)))) {
    std::memset(static_cast<void*>(data_), 0xff, size * sizeof(T));
  }

  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  ~Buffer() {
    backend::release(data_);
  }

  T* get() const {
    return data_;
  }

  T& operator[](size_t i) const {
    return data_[i];
  }

  size_t size() const {
    return size_;
  }

 private:
  size_t size_;
  T* data_;
};

struct Case {
  uint32_t seed;
  bool half; // or bfloat16
  int64_t steps;
  int64_t batch;
  int64_t state_size;
  int tiles;
  bool reverse;
  std::vector<int32_t> lengths; // none: not packed
  bool with_resets;
  bool write_gates;
  bool transposed_weights;
  bool odd_h0;      // not finite
  bool odd_weights; // likewise
  int64_t steps_of_launch;
  int64_t first_row; // of the tensors, of which only the rows from there exist
  bool with_grad_cells;
  bool with_grad_last; // of the last state

  // The rest follows from the seed.
  std::string describe() const {
    std::string text = half ? "float16" : "bfloat16";
    const auto add = [&](const char* name, int64_t value) {
      text += std::string(", ") + name + " " + std::to_string(value);
    };
    add("seed", seed);
    add("steps", steps);
    add("batch", batch);
    add("state_size", state_size);
    add("tiles", tiles);
    return text;
  }
};

struct Options {
  int64_t cases = 100;
  int64_t seed = 0; // of the first case
  int64_t least_units = 32;
  int64_t units = 320;
  int64_t blocks = 40; // at most
  int64_t steps = 6;   // at most
  int64_t tiles = 0;   // of the batch in each block: 1, 2 or 4; 0 is any
  backend::Plants plants;

  // --name=value
  bool set(const std::string& argument) {
    const std::map<std::string, int64_t*> numbers{
        {"--cases", &cases},
        {"--seed", &seed},
        {"--least-units", &least_units},
        {"--units", &units},
        {"--blocks", &blocks},
        {"--steps", &steps},
        {"--tiles", &tiles}};
    const auto equals = argument.find('=');
    if (equals == std::string::npos) {
      return false;
    }
    const auto name = argument.substr(0, equals);
    const auto value = argument.substr(equals + 1);
    if (name == "--plant") {
      return plants.set(value);
    }
    const auto number = numbers.find(name);
    if (number == numbers.end()) {
      return false;
    }
    *number->second = std::atoll(value.c_str());
    return true;
  }
};

Case draw(uint32_t seed, const Options& options) {
  std::mt19937 random(seed);
  const auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (high - low + 1));
  };
  Case drawn{};
  do {
    drawn.seed = seed;
    drawn.half = between(0, 1);
    drawn.state_size =
        32 * between(options.least_units / 32, options.units / 32);
    const int any = 1 << between(0, 2);
    drawn.tiles = options.tiles > 0 ? static_cast<int>(options.tiles) : any;
    drawn.batch = between(1, 10 * drawn.tiles);
    drawn.steps = between(1, options.steps);
  } while (recurrence::grid_blocks(drawn.batch, drawn.state_size, drawn.tiles) >
           options.blocks);
  drawn.reverse = between(0, 1);
  drawn.with_resets = between(0, 1);
  drawn.write_gates = between(0, 2) > 0;
  drawn.transposed_weights = between(0, 1);
  drawn.odd_h0 = between(0, 3) == 0;
  // One launch takes all steps if gates are kept.
  drawn.steps_of_launch =
      drawn.write_gates ? drawn.steps : between(1, drawn.steps);
  if (between(0, 1)) {
    for (int64_t i = 0; i < drawn.batch; ++i) {
      drawn.lengths.push_back(static_cast<int32_t>(between(1, drawn.steps)));
    }
    std::sort(drawn.lengths.rbegin(), drawn.lengths.rend());
    drawn.lengths[0] = static_cast<int32_t>(drawn.steps);
  }
  drawn.odd_weights = between(0, 3) == 0;
  // No index of 32 bits reaches such rows.
  if (between(0, 1) && backend::kFarRows) {
    drawn.first_row = (int64_t(1) << 32) / drawn.state_size + 1;
  }
  drawn.with_grad_cells = between(0, 3) > 0;
  drawn.with_grad_last = between(0, 3) > 0;
  return drawn;
}

// Arguments, results, and what the results have to be.
template <typename scalar_t>
class Run {
 public:
  explicit Run(const Case& drawn, const backend::Plants& plants)
      : case_(drawn),
        plants_(plants),
        random_(drawn.seed + 1),
        sequence_(sequence_of(drawn)),
        cursors_(cursors_of(sequence_)),
        H_(drawn.state_size),
        rows_(total_rows(cursors_)),
        stride_(drawn.transposed_weights ? 3 * H_ : H_ + 5),
        weights_(3 * H_ * (H_ + 5)),
        h0_(drawn.batch * H_),
        c0_(drawn.batch * H_),
        products_(rows_ * 3 * H_),
        gates_(rows_ * 3 * H_),
        output_(rows_ * H_),
        cells_(rows_ * H_),
        cell_(drawn.batch * H_),
        resets_(rows_),
        grad_output_(rows_ * H_),
        grad_cells_(rows_ * H_),
        grad_h_n_(drawn.batch * H_),
        grad_c_n_(drawn.batch * H_),
        d_preactivations_(rows_ * 3 * H_),
        d_h0_(drawn.batch * H_),
        d_c0_(drawn.batch * H_) {
    fill(weights_, 0.7 / std::sqrt(double(H_)));
    fill(h0_, 0.5);
    fill(c0_, 0.5);
    fill(products_, 1);
    fill(grad_output_, 0.3);
    fill(grad_cells_, drawn.with_grad_cells ? 0.1 : 0);
    fill(grad_h_n_, drawn.with_grad_last ? 0.2 : 0);
    fill(grad_c_n_, drawn.with_grad_last ? 0.1 : 0);
    for (int64_t row = 0; row < rows_; ++row) {
      resets_[row] = random_() % 4 == 0 ? 2 : 0; // any byte but 0
    }
    if (drawn.odd_weights) {
      weights_[drawn.transposed_weights ? stride_ + 3 : 3 * stride_ + 1] =
          std::numeric_limits<scalar_t>::infinity();
    }
    if (drawn.odd_h0) {
      // The sentinel, which is a NaN, may well be in an argument.
      h0_[0].x = h0_[1].x = 0xffff;
      c0_[h0_.size() - 1] = std::numeric_limits<scalar_t>::infinity();
    }
  }

  void check() {
    forward();
    check_forward();
    if (case_.write_gates) {
      backward();
      check_backward();
    }
  }

 private:
  static Sequence sequence_of(const Case& drawn) {
    Sequence sequence{
        static_cast<int32_t>(drawn.steps),
        static_cast<int32_t>(drawn.batch),
        drawn.reverse,
        !drawn.lengths.empty(),
        {}};
    std::copy(drawn.lengths.begin(), drawn.lengths.end(), sequence.lengths);
    return sequence;
  }

  // By themselves: those of the kernel are what is tested.
  static std::vector<Cursor> cursors_of(const Sequence& sequence) {
    std::vector<Cursor> cursors;
    int64_t first_row = 0;
    for (int32_t step = 0; step < sequence.steps; ++step) {
      int32_t rows = 0;
      for (int64_t i = 0; i < sequence.batch; ++i) {
        rows += !sequence.packed || sequence.lengths[i] > step;
      }
      cursors.push_back({step, rows, first_row});
      first_row += rows;
    }
    if (sequence.reverse) {
      std::reverse(cursors.begin(), cursors.end());
    }
    return cursors;
  }

  static int64_t total_rows(const std::vector<Cursor>& cursors) {
    int64_t rows = 0;
    for (const auto& cursor : cursors) {
      rows += cursor.rows;
    }
    return rows;
  }

  void fill(const Buffer<scalar_t>& buffer, double scale) {
    std::normal_distribution<double> normal(0, scale);
    for (size_t i = 0; i < buffer.size(); ++i) {
      buffer[i] = static_cast<scalar_t>(static_cast<float>(normal(random_)));
    }
  }

  double weight(int64_t gate_unit, int64_t unit) const {
    return case_.transposed_weights ? weights_[unit * stride_ + gate_unit]
                                    : weights_[gate_unit * stride_ + unit];
  }

  bool is_reset(int64_t row) const {
    return case_.with_resets && resets_[row] != 0;
  }

  bool begins(size_t turn, int64_t sequence) const {
    return turn == 0 || sequence >= cursors_[turn - 1].rows;
  }

  // The kernels see rows from first_row on.
  Cursor far(Cursor cursor) const {
    cursor.first_row += case_.first_row;
    return cursor;
  }

  template <typename T>
  T* far(T* rows, int64_t columns) const {
    return rows - case_.first_row * columns;
  }

  template <typename Args>
  void set_common(Args& args) const {
    args.sequence = sequence_;
    args.state_size = H_;
    args.weights = weights_.get();
    args.weights_strides[0] = case_.transposed_weights ? 1 : stride_;
    args.weights_strides[1] = case_.transposed_weights ? stride_ : 1;
    args.resets = case_.with_resets ? far(resets_.get(), 1) : nullptr;
  }

  void forward() {
    for (int64_t i = 0; i < case_.batch * H_; ++i) {
      cell_[i] = c0_[i];
    }
    const int64_t turns = cursors_.size();
    for (int64_t begin = 0; begin < turns; begin += case_.steps_of_launch) {
      const auto end = std::min(begin + case_.steps_of_launch, turns);
      const auto low =
          std::min(cursors_[begin].first_row, cursors_[end - 1].first_row);
      const auto high = std::max(
          cursors_[begin].first_row + cursors_[begin].rows,
          cursors_[end - 1].first_row + cursors_[end - 1].rows);
      Buffer<scalar_t> gates((high - low) * 3 * H_);
      std::copy_n(products_.get() + low * 3 * H_, gates.size(), gates.get());
      recurrence::Forward<scalar_t> args{};
      set_common(args);
      args.launch_steps = end - begin;
      args.first_step = far(cursors_[begin]);
      args.before = begin > 0 ? far(cursors_[begin - 1]) : Cursor{};
      args.h0 = h0_.get();
      args.cell = cell_.get();
      args.products = gates.get();
      args.products_row = case_.first_row + low;
      args.output = far(output_.get(), H_);
      args.cells = far(cells_.get(), H_);
      args.write_gates = case_.write_gates;
      backend::run_recurrence(args, case_.tiles, case_.seed, plants_);
      std::copy_n(gates.get(), gates.size(), gates_.get() + low * 3 * H_);
    }
  }

  void check_forward() const {
    std::vector<double> cell(case_.batch * H_);
    for (size_t i = 0; i < cell.size(); ++i) {
      cell[i] = c0_[i];
    }
    std::vector<double> h(H_);
    for (size_t turn = 0; turn < cursors_.size(); ++turn) {
      for (int64_t own = 0; own < cursors_[turn].rows; ++own) {
        const auto row = cursors_[turn].first_row + own;
        const scalar_t* const from = begins(turn, own)
            ? h0_.get() + own * H_
            : output_.get() + (cursors_[turn - 1].first_row + own) * H_;
        for (int64_t unit = 0; unit < H_; ++unit) {
          h[unit] = is_reset(row) ? 0.0 : double(from[unit]);
        }
        for (int64_t unit = 0; unit < H_; ++unit) {
          double sum[3];
          for (int64_t gate = 0; gate < 3; ++gate) {
            sum[gate] = products_[(row * 3 + gate) * H_ + unit];
            for (int64_t k = 0; k < H_; ++k) {
              sum[gate] += h[k] * weight(gate * H_ + unit, k);
            }
          }
          const double i = 1 / (1 + std::exp(-sum[0]));
          const double o = 1 / (1 + std::exp(-sum[1]));
          const double g = sum[2] > 0 ? sum[2] : std::expm1(sum[2]);
          double& c = cell[own * H_ + unit];
          c = (is_reset(row) ? 0 : c) + g * i;
          expect(
              "output", output_[row * H_ + unit], std::tanh(c) * o, row, unit);
          expect("cells", cells_[row * H_ + unit], c, row, unit);
          const double gates[] = {i, o, g};
          for (int64_t gate = 0; gate < 3; ++gate) {
            const auto at = (row * 3 + gate) * H_ + unit;
            expect(
                "gates",
                gates_[at],
                case_.write_gates ? gates[gate] : double(products_[at]),
                row,
                unit);
          }
        }
      }
    }
    for (int64_t i = 0; i < case_.batch * H_; ++i) {
      expect("cell", cell_[i], cell[i], i / H_, i % H_);
    }
  }

  void backward() {
    recurrence::Backward<scalar_t> args{};
    set_common(args);
    args.last = far(cursors_.back());
    args.gates = far(gates_.get(), 3 * H_);
    args.cells = far(cells_.get(), H_);
    args.grad_output = far(grad_output_.get(), H_);
    args.grad_cells =
        case_.with_grad_cells ? far(grad_cells_.get(), H_) : nullptr;
    args.grad_h_n = case_.with_grad_last ? grad_h_n_.get() : nullptr;
    args.grad_c_n = case_.with_grad_last ? grad_c_n_.get() : nullptr;
    args.d_preactivations = far(d_preactivations_.get(), 3 * H_);
    args.d_h0 = d_h0_.get();
    args.d_c0 = d_c0_.get();
    backend::run_recurrence(args, case_.tiles, case_.seed, plants_);
  }

  void check_backward() const {
    std::vector<double> d_cell(case_.batch * H_);
    for (size_t turn = cursors_.size(); turn-- > 0;) {
      for (int64_t own = 0; own < cursors_[turn].rows; ++own) {
        const auto row = cursors_[turn].first_row + own;
        for (int64_t unit = 0; unit < H_; ++unit) {
          const auto at = row * H_ + unit;
          const auto state = own * H_ + unit;
          // Sums in scalar_t, as those of PyTorch.
          scalar_t grad_h = grad_output_[at], grad_cell = grad_cells_[at];
          const bool goes_on =
              turn + 1 < cursors_.size() && own < cursors_[turn + 1].rows;
          if (!goes_on) {
            grad_h += grad_h_n_[state];
            grad_cell += grad_c_n_[state];
          }
          double d_h = grad_h;
          if (goes_on) {
            d_h += from_after(cursors_[turn + 1].first_row + own, unit);
          }
          const double i = gates_[row * 3 * H_ + unit];
          const double o = gates_[(row * 3 + 1) * H_ + unit];
          const double g = gates_[(row * 3 + 2) * H_ + unit];
          const double t = std::tanh(double(cells_[at]));
          double& d_c = d_cell[state];
          d_c += grad_cell + d_h * o * (1 - t * t);
          const double expected[] = {
              d_c * g * i * (1 - i),
              d_h * t * o * (1 - o),
              d_c * i * (g > 0 ? 1 : g + 1)};
          for (int64_t gate = 0; gate < 3; ++gate) {
            expect(
                "d_preactivations",
                d_preactivations_[(row * 3 + gate) * H_ + unit],
                expected[gate],
                row,
                unit);
          }
          if (is_reset(row)) {
            d_c = 0;
          }
          if (begins(turn, own)) {
            expect("d_h0", d_h0_[state], from_after(row, unit), own, unit);
            expect("d_c0", d_c0_[state], d_c, own, unit);
          }
        }
      }
    }
  }

  // What a row passes to the h that it began with.
  double from_after(int64_t row, int64_t unit) const {
    double sum = 0;
    for (int64_t j = 0; j < 3 * H_ && !is_reset(row); ++j) {
      sum += double(d_preactivations_[row * 3 * H_ + j]) * weight(j, unit);
    }
    return sum;
  }

  // Within the rounding of the result; sums and gates are float.
  template <typename T>
  static void expect(
      const char* name,
      T actual,
      double expected,
      int64_t row,
      int64_t unit) {
    const double value = actual;
    const double epsilon = std::is_same_v<T, float>
        ? 0
        : double(std::numeric_limits<T>::epsilon());
    const double error = 0.51 * epsilon * std::fabs(expected) + 3e-5;
    const bool right = std::isfinite(expected)
        ? std::fabs(value - expected) <= error
        : value == expected || (std::isnan(value) && std::isnan(expected));
    if (!right) {
      throw Wrong(
          std::string(name) + "[" + std::to_string(row) + ", " +
          std::to_string(unit) + "] is " + std::to_string(value) + ", not " +
          std::to_string(expected));
    }
  }

  const Case& case_;
  const backend::Plants plants_;
  std::mt19937 random_;
  const Sequence sequence_;
  const std::vector<Cursor> cursors_; // in the order in which they run
  const int64_t H_;
  const int64_t rows_;
  const int64_t stride_;
  const Buffer<scalar_t> weights_, h0_, c0_, products_, gates_, output_, cells_;
  const Buffer<float> cell_;
  const Buffer<uint8_t> resets_;
  const Buffer<scalar_t> grad_output_, grad_cells_, grad_h_n_, grad_c_n_;
  const Buffer<scalar_t> d_preactivations_, d_h0_, d_c0_;
};

} // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (!options.set(argv[i])) {
      std::fprintf(
          stderr, "expected an option of check.cpp, but got %s\n", argv[i]);
      return 2;
    }
  }
  for (int64_t i = 0; i < options.cases; ++i) {
    const auto drawn = draw(static_cast<uint32_t>(options.seed + i), options);
    try {
      if (drawn.half) {
        Run<c10::Half>(drawn, options.plants).check();
      } else {
        Run<c10::BFloat16>(drawn, options.plants).check();
      }
    } catch (const std::exception& error) {
      std::printf("%s\n  %s\n", error.what(), drawn.describe().c_str());
      return 1;
    }
  }
  std::printf("all cases are right\n");
  return 0;
}
