// Built without -fsanitize=thread: what the emulator itself writes is no part
// of what is checked, and it tells ThreadSanitizer what waits for what.

#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <random>
#include <vector>

#ifdef LLTM_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#else
static void* __tsan_get_current_fiber() {
  return nullptr;
}
static void* __tsan_create_fiber(unsigned) {
  return nullptr;
}
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace emulator {

namespace {

constexpr size_t kStack = 256 * 1024;      // sanitizers need that much
constexpr unsigned kNoSynchronisation = 1; // a switch orders nothing
constexpr int kLanes = 32;

struct Fiber {
  ucontext_t context;
  void* tsan;
  int block;
  int thread;
};

// What the lanes bring to an instruction of the whole warp, and take from it.
struct Warp {
  const char* instruction = nullptr;
  int arrived = 0;
  uint32_t operands[kLanes][6];
  float sums[kLanes][4];
  uint32_t values[kLanes];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<int> ready;
  std::vector<Warp> warps;
  std::unique_ptr<float[]> shared;
  void* stacks;
  int done = 0;
  int at_barrier = 0;
  int barriers = 0;
  char barrier[2]; // addresses, for ThreadSanitizer
};

struct Store {
  uint32_t* to;
  uint32_t value;
};

} // namespace

class Grid {
 public:
  Grid(
      const Launch& launch,
      const std::function<void(const Machine&, float*)>& kernel)
      : launch_(launch),
        kernel_(kernel),
        random_(launch.seed),
        blocks_(launch.blocks),
        tsan_(__tsan_get_current_fiber()) {
    // ThreadSanitizer would take a vector that moves for a race.
    stores_.reserve(1 << 20);
  }

  ~Grid() {
    for (const int i : running_) {
      remove(i);
    }
  }

  void run() {
    int started = 0;
    while (started < launch_.blocks || !running_.empty()) {
      while (started < launch_.blocks &&
             static_cast<int>(running_.size()) < launch_.resident) {
        start(started++);
      }
      // A block goes on for a while, so that others fall behind.
      const auto chosen = below(running_.size());
      Block& block = *blocks_[running_[chosen]];
      for (auto turns = 1 + below(1000); turns > 0 && !block.ready.empty();
           --turns) {
        resume(block);
        show_some_stores();
      }
      if (block.done == launch_.threads) {
        __tsan_acquire(this);
        remove(running_[chosen]);
        running_[chosen] = running_.back();
        running_.pop_back();
        continue;
      }
      if (block.ready.empty()) {
        show_some_stores();
      }
      check_progress();
    }
    for (const Store& store : stores_) {
      show(store);
    }
    __tsan_acquire(this);
  }

  // Called by fibers.

  void sync_block(int block_index, int thread) {
    Block& block = *blocks_[block_index];
    if (launch_.plants.no_barrier) {
      return;
    }
    char* const barrier = &block.barrier[block.barriers % 2];
    __tsan_release(barrier);
    if (++block.at_barrier == launch_.threads) {
      block.at_barrier = 0;
      ++block.barriers;
      for (int other = 0; other < launch_.threads; ++other) {
        if (other != thread) {
          block.ready.push_back(other);
        }
      }
    } else {
      leave();
    }
    __tsan_acquire(barrier);
  }

  void pause(int block, int thread) {
    blocks_[block]->ready.push_back(thread);
    leave();
  }

  // The last lane that arrives calls compute(warp), and wakes the others.
  template <typename Compute>
  void collect(
      Warp& warp,
      const char* instruction,
      int block,
      int thread,
      const Compute& compute) {
    if (warp.arrived == 0) {
      warp.instruction = instruction;
    }
    if (warp.instruction != instruction) {
      throw Fault("lanes of a warp are at different instructions");
    }
    if (++warp.arrived < kLanes) {
      leave();
      return;
    }
    warp.arrived = 0;
    compute(warp);
    const int first = thread / kLanes * kLanes;
    for (int other = first; other < first + kLanes; ++other) {
      if (other != thread) {
        blocks_[block]->ready.push_back(other);
      }
    }
  }

  Warp& warp_of(int block, int thread) {
    return blocks_[block]->warps[thread / kLanes];
  }

  void store_later(uint32_t* to, uint32_t value) {
    stores_.push_back({to, value});
  }

  const Plants& plants() const {
    return launch_.plants;
  }

 private:
  size_t below(size_t end) {
    return random_() % end;
  }

  void start(int index) {
    auto block = std::make_unique<Block>();
    block->fibers.resize(launch_.threads);
    block->warps.resize(launch_.threads / kLanes);
    // An allocation of its own, whose end AddressSanitizer knows.
    block->shared.reset(new float[launch_.shared_floats]);
    std::fill_n(block->shared.get(), launch_.shared_floats, __builtin_nanf(""));
    block->stacks = mmap(
        nullptr,
        kStack * launch_.threads,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1,
        0);
    if (block->stacks == MAP_FAILED) {
      throw std::bad_alloc();
    }
    for (int thread = 0; thread < launch_.threads; ++thread) {
      Fiber& fiber = block->fibers[thread];
      fiber.block = index;
      fiber.thread = thread;
      fiber.tsan = __tsan_create_fiber(0);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp =
          static_cast<char*>(block->stacks) + thread * kStack;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(
          &fiber.context,
          reinterpret_cast<void (*)()>(enter),
          2,
          static_cast<unsigned>(self >> 32),
          static_cast<unsigned>(self));
      block->ready.push_back(thread);
    }
    blocks_[index] = std::move(block);
    running_.push_back(index);
  }

  void remove(int index) {
    for (const Fiber& fiber : blocks_[index]->fibers) {
      __tsan_destroy_fiber(fiber.tsan);
    }
    munmap(blocks_[index]->stacks, kStack * launch_.threads);
    blocks_[index].reset();
  }

  static void enter(unsigned high, unsigned low) {
    const auto self = static_cast<uintptr_t>(high) << 32 | low;
    reinterpret_cast<Grid*>(self)->run_thread();
  }

  void run_thread() {
    const Fiber& fiber = *current_;
    Block& block = *blocks_[fiber.block];
    try {
      kernel_(Machine(this, fiber.block, fiber.thread), block.shared.get());
    } catch (...) {
      error_ = std::current_exception();
    }
    ++block.done;
    __tsan_release(this);
    leave();
  }

  void resume(Block& block) {
    const auto i = below(block.ready.size());
    current_ = &block.fibers[block.ready[i]];
    block.ready[i] = block.ready.back();
    block.ready.pop_back();
    __tsan_switch_to_fiber(current_->tsan, kNoSynchronisation);
    swapcontext(&scheduler_, &current_->context);
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

  void leave() {
    __tsan_switch_to_fiber(tsan_, kNoSynchronisation);
    swapcontext(&current_->context, &scheduler_);
  }

  void show(const Store& store) {
    __atomic_store_n(store.to, store.value, __ATOMIC_RELAXED);
  }

  void show_some_stores() {
    for (auto count = below(3); count > 0 && !stores_.empty(); --count) {
      Store& store = stores_[below(stores_.size())];
      show(store);
      store = stores_.back();
      stores_.pop_back();
    }
  }

  void check_progress() const {
    bool any_ready = !stores_.empty();
    for (const int i : running_) {
      any_ready = any_ready || !blocks_[i]->ready.empty();
    }
    if (!any_ready) {
      throw Fault("a deadlock: all threads wait for one another");
    }
  }

  const Launch launch_;
  const std::function<void(const Machine&, float*)>& kernel_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<int> running_;
  std::vector<Store> stores_; // not yet seen by anybody
  ucontext_t scheduler_;
  void* tsan_;
  Fiber* current_ = nullptr;
  std::exception_ptr error_;
};

void Machine::sync_block() const {
  grid_->sync_block(block_, thread_);
}

void Machine::sync_warp() const {
  Warp& warp = grid_->warp_of(block_, thread_);
  grid_->collect(warp, "sync_warp", block_, thread_, [](Warp&) {});
}

void Machine::pause() const {
  grid_->pause(block_, thread_);
}

const Plants& Machine::plants() const {
  return grid_->plants();
}

void Machine::store_later(uint32_t* to, uint32_t value) const {
  grid_->store_later(to, value);
}

uint32_t Machine::shuffle_xor(uint32_t value, int mask) const {
  Warp& warp = grid_->warp_of(block_, thread_);
  warp.values[thread_ % kLanes] = value;
  grid_->collect(warp, "shuffle", block_, thread_, [mask](Warp& warp) {
    uint32_t from[kLanes];
    std::copy_n(warp.values, kLanes, from);
    for (int lane = 0; lane < kLanes; ++lane) {
      warp.values[lane] = from[lane ^ mask];
    }
  });
  return warp.values[thread_ % kLanes];
}

// The places of operands are those of the PTX ISA for mma.m16n8k16.
void Machine::multiply(
    float (&sums)[4],
    const uint32_t (&operands)[6],
    float (*as_float)(uint16_t)) const {
  Warp& warp = grid_->warp_of(block_, thread_);
  const int own = thread_ % kLanes;
  std::copy_n(operands, 6, warp.operands[own]);
  std::copy_n(sums, 4, warp.sums[own]);
  grid_->collect(warp, "mma", block_, thread_, [as_float](Warp& warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / 4, quad = lane % 4;
      const auto half = [&](int operand, int i) {
        return as_float(
            static_cast<uint16_t>(warp.operands[lane][operand] >> 16 * i));
      };
      for (int i = 0; i < 8; ++i) {
        const int row = group + i / 2 % 2 * 8;
        a[row][2 * quad + i % 2 + i / 4 * 8] = half(i / 2, i % 2);
      }
      for (int i = 0; i < 4; ++i) {
        b[2 * quad + i % 2 + i / 2 * 8][group] = half(4 + i / 2, i % 2);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
          warp.sums[lane][i] += a[row][k] * b[k][column];
        }
      }
    }
  });
  std::copy_n(warp.sums[own], 4, sums);
}

void run(
    const Launch& launch,
    const std::function<void(const Machine&, float*)>& kernel) {
  Grid(launch, kernel).run();
}

} // namespace emulator
