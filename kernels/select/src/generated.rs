//! Builder for a generated kernel that a candidate launches: elementwise work on matrices, or the sums of their columns.

use crate::assembler::Assembler;
use frit_ir::ops::{BinaryFn, Cast, FusionKind, Input, SumTo, UnaryFn};
use frit_ir::plan::{GeneratedLaunch, KernelId, Launch, Pointer};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, TensorType, ValueId};

/// A body under construction, and where its operands and results are. A result may be in the place of an operand of its
/// shape.
pub(super) struct Generated {
    body: Graph,
    reads: Vec<Pointer>,
    writes: Vec<Pointer>,
}

impl Generated {
    pub(super) fn new() -> Generated {
        Generated { body: Graph::new("kernel"), reads: Vec::new(), writes: Vec::new() }
    }

    /// An operand.
    pub(super) fn read(&mut self, at: Pointer, dtype: DType, dims: &[usize]) -> Option<ValueId> {
        let (name, ty) = (self.reads.len().to_string(), TensorType::new(dtype, dims));
        self.reads.push(at);
        self.op(Op::Input(Input { name, ty }), &[])
    }

    pub(super) fn unary(&mut self, f: UnaryFn, x: ValueId) -> Option<ValueId> {
        self.op(Op::Unary(f), &[x])
    }

    pub(super) fn binary(&mut self, f: BinaryFn, a: ValueId, b: ValueId) -> Option<ValueId> {
        self.op(Op::Binary(f), &[a, b])
    }

    /// The value in this dtype.
    pub(super) fn cast(&mut self, x: ValueId, to: DType) -> Option<ValueId> {
        if self.body.ty(x).dtype == to { Some(x) } else { self.op(Op::Cast(Cast { to }), &[x]) }
    }

    /// The sums of all columns of a matrix, in this dtype.
    pub(super) fn sum_columns(&mut self, x: ValueId, dtype: DType) -> Option<ValueId> {
        let ty = self.body.ty(x);
        let (n, dtype) = (*ty.shape.0.last()?, (dtype != ty.dtype).then_some(dtype));
        self.op(Op::SumTo(SumTo { shape: [n].into(), dtype }), &[x])
    }

    fn op(&mut self, op: Op, operands: &[ValueId]) -> Option<ValueId> {
        let added = self.body.add(op, operands, Origin::none(), Region::Forward);
        added.ok()?.first().copied()
    }

    /// A result.
    pub(super) fn write(&mut self, value: ValueId, at: Pointer) {
        self.body.add_output(&self.writes.len().to_string(), value, OutputKind::Result);
        self.writes.push(at);
    }

    /// Its launch. Equal bodies are one kernel.
    pub(super) fn launch(self, a: &mut Assembler<'_>, kind: FusionKind) -> Launch {
        let Generated { body, reads, writes } = self;
        let all = &mut a.selected.generated;
        let known = all.iter().position(|known| *known == (body.clone(), kind));
        let index = known.unwrap_or_else(|| {
            all.push((body, kind));
            all.len() - 1
        });
        Launch::Generated(GeneratedLaunch { kernel: KernelId(index), reads, writes, scratch: None })
    }
}
