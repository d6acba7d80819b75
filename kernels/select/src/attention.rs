//! Selection for attention and its gradient: tensor cores for 2-byte elements, otherwise plain arithmetic.

mod cpu;
mod cudnn;
mod dropout;

pub(super) use cpu::cpu;

use crate::assembler::Assembler;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::ops::attention::{COARSE, Dims, FILLED, Sight};
use frit_ir::plan::{Argument, Pointer};
use frit_ir::strided::{self, Strided};
use frit_ir::{DType, Graph, Node, Op, Shape, TensorType, ValueId};

/// Warps per block, for all kernels.
const WARPS: usize = 4;
/// Padding elements after each row of a tile, as in `attention.cuh`.
const PAD: usize = 8;
/// The largest head size whose accumulators fit the registers of the tensor core kernels.
const MAX_HEAD: usize = 256;
/// Shared memory that a block can have on sm_80 and later data center GPUs, in bytes.
const MAX_SHARED: usize = 163 << 10;
/// Shared memory per block that every GPU from sm_80 on has.
const LEAST_SHARED: usize = 99 << 10;
/// Rows of the tiles of the plain kernels, as in `attention_plain.cuh`.
const PLAIN_TILE: usize = 32;

/// Sizes, types and mask that all kernels of one attention share.
pub(super) struct Setting<'a> {
    pub(super) dims: Dims,
    pub(super) element: DType,
    pub(super) scale: f64,
    pub(super) sight: Sight,
    pub(super) mask: Option<(Pointer, &'a TensorType)>,
    /// Elements of the mask between batches, heads, queries and keys.
    mask_strides: Vec<usize>,
    pub(super) dropout: Option<Dropout>,
    /// Types of the results.
    types: Vec<&'a TensorType>,
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
}

/// Dropout of weights.
pub(super) struct Dropout {
    keep: f64,
    /// The state of the generator if the mask is drawn, otherwise the mask.
    kept: Pointer,
    /// Number and probability of a mask that is drawn.
    drawn: Option<(u32, f64)>,
}

/// An operand or result and the strides of its batches, heads and rows, in elements.
#[derive(Clone, Copy)]
pub(super) struct View {
    pub(super) at: Pointer,
    pub(super) strides: [usize; 3],
}

impl Dropout {
    /// What the kernels call it.
    fn kind(&self) -> &'static str {
        if self.drawn.is_some() { "DRAWN" } else { "STORED" }
    }
}

impl View {
    /// `[batch, heads, rows, size]`, contiguous.
    fn dense(at: Pointer, ty: &TensorType) -> View {
        let strides = ty.shape.strides();
        View { at, strides: [strides[0], strides[1], strides[2]] }
    }

    fn is_dense(&self, ty: &TensorType) -> bool {
        self.strides == ty.shape.strides()[..3]
    }

    /// The view of a body's value; `None` if the elements of a row are not contiguous.
    fn strided(view: &Strided, place: fn(usize, usize) -> Pointer, dtype: DType) -> Option<View> {
        let [batch, head, row, 1] = view.strides[..] else { return None };
        let at = place(view.operand, view.offset * dtype.size());
        Some(View { at, strides: [batch, head, row] })
    }

    /// The parameters of the kernels' `Layout`.
    fn layout(&self) -> String {
        self.strides.map(|s| s.to_string()).join(",")
    }
}

/// One node with dense operands and results.
pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let first = match node.op {
        Op::Attention(_) => 0,
        Op::AttentionGrad(_) => 1,
        _ => return None,
    };
    let mut read = |i: usize| Some(View::dense(a.read(node.inputs[i])?, a.ty(node.inputs[i])));
    let qkv = [read(first)?, read(first + 1)?, read(first + 2)?];
    let outer = if first == 1 { Some([read(0)?, read(4)?]) } else { None };
    let s = Setting::of(a, node, qkv)?;
    let results: Vec<Pointer> = node.outputs.iter().map(|v| a.write(*v)).collect();
    let result = |i: usize| View::dense(results[i], s.types[i]);
    match outer {
        None => s.forward(a, result(0), results[1]),
        Some([dy, y]) => {
            let lse = a.read(node.inputs[5])?;
            let d_qkv = [result(0), result(1), result(2)];
            s.backward(a, [dy, y], lse, d_qkv, results.get(3).copied())
        }
    }
}

