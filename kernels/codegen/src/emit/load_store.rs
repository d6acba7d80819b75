//! Loads and stores: elements have a storage dtype in memory and the compute type in registers.

use super::text::{Elem, Text, Type, Val};
use frit_ir::{DType, TensorType};

/// What the target has instructions for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// Whether f32 is rounded to bf16 by an instruction; otherwise by integer arithmetic.
    pub(crate) converts_bf16: bool,
    /// Alignment in bytes that vector accesses may assume; `None` assumes only the element's.
    pub(crate) alignment: Option<usize>,
    /// Whether 2ˣ is an instruction, `ex2` of PTX.
    pub(crate) has_exp2: bool,
}

impl Memory {
    /// Of a GPU.
    pub(crate) const CUDA: Memory =
        Memory { converts_bf16: true, alignment: Some(16), has_exp2: true };
}

/// An operand in memory: a flat buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    /// Position among the function's arguments.
    pub(crate) argument: usize,
    pub(crate) dtype: DType,
    pub(crate) len: usize,
}

impl Buffer {
    pub(crate) fn ty(&self, m: Memory) -> String {
        memref_of(self.len, self.dtype, m)
    }
}

/// The type of a flat buffer with the elements of a tensor.
pub(crate) fn memref(ty: &TensorType, m: Memory) -> String {
    memref_of(ty.shape.numel(), ty.dtype, m)
}

fn memref_of(len: usize, dtype: DType, m: Memory) -> String {
    format!("memref<{len}x{}>", in_memory(dtype, m).name())
}

/// Which elements an access touches, from an index on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Distance between lanes, in elements.
    pub(crate) stride: i64,
    pub(crate) width: usize,
    /// Active lanes; `None` if all are.
    pub(crate) mask: Option<Val>,
}

impl Access {
    /// One element.
    pub(crate) fn scalar() -> Self {
        Access { stride: 1, width: 1, mask: None }
    }
}

/// Bools are bytes in memory, independent of how MLIR stores `i1`. Without instructions for bf16 its elements are integers: LLVM
/// splits masked stores into elements, and would call a function to round each.
pub(crate) fn in_memory(dtype: DType, m: Memory) -> Elem {
    match dtype {
        DType::BF16 if !m.converts_bf16 => Elem::I16,
        DType::F64 => Elem::F64,
        DType::F32 => Elem::F32,
        DType::F16 => Elem::F16,
        DType::BF16 => Elem::BF16,
        DType::I64 => Elem::I64,
        DType::I32 => Elem::I32,
        DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::Bool => Elem::I8,
    }
}

/// Reads elements and widens them.
pub(crate) fn load(t: &mut Text, buffer: Buffer, index: Val, access: Access, m: Memory) -> Val {
    let raw = read(t, buffer, index, access, m);
    widen(t, raw, buffer.dtype)
}

/// Reads elements as they are in memory.
pub(crate) fn read(t: &mut Text, buffer: Buffer, index: Val, access: Access, m: Memory) -> Val {
    let (argument, memref) = (buffer.argument, buffer.ty(m));
    let ty = Type(in_memory(buffer.dtype, m), access.width);
    match (access.stride, access.width) {
        (_, 1) => t.def(ty, format_args!("memref.load %arg{argument}[{index}] : {memref}")),
        (1, _) => match access.mask {
            None => {
                let attribute = alignment(m, buffer.dtype, access.width);
                t.def(
                    ty,
                    format_args!("vector.load %arg{argument}[{index}]{attribute} : {memref}, {ty}"),
                )
            }
            Some(mask) => {
                let zero = zero(t, ty);
                let of = mask.ty();
                t.def(
                    ty,
                    format_args!(
                        "vector.maskedload %arg{argument}[{index}], {mask}, {zero} : {memref}, \
                         {of}, {ty} into {ty}"
                    ),
                )
            }
        },
        (stride, width) => {
            let lanes = t.ramp(stride, Elem::I64, width);
            let mask = access.mask.unwrap_or_else(|| t.mask(width, width));
            let zero = zero(t, ty);
            let (of_lanes, of) = (lanes.ty(), mask.ty());
            t.def(
                ty,
                format_args!(
                    "vector.gather %arg{argument}[{index}] [{lanes}], {mask}, {zero} : {memref}, \
                     {of_lanes}, {of}, {ty} into {ty}"
                ),
            )
        }
    }
}

/// Lets a GPU bring the element at an index from memory to L2.
pub(crate) fn prefetch(t: &mut Text, buffer: Buffer, index: Val, m: Memory) {
    let (argument, memref) = (buffer.argument, buffer.ty(m));
    let base = t.def(
        Type(Elem::Index, 1),
        format_args!("memref.extract_aligned_pointer_as_index %arg{argument} : {memref} -> index"),
    );
    let size = t.index(buffer.dtype.size());
    let offset = t.same("arith.muli", &[index, size]);
    let at = t.same("arith.addi", &[base, offset]);
    let at = t.convert("arith.index_cast", at, Elem::I64);
    t.line(format_args!(
        "llvm.inline_asm has_side_effects asm_dialect = att \"prefetch.L2 [$0];\", \"l\" {at} : (i64) -> ()"
    ));
}

