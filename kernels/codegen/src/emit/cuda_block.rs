//! Reductions across the threads of a CUDA block: shuffles within a warp, shared memory between warps.

use super::expr::{Id, Ty};
use super::point::Emitter;
use super::region::Program;
use super::text::{Elem, Type, Val};
use crate::error::Unsupported;
use frit_ir::ops::ReduceFn;
use std::fmt::Write;
use std::ops::Range;

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// Shared memory for the partial results of warps.
pub(crate) struct Shared {
    memref: Val,
    elem: Elem,
    pub(crate) len: usize,
}

impl Shared {
    /// Allocates `len` partial results of a reduction.
    ///
    /// # Errors
    /// A result that is not reduced on CUDA.
    pub(crate) fn new(
        e: &mut Emitter<'_>,
        globals: &mut String,
        symbol: String,
        reduction: Id,
        len: usize,
    ) -> Result<Self, Unsupported> {
        let elem = element(e.program, reduction)?;
        let ty = format!("memref<{len}x{}, 3>", elem.name());
        writeln!(
            globals,
            "memref.global \"private\" @{symbol} : {ty} = uninitialized {{alignment = 16}}"
        )
        .expect("invariant: a String takes all text");
        let get = format!("memref.get_global @{symbol} : {ty}");
        let memref = e.t.def(Type(elem, 1), format_args!("{get}"));
        Ok(Shared { memref, elem, len })
    }

    fn ty(&self) -> String {
        format!("memref<{}x{}, 3>", self.len, self.elem.name())
    }

    /// Writes a scalar, or a vector to an index that is a multiple of its width.
    pub(crate) fn write(&self, e: &mut Emitter<'_>, index: Val, value: Val) {
        let (m, ty, of) = (self.memref, self.ty(), value.ty());
        match value.width {
            1 => e.t.line(format_args!("memref.store {value}, {m}[{index}] : {ty}")),
            _ => e.t.line(format_args!(
                "vector.store {value}, {m}[{index}] {{alignment = 16 : i64}} : {ty}, {of}"
            )),
        }
    }

    /// Reads a scalar, or a vector from an index that is a multiple of its width.
    pub(crate) fn read(&self, e: &mut Emitter<'_>, index: Val, width: usize) -> Val {
        let (m, ty, of) = (self.memref, self.ty(), Type(self.elem, width));
        match width {
            1 => e.t.def(of, format_args!("memref.load {m}[{index}] : {ty}")),
            _ => e.t.def(
                of,
                format_args!("vector.load {m}[{index}] {{alignment = 16 : i64}} : {ty}, {of}"),
            ),
        }
    }
}

fn element(program: &Program, reduction: Id) -> Result<Elem, Unsupported> {
    match program.dag.ty(reduction) {
        Ty::F32 => Ok(Elem::F32),
        Ty::I32 => Ok(Elem::I32),
        Ty::I64 | Ty::Bool => {
            Err(Unsupported::new("reduce", "64-bit integers are not reduced on CUDA"))
        }
    }
}

/// Combines the values of the threads of a warp whose lane indices differ only in these bits; each receives the result.
pub(crate) fn butterfly(e: &mut Emitter<'_>, f: ReduceFn, mut value: Val, bits: Range<u32>) -> Val {
    for bit in bits.rev() {
        let other = exchange(e, value, 1 << bit);
        value = e.combine(f, value, other);
    }
    value
}

/// The value, scalar or vector, of the lane whose index is this one's XOR `distance`.
fn exchange(e: &mut Emitter<'_>, value: Val, distance: i64) -> Val {
    let (all, clamp) = (e.t.int(-1, Elem::I32, 1), e.t.int(31, Elem::I32, 1));
    let offset = e.t.int(distance, Elem::I32, 1);
    let (ty, vector) = (Type(value.elem, 1), value.ty());
    let mut lanes = Vec::with_capacity(value.width);
    for k in 0..value.width {
        let lane = match value.width {
            1 => value,
            _ => e.t.def(ty, format_args!("vector.extract {value}[{k}] : {ty} from {vector}")),
        };
        let operands = format!("{all}, {lane}, {offset}, {clamp}");
        lanes.push(e.t.def(ty, format_args!("nvvm.shfl.sync bfly {operands} : {ty} -> {ty}")));
    }
    if let [lane] = lanes[..] {
        return lane;
    }
    let list = lanes.iter().map(Val::to_string).collect::<Vec<_>>().join(", ");
    e.t.def(vector, format_args!("vector.from_elements {list} : {vector}"))
}
