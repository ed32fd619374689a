// Linked into the libraries of make wheels, so that they run with glibc 2.28
// where a later one is linked: what two of its symbols did before. Both are
// hidden, or they would stand in for those of glibc elsewhere, too.

// exp of glibc 2.29 only leaves out what sets errno. The compiler knows exp,
// and would not let it be hidden under that name.
extern "C" double exp_2_2_5(double);
__asm__(".symver exp_2_2_5, exp@GLIBC_2.2.5");
[[gnu::visibility("hidden")]] double exp_hidden(double x) __asm__("exp");
double exp_hidden(double x) {
  return exp_2_2_5(x);
}

// std::shared_ptr reads it: false, so that it counts with atomics, as it did
// before glibc 2.32.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}
