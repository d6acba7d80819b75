//! Convolutions of images that lie channels last: a GEMM of all places of all images where a window is one element; otherwise
//! cuDNN's engines or, for the gradient of the weights, an implicit GEMM, or of transposed copies the kernels for images
//! `[N, C, …]`.

mod grad_weight;

use crate::assembler::Assembler;
use crate::conv::Conv;
use crate::conv::cudnn::VECTOR;
use crate::{convert, last};
use frit_ir::ops::Transpose;
use frit_ir::plan::{Epilogue, Gemm, Launch, Matrix, Pointer};
use frit_ir::{DType, Graph, Op, Shape};

/// The launches of a body that is a convolution between transposes.
pub(crate) fn cuda_channels_last(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let node = last::between_transposes(body)?;
    let conv = Conv::of(a, node)?;
    let outer = [node.inputs[0], node.inputs[1], node.outputs[0]];
    if outer.iter().any(|v| a.ty(*v).shape.numel() == 0) {
        return None;
    }
    let [first, second] = [0, 1].map(|i| last::operand(body, node.inputs[i]));
    let inner = [first?, second?, last::result(body, node.outputs[0])?];
    let are_last = [0, 1, 2].map(|i| last::lies_last(body, outer[i], inner[i]));
    let operands = [a.read(inner[0])?, a.read(inner[1])?];
    let to = a.write(inner[2]);
    let few = conv.groups == 1 && conv.channels < VECTOR && conv.element.size() == 2;
    match (&node.op, are_last) {
        (op, [true, true, true]) => conv.last(a, op, operands, to),
        (op @ Op::Conv(_), [false, _, true]) if few => conv.folded(a, op, operands, to),
        (op @ Op::ConvGradWeight(_), [true, false, _]) if few => conv.folded(a, op, operands, to),
        (op, are_last) => conv.of_copies(a, op, (operands, to), are_last),
    }
}

impl Conv<'_> {
    /// The launches of a convolution whose operands and result all lie channels last.
    pub(super) fn last(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        operands: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let begin = a.launches();
        match op {
            op if self.groups == 1 && self.is_plain() => self.places(a, op, operands, to)?,
            op if self.has_last_grad_weight(op) => self.last_grad_weight(a, operands, to)?,
            op => self.of_copies(a, op, (operands, to), [true; 3])?,
        }
        self.candidate(a, op, operands, to, begin, true)
    }

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

    /// The kernels for images `[N, C, …]`, on copies of those operands that lie channels last; if not all do, beside the
    /// candidate for such images.
    fn of_copies(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        (operands, to): ([Pointer; 2], Pointer),
        are_last: [bool; 3],
    ) -> Option<()> {
        let shapes = self.shapes(op)?;
        let elements = |i: usize| shapes[i].iter().product::<usize>();
        let mut copies = operands;
        for i in (0..2).filter(|i| are_last[*i]) {
            let copy = a.scratch(elements(i) * self.element.size());
            transpose(a, (copy, copies[i]), &shapes[i], false, self.element)?;
            copies[i] = copy;
        }
        let sums = match are_last[2] {
            true => a.scratch(elements(2) * self.out.size()),
            false => to,
        };
        let begin = a.launches();
        self.kernels(a, op, copies, sums)?;
        if are_last != [true; 3] {
            self.candidate(a, op, copies, sums, begin, false)?;
        }
        match are_last[2] {
            true => transpose(a, (to, sums), &shapes[2], true, self.out),
            false => Some(()),
        }
    }

    /// The shapes of operands and result.
    fn shapes(&self, op: &Op) -> Option<[Vec<usize>; 3]> {
        let positions = self.window.positions(self.size, self.taps).ok()?;
        let images = [&[self.images, self.channels], self.size].concat();
        let kernels = [&[self.filters, self.channels / self.groups], self.taps].concat();
        let responses = [&[self.images, self.filters], &positions[..]].concat();
        Some(match op {
            Op::Conv(_) => [images, kernels, responses],
            Op::ConvGradInput(_) => [responses, kernels, images],
            _ => [responses, images, kernels],
        })
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
    let dense = |dims: &[usize]| Shape::from(dims).strides();
    let order = Transpose::channels_last(dims.len());
    let lying: Vec<usize> = order.perm.iter().map(|axis| dims[*axis]).collect();
    let strides = dense(&lying);
    let last: Vec<usize> = order.inverse().perm.iter().map(|axis| strides[*axis]).collect();
    let both = if to_last { [last, dense(dims)] } else { [dense(dims), last] };
    a.copy(ends, dims, both, dtype.size())
}
