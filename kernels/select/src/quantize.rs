//! Selection for quantization to 8-bit floats: GEMM operands as codes with the contracted axis last, as tensor cores need them, or as
//! values where no 8-bit GEMM exists.
//!
//! One launch computes the amax of an operand without history and returns at once for others. The next quantizes, and computes the new
//! amax if requested.
//! Source: cuBLASLt, "8-bit floating point data types": `A` transposed and `B` not, in its column order.

use crate::assembler::Assembler;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::ops::Quantize;
use frit_ir::plan::{Argument, Launch, Matrix, Pointer};
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::{Float8, Routine};

/// Sizes of a GEMM, and the rows of its operands, are multiples of it.
pub(super) const ALIGNMENT: usize = 16;
/// Rows and columns of the tile that a block transposes.
const TILE: usize = 64;
/// Bytes of an amax, and of an inverse scale.
const WORD_BYTES: usize = 4;

/// Quantizes a tensor that no GEMM reads as codes: its rounded values, and its amax.
pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let Op::Quantize(op) = &node.op else { return None };
    // Rounded values are computed only in a body of their own; a GEMM in the body reads codes.
    if !a.is_alone() {
        return None;
    }
    let ty = a.ty(node.inputs[0]);
    let to = a.write(node.outputs[0]);
    let latest = a.write(node.outputs[1]);
    let rounding = Rounding::new(a, node, op, Some(latest))?;
    let n = ty.shape.numel();
    let kernel = rounding.kernel("quantize", true)?.threads(n.div_ceil(16 / ty.dtype.size()));
    if n > 0 {
        a.run(rounding.arguments(kernel, to).i64(n));
    }
    Some(())
}

/// Quantizes an operand of a GEMM that is stored as a matrix of this shape, transposed if `turn` says so. Returns the
/// codes, as contiguous rows. The amax is written to `latest`.
pub(super) fn codes(
    a: &mut Assembler<'_>,
    node: &Node,
    [rows, columns]: [usize; 2],
    turn: bool,
    latest: Option<Pointer>,
) -> Option<Matrix> {
    let Op::Quantize(op) = &node.op else { return None };
    let n = rows * columns;
    let fits = rows.is_multiple_of(ALIGNMENT) && columns.is_multiple_of(ALIGNMENT);
    if !fits || n == 0 || a.ty(node.inputs[0]).shape.numel() != n {
        return None;
    }
    let at = a.scratch(n);
    let rounding = Rounding::new(a, node, op, latest)?;
    let kernel = if turn {
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        let kernel = rounding.kernel("quantize_transposed", false)?.blocks(tiles);
        rounding.arguments(kernel, at).i64(rows).i64(columns)
    } else {
        let width = 16 / a.ty(node.inputs[0]).dtype.size();
        let kernel = rounding.kernel("quantize", false)?.threads(n.div_ceil(width));
        rounding.arguments(kernel, at).i64(n)
    };
    a.run(kernel);
    let row_stride = if turn { rows } else { columns };
    let scale = Some(rounding.inverse);
    Some(Matrix { at, dtype: op.to, row_stride, batch_stride: 0, transposed: false, scale })
}

/// A tensor being quantized, and the locations of its amax and scale.
struct Rounding {
    from: Pointer,
    dtype: DType,
    to: DType,
    recent: Pointer,
    index: i64,
    magnitude: Pointer,
    inverse: Pointer,
    latest: Option<Pointer>,
}

impl Rounding {
    /// Adds the launch that computes the amax.
    fn new(
        a: &mut Assembler<'_>,
        node: &Node,
        op: &Quantize,
        latest: Option<Pointer>,
    ) -> Option<Rounding> {
        let ty = a.ty(node.inputs[0]);
        if !matches!(ty.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return None;
        }
        let from = a.read(node.inputs[0])?;
        let (recent, index) = match node.inputs.get(1) {
            Some(recent) => (a.read(*recent)?, op.index as i64),
            None => (from, -1),
        };
        let magnitude = a.scratch(WORD_BYTES);
        let inverse = a.scratch(WORD_BYTES);
        for at in [Some(magnitude), latest].into_iter().flatten() {
            a.launch(Launch::Zero { at, bytes: WORD_BYTES });
        }
        let rounding = Rounding {
            from,
            dtype: ty.dtype,
            to: op.to,
            recent,
            index,
            magnitude,
            inverse,
            latest,
        };
        let n = ty.shape.numel();
        let mut kernel = rounding
            .kernel("magnitude", false)?
            .threads(n.div_ceil(16 / ty.dtype.size()))
            .pointer(magnitude)
            .pointer(from)
            .pointer(recent);
        kernel.arguments.push(Argument::I64(index));
        if n > 0 {
            a.run(kernel.i64(n));
        }
        Some(rounding)
    }

    fn kernel(&self, entry: &'static str, values: bool) -> Option<SourceKernel> {
        let kernel = SourceKernel::new("quantize", entry)
            .define("FROM", c_type(self.dtype)?)
            .define("E5M2", u8::from(self.to == DType::F8E5M2))
            .define("VALUES", u8::from(values))
            .define("LATEST", u8::from(self.latest.is_some()));
        Some(kernel)
    }

    fn arguments(&self, kernel: SourceKernel, to: Pointer) -> SourceKernel {
        let mut kernel = kernel
            .pointer(to)
            .pointer(self.inverse)
            .pointer(self.latest.unwrap_or(self.inverse))
            .pointer(self.from)
            .pointer(self.recent)
            .pointer(self.magnitude);
        kernel.arguments.push(Argument::I64(self.index));
        kernel
    }
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], _: &[&TensorType]) -> Option<Routine> {
    let Op::Quantize(op) = op else { return None };
    let format = if op.to == DType::F8E4M3 { Float8::E4M3 } else { Float8::E5M2 };
    let (elem, len) = (elem(ins[0].dtype)?, ins[0].shape.numel());
    Some(Routine::Quantize { format, elem, len, index: op.index })
}
