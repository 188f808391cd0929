/* What mssar.kernels.driver calls of CUDA's driver. It keeps what a launch was given, and fails on
   request; arguments are checked in the call itself, as they may be overwritten after it. */
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
} Config;

static size_t sizes[64];
static int taken, fails_with, fails, calls, mixed, beyond;
static _Thread_local int entered;
static char bytes[512];
static Config last;
static int attribute;

void stub_takes(const size_t *given, int count) {
  memcpy(sizes, given, count * sizeof *sizes);
  taken = count;
  fails = calls = mixed = beyond = attribute = 0;
}
void stub_fails(int status, int times) { fails_with = status, fails = times; }
void stub_leave(void) { entered = 0; }
int stub_entered(void) { return entered; }
int stub_calls(void) { return calls; }
int stub_mixed(void) { return mixed; }
int stub_beyond(void) { return beyond; }
int stub_attribute(void) { return attribute; }
const Config *stub_config(void) { return &last; }
const char *stub_bytes(void) { return bytes; }

int cuLaunchKernelEx(const Config *config, void *function, void **arguments, void **extra) {
  __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
  if (fails > 0) {
    fails--;
    return fails_with;
  }
  if (function != (void *)77 || extra) return 1;
  last = *config;
  char *to = bytes;
  for (int i = 0; i < taken; i++) {
    memcpy(to, arguments[i], sizes[i]);
    to += sizes[i];
    /* Of threads that give one number throughout: is it the same in all arguments? */
    if (memcmp(arguments[i], arguments[0], 4)) __atomic_fetch_add(&mixed, 1, __ATOMIC_SEQ_CST);
  }
  return 0;
}
int cuModuleLoadData(void **module, const char *binary) {
  *module = (void *)5;
  return strcmp(binary, "cubin") ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)77;
  return module != (void *)5 || strcmp(name, "kernel") ? 500 : 0;
}
int cuFuncGetParamInfo(void *function, size_t i, size_t *at, size_t *size) {
  if ((int)i >= taken) return beyond++, 1;
  *at = 0, *size = sizes[i];
  return function != (void *)77;
}
int cuFuncSetCacheConfig(void *function, int how) { return function != (void *)77 || how != 1; }
int cuFuncSetAttribute(void *function, int what, int value) {
  attribute = value;
  return function != (void *)77 || what != 8 || value > 227 << 10;
}
int cuDeviceGet(int *number, int index) { return *number = index, 0; }
int cuDevicePrimaryCtxRetain(void **context, int number) { return *context = (void *)9, number; }
int cuCtxGetCurrent(void **context) { return *context = entered ? (void *)9 : 0, 0; }
int cuCtxSetCurrent(void *context) { return entered = 1, context != (void *)9; }
int cuGetErrorString(int status, const char **said) {
  *said = status == 1 ? "invalid argument" : "something else";
  return 0;
}
