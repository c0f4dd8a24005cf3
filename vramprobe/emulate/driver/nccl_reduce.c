/* The arithmetic of small collectives, element by element, in double precision for floats, in 64 bits for integers.
 *
 * Types by NCCL's numbers: 0 int8, 1 uint8, 2 int32, 3 uint32, 4 int64, 5 uint64, 6 float16, 7 float32, 8 float64,
 * 9 bfloat16, 10 float8 e4m3, 11 float8 e5m2. Left out: sums of float8, which copy the first rank's. */
#include "emulator.h" /* first: it asks for GNU's interfaces */

#include <math.h>
#include <string.h>

#include "nccl.h"

size_t nccl_element_bytes(int type) {
  static const unsigned char BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? BYTES[type] : 1;
}

static double from_half(uint16_t h) { /* IEEE 754 binary16 */
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double magnitude;
  if (exponent == 31) magnitude = fraction ? (double)NAN : (double)INFINITY;
  else if (exponent == 0) magnitude = fraction * 0x1p-24;
  else magnitude = (1024 + fraction) * (double)(1u << exponent) * 0x1p-25;
  return h & 0x8000 ? -magnitude : magnitude;
}
static uint16_t to_half(double value) { /* to the nearest, ties to even */
  uint16_t sign = value < 0 || (value == 0 && 1 / value < 0) ? 0x8000 : 0;
  double a = value < 0 ? -value : value;
  if (a != a) return 0x7e00;
  if (a >= 65520) return sign | 0x7c00;
  int exponent = 1;
  while (exponent < 30 && a >= 0x1p-14 * (double)(1u << exponent)) exponent++;
  double unit = 0x1p-24 * (double)(1u << (exponent - 1)), scaled = a / unit; /* below 2048 */
  uint32_t n = (uint32_t)scaled;
  double rest = scaled - n;
  if (rest > 0.5 || (rest == 0.5 && (n & 1))) n++;
  return (uint16_t)(sign | (n + ((uint32_t)(exponent - 1) << 10)));
}

static double get_float(const char *p, int type) {
  if (type == 7) {
    float v;
    memcpy(&v, p, 4);
    return v;
  }
  if (type == 8) {
    double v;
    memcpy(&v, p, 8);
    return v;
  }
  uint16_t bits;
  memcpy(&bits, p, 2);
  if (type == 6) return from_half(bits);
  uint32_t wide = (uint32_t)bits << 16;
  float v;
  memcpy(&v, &wide, 4);
  return v;
}
static void put_float(char *p, int type, double value) {
  float v = (float)value;
  if (type == 8) {
    memcpy(p, &value, 8);
  } else if (type == 7) {
    memcpy(p, &v, 4);
  } else if (type == 6) {
    uint16_t h = to_half(value);
    memcpy(p, &h, 2);
  } else { /* bfloat16, to the nearest, ties to even */
    uint32_t wide;
    memcpy(&wide, &v, 4);
    uint16_t b = v != v ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    memcpy(p, &b, 2);
  }
}
static int64_t get_integer(const char *p, int type) {
  int8_t a;
  uint8_t b;
  int32_t c;
  uint32_t d;
  int64_t e;
  switch (type) {
    case 0: return memcpy(&a, p, 1), a;
    case 1: return memcpy(&b, p, 1), b;
    case 2: return memcpy(&c, p, 4), c;
    case 3: return memcpy(&d, p, 4), d;
    default: return memcpy(&e, p, 8), e;
  }
}

#define COMBINE(a, b)                                                                                \
  (operation == REDUCE_PRODUCT ? (a) * (b) : operation == REDUCE_MAX ? ((a) > (b) ? (a) : (b))       \
                                         : operation == REDUCE_MIN   ? ((a) < (b) ? (a) : (b)) : (a) + (b))

void nccl_reduce(void *to, const char *const *inputs, int num_ranks, size_t first, size_t count, int type,
                 int operation) {
  size_t bytes = nccl_element_bytes(type);
  bool is_float = type >= 6 && type <= 9, is_float8 = type > 9;
  for (size_t i = 0; i < count; i++) {
    char *out = (char *)to + i * bytes;
    size_t at = (first + i) * bytes;
    if (is_float8) {
      *out = inputs[0][at];
    } else if (is_float) {
      double value = get_float(inputs[0] + at, type);
      for (int r = 1; r < num_ranks; r++) {
        double next = get_float(inputs[r] + at, type);
        value = COMBINE(value, next);
      }
      put_float(out, type, operation == REDUCE_AVERAGE ? value / num_ranks : value);
    } else if (type == 5) {
      uint64_t value = (uint64_t)get_integer(inputs[0] + at, 4);
      for (int r = 1; r < num_ranks; r++) {
        uint64_t next = (uint64_t)get_integer(inputs[r] + at, 4);
        value = COMBINE(value, next);
      }
      if (operation == REDUCE_AVERAGE) value /= (uint64_t)num_ranks;
      memcpy(out, &value, 8);
    } else {
      int64_t value = get_integer(inputs[0] + at, type);
      for (int r = 1; r < num_ranks; r++) {
        int64_t next = get_integer(inputs[r] + at, type);
        if (operation == REDUCE_MAX || operation == REDUCE_MIN) value = COMBINE(value, next);
        else value = (int64_t)COMBINE((uint64_t)value, (uint64_t)next); /* wraps, as the device does */
      }
      if (operation == REDUCE_AVERAGE) value /= num_ranks;
      memcpy(out, &value, bytes); /* little-endian: the low bytes */
    }
  }
}