/// Selects for a body of one attention, or its gradient, and layout operations that strides express; `None`, and
/// nothing added, if the body is not of this form or the strided kernels do not support it.
pub(super) fn cuda_strided(a: &mut Assembler<'_>, body: &Graph) -> Option<()> {
    let is_attention = |n: &&Node| matches!(n.op, Op::Attention(_) | Op::AttentionGrad(_));
    let mut attentions = body.nodes().map(|(_, n)| n).filter(is_attention);
    let (Some(node), None) = (attentions.next(), attentions.next()) else { return None };
    let first = usize::from(matches!(node.op, Op::AttentionGrad(_)));
    let dtype = body.ty(node.inputs[first]).dtype;
    let read =
        |i: usize| View::strided(&strided::read(body, node.inputs[i])?, Pointer::Read, dtype);
    let qkv = [read(first)?, read(first + 1)?, read(first + 2)?];
    let outer = if first == 1 { Some([read(0)?, read(4)?]) } else { None };
    let written = strided::results(body, node)?;
    let result = |i: usize| View::strided(&written[i], Pointer::Write, dtype);
    let s = Setting::of(a, node, qkv)?;
    // The plain kernels, of which one computes the gradient of a mask, read and write dense tensors.
    if !s.has_tensor_cores() || written.len() > 3 {
        let outer = outer.iter().flatten().zip([0, 4]);
        let mut reads = qkv.iter().zip(first..).chain(outer);
        let reads_dense = reads.all(|(view, i)| view.is_dense(body.ty(node.inputs[i])));
        let mut results = written.iter().zip(&s.types);
        if !reads_dense || !results.all(|(view, ty)| view.is_dense(ty.shape.dims())) {
            return None;
        }
    }
    // They fill the results of the body.
    for output in &body.outputs {
        a.write(output.value);
    }
    match outer {
        None => {
            let lse = Pointer::Write(written[1].operand, 0);
            written[1].is_dense(s.types[1].shape.dims()).then_some(())?;
            s.forward(a, result(0)?, lse)
        }
        Some([dy, y]) => {
            let lse = a.read(node.inputs[5])?;
            let d_mask = written.get(3).map(|mask| Pointer::Write(mask.operand, 0));
            s.backward(a, [dy, y], lse, [result(0)?, result(1)?, result(2)?], d_mask)
        }
    }
}

