//! Selection for convolution and its gradients: GEMMs of the images themselves where a window is one element; otherwise tensor
//! cores for 2-byte elements, and im2col and GEMM, some images at a time, for others; direct computation for many groups.

mod cudnn;
mod fold;
mod last;
mod tiles;

use crate::assembler::Assembler;
use crate::convert;
use crate::reduce::Reduction;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use crate::window::window;
use frit_ir::ops::{ReduceFn, Window};
use frit_ir::plan::{Epilogue, Gemm, Launch, Matrix, Pointer};
use frit_ir::{DType, Node, Op, TensorType};
use frit_kernels::routine::Routine;
pub(super) use last::cuda_channels_last;

/// With more groups than this, the GEMMs are too small.
const MANY_GROUPS: usize = 16;
/// Approximate scratch memory for columns, in bytes.
const COLUMNS_BYTES: usize = 64 << 20;

/// A convolution of `x[images, channels, size]` by `w[filters, channels / groups, taps]` to `y[images, filters,
/// positions]`.
pub(super) struct Conv<'a> {
    pub(super) window: &'a Window,
    pub(super) groups: usize,
    pub(super) images: usize,
    pub(super) channels: usize,
    pub(super) filters: usize,
    pub(super) size: &'a [usize],
    pub(super) taps: &'a [usize],
    pub(super) positions: usize,
    /// Element types of the operands and of the result.
    pub(super) element: DType,
    pub(super) out: DType,
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let conv = Conv::of(a, node)?;
    let operands = [a.read(node.inputs[0])?, a.read(node.inputs[1])?];
    let to = a.write(node.outputs[0]);
    if let Some(filled) = conv.without_elements(a, node, to) {
        return filled;
    }
    let begin = a.launches();
    conv.kernels(a, &node.op, operands, to)?;
    conv.candidate(a, &node.op, operands, to, begin, false)
}

impl<'a> Conv<'a> {
    /// That of a node, if the kernels support it.
    fn of(a: &Assembler<'a>, node: &'a Node) -> Option<Conv<'a>> {
        let types: Vec<&TensorType> = node.inputs.iter().map(|v| a.ty(*v)).collect();
        let out = a.ty(*node.outputs.first()?);
        let (window, groups, x, w) = match &node.op {
            Op::Conv(op) => (&op.window, op.groups, types[0], types[1]),
            Op::ConvGradInput(op) => (&op.window, op.groups, out, types[1]),
            Op::ConvGradWeight(op) => (&op.window, op.groups, types[1], out),
            _ => return None,
        };
        let (size, taps) = (&x.shape.dims()[2..], &w.shape.dims()[2..]);
        c_type(types[0].dtype)?;
        Some(Conv {
            window,
            groups,
            images: x.shape.0[0],
            channels: x.shape.0[1],
            filters: w.shape.0[0],
            size,
            taps,
            positions: window.positions(size, taps).ok()?.iter().product(),
            element: types[0].dtype,
            out: out.dtype,
        })
    }

    /// What computes an empty result, or one of empty sums.
    fn without_elements(
        &self,
        a: &mut Assembler<'_>,
        node: &Node,
        to: Pointer,
    ) -> Option<Option<()>> {
        let out = a.ty(node.outputs[0]);
        if out.shape.numel() == 0 {
            return Some(Some(()));
        }
        let is_empty = node.inputs.iter().any(|v| a.ty(*v).shape.numel() == 0);
        is_empty.then(|| a.fill(to, out, 0.0))
    }

    /// Launches of kernels and GEMMs.
    fn kernels(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        operands: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        match op {
            _ if self.groups > MANY_GROUPS => self.direct(a, op, operands, to),
            Op::Conv(_) if self.is_plain() => self.forward(a, operands, to),
            Op::ConvGradInput(_) if self.is_plain() => self.plain_grad_input(a, operands, to),
            Op::ConvGradWeight(_) if self.sums_of_images() => {
                self.plain_grad_weight(a, operands, to)
            }
            op if self.has_tiles() => self.tiles(a, op, operands, to),
            Op::Conv(_) => self.forward(a, operands, to),
            Op::ConvGradInput(_) => self.grad_input(a, operands, to),
            _ => self.grad_weight(a, operands, to),
        }
    }
}

