"""Conversions between number formats inside kernels, and the product of two tiles.

Formats as in `ops/reference/quant.py`. On the device a conversion is one instruction. Triton's
interpreter, which runs kernels on a CPU, truncates where the device rounds to nearest even and
takes bf16 for integers; there the same values are made with integer arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
INVERSE_FP8_MAX = tl.constexpr(0.002232142857142857)  # 1 / 448
INVERSE_FP4_MAX = tl.constexpr(0.16666667163372040)  # 1 / 6 in float32


@triton.jit
def to_bf16(x):
    """float32 -> bf16, to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def bf16_rounded(x):
    """float32 -> float32, rounded to a bf16."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def to_e4m3(x):
    """float32 -> e4m3, to nearest even, at most 448."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(x), 448.0)
        size_bits = size.to(tl.int32, bitcast=True)
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
        small = (size * 512.0 + 8388608.0 - 8388608.0).to(tl.int32)
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def from_e4m3(x):
    """e4m3 -> float32."""
    if INTERPRETED:
        code = x.to(tl.uint8, bitcast=True).to(tl.int32)
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
        return tl.where((code & 0x80) != 0, -size, size)
    return x.to(tl.float32)


@triton.jit
def e4m3_bytes(x):
    """float32 -> uint8 that hold e4m3."""
    return to_e4m3(x).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3_bytes(x):
    """uint8 that hold e4m3 -> float32."""
    return from_e4m3(x.to(tl.float8e4nv, bitcast=True))


@triton.jit
def power(exponent):
    """2 ** (exponent - 127) for exponents 1 .. 254 (int32), infinity for 255."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0(byte):
    """uint8 or int32 -> float32: 2 ** (byte - 127), NaN for 255."""
    exponent = byte.to(tl.int32)
    value = tl.where(exponent == 0, 5.877471754111438e-39, power(exponent))
    return tl.where(exponent == 255, float("nan"), value)


@triton.jit
def exponent_above(x):
    """Exponent byte (int32) of the smallest power of two that is at least x, for normal x > 0; 255 for inf and NaN."""
    return tl.minimum(((x.to(tl.int32, bitcast=True) - 1) >> 23) + 1, 255)


@triton.jit
def e2m1_code(x):
    """float32 -> int32 code 0 .. 15, to nearest, ties to the even code."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code + ((x.to(tl.int32, bitcast=True) >> 31) & 8)


@triton.jit
def e2m1_number(code):
    """int32 code 0 .. 15 -> float32."""
    half = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def e2m1_numbers(codes):
    """[..., n] uint8 -> [..., n, 2] float32, the low nibble first."""
    wide = codes.to(tl.int32)
    return tl.join(e2m1_number(wide & 15), e2m1_number(wide >> 4))


