//! The cost model: every task takes the longer of its arithmetic and its memory traffic.
//!
//! Durations are predictions for reports and for choices between equal results; nothing is proved from
//! them. A device is a handful of sustained rates ([`Rates`]); what a product reaches of them depends on
//! its dtype and, where matrix units load whole rows, on the alignment of its rows ([`Product`]).

use frit_ir::ops::MatMul;
use frit_ir::plan::{Action, Place, Plan, Target, Task};
use frit_ir::{DType, Graph, Node, Op, TensorType};

/// What a device can do, per rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Sustained floating-point operations per second of products of 32-bit operands, and of everything
    /// that is no product.
    pub f32_flops: f64,
    /// The same of products of 16-bit operands with aligned rows.
    pub low_flops: f64,
    /// Sustained bytes per second of memory.
    pub memory: f64,
    /// Sustained bytes per second between ranks.
    pub wire: f64,
    /// Seconds that starting a task takes.
    pub launch: f64,
    /// Whether products of 16-bit operands run on matrix units that read whole aligned rows. Kernels of
    /// the CPU pack their operands first: alignment makes no difference there.
    pub matrix_units: bool,
}

/// Rates of a target.
///
/// The CPU's are those of one core as measured by `gemm_bench` (AVX-512, with and without its bf16
/// instructions; half of it for AVX2). The GPUs' are vendor peaks times the efficiency that large
/// products reach.
pub fn rates(target: &Target) -> Rates {
    let gpu = |f32_flops, low_flops, memory, wire| Rates {
        f32_flops,
        low_flops,
        memory,
        wire,
        launch: 3e-6,
        matrix_units: true,
    };
    match target.arch.as_str() {
        "sm_70" | "sm_75" => gpu(14e12, 80e12, 0.75e12, 130e9),
        "sm_80" => gpu(18e12, 200e12, 1.6e12, 230e9),
        arch if arch.starts_with("sm_") => gpu(50e12, 600e12, 3e12, 360e9),
        _ => {
            let has = |feature: &str| target.features.split(',').any(|f| f == feature);
            let f32_flops = if has("+avx512f") { 230e9 } else { 115e9 };
            let low_flops = if has("+avx512bf16") { 420e9 } else { f32_flops };
            let (memory, wire) = (25e9, 10e9);
            Rates { f32_flops, low_flops, memory, wire, launch: 1e-6, matrix_units: false }
        }
    }
}

/// A batch of matrix products `[m, k] × [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Element type of both operands.
    pub dtype: DType,
    /// Element type of the result.
    pub out: DType,
    /// Number of products.
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