impl Conv<'_> {
    /// Rows of the columns: of all groups, and of one.
    fn rows(&self) -> (usize, usize) {
        let rows = self.channels * self.taps.iter().product::<usize>();
        (rows, rows / self.groups)
    }

    fn wide(&self) -> DType {
        if self.element == DType::F64 { DType::F64 } else { DType::F32 }
    }

    /// Whether the columns are the image itself.
    fn is_plain(&self) -> bool {
        let ones = |list: &[usize]| list.iter().all(|n| *n == 1);
        let zeros = |list: &[usize]| list.iter().all(|n| *n == 0);
        ones(self.taps)
            && ones(&self.window.strides)
            && zeros(&self.window.low)
            && zeros(&self.window.high)
    }

    /// Whether the weight's gradient is computed for each image and then summed: the gradients of all images must be few beside
    /// the images, whose rows must be aligned for the tensor cores.
    fn sums_of_images(&self) -> bool {
        let gradients = self.filters * self.channels / self.groups * self.wide().size();
        let row = self.positions * self.element.size();
        let few = 2 * gradients <= (self.filters + self.channels) * row;
        self.is_plain() && self.images > 1 && row.is_multiple_of(16) && few
    }

    /// Images whose columns, of this element type, are in scratch memory at a time.
    fn chunk(&self, dtype: DType) -> usize {
        let bytes = self.rows().0 * self.positions * dtype.size();
        (COLUMNS_BYTES / bytes.max(1)).clamp(1, self.images)
    }

    fn kernel(&self, entry: &'static str) -> Option<SourceKernel> {
        let kernel = SourceKernel::new("conv", entry)
            .define("T", c_type(self.element)?)
            .define("OUT", c_type(self.out)?)
            .define("RANK", self.size.len());
        Some(kernel)
    }

    fn matrix(&self, at: Pointer, dtype: DType, row_stride: usize, batch_stride: usize) -> Matrix {
        Matrix { at, dtype, row_stride, batch_stride, transposed: false, scale: None }
    }

    /// Whether a GEMM of the operands can write `out`.
    fn is_direct(&self) -> bool {
        self.out == self.element || self.out == self.wide()
    }

    /// A buffer for the result in a type that GEMMs can write.
    fn gemm_place(&self, a: &mut Assembler<'_>, to: Pointer, n: usize) -> (Pointer, DType) {
        match self.is_direct() {
            true => (to, self.out),
            false => (a.scratch(n * self.wide().size()), self.wide()),
        }
    }

    /// Where the parts of a sum of `n` elements are written: in the result if there is one, else in scratch memory.
    fn place_of_parts(
        &self,
        a: &mut Assembler<'_>,
        to: Pointer,
        [parts, n]: [usize; 2],
    ) -> (Pointer, DType) {
        match parts {
            1 => (to, self.out),
            _ => (a.scratch(parts * n * DType::F32.size()), DType::F32),
        }
    }

    /// Adds the parts in order.
    fn add_parts(
        &self,
        a: &mut Assembler<'_>,
        to: Pointer,
        sums: Pointer,
        [parts, n]: [usize; 2],
    ) -> Option<()> {
        if parts == 1 {
            return Some(());
        }
        Reduction::new(ReduceFn::Sum, &[parts, n], |axis| axis == 0).assemble(
            a,
            (to, self.out),
            (sums, DType::F32),
        )
    }

    fn forward(&self, a: &mut Assembler<'_>, [x, w]: [Pointer; 2], to: Pointer) -> Option<()> {
        let ((rows, group_rows), positions) = (self.rows(), self.positions);
        let size: usize = self.size.iter().product();
        let filters = self.filters / self.groups;
        let n = self.images * self.filters * positions;
        let (sums, sum_type) = self.gemm_place(a, to, n);
        let bytes = self.element.size();
        let chunk = if self.is_plain() { self.images } else { self.chunk(self.element) };
        let scratch = if self.is_plain() { x } else { a.scratch(chunk * rows * positions * bytes) };
        for first in (0..self.images).step_by(chunk) {
            let images = chunk.min(self.images - first);
            if !self.is_plain() {
                let image = x.offset(first * self.channels * size * bytes);
                self.to_columns(a, scratch, image, images, (rows * positions, positions))?;
            }
            for group in 0..self.groups {
                let weights = w.offset(group * filters * group_rows * bytes);
                let columns = scratch.offset(group * group_rows * positions * bytes);
                let at = (first * self.filters + group * filters) * positions * sum_type.size();
                a.launch(Launch::Gemm(Gemm {
                    m: filters,
                    n: positions,
                    k: group_rows,
                    batch: images,
                    a: self.matrix(weights, self.element, group_rows, 0),
                    b: self.matrix(columns, self.element, positions, rows * positions),
                    d: self.matrix(sums.offset(at), sum_type, positions, self.filters * positions),
                    epilogue: Epilogue::None,
                }));
            }
        }
        if self.is_direct() {
            return Some(());
        }
        convert::convert(a, (sums, sum_type), (to, self.out), n)
    }

    fn to_columns(
        &self,
        a: &mut Assembler<'_>,
        columns: Pointer,
        x: Pointer,
        images: usize,
        (image_step, row_step): (usize, usize),
    ) -> Option<()> {
        let kernel = self
            .kernel("to_columns")?
            .threads(images * self.rows().0 * self.positions)
            .pointer(columns)
            .pointer(x)
            .window(self.window, self.size, self.taps)?
            .i64(images)
            .i64(self.channels)
            .i64(image_step)
            .i64(row_step);
        a.run(kernel);
        Some(())
    }

    /// The input gradient where the columns are the image itself.
    fn plain_grad_input(
        &self,
        a: &mut Assembler<'_>,
        [dy, w]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let (positions, bytes) = (self.positions, self.element.size());
        let (filters, channels) = (self.filters / self.groups, self.channels / self.groups);
        let n = self.images * self.channels * positions;
        let (sums, sum_type) = self.gemm_place(a, to, n);
        for group in 0..self.groups {
            let weights = w.offset(group * filters * channels * bytes);
            let gradient = dy.offset(group * filters * positions * bytes);
            let result = sums.offset(group * channels * positions * sum_type.size());
            a.launch(Launch::Gemm(Gemm {
                m: channels,
                n: positions,
                k: filters,
                batch: self.images,
                a: Matrix { transposed: true, ..self.matrix(weights, self.element, channels, 0) },
                b: self.matrix(gradient, self.element, positions, self.filters * positions),
                d: self.matrix(result, sum_type, positions, self.channels * positions),
                epilogue: Epilogue::None,
            }));
        }
        if self.is_direct() {
            return Some(());
        }
        convert::convert(a, (sums, sum_type), (to, self.out), n)
    }

    /// The weight's gradient where the columns are the image itself.
    fn plain_grad_weight(
        &self,
        a: &mut Assembler<'_>,
        [dy, x]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let (positions, bytes, wide) = (self.positions, self.element.size(), self.wide());
        let (filters, channels) = (self.filters / self.groups, self.channels / self.groups);
        let n = self.filters * channels;
        let sums = a.scratch(self.images * n * wide.size());
        for group in 0..self.groups {
            let gradient = dy.offset(group * filters * positions * bytes);
            let image = x.offset(group * channels * positions * bytes);
            a.launch(Launch::Gemm(Gemm {
                m: filters,
                n: channels,
                k: positions,
                batch: self.images,
                a: self.matrix(gradient, self.element, positions, self.filters * positions),
                b: Matrix {
                    transposed: true,
                    ..self.matrix(image, self.element, positions, self.channels * positions)
                },
                d: self.matrix(
                    sums.offset(group * filters * channels * wide.size()),
                    wide,
                    channels,
                    n,
                ),
                epilogue: Epilogue::None,
            }));
        }
        Reduction::new(ReduceFn::Sum, &[self.images, n], |axis| axis == 0).assemble(
            a,
            (to, self.out),
            (sums, wide),
        )
    }

    fn grad_input(&self, a: &mut Assembler<'_>, [dy, w]: [Pointer; 2], to: Pointer) -> Option<()> {
        let ((rows, group_rows), positions) = (self.rows(), self.positions);
        let size: usize = self.size.iter().product();
        let filters = self.filters / self.groups;
        let (wide, bytes) = (self.wide(), self.element.size());
        let chunk = self.chunk(wide);
        let columns = a.scratch(chunk * rows * positions * wide.size());
        for first in (0..self.images).step_by(chunk) {
            let images = chunk.min(self.images - first);
            for group in 0..self.groups {
                let weights = w.offset(group * filters * group_rows * bytes);
                let at = (first * self.filters + group * filters) * positions * bytes;
                let sums = columns.offset(group * group_rows * positions * wide.size());
                a.launch(Launch::Gemm(Gemm {
                    m: group_rows,
                    n: positions,
                    k: filters,
                    batch: images,
                    a: Matrix {
                        transposed: true,
                        ..self.matrix(weights, self.element, group_rows, 0)
                    },
                    b: self.matrix(
                        dy.offset(at),
                        self.element,
                        positions,
                        self.filters * positions,
                    ),
                    d: self.matrix(sums, wide, positions, rows * positions),
                    epilogue: Epilogue::None,
                }));
            }
            let kernel = self
                .kernel("from_columns")?
                .threads(images * self.channels * size)
                .pointer(to.offset(first * self.channels * size * self.out.size()))
                .pointer(columns)
                .window(self.window, self.size, self.taps)?
                .i64(images)
                .i64(self.channels);
            a.run(kernel);
        }
        Some(())
    }

    fn grad_weight(&self, a: &mut Assembler<'_>, [dy, x]: [Pointer; 2], to: Pointer) -> Option<()> {
        let ((rows, group_rows), positions) = (self.rows(), self.positions);
        let size: usize = self.size.iter().product();
        let filters = self.filters / self.groups;
        let (wide, bytes) = (self.wide(), self.element.size());
        let chunk = self.chunk(self.element);
        let chunks = self.images.div_ceil(chunk);
        let n = self.filters * group_rows;
        // One GEMM contracts the positions of all images of a chunk, so both operands have them along rows.
        let columns = a.scratch(rows * chunk * positions * bytes);
        let gradients = a.scratch(self.filters * chunk * positions * bytes);
        let (sums, sum_type) = match chunks {
            1 => self.gemm_place(a, to, n),
            _ => (a.scratch(chunks * n * wide.size()), wide),
        };
        for (i, first) in (0..self.images).step_by(chunk).enumerate() {
            let images = chunk.min(self.images - first);
            let line = images * positions;
            let image = x.offset(first * self.channels * size * bytes);
            self.to_columns(a, columns, image, images, (positions, line))?;
            let from = dy.offset(first * self.filters * positions * bytes);
            a.copy(
                (gradients, from),
                &[images, self.filters, positions],
                [vec![positions, line, 1], vec![self.filters * positions, positions, 1]],
                bytes,
            )?;
            for group in 0..self.groups {
                let at = (i * n + group * filters * group_rows) * sum_type.size();
                a.launch(Launch::Gemm(Gemm {
                    m: filters,
                    n: group_rows,
                    k: line,
                    batch: 1,
                    a: self.matrix(
                        gradients.offset(group * filters * line * bytes),
                        self.element,
                        line,
                        0,
                    ),
                    b: Matrix {
                        transposed: true,
                        ..self.matrix(
                            columns.offset(group * group_rows * line * bytes),
                            self.element,
                            line,
                            0,
                        )
                    },
                    d: self.matrix(sums.offset(at), sum_type, group_rows, 0),
                    epilogue: Epilogue::None,
                }));
            }
        }
        match chunks {
            1 if self.is_direct() => Some(()),
            1 => convert::convert(a, (sums, sum_type), (to, self.out), n),
            _ => Reduction::new(ReduceFn::Sum, &[chunks, n], |axis| axis == 0).assemble(
                a,
                (to, self.out),
                (sums, wide),
            ),
        }
    }

    fn direct(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        operands: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let size: usize = self.size.iter().product();
        let kernel = match op {
            Op::Conv(_) => {
                self.kernel("conv_direct")?.threads(self.images * self.filters * self.positions)
            }
            Op::ConvGradInput(_) => {
                self.kernel("conv_direct_grad_input")?.threads(self.images * self.channels * size)
            }
            _ => self.kernel("conv_direct_grad_weight")?.blocks(self.filters * self.rows().1),
        };
        let kernel = kernel
            .pointer(to)
            .pointer(operands[0])
            .pointer(operands[1])
            .window(self.window, self.size, self.taps)?
            .i64(self.images)
            .i64(self.channels)
            .i64(self.filters)
            .i64(self.groups);
        a.run(kernel);
        Some(())
    }
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let out = outs[0];
    let (sliding, groups, x, w) = match op {
        Op::Conv(op) => (&op.window, op.groups, ins[0], ins[1]),
        Op::ConvGradInput(op) => (&op.window, op.groups, out, ins[1]),
        Op::ConvGradWeight(op) => (&op.window, op.groups, ins[1], out),
        _ => return None,
    };
    let (x, w) = (x.shape.dims(), w.shape.dims());
    let conv = frit_kernels::routine::conv::Conv {
        elem: elem(ins[0].dtype)?,
        out: elem(out.dtype)?,
        batch: x[0],
        groups,
        channels: w[1],
        filters: w[0].checked_div(groups)?,
        window: window(sliding, &x[2..], &w[2..])?,
    };
    Some(match op {
        Op::Conv(_) => Routine::Conv(conv),
        Op::ConvGradInput(_) => Routine::ConvGradInput(conv),
        _ => Routine::ConvGradWeight(conv),
    })
}