/// Narrows values and writes them.
pub(crate) fn store(
    t: &mut Text,
    value: Val,
    buffer: Buffer,
    index: Val,
    access: Access,
    m: Memory,
) {
    let raw = narrow(t, value, buffer.dtype, m);
    let (argument, memref, ty) = (buffer.argument, buffer.ty(m), raw.ty());
    match (access.width, access.mask) {
        (1, _) => t.line(format_args!("memref.store {raw}, %arg{argument}[{index}] : {memref}")),
        (_, None) => {
            let attribute = alignment(m, buffer.dtype, access.width);
            t.line(format_args!(
                "vector.store {raw}, %arg{argument}[{index}]{attribute} : {memref}, {ty}"
            ));
        }
        (_, Some(mask)) => {
            let of = mask.ty();
            t.line(format_args!(
                "vector.maskedstore %arg{argument}[{index}], {mask}, {raw} : {memref}, {of}, {ty}"
            ));
        }
    }
}

/// The attribute of a vector access.
pub(crate) fn alignment(m: Memory, dtype: DType, width: usize) -> String {
    match m.alignment {
        Some(bytes) => {
            let bytes = bytes.min(dtype.size() * width);
            format!(" {{alignment = {bytes} : i64}}")
        }
        None => String::new(),
    }
}

fn zero(t: &mut Text, ty: Type) -> Val {
    match ty.0 {
        Elem::F32 => t.float(0.0, ty.1),
        Elem::F16 | Elem::BF16 => {
            let bits = t.int(0, Elem::I16, ty.1);
            t.convert("arith.bitcast", bits, ty.0)
        }
        elem => t.int(0, elem, ty.1),
    }
}

/// Elements in memory as they are computed with.
pub(crate) fn widen(t: &mut Text, raw: Val, dtype: DType) -> Val {
    match dtype {
        DType::BF16 if raw.elem == Elem::I16 => {
            let wide = t.convert("arith.extui", raw, Elem::I32);
            let by = t.int(16, Elem::I32, raw.width);
            let bits = t.same("arith.shli", &[wide, by]);
            t.convert("arith.bitcast", bits, Elem::F32)
        }
        DType::F16 | DType::BF16 => t.convert("arith.extf", raw, Elem::F32),
        DType::U8 => t.convert("arith.extui", raw, Elem::I32),
        DType::Bool => {
            let zero = t.int(0, Elem::I8, raw.width);
            t.cmpi("ne", raw, zero)
        }
        _ => raw,
    }
}

fn narrow(t: &mut Text, value: Val, dtype: DType, m: Memory) -> Val {
    match dtype {
        DType::BF16 if !m.converts_bf16 => {
            let bits = bf16_bits(t, value);
            let by = t.int(16, Elem::I32, value.width);
            let high = t.same("arith.shrui", &[bits, by]);
            t.convert("arith.trunci", high, Elem::I16)
        }
        DType::BF16 => t.convert("arith.truncf", value, Elem::BF16),
        DType::F16 => t.convert("arith.truncf", value, Elem::F16),
        DType::U8 => t.convert("arith.trunci", value, Elem::I8),
        DType::Bool => t.convert("arith.extui", value, Elem::I8),
        _ => value,
    }
}

/// The f32 nearest to `value` that `dtype` represents.
pub(crate) fn round(t: &mut Text, value: Val, dtype: DType, m: Memory) -> Val {
    if dtype == DType::BF16 && !m.converts_bf16 {
        let bits = bf16_bits(t, value);
        let mask = t.int(i64::from(0xFFFF_0000_u32 as i32), Elem::I32, value.width);
        let high = t.same("arith.andi", &[bits, mask]);
        return t.convert("arith.bitcast", high, Elem::F32);
    }
    let raw = narrow(t, value, dtype, m);
    widen(t, raw, dtype)
}

/// Bits of an f32 whose upper half is the value rounded to bf16, ties to even; NaN stays NaN.
fn bf16_bits(t: &mut Text, value: Val) -> Val {
    let width = value.width;
    let bits = t.convert("arith.bitcast", value, Elem::I32);
    let (by, one, half) =
        (t.int(16, Elem::I32, width), t.int(1, Elem::I32, width), t.int(0x7FFF, Elem::I32, width));
    let odd = t.same("arith.shrui", &[bits, by]);
    let odd = t.same("arith.andi", &[odd, one]);
    let sum = t.same("arith.addi", &[bits, half]);
    let sum = t.same("arith.addi", &[sum, odd]);
    let nan = t.int(0x7FC0_0000, Elem::I32, width);
    let is_nan = t.cmpf("uno", value, value);
    t.select(is_nan, nan, sum)
}
