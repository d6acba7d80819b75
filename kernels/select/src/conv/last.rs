//! Convolutions of images that lie channels last: a GEMM of all places of all images where a window is one element; otherwise
//! cuDNN's engines or, of transposed copies, the kernels for images `[N, C, …]`.

use crate::assembler::Assembler;
use crate::conv::Conv;
use crate::{convert, last};
use frit_ir::ops::Transpose;
use frit_ir::plan::{Epilogue, Gemm, Launch, Matrix, Pointer};
use frit_ir::{DType, Graph, Node, Op};

/// The launches of a body that is a convolution between transposes.
pub(crate) fn cuda_channels_last(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let node = last::between_transposes(body)?;
    let conv = Conv::of(a, node)?;
    let operands = [
        a.read(last::operand(body, node.inputs[0])?)?,
        a.read(last::operand(body, node.inputs[1])?)?,
    ];
    let to = a.write(last::result(body, node.outputs[0])?);
    if node.inputs.iter().chain(&node.outputs).any(|v| a.ty(*v).shape.numel() == 0) {
        return None;
    }
    let begin = a.launches();
    match conv.groups == 1 && conv.is_plain() {
        true => conv.places(a, &node.op, operands, to)?,
        false => conv.of_copies(a, node, operands, to)?,
    }
    conv.candidate(a, &node.op, operands, to, begin, true)
}

impl Conv<'_> {
    /// One GEMM, whose rows are the places of all images.
    fn places(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        [first, second]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let (places, channels, filters) =
            (self.images * self.positions, self.channels, self.filters);
        let matrix = |at, columns| self.matrix(at, self.element, columns, 0);
        let flipped = |m: Matrix| Matrix { transposed: true, ..m };
        let (m, n, k, left, right) = match op {
            Op::Conv(_) => {
                let weights = flipped(matrix(second, channels));
                (places, filters, channels, matrix(first, channels), weights)
            }
            Op::ConvGradInput(_) => {
                (places, channels, filters, matrix(first, filters), matrix(second, channels))
            }
            _ => {
                let gradients = flipped(matrix(first, filters));
                (filters, channels, places, gradients, matrix(second, channels))
            }
        };
        let (sums, dtype) = self.gemm_place(a, to, m * n);
        a.launch(Launch::Gemm(Gemm {
            m,
            n,
            k,
            batch: 1,
            a: left,
            b: right,
            d: self.matrix(sums, dtype, n, 0),
            epilogue: Epilogue::None,
        }));
        if self.is_direct() {
            return Some(());
        }
        convert::convert(a, (sums, dtype), (to, self.out), m * n)
    }

    /// The kernels for images `[N, C, …]`, on copies.
    fn of_copies(
        &self,
        a: &mut Assembler<'_>,
        node: &Node,
        operands: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let mut copies = operands;
        for (value, at) in node.inputs.iter().zip(&mut copies) {
            let dims = a.ty(*value).shape.dims();
            let copy = a.scratch(a.ty(*value).bytes());
            transpose(a, (copy, *at), dims, false, self.element)?;
            *at = copy;
        }
        let y = a.ty(node.outputs[0]);
        let sums = a.scratch(y.bytes());
        self.kernels(a, &node.op, copies, sums)?;
        transpose(a, (to, sums), y.shape.dims(), true, self.out)
    }
}

/// Copies an image of these sizes `[N, C, …]` so that its channels lie last, or back.
fn transpose(
    a: &mut Assembler<'_>,
    ends: (Pointer, Pointer),
    dims: &[usize],
    to_last: bool,
    dtype: DType,
) -> Option<()> {
    let dense = |dims: &[usize]| frit_ir::Shape::from(dims).strides();
    let order = Transpose::channels_last(dims.len());
    let lying: Vec<usize> = order.perm.iter().map(|axis| dims[*axis]).collect();
    let strides = dense(&lying);
    let last: Vec<usize> = order.inverse().perm.iter().map(|axis| strides[*axis]).collect();
    let both = if to_last { [last, dense(dims)] } else { [dense(dims), last] };
    a.copy(ends, dims, both, dtype.size())
}
