//! Durations of kernels: the longer of their arithmetic and their memory traffic.

use super::{Convolutions, Curve, Device, processor};
use frit_ir::ops::{BinaryFn, Conv, ConvGradInput, ConvGradWeight, MatMul, Window};
use frit_ir::{DType, Graph, Node, Op, TensorType};

/// A batch of matmuls `[m, k] × [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Element type of both operands.
    pub dtype: DType,
    /// Element type of the result.
    pub out: DType,
    /// Number of matmuls.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of every sum.
    pub k: usize,
    /// Whether either operand is stored transposed.
    pub trans: [bool; 2],
}

/// Sizes of result tiles, and the fraction of a multiprocessor's rate that work in such tiles reaches:
/// smaller ones read their operands more often.
const TILES: &[(usize, usize, f64)] = &[
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
];

/// Contracted elements that filling and draining the pipeline of a tile costs.
const PIPELINE_DEPTH: f64 = 128.0;

/// Into how many parts the contracted size may be split where tiles are few.
const SPLITS: &[usize] = &[1, 2, 4, 8];

/// So many times as many terms as rows and columns make a processor share out the terms among threads.
const DEEP: usize = 8;

/// Attention's backward pass has five matmuls for the forward's two, and less reuse of its tiles.
const ATTENTION_BACKWARD: f64 = 0.75;

/// Fraction of the rate of a GEMM that convolutions reach, if not measured: they move windows through tensor cores.
pub(super) const CONVOLUTION: f64 = 0.75;

/// The part of the arithmetic of a convolution that remains of it, with the transforms, on a processor that computes it in tiles
/// (F(2 × 2, 3 × 3) of Winograd has 16 multiplications for 36), as measured on the CPU.
const IN_TILES: f64 = 0.6;

/// Least channels and filters of such a convolution, and its taps along both axes.
const TILE_CHANNELS: usize = 16;
const TILE_TAPS: [usize; 2] = [3; 2];

impl GemmShape {
    /// The matmuls of a `matmul` node with operands of these types.
    pub fn of(op: &MatMul, a: &TensorType, b: &TensorType) -> GemmShape {
        let d = op.dims(a, b);
        let (dtype, out) = (a.dtype, op.out.unwrap_or(a.dtype));
        let trans = [op.trans_a, op.trans_b];
        GemmShape { dtype, out, batch: d.batch, m: d.m, n: d.n, k: d.k, trans }
    }

    /// Floating-point operations; a multiply-add counts two.
    pub fn flops(&self) -> u64 {
        2 * (self.batch * self.m * self.n * self.k) as u64
    }

    /// Bytes read and written.
    pub fn bytes(&self) -> u64 {
        let operands = self.m * self.k + self.k * self.n;
        (self.batch * (operands * self.dtype.size() + self.m * self.n * self.out.size())) as u64
    }

    /// Elements of the shorter side of the right operand, by which sides a processor packs; of sums over many terms, of the result. Few rows
    /// of a wide operand are bound by packing that one.
    fn width(&self) -> usize {
        if self.k > DEEP * self.m.max(self.n) { self.m.min(self.n) } else { self.n.min(self.k) }
    }

    /// Bytes of the right operands in the panels in which processors read them: pairs of 16-bit numbers, or f32.
    fn packed_bytes(&self) -> u64 {
        (self.batch * self.k * self.n * self.dtype.size()) as u64
    }

    /// Bytes of one row, as it is stored, of either operand and of the result.
    pub fn rows(&self) -> [usize; 3] {
        let a = if self.trans[0] { self.m } else { self.k };
        let b = if self.trans[1] { self.k } else { self.n };
        [a * self.dtype.size(), b * self.dtype.size(), self.n * self.out.size()]
    }

    /// The fraction of the rate of aligned GEMMs that tensor cores reach.
    ///
    /// Rows of whole 128-byte lines are the best, 16 bytes the least for the widest loads. Source: NVIDIA,
    /// "Deep Learning Performance: Matrix Multiplication" (alignment of 16 bytes, 128 on A100); with odd
    /// rows a third, as measured for the head of GPT-2 by "Accelerating Large Language Models with
    /// Accelerated Transformers" (PyTorch, 2023), where padding 50257 made it three times as fast. What
    /// lies between is interpolated.
    pub fn alignment_efficiency(&self) -> f64 {
        let of_row = |bytes: usize| match bytes.trailing_zeros() {
            7.. => 1.0,
            4..7 => 0.9,
            3 => 0.65,
            2 => 0.5,
            _ => 1.0 / 3.0,
        };
        self.rows().into_iter().map(of_row).fold(1.0, f64::min)
    }
}

