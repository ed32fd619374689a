// Linked into the libraries of make wheels, so that they run with glibc 2.28
// where a later one is linked: what two of its symbols did before. Both are
// hidden, or they would stand in for those of glibc elsewhere, too.

// exp of glibc 2.29 only leaves out what sets errno. The compiler knows exp,
// and would not let it be hidden under that name.
// The version is the first that glibc has on that processor.
extern "C" double exp_before_2_29(double);
#if defined(__x86_64__)
__asm__(".symver exp_before_2_29, exp@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp_before_2_29, exp@GLIBC_2.17");
#else
#error "make wheels: expected x86-64 or 64-bit ARM"
#endif
[[gnu::visibility("hidden")]] double exp_hidden(double x) __asm__("exp");
double exp_hidden(double x) {
  return exp_before_2_29(x);
}

// std::shared_ptr reads it: false, so that it counts with atomics, as it did
// before glibc 2.32.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}