impl Product {
    /// The products of a `matmul` node with operands of these types.
    pub fn of(op: &MatMul, a: &TensorType, b: &TensorType) -> Product {
        let d = op.dims(a, b);
        let (dtype, out) = (a.dtype, op.out.unwrap_or(a.dtype));
        let trans = [op.trans_a, op.trans_b];
        Product { dtype, out, batch: d.batch, m: d.m, n: d.n, k: d.k, trans }
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

    /// Bytes of one row, as it is stored, of either operand and of the result.
    pub fn rows(&self) -> [usize; 3] {
        let a = if self.trans[0] { self.m } else { self.k };
        let b = if self.trans[1] { self.k } else { self.n };
        [a * self.dtype.size(), b * self.dtype.size(), self.n * self.out.size()]
    }

    /// The part of the rate of aligned products that matrix units reach.
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

impl Rates {
    /// Microseconds of moving this many bytes through memory.
    pub fn copy_us(&self, bytes: u64) -> f64 {
        1e6 * (self.launch + bytes as f64 / self.memory)
    }

    /// Microseconds of a collective that sends this many bytes per rank.
    pub fn wire_us(&self, bytes: u64) -> f64 {
        1e6 * (self.launch + bytes as f64 / self.wire)
    }

    /// Microseconds of a batch of products.
    pub fn product_us(&self, product: &Product) -> f64 {
        let traffic = product.bytes() as f64 / self.memory;
        1e6 * (self.launch + self.product_seconds(product).max(traffic))
    }

    /// Microseconds of a kernel with this body that reads and writes this many bytes.
    pub fn kernel_us(&self, body: &Graph, bytes: u64) -> f64 {
        let seconds: f64 = body.nodes().map(|(_, node)| self.node_seconds(body, node, false)).sum();
        1e6 * (self.launch + seconds.max(bytes as f64 / self.memory))
    }

    /// Microseconds of a step of this plan whose tasks run one after the other.
    pub fn step_us(&self, plan: &Plan) -> f64 {
        self.step(plan, false)
    }

    /// The same if every tensor in low precision were f32: kernels that only cast fall away, products run
    /// at the rate of f32, and what is moved or sent in low precision takes twice the bytes.
    pub fn step_us_in_f32(&self, plan: &Plan) -> f64 {
        self.step(plan, true)
    }

    fn step(&self, plan: &Plan, wide: bool) -> f64 {
        let bytes = |p: &Place| {
            let low = wide && p.ty.dtype.is_low_precision();
            (if low { 4 * p.ty.shape.numel() } else { p.ty.bytes() }) as u64
        };
        let task = |task: &Task| {
            let Action::Kernel { kernel, reads, writes } = &task.action else {
                let own: u64 = task.action.writes().iter().map(|p| p.ty.bytes() as u64).sum();
                let moved: u64 = task.action.writes().into_iter().map(bytes).sum();
                return task.cost_us * moved as f64 / own.max(1) as f64;
            };
            let body = &plan.kernels[*kernel].body;
            let mut inner = body.nodes().map(|(_, n)| n).filter(|n| !n.op.is_leaf());
            if wide && inner.all(|n| matches!(n.op, Op::Cast(_))) {
                return 0.0;
            }
            let seconds: f64 = body.nodes().map(|(_, n)| self.node_seconds(body, n, wide)).sum();
            let traffic: u64 = reads.iter().chain(writes).map(bytes).sum();
            1e6 * (self.launch + seconds.max(traffic as f64 / self.memory))
        };
        plan.tasks.iter().enumerate().map(|(i, t)| plan.runs(i) as f64 * task(t)).sum()
    }

    fn product_seconds(&self, product: &Product) -> f64 {
        let efficiency = if self.matrix_units && product.dtype.is_low_precision() {
            product.alignment_efficiency()
        } else {
            1.0
        };
        product.flops() as f64 / (self.flops_of(product.dtype) * efficiency)
    }

    /// The rate of products of such operands.
    fn flops_of(&self, dtype: DType) -> f64 {
        if dtype.is_low_precision() { self.low_flops } else { self.f32_flops }
    }

    /// Seconds of a node's arithmetic, `wide` as if all its operands were f32.
    fn node_seconds(&self, body: &Graph, node: &Node, wide: bool) -> f64 {
        let dtype = |v: frit_ir::ValueId| if wide { DType::F32 } else { body.ty(v).dtype };
        match &node.op {
            Op::MatMul(op) => {
                let [a, b] = [0, 1].map(|i| body.ty(node.inputs[i]));
                let product = Product { dtype: dtype(node.inputs[0]), ..Product::of(op, a, b) };
                self.product_seconds(&product)
            }
            Op::Conv(_)
            | Op::ConvGradInput(_)
            | Op::ConvGradWeight(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_) => {
                node_flops(body, node) as f64 / self.flops_of(dtype(node.inputs[0]))
            }
            _ => node_flops(body, node) as f64 / self.f32_flops,
        }
    }
}

/// Floating-point operations of a node.
pub fn node_flops(graph: &Graph, node: &Node) -> u64 {
    let types = |ids: &[frit_ir::ValueId]| ids.iter().map(|v| graph.ty(*v)).collect::<Vec<_>>();
    node.op.flops(&types(&node.inputs), &types(&node.outputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(arch: &str) -> Target {
        Target { device: "cuda".into(), arch: arch.into(), features: String::new() }
    }

    fn product(m: usize, n: usize, k: usize) -> Product {
        let dtype = DType::BF16;
        Product { dtype, out: dtype, batch: 1, m, n, k, trans: [false, false] }
    }

    #[test]
    fn rows_decide_the_efficiency() {
        let efficiency = |n: usize, k: usize| product(512, n, k).alignment_efficiency();
        assert_eq!(efficiency(768, 768), 1.0);
        assert_eq!(efficiency(50264, 768), 0.9);
        assert_eq!(efficiency(50257, 768), 1.0 / 3.0);
        assert_eq!(efficiency(768, 254), 0.5);
        // Rows of a transposed operand run along its other axis.
        let transposed = Product { trans: [true, false], ..product(64, 128, 7) };
        assert_eq!(transposed.alignment_efficiency(), 1.0);
    }

    #[test]
    fn packed_operands_need_no_alignment() {
        let cpu = rates(&target("znver5"));
        let seconds = |p: Product| cpu.product_us(&p);
        assert!(seconds(product(512, 50257, 768)) < seconds(product(512, 50304, 768)));
        let gpu = rates(&target("sm_90"));
        assert!(
            gpu.product_us(&product(8192, 50257, 768)) > gpu.product_us(&product(8192, 50304, 768))
        );
    }

    #[test]
    fn low_precision_is_faster() {
        for arch in ["znver5", "sm_75", "sm_80", "sm_90"] {
            let features = "+avx512f,+avx512bf16".into();
            let rates = rates(&Target { features, ..target(arch) });
            let low = product(4096, 4096, 4096);
            let wide = Product { dtype: DType::F32, out: DType::F32, ..low };
            assert!(rates.product_us(&low) < 0.6 * rates.product_us(&wide), "{arch}");
        }
    }
}