impl<'a> Setting<'a> {
    fn of(a: &mut Assembler<'a>, node: &Node, [q, k, v]: [View; 3]) -> Option<Setting<'a>> {
        let (first, masks, keep, scale, sight) = match &node.op {
            Op::Attention(op) => (0, op.masks(&node.inputs), op.keep, op.scale, op.sight()),
            Op::AttentionGrad(op) => (1, op.masks(&node.inputs), op.keep, op.scale, op.sight()),
            _ => return None,
        };
        let [mask, kept] = masks.map(Option::<&ValueId>::copied);
        let types: Vec<&TensorType> =
            node.inputs[first..first + 3].iter().map(|v| a.ty(*v)).collect();
        let dims = Dims::of(types[0], types[1], types[2]).ok()?;
        c_type(types[0].dtype)?;
        if dims.d == 0 || dims.e == 0 {
            return None;
        }
        let (mut mask_strides, mut operand) = (vec![0; 4], None);
        if let Some(mask) = mask {
            let ty = a.ty(mask);
            c_type(ty.dtype)?;
            let full = Shape::from([dims.b, dims.h, dims.t, dims.s]);
            mask_strides = ty.shape.broadcast_strides(&full)?;
            // Kernels index scores of a head with 32 bits.
            i32::try_from(dims.t * dims.s).ok()?;
            operand = Some((a.read(mask)?, ty));
        }
        let dropout = match kept.zip(keep) {
            None => None,
            Some((kept, keep)) => Some(match dropout::drawn(a.body, kept) {
                Some((mask, state)) => {
                    Dropout { keep, kept: a.read(state)?, drawn: Some((mask.id, mask.keep)) }
                }
                None => Dropout { keep, kept: a.read(kept)?, drawn: None },
            }),
        };
        Some(Setting {
            dims,
            element: types[0].dtype,
            scale,
            sight: sight.of(dims.t, dims.s),
            mask: operand,
            mask_strides,
            dropout,
            types: node.outputs.iter().map(|v| a.ty(*v)).collect(),
            q,
            k,
            v,
        })
    }

    /// Whether tensor cores multiply this element type.
    fn has_tensor_cores(&self) -> bool {
        let largest = self.dims.d.max(self.dims.e);
        self.element.is_low_precision() && largest <= MAX_HEAD
    }

    /// The element type of statistics.
    fn wide(&self) -> DType {
        if self.element == DType::F64 { DType::F64 } else { DType::F32 }
    }

    fn rows(&self) -> usize {
        self.dims.b * self.dims.h * self.dims.t
    }

    /// Sizes padded to multiples of the 16×16 tensor core tile.
    fn padded(&self) -> (usize, usize) {
        (self.dims.d.next_multiple_of(16), self.dims.e.next_multiple_of(16))
    }

    /// A kernel with the common definitions.
    fn kernel(&self, file: &'static str, entry: &'static str) -> Option<SourceKernel> {
        let (kind, mask) = match self.mask {
            None => ("NO_MASK", "f32"),
            Some((_, ty)) if ty.dtype == DType::Bool => ("KEPT", c_type(ty.dtype)?),
            Some((_, ty)) => ("ADDED", c_type(ty.dtype)?),
        };
        let kernel = SourceKernel::new(file, entry)
            .define("T", c_type(self.element)?)
            .define("HEAD", self.dims.d)
            .define("VALUE", self.dims.e)
            .define("CAUSAL", u8::from(self.sight.causal))
            .define("WINDOW", self.sight.window.unwrap_or(0))
            .define("MASK", kind)
            .define("MASK_T", mask)
            .define("DROPOUT", self.dropout.as_ref().map_or("NO_DROPOUT", Dropout::kind));
        let mut kernel = match kind {
            "ADDED" => kernel.define("COARSE", COARSE).define("FILLED", format!("{FILLED:e}")),
            _ => kernel,
        };
        kernel.block = WARPS as u32 * 32;
        Some(kernel)
    }

    /// A tensor core kernel with `rows` · 16 rows per warp.
    fn tiled(&self, file: &'static str, entry: &'static str, rows: usize) -> Option<SourceKernel> {
        let folded = self.mask.is_none() && self.scale > 0.0;
        let (d, e) = self.padded();
        let kernel = self.kernel(file, entry)?;
        Some(
            kernel
                .define("D", d)
                .define("E", e)
                .define("FOLDED", u8::from(folded))
                .define("WARPS", WARPS)
                .define("ROWS", rows)
                .define("Q_LAYOUT", self.q.layout())
                .define("K_LAYOUT", self.k.layout())
                .define("V_LAYOUT", self.v.layout()),
        )
    }

    /// Adds the last arguments.
    fn finish(&self, kernel: SourceKernel) -> SourceKernel {
        self.with_dropout(self.with_mask(kernel))
    }

    /// Adds the arguments mask (any pointer if there is none), sizes and scale.
    fn with_mask(&self, kernel: SourceKernel) -> SourceKernel {
        let d = &self.dims;
        let mut words = vec![d.h as i64, d.g as i64, d.t as i64, d.s as i64];
        words.extend(self.mask_strides.iter().map(|s| *s as i64));
        let mut kernel = kernel.pointer(self.mask.map_or(self.q.at, |(at, _)| at));
        kernel.arguments.push(Argument::Words(words));
        kernel.arguments.push(self.number(self.scale));
        kernel
    }

    /// Adds the arguments of dropout, if there is one.
    fn with_dropout(&self, kernel: SourceKernel) -> SourceKernel {
        let Some(dropout) = &self.dropout else { return kernel };
        let weights = self.rows() * self.dims.s;
        let (id, keep) = dropout.drawn.unwrap_or_default();
        let words = vec![weights as i64, i64::from(id), (keep * 4_294_967_296.0) as i64];
        let mut kernel = kernel.pointer(dropout.kept);
        kernel.arguments.push(Argument::Words(words));
        kernel.arguments.push(self.number(dropout.keep.recip()));
        kernel
    }

    /// An argument of the type of statistics.
    fn number(&self, x: f64) -> Argument {
        match self.wide() {
            DType::F64 => Argument::F64(x),
            _ => Argument::F32(x as f32),
        }
    }

    fn forward(&self, a: &mut Assembler<'_>, y: View, lse: Pointer) -> Option<()> {
        if self.rows() == 0 {
            return Some(());
        }
        let heads = self.dims.b * self.dims.h;
        let (d, e) = self.padded();
        let (kernel, block) = if self.has_tensor_cores() {
            // Masks also need registers.
            let (rows, keys) = match d.max(e) {
                ..=64 => (2, 64),
                65..=128 if self.mask.is_none() => (2, 32),
                65..=128 => (1, 64),
                _ => (1, 32),
            };
            let block = WARPS * rows * 16;
            let shared = (block + keys) * (d + PAD) + keys * (e + PAD);
            let kernel = self
                .tiled("attention", "attention", rows)?
                .define("KEYS", keys)
                .define("Y_LAYOUT", y.layout());
            (kernel.shared(shared * self.element.size())?, block)
        } else {
            let (rows, block) = self.plain_rows();
            let (d, e) = (self.dims.d + 1, self.dims.e + 1);
            let shared = block * d + PLAIN_TILE * (d + e);
            let kernel = self.kernel("attention_plain", "attention_plain")?.define("R", rows);
            (kernel.shared(shared * self.wide().size())?, block)
        };
        let kernel = kernel.grid(heads * self.dims.t.div_ceil(block))?.pointer(y.at).pointer(lse);
        let operands = [self.q.at, self.k.at, self.v.at];
        let kernel = operands.into_iter().fold(kernel, SourceKernel::pointer);
        let begin = a.launches();
        a.run(self.finish(kernel));
        self.candidate(a, y, lse, begin);
        Some(())
    }

    /// Rows per warp and per block of the plain kernels.
    fn plain_rows(&self) -> (usize, usize) {
        let small = self.wide() == DType::F32 && self.dims.d.max(self.dims.e) <= MAX_HEAD;
        let rows = if small { 4 } else { 1 };
        (rows, rows * WARPS)
    }

    fn backward(
        &self,
        a: &mut Assembler<'_>,
        [dy, y]: [View; 2],
        lse: Pointer,
        d_qkv: [View; 3],
        d_mask: Option<Pointer>,
    ) -> Option<()> {
        let delta = a.scratch(self.rows() * self.wide().size());
        let begin = a.launches();
        if self.rows() > 0 {
            a.run(
                SourceKernel::new("attention_delta", "attention_delta")
                    .define("T", c_type(self.element)?)
                    .define("VALUE", self.dims.e)
                    .define("DY_LAYOUT", dy.layout())
                    .define("Y_LAYOUT", y.layout())
                    .threads(self.rows() * 32)
                    .pointer(delta)
                    .pointer(dy.at)
                    .pointer(y.at)
                    .i64(self.rows())
                    .i64(self.dims.h)
                    .i64(self.dims.t),
            );
        }
        // Only an added mask can make statistics coarse; otherwise any pointer does.
        let factors = match self.mask {
            Some((_, ty)) if ty.dtype.is_float() => a.scratch(self.rows() * self.wide().size()),
            _ => delta,
        };
        let operands = [dy.at, self.q.at, self.k.at, self.v.at, lse, delta, factors];
        if self.has_tensor_cores() {
            self.tiled_gradients(a, dy, d_qkv, operands)?;
        } else {
            self.plain_gradients(a, d_qkv.map(|d| d.at), operands)?;
        }
        match d_mask {
            Some(d_mask) => self.mask_gradient(a, d_mask, operands),
            None => {
                self.gradient_candidate(a, [dy, y], [lse, delta], d_qkv, begin);
                Some(())
            }
        }
    }

    fn tiled_gradients(
        &self,
        a: &mut Assembler<'_>,
        dy: View,
        [dq, dk, dv]: [View; 3],
        operands: [Pointer; 7],
    ) -> Option<()> {
        let (d, e) = self.padded();
        let largest = d.max(e);
        let size = self.element.size();
        let (row_d, row_e) = ((d + PAD) * size, (e + PAD) * size);
        // Each kernel stores rows of keys and values, or of queries and output gradients.
        let shared = |block: usize, tile: usize| (block + 2 * tile) * (row_d + row_e);
        if self.rows() > 0 {
            let (rows, most) = match largest {
                ..=64 => (2, 32),
                65..=128 => (1, 64),
                _ => (1, 16),
            };
            let block = WARPS * rows * 16;
            let tile = tile(most, |tile| shared(block, tile));
            let kernel = self
                .tiled("attention_grad_queries", "attention_grad_queries", rows)?
                .define("TILE", tile)
                .define("DY_LAYOUT", dy.layout())
                .define("DQ_LAYOUT", dq.layout())
                .shared(shared(block, tile))?
                .grid(self.dims.b * self.dims.h * self.dims.t.div_ceil(block))?
                .pointer(dq.at);
            a.run(self.finish(operands.into_iter().fold(kernel, SourceKernel::pointer)));
        }
        let keys = self.dims.b * self.dims.g * self.dims.s;
        if keys > 0 {
            // Masks also need registers; with large heads the accumulators of both gradients do not fit.
            let masked = self.mask.is_some();
            let most = match largest {
                ..=64 if !masked => 64,
                65..=128 if self.dropout.is_some() => 16,
                ..=128 => 32,
                _ if masked => 16,
                _ => 32,
            };
            let block = WARPS * 16;
            let fits = largest <= if masked { 64 } else { 128 };
            let wants: &[(u8, u8)] = if fits { &[(1, 1)] } else { &[(1, 0), (0, 1)] };
            for (k, v) in wants {
                // The gradient of values alone does not read values.
                let without = if *k == 0 { block * row_e } else { 0 };
                let tile = tile(most, |tile| shared(block, tile) - without);
                let kernel = self
                    .tiled("attention_grad_keys", "attention_grad_keys", 1)?
                    .define("TILE", tile)
                    .define("WANT_K", k)
                    .define("WANT_V", v)
                    .define("DY_LAYOUT", dy.layout())
                    .define("DK_LAYOUT", dk.layout())
                    .define("DV_LAYOUT", dv.layout())
                    .shared(shared(block, tile) - without)?
                    .grid(self.dims.b * self.dims.g * self.dims.s.div_ceil(block))?
                    .pointer(dk.at)
                    .pointer(dv.at);
                a.run(self.finish(operands.into_iter().fold(kernel, SourceKernel::pointer)));
            }
        }
        Some(())
    }

    fn plain_gradients(
        &self,
        a: &mut Assembler<'_>,
        results: [Pointer; 3],
        operands: [Pointer; 7],
    ) -> Option<()> {
        let (rows, block) = self.plain_rows();
        let (bytes, file) = (self.plain_shared(block), "attention_plain_grad");
        if self.rows() > 0 {
            let kernel = self
                .kernel(file, "attention_plain_grad_queries")?
                .define("R", rows)
                .shared(bytes)?
                .grid(self.dims.b * self.dims.h * self.dims.t.div_ceil(block))?
                .pointer(results[0]);
            a.run(self.finish(operands.into_iter().fold(kernel, SourceKernel::pointer)));
        }
        if self.dims.b * self.dims.g * self.dims.s > 0 {
            let kernel = self
                .kernel(file, "attention_plain_grad_keys")?
                .define("R", rows)
                .shared(bytes)?
                .grid(self.dims.b * self.dims.g * self.dims.s.div_ceil(block))?
                .pointer(results[1])
                .pointer(results[2]);
            a.run(self.finish(operands.into_iter().fold(kernel, SourceKernel::pointer)));
        }
        Some(())
    }

    /// Shared bytes of a block of rows of both operands and of a tile of the operands streamed past them.
    fn plain_shared(&self, block: usize) -> usize {
        (block + PLAIN_TILE) * (self.dims.d + self.dims.e + 2) * self.wide().size()
    }

    fn mask_gradient(
        &self,
        a: &mut Assembler<'_>,
        dmask: Pointer,
        operands: [Pointer; 7],
    ) -> Option<()> {
        let (rows, block) = self.plain_rows();
        let ty = self.types[3];
        let d = &self.dims;
        if self.rows() == 0 || d.s == 0 {
            return a.fill(dmask, ty, 0.0);
        }
        let s = &self.mask_strides;
        let along = |i: usize, n: usize| if s[i] == 0 { 1 } else { n };
        let blocks = along(0, d.b)
            * along(1, d.h)
            * along(2, d.t.div_ceil(block))
            * along(3, d.s.div_ceil(PLAIN_TILE));
        let shared = self.plain_shared(block) + block * PLAIN_TILE * self.wide().size();
        let kernel = self
            .kernel("attention_mask_grad", "attention_mask_grad")?
            .define("R", rows)
            .shared(shared)?
            .grid(blocks)?
            .pointer(dmask);
        let kernel = operands.into_iter().fold(kernel, SourceKernel::pointer);
        let mut kernel = self.with_mask(kernel);
        kernel.arguments.push(Argument::Words(s.iter().map(|s| *s as i64).collect()));
        a.run(self.with_dropout(kernel.i64(d.b)));
        Some(())
    }
}

/// Rows of a tile: as many as fit the shared memory of every GPU, a multiple of 16 and at most `most`.
fn tile(most: usize, shared: impl Fn(usize) -> usize) -> usize {
    let fits = |tile: &usize| shared(*tile) <= LEAST_SHARED;
    (1..=most / 16).rev().map(|n| n * 16).find(fits).unwrap_or(16)
}

impl SourceKernel {
    /// Sets the bytes of dynamic shared memory per block; `None` if no GPU has that many.
    fn shared(mut self, bytes: usize) -> Option<Self> {
        self.shared_bytes = u32::try_from(bytes).ok()?;
        (bytes <= MAX_SHARED).then_some(self)
    }
}