impl Device {
    /// Seconds of the arithmetic of a matmul, without launch and memory.
    ///
    /// On a GPU result tiles are spread over multiprocessors in whole waves; a tile fills its pipeline once; rows
    /// off 16-byte alignment are loaded in smaller pieces. A processor packs the right operand.
    /// Source: NVIDIA, "Deep Learning Performance: Matrix Multiplication" (tile and wave quantization).
    pub fn gemm_seconds(&self, p: &GemmShape) -> f64 {
        let rate = self.peak_flops(p.dtype) * self.matmul_efficiency;
        if p.flops() == 0 {
            return 0.0;
        }
        if !self.has_matrix_units() {
            let narrow = self.narrow.as_ref().map(|narrow| match p.dtype.is_low_precision() {
                true => &narrow.half,
                false => &narrow.single,
            });
            let rate = rate * narrow.map_or(1.0, |curve| curve.at(p.width()));
            // The right operand is packed anew: read, and written to caches. With few rows that takes as long as the arithmetic.
            return p.flops() as f64 / rate
                + 2.0 * p.packed_bytes() as f64 / self.bytes_per_second();
        }
        let aligned = if p.dtype.is_low_precision() { p.alignment_efficiency() } else { 1.0 };
        let rate = rate * aligned;
        let per_processor = rate / self.multiprocessors as f64;
        let candidate = |&(rows, columns, efficiency): &(usize, usize, f64), split: usize| {
            let tiles = p.batch * p.m.div_ceil(rows) * p.n.div_ceil(columns) * split;
            let waves = tiles.div_ceil(self.multiprocessors) as f64;
            let depth = (p.k as f64 / split as f64).ceil() + PIPELINE_DEPTH;
            waves * 2.0 * rows as f64 * columns as f64 * depth / (per_processor * efficiency)
        };
        let all = TILES.iter().flat_map(|tile| SPLITS.iter().map(move |s| candidate(tile, *s)));
        all.fold(f64::INFINITY, f64::min)
    }

    /// Seconds of a kernel that computes a batch of matmuls.
    pub fn matmul_seconds(&self, p: &GemmShape) -> f64 {
        let traffic = p.bytes() as f64 / self.bytes_per_second();
        1e-6 * self.launch_us + self.gemm_seconds(p).max(traffic)
    }

    /// Seconds of a kernel with this body that reads and writes this many bytes.
    pub fn kernel_seconds(&self, body: &Graph, bytes: u64) -> f64 {
        self.body_seconds(body, bytes as f64, false) + self.rounding_seconds(body)
    }

    /// The same without the rounding of operands, with `wide` as if all of them were f32.
    pub(super) fn body_seconds(&self, body: &Graph, bytes: f64, wide: bool) -> f64 {
        let arithmetic: f64 =
            body.nodes().map(|(_, n)| self.arithmetic_seconds(body, n, wide)).sum();
        let is_processor = !self.has_matrix_units();
        let bytes = match is_processor {
            true => processor::traffic(body, bytes),
            false => bytes + read_again(body) as f64,
        };
        let traffic = bytes / self.bytes_per_second();
        let kernel = match is_processor && processor::is_in_phases(body) {
            true => arithmetic + traffic,
            false => arithmetic.max(traffic),
        };
        1e-6 * self.launch_us + kernel
    }

    /// Seconds in which a GEMM kernel quantizes its operands to 8-bit floats: for each, a launch for its amax, if
    /// needed, and one that reads it and writes the codes.
    fn rounding_seconds(&self, body: &Graph) -> f64 {
        if !body.nodes().any(|(_, n)| matches!(n.op, Op::MatMul(_))) {
            return 0.0;
        }
        let operands = body.nodes().filter(|(_, n)| matches!(n.op, Op::Quantize(_)));
        let seconds = operands.map(|(_, n)| {
            let ty = body.ty(n.inputs[0]);
            let bytes = ty.bytes() + ty.shape.numel();
            2e-6 * self.launch_us + bytes as f64 / self.bytes_per_second()
        });
        seconds.sum()
    }

