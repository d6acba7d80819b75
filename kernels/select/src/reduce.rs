//! Selection for reductions and running sums.

use crate::assembler::Assembler;
use crate::routine::elem;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::ops::reproducible::DIGITS;
use frit_ir::ops::{CumSum, GradStats, Reduce, ReduceFn};
use frit_ir::plan::{Argument, Pointer};
use frit_ir::{DType, Node, Op, TensorType, ValueId};
use frit_kernels::routine::Routine;
use frit_kernels::routine::cum_sum::SumElem;
use frit_kernels::routine::reduce_axes::{Fold, ReduceAxes};

/// Threads per block of `reduce`, and results per block where results are contiguous.
const BLOCK: usize = 256;
const LINE: usize = 32;
/// Minimum elements per block.
const CHUNK: usize = 2048;
/// Blocks that occupy the GPU.
const BUSY: usize = 256;

/// How gradient statistics are computed: by blocks, each of a part of one operand, and by one that adds their results.
struct Stats {
    file: &'static str,
    entries: [&'static str; 2],
    /// Minimum elements per block.
    chunk: usize,
    /// Bytes of the result of a block.
    bytes: usize,
}

/// Squares are added in f64: two of them are the result of a block.
const STATS: Stats = Stats {
    file: "grad_stats",
    entries: ["stats_parts", "stats_total"],
    chunk: 1 << 14,
    bytes: 16,
};
/// The result of a block is a u64 for every digit, and a count.
const EXACT_STATS: Stats = Stats {
    file: "exact_stats",
    entries: ["exact_parts", "exact_total"],
    chunk: 1 << 16,
    bytes: (DIGITS + 1) * 8,
};
/// Maximum blocks per operand.
const STATS_BLOCKS: usize = 1024;
/// Operands of one launch, at most: 24 bytes each of the 4 KiB of a kernel's parameters.
const STATS_ARRAYS: usize = 128;

/// Counts the non-finite elements of all operands, and sums the squares.
fn grad_stats(a: &mut Assembler<'_>, node: &Node, stats: &Stats) -> Option<()> {
    let mut operands: Vec<(Pointer, DType, usize)> = Vec::new();
    for value in &node.inputs {
        let (at, ty) = (a.read(*value)?, a.ty(*value));
        operands.push((at, ty.dtype, ty.shape.numel()));
    }
    operands.retain(|(.., n)| *n > 0);
    let to = a.write(node.outputs[0]);
    let blocks = |n: usize| n.div_ceil(stats.chunk).min(STATS_BLOCKS);
    let all: usize = operands.iter().map(|(.., n)| blocks(*n)).sum();
    let parts = a.scratch(all * stats.bytes);
    let kernel = |entry, dtype, arrays: usize| -> Option<SourceKernel> {
        let kernel = SourceKernel::new(stats.file, entry).define("T", c_type(dtype)?);
        Some(kernel.define("ARRAYS", arrays))
    };
    let alike = operands.chunk_by(|(_, a, _), (_, b, _)| a == b);
    let mut first = 0;
    for arrays in alike.flat_map(|alike| alike.chunks(STATS_ARRAYS)) {
        let ends = arrays.iter().scan(0, |end, (.., n)| {
            *end += blocks(*n);
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let grid = ends[ends.len() - 1];
        let words = arrays.iter().map(|(.., n)| *n).chain(ends).map(|word| word as i64);
        let mut launch = kernel(stats.entries[0], arrays[0].1, arrays.len())?
            .grid(grid)?
            .pointer(parts.offset(first * stats.bytes));
        launch.arguments.push(Argument::Pointers(arrays.iter().map(|(at, ..)| *at).collect()));
        launch.arguments.push(Argument::Words(words.collect()));
        a.run(launch);
        first += grid;
    }
    let dtype = a.ty(node.inputs[0]).dtype;
    a.run(kernel(stats.entries[1], dtype, 1)?.pointer(to).pointer(parts).i64(all));
    Some(())
}

/// Rounds the exact sum of squares in statistics.
fn round_stats(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (from, to) = (a.read(node.inputs[0])?, a.write(node.outputs[0]));
    a.run(SourceKernel::new("round_stats", "round_stats").pointer(to).pointer(from));
    Some(())
}

/// Adds an operand to a sum in a binary tree.
fn tree_sum(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let from = node.inputs.iter().map(|v| a.read(*v)).collect::<Option<Vec<Pointer>>>()?;
    let to: Vec<Pointer> = node.outputs.iter().map(|v| a.write(*v)).collect();
    let n = a.ty(node.outputs[0]).shape.numel();
    let mut kernel = SourceKernel::new("tree_sum", "tree_sum")
        .define("LEVELS", to.len())
        .threads(n)
        .pointers([from[0], from[1]]);
    kernel.arguments.extend([from[2..].to_vec(), to].map(Argument::Pointers));
    a.run(kernel.i64(n));
    Some(())
}

/// A reduction of a dense operand.
#[derive(Clone)]
pub(super) struct Reduction {
    pub(super) f: ReduceFn,
    /// Sizes and strides of the axes that are kept.
    kept: Vec<(usize, isize)>,
    /// Those of the reduced axes.
    gone: Vec<(usize, isize)>,
}

impl Reduction {
    /// The reduction of an operand of this shape over the axes for which `gone` holds.
    pub(super) fn new(f: ReduceFn, dims: &[usize], gone: impl Fn(usize) -> bool) -> Reduction {
        let mut axes = [Vec::<(usize, isize)>::new(), Vec::new()];
        let mut stride = 1;
        for (i, &size) in dims.iter().enumerate().rev() {
            if size != 1 {
                let list = &mut axes[usize::from(gone(i))];
                match list.last_mut() {
                    // Contiguous neighboring axes are merged.
                    Some((inner, step)) if *inner as isize * *step == stride => *inner *= size,
                    _ => list.push((size, stride)),
                }
            }
            stride *= size as isize;
        }
        let [kept, gone] = axes.map(|list| list.into_iter().rev().collect());
        Reduction { f, kept, gone }
    }

    fn results(&self) -> usize {
        self.kept.iter().map(|(size, _)| size).product()
    }

    fn count(&self) -> usize {
        self.gone.iter().map(|(size, _)| size).product()
    }

    /// Reduces `from` to `to`; several blocks share a long sum.
    pub(super) fn assemble(
        &self,
        a: &mut Assembler<'_>,
        (to, to_type): (Pointer, DType),
        (from, from_type): (Pointer, DType),
    ) -> Option<()> {
        let (results, count) = (self.results(), self.count());
        if results == 0 {
            return Some(());
        }
        if count == 0 && self.f == ReduceFn::Mean && !from_type.is_float() {
            return None;
        }
        let share = count.next_power_of_two();
        let lies_together = self.kept.last().is_some_and(|(_, stride)| *stride == 1);
        let share = share.min(if lies_together { BLOCK / LINE } else { BLOCK });
        let blocks = results.div_ceil(BLOCK / share);
        let parts = (count / CHUNK).min(BUSY / blocks);
        if parts < 2 {
            let launch = self.launch((to, to_type), (from, from_type), share, 1, count)?;
            a.run(launch);
            return Some(());
        }
        let wide = match from_type {
            DType::F64 => DType::F64,
            float if float.is_float() => DType::F32,
            _ => DType::I64,
        };
        let scratch = a.scratch(parts * results * wide.size());
        let f = if self.f == ReduceFn::Mean { ReduceFn::Sum } else { self.f };
        let first = Reduction { f, ..self.clone() };
        a.run(first.launch((scratch, wide), (from, from_type), share, parts, 1)?);
        let (kept, gone) = (vec![(results, 1)], vec![(parts, results as isize)]);
        let second = Reduction { f: self.f, kept, gone };
        a.run(second.launch((to, to_type), (scratch, wide), 1, 1, count)?);
        Some(())
    }

    /// One launch in which `share` threads of a block, and `parts` blocks, share a result.
    fn launch(
        &self,
        (to, to_type): (Pointer, DType),
        (from, from_type): (Pointer, DType),
        share: usize,
        parts: usize,
        divisor: usize,
    ) -> Option<SourceKernel> {
        let name = match self.f {
            ReduceFn::Sum => "SUM",
            ReduceFn::Mean => "MEAN",
            ReduceFn::Prod => "PROD",
            ReduceFn::Max => "MAX",
            ReduceFn::Min => "MIN",
        };
        let mut kernel = SourceKernel::new("reduce", "reduce")
            .define("FROM", c_type(from_type)?)
            .define("TO", c_type(to_type)?)
            .define("FOLD", name)
            .define("X", BLOCK / share)
            .blocks(self.results().div_ceil(BLOCK / share))
            .pointer(to)
            .pointer(from)
            .axes(&self.kept)?
            .axes(&self.gone)?
            .i64(self.results())
            .i64(self.count())
            .i64(divisor);
        kernel.grid[1] = parts as u32;
        kernel.arguments.push(Argument::I64(neutral(self.f, from_type)));
        Some(kernel)
    }
}

/// The result of an empty reduction, as the bits of an f64, or as an integer for integers.
fn neutral(f: ReduceFn, dtype: DType) -> i64 {
    let (least, most) = match dtype {
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        DType::U8 => (0, i64::from(u8::MAX)),
        _ => (i64::MIN, i64::MAX),
    };
    let (real, integer) = match f {
        ReduceFn::Sum | ReduceFn::Mean => (0.0, 0),
        ReduceFn::Prod => (1.0, 1),
        ReduceFn::Max => (f64::NEG_INFINITY, least),
        ReduceFn::Min => (f64::INFINITY, most),
    };
    if dtype.is_float() { f64::to_bits(real) as i64 } else { integer }
}

pub(super) fn cuda(a: &mut Assembler<'_>, node: &Node) -> Option<()> {
    let (x, y) = (a.ty(node.inputs[0]), a.ty(node.outputs[0]));
    let dims = x.shape.dims();
    let reduction = match &node.op {
        Op::Reduce(Reduce { f, axes, .. }) => Reduction::new(*f, dims, |i| axes.contains(&i)),
        Op::SumTo(op) => {
            let axes = op.axes(&x.shape);
            Reduction::new(ReduceFn::Sum, dims, |i| axes.contains(&i))
        }
        Op::CumSum(op) => return running(a, node, op),
        Op::GradStats(GradStats { exact: false }) => return grad_stats(a, node, &STATS),
        Op::GradStats(GradStats { exact: true }) => {
            let exact =
                |v: &ValueId| [DType::F32, DType::F16, DType::BF16].contains(&a.ty(*v).dtype);
            return node.inputs.iter().all(exact).then(|| grad_stats(a, node, &EXACT_STATS))?;
        }
        Op::RoundStats => return round_stats(a, node),
        Op::TreeSum => return tree_sum(a, node),
        _ => return None,
    };
    let (from, to) = (a.read(node.inputs[0])?, a.write(node.outputs[0]));
    reduction.assemble(a, (to, y.dtype), (from, x.dtype))
}

/// Running sums, with a warp per line.
fn running(a: &mut Assembler<'_>, node: &Node, op: &CumSum) -> Option<()> {
    let x = a.ty(node.inputs[0]);
    let dims = x.shape.dims();
    let outer: usize = dims[..op.axis].iter().product();
    let inner: usize = dims[op.axis + 1..].iter().product();
    let (from, to) = (a.read(node.inputs[0])?, a.write(node.outputs[0]));
    let kernel = SourceKernel::new("cum_sum", "cum_sum")
        .define("T", c_type(x.dtype)?)
        .define("EXCLUSIVE", u8::from(op.exclusive))
        .define("REVERSE", u8::from(op.reverse))
        .threads(outer * inner * 32)
        .pointer(to)
        .pointer(from)
        .i64(outer)
        .i64(dims[op.axis])
        .i64(inner);
    if x.shape.numel() > 0 {
        a.run(kernel);
    }
    Some(())
}

pub(super) fn cpu(op: &Op, ins: &[&TensorType], outs: &[&TensorType]) -> Option<Routine> {
    let (x, out) = (*ins.first()?, *outs.first()?);
    let rank = x.shape.rank();
    let (fold, gone): (Fold, Vec<bool>) = match op {
        Op::Reduce(Reduce { f, axes, .. }) => {
            let fold = match f {
                ReduceFn::Sum => Fold::Sum,
                ReduceFn::Mean => Fold::Mean,
                ReduceFn::Prod => Fold::Prod,
                ReduceFn::Max => Fold::Max,
                ReduceFn::Min => Fold::Min,
            };
            (fold, (0..rank).map(|axis| axes.contains(&axis)).collect())
        }
        Op::SumTo(_) => {
            let missing = rank - out.shape.rank();
            let gone = |axis: usize| axis < missing || out.shape.0[axis - missing] == 1;
            (Fold::Sum, (0..rank).map(gone).collect())
        }
        Op::CumSum(op) => return cpu_running(op, x),
        Op::GradStats(op) => {
            let routine = if op.exact { Routine::ExactStats } else { Routine::GradStats };
            return ins.iter().all(|t| t.dtype == DType::F32).then_some(routine);
        }
        Op::RoundStats => return Some(Routine::RoundStats),
        Op::TreeSum => return Some(Routine::TreeSum),
        _ => return None,
    };
    let (from, to) = (elem(x.dtype)?, elem(out.dtype)?);
    Some(Routine::Reduce(ReduceAxes::new(fold, x.shape.dims(), &gone, from, to)))
}

fn cpu_running(op: &CumSum, x: &TensorType) -> Option<Routine> {
    let dims = x.shape.dims();
    let elem = match x.dtype {
        DType::I32 => SumElem::I32,
        DType::I64 => SumElem::I64,
        other => SumElem::Float(elem(other)?),
    };
    Some(Routine::CumSum(frit_kernels::routine::cum_sum::CumSum {
        outer: dims[..op.axis].iter().product(),
        size: dims[op.axis],
        inner: dims[op.axis + 1..].iter().product(),
        exclusive: op.exclusive,
        reverse: op.reverse,
        elem,
    }))
}
