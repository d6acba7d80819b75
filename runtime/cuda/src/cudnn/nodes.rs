//! Graphs of matmuls, pointwise functions and reductions, independent of cuDNN's descriptors.

use frit_ir::DType;
use frit_ir::plan::Strided;

/// A graph: tensors, and what computes them, in an order in which everything is computed before it is read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nodes {
    /// Operands, results, and what lies between them.
    pub tensors: Vec<Tensor>,
    /// What is computed.
    pub nodes: Vec<Node>,
}

/// A tensor of a graph, of four axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its type, sizes and strides.
    pub shape: Strided,
    /// Where its elements are.
    pub place: Place,
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// Where the operation's tensor of this number is.
    Memory(usize),
    /// Nowhere: it is only read by other nodes.
    Between,
    /// One number that the host passes.
    Value(f32),
}

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it does.
    pub function: Function,
    /// The tensors it reads, by number.
    pub from: Vec<usize>,
    /// The tensor it makes.
    pub to: usize,
}

/// The operation of a node, in f32 unless noted. Axes of one element are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Matmul over the last two axes; heads of the first share those of the second where it has fewer.
    MatMul,
    /// The same elements with other sizes and strides: element `i`, `j` of the last two axes is `j`, `i`.
    Transpose,
    /// The sum over the axes of which the result has fewer: all, or neighbors.
    Sum,
    /// The greatest over the axes of which the result has one.
    Max,
    /// a + b.
    Add,
    /// a · b.
    Mul,
    /// a / b.
    Div,
    /// a − b.
    Sub,
    /// eᵃ.
    Exp,
    /// The natural logarithm.
    Log,
    /// Whether a ≥ b.
    AtLeast,
    /// The place on this axis, an i32.
    Index(usize),
    /// a where c is true, otherwise b.
    Select,
}

impl Function {
    /// The number of a pointwise function (`cudnnPointwiseMode_t`).
    pub(super) fn pointwise(self) -> Option<i32> {
        Some(match self {
            Function::Add => 0,
            Function::Mul => 1,
            Function::Div => 6,
            Function::Sub => 9,
            Function::Exp => 13,
            Function::Log => 15,
            Function::AtLeast => 303,
            Function::Index(_) => 501,
            Function::Select => 601,
            Function::MatMul | Function::Transpose | Function::Sum | Function::Max => return None,
        })
    }

    /// Its compute dtype.
    pub(super) fn precision(self) -> DType {
        match self {
            Function::AtLeast => DType::Bool,
            Function::Index(_) => DType::I32,
            _ => DType::F32,
        }
    }
}

impl Nodes {
    /// A tensor in memory.
    pub(super) fn memory(&mut self, index: usize, shape: Strided) -> usize {
        self.tensor(shape, Place::Memory(index))
    }

    /// A number.
    pub(super) fn value(&mut self, value: f32) -> usize {
        self.tensor(Strided::dense(DType::F32, &[1; 4]), Place::Value(value))
    }

    /// The result of a function, as a virtual tensor.
    pub(super) fn make(&mut self, function: Function, from: &[usize], shape: &Strided) -> usize {
        let to = self.tensor(shape.clone(), Place::Between);
        self.write(function, from, to);
        to
    }

    /// The result of a function, as a tensor in memory.
    pub(super) fn write(&mut self, function: Function, from: &[usize], to: usize) {
        self.nodes.push(Node { function, from: from.into(), to });
    }

    fn tensor(&mut self, shape: Strided, place: Place) -> usize {
        self.tensors.push(Tensor { shape, place });
        self.tensors.len() - 1
    }
}