    /// Seconds that the arithmetic of one node takes, with `wide` as if all its operands were f32.
    pub(crate) fn arithmetic_seconds(&self, graph: &Graph, node: &Node, wide: bool) -> f64 {
        let dtype = |i: usize| if wide { DType::F32 } else { graph.ty(node.inputs[i]).dtype };
        let rate = |i: usize, efficiency: f64| self.peak_flops(dtype(i)) * efficiency;
        let flops = node_flops(graph, node) as f64;
        match &node.op {
            Op::MatMul(op) => {
                let [a, b] = [0, 1].map(|i| graph.ty(node.inputs[i]));
                let dtype = rounded(graph, node.inputs[0]).filter(|_| !wide).unwrap_or(dtype(0));
                self.gemm_seconds(&GemmShape { dtype, ..GemmShape::of(op, a, b) })
            }
            Op::Conv(Conv { window, groups, .. })
            | Op::ConvGradInput(ConvGradInput { window, groups, .. })
            | Op::ConvGradWeight(ConvGradWeight { window, groups, .. }) => {
                // The kernel, or its gradient.
                let w = match &node.op {
                    Op::ConvGradWeight(_) => graph.ty(node.outputs[0]),
                    _ => graph.ty(node.inputs[1]),
                };
                let is_in_tiles = !self.has_matrix_units()
                    && dtype(0) == DType::F32
                    && is_in_tiles(window, *groups, w.shape.dims());
                if let Some(measured) = &self.convolutions {
                    let kind = match dtype(0).is_low_precision() {
                        true if lies_channels_last(graph, node) => measured.channels_last(),
                        true => &measured.half_tflops,
                        false if is_in_tiles => &measured.tiles_tflops,
                        false => &measured.single_tflops,
                    };
                    return flops / (1e12 * measured.tflops(kind, w.shape.dims(), *groups, window));
                }
                let part = if is_in_tiles { IN_TILES } else { 1.0 };
                part * flops / rate(0, self.matmul_efficiency * CONVOLUTION)
            }
            Op::Attention(_) => flops * self.attention_seconds(dtype(0)),
            Op::AttentionGrad(_) => flops * self.attention_seconds(dtype(1)) / ATTENTION_BACKWARD,
            _ => {
                let more = match self.has_matrix_units() {
                    true => 0.0,
                    false => processor::vector_operations(graph, node),
                };
                (flops + more) / (1e12 * self.vector_tflops)
            }
        }
    }

    /// Seconds of an operation of attention, forward. On a processor the softmax between the matmuls takes as long whatever the type of these.
    fn attention_seconds(&self, dtype: DType) -> f64 {
        let at = |dtype: DType, efficiency: f64| 1.0 / (self.peak_flops(dtype) * efficiency);
        if self.has_matrix_units() {
            return at(dtype, self.attention_efficiency);
        }
        let (single, matmuls) = (DType::F32, self.matmul_efficiency);
        let softmax = at(single, self.attention_efficiency) - at(single, matmuls);
        at(dtype, matmuls) + softmax.max(0.0)
    }

    /// Seconds of a copy, a fill, or any kernel without arithmetic to speak of.
    pub fn copy_seconds(&self, bytes: u64) -> f64 {
        1e-6 * self.launch_us + bytes as f64 / self.bytes_per_second()
    }
}

impl Convolutions {
    fn channels_last(&self) -> &Curve {
        self.channels_last_tflops.as_ref().unwrap_or(&self.half_tflops)
    }

    /// The rate of one of this kind with a kernel of these sizes, in 10¹² operations per second.
    fn tflops(&self, dense: &Curve, kernel: &[usize], groups: usize, window: &Window) -> f64 {
        let (filters, elements) = (kernel[0] / groups.max(1), kernel[1..].iter().product());
        let is_strided = window.strides.iter().any(|stride| *stride > 1);
        let rate = match &self.depthwise_tflops {
            Some(depthwise) if kernel[1] == 1 && groups > 1 => depthwise.at(elements),
            _ => dense.at(filters.min(elements)),
        };
        rate * if is_strided { self.strided } else { 1.0 }
    }
}