# Four bytes of codes become two times four bf16. A code's three low bits, placed where the exponent
# of a bf16 ends, are its value times 2 ** -126; two exact products bring it to its size.
E2M1_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, k;
    mov.b32 k, 0x7B807B80;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 c, a, 6;
    shl.b32 d, a, 12;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x80008000;
    or.b32 c, c, d;
    mul.rn.bf16x2 c, c, k;
    mul.rn.bf16x2 $0, c, $5;
    shl.b32 c, b, 6;
    shl.b32 d, b, 12;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x80008000;
    or.b32 c, c, d;
    mul.rn.bf16x2 c, c, k;
    mul.rn.bf16x2 $1, c, $6;
    shl.b32 c, a, 2;
    shl.b32 d, a, 8;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x80008000;
    or.b32 c, c, d;
    mul.rn.bf16x2 c, c, k;
    mul.rn.bf16x2 $2, c, $5;
    shl.b32 c, b, 2;
    shl.b32 d, b, 8;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x80008000;
    or.b32 c, c, d;
    mul.rn.bf16x2 c, c, k;
    mul.rn.bf16x2 $3, c, $6;
}""")

# Four bytes of codes become four e4m3 of the low nibbles and four of the high ones, looked up in eight bytes that hold
# the magnitudes times 2 ** -5, all but zero moved up by whole exponents.
E2M1_TO_E4M3 = tl.constexpr("""{
    .reg .b32 t, u, x, y, p, q;
    and.b32 x, $3, 0xFFFFFF00;
    add.u32 t, x, 0x14100800;
    add.u32 u, $3, 0x24201C18;
    and.b32 x, $2, 0x77777777;
    shr.u32 y, x, 16;
    prmt.b32 p, t, u, x;
    prmt.b32 q, t, u, y;
    prmt.b32 x, p, q, 0x6420;
    prmt.b32 y, p, q, 0x7531;
    shl.b32 p, $2, 4;
    and.b32 p, p, 0x80808080;
    and.b32 q, $2, 0x80808080;
    or.b32 $0, x, p;
    or.b32 $1, y, q;
}""")


@triton.jit
def group_bytes(at, is_read, GROUPS: tl.constexpr, TILE: tl.constexpr, HAS_WORDS: tl.constexpr):
    """Bytes at + 0 .. GROUPS - 1 of each line [n]: [n, TILE, 1] int32, 0 where not read.

    Loaded line by line: then the compiler brings them into the layout of the codes that they scale,
    and not the codes into theirs. HAS_WORDS: lines begin at multiples of four bytes.
    """
    group = tl.arange(0, TILE)[None, :, None]
    found = tl.zeros([at.shape[0], TILE, 1], tl.int32)
    if HAS_WORDS and GROUPS % 4 == 0:
        words = at.to(tl.pointer_type(tl.int32), bitcast=True)
        for number in tl.static_range(GROUPS // 4):
            word = tl.load(words + number, mask=is_read, other=0)
            found = tl.where(group // 4 == number, word[:, None, None] >> (group % 4 * 8), found)
        return found & 255
    for number in tl.static_range(GROUPS):
        byte = tl.load(at + number, mask=is_read, other=0).to(tl.int32)
        found = tl.where(group == number, byte[:, None, None], found)
    return found


@triton.jit
def scaled_e2m1(codes, scale):
    """codes [n, groups, size] uint8, scale [n, groups, 1] float32 -> [n, groups, size, 2] bf16, exact where bf16 is."""
    if INTERPRETED:
        return to_bf16(e2m1_numbers(codes) * tl.expand_dims(tl.broadcast_to(scale, codes.shape), -1))
    factor = tl.broadcast_to((scale * 64.0).to(tl.bfloat16), codes.shape)
    low, high = tl.inline_asm_elementwise(
        E2M1_TO_BF16, "=r,=r,=r,=r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    return tl.join(low, high)


@triton.jit
def e2m1_as_e4m3(codes, shift):
    """codes [n, groups, 16] uint8, shift [n, groups, 1] int32 (8 * exponent, 0 .. 88): both nibbles as e4m3.

    The values are times 2 ** (exponent - 5). A thread's neighbouring four codes are of one group.
    """
    if INTERPRETED:
        wide, factor = codes.to(tl.int32), power((tl.broadcast_to(shift, codes.shape) >> 3) + 122)
        return to_e4m3(e2m1_number(wide & 15) * factor), to_e4m3(e2m1_number(wide >> 4) * factor)
    low, high = tl.inline_asm_elementwise(
        E2M1_TO_E4M3, "=r,=r,r,r", [codes, tl.broadcast_to(shift.to(tl.uint8), codes.shape)],
        dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
    )  # fmt: skip
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def multiply(a, b, total, IMPRECISE: tl.constexpr):
    """a [m, k] @ b [k, n] + total [m, n] float32; a and b both e4m3 or both bf16.

    IMPRECISE: products of e4m3 that the matrix unit may sum in its narrow accumulator, 0 for bf16.
    """
    if INTERPRETED:
        if a.dtype == tl.float8e4nv:
            return tl.dot(from_e4m3(a), from_e4m3(b), total)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)


# exp, one more, and the reciprocal, by one instruction each.
SIGMOID = tl.constexpr("""{
    .reg .f32 y;
    mul.f32 y, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 y, y;
    add.f32 y, y, 0f3F800000;
    rcp.approx.ftz.f32 $0, y;
}""")


@triton.jit
def sigmoid(x):
    """The bits of tl.sigmoid, which first looks for numbers too small or too large; zero for those below 2 ** -126."""
    if INTERPRETED:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def cosine(x):
    """Of any angle in float32; the fast instruction is wrong far from zero."""
    if INTERPRETED:
        return tl.cos(x)
    return libdevice.cos(x)


@triton.jit
def sine(x):
    """See `cosine`."""
    if INTERPRETED:
        return tl.sin(x)
    return libdevice.sin(x)
