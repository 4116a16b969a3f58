// Counts heap allocations of the calling thread while it asks for that; preloaded into a process of its own.
#include <stddef.h>

extern void* __libc_malloc(size_t size);
extern void* __libc_calloc(size_t count, size_t size);
extern void* __libc_realloc(void* block, size_t size);

static __thread int counting;
static __thread long allocations;

void* malloc(size_t size) {
  allocations += counting;
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  allocations += counting;
  return __libc_calloc(count, size);
}

void* realloc(void* block, size_t size) {
  allocations += counting;
  return __libc_realloc(block, size);
}

void count_start(void) { counting = 1, allocations = 0; }

long count_stop(void) {
  counting = 0;
  return allocations;
}