/// Bytes that the kernels of batch normalizations on a GPU move besides operands and results: images are read once for their
/// sums and once to be normalized, and what passes a ReLU backward is in memory between the two.
fn read_again(body: &Graph) -> usize {
    let of_node = body.nodes().map(|(_, node)| match &node.op {
        Op::BatchNorm(_) => body.ty(node.inputs[0]).bytes(),
        Op::BatchNormGrad(_) => 2 * body.ty(node.inputs[0]).bytes(),
        Op::Binary(BinaryFn::ReluGrad) => {
            let passed = node.outputs[0];
            let is_result = body.outputs.iter().any(|o| o.value == passed);
            let has_norm = body.nodes().any(|(_, n)| matches!(n.op, Op::BatchNormGrad(_)));
            if has_norm && !is_result { body.ty(passed).bytes() } else { 0 }
        }
        _ => 0,
    });
    of_node.sum()
}

/// Whether the images of a convolution, or its responses, are transposed so that their channels lie last.
fn lies_channels_last(graph: &Graph, node: &Node) -> bool {
    let before = node.inputs.iter().map(|v| &graph.def(*v).op);
    let mut behind = graph.nodes().filter(|(_, n)| n.inputs.contains(&node.outputs[0]));
    before.into_iter().any(|op| matches!(op, Op::Transpose(op) if op.puts_channels_first()))
        || behind.any(|(_, n)| matches!(&n.op, Op::Transpose(op) if op.puts_channels_last()))
}

/// Whether processors compute a convolution of f32 numbers by kernels of these sizes in tiles.
fn is_in_tiles(window: &Window, groups: usize, kernel: &[usize]) -> bool {
    let plain = Window { low: window.low.clone(), high: window.high.clone(), ..Window::plain(2) };
    kernel.len() == 4
        && kernel[2..] == TILE_TAPS
        && *window == plain
        && (kernel[0] / groups.max(1)).min(kernel[1]) >= TILE_CHANNELS
}

/// The 8-bit float to which a matmul's operand is quantized, if its kernel does that itself.
fn rounded(graph: &Graph, mut v: frit_ir::ValueId) -> Option<DType> {
    while let Op::Reshape(_) = graph.def(v).op {
        v = graph.def(v).inputs[0];
    }
    if let Op::Quantize(op) = &graph.def(v).op { Some(op.to) } else { None }
}

/// Floating-point operations of a node.
pub fn node_flops(graph: &Graph, node: &Node) -> u64 {
    let types = |ids: &[frit_ir::ValueId]| ids.iter().map(|v| graph.ty(*v)).collect::<Vec<_>>();
    node.op.flops(&types(&node.inputs), &types(&node.outputs))
}

/// Bytes that a node moves when its operands and results are in memory: of tables that it looks up in,
/// only the rows that it reads.
pub fn moved_bytes(graph: &Graph, node: &Node) -> u64 {
    let bytes = |values: &[frit_ir::ValueId]| -> u64 {
        values.iter().map(|v| graph.ty(*v).bytes() as u64).sum()
    };
    match &node.op {
        Op::Embedding(_) | Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) => {
            2 * bytes(&node.outputs) + bytes(&node.inputs[1..])
        }
        Op::Slice(_) | Op::Split(_) => 2 * bytes(&node.outputs),
        Op::Adafactor(op) => {
            let types: Vec<&TensorType> = node.inputs.iter().map(|v| graph.ty(*v)).collect();
            op.moved_bytes(&types)
        }
        _ => bytes(&node.inputs) + bytes(&node.outputs),
    }
}

/// Bytes that a kernel moves for operands and results of `operands` bytes in total.
pub fn body_bytes(body: &Graph, operands: u64) -> u64 {
    let mut inner = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
    match (inner.next(), inner.next()) {
        (Some(only), None) => moved_bytes(body, only),
        _ => operands,
    }
}

/// Whether tensor cores do most of the node's arithmetic.
pub fn is_matrix(op: &Op) -> bool {
    matches!(
        op,
        Op::MatMul(_)
            | Op::Conv(_)
            | Op::ConvGradInput(_)
            | Op::ConvGradWeight(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_)
    )
}
